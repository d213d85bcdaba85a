"""Trained weights for a VideoViT: those of a ViT or a VideoMAE, as Hugging Face's transformers keeps them.

::

    model = video_vit_for("videomae-base-finetuned-kinetics/", num_frames=16, num_classes=101)
    loaded = load_pretrained(model, other.state_dict())   # what was taken, what was left

Nothing is downloaded or unpickled, and transformers is not needed. A VideoViT of a VideoMAE's classes and
sizes scores as that one does. One of a ViT does so with a single frame, and takes in all frames at once with
more. Clips must be normalised as the source's `preprocessor_config.json` says.

| | ViT | VideoMAE |
| --- | --- | --- |
| patches | a 2-D kernel, spread evenly over the frames of a tubelet | a 3-D kernel of the same tubelets |
| positions | one a patch, interpolated where sizes differ (bicubic); zeros a frame | fixed sines, computed |
| class scores | from the class token | from the mean of the tokens, normalised by `fc_norm` |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparseflow.errors import InputError
from sparseflow.pruning.model.config import ASTConfig
from sparseflow.pruning.model.hf_weights import CONFIG, KERNEL, PLAIN, VIDEOMAE, VIT, Source, understood
from sparseflow.pruning.model.video_vit import VideoViT

_FC_NORM_EPS = 1e-5
"""transformers leaves `fc_norm` torch's own, whatever `layer_norm_eps` says."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What became of trained weights.

    Attributes:
        architecture: `"ViT"` or `"VideoMAE"`.
        taken: Weights that were used, by the source's names.
        left: Weights that were not -> why.
        untouched: Parameters of the model that keep the values they had.
    """

    architecture: str
    taken: tuple[str, ...]
    left: Mapping[str, str]
    untouched: tuple[str, ...]


def load_pretrained(
    model: VideoViT,
    source: Path | str | Mapping[str, Tensor],
    *,
    config: Mapping[str, Any] | None = None,
    head: bool = True,
) -> Loaded:
    """Fill a model with the weights of a ViT or a VideoMAE; nothing is changed if they do not fit.

    A VideoMAE needs `pool="mean"` and `position="joint"`, and both need their `norm_eps`, 1e-12 as a rule.
    With `pool="mean"` there is no class token, and so a ViT's classifier is left. From a VideoMAE with
    `fc_norm` the model takes that one's epsilon too, 1e-5, as its `final_norm_eps`.

    Args:
        model: Not compact. What it prunes by, gates and score, is left as it is.
        source: A `.safetensors` file, a folder as transformers writes it, sharded or not, or a state dict.
        config: What `config.json` would say of a state dict; by default the one beside the file is read.
            Without either, `num_heads` cannot be checked: it does not show in the weights.
        head: Whether to take the classifier, if it has as many classes.

    Raises:
        InputError: There is no such file, or it holds something else, or what does not fit the model.
        FileFormatError: A file is damaged, or no safetensors.
    """
    return _load(model, understood(source, config), head=head)


def video_vit_for(
    source: Path | str | Mapping[str, Tensor],
    *,
    num_frames: int,
    num_classes: int,
    use_ast_prune: bool = False,
    ast_cfg: Mapping[str, Any] | ASTConfig | None = None,
    tubelet_size: int | None = None,
    config: Mapping[str, Any] | None = None,
    **others: Any,
) -> VideoViT:
    """A model of the size of a ViT or a VideoMAE, with its weights, in evaluation mode.

    A ViT gives one with `pool="cls"`, a VideoMAE one with `pool="mean"` and `position="joint"`. A classifier
    for another number of classes is left out.

    Args:
        source: See `load_pretrained`.
        num_frames: Frames of a clip.
        num_classes: Classes.
        use_ast_prune: Whether anything is pruned.
        ast_cfg: See `VideoViT`.
        tubelet_size: Frames of a token; by default VideoMAE's own, and 1 for a ViT.
        config: See `load_pretrained`. Heads, and a VideoMAE's `img_size`, are known from it alone.
        others: More arguments of `VideoViT`, such as `drop_path_rate`, another `img_size`, or `num_heads`.

    Raises:
        InputError: As for `load_pretrained`, or `num_heads` or `img_size` is not known.
        FileFormatError: A file is damaged, or no safetensors.
    """
    found = understood(source, config)
    sizes = found.sizes()
    channels, dim = sizes.pop("channels"), sizes["embed_dim"]
    ratio = channels / max(1, dim)
    made: dict[str, Any] = {
        "mlp_ratio": ratio, "tubelet_size": 1, "norm_eps": found.eps, "num_heads": found.heads,
        "img_size": found.img_size, "pool": "cls",
    } | sizes  # fmt: skip
    if found.architecture == VIDEOMAE:
        made |= {"pool": "mean", "position": "joint"}
    if tubelet_size is not None:
        made["tubelet_size"] = tubelet_size
    made |= others
    for name in ("num_heads", "img_size"):
        if made[name] is None:
            raise InputError(
                f"`{name}` does not show in the weights of {found.where}, nor in a {CONFIG}: give `{name}`, "
                "or `config`"
            )
    model = VideoViT(
        num_frames=num_frames, num_classes=num_classes, use_ast_prune=use_ast_prune, ast_cfg=ast_cfg, **made
    )
    _load(model, found, head=True)
    return model.eval()


def _load(model: VideoViT, source: Source, *, head: bool) -> Loaded:
    _check(model, source)
    filling = _Filling(model, source)
    filling.patches()
    if source.architecture == VIT:
        filling.learned_positions()
    else:
        filling.sines()
    for at in range(len(source.layers)):
        filling.block(at)
    eps = filling.norm()
    filling.head(head)
    with torch.no_grad():
        model.load_state_dict(filling.found, strict=False)
    model.norm.eps = eps
    model.config = replace(model.config, final_norm_eps=eps)
    left = {name: "VideoViT has no place for it" for name in source.tensors if name not in filling.taken}
    return Loaded(
        architecture=source.architecture,
        taken=tuple(name for name in source.tensors if name in filling.taken),
        left=left | filling.left,
        untouched=tuple(name for name, _ in model.named_parameters() if name not in filling.found),
    )


def _check(model: VideoViT, source: Source) -> None:
    """Raise unless the model is of the kind and size that the weights are of."""
    ours, where = model.config, source.where
    if model.compacted:
        raise InputError("the model is compact: load weights before `compact`")
    act = source.config.get("hidden_act", "gelu")
    if act != "gelu":
        raise InputError(
            f"{where} was trained with `hidden_act` {act!r}; VideoViT has exact GELU, `gelu`, alone"
        )
    if source.architecture == VIDEOMAE:
        for name, needed, why in (
            ("pool", "mean", "it has no class token"),
            ("position", "joint", "its positions are sines over all tokens, no sum of two embeddings"),
        ):
            if getattr(ours, name) != needed:
                raise InputError(
                    f"{where} is a VideoMAE and the model has {name}={getattr(ours, name)!r}: construct it "
                    f"with {name}={needed!r}, since {why}"
                )
    wanted: dict[str, Any] = dict(source.sizes())
    if source.heads is not None:
        wanted["num_heads"] = source.heads
    wanted["norm_eps"] = source.eps
    wrong = [
        name for name, value in wanted.items() if not math.isclose(getattr(ours, name), value, rel_tol=1e-6)
    ]
    if not wrong:
        return
    theirs = ", ".join(f"{name}={wanted[name]!r}" for name in wrong)
    mine = ", ".join(f"{name}={getattr(ours, name)!r}" for name in wrong)
    hint = " (`channels` are `embed_dim` * `mlp_ratio`)" if "channels" in wrong else ""
    if "norm_eps" in wrong and "layer_norm_eps" not in source.config:
        hint += " (`norm_eps` as a rule; where it is another, tell by `config={'layer_norm_eps': …}`)"
    raise InputError(
        f"{where} does not fit the model: it has {theirs}, and the model has {mine}{hint}. Construct the "
        "model with what the weights have, or by `video_vit_for`"
    )


class _Filling:
    """What a model is to be filled with, gathered weight by weight.

    Attributes:
        state: The model's own weights.
        found: The model's name -> value.
        taken: The source's names that went into it.
        left: The source's names that did not, where there is a reason to tell.
    """

    def __init__(self, model: VideoViT, source: Source) -> None:
        self.model, self.source = model, source
        self.state = model.state_dict()
        self.found: dict[str, Tensor] = {}
        self.taken: set[str] = set()
        self.left: dict[str, str] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """A weight of the source, in float32 at least, where the model is."""
        value = self.source.tensors.get(name)
        if value is None:
            raise InputError(f"{self.source.where} lacks `{name}`: its weights are not complete")
        if tuple(value.shape) != shape or value.is_meta or not value.is_floating_point():
            given = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
            raise InputError(
                f"`{name}` of {self.source.where} is {given}; expected floating-point numbers {list(shape)}, "
                "by its other weights and the model"
            )
        self.taken.add(name)
        return value.detach().to(
            self.model.head.weight.device, torch.promote_types(value.dtype, torch.float32)
        )

    def patches(self) -> None:
        config, prefix = self.model.config, self.source.prefix
        dim, frames, p = config.embed_dim, config.tubelet_size, config.patch_size
        if self.source.architecture == VIT:
            kernel = self.take(prefix + KERNEL, dim, config.in_chans, p, p)
            kernel = kernel[:, :, None].expand(-1, -1, frames, -1, -1) / frames
        else:
            kernel = self.take(prefix + KERNEL, dim, config.in_chans, frames, p, p)
        # `VideoViT.embed` flattens a patch as (channels, frames, rows, columns): as a kernel is.
        self.found["patch.weight"] = kernel.flatten(1)
        self.found["patch.bias"] = self.take(prefix + KERNEL.replace("weight", "bias"), dim)

    def learned_positions(self) -> None:
        """A class token with its position, and a position for each patch, the same in all frames."""
        config, inner = self.model.config, f"{self.source.prefix}embeddings."
        t, h, w = config.grid
        name, dim = f"{inner}position_embeddings", config.embed_dim
        shape = list(self.source.tensors[name].shape)
        count = shape[1] if len(shape) == 3 else 0
        side = math.isqrt(max(0, count - 1))
        if side < 1 or side**2 != count - 1:
            raise InputError(
                f"`{name}` of {self.source.where} has the shape {shape}; expected "
                f"[1, 1 + rows * columns, {dim}] with as many rows as columns: other grids cannot be told"
            )
        value = self.take(name, 1, count, dim)
        token, space = value[:, :1], value[:, 1:]
        if (side, side) != (h, w):
            grid = space.reshape(1, side, side, dim).permute(0, 3, 1, 2)
            grid = functional.interpolate(grid, (h, w), mode="bicubic", align_corners=False)
            space = grid.flatten(2).transpose(1, 2)
        if config.position == "joint":
            self.found["position"] = space[:, None].expand(-1, t, -1, -1)
        else:
            self.found["position_space"] = space[:, None]
            self.found["position_time"] = space.new_zeros(1, t, 1, dim)
        if config.pool == "cls":
            self.found["cls"] = token + self.take(f"{inner}cls_token", 1, 1, dim)
        else:
            self.left[f"{inner}cls_token"] = 'the model has no class token: pool="mean"'

    def sines(self) -> None:
        """VideoMAE's positions, which its weights do not hold: computed for the model's grid, as it does."""
        t, h, w = self.model.config.grid
        table = sines(t * h * w, self.model.config.embed_dim).view(1, t, h * w, -1)
        self.found["position"] = table.to(self.model.head.weight.device)
        name = f"{self.source.prefix}embeddings.position_embeddings"
        if name in self.source.tensors:
            self.left[name] = "fixed positions are computed"

    def block(self, at: int) -> None:
        theirs, dim = self.source.layers[at], self.model.config.embed_dim
        for name in PLAIN:
            ours = f"blocks.{at}.{name}"
            self.found[ours] = self.take(theirs[name], *self.state[ours].shape)
        weights = [self.take(theirs[f"{part}.weight"], dim, dim) for part in "qkv"]
        biases = [
            self.take(theirs[f"{part}.bias"], dim) if f"{part}.bias" in theirs else weight.new_zeros(dim)
            for part, weight in zip("qkv", weights, strict=True)
        ]
        self.found[f"blocks.{at}.attention.qkv.weight"] = torch.cat(weights)
        self.found[f"blocks.{at}.attention.qkv.bias"] = torch.cat(biases)

    def norm(self) -> float:
        """The last norm, if there is one; its epsilon."""
        source, dim = self.source, self.model.config.embed_dim
        last, pooled = f"{source.prefix}layernorm", f"{source.outer}fc_norm"
        mean = f"{pooled}.weight" in source.tensors and source.architecture == VIDEOMAE
        chosen = pooled if mean else last
        if source.architecture == VIDEOMAE and f"{chosen}.weight" not in source.tensors:
            return source.eps  # trained without one, so that fine-tuning may begin with a fresh one
        for kind in ("weight", "bias"):
            self.found[f"norm.{kind}"] = self.take(f"{chosen}.{kind}", dim)
        return _FC_NORM_EPS if mean else source.eps

    def head(self, wanted: bool) -> None:
        source, config = self.source, self.model.config
        weight, bias = (f"{source.outer}classifier.{kind}" for kind in ("weight", "bias"))
        if weight not in source.tensors:
            return
        classes = source.tensors[bias].numel() if bias in source.tensors else 0
        if not wanted:
            why = "head=False"
        elif source.architecture == VIT and config.pool != "cls":
            why = 'it reads the class token, which the model has not: pool="mean"'
        elif source.architecture == VIDEOMAE and f"{source.outer}fc_norm.weight" not in source.tensors:
            why = "it reads the first token, and the model the mean of all"
        elif classes != config.num_classes:
            why = f"it has {classes} classes, and the model {config.num_classes}"
        else:
            self.found["head.weight"] = self.take(weight, classes, config.embed_dim)
            self.found["head.bias"] = self.take(bias, classes)
            return
        self.left |= {name: why for name in (weight, bias) if name in source.tensors}


def sines(tokens: int, dim: int) -> Tensor:
    """VideoMAE's positions, [tokens, dim]: sines in even channels, cosines in odd ones.

    Source: Vaswani et al., Attention is all you need, 3.5, over the tokens of all frames in a row.
    """
    channel = torch.arange(dim, dtype=torch.float64)
    angle = torch.arange(tokens, dtype=torch.float64)[:, None] / 10000.0 ** (2.0 * (channel // 2) / dim)
    return torch.where(channel % 2 == 0, angle.sin(), angle.cos()).float()
