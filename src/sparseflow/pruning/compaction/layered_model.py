"""A VideoViT layer by layer: what another wing plans for, cuts into parts, and runs on several devices.

Layers are `embed` (patches and their places), for each block that is left `blocks.i.attention` (the stage
before it, where there is one, its norm, attention and the sum) and `blocks.i.perceptron`, and `head` (pool,
norm and classifier). All of them, one after the other, do what `model(clips)` does.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from sparseflow.core.layers import LayerNode
from sparseflow.errors import ModelError
from sparseflow.pruning.compaction.layer_costs import Costs, held_by
from sparseflow.pruning.model.blocks import Attention, Block, Perceptron
from sparseflow.pruning.model.video_vit import VideoViT
from sparseflow.pruning.selectors.tokens import Tokens

_MODULES = {"embed": "patch", "attention": "attention", "mlp": "perceptron", "head": "head"}
"""Kind of layer -> what the module that a split replaces is called."""


class Steps:
    """A `core.layers.LayeredModel`.

    Args:
        model: In evaluation mode, with nothing that is only masked: dense, or what `compact` gave. It is not
            copied: `replace` changes it.

    Raises:
        ModelError: The model is in training mode, has gates, or only masks what its stages drop; or its
            weights are of several dtypes.
    """

    def __init__(self, model: VideoViT) -> None:
        if model.training:
            raise ModelError("the model is in training mode; call its `eval()` first")
        if model.gates is not None:
            raise ModelError("the model has gates that are still learning: `compact` it first")
        masked = model.ast is not None and model.ast.stages and model.ast.selector != "tome"
        if masked and not model.compacted:
            raise ModelError("the model only masks what its stages drop: `compact` it first")
        self.model = model
        self._costs = Costs(model)

    def describe_layers(self, batch: int) -> tuple[LayerNode, ...]:
        """Layers, in order, for batches of this size.

        Raises:
            InputError: `batch` is not a whole number of at least 1.
        """
        return self._costs.nodes(batch)

    def initial_state(self, samples: Tensor) -> dict[str, Tensor]:
        """The state before the first layer.

        Raises:
            SampleError: Clips do not fit the model; see `VideoViT.forward`.
        """
        return {"samples": self.model.checked(samples)}

    def run_layer(self, layer: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state after a layer."""
        model, this = self.model, self._costs.layers[layer]
        if this.kind == "embed":
            return {"x": model.embed(state["samples"]).x}
        if this.stages or this.kind == "head":
            tokens = self._tokens(layer, state)
            for each in this.stages:
                tokens = model.stage(tokens, each.at, {})
            if this.kind == "head":
                return {"logits": model.classify(tokens)}
            after = {name: getattr(tokens, name) for name in ("x", "place", "bias", "size")}
        else:
            after = dict(state)
        assert this.block is not None
        block = model.blocks[this.block.at]
        assert isinstance(block, Block)
        if this.kind == "attention":
            after["x"] = block.attend(after["x"], after.get("bias"))
        else:
            after["x"] = block.perceive(after["x"])
        return {name: after[name] for name in this.gives}

    def _tokens(self, layer: int, state: dict[str, Tensor]) -> Tokens:
        """A state as stages take it; places that nobody asked for are made up."""
        x, before = state["x"], self._costs.layers[layer - 1]
        place = state.get("place")
        if place is None:
            place = torch.arange(before.left, device=x.device).expand(len(x), -1)
        return Tokens(
            x=x, front=before.front, place=place, bias=state.get("bias"), size=state.get("size")
        )  # fmt: skip

    def get_layer(self, layer: int) -> nn.Module:
        """What a split replaces: attention, a perceptron, or the linear layer of patches or classes."""
        owner, name = self._where(layer)
        return getattr(owner, name)

    def unit_importance(self, layer: int) -> Tensor:
        """How much each head, channel or column counts, by its weights, [units]; larger is more."""
        module = self.get_layer(layer)
        if isinstance(module, Attention | Perceptron):
            return module.unit_importance()
        assert isinstance(module, nn.Linear), "the layer is split"
        return module.weight.detach().norm(dim=1)

    def replace_layer(self, layer: int, module: nn.Module) -> None:
        """Put another module of the same call in its place."""
        owner, name = self._where(layer)
        setattr(owner, name, module)

    def _where(self, layer: int) -> tuple[nn.Module, str]:
        this = self._costs.layers[layer]
        owner = self.model if this.block is None else self.model.blocks[this.block.at]
        return owner, _MODULES[this.kind]

    def select_layers(self, layers: Sequence[int], device: torch.device | str) -> Steps:
        """A copy that holds what these layers need, on a device, and can run no others."""
        kept = {id(each) for layer in layers for each in held_by(self.model, self._costs.layers[layer])}
        every = (each for layer in self._costs.layers for each in held_by(self.model, layer))
        # What stands in the memo is taken as copied: to nothing.
        gone = {id(each): None for each in every if id(each) not in kept}
        found = copy.copy(self)
        found.model = copy.deepcopy(self.model, gone).to(device)
        return found


def differentiable_layers(model: VideoViT, batch: int) -> tuple[LayerNode, ...]:
    """Layers of a model that is being trained, as they would be if it were compact, and its gates widths.

    Args:
        model: With gates or without.
        batch: Clips of a batch.

    Returns:
        All layers of all blocks. Operations and bytes are float32 scalars on the CPU, with gradients to the
        gates; weights, memory and traffic are those of whole blocks.

    Raises:
        InputError: `batch` is not a whole number of at least 1.
        ModelError: Weights are of several dtypes.
    """
    # On the CPU all of it: a GPU would be asked for hundreds of scalars.
    gates = {} if model.gates is None else model.gates.values(hard=False)
    gates = {grain: gate.cpu() for grain, gate in gates.items()}

    def scalar(figure: float | Tensor) -> Tensor:
        return torch.as_tensor(figure, dtype=torch.float32)

    return tuple(
        replace(each, flops=scalar(each.flops), bytes=scalar(each.bytes))
        for each in Costs(model).nodes(batch, gates)
    )
