"""Images of requests: from data URLs to pixels, with their size known before anything large is made.

Nothing is fetched from the network: a server that follows a stranger's addresses can be sent anywhere.
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
"""Of images that are taken; of a moving one, the first picture."""

_HEAD = re.compile(r"data:(?P<type>[^,;]{0,100})(?P<rest>(;[^,;]{0,100}){0,8}),", re.IGNORECASE)


def decode(url: str, limits: RequestLimits, param: str | None = None) -> Tensor:
    """The pixels of an image.

    Args:
        url: A data URL with base64.
        limits: Its bytes and pixels are checked against these before it is decoded.
        param: The field that it comes from, for errors.

    Returns:
        Red, green and blue, turned upright as its EXIF data say, on white where it is transparent: [3,
        height, width] uint8.

    Raises:
        Refusal: 400; the address is no such URL, or what it holds is too large or no sound image.
    """
    return decode_file(_content(url, limits, param), limits, param)


def decode_file(content: bytes, limits: RequestLimits, param: str | None = None) -> Tensor:
    """The pixels of an image's file; the other arguments, and what it gives and raises, as of `decode`."""
    if len(content) > limits.image_bytes:
        raise _too_large(f"it has {len(content)} bytes, and {limits.image_bytes} are the most", param)
    if not content:
        raise invalid("the image is empty", param, code="invalid_image")
    image_module: Any = require("PIL.Image", "adaptive")
    # Pillow's decoders raise nearly everything on damaged data, MemoryError not excluded; whatever it is,
    # this image cannot be used and nothing else is wrong.
    try:
        with image_module.open(io.BytesIO(content), formats=FORMATS) as image:
            width, height = image.size
            _check_pixels(width, height, limits, param)
            return _pixels(image)
    except ApiError:
        raise
    except (image_module.DecompressionBombError, image_module.DecompressionBombWarning) as error:
        raise _too_large(f"it has more than {limits.image_pixels} pixels", param) from error
    except image_module.UnidentifiedImageError as error:
        raise invalid(
            f"the image is none of {', '.join(FORMATS)}; send one of these", param, code="invalid_image"
        ) from error
    except Exception as error:
        reason = str(error).strip()[:200] or type(error).__name__
        raise invalid(f"the image is damaged: {reason}", param, code="invalid_image") from error


def _content(url: str, limits: RequestLimits, param: str | None) -> bytes:
    head = _HEAD.match(url)
    if head is None:
        scheme = url.partition(":")[0][:16]
        raise invalid(
            "images must be data URLs, as data:image/png;base64,…; nothing is fetched from the network (it "
            f"begins with {scheme!r})",
            param, code="invalid_image_url",
        )  # fmt: skip
    if not head["rest"].lower().endswith(";base64"):
        raise invalid(
            "a data URL of an image must say ;base64 before the comma", param, code="invalid_image_url"
        )
    if head["type"] and not head["type"].lower().startswith("image/"):
        raise invalid(
            f"a data URL of {head['type']!r} is no image; use image/png or the like",
            param,
            code="invalid_image_url",
        )
    length = len(url) - head.end()
    if length * 3 // 4 - 2 > limits.image_bytes:
        raise _too_large(
            f"it has about {length * 3 // 4} bytes, and {limits.image_bytes} are the most", param
        )
    try:
        return base64.b64decode(url[head.end() :].encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise invalid(f"the image is not base64: {error}"[:200], param, code="invalid_base64") from error


def _check_pixels(width: int, height: int, limits: RequestLimits, param: str | None) -> None:
    if width * height > limits.image_pixels:
        raise _too_large(
            f"it is {width}×{height}, and {limits.image_pixels} pixels are the most; send a smaller one",
            param,
        )


def _pixels(image: Image) -> Tensor:
    operations = require("PIL.ImageOps", "adaptive")
    image.load()
    upright = operations.exif_transpose(image)
    if upright.mode.startswith("I"):
        # Sixteen bits of grey, which Pillow would cut off at 255.
        grey = np.asarray(upright).astype(np.float64) / 257.0
        array = np.repeat(np.clip(grey.round(), 0, 255).astype(np.uint8)[..., None], 3, axis=2)
    else:
        if upright.has_transparency_data:
            white = require("PIL.Image", "adaptive").new("RGBA", upright.size, "white")
            upright = require("PIL.Image", "adaptive").alpha_composite(white, upright.convert("RGBA"))
        array = np.array(upright.convert("RGB"))
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()


def _too_large(why: str, param: str | None) -> ApiError:
    return invalid(f"the image is too large: {why}", param, code="image_too_large")
