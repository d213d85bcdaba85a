"""Layer-by-layer execution of a VideoViT, for planning, splitting and running it on several devices.

The layers are `embed` (patch embedding and positions); for each remaining block `blocks.i.attention` (with
the stage before it, the norm and the residual sum) and `blocks.i.mlp`; and `head` (pooling, norm and
classifier). Running all of them in order equals `model(clips)`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from sparseflow.core.layers import LayerNode
from sparseflow.errors import ModelError
from sparseflow.pruning.compaction.layer_costs import VideoViTCosts, list_layer_modules
from sparseflow.pruning.model.blocks import MLP, Attention, TransformerBlock
from sparseflow.pruning.model.video_vit import VideoViT
from sparseflow.pruning.selectors.tokens import TokenState

_MODULE_NAMES = {"embed": "patch", "attention": "attention", "mlp": "mlp", "head": "head"}
"""Kind of layer -> attribute of the module that a split replaces."""

_GATED = ("flops", "bytes")
"""Costs that depend on gates."""


class LayeredVideoViT:
    """A VideoViT as a `core.layers.LayeredModel`.

    Args:
        model: Dense or compact model in evaluation mode. It is not copied: `replace_layer` modifies it.

    Raises:
        ModelError: The model is in training mode, has gates, or only masks the tokens that its stages drop;
            or its weights have several dtypes.
    """

    def __init__(self, model: VideoViT) -> None:
        if model.training:
            raise ModelError("the model is in training mode; call `model.eval()` first")
        if model.gates is not None:
            raise ModelError("the model has trainable gates; call `compact` first")
        masks_tokens = model.ast is not None and model.ast.stages and model.ast.selector != "tome"
        if masks_tokens and not model.compacted:
            raise ModelError("the model masks tokens instead of dropping them; call `compact` first")
        self.model = model
        self._costs = VideoViTCosts(model)

    def describe_layers(self, batch_size: int) -> tuple[LayerNode, ...]:
        """Costs of the layers, in order, for batches of `batch_size` clips.

        Raises:
            InputError: `batch_size` is not an integer of at least 1.
        """
        return self._costs.make_nodes(batch_size)

    def initial_state(self, samples: Tensor) -> dict[str, Tensor]:
        """Input state of the first layer.

        Raises:
            SampleError: The clips do not fit the model; see `VideoViT.forward`.
        """
        return {"samples": self.model.check_clips(samples)}

    def run_layer(self, layer: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run a layer and return its output state."""
        model, description = self.model, self._costs.layers[layer]
        if description.kind == "embed":
            return {"x": model.embed(state["samples"]).x}
        if description.stages or description.kind == "head":
            tokens = self._make_token_state(layer, state)
            for stage in description.stages:
                tokens = model.apply_stage(tokens, stage.block, {})
            if description.kind == "head":
                return {"logits": model.classify(tokens)}
            output = {name: getattr(tokens, name) for name in ("x", "positions", "attn_bias", "size")}
        else:
            output = dict(state)
        assert description.block is not None
        block = model.blocks[description.block.block]
        assert isinstance(block, TransformerBlock)
        if description.kind == "attention":
            output["x"] = block.forward_attention(output["x"], output.get("attn_bias"))
        else:
            output["x"] = block.forward_mlp(output["x"])
        return {name: output[name] for name in description.outputs}

    def _make_token_state(self, layer: int, state: dict[str, Tensor]) -> TokenState:
        """Convert a state to the input of a stage; positions that no stage reads are filled with a range."""
        x, previous = state["x"], self._costs.layers[layer - 1]
        positions = state.get("positions")
        if positions is None:
            positions = torch.arange(previous.num_kept, device=x.device).expand(len(x), -1)
        return TokenState(
            x=x, num_prefix=previous.num_prefix, positions=positions, attn_bias=state.get("attn_bias"),
            size=state.get("size"),
        )  # fmt: skip

    def get_layer(self, layer: int) -> nn.Module:
        """Module that a split replaces: an attention, an MLP, or the linear layer of patches or classes."""
        owner, name = self._find_module(layer)
        return getattr(owner, name)

    def unit_importance(self, layer: int) -> Tensor:
        """Importance of each head, channel or column by its weights, [units]; larger is more important."""
        module = self.get_layer(layer)
        if isinstance(module, Attention | MLP):
            return module.unit_importance()
        assert isinstance(module, nn.Linear), "the layer is split"
        return module.weight.detach().norm(dim=1)

    def replace_layer(self, layer: int, module: nn.Module) -> None:
        """Replace the module that `get_layer` returns."""
        owner, name = self._find_module(layer)
        setattr(owner, name, module)

    def _find_module(self, layer: int) -> tuple[nn.Module, str]:
        """Owner and attribute name of the module of a layer."""
        description = self._costs.layers[layer]
        owner = self.model if description.block is None else self.model.blocks[description.block.block]
        return owner, _MODULE_NAMES[description.kind]

    def select_layers(self, layers: Sequence[int], device: torch.device | str) -> LayeredVideoViT:
        """Return a copy on `device` that holds and runs only the given layers."""
        retained = {
            id(module)
            for layer in layers
            for module in list_layer_modules(self.model, self._costs.layers[layer])
        }
        modules = (module for layer in self._costs.layers for module in list_layer_modules(self.model, layer))
        # deepcopy takes objects in its memo for copied, here to None.
        memo = {id(module): None for module in modules if id(module) not in retained}
        selected = copy.copy(self)
        selected.model = copy.deepcopy(self.model, memo).to(device)
        return selected


def make_differentiable_layers(model: VideoViT, batch_size: int) -> tuple[LayerNode, ...]:
    """Costs of the layers of a model in training as if it were compact, with gates as widths.

    Args:
        model: Model with or without gates.
        batch_size: Clips of a batch.

    Returns:
        Layers of all blocks. FLOPs and bytes are float32 scalars on the CPU, differentiable in the gates;
        weights, memory and traffic are those of full blocks.

    Raises:
        InputError: `batch_size` is not an integer of at least 1.
        ModelError: The weights have several dtypes.
    """
    # On the CPU: hundreds of scalar operations would each launch a GPU kernel.
    gates = {} if model.gates is None else model.gates.compute_gates(hard=False)
    gates = {grain: gate_values.cpu() for grain, gate_values in gates.items()}

    return tuple(
        replace(node, **{name: torch.as_tensor(getattr(node, name), dtype=torch.float32) for name in _GATED})
        for node in VideoViTCosts(model).make_nodes(batch_size, gates)
    )
