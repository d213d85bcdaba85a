"""The layers of a VideoViT, and what each costs: operations, bytes, memory, and the state between them.

Notation: B clips, n tokens, C features, w = heads * head_dim, M hidden channels, e bytes a number.

Between two layers goes only what later ones need: x [B, n, C]; where tokens stand, once some are gone and
another stage will ask; ToMe's bias, where the next attention will use it, and its sizes, as long as a stage
or the mean is to come.

Bytes are those of weights, of what comes in and goes out, and twice (written and read) those of what is
between norms and products: a norm's output, queries, keys and values, what heads gather, hidden channels.
Whatever can be done along with a product is taken to be. Memory is that of weights, and of the activations
that are alive together when there are most of them; attention's own scores are not, kernels keep none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparseflow.core.layers import PRECISIONS, LayerNode
from sparseflow.errors import InputError, ModelError
from sparseflow.pruning.compaction.flops import Amount, BlockPass, passes, perceptrons, products, projections
from sparseflow.pruning.model.config import BY_HEADS
from sparseflow.pruning.model.video_vit import VideoViT

PLACE_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer, whatever the batch.

    Attributes:
        name: Such as `"blocks.3.attention"`.
        kind: One of `core.layers.LAYER_TYPES`.
        block: The block that it is of, if it is of one.
        stages: What is done first; those of removed blocks fall to the next layer that is left.
        came: Tokens that come in.
        front: Tokens in front of the grid's when it ends.
        left: Tokens of the grid when it ends.
        biased: Whether attention is towards sizes.
        gives: Names of what goes on.
    """

    name: str
    kind: str
    block: BlockPass | None = None
    stages: tuple[BlockPass, ...] = ()
    came: int
    front: int
    left: int
    biased: bool = False
    gives: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return self.front + self.left

    @property
    def width(self) -> int:
        """Of heads together, or hidden channels; 0 where it has neither."""
        if self.block is None:
            return 0
        return self.block.wide if self.kind == "attention" else self.block.channels


def layers_of(model: VideoViT) -> tuple[Layer, ...]:
    """Layers of a model whose stages drop or merge tokens, in order."""
    config = model.config
    front, left = int(config.pool == "cls"), config.tokens
    found = [Layer(name="embed", kind="embed", came=0, front=front, left=left)]
    waiting: list[BlockPass] = []
    for each in passes(model, gone=True):
        if each.staged:
            waiting.append(each)
        if not each.heads:
            continue
        name = f"blocks.{each.at}"
        attention = Layer(
            name=f"{name}.attention", kind="attention", block=each, stages=tuple(waiting),
            came=front + left, front=each.front, left=each.left,
        )  # fmt: skip
        front, left, waiting = each.front, each.left, []
        found += [
            attention,
            replace(attention, name=f"{name}.perceptron", kind="mlp", stages=(), came=front + left),
        ]
    came = front + left
    if waiting:
        front, left = waiting[-1].front, waiting[-1].left
    found.append(Layer(name="head", kind="head", stages=tuple(waiting), came=came, front=front, left=left))
    return tuple(_with_state(model, found))


def _with_state(model: VideoViT, layers: list[Layer]) -> list[Layer]:
    """The same layers, each with what it gives."""
    selector = None if model.ast is None else model.ast.selector
    done, found = False, []
    for at, layer in enumerate(layers):
        later = layers[at + 1 :]
        done = done or bool(layer.stages)
        asked = any(each.stages for each in later)
        gives = ["x"]
        if asked and layer.left < model.config.tokens and selector not in BY_HEADS:
            gives.append("place")
        biased = done and selector == "tome"
        following = next((each for each in later if each.kind == "attention"), None)
        # A stage before that attention makes another.
        if biased and following is not None and not following.stages:
            gives.append("bias")
        if biased and (asked or (model.config.pool == "mean" and later)):
            gives.append("size")
        found.append(replace(layer, biased=biased, gives=tuple(gives) if later else ("logits",)))
    return found


def precision(model: VideoViT) -> torch.dtype:
    """The one dtype of its weights.

    Raises:
        ModelError: There are several, or it is none of `PRECISIONS`.
    """
    dtypes = {each.dtype for each in model.parameters()}
    if len(dtypes) != 1 or _name(next(iter(dtypes))) not in PRECISIONS:
        names = ", ".join(sorted(map(_name, dtypes)))
        raise ModelError(f"weights are of {names}; they must all be of one of: {', '.join(PRECISIONS)}")
    return dtypes.pop()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Costs:
    """Figures of a model's layers, from what it is made of now: modules may be replaced later.

    Args:
        model: One whose stages drop or merge tokens, or are going to.

    Attributes:
        layers: In order.

    Raises:
        ModelError: Its weights are of several dtypes, or of one that is none of `PRECISIONS`.
    """

    def __init__(self, model: VideoViT) -> None:
        self.layers, self.dtype = layers_of(model), precision(model)
        config = self.config = model.config
        self.selector = None if model.ast is None else model.ast.selector
        self.e = self.dtype.itemsize
        # Scores, and what ToMe adds up, are never of half precision.
        self.wide = max(4, self.e)
        self.dim, self.classes, self.total = config.embed_dim, config.num_classes, config.tokens
        self.pixels = config.num_frames * config.in_chans * config.img_size**2

    def nodes(self, batch: int, gates: Mapping[str, Tensor] | None = None) -> tuple[LayerNode, ...]:
        """What layers cost.

        Args:
            batch: B.
            gates: Grain -> gates, as `UnitGates.values` gives them. With them operations and bytes are scalar
                tensors: those of units and blocks times their gates.

        Raises:
            InputError: `batch` is not a whole number of at least 1.
        """
        if type(batch) is not int or batch < 1:
            raise InputError(f"`batch` (={batch!r}) must be a whole number of at least 1")
        found: list[LayerNode] = []
        came = batch * self.pixels * self.e
        for at, layer in enumerate(self.layers):
            found.append(self._node(at, layer, batch, came, gates or {}))
            came = found[-1].traffic_out_bytes
        return tuple(found)

    def _node(self, at: int, layer: Layer, batch: int, came: int, gates: Mapping[str, Tensor]) -> LayerNode:
        """A layer that `came` bytes come into."""
        block, weights = layer.block, self.e * self._weights(layer, layer.width)
        width: Any = layer.width
        alive: Any = 1
        if block is not None:
            grain, each = ("head", self.config.head_dim) if layer.kind == "attention" else ("channel", 1)
            if grain in gates:
                width = each * gates[grain][block.at].sum()
            alive = gates["block"][block.at] if "block" in gates else 1
        flops, passing = alive * self._flops(layer, width), alive * self._passing(layer, width)
        read = alive * self.e * self._weights(layer, width)
        stages = [self._stage(layer, number) for number in range(len(layer.stages))]
        held = max([self.e * self._held(layer), *(held for _, held in stages)])
        heads = block.heads if block is not None and layer.kind == "attention" else 0
        return LayerNode(
            id=at, name=layer.name, layer_type=layer.kind,
            flops=batch * (sum(each.stage for each in layer.stages) + flops),
            bytes=read + batch * (sum(moved for moved, _ in stages) + self.e * passing),
            weight_bytes=weights, memory_bytes=weights + batch * held, seq_len=layer.tokens,
            embed_dim=self.dim, num_heads=heads,
            mlp_ratio=layer.width / self.dim if layer.kind == "mlp" else 0.0,
            precision=_name(self.dtype), batch=batch,
            traffic_in_bytes=came, traffic_out_bytes=batch * self._state(layer), **self._split(layer, batch),
        )  # fmt: skip

    def _weights(self, layer: Layer, width: Amount) -> Amount:
        """How many a layer has."""
        c, config = self.dim, self.config
        if layer.kind == "attention":
            return 2 * c + 3 * width * (c + 1) + c * (width + 1)
        if layer.kind == "mlp":
            return 2 * c + width * (c + 1) + c * (width + 1)
        if layer.kind == "head":
            return 2 * c + self.classes * (c + 1) + 0 * width
        t, h, w = config.grid
        places = t * h * w if config.position == "joint" else t + h * w
        return c * (self.pixels // self.total + 1 + places + int(config.pool == "cls")) + 0 * width

    def _flops(self, layer: Layer, width: Amount) -> Amount:
        n, c = layer.tokens, self.dim
        if layer.kind == "attention":
            return projections(n, c, width) + products(n, width)
        if layer.kind == "mlp":
            return perceptrons(n, c, width)
        return 2 * c * (self.pixels if layer.kind == "embed" else self.classes) + 0 * width

    def _passing(self, layer: Layer, width: Amount) -> Amount:
        """Numbers that are read and written, but for weights."""
        n, c = layer.tokens, self.dim
        if layer.kind == "embed":
            return self.pixels + n * c + 0 * width
        if layer.kind == "head":
            return layer.came * c + 2 * 2 * c + self.classes + 0 * width
        between = n * c + (4 if layer.kind == "attention" else 1) * n * width
        return layer.came * c + n * c + 2 * between

    def _held(self, layer: Layer) -> int:
        """Numbers that are alive together, when there are most."""
        n, c, width = layer.tokens, self.dim, layer.width
        if layer.kind == "embed":
            return self.pixels + max(self.pixels + n * c, 3 * n * c)
        if layer.kind == "attention":
            return 3 * n * c + 4 * n * width
        if layer.kind == "mlp":
            return 2 * n * c + max(2 * n * width, n * width + n * c)
        return n * c + 2 * c + self.classes

    def _stage(self, layer: Layer, number: int) -> tuple[int, int]:
        """Bytes that a stage moves and holds; what comes in is the layer's."""
        this, c = layer.stages[number], self.dim
        before = layer.came if number == 0 else layer.stages[number - 1].tokens
        moved, held = 2 * this.tokens * c * self.e, (before + this.tokens) * c * self.e
        if self.selector == "ast":
            return moved, held + 2 * self.total * c * self.wide
        if self.selector not in BY_HEADS:
            return moved, held
        looked_at = before * (c + 3 * this.wide) * self.e
        if self.selector == "tome":
            alike = -(-before // 2) * (before // 2)
            return moved + 2 * looked_at, held + looked_at + (before * c + alike) * self.wide
        queries = 1 if self.config.pool == "cls" else before
        scores = 2 * this.heads * queries * before * self.wide
        return moved + 2 * looked_at, held + looked_at + scores

    def _state(self, layer: Layer) -> int:
        """Bytes of what goes on."""
        size = {
            "x": layer.tokens * self.dim * self.e,
            "place": layer.left * PLACE_BYTES,
            "bias": layer.tokens * self.wide,
            "size": layer.left * self.wide,
            "logits": self.classes * self.e,
        }
        return sum(size[name] for name in layer.gives)

    def _split(self, layer: Layer, batch: int) -> dict[str, Any]:
        """How it can be split."""
        c, e = self.dim, self.e
        if layer.kind == "embed":
            units, sent, back = c, self.pixels * e, self.total * c * e
        elif layer.kind == "head":
            units, sent, back = self.classes, c * e, self.classes * e
        else:
            assert layer.block is not None
            attention = layer.kind == "attention"
            units, sent = layer.block.heads if attention else layer.block.channels, layer.tokens * c * e
            back = sent
            sent += layer.tokens * self.wide if attention and layer.biased else 0
        # A stage that looks at the heads of its block looks at all of them.
        if units < 2 or (layer.kind == "attention" and layer.stages and self.selector in BY_HEADS):
            return {}
        return {
            "splittable": True, "units": units, "split_in_bytes": batch * sent,
            "split_out_bytes": batch * back, "split_joins": layer.kind in ("embed", "head"),
        }  # fmt: skip


def held_by(model: VideoViT, layer: Layer) -> list[nn.Module | Tensor]:
    """What a layer needs of a model: modules, and parameters and buffers of the model's own."""
    found: list[Any] = []
    if layer.stages:
        found += [model.score, getattr(model, "order", None)]
    if layer.kind == "embed":
        found += [model.patch, *model.parameters(recurse=False)]
    elif layer.kind == "head":
        found += [model.norm, model.head]
    elif layer.block is not None:
        block: Any = model.blocks[layer.block.at]
        attention = layer.kind == "attention"
        found += [block.norm1, block.attention] if attention else [block.norm2, block.perceptron]
    return [each for each in found if each is not None]
