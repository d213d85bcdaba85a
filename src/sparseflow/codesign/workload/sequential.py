"""A chain of modules as a model to partition."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sparseflow.core.checks import check_at_least
from sparseflow.core.layers import PRECISIONS, LayerNode
from sparseflow.errors import ModelError, SampleError


class SequentialModel:
    """An `nn.Sequential` as a `core.layers.LayeredModel`: each of its modules is a layer.

    Each module takes the output of the previous one, a tensor whose first dimension is the batch. FLOPs are
    those that `torch.utils.flop_counter` counts, and at least one per element of the output. Bytes are those
    of the weights, the input and the output of a module, without intermediate results inside it. The planner
    may split the columns of an `nn.Linear`; other modules are not split.

    Args:
        modules: The model, in evaluation mode. It is not copied.
        sample: A batch of any size, which determines the shapes.

    Raises:
        ModelError: The model is empty or in training mode.
        SampleError: The sample is empty.
    """

    def __init__(self, modules: nn.Sequential, sample: Tensor) -> None:
        if modules.training:
            raise ModelError("the model is in training mode; call `model.eval()` first")
        if not len(modules):
            raise ModelError("the model has no modules")
        if not sample.ndim or not len(sample):
            raise SampleError("the sample is empty; pass a batch of at least one sample")
        self.modules = modules
        self._sample = sample[:1]
        self._nodes: dict[int, tuple[LayerNode, ...]] = {}

    def describe_layers(self, batch_size: int) -> tuple[LayerNode, ...]:
        """Costs of the modules, in order; runs the model once for each batch size.

        Raises:
            InputError: `batch_size` is not an integer of at least 1.
            ModelError: A module does not map a tensor to a tensor of the same batch size.
        """
        check_at_least(1, batch_size=batch_size)
        if batch_size not in self._nodes:
            self._nodes[batch_size] = tuple(self._make_nodes(batch_size))
        return self._nodes[batch_size]

    def _make_nodes(self, batch_size: int) -> list[LayerNode]:
        nodes: list[LayerNode] = []
        x = self._sample.expand(batch_size, *self._sample.shape[1:]).contiguous()
        for index, (name, module) in enumerate(self.modules.named_children()):
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                y = module(x)
            if not isinstance(y, Tensor) or not y.ndim or len(y) != batch_size:
                raise ModelError(
                    f"the module {name} ({type(module).__name__}) must return one tensor with the batch size "
                    f"{batch_size} as its first dimension"
                )
            precision = str(y.dtype).removeprefix("torch.")
            if precision not in PRECISIONS:
                raise ModelError(
                    f"the module {name} returns {precision}; expected one of {', '.join(PRECISIONS)}"
                )
            weight_bytes = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
            is_linear = isinstance(module, nn.Linear)
            nodes.append(
                LayerNode(
                    id=index, name=name, layer_type="head" if index == len(self.modules) - 1 else "mlp",
                    flops=float(max(counter.get_total_flops(), y.numel())),
                    bytes=float(weight_bytes + x.nbytes + y.nbytes),
                    weight_bytes=weight_bytes, memory_bytes=weight_bytes + x.nbytes + y.nbytes,
                    seq_len=y[0, ..., 0].numel() if y.ndim > 1 else 1, embed_dim=y.shape[-1], num_heads=0,
                    mlp_ratio=0.0, precision=precision, batch_size=batch_size,
                    traffic_in_bytes=x.nbytes, traffic_out_bytes=y.nbytes,
                    splittable=is_linear, units=y.shape[-1] if is_linear else 0,
                    split_in_bytes=x.nbytes if is_linear else 0, split_out_bytes=y.nbytes if is_linear else 0,
                    split_joins=is_linear,
                )
            )  # fmt: skip
            x = y
        return nodes

    def initial_state(self, samples: Tensor) -> dict[str, Tensor]:
        """Input state of the first layer."""
        return {"x": samples}

    def run_layer(self, layer: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run a module and return its output state."""
        output = self.modules[layer](state["x"])
        return {"logits" if layer == len(self.modules) - 1 else "x": output}

    def get_layer(self, layer: int) -> nn.Module:
        """The module of a layer."""
        return self.modules[layer]

    def unit_importance(self, layer: int) -> Tensor:
        """Norm of the weights of each column of a linear layer, [units]."""
        module = self.modules[layer]
        assert isinstance(module, nn.Linear), "only linear layers are split"
        return module.weight.detach().norm(dim=1)

    def replace_layer(self, layer: int, module: nn.Module) -> None:
        """Replace the module of a layer."""
        self.modules[layer] = module

    def select_layers(self, layers: Sequence[int], device: torch.device | str) -> SequentialModel:
        """Return a copy on `device` that holds and runs only the given layers."""
        selected = copy.copy(self)
        selected.modules = nn.Sequential(
            *(
                copy.deepcopy(module) if index in layers else nn.Identity()
                for index, module in enumerate(self.modules)
            )
        ).to(device)
        return selected
