"""A VideoViT in one file: weights as safetensors, what it is made of as JSON in their metadata."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from sparseflow.core.files import write_atomic
from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.compact import shaped, units
from sparseflow.pruning.video_vit import VideoViT

_MARK = {"sparseflow": "video-vit", "version": "1"}


def save(model: VideoViT, path: Path | str) -> None:
    """Write a model, compact or not, in place of what is there.

    Raises:
        OSError: The file cannot be written.
    """
    from safetensors.torch import save as serialize

    made = {"model": model.to_dict(), "units": units(model) if model.compacted else None}
    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    write_atomic(Path(path), serialize(weights, metadata=_MARK | {"made": json.dumps(made)}))


def load(path: Path | str, *, device: torch.device | str = "cpu") -> VideoViT:
    """Read a model that `save` wrote, in evaluation mode.

    Raises:
        InputError: There is no such file.
        FileFormatError: It is something else, or damaged.
    """
    from safetensors import SafetensorError, safe_open

    file = Path(path)
    if not file.is_file():
        raise InputError(f"there is no file {file}")
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            if any(metadata.get(name) != value for name, value in _MARK.items()):
                raise FileFormatError(f"{file} holds no VideoViT of this version of SparseFlow")
            made = json.loads(metadata["made"])
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        model = VideoViT(**made["model"])
        if made["units"] is not None:
            model = shaped(model, [(int(heads), int(channels)) for heads, channels in made["units"]])
        wrong = sorted(set(model.state_dict()) ^ set(weights))
        if wrong:
            raise ValueError(f"`{wrong[0]}` does not fit what it says that it is made of")
        model.to(weights["head.weight"].dtype).load_state_dict(weights)
    except FileFormatError:
        raise
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        text = " ".join(str(error).split()) or repr(error)
        raise FileFormatError(f"{file} is not a VideoViT that can be read: {text}") from error
    return model.to(device).eval()
