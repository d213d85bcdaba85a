"""The pretrained network and the test images shipped with the package.

A network ``<name>`` is two files under ``data/``: ``<name>.safetensors`` (weights, convolutions in float8)
and ``<name>.json`` (its card: architecture, normalization, accuracy, firing rates, training). The images are
one ``images.npz``; nothing is unpickled.
"""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Any

import numpy as np

from sparseflow.core.files import parse_json
from sparseflow.errors import FileFormatError, InputError

if TYPE_CHECKING:
    import torch

    from sparseflow.spiking.models.spiking_resnet import SpikingResNet

DEFAULT_NETWORK = "cifar10-sew-resnet18"
_CARD_FIELDS = ("network", "normalization", "test_accuracy", "correct", "test_images")


def _get_data_dir() -> Traversable:
    return files("sparseflow.spiking") / "data"


def _make_damaged_error(name: str, problem: str) -> FileFormatError:
    return FileFormatError(f"package data {name!r} {problem}; reinstall sparseflow")


def _read(name: str) -> bytes:
    try:
        return (_get_data_dir() / name).read_bytes()
    except FileNotFoundError as error:
        raise _make_damaged_error(name, "is missing") from error


def list_names() -> list[str]:
    """List the names that `load_network` accepts."""
    file_names = (f.name for f in _get_data_dir().iterdir())
    return sorted(name.removesuffix(".safetensors") for name in file_names if name.endswith(".safetensors"))


def load_card(name: str = DEFAULT_NETWORK) -> dict[str, Any]:
    """Load the card of a pretrained network.

    Returns:
        ``network`` (depth, width, T, residual, …), ``normalization`` (``mean``, ``std``), ``test_accuracy``
        with ``correct`` and ``test_images``, ``firing_rate`` by neuron, ``conv_input_density`` by
        convolution, ``seed``, ``command`` and more.

    Raises:
        InputError: The name is unknown.
        FileFormatError: The card is damaged.
    """
    names = list_names()
    if name not in names:
        raise InputError(f"unknown pretrained network {name!r}; available: {', '.join(names) or 'none'}")
    try:
        card = parse_json(_read(f"{name}.json"))
    except ValueError as error:
        raise _make_damaged_error(f"{name}.json", f"is not JSON ({error})") from error
    missing = [field for field in _CARD_FIELDS if field not in card]
    if missing:
        raise _make_damaged_error(f"{name}.json", f"lacks {', '.join(missing)}")
    return card


def load_network(name: str = DEFAULT_NETWORK) -> SpikingResNet:
    """Load a pretrained network in eval mode, float32, on the CPU, in multi-step mode.

    Args:
        name: One of `list_names()`.

    Raises:
        InputError: The name is unknown.
        FileFormatError: The files are damaged.
        MissingExtraError: spikingjelly is not installed.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load as load_tensors

    from sparseflow.spiking.models.spiking_resnet import spiking_resnet

    network = load_card(name)["network"]
    keys = ("depth", "width", "num_classes", "T", "stem", "residual")
    net = spiking_resnet(**{key: network[key] for key in keys})
    try:
        tensors = load_tensors(_read(f"{name}.safetensors"))
        # load_state_dict copies into float32 parameters, so the float8 values arrive exactly.
        net.load_state_dict(tensors)
    except (SafetensorError, RuntimeError) as error:
        raise _make_damaged_error(f"{name}.safetensors", f"does not match its card ({error})") from error
    return net.eval()


def load_images() -> tuple[np.ndarray, np.ndarray]:
    """Load 256 test images with balanced classes.

    Returns:
        ``uint8 [256, 3, 32, 32]`` (RGB) and ``int64 [256]`` labels.

    Raises:
        FileFormatError: The file is damaged.
    """
    import io
    import zipfile

    try:
        with np.load(io.BytesIO(_read("images.npz")), allow_pickle=False) as archive:
            pixels, labels = archive["images"], archive["labels"]
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise _make_damaged_error("images.npz", f"cannot be read ({error})") from error
    return pixels, labels.astype(np.int64)


def normalize(pixels: np.ndarray, name: str = DEFAULT_NETWORK) -> torch.Tensor:
    """Normalize images for a pretrained network.

    Args:
        pixels: ``uint8 [N, 3, H, W]``.
        name: The network, whose card holds the mean and the standard deviation.

    Returns:
        ``float32 [N, 3, H, W]``.
    """
    import torch

    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[1] != 3:
        raise InputError(
            f"`pixels` is {pixels.dtype} {list(pixels.shape)}; expected uint8 [N, 3, H, W] (RGB)"
        )
    normalization = load_card(name)["normalization"]
    mean = torch.tensor(normalization["mean"]).view(1, 3, 1, 1)
    std = torch.tensor(normalization["std"]).view(1, 3, 1, 1)
    return (torch.from_numpy(pixels).float() / 255 - mean) / std
