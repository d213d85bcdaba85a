"""Tests of stressor workloads."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from sparseflow.core.load import workloads
from sparseflow.core.load.workloads import CpuWorkload, GpuWorkload, read_cache_bytes
from sparseflow.errors import DeviceError


@pytest.mark.parametrize("kind", ["cpu-fma", "cpu-stream"])
def test_cpu_workload_uses_cpu_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = CpuWorkload(kind)
    before_s = workload.busy_s()
    ticks = iter([0.0, 0.0, 0.0, 1.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    workload.run_until(0.5)
    assert workload.busy_s() > before_s
    assert next(ticks, None) is None


def test_read_cache_bytes_skips_instruction_caches(tmp_path: Path) -> None:
    for index, (level, kind, size) in enumerate(
        [
            ("1", "Data", "32K"),
            ("1", "Instruction", "64K"),
            ("2", "Unified", "1024K"),
            ("3", "Unified", "32M"),
        ]
    ):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, content in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(content + "\n")
    assert [read_cache_bytes(level, caches=tmp_path) for level in (1, 2, 3)] == [32 << 10, 1 << 20, 32 << 20]
    assert read_cache_bytes(4, caches=tmp_path) is None
    assert read_cache_bytes(1, caches=tmp_path / "absent") is None
    (tmp_path / "index2" / "size").write_text("much")
    assert read_cache_bytes(2, caches=tmp_path) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_workload_without_gpu_raises() -> None:
    with pytest.raises(DeviceError, match="gpu-matmul"):
        GpuWorkload("gpu-matmul", "cuda")


class FakeEvent:
    """CUDA event that records no time."""

    def __init__(self, **options: bool) -> None:
        assert options == {"enable_timing": True, "blocking": True}

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return 40.0


@pytest.mark.parametrize(("device", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2)])
def test_gpu_workload_selects_device_by_index(
    device: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    selected: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    monkeypatch.setattr(torch.cuda, "synchronize", selected.append)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(workloads, "_make_matmul", lambda device: lambda: None)
    workload = GpuWorkload("gpu-matmul", device)
    # torch.cuda.set_device refuses "cuda".
    assert selected == [index, device]
    ticks = iter([0.0, 1.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    workload.run_until(0.5)
    assert workload.busy_s() == pytest.approx(0.04)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gpu-matmul", "gpu-copy"])
def test_gpu_workload_uses_gpu_time(kind: str) -> None:
    workload = GpuWorkload(kind, "cuda")
    for shared in (False, True):
        workload.shared = shared
        before_s, start_s = workload.busy_s(), time.monotonic()
        workload.run_until(start_s + 0.1)
        assert 0.0 < workload.busy_s() - before_s < 2.0 * (time.monotonic() - start_s)
