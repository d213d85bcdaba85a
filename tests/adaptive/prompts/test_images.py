"""Images of requests."""

from __future__ import annotations

import base64
import io
import struct
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sparseflow.adaptive.prompts.images import decode
from sparseflow.adaptive.prompts.messages import ApiError, RequestLimits
from tests.adaptive.serve.fake import make_data_url

LIMITS = RequestLimits(image_bytes=200_000, image_pixels=10_000)


def picture(mode: str = "RGB", size: tuple[int, int] = (3, 2)) -> Image.Image:
    channels = len(mode) if mode in ("RGB", "RGBA", "LA", "CMYK") else 1
    values = np.arange(size[0] * size[1] * channels, dtype=np.uint8) * 5
    shape = (size[1], size[0], channels) if channels > 1 else (size[1], size[0])
    return Image.frombytes(mode, size, values.reshape(shape).tobytes())


def refused(url: str, limits: RequestLimits = LIMITS) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode(url, limits, "messages.0.content.1")
    assert (caught.value.status, caught.value.param) == (400, "messages.0.content.1")
    return caught.value


def test_a_picture_is_as_it_was() -> None:
    image = picture()
    pixels = decode(make_data_url(image), LIMITS)
    assert pixels.dtype == torch.uint8
    assert pixels.is_contiguous()
    assert torch.equal(pixels, torch.from_numpy(np.array(image)).permute(2, 0, 1))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_kinds_of_images(kind: str) -> None:
    pixels = decode(make_data_url(Image.new("RGB", (8, 4), (200, 10, 60)), kind), LIMITS)
    assert pixels.shape == (3, 4, 8)
    assert (pixels.float().mean((1, 2)) - torch.tensor([200.0, 10.0, 60.0])).abs().max() < 8


@pytest.mark.parametrize("mode", ["L", "LA", "P", "1", "RGBA"])
def test_other_modes_become_colours(mode: str) -> None:
    image = Image.new("RGB", (4, 4), (255, 255, 255)).convert(mode)
    assert torch.equal(decode(make_data_url(image), LIMITS), torch.full((3, 4, 4), 255, dtype=torch.uint8))


def test_sixteen_bits_of_grey_keep_their_shades() -> None:
    grey = Image.fromarray(np.array([[0, 257 * 100, 65535]], dtype=np.uint16))
    assert decode(make_data_url(grey), LIMITS)[:, 0].tolist() == [[0, 100, 255]] * 3


def test_what_is_transparent_is_white() -> None:
    clear = Image.new("RGBA", (2, 1), (9, 9, 9, 0))
    clear.putpixel((1, 0), (10, 20, 30, 255))
    assert decode(make_data_url(clear), LIMITS)[:, 0].T.tolist() == [[255, 255, 255], [10, 20, 30]]


def test_a_turned_photograph_is_upright() -> None:
    image = picture(size=(3, 2))
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    image.save(buffer, "PNG", exif=exif)
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    upright = torch.from_numpy(np.array(image.transpose(Image.Transpose.ROTATE_270)))
    assert torch.equal(decode(url, LIMITS), upright.permute(2, 0, 1))


@pytest.mark.parametrize(
    ("url", "code", "expected_text"),
    [
        ("https://example.org/cat.png", "invalid_image_url", "'https'"),
        ("file:///etc/passwd", "invalid_image_url", "'file'"),
        ("", "invalid_image_url", "''"),
        ("data:image/png;base64", "invalid_image_url", "'data'"),
        ("data:image/png,abc", "invalid_image_url", ";base64"),
        ("data:text/html;base64,aaaa", "invalid_image_url", "text/html"),
        ("data:image/png;base64,", "invalid_image", "empty"),
        ("data:image/png;base64,a", "invalid_base64", "not base64"),
        ("data:image/png;base64,ab cd", "invalid_base64", "not base64"),
        ("data:image/png;base64,äöü=", "invalid_base64", "not base64"),
        ("data:image/png;base64,aGVsbG8=", "invalid_image", "PNG, JPEG, WEBP, GIF"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "invalid_image", "PNG, JPEG, WEBP, GIF"),
    ],
)
def test_addresses_that_hold_no_image(url: str, code: str, expected_text: str) -> None:
    refusal = refused(url)
    assert refusal.code == code
    assert expected_text in refusal.message


def test_what_else_may_stand_in_a_data_url() -> None:
    plain = make_data_url(picture())
    for head in ("data:;base64,", "DATA:IMAGE/PNG;BASE64,", "data:image/png;name=cat.png;base64,"):
        assert torch.equal(decode(head + plain.partition(",")[2], LIMITS), decode(plain, LIMITS))


def test_too_many_pixels_are_seen_before_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    url = make_data_url(Image.new("1", (101, 100)))
    monkeypatch.setattr(
        "sparseflow.adaptive.prompts.images._load_pixels", lambda *_: pytest.fail("it was decoded")
    )
    refusal = refused(url)
    assert refusal.code == "image_too_large"
    assert "101×100" in refusal.message


def test_too_many_bytes_are_seen_before_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("base64.b64decode", lambda *_, **__: pytest.fail("it was decoded"))
    refusal = refused("data:image/png;base64," + "A" * 300_000)
    assert refusal.code == "image_too_large"
    assert "200000" in refusal.message


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> str:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    content = (
        b"\x89PNG\r\n\x1a\n"
        + head
        + b"".join(chunk(*chunk_args) for chunk_args in chunks)
        + chunk(b"IEND", b"")
    )
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


@pytest.mark.parametrize("warned", [True, False])
@pytest.mark.parametrize("side", [10_000, 20_000, 2**31 - 1])
def test_decompression_bombs(side: int, warned: bool) -> None:
    warnings.simplefilter("error" if warned else "ignore")
    bomb = png(side, side, (b"IDAT", zlib.compress(bytes(100))))
    assert refused(bomb).code in ("image_too_large", "invalid_image")


def test_a_small_image_with_a_bomb_of_text() -> None:
    text = b"Comment\0\0" + zlib.compress(bytes(20_000_000))
    refused(png(1, 1, (b"zTXt", text), (b"IDAT", zlib.compress(bytes(4)))))


def test_a_torn_image_is_refused_with_the_reason() -> None:
    head, _, content = make_data_url(picture(size=(40, 40)), "JPEG").partition(",")
    refusal = refused(f"{head},{content[: len(content) * 3 // 4 // 4 * 4]}")
    assert refusal.code == "invalid_image"
    assert "the image is damaged: " in refusal.message


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_damaged_images_are_refused_or_read(kind: str, data: Any) -> None:
    content = bytearray(base64.b64decode(make_data_url(picture(size=(16, 16)), kind).partition(",")[2]))
    for index in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=6)):
        content[index] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(1, len(content)))
    try:
        pixels = decode(f"data:;base64,{base64.b64encode(content[:end]).decode()}", LIMITS)
    except ApiError as refusal:
        assert refusal.status == 400
    else:
        assert pixels.shape[0] == 3


def test_of_a_moving_image_the_first_picture() -> None:
    buffer = io.BytesIO()
    frames = [Image.new("RGB", (2, 2), colour) for colour in ("black", "white")]
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    url = f"data:image/gif;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    assert decode(url, LIMITS).max() == 0
