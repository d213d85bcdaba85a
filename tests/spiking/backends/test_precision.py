"""TF32 is disabled for our own float32 convolutions, and the user's settings are restored."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparseflow.spiking.backends.precision import full_precision, is_tf32_allowed


@pytest.fixture(autouse=True)
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize("allowed", [True, False])
def test_full_precision_disables_tf32_and_restores_it(allowed: bool) -> None:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        with full_precision(torch.float16):
            assert is_tf32_allowed() is allowed
        with pytest.raises(ZeroDivisionError), full_precision(torch.float32):
            assert not is_tf32_allowed()
            raise ZeroDivisionError
        assert is_tf32_allowed() is allowed
    finally:
        torch.backends.cudnn.allow_tf32 = before


def test_full_precision_with_newer_settings() -> None:
    conv = getattr(torch.backends.cudnn, "conv", None)
    if conv is None or not hasattr(conv, "fp32_precision"):
        pytest.skip("this torch knows only the older settings")
    before = conv.fp32_precision
    try:
        conv.fp32_precision = "tf32"
        with full_precision(torch.float32):
            assert not is_tf32_allowed()
        assert is_tf32_allowed()
        assert conv.fp32_precision == "tf32"
        conv.fp32_precision = "ieee"
        with full_precision(torch.float32):
            assert not is_tf32_allowed()
        assert conv.fp32_precision == "ieee"
    finally:
        conv.fp32_precision = before


def test_settings_that_differ_come_back_as_they_were() -> None:
    cudnn: Any = torch.backends.cudnn
    conv: Any = getattr(cudnn, "conv", None)
    rnn: Any = getattr(cudnn, "rnn", None)
    if not (hasattr(conv, "fp32_precision") and hasattr(rnn, "fp32_precision")):
        pytest.skip("this torch knows only the older settings")
    before = conv.fp32_precision, rnn.fp32_precision
    try:
        conv.fp32_precision, rnn.fp32_precision = "tf32", "ieee"
        with full_precision(torch.float32):
            assert conv.fp32_precision == rnn.fp32_precision == "ieee"
        assert (conv.fp32_precision, rnn.fp32_precision) == ("tf32", "ieee")
    finally:
        conv.fp32_precision, rnn.fp32_precision = before
