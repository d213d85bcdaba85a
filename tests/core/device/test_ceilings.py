"""Measured ceilings, with a fake timer."""

from __future__ import annotations

import pytest
import torch

from sparseflow.core.device import ceilings


def test_measure_ceilings_on_cpu_uses_the_minimum_time(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []

    def return_two_ms(fn: object, device: torch.device) -> float:
        assert callable(fn)
        fn()
        devices.append(device)
        return 2.0

    monkeypatch.setattr(ceilings, "_measure_min_ms", return_two_ms)
    monkeypatch.setitem(ceilings._SIDES, "cpu", 32)
    monkeypatch.setitem(ceilings._COPY_BYTES, "cpu", 1 << 10)
    before = torch.get_float32_matmul_precision()
    peaks = ceilings.measure_ceilings("cpu")
    assert peaks.flops_per_s == {"float32": 2 * 32**3 / 2e-3, "bfloat16": 2 * 32**3 / 2e-3}
    assert peaks.bytes_per_s == 2 * (1 << 10) / 2e-3
    assert devices == [torch.device("cpu")] * 3
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.gpu
def test_measure_ceilings_on_gpu_has_tf32_and_float16() -> None:
    peaks = ceilings.measure_ceilings("cuda")
    assert set(peaks.flops_per_s) == {"float32", "tf32", "float16", "bfloat16"}
    assert peaks.flops_per_s["float16"] > peaks.flops_per_s["float32"] > peaks.bytes_per_s > 0
