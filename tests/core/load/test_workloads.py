"""What keeps a device busy."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from sparseflow.core.load.workloads import CpuWorkload, GpuWorkload, read_cache_bytes
from sparseflow.errors import DeviceError


@pytest.mark.parametrize("kind", ["cpu-fma", "cpu-stream"])
def test_a_cpu_is_used_while_it_burns(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = CpuWorkload(kind)
    before = work.got_s()
    ticks = iter([0.0, 0.0, 0.0, 1.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    work.burn(0.5)
    assert work.got_s() > before
    assert next(ticks, None) is None


def test_the_caches_are_those_of_data(tmp_path: Path) -> None:
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
def test_no_gpu_is_said() -> None:
    with pytest.raises(DeviceError, match="sees none here"):
        GpuWorkload("gpu-matmul", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gpu-matmul", "gpu-copy"])
def test_a_gpu_is_used_while_it_burns(kind: str) -> None:
    work = GpuWorkload(kind, "cuda")
    for held in (False, True):
        work.held = held
        before, begin = work.got_s(), time.monotonic()
        work.burn(begin + 0.1)
        assert 0.0 < work.got_s() - before < 2.0 * (time.monotonic() - begin)
