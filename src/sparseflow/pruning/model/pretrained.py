"""Pretrained weights of a ViT or VideoMAE, of transformers or timm, for a VideoViT.

::

    model = build_from_pretrained("videomae-base-finetuned-kinetics/", num_frames=16, num_classes=101)
    result = load_pretrained(model, other.state_dict())   # used and unused weights

Nothing is downloaded, only tensors are unpickled, and transformers is not needed. A VideoViT with the classes
and sizes of a VideoMAE has the same outputs; with the sizes of a ViT and one frame it has the outputs of the
ViT, and with more frames it attends to all frames at once. Clips must be normalized as in the source's
`preprocessor_config.json`.

| | ViT | VideoMAE |
| --- | --- | --- |
| patches | 2-D kernel, spread evenly over the frames of a tubelet | 3-D kernel of the same tubelets |
| positions | one per patch, resized bicubically; zeros per frame | fixed sines, computed |
| class scores | from the class token | from the mean of the tokens, normalized by `fc_norm` |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparseflow.errors import InputError
from sparseflow.pruning.model.config import ASTConfig
from sparseflow.pruning.model.hf_weights import (
    CONFIG_FILE,
    COPIED_WEIGHTS,
    KERNEL,
    VIDEOMAE,
    VIT,
    HFWeights,
    open_hf_weights,
)
from sparseflow.pruning.model.video_vit import VideoViT


@dataclass(frozen=True, kw_only=True)
class PretrainedResult:
    """Use of pretrained weights.

    Attributes:
        architecture: `"ViT"` or `"VideoMAE"`.
        used: Names of the source's weights that were copied.
        unused: Other weights of the source -> reason.
        not_loaded: Parameters of the model that keep their values.
    """

    architecture: str
    used: tuple[str, ...]
    unused: Mapping[str, str]
    not_loaded: tuple[str, ...]


def load_pretrained(
    model: VideoViT,
    source: Path | str | Mapping[str, Tensor] | nn.Module,
    *,
    config: Mapping[str, Any] | None = None,
    head: bool = True,
) -> PretrainedResult:
    """Load the weights of a ViT or a VideoMAE into a model; the model is unchanged if they do not fit.

    A VideoMAE needs `pool="mean"` and `position="joint"`, and both architectures need their `norm_eps`,
    usually 1e-12. With `pool="mean"` there is no class token, and the classifier of a ViT is not used. From a
    VideoMAE with `fc_norm` the model also takes the epsilon of that norm, 1e-5, as its `final_norm_eps`.

    Args:
        model: Model that is not compact. Its gates and score are not modified.
        source: A `.safetensors` file, a directory written by transformers (sharded or not), a `.pth` file of
            VideoMAE (read with `weights_only=True`), a module, or a state dict. Weights with the names of
            timm are also accepted; the result has the names of transformers for them.
        config: Content of `config.json`; by default the file next to the weights is read. Without a
            configuration `num_heads` cannot be checked, because no shape depends on it.
        head: Whether to load the classifier, if it has the same number of classes.

    Raises:
        InputError: The file does not exist or has other content, or the weights do not fit the model.
        FileFormatError: A file is damaged or not a safetensors file.
    """
    return _load(model, open_hf_weights(source, config), head=head)


def build_from_pretrained(
    source: Path | str | Mapping[str, Tensor] | nn.Module,
    *,
    num_frames: int,
    num_classes: int,
    use_ast_prune: bool = False,
    ast_cfg: Mapping[str, Any] | ASTConfig | None = None,
    tubelet_size: int | None = None,
    img_size: int | None = None,
    num_heads: int | None = None,
    norm_eps: float | None = None,
    pool: str | None = None,
    position: str | None = None,
    drop_rate: float = 0.0,
    attn_drop: float = 0.0,
    drop_path_rate: float = 0.0,
    config: Mapping[str, Any] | None = None,
) -> VideoViT:
    """Build a model of the size of a ViT or a VideoMAE with its weights, in evaluation mode.

    A classifier for another number of classes is not used.

    Args:
        source: See `load_pretrained`.
        num_frames: Frames of a clip.
        num_classes: Classes.
        use_ast_prune: Whether the model prunes.
        ast_cfg: See `VideoViT`.
        tubelet_size: Frames of a token; by default that of the VideoMAE, and 1 for a ViT.
        img_size: Height and width of frames; by default those of the source.
        num_heads: Heads; by default from the configuration.
        norm_eps: Epsilon of the layer norms; by default from the configuration.
        pool: See `VideoViT`; by default `"cls"` for a ViT and `"mean"` for a VideoMAE.
        position: See `VideoViT`; by default `"factored"` for a ViT and `"joint"` for a VideoMAE.
        drop_rate: See `VideoViT`.
        attn_drop: See `VideoViT`.
        drop_path_rate: See `VideoViT`.
        config: See `load_pretrained`. `num_heads`, and for a VideoMAE `img_size`, are known only from it.

    Raises:
        InputError: As for `load_pretrained`, or `num_heads` or `img_size` is unknown.
        FileFormatError: A file is damaged or not a safetensors file.
    """
    weights = open_hf_weights(source, config)
    sizes = _choose_sizes(
        weights, tubelet_size=tubelet_size, img_size=img_size, num_heads=num_heads, norm_eps=norm_eps,
        pool=pool, position=position,
    )  # fmt: skip
    model = VideoViT(
        num_frames=num_frames, num_classes=num_classes, use_ast_prune=use_ast_prune, ast_cfg=ast_cfg,
        drop_rate=drop_rate, attn_drop=attn_drop, drop_path_rate=drop_path_rate, **sizes,
    )  # fmt: skip
    _load(model, weights, head=True)
    return model.eval()


def _choose_sizes(weights: HFWeights, **overrides: Any) -> dict[str, Any]:
    """Arguments of VideoViT that the source determines, unless they are overridden (not None)."""
    is_videomae = weights.architecture == VIDEOMAE
    sizes: dict[str, Any] = {
        "tubelet_size": 1, **weights.sizes(), "num_heads": weights.num_heads, "img_size": weights.img_size,
        "norm_eps": weights.eps, "pool": "mean" if is_videomae else "cls",
        "position": "joint" if is_videomae else "factored",
    }  # fmt: skip
    sizes |= {name: value for name, value in overrides.items() if value is not None}
    for name in ("num_heads", "img_size"):
        if sizes[name] is None:
            raise InputError(
                f"`{name}` is unknown: neither the weights of {weights.source} nor a {CONFIG_FILE} give it; "
                f"pass `{name}` or `config`"
            )
    sizes["mlp_ratio"] = sizes.pop("mlp_channels") / max(1, sizes["embed_dim"])
    return sizes


def _load(model: VideoViT, weights: HFWeights, *, head: bool) -> PretrainedResult:
    _check_model(model, weights)
    converter = _WeightConverter(model, weights)
    converter.convert_patches()
    if weights.architecture == VIT:
        converter.convert_learned_positions()
    else:
        converter.convert_sine_positions()
    for index in range(len(weights.layers)):
        converter.convert_block(index)
    eps = converter.convert_norm()
    converter.convert_head(enabled=head)
    with torch.no_grad():
        model.load_state_dict(converter.converted, strict=False)
    model.norm.eps = eps
    model.config = replace(model.config, final_norm_eps=eps)
    unused = {name: "no counterpart in VideoViT" for name in weights.tensors if name not in converter.used}
    return PretrainedResult(
        architecture=weights.architecture,
        used=tuple(name for name in weights.tensors if name in converter.used),
        unused=unused | converter.unused,
        not_loaded=tuple(name for name, _ in model.named_parameters() if name not in converter.converted),
    )


def _check_model(model: VideoViT, weights: HFWeights) -> None:
    """Raise InputError unless the model has the architecture and size of the weights."""
    config, source = model.config, weights.source
    if model.compacted:
        raise InputError("the model is compact; load weights before `compact`")
    activation = weights.config.get("hidden_act", "gelu")
    if activation != "gelu":
        raise InputError(f"`hidden_act` (={activation!r}) of {source} is not supported; expected 'gelu'")
    if weights.architecture == VIDEOMAE:
        for name, required, reason in (
            ("pool", "mean", "it has no class token"),
            ("position", "joint", "its sine positions are not a sum of two embeddings"),
        ):
            if getattr(config, name) != required:
                raise InputError(
                    f"{source} is a VideoMAE and the model has {name}={getattr(config, name)!r}: set "
                    f"{name}={required!r}, because {reason}"
                )
    expected: dict[str, Any] = dict(weights.sizes())
    if weights.num_heads is not None:
        expected["num_heads"] = weights.num_heads
    expected["norm_eps"] = weights.eps
    mismatched = [
        name
        for name, value in expected.items()
        if not math.isclose(getattr(config, name), value, rel_tol=1e-6)
    ]
    if not mismatched:
        return
    source_sizes = ", ".join(f"{name}={expected[name]!r}" for name in mismatched)
    model_sizes = ", ".join(f"{name}={getattr(config, name)!r}" for name in mismatched)
    hint = " (`mlp_channels` is `embed_dim` * `mlp_ratio`)" if "mlp_channels" in mismatched else ""
    if "norm_eps" in mismatched and "layer_norm_eps" not in weights.config:
        hint += " (the default of `norm_eps`; pass `config={'layer_norm_eps': ...}` for another value)"
    raise InputError(
        f"{source} does not fit the model: it has {source_sizes}, the model has {model_sizes}{hint}. Change "
        "the model, or use `build_from_pretrained`"
    )


class _WeightConverter:
    """Converts the weights of a source, one part of the model at a time.

    Attributes:
        converted: Name in the model -> value.
        used: Names of the source's weights that were converted.
        unused: Names of the source's weights that cannot be used -> reason.
    """

    def __init__(self, model: VideoViT, weights: HFWeights) -> None:
        self.model, self.weights = model, weights
        self.state = model.state_dict()
        self.converted: dict[str, Tensor] = {}
        self.used: set[str] = set()
        self.unused: dict[str, str] = {}

    def _take(self, name: str, *shape: int) -> Tensor:
        """A weight of the source on the device of the model, at least in float32."""
        value = self.weights.tensors.get(name)
        if value is None:
            raise InputError(f"{self.weights.source} lacks `{name}`; the weights are incomplete")
        if tuple(value.shape) != shape or value.is_meta or not value.is_floating_point():
            actual = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
            raise InputError(
                f"`{name}` of {self.weights.source} is {actual}; expected floating-point numbers of shape "
                f"{list(shape)}"
            )
        self.used.add(name)
        return value.detach().to(
            self.model.head.weight.device, torch.promote_types(value.dtype, torch.float32)
        )

    def convert_patches(self) -> None:
        config, prefix = self.model.config, self.weights.prefix
        dim, frames, p = config.embed_dim, config.tubelet_size, config.patch_size
        if self.weights.architecture == VIT:
            kernel = self._take(prefix + KERNEL, dim, config.in_chans, p, p)
            kernel = kernel[:, :, None].expand(-1, -1, frames, -1, -1) / frames
        else:
            kernel = self._take(prefix + KERNEL, dim, config.in_chans, frames, p, p)
        # `VideoViT.embed` flattens a patch in the order of a kernel: channels, frames, rows, columns.
        self.converted["patch.weight"] = kernel.flatten(1)
        self.converted["patch.bias"] = self._take(prefix + KERNEL.replace("weight", "bias"), dim)

    def convert_learned_positions(self) -> None:
        """Convert the class token with its position, and a position per patch, equal in all frames."""
        config, inner = self.model.config, f"{self.weights.prefix}embeddings."
        t, h, w = config.grid
        name, dim = f"{inner}position_embeddings", config.embed_dim
        shape = list(self.weights.tensors[name].shape)
        num_positions = shape[1] if len(shape) == 3 else 0
        side = math.isqrt(max(0, num_positions - 1))
        if side < 1 or side**2 != num_positions - 1:
            raise InputError(
                f"`{name}` of {self.weights.source} has the shape {shape}; expected "
                f"[1, 1 + side * side, {dim}]: only square grids are supported"
            )
        value = self._take(name, 1, num_positions, dim)
        cls_position, space = value[:, :1], value[:, 1:]
        if (side, side) != (h, w):
            grid = space.reshape(1, side, side, dim).permute(0, 3, 1, 2)
            grid = functional.interpolate(grid, (h, w), mode="bicubic", align_corners=False)
            space = grid.flatten(2).transpose(1, 2)
        if config.position == "joint":
            self.converted["position"] = space[:, None].expand(-1, t, -1, -1)
        else:
            self.converted["position_space"] = space[:, None]
            self.converted["position_time"] = space.new_zeros(1, t, 1, dim)
        if config.pool == "cls":
            self.converted["cls"] = cls_position + self._take(f"{inner}cls_token", 1, 1, dim)
        else:
            self.unused[f"{inner}cls_token"] = 'the model has no class token: pool="mean"'

    def convert_sine_positions(self) -> None:
        """Compute VideoMAE's fixed positions: sines in even channels, cosines in odd ones.

        Source: Vaswani et al., Attention is all you need, section 3.5, over the tokens of all frames.
        """
        t, h, w = self.model.config.grid
        dim, device = self.model.config.embed_dim, self.model.head.weight.device
        channel = torch.arange(dim, dtype=torch.float64)
        angle = torch.arange(t * h * w).double()[:, None] / 10000.0 ** (2.0 * (channel // 2) / dim)
        table = torch.where(channel % 2 == 0, angle.sin(), angle.cos()).float()
        self.converted["position"] = table.view(1, t, h * w, dim).to(device)
        name = f"{self.weights.prefix}embeddings.position_embeddings"
        if name in self.weights.tensors:
            self.unused[name] = "fixed positions are computed"

    def convert_block(self, index: int) -> None:
        names, dim = self.weights.layers[index], self.model.config.embed_dim
        for name in COPIED_WEIGHTS:
            parameter = f"blocks.{index}.{name}"
            self.converted[parameter] = self._take(names[name], *self.state[parameter].shape)
        weights = [self._take(names[f"{letter}.weight"], dim, dim) for letter in "qkv"]
        biases = [
            self._take(names[f"{letter}.bias"], dim) if f"{letter}.bias" in names else weight.new_zeros(dim)
            for letter, weight in zip("qkv", weights, strict=True)
        ]
        self.converted[f"blocks.{index}.attention.qkv.weight"] = torch.cat(weights)
        self.converted[f"blocks.{index}.attention.qkv.bias"] = torch.cat(biases)

    def convert_norm(self) -> float:
        """Convert the final norm, if there is one, and return its epsilon."""
        weights, dim = self.weights, self.model.config.embed_dim
        fc_norm = f"{weights.classifier_prefix}fc_norm"
        is_videomae = weights.architecture == VIDEOMAE
        has_fc_norm = is_videomae and f"{fc_norm}.weight" in weights.tensors
        name = fc_norm if has_fc_norm else f"{weights.prefix}layernorm"
        if is_videomae and f"{name}.weight" not in weights.tensors:
            return weights.eps  # pretrained without a final norm; fine-tuning starts with a new one
        for kind in ("weight", "bias"):
            self.converted[f"norm.{kind}"] = self._take(f"{name}.{kind}", dim)
        return weights.fc_norm_eps if has_fc_norm else weights.eps

    def convert_head(self, *, enabled: bool) -> None:
        """Convert the classifier, or record why it cannot be used."""
        weights, config = self.weights, self.model.config
        weight, bias = (f"{weights.classifier_prefix}classifier.{kind}" for kind in ("weight", "bias"))
        if weight not in weights.tensors:
            return
        num_classes = weights.tensors[bias].numel() if bias in weights.tensors else 0
        has_fc_norm = f"{weights.classifier_prefix}fc_norm.weight" in weights.tensors
        if not enabled:
            reason = "head=False"
        elif weights.architecture == VIT and config.pool != "cls":
            reason = 'it reads the class token, which the model lacks: pool="mean"'
        elif weights.architecture == VIDEOMAE and not has_fc_norm:
            reason = "it reads the first token, the model pools all tokens"
        elif num_classes != config.num_classes:
            reason = f"it has {num_classes} classes, the model {config.num_classes}"
        else:
            self.converted["head.weight"] = self._take(weight, num_classes, config.embed_dim)
            self.converted["head.bias"] = self._take(bias, num_classes)
            return
        self.unused |= {name: reason for name in (weight, bias) if name in weights.tensors}
