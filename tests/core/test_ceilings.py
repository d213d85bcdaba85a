"""What a device reaches at best, with a pretended clock."""

from __future__ import annotations

import pytest
import torch

from sparseflow.core import ceilings


def test_ceilings_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.device] = []

    def two_ms(fn: object, where: torch.device) -> float:
        assert callable(fn)
        fn()
        calls.append(where)
        return 2.0

    monkeypatch.setattr(ceilings, "_best_ms", two_ms)
    before = torch.get_float32_matmul_precision()
    found = ceilings.measure_ceilings("cpu")
    assert found.flops_per_s == {"float32": 2 * 1024**3 / 2e-3, "bfloat16": 2 * 1024**3 / 2e-3}
    assert found.bytes_per_s == 2 * (256 << 20) / 2e-3
    assert calls == [torch.device("cpu")] * 3
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.gpu
def test_a_gpu_has_more_data_types() -> None:
    found = ceilings.measure_ceilings("cuda")
    assert set(found.flops_per_s) == {"float32", "tf32", "float16", "bfloat16"}
    assert found.flops_per_s["float16"] > found.flops_per_s["float32"] > found.bytes_per_s > 0
