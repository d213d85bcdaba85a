"""Families of transformers that `patch` supports, and the protocol for others.

Models are recognized by the names of their classes, so that neither transformers nor timm is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import nn

from sparseflow.errors import InputError

Grid = tuple[int, int, int]
"""Tokens in time, rows and columns; images have one token in time."""


class PatchAdapter(Protocol):
    """What `patch` has to know about a transformer.

    Tokens are prefix tokens (class token, registers), then the tokens of the grid, row by row and frame by
    frame. The number of prefix tokens is the difference between the tokens of a block and those of the grid.

    Attributes:
        name: Name of the family.
        tubes: Whether a stage must keep the same patches of all frames, because the blocks attend over time
            and space in turn. The tokens of a patch then follow each other, frame by frame.
    """

    @property
    def name(self) -> str: ...

    @property
    def tubes(self) -> bool: ...

    def list_blocks(self, encoder: nn.Module) -> Sequence[nn.Module]:
        """List the blocks in their order; the first argument of a block is its tokens, [B, S, C]."""
        ...

    def get_projection(self, encoder: nn.Module) -> nn.Module:
        """Return the convolution of patches; its output has the shape [B, C, (T,) rows, columns]."""
        ...

    def get_input_shape(self, encoder: nn.Module) -> tuple[int, ...]:
        """Shape of the usual input without the batch: [channels, height, width] or [frames, ...]."""
        ...

    def measure_grid(self, encoder: nn.Module, shape: Sequence[int]) -> Grid:
        """Compute the grid from the shape of the projection's output."""
        ...

    def get_position_bias(self, block: nn.Module) -> nn.Module | None:
        """Return the module of a block that computes a bias on attention between all tokens, or None."""
        ...


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """Description of a family of transformers by the names of its modules; a `PatchAdapter`.

    Attributes:
        name: Name of the family.
        blocks: Path of the blocks in the encoder.
        projection: Path of the patch convolution in the encoder.
        package: Python package of the classes.
        encoder: Class of the module with the blocks and the embeddings.
        heads: Classes around the encoder that accept any number of tokens. Other classes of the same library
            are refused, because they expect one feature for each patch.
        refused: Class of a module around the encoder that may not be called.
        tubes: See `PatchAdapter`.
    """

    name: str
    blocks: str
    projection: str
    package: str = ""
    encoder: str = ""
    heads: tuple[str, ...] = ()
    refused: str = ""
    tubes: bool = False

    def matches(self, module: nn.Module) -> bool:
        """Whether a module is an encoder of this family."""
        return any(
            cls.__name__ == self.encoder and cls.__module__.startswith(f"{self.package}.")
            for cls in type(module).__mro__
        )

    def list_blocks(self, encoder: nn.Module) -> list[nn.Module]:
        """See `PatchAdapter`."""
        return list(encoder.get_submodule(self.blocks).children())

    def get_projection(self, encoder: nn.Module) -> nn.Module:
        """See `PatchAdapter`."""
        return encoder.get_submodule(self.projection)

    def get_input_shape(self, encoder: nn.Module) -> tuple[int, ...]:
        """See `PatchAdapter`; reads the configuration of transformers, or the patch embedding of timm.

        Raises:
            InputError: The encoder has neither.
        """
        config: Any = getattr(encoder, "config", None)
        size = getattr(config, "image_size", None) or getattr(config, "crop_size", None)
        frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None)
        if config is None:
            size = getattr(getattr(encoder, "patch_embed", None), "img_size", None)
        if size is None:
            raise InputError(
                f"the size of images of {type(encoder).__name__} is unknown; pass an `adapter` with it"
            )
        height, width = (size, size) if isinstance(size, int) else size
        channels = getattr(self.get_projection(encoder), "in_channels", 3)
        return (channels, height, width) if frames is None else (frames, channels, height, width)

    def measure_grid(self, encoder: nn.Module, shape: Sequence[int]) -> Grid:
        """See `PatchAdapter`; with `tubes` the convolution has one image for each frame."""
        if self.tubes:
            return encoder.config.num_frames, shape[-2], shape[-1]  # pyright: ignore
        return (shape[-3] if len(shape) == 5 else 1), shape[-2], shape[-1]

    def get_position_bias(self, block: nn.Module) -> nn.Module | None:
        """See `PatchAdapter`; the bias of BEiT, [1, H, tokens, tokens]."""
        return getattr(block, "relative_position_bias", None)


def _transformers_family(
    name: str, module: str, encoder: str, heads: tuple[str, ...] = (), **fields: Any
) -> ModelFamily:
    values: dict[str, Any] = {"blocks": "layers", "projection": "embeddings.patch_embeddings.projection"}
    values |= fields
    return ModelFamily(
        name=name, package=f"transformers.models.{module}", encoder=encoder, heads=heads, **values
    )


_DINOV2: dict[str, Any] = {"blocks": "encoder.layer"}
_CLIP: dict[str, Any] = {"blocks": "encoder.layers", "projection": "embeddings.patch_embedding"}
_TIMM: dict[str, Any] = {"blocks": "blocks", "projection": "patch_embed.proj"}

FAMILIES: tuple[ModelFamily, ...] = (
    _transformers_family("ViT", "vit", "ViTModel", ("ViTForImageClassification",)),
    _transformers_family(
        "DeiT", "deit", "DeiTModel", ("DeiTForImageClassification", "DeiTForImageClassificationWithTeacher")
    ),
    _transformers_family("DINOv2", "dinov2", "Dinov2Model", ("Dinov2ForImageClassification",), **_DINOV2),
    _transformers_family(
        "DINOv2 with registers", "dinov2_with_registers", "Dinov2WithRegistersModel",
        ("Dinov2WithRegistersForImageClassification",), **_DINOV2,
    ),
    _transformers_family(
        "DINOv3", "dinov3_vit", "DINOv3ViTModel", blocks="model.layer",
        projection="embeddings.patch_embeddings",
    ),
    _transformers_family(
        "CLIP", "clip", "CLIPVisionModel",
        ("CLIPModel", "CLIPVisionModelWithProjection", "CLIPForImageClassification"), **_CLIP,
    ),
    _transformers_family(
        "SigLIP", "siglip", "SiglipVisionModel", ("SiglipModel", "SiglipForImageClassification"), **_CLIP
    ),
    _transformers_family("BEiT", "beit", "BeitModel", ("BeitForImageClassification",)),
    _transformers_family(
        "VideoMAE", "videomae", "VideoMAEModel", ("VideoMAEForVideoClassification",), blocks="encoder.layer"
    ),
    _transformers_family("ViViT", "vivit", "VivitModel", ("VivitForVideoClassification",)),
    _transformers_family(
        "TimeSformer", "timesformer", "TimesformerModel", ("TimesformerForVideoClassification",),
        blocks="encoder.layer", tubes=True,
    ),
    _transformers_family(
        "V-JEPA 2", "vjepa2", "VJEPA2Encoder", ("VJEPA2Model", "VJEPA2ForVideoClassification"),
        blocks="layer", projection="embeddings.patch_embeddings.proj", refused="VJEPA2Predictor",
    ),
    ModelFamily(
        name="timm ViT and DeiT", package="timm.models", encoder="VisionTransformer", **_TIMM
    ),
    ModelFamily(name="timm EVA", package="timm.models", encoder="Eva", **_TIMM),
)  # fmt: skip


class PatchTarget(NamedTuple):
    """Encoder of a model, its adapter, and the modules that may not be called when it is patched."""

    encoder: nn.Module
    adapter: PatchAdapter
    refused: Sequence[nn.Module]


def find_encoder(model: nn.Module, adapter: PatchAdapter | None = None) -> PatchTarget:
    """Find the encoder of a model.

    Args:
        model: Encoder, or a model that contains one.
        adapter: Adapter of the model; by default the family is recognized.

    Raises:
        InputError: There is no encoder of a known family, there are several, or a class around it needs the
            features of all patches.
    """
    if adapter is not None:
        return PatchTarget(model, adapter, ())
    encoders = [
        (path, module, family)
        for path, module in model.named_modules()
        for family in FAMILIES
        if family.matches(module)
    ]
    if not encoders:
        raise InputError(
            f"{type(model).__name__} contains no supported transformer. Supported: "
            f"{', '.join(family.name for family in FAMILIES)}. For other models pass `adapter`, for example "
            "`sparseflow.pruning.ModelFamily(name=..., blocks=..., projection=...)`"
        )
    if len(encoders) > 1:
        raise InputError(
            f"{type(model).__name__} contains {len(encoders)} transformers: "
            f"{', '.join(f'`{path}`' for path, _, _ in encoders)}; patch one of them"
        )
    path, encoder, family = encoders[0]
    _check_heads(model, path, family)
    refused = [module for module in model.modules() if type(module).__name__ == family.refused]
    return PatchTarget(encoder, family, refused)


def _check_heads(model: nn.Module, path: str, family: ModelFamily) -> None:
    """Raise InputError if a class of the encoder's library around it may need one feature for each patch."""
    names = path.split(".") if path else []
    library = family.package.partition(".")[0]
    for depth in range(len(names)):
        cls = type(model.get_submodule(".".join(names[:depth])))
        if cls.__module__.partition(".")[0] == library and cls.__name__ not in family.heads:
            raise InputError(
                f"{cls.__name__} is not supported: it may need the features of all patches. Supported around "
                f"{family.encoder}: {', '.join(family.heads) or 'no class'}. Patch the transformer inside "
                f"(`{path}`) if any number of tokens is accepted"
            )
