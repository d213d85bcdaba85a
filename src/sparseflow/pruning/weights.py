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

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.config import ASTConfig
from sparseflow.pruning.video_vit import VideoViT

VIT, VIDEOMAE = "ViT", "VideoMAE"
_KERNEL = "embeddings.patch_embeddings.projection.weight"
_EMBEDDINGS = {_KERNEL, _KERNEL.replace("weight", "bias")} | {
    f"embeddings.{name}" for name in ("cls_token", "mask_token", "position_embeddings")
}
_WEIGHTS, _INDEX, _CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_EPS = 1e-12
"""Of layer norms, by transformers' defaults for both."""
_FC_NORM_EPS = 1e-5
"""transformers leaves `fc_norm` torch's own, whatever `layer_norm_eps` says."""

_LAYER = re.compile(r"(?:encoder\.)?layers?\.(\d+)\.(.+)")
_ALIASES = {
    # transformers 4, and what every version writes; and what a ViT of transformers 5 has in memory.
    "attention.attention.query": "q", "attention.q_proj": "q",
    "attention.attention.key": "k", "attention.k_proj": "k",
    "attention.attention.value": "v", "attention.v_proj": "v",
    "attention.output.dense": "attention.proj", "attention.o_proj": "attention.proj",
    "intermediate.dense": "perceptron.up", "mlp.fc1": "perceptron.up",
    "output.dense": "perceptron.down", "mlp.fc2": "perceptron.down",
    "layernorm_before": "norm1", "layernorm_after": "norm2",
}  # fmt: skip
_PLACES = {
    f"{name}.{kind}": f"{ours}.{kind}" for name, ours in _ALIASES.items() for kind in ("weight", "bias")
}
# VideoMAE in transformers 4, and so in files.
_PLACES |= {"attention.attention.q_bias": "q.bias", "attention.attention.v_bias": "v.bias"}
_PLAIN = [name for name in dict.fromkeys(_PLACES.values()) if name[:2] not in ("q.", "k.", "v.")]
_NEEDED = [f"{part}.weight" for part in "qkv"] + _PLAIN


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
    return _load(model, _source(source, config), head=head)


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
    found = _source(source, config)
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
                f"`{name}` does not show in the weights of {found.where}, nor in a {_CONFIG}: give `{name}`, "
                "or `config`"
            )
    model = VideoViT(
        num_frames=num_frames, num_classes=num_classes, use_ast_prune=use_ast_prune, ast_cfg=ast_cfg, **made
    )
    _load(model, found, head=True)
    return model.eval()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Source:
    """Weights that were understood.

    Attributes:
        where: What to call them in a message.
        tensors: Name -> weight.
        config: What `config.json` says; empty without one.
        architecture: `VIT` or `VIDEOMAE`.
        prefix: What stands before the encoder's names.
        outer: What stands before the classifier's.
        layers: For each layer, our name -> theirs.
    """

    where: str
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    architecture: str
    prefix: str
    outer: str
    layers: list[dict[str, str]]

    def _told(self, name: str) -> Any:
        """A positive number of the configuration, or None."""
        value = self.config.get(name)
        if value is not None and (type(value) not in (int, float) or not value > 0):
            raise InputError(f"`{name}` (={value!r}) in the configuration of {self.where} must be positive")
        return value

    @property
    def eps(self) -> float:
        return self._told("layer_norm_eps") or _EPS

    @property
    def heads(self) -> int | None:
        return self._told("num_attention_heads")

    @property
    def img_size(self) -> int | None:
        """Height and width of frames, where they are alike and known."""
        known = self.config.get("image_size")
        if isinstance(known, (list, tuple)):
            known = known[0] if len(set(known)) == 1 else None
        if known is None and self.architecture == VIT:
            kernel = self.tensors[self.prefix + _KERNEL]
            count = self.tensors[f"{self.prefix}embeddings.position_embeddings"].numel() // max(
                1, len(kernel)
            )
            known = math.isqrt(max(0, count - 1)) * kernel.shape[-1]
        return known

    def sizes(self) -> dict[str, int]:
        """Arguments of a VideoViT that show in the weights, and `channels`."""
        dim, chans, *tubelet, height, width = self.tensors[self.prefix + _KERNEL].shape
        if height != width:
            raise InputError(
                f"{self.where} has patches of {height} x {width} pixels; VideoViT has square ones"
            )
        bias = self.tensors[self.layers[0]["perceptron.up.bias"]]
        return {
            "embed_dim": dim, "depth": len(self.layers), "patch_size": height, "in_chans": chans,
            "channels": bias.numel(), **({"tubelet_size": tubelet[0]} if tubelet else {}),
        }  # fmt: skip


def _source(source: Path | str | Mapping[str, Tensor], config: Mapping[str, Any] | None) -> _Source:
    if isinstance(source, Mapping):
        where, tensors, beside = "the state dict", source, {}
        if not all(isinstance(name, str) and isinstance(each, Tensor) for name, each in source.items()):
            raise InputError("the state dict must map names to tensors; that of a module is `.state_dict()`")
    elif isinstance(source, (str, os.PathLike)):
        where, tensors, beside = _read(Path(source))
    else:
        raise InputError(f"`source` is a {type(source).__name__}; expected a path or a module's state dict")
    return _understood(where, tensors, beside if config is None else config)


def _read(path: Path) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """What to call it, the weights of a file or a folder, and what `config.json` beside them says."""
    if not path.exists():
        raise InputError(
            f"there is no file or folder {path}. Nothing is downloaded here: get a model of the Hub by "
            f"`hf download {path} --local-dir FOLDER`, and give that folder"
        )
    file = path
    if path.is_dir():
        inside = [path / name for name in (_WEIGHTS, _INDEX) if (path / name).is_file()]
        pickled = sorted(each for each in path.iterdir() if each.suffix in _PICKLES)
        if not inside and not pickled:
            raise InputError(f"the folder {path} holds neither {_WEIGHTS} nor {_INDEX}")
        file = inside[0] if inside else pickled[0]
    if file.suffix.lower() in _PICKLES:
        raise InputError(
            f"{file} is a pickle, which may run any code when it is read; expected .safetensors. Convert it "
            "by transformers, `CLASS.from_pretrained(FOLDER).save_pretrained(NEW)` with the model's own "
            "class, and give NEW; or hand in the state dict of `torch.load(file, weights_only=True)`"
        )
    tensors = _sharded(file) if file.name.endswith(".index.json") else _file(file)
    beside = file.parent / _CONFIG
    config = _json(beside) if beside.is_file() else {}
    return str(path), tensors, config if "model_type" in config else {}


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise FileFormatError(f"{file} holds no JSON object")
    return found


def _sharded(index: Path) -> dict[str, Tensor]:
    """The weights of all files that an index names."""
    places = _json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(each, str) for each in places.values()):
        raise FileFormatError(f"{index} holds no `weight_map` of names to files")
    found: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise FileFormatError(f"{index} names {name!r}; expected a .safetensors file of the same folder")
        if not (index.parent / name).is_file():
            raise InputError(f"{index} names {name}, which is not beside it: complete the folder")
        found |= _file(index.parent / name)
    absent = sorted(places.keys() - found.keys())
    if absent:
        raise FileFormatError(f"{places[absent[0]]} lacks `{absent[0]}`, which {index} says is in it")
    return found


def _file(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise FileFormatError(f"{file} is no safetensors file that can be read: {error}") from error


def _understood(where: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> _Source:
    """Find out what weights these are, by their names and shapes."""
    kernels = [name for name in tensors if f".{name}".endswith(f".{_KERNEL}")]
    prefix = kernels[0].removesuffix(_KERNEL) if kernels else ""
    classed = f"{prefix}embeddings.cls_token" in tensors
    form = tensors[kernels[0]].ndim if len(kernels) == 1 else 0
    architecture = {(4, True): VIT, (5, False): VIDEOMAE}.get((form, classed))
    unknown = f"{where} holds neither a ViT nor a VideoMAE as transformers names them"
    if architecture is None or (classed and f"{prefix}embeddings.position_embeddings" not in tensors):
        raise InputError(
            f"{unknown}: expected one `{_KERNEL}`, with `embeddings.cls_token` (ViT) or with 5 dimensions "
            f"(VideoMAE), and got {', '.join(list(tensors)[:3]) or 'nothing'}, … What "
            "`sparseflow.pruning.save` wrote is read by `load`"
        )
    layers: dict[int, dict[str, str]] = {}
    for name in tensors:
        rest = name.removeprefix(prefix) if name.startswith(prefix) else ""
        if found := _LAYER.fullmatch(rest):
            ours = _PLACES.get(found[2])
            if ours is None:
                raise InputError(f"{unknown}: VideoViT has no place for `{name}`")
            layers.setdefault(int(found[1]), {})[ours] = name
        elif rest.startswith("embeddings.") and rest not in _EMBEDDINGS:
            raise InputError(f"{unknown}: VideoViT has no place for `{name}`")
    for at in range(max(1, len(layers))):
        absent = [each for each in _NEEDED if each not in layers.get(at, {})]
        if absent:
            theirs = next(name for name, ours in _PLACES.items() if ours == absent[0])
            raise InputError(f"{unknown}: layer {at} lacks `{theirs}`")
    return _Source(
        where=where,
        tensors=tensors,
        config=config,
        architecture=architecture,
        prefix=prefix,
        outer=re.sub(r"(^|\.)\w+\.$", r"\1", prefix),
        layers=[layers[at] for at in sorted(layers)],
    )


def _load(model: VideoViT, source: _Source, *, head: bool) -> Loaded:
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


def _check(model: VideoViT, source: _Source) -> None:
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
        found: The model's name -> value.
        taken: The source's names that went into it.
        left: The source's names that did not, where there is a reason to tell.
    """

    def __init__(self, model: VideoViT, source: _Source) -> None:
        self.model, self.source = model, source
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
            kernel = self.take(prefix + _KERNEL, dim, config.in_chans, p, p)
            kernel = kernel[:, :, None].expand(-1, -1, frames, -1, -1) / frames
        else:
            kernel = self.take(prefix + _KERNEL, dim, config.in_chans, frames, p, p)
        # `VideoViT._embed` flattens a patch as (channels, frames, rows, columns): as a kernel is.
        self.found["patch.weight"] = kernel.flatten(1)
        self.found["patch.bias"] = self.take(prefix + _KERNEL.replace("weight", "bias"), dim)

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
        state = self.model.state_dict()
        for name in _PLAIN:
            ours = f"blocks.{at}.{name}"
            self.found[ours] = self.take(theirs[name], *state[ours].shape)
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
