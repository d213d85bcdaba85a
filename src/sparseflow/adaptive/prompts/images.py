"""Decoding of image data URLs, with the size checked before decoding.

Remote URLs are rejected: fetching them would allow server-side request forgery.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sparseflow.adaptive.prompts.messages import ApiError, RequestLimits, invalid
from sparseflow.core.extras import require

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Accepted image formats; the first frame of an animation is used."""

_HEAD = re.compile(r"data:(?P<type>[^,;]{0,100})(?P<rest>(;[^,;]{0,100}){0,8}),", re.IGNORECASE)


def decode(url: str, limits: RequestLimits, param: str | None = None) -> Tensor:
    """Decode the image of a data URL.

    Args:
        url: Base64 data URL.
        limits: Maximum bytes and pixels, checked before decoding.
        param: Field of the request, for errors.

    Returns:
        RGB pixels [3, height, width] uint8, rotated by the EXIF orientation, on a white background.

    Raises:
        ApiError: 400; the URL is not a base64 data URL, or the image is too large or damaged.
    """
    return decode_file(_decode_base64(url, limits, param), limits, param)


def decode_file(content: bytes, limits: RequestLimits, param: str | None = None) -> Tensor:
    """Decode the content of an image file; see `decode`."""
    if len(content) > limits.image_bytes:
        raise _make_size_error(f"{len(content)} bytes, the limit is {limits.image_bytes}", param)
    if not content:
        raise invalid("the image is empty", param, code="invalid_image")
    image_module: Any = require("PIL.Image", "adaptive")
    # Pillow decoders raise many exception types on damaged data, including MemoryError.
    try:
        with image_module.open(io.BytesIO(content), formats=FORMATS) as image:
            width, height = image.size
            _check_pixels(width, height, limits, param)
            return _load_pixels(image)
    except ApiError:
        raise
    except (image_module.DecompressionBombError, image_module.DecompressionBombWarning) as error:
        raise _make_size_error(f"more than {limits.image_pixels} pixels", param) from error
    except image_module.UnidentifiedImageError as error:
        raise invalid(
            f"unknown image format; send one of {', '.join(FORMATS)}", param, code="invalid_image"
        ) from error
    except Exception as error:
        reason = str(error).strip()[:200] or type(error).__name__
        raise invalid(f"the image is damaged: {reason}", param, code="invalid_image") from error


def _decode_base64(url: str, limits: RequestLimits, param: str | None) -> bytes:
    head = _HEAD.match(url)
    if head is None:
        scheme = url.partition(":")[0][:16]
        raise invalid(
            "images must be base64 data URLs such as data:image/png;base64,…; remote URLs are not fetched "
            f"(scheme: {scheme!r})",
            param, code="invalid_image_url",
        )  # fmt: skip
    if not head["rest"].lower().endswith(";base64"):
        raise invalid(
            "the data URL of an image must have ;base64 before the comma", param, code="invalid_image_url"
        )
    if head["type"] and not head["type"].lower().startswith("image/"):
        raise invalid(
            f"the data URL has type {head['type']!r}; expected an image type such as image/png",
            param,
            code="invalid_image_url",
        )
    length = len(url) - head.end()
    if length * 3 // 4 - 2 > limits.image_bytes:
        raise _make_size_error(f"about {length * 3 // 4} bytes, the limit is {limits.image_bytes}", param)
    try:
        return base64.b64decode(url[head.end() :].encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise invalid(f"the image is not base64: {error}"[:200], param, code="invalid_base64") from error


def _check_pixels(width: int, height: int, limits: RequestLimits, param: str | None) -> None:
    if width * height > limits.image_pixels:
        raise _make_size_error(
            f"{width}×{height} pixels, the limit is {limits.image_pixels}; send a smaller image",
            param,
        )


def _load_pixels(image: Image) -> Tensor:
    operations = require("PIL.ImageOps", "adaptive")
    image.load()
    upright = operations.exif_transpose(image)
    if upright.mode.startswith("I"):
        # 16-bit grayscale: Pillow would clip it at 255.
        grey = np.asarray(upright).astype(np.float64) / 257.0
        array = np.repeat(np.clip(grey.round(), 0, 255).astype(np.uint8)[..., None], 3, axis=2)
    else:
        if upright.has_transparency_data:
            white = require("PIL.Image", "adaptive").new("RGBA", upright.size, "white")
            upright = require("PIL.Image", "adaptive").alpha_composite(white, upright.convert("RGBA"))
        array = np.array(upright.convert("RGB"))
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()


def _make_size_error(reason: str, param: str | None) -> ApiError:
    return invalid(f"the image is too large: {reason}", param, code="image_too_large")
