"""Safetensors files of VideoViT models, with the architecture in the metadata."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import torch

from sparseflow.core.artifact import Artifact
from sparseflow.errors import FileFormatError
from sparseflow.pruning.compaction.compact import list_units, resize_blocks
from sparseflow.pruning.model.config import VideoViTConfig
from sparseflow.pruning.model.video_vit import VideoViT

_MAX_COMPACTION = 1000
"""Largest ratio of the parameters before compaction to those in a file."""


class VideoViTHeader(Artifact):
    """Architecture of a saved model.

    Attributes:
        model: Constructor arguments of `VideoViT`.
        units: Heads and channels of each block of a compact model; None for other models.
    """

    FORMAT: ClassVar[str] = "sparseflow.pruning.video-vit"
    VERSION: ClassVar[int] = 2
    HINT: ClassVar[str] = "train one with `sparseflow pruning train`"

    model: dict[str, Any]
    units: tuple[tuple[int, int], ...] | None


def save_model(model: VideoViT, path: Path | str) -> None:
    """Write a model, compact or not, to a safetensors file.

    Raises:
        OSError: The file cannot be written.
    """
    units = tuple(list_units(model)) if model.compacted else None
    VideoViTHeader(model=model.to_dict(), units=units).save_tensors(Path(path), model.state_dict())


def load_model(path: Path | str, *, device: torch.device | str = "cpu") -> VideoViT:
    """Read a file of `save_model` and return the model in evaluation mode.

    Raises:
        InputError: The file does not exist.
        FileFormatError: The file has another format, or is damaged.
    """
    header, weights = VideoViTHeader.load_tensors(path)
    try:
        architecture = {item.name for item in fields(VideoViTConfig)}
        described = VideoViTConfig(
            **{name: value for name, value in header.model.items() if name in architecture}
        ).num_parameters
        stored = sum(tensor.numel() for tensor in weights.values())
        # Compaction removes part of the described parameters.
        if described > _MAX_COMPACTION * stored:
            raise ValueError(f"it describes {described:.3g} parameters and contains {stored:.3g}")
        model = VideoViT(**header.model)
        if header.units is not None:
            model = resize_blocks(model, list(header.units))
        # Gates and token orders of former files are not in the pruner.
        former = ("gates.", "order")
        weights = {f"pruner.{name}" if name.startswith(former) else name: weights[name] for name in weights}
        mismatched = sorted(set(model.state_dict()) ^ set(weights))
        if mismatched:
            raise ValueError(f"`{mismatched[0]}` is not in both the file and the described architecture")
        model.to(weights["head.weight"].dtype).load_state_dict(weights)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        text = " ".join(str(error).split()) or repr(error)
        raise FileFormatError(f"{path} is damaged: {text}; {VideoViTHeader.HINT}") from error
    return model.to(device).eval()
