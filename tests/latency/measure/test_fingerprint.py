"""Device fingerprints of plans and machines."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnxruntime

from sparseflow.core.device import describe_device
from sparseflow.errors import DeviceError, FileFormatError, InputError
from sparseflow.latency.measure.config import CollectionConfig
from sparseflow.latency.measure.fingerprint import DeviceFingerprint
from sparseflow.latency.measure.plan import CollectionPlan
from tests.latency.records import from_record, to_record

DEVICE = {"kind": "cpu", "name": "Made Up", "cores": 8, "flags": ["avx2", "fma"], "compute_capability": None}
GPU = {"kind": "cuda", "name": "Made Up GPU", "cores": 132, "flags": [], "compute_capability": "9.0"}


def plan(device: dict[str, Any] = DEVICE, **settings: Any) -> CollectionPlan:
    defaults: dict[str, Any] = {"kernels": "kernels"}
    config = json.loads(CollectionConfig(**(defaults | settings)).model_dump_json())
    environment = {"device_key": "made-up", "device": device, "onnxruntime": "1.20.0"}
    return CollectionPlan(config=config, targets=(), blocks=(), environment=environment)


ONE = DeviceFingerprint.from_plan(plan())


def test_from_plan_fields() -> None:
    on_cpu = DeviceFingerprint.from_plan(plan())
    assert on_cpu == DeviceFingerprint(
        kind="cpu", name="Made Up", cores=8, flags=("avx2", "fma"), compute_capability=None,
        provider="CPUExecutionProvider", ort_version="1.20.0", threads=1, conv_search=None, telemetry="host",
    )  # fmt: skip
    on_gpu = DeviceFingerprint.from_plan(
        plan(GPU, provider="cuda", threads=None, conv_search="HEURISTIC", telemetry={"source": "gpm"})
    )
    assert on_gpu == DeviceFingerprint(
        kind="cuda", name="Made Up GPU", cores=132, flags=(), compute_capability="9.0",
        provider="CUDAExecutionProvider", ort_version="1.20.0", threads=None, conv_search="HEURISTIC",
        telemetry="gpm",
    )  # fmt: skip


def test_from_plan_counts_used_cpus() -> None:
    assert DeviceFingerprint.from_plan(plan(cpus=[0, 1, 2])).cores == 3
    assert DeviceFingerprint.from_plan(plan(GPU, provider="cuda", cpus=[0, 1, 2])).cores == 132


@pytest.mark.parametrize("absent", ["name", "flags", "cores"])
def test_from_plan_without_device_raises(absent: str) -> None:
    device_fields = {name: value for name, value in DEVICE.items() if name != absent}
    with pytest.raises(FileFormatError, match=rf"{absent}"):
        DeviceFingerprint.from_plan(plan(device_fields))
    with pytest.raises(FileFormatError):
        DeviceFingerprint.from_plan(plan().model_copy(update={"environment": {}}))
    with pytest.raises(FileFormatError):
        DeviceFingerprint.from_plan(plan().model_copy(update={"config": {"provider": "cpu"}}))


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "cuda"},
        {"name": "Other"},
        {"cores": 4},
        {"flags": ("avx2",)},
        {"compute_capability": "9.0"},
        {"provider": "CUDAExecutionProvider"},
        {"ort_version": "1.21.0"},
        {"threads": 2},
        {"conv_search": "DEFAULT"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_check_equal_names_both_values(change: dict[str, Any]) -> None:
    ((name, value),) = change.items()
    with pytest.raises(InputError) as caught:
        ONE.check_equal(replace(ONE, **change), "the collection other/")
    text = str(caught.value)
    assert "the collection other/" in text
    assert f"{name} is {value!r}, expected {getattr(ONE, name)!r}" in text


def test_check_equal_ignores_telemetry() -> None:
    ONE.check_equal(ONE, "itself")
    ONE.check_equal(replace(ONE, telemetry="prometheus"), "itself")
    with pytest.raises(InputError, match=r"4.*8.*2.*1"):
        ONE.check_equal(replace(ONE, cores=4, threads=2, telemetry="prometheus"), "it")


def test_check_local_device() -> None:
    info = describe_device("cpu")
    version = onnxruntime.__version__
    local = replace(ONE, name=info.name, cores=info.cores, flags=info.flags, ort_version=version, threads=3)
    local.check_local_device()
    with pytest.raises(InputError):
        replace(local, cores=info.cores + 1).check_local_device()
    with pytest.raises(InputError, match="ort_version"):
        replace(local, ort_version="0.1").check_local_device()
    with pytest.raises(DeviceError):
        replace(local, kind="cuda").check_local_device(gpu=99)


def test_fingerprint_round_trip() -> None:
    for fingerprint in (
        ONE,
        replace(ONE, threads=None, flags=(), compute_capability="9.0", conv_search="DEFAULT"),
    ):
        assert from_record(DeviceFingerprint, to_record(fingerprint)) == fingerprint


@pytest.mark.parametrize(
    "record",
    [
        {name: value for name, value in to_record(ONE).items() if name != "cores"},
        {name: value for name, value in to_record(ONE).items() if name != "flags"},
        to_record(ONE) | {"flags": None},
        to_record(ONE) | {"surprise": 1},
        [],
        None,
    ],
)
def test_fingerprint_damaged_record_raises(record: Any) -> None:
    with pytest.raises(ValueError):
        from_record(DeviceFingerprint, record)
