"""Models of Hugging Face from a folder on disk: `config.json` and weights as safetensors.

Nothing is downloaded or unpickled, and no code of the folder is run.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseflow.core.extras import require
from sparseflow.core.files import read_json
from sparseflow.errors import FileFormatError, InputError, ModelError

if TYPE_CHECKING:
    from torch import nn

CONFIG_FILE = "config.json"

_SEQUENCE, _SAMPLES = 128, 16_000
"""Default extents: tokens of a text, samples of one second of audio."""


def load_folder(folder: Path) -> nn.Module:
    """Load a model in float32 and eval mode.

    Args:
        folder: Folder as `save_pretrained` writes it.

    Raises:
        InputError: The folder or a file is missing, the weights are pickled, or the model needs code of the
            folder.
        FileFormatError: `config.json` or the weights are damaged.
        MissingExtraError: transformers is missing.
    """
    import torch

    transformers = require("transformers", "latency")
    config = folder / CONFIG_FILE
    if not config.is_file():
        raise InputError(f"{folder} is no folder of a Hugging Face model: {config} does not exist")
    record = read_json(config)
    if not isinstance(record, Mapping):
        raise FileFormatError(f"{config} must contain an object")
    if not any(folder.glob("*.safetensors")):
        raise InputError(
            f"{folder} contains no *.safetensors; pickled weights are not loaded: save the model with "
            "`model.save_pretrained(folder)`"
        )
    architecture = next(iter(record.get("architectures") or ()), None)
    model_class = getattr(transformers, str(architecture), None)
    if model_class is None or "auto_map" in record:
        raise InputError(
            f"{config} names the architecture {architecture!r}"
            f"{' with code of its own, which is not run' if 'auto_map' in record else ''}; expected a class "
            f"of transformers {transformers.__version__}"
        )
    progress_bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = model_class.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=torch.float32,
            attn_implementation="eager",
        )
    except Exception as error:
        raise FileFormatError(f"transformers cannot load {folder}: {error}") from error
    finally:
        if progress_bars:
            transformers.utils.logging.enable_progress_bar()
    if getattr(model.config, "use_cache", False):
        model.config.use_cache = False
    return model.eval()


def list_inputs(model: Any) -> dict[str, tuple[int | str, ...]]:
    """Return argument of `forward` -> extents, of which the named ones are open.

    Raises:
        ModelError: The main input is of an unknown kind.
    """
    config, arguments = model.config, inspect.signature(model.forward).parameters
    main = model.main_input_name
    if main == "input_ids":
        inputs: dict[str, tuple[int | str, ...]] = {"input_ids": ("batch", "sequence")}
        if "attention_mask" in arguments:
            inputs["attention_mask"] = ("batch", "sequence")
        if "pixel_values" in arguments and hasattr(config, "vision_config"):
            inputs["pixel_values"] = ("batch", _get_channels(config.vision_config), "height", "width")
    elif main == "pixel_values":
        inputs = {"pixel_values": ("batch", _get_channels(config), "height", "width")}
    elif main == "input_values":
        inputs = {"input_values": ("batch", "samples")}
    elif main == "input_features" and hasattr(config, "num_mel_bins"):
        inputs = {"input_features": ("batch", config.num_mel_bins, "frames")}
    else:
        raise ModelError(
            f"the shapes of the input `{main}` of {type(model).__name__} are unknown; load the model and "
            "pass it with an example"
        )
    if config.is_encoder_decoder and "decoder_input_ids" in arguments:
        inputs["decoder_input_ids"] = ("batch", "decoder_sequence")
    return inputs


def get_default_extents(model: Any) -> dict[str, int]:
    """Return the extents of the open dimensions of `list_inputs` where none are requested."""
    config = model.config
    text, vision = getattr(config, "text_config", config), getattr(config, "vision_config", config)
    positions = getattr(text, "max_position_embeddings", None) or _SEQUENCE
    size = getattr(vision, "image_size", 224)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return {
        "batch": 1,
        "sequence": min(_SEQUENCE, positions),
        "decoder_sequence": 1,
        "height": height,
        "width": width,
        "samples": _SAMPLES,
        "frames": 2 * getattr(config, "max_source_positions", 1500),
    }


def make_example(name: str, shape: tuple[int, ...]) -> Any:
    """Create a tensor for an argument: ones for token ids and masks, else normally distributed."""
    import torch

    if name.endswith(("_ids", "_mask")):
        return torch.ones(shape, dtype=torch.int64)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _get_channels(config: Any) -> int:
    return getattr(config, "num_channels", 3)
