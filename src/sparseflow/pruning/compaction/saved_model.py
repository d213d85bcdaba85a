"""A VideoViT in one file: weights as safetensors, what it is made of as JSON in their metadata."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from sparseflow.core.artifact import load_tensors, save_tensors
from sparseflow.errors import FileFormatError
from sparseflow.pruning.compaction.compact import shaped, units
from sparseflow.pruning.model.video_vit import VideoViT

_MARK = {"sparseflow": "video-vit", "version": "1"}


def save(model: VideoViT, path: Path | str) -> None:
    """Write a model, compact or not, in place of what is there.

    Raises:
        OSError: The file cannot be written.
    """

    made = {"model": model.to_dict(), "units": units(model) if model.compacted else None}
    save_tensors(path, model.state_dict(), _MARK | {"made": json.dumps(made)})


def load(path: Path | str, *, device: torch.device | str = "cpu") -> VideoViT:
    """Read a model that `save` wrote, in evaluation mode.

    Raises:
        InputError: There is no such file.
        FileFormatError: It is something else, or damaged.
    """
    metadata, weights = load_tensors(path, _MARK, "VideoViT")
    try:
        made = json.loads(metadata["made"])
        model = VideoViT(**made["model"])
        if made["units"] is not None:
            model = shaped(model, [(int(heads), int(channels)) for heads, channels in made["units"]])
        wrong = sorted(set(model.state_dict()) ^ set(weights))
        if wrong:
            raise ValueError(f"`{wrong[0]}` does not fit what it says that it is made of")
        model.to(weights["head.weight"].dtype).load_state_dict(weights)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        text = " ".join(str(error).split()) or repr(error)
        raise FileFormatError(f"{path} is not a VideoViT that can be read: {text}") from error
    return model.to(device).eval()
