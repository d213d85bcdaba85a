"""Tests of device descriptions and selection; GPUs are simulated where none exists."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from sparseflow.core import device
from sparseflow.core.device import info as info_module
from sparseflow.errors import DeviceError


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [10, 70, 70, 5]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free[index], 80))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def test_describe_device_cpu() -> None:
    info = device.describe_device("cpu")
    assert (info.kind, info.index, info.compute_capability, info.driver) == ("cpu", None, None, None)
    assert info.name and info.cores >= 1 and info.memory_bytes > 2**20
    assert info.threads == torch.get_num_threads()
    assert info.versions["torch"] == torch.__version__
    assert set(info.flags) <= set(info_module.CPU_FLAGS)
    assert device.describe_cpu().startswith(info.name)


def test_key_is_stable_and_safe_in_file_name() -> None:
    info = device.describe_device("cpu")
    assert info.key() == device.describe_device("cpu").key()
    assert re.fullmatch(r"cpu-[a-z0-9-]{1,60}", info.key())


@pytest.mark.parametrize(
    "change",
    [
        {"threads": 97},
        {"versions": {"torch": "9.9"}},
        {"name": "another"},
        {"flags": ("amx_bf16",)},
        {"driver": "999.1"},
    ],
)
def test_key_changes_with_speed_relevant_fields(change: dict[str, object]) -> None:
    info = device.describe_device("cpu")
    assert dataclasses.replace(info, **change).key() != info.key()  # pyright: ignore[reportArgumentType]


def test_key_ignores_cuda_index() -> None:
    info = device.describe_device("cpu")
    assert dataclasses.replace(info, index=0).key() == dataclasses.replace(info, index=3).key()


@pytest.mark.usefixtures("four_gpus")
def test_select_device_prefers_free_memory() -> None:
    assert device.select_gpu() == 1
    assert device.select_device(None) == torch.device("cuda", 1)
    assert device.select_device(3) == torch.device("cuda", 3)
    with pytest.raises(DeviceError, match=r"GPU 4\b.*0 to 3"):
        device.select_device(4)
    with pytest.raises(DeviceError, match="GPU -1"):
        device.select_device(-1)


@pytest.mark.usefixtures("no_gpu")
def test_select_device_without_gpu() -> None:
    assert device.select_device(None) == torch.device("cpu")
    with pytest.raises(DeviceError, match=r"GPU 0\b.*none"):
        device.select_device(0)
    with pytest.raises(DeviceError):
        device.select_gpu()
    with pytest.raises(DeviceError, match="'cuda'"):
        device.describe_device("cuda")


def test_describe_device_other_kind_raises() -> None:
    with pytest.raises(DeviceError, match="'meta'"):
        device.describe_device("meta")


@pytest.mark.gpu
def test_describe_device_cuda() -> None:
    info = device.describe_device("cuda")
    assert info.kind == "cuda" and info.index is not None and info.cores > 0
    assert info.compute_capability is not None and info.threads is None
