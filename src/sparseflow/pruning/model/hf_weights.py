"""Weights of a ViT or a VideoMAE as transformers keeps them: read from files, and understood.

Which of the two it is, and how it is made, is found out by names and shapes, and by `config.json` where there
is one. Nothing is downloaded or unpickled.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sparseflow.errors import FileFormatError, InputError

VIT, VIDEOMAE = "ViT", "VideoMAE"
KERNEL = "embeddings.patch_embeddings.projection.weight"
_EMBEDDINGS = {KERNEL, KERNEL.replace("weight", "bias")} | {
    f"embeddings.{name}" for name in ("cls_token", "mask_token", "position_embeddings")
}
_WEIGHTS, _INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_EPS = 1e-12
"""Of layer norms, by transformers' defaults for both."""
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
PLAIN = [name for name in dict.fromkeys(_PLACES.values()) if name[:2] not in ("q.", "k.", "v.")]
"""Names of ours, in a layer, that take one weight as it is; queries, keys and values go into one together."""
_NEEDED = [f"{part}.weight" for part in "qkv"] + PLAIN


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
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
            kernel = self.tensors[self.prefix + KERNEL]
            count = self.tensors[f"{self.prefix}embeddings.position_embeddings"].numel() // max(
                1, len(kernel)
            )
            known = math.isqrt(max(0, count - 1)) * kernel.shape[-1]
        return known

    def sizes(self) -> dict[str, int]:
        """Arguments of a VideoViT that show in the weights, and `channels`."""
        dim, chans, *tubelet, height, width = self.tensors[self.prefix + KERNEL].shape
        if height != width:
            raise InputError(
                f"{self.where} has patches of {height} x {width} pixels; VideoViT has square ones"
            )
        bias = self.tensors[self.layers[0]["perceptron.up.bias"]]
        return {
            "embed_dim": dim, "depth": len(self.layers), "patch_size": height, "in_chans": chans,
            "channels": bias.numel(), **({"tubelet_size": tubelet[0]} if tubelet else {}),
        }  # fmt: skip


def understood(source: Path | str | Mapping[str, Tensor], config: Mapping[str, Any] | None) -> Source:
    """Read weights and find out what they are.

    Args:
        source: A `.safetensors` file, a folder as transformers writes it, or a state dict.
        config: What `config.json` would say; by default the one beside the file is read.

    Raises:
        InputError: There is no such file, it is a pickle, or it holds neither a ViT nor a VideoMAE.
        FileFormatError: A file is damaged, or no safetensors.
    """
    if isinstance(source, Mapping):
        where, tensors, beside = "the state dict", source, {}
        if not all(isinstance(name, str) and isinstance(each, Tensor) for name, each in source.items()):
            raise InputError("the state dict must map names to tensors; that of a module is `.state_dict()`")
    elif isinstance(source, (str, os.PathLike)):
        where, tensors, beside = _read(Path(source))
    else:
        raise InputError(f"`source` is a {type(source).__name__}; expected a path or a module's state dict")
    return _parted(where, tensors, beside if config is None else config)


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
    beside = file.parent / CONFIG
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


def _parted(where: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Source:
    """Find out what weights these are, by their names and shapes."""
    kernels = [name for name in tensors if f".{name}".endswith(f".{KERNEL}")]
    prefix = kernels[0].removesuffix(KERNEL) if kernels else ""
    classed = f"{prefix}embeddings.cls_token" in tensors
    form = tensors[kernels[0]].ndim if len(kernels) == 1 else 0
    architecture = {(4, True): VIT, (5, False): VIDEOMAE}.get((form, classed))
    unknown = f"{where} holds neither a ViT nor a VideoMAE as transformers names them"
    if architecture is None or (classed and f"{prefix}embeddings.position_embeddings" not in tensors):
        raise InputError(
            f"{unknown}: expected one `{KERNEL}`, with `embeddings.cls_token` (ViT) or with 5 dimensions "
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
    return Source(
        where=where,
        tensors=tensors,
        config=config,
        architecture=architecture,
        prefix=prefix,
        outer=re.sub(r"(^|\.)\w+\.$", r"\1", prefix),
        layers=[layers[at] for at in sorted(layers)],
    )
