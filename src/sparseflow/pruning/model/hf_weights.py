"""Weights of ViT and VideoMAE: reading files and identifying the architecture.

The architecture and its sizes follow from the names and shapes of the weights and from `config.json`, if
there is one. Nothing is downloaded, and only tensors are unpickled.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sparseflow.core.files import read_json
from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.model.timm_weights import TIMM_EPS, read_checkpoint, rename_timm_weights

VIT, VIDEOMAE = "ViT", "VideoMAE"
KERNEL = "embeddings.patch_embeddings.projection.weight"
CONFIG_FILE = "config.json"
_EMBEDDINGS = {KERNEL, KERNEL.replace("weight", "bias")} | {
    f"embeddings.{name}" for name in ("cls_token", "mask_token", "position_embeddings")
}
_WEIGHTS_FILE, _INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_PICKLE_SUFFIXES = (".bin", ".pt", ".ckpt", ".pkl", ".pickle")
_CHECKPOINT_SUFFIX = ".pth"
_DEFAULT_EPS = 1e-12
"""Default epsilon of layer norms in transformers, for both architectures."""
_FC_NORM_EPS = 1e-5
"""transformers keeps torch's default epsilon for `fc_norm`, whatever `layer_norm_eps` is."""
_LAYER_NAME = re.compile(r"(?:encoder\.)?layers?\.(\d+)\.(.+)")
_MODULE_NAMES = {
    # transformers 4 and all files; and a ViT of transformers 5 in memory.
    "attention.attention.query": "q", "attention.q_proj": "q",
    "attention.attention.key": "k", "attention.k_proj": "k",
    "attention.attention.value": "v", "attention.v_proj": "v",
    "attention.output.dense": "attention.proj", "attention.o_proj": "attention.proj",
    "intermediate.dense": "mlp.up", "mlp.fc1": "mlp.up",
    "output.dense": "mlp.down", "mlp.fc2": "mlp.down",
    "layernorm_before": "norm1", "layernorm_after": "norm2",
}  # fmt: skip
_WEIGHT_NAMES = {
    f"{hf_name}.{kind}": f"{name}.{kind}"
    for hf_name, name in _MODULE_NAMES.items()
    for kind in ("weight", "bias")
}
# VideoMAE in transformers 4, and therefore in files.
_WEIGHT_NAMES |= {"attention.attention.q_bias": "q.bias", "attention.attention.v_bias": "v.bias"}
COPIED_WEIGHTS = [
    name for name in dict.fromkeys(_WEIGHT_NAMES.values()) if name[:2] not in ("q.", "k.", "v.")
]
"""Weights of a block that are copied unchanged; queries, keys and values are concatenated."""
_REQUIRED_WEIGHTS = [f"{letter}.weight" for letter in "qkv"] + COPIED_WEIGHTS


@dataclass(frozen=True, kw_only=True, eq=False)
class HFWeights:
    """Weights of an identified architecture.

    Attributes:
        source: Name of the source for messages.
        tensors: Name -> weight.
        config: Content of `config.json`; empty without one.
        architecture: `VIT` or `VIDEOMAE`.
        prefix: Prefix of the encoder's names.
        classifier_prefix: Prefix of the classifier's names.
        layers: For each layer, name in VideoViT -> name in the source.
        has_timm_names: Whether the source has the names of timm; `tensors` has those of transformers.
    """

    source: str
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    architecture: str
    prefix: str
    classifier_prefix: str
    layers: list[dict[str, str]]
    has_timm_names: bool = False

    def _get_config_number(self, name: str) -> Any:
        """A positive number of the configuration, or None."""
        value = self.config.get(name)
        if value is not None and (type(value) not in (int, float) or not value > 0):
            raise InputError(f"`{name}` (={value!r}) in the configuration of {self.source} must be positive")
        return value

    @property
    def eps(self) -> float:
        default = TIMM_EPS if self.has_timm_names else _DEFAULT_EPS
        return self._get_config_number("layer_norm_eps") or default

    @property
    def fc_norm_eps(self) -> float:
        return self.eps if self.has_timm_names else _FC_NORM_EPS

    @property
    def num_heads(self) -> int | None:
        return self._get_config_number("num_attention_heads")

    @property
    def img_size(self) -> int | None:
        """Height and width of frames; None if they are unknown or differ."""
        size = self.config.get("image_size")
        if isinstance(size, (list, tuple)):
            size = size[0] if size and all(side == size[0] for side in size) else None
        if size is None and self.architecture == VIT:
            kernel = self.tensors[self.prefix + KERNEL]
            positions = self.tensors[f"{self.prefix}embeddings.position_embeddings"]
            num_positions = positions.numel() // max(1, len(kernel))
            size = math.isqrt(max(0, num_positions - 1)) * kernel.shape[-1]
        return size

    def sizes(self) -> dict[str, int]:
        """Constructor arguments of VideoViT that follow from the shapes, and `mlp_channels`."""
        dim, chans, *tubelet, height, width = self.tensors[self.prefix + KERNEL].shape
        if height != width:
            raise InputError(f"{self.source} has {height} x {width} patches; VideoViT needs square patches")
        bias = self.tensors[self.layers[0]["mlp.up.bias"]]
        return {
            "embed_dim": dim, "depth": len(self.layers), "patch_size": height, "in_chans": chans,
            "mlp_channels": bias.numel(), **({"tubelet_size": tubelet[0]} if tubelet else {}),
        }  # fmt: skip


def open_hf_weights(
    source: Path | str | Mapping[str, Tensor] | nn.Module, config: Mapping[str, Any] | None
) -> HFWeights:
    """Read weights and identify their architecture.

    Args:
        source: A `.safetensors` file, a `.pth` file of VideoMAE, a directory written by transformers, a
            module, or a state dict.
        config: Content of `config.json`; by default the file next to the weights is read.

    Raises:
        InputError: The file does not exist, is a pickle, or is neither a ViT nor a VideoMAE.
        FileFormatError: A file is damaged or not a safetensors file.
    """
    if isinstance(source, nn.Module):
        module_config: Any = getattr(source, "config", None)
        if config is None and hasattr(module_config, "to_dict"):
            config = module_config.to_dict()
        source = source.state_dict()
    if isinstance(source, Mapping):
        name, tensors, file_config = "the state dict", source, {}
        if not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in source.items()):
            raise InputError("the state dict must map names to tensors; pass `module.state_dict()`")
    elif isinstance(source, (str, os.PathLike)):
        name, tensors, file_config = _read_source(Path(source))
    else:
        raise InputError(f"`source` is a {type(source).__name__}; expected a path, a module or a state dict")
    return _identify(name, tensors, file_config if config is None else config)


def _read_source(path: Path) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """Name, weights and `config.json` of a file or a directory."""
    if not path.exists():
        raise InputError(
            f"{path} does not exist. Models are not downloaded automatically: run "
            f"`hf download {path} --local-dir DIR` and pass DIR"
        )
    file = path
    if path.is_dir():
        candidates = [path / name for name in (_WEIGHTS_FILE, _INDEX_FILE) if (path / name).is_file()]
        pickles = sorted(file for file in path.iterdir() if file.suffix in _PICKLE_SUFFIXES)
        if not candidates and not pickles:
            raise InputError(f"{path} contains neither {_WEIGHTS_FILE} nor {_INDEX_FILE}")
        file = candidates[0] if candidates else pickles[0]
    if file.suffix.lower() in _PICKLE_SUFFIXES:
        raise InputError(
            f"{file} is a pickle, which can run arbitrary code; expected .safetensors. Convert it with "
            "transformers, `CLASS.from_pretrained(DIR).save_pretrained(NEW_DIR)` with the class of the "
            "model, or pass the state dict of `torch.load(file, weights_only=True)`"
        )
    if file.suffix.lower() == _CHECKPOINT_SUFFIX:
        tensors = read_checkpoint(file)
    else:
        tensors = _read_shards(file) if file.name.endswith(".index.json") else _read_safetensors(file)
    config_file = file.parent / CONFIG_FILE
    config = _read_json_object(config_file) if config_file.is_file() else {}
    return str(path), tensors, config if "model_type" in config else {}


def _read_json_object(file: Path) -> dict[str, Any]:
    content = read_json(file)
    if not isinstance(content, dict):
        raise FileFormatError(f"{file} must contain a JSON object, got {type(content).__name__}")
    return content


def _read_shards(index: Path) -> dict[str, Tensor]:
    """Weights of all files listed in an index."""
    files = _read_json_object(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise FileFormatError(f"{index} has no `weight_map` from names to files")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(files.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise FileFormatError(
                f"{index} lists {name!r}; expected a .safetensors file of the same directory"
            )
        if not (index.parent / name).is_file():
            raise InputError(f"{index} lists {name}, which is missing; download it into the directory")
        tensors |= _read_safetensors(index.parent / name)
    absent = sorted(files.keys() - tensors.keys())
    if absent:
        raise FileFormatError(f"{files[absent[0]]} lacks `{absent[0]}`, which {index} lists")
    return tensors


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise FileFormatError(f"{file} is not a readable safetensors file: {error}") from error


def _identify(source: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> HFWeights:
    """Identify the architecture by the names and shapes of the weights."""
    renamed = rename_timm_weights(tensors)
    has_timm_names = renamed is not None
    tensors = tensors if renamed is None else renamed
    kernels = [name for name in tensors if f".{name}".endswith(f".{KERNEL}")]
    prefix = kernels[0].removesuffix(KERNEL) if kernels else ""
    has_cls_token = f"{prefix}embeddings.cls_token" in tensors
    kernel_ndim = tensors[kernels[0]].ndim if len(kernels) == 1 else 0
    architecture = {(4, True): VIT, (5, False): VIDEOMAE}.get((kernel_ndim, has_cls_token))
    if architecture is None or (has_cls_token and f"{prefix}embeddings.position_embeddings" not in tensors):
        raise InputError(
            f"{source} is neither a ViT nor a VideoMAE of transformers or timm: expected one `{KERNEL}`, "
            "with `embeddings.cls_token` (ViT) or with 5 dimensions (VideoMAE), got "
            f"{', '.join(list(tensors)[:3]) or 'no tensors'}. Files of `save_model` are read by `load_model`"
        )
    return HFWeights(
        source=source,
        tensors=tensors,
        config=config,
        architecture=architecture,
        prefix=prefix,
        classifier_prefix=re.sub(r"(^|\.)\w+\.$", r"\1", prefix),
        layers=_map_layers(source, tensors, prefix),
        has_timm_names=has_timm_names,
    )


def _map_layers(source: str, tensors: Mapping[str, Tensor], prefix: str) -> list[dict[str, str]]:
    """For each layer, map the names of VideoViT to the names of the source."""
    layers: dict[int, dict[str, str]] = {}
    for name in tensors:
        suffix = name.removeprefix(prefix) if name.startswith(prefix) else ""
        if match := _LAYER_NAME.fullmatch(suffix):
            weight_name = _WEIGHT_NAMES.get(match[2])
            if weight_name is None:
                raise InputError(f"`{name}` of {source} has no counterpart in VideoViT")
            layers.setdefault(int(match[1]), {})[weight_name] = name
        elif suffix.startswith("embeddings.") and suffix not in _EMBEDDINGS:
            raise InputError(f"`{name}` of {source} has no counterpart in VideoViT")
    for index in range(max(1, len(layers))):
        absent = [name for name in _REQUIRED_WEIGHTS if name not in layers.get(index, {})]
        if absent:
            hf_name = next(hf_name for hf_name, name in _WEIGHT_NAMES.items() if name == absent[0])
            raise InputError(f"layer {index} of {source} lacks `{hf_name}`")
    return [layers[index] for index in sorted(layers)]
