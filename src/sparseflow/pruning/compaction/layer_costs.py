"""Costs of the layers of a VideoViT: FLOPs, bytes, memory, and the state between layers.

Notation: B clips, n tokens, C features, w = num_heads * head_dim, M hidden channels, e bytes per element.

The state between two layers has only what later layers need: x [B, n, C]; token positions, if tokens were
dropped and another stage follows; ToMe's attention bias, if the next attention uses it; ToMe's sizes, if
another stage or mean pooling follows.

Bytes are the weights, inputs and outputs, plus twice (write and read) the intermediate results between norms
and matrix products: normalized tokens, queries, keys and values, attention outputs and hidden channels.
Element-wise operations count as fused with a product. Memory is the weights plus the largest set of live
activations; attention scores are excluded because fused kernels do not store them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from sparseflow.core.checks import check_at_least
from sparseflow.core.layers import PRECISIONS, LayerNode
from sparseflow.errors import ModelError
from sparseflow.pruning.compaction.flops import (
    BlockWork,
    attention_flops,
    list_block_work,
    mlp_flops,
    projection_flops,
)
from sparseflow.pruning.model.config import ATTENTION_SELECTORS
from sparseflow.pruning.model.video_vit import VideoViT

_POSITION_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class VideoViTLayer:
    """One layer of a VideoViT, independent of the batch size.

    Attributes:
        name: Such as `"blocks.3.attention"`.
        kind: One of `core.layers.LAYER_TYPES`.
        block: Work of its block; None for embedding and head.
        stages: Stages that run before the layer, including those of removed blocks before it.
        num_inputs: Tokens of the input.
        num_prefix: Prefix tokens of the output.
        num_kept: Grid tokens of the output.
        has_size_bias: Whether attention is biased by ToMe's token sizes.
        outputs: Names of the entries of the output state.
    """

    name: str
    kind: str
    block: BlockWork | None = None
    stages: tuple[BlockWork, ...] = ()
    num_inputs: int
    num_prefix: int
    num_kept: int
    has_size_bias: bool = False
    outputs: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.num_prefix + self.num_kept

    @property
    def width(self) -> int:
        """Width of all heads together, or hidden channels; 0 for layers that have neither."""
        if self.block is None:
            return 0
        return self.block.attention_width if self.kind == "attention" else self.block.channels


def list_layers(model: VideoViT) -> tuple[VideoViTLayer, ...]:
    """List the layers, in order, of a model whose stages drop or merge tokens."""
    config, num_prefix = model.config, int(model.config.pool == "cls")
    layers = [
        VideoViTLayer(
            name="embed", kind="embed", num_inputs=0, num_prefix=num_prefix, num_kept=config.num_tokens
        )
    ]  # fmt: skip
    pending_stages: list[BlockWork] = []
    for work in list_block_work(model, dropped=True):
        if work.has_stage:
            pending_stages.append(work)
        if not work.num_heads:
            continue
        attention = VideoViTLayer(
            name=f"blocks.{work.block}.attention", kind="attention", block=work, stages=tuple(pending_stages),
            num_inputs=layers[-1].num_tokens, num_prefix=work.num_prefix, num_kept=work.num_kept,
        )  # fmt: skip
        mlp = replace(
            attention, name=f"blocks.{work.block}.mlp", kind="mlp", stages=(), num_inputs=work.num_tokens
        )
        layers += [attention, mlp]
        pending_stages = []
    last = pending_stages[-1] if pending_stages else layers[-1]
    layers.append(
        VideoViTLayer(
            name="head", kind="head", stages=tuple(pending_stages), num_inputs=layers[-1].num_tokens,
            num_prefix=last.num_prefix, num_kept=last.num_kept,
        )
    )  # fmt: skip
    return tuple(_add_outputs(model, layers))


def _add_outputs(model: VideoViT, layers: list[VideoViTLayer]) -> list[VideoViTLayer]:
    """Fill in `has_size_bias` and `outputs`."""
    selector = None if model.ast is None else model.ast.selector
    any_stage, completed = False, []
    for index, layer in enumerate(layers):
        later = layers[index + 1 :]
        any_stage = any_stage or bool(layer.stages)
        stage_follows = any(other.stages for other in later)
        outputs = ["x"]
        reads_positions = selector not in (*ATTENTION_SELECTORS, "dynamic_vit")
        if stage_follows and layer.num_kept < model.config.num_tokens and reads_positions:
            outputs.append("positions")
        has_size_bias = any_stage and selector == "tome"
        next_attention = next((other for other in later if other.kind == "attention"), None)
        # A stage before that attention replaces the bias.
        if has_size_bias and next_attention is not None and not next_attention.stages:
            outputs.append("attn_bias")
        if has_size_bias and (stage_follows or (model.config.pool == "mean" and later)):
            outputs.append("size")
        completed.append(
            replace(layer, has_size_bias=has_size_bias, outputs=tuple(outputs) if later else ("logits",))
        )
    return completed


class VideoViTCosts:
    """Costs of the layers of a model, from its current architecture: modules may be replaced later.

    Args:
        model: Model whose stages drop or merge tokens, now or after compaction.

    Attributes:
        layers: Layers in order.

    Raises:
        ModelError: The weights have several dtypes, or one that is not in `PRECISIONS`.
    """

    def __init__(self, model: VideoViT) -> None:
        dtypes = {parameter.dtype for parameter in model.parameters()}
        self.precision = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        if self.precision not in PRECISIONS:
            raise ModelError(
                f"weights have the dtypes {self.precision}; expected one of {', '.join(PRECISIONS)}"
            )
        self.layers, config = list_layers(model), model.config
        self.config = config
        self.selector = None if model.ast is None else model.ast.selector
        self.element_bytes = dtypes.pop().itemsize
        # Scores and ToMe's sums are at least float32.
        self.wide_bytes = max(4, self.element_bytes)
        self.dim, self.classes, self.total = config.embed_dim, config.num_classes, config.num_tokens
        self.pixels = config.num_frames * config.in_chans * config.img_size**2

    def make_nodes(self, batch_size: int, gates: Mapping[str, Tensor] | None = None) -> tuple[LayerNode, ...]:
        """Compute the costs of all layers.

        Args:
            batch_size: B.
            gates: Grain -> gates from `UnitGates.compute_gates`. With gates, FLOPs and bytes are scalar
                tensors, weighted by the gates of units and blocks.

        Raises:
            InputError: `batch_size` is not an integer of at least 1.
        """
        check_at_least(1, batch_size=batch_size)
        nodes: list[LayerNode] = []
        input_bytes = batch_size * self.pixels * self.element_bytes
        for index, layer in enumerate(self.layers):
            nodes.append(self._make_node(index, layer, batch_size, input_bytes, gates or {}))
            input_bytes = nodes[-1].traffic_out_bytes
        return tuple(nodes)

    def _make_node(
        self, index: int, layer: VideoViTLayer, batch_size: int, input_bytes: int, gates: Mapping[str, Tensor]
    ) -> LayerNode:
        work, e = layer.block, self.element_bytes
        is_attention = layer.kind == "attention"
        width: Any = layer.width
        alive: Any = 1
        if work is not None:
            grain, unit_width = ("head", self.config.head_dim) if is_attention else ("channel", 1)
            if grain in gates:
                width = unit_width * gates[grain][work.block].sum()
            alive = gates["block"][work.block] if "block" in gates else 1
        weights, flops, activations = self._count(layer, width)
        selection_bytes = e * sum(stage.selection_weights for stage in layer.stages)
        weight_bytes = e * self._count(layer, layer.width)[0] + selection_bytes
        stages = [self._count_stage_bytes(layer, number) for number in range(len(layer.stages))]
        peak_bytes = max([e * self._count_peak_activations(layer), *(peak for _, peak in stages)])
        return LayerNode(
            id=index, name=layer.name, layer_type=layer.kind,
            flops=batch_size * (sum(stage.selection_flops for stage in layer.stages) + alive * flops),
            bytes=alive * e * weights
            + selection_bytes
            + batch_size * (sum(moved for moved, _ in stages) + alive * e * activations),
            weight_bytes=weight_bytes, memory_bytes=weight_bytes + batch_size * peak_bytes,
            seq_len=layer.num_tokens, embed_dim=self.dim,
            num_heads=work.num_heads if work is not None and is_attention else 0,
            mlp_ratio=layer.width / self.dim if layer.kind == "mlp" else 0.0,
            precision=self.precision, batch_size=batch_size,
            traffic_in_bytes=input_bytes, traffic_out_bytes=batch_size * self._count_state_bytes(layer),
            **self._describe_split(layer, batch_size),
        )  # fmt: skip

    def _count(self, layer: VideoViTLayer, width: Any) -> tuple[Any, Any, Any]:
        """Count weights, FLOPs, and elements read and written besides weights.

        Args:
            layer: The layer.
            width: Width of all heads together, or hidden channels; a tensor if gates determine it.
        """
        n, c, config = layer.num_tokens, self.dim, self.config
        if layer.kind == "embed":
            t, h, w = config.grid
            positions = t * h * w if config.position == "joint" else t + h * w
            weights = c * (self.pixels // self.total + 1 + positions + int(config.pool == "cls"))
            return weights, 2 * c * self.pixels, self.pixels + n * c
        if layer.kind == "head":
            activations = layer.num_inputs * c + 2 * 2 * c + self.classes
            return 2 * c + self.classes * (c + 1), 2 * c * self.classes, activations
        if layer.kind == "attention":
            flops = projection_flops(n, c, width) + attention_flops(n, width)
            num_inner, intermediate = 3, n * c + 4 * n * width
        else:
            flops = mlp_flops(n, c, width)
            num_inner, intermediate = 1, n * c + n * width
        weights = 2 * c + num_inner * width * (c + 1) + c * (width + 1)
        return weights, flops, layer.num_inputs * c + n * c + 2 * intermediate

    def _count_peak_activations(self, layer: VideoViTLayer) -> int:
        """Largest number of elements that are live at the same time."""
        n, c, width = layer.num_tokens, self.dim, layer.width
        if layer.kind == "embed":
            return self.pixels + max(self.pixels + n * c, 3 * n * c)
        if layer.kind == "attention":
            return 3 * n * c + 4 * n * width
        if layer.kind == "mlp":
            return 2 * n * c + max(2 * n * width, n * width + n * c)
        return n * c + 2 * c + self.classes

    def _count_stage_bytes(self, layer: VideoViTLayer, number: int) -> tuple[int, int]:
        """Bytes that a stage moves, without the input of the layer, and its peak memory."""
        stage, c, e, wide = layer.stages[number], self.dim, self.element_bytes, self.wide_bytes
        num_inputs = layer.num_inputs if number == 0 else layer.stages[number - 1].num_tokens
        moved, peak = 2 * stage.num_tokens * c * e, (num_inputs + stage.num_tokens) * c * e
        if self.selector == "ast":
            return moved, peak + 2 * self.total * c * wide
        if self.selector == "dynamic_vit":
            return moved, peak + 2 * num_inputs * c * e
        if self.selector not in ATTENTION_SELECTORS:
            return moved, peak
        projected = num_inputs * (c + 3 * stage.attention_width) * e
        if self.selector == "tome":
            similarities = -(-num_inputs // 2) * (num_inputs // 2)
            return moved + 2 * projected, peak + projected + (num_inputs * c + similarities) * wide
        num_queries = 1 if self.config.pool == "cls" else num_inputs
        scores = 2 * stage.num_heads * num_queries * num_inputs * wide
        return moved + 2 * projected, peak + projected + scores

    def _count_state_bytes(self, layer: VideoViTLayer) -> int:
        """Bytes of the output state of one clip."""
        sizes = {
            "x": layer.num_tokens * self.dim * self.element_bytes,
            "positions": layer.num_kept * _POSITION_BYTES,
            "attn_bias": layer.num_tokens * self.wide_bytes,
            "size": layer.num_kept * self.wide_bytes,
            "logits": self.classes * self.element_bytes,
        }
        return sum(sizes[name] for name in layer.outputs)

    def _describe_split(self, layer: VideoViTLayer, batch_size: int) -> dict[str, Any]:
        """Fields of a `LayerNode` about splitting; empty if the layer cannot be split."""
        c, e = self.dim, self.element_bytes
        if layer.kind == "embed":
            units, sent_bytes, returned_bytes = c, self.pixels * e, self.total * c * e
        elif layer.kind == "head":
            units, sent_bytes, returned_bytes = self.classes, c * e, self.classes * e
        else:
            assert layer.block is not None
            is_attention = layer.kind == "attention"
            units = layer.block.num_heads if is_attention else layer.block.channels
            sent_bytes = returned_bytes = layer.num_tokens * c * e
            sent_bytes += layer.num_tokens * self.wide_bytes if is_attention and layer.has_size_bias else 0
        # An attention selector reads all heads of its block.
        reads_heads = layer.kind == "attention" and layer.stages and self.selector in ATTENTION_SELECTORS
        if units < 2 or reads_heads:
            return {}
        return {
            "splittable": True, "units": units, "split_in_bytes": batch_size * sent_bytes,
            "split_out_bytes": batch_size * returned_bytes, "split_joins": layer.kind in ("embed", "head"),
        }  # fmt: skip


def list_layer_modules(model: VideoViT, layer: VideoViTLayer) -> list[nn.Module | Tensor]:
    """Modules, parameters and buffers of a model that a layer needs."""
    modules: list[Any] = []
    if layer.stages and model.pruner is not None:
        scores = model.pruner.learned_scores
        learned = [] if scores is None else [scores[str(stage.block)] for stage in layer.stages]
        modules += learned or [model.pruner]
    if layer.kind == "embed":
        modules += [model.patch, *model.parameters(recurse=False)]
    elif layer.kind == "head":
        modules += [model.norm, model.head]
    elif layer.block is not None:
        block: Any = model.blocks[layer.block.block]
        is_attention = layer.kind == "attention"
        modules += [block.norm1, block.attention] if is_attention else [block.norm2, block.mlp]
    return [module for module in modules if module is not None]
