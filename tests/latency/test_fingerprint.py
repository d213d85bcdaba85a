"""Fingerprints: what a collection's plan tells of its device, and which difference is named."""

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
from sparseflow.latency.campaign import Config, Plan
from sparseflow.latency.fingerprint import Fingerprint

DEVICE = {"kind": "cpu", "name": "Made Up", "cores": 8, "flags": ["avx2", "fma"], "compute_capability": None}
GPU = {"kind": "cuda", "name": "Made Up GPU", "cores": 132, "flags": [], "compute_capability": "9.0"}


def plan(device: dict[str, Any] = DEVICE, **settings: Any) -> Plan:
    given: dict[str, Any] = {"kernels": "kernels"}
    config = json.loads(Config(**(given | settings)).model_dump_json())
    environment = {"device_key": "made-up", "device": device, "onnxruntime": "1.20.0"}
    return Plan(config=config, items=(), blocks=(), environment=environment)


ONE = Fingerprint.of_plan(plan())


def test_a_plan_tells_its_device_and_settings() -> None:
    on_cpu = Fingerprint.of_plan(plan())
    assert on_cpu == Fingerprint(
        kind="cpu", name="Made Up", cores=8, flags=("avx2", "fma"), compute_capability=None,
        provider="CPUExecutionProvider", ort_version="1.20.0", threads=1, conv_search=None, telemetry="host",
    )  # fmt: skip
    on_gpu = Fingerprint.of_plan(
        plan(GPU, provider="cuda", threads=None, conv_search="HEURISTIC", telemetry={"source": "gpm"})
    )
    assert on_gpu == Fingerprint(
        kind="cuda", name="Made Up GPU", cores=132, flags=(), compute_capability="9.0",
        provider="CUDAExecutionProvider", ort_version="1.20.0", threads=None, conv_search="HEURISTIC",
        telemetry="gpm",
    )  # fmt: skip


def test_the_cpus_that_were_used_are_those_that_count_but_not_for_a_gpu() -> None:
    assert Fingerprint.of_plan(plan(cpus=[0, 1, 2])).cores == 3
    assert Fingerprint.of_plan(plan(GPU, provider="cuda", cpus=[0, 1, 2])).cores == 132


@pytest.mark.parametrize("absent", ["name", "flags", "cores"])
def test_a_plan_that_does_not_tell_its_device_is_refused(absent: str) -> None:
    told = {name: value for name, value in DEVICE.items() if name != absent}
    with pytest.raises(FileFormatError, match=rf"{absent}.*collect anew"):
        Fingerprint.of_plan(plan(told))
    with pytest.raises(FileFormatError, match="collect anew"):
        Fingerprint.of_plan(replace(plan(), environment={}))
    with pytest.raises(FileFormatError, match="collect anew"):
        Fingerprint.of_plan(replace(plan(), config={"provider": "cpu"}))


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
def test_a_difference_is_named_with_both_values(change: dict[str, Any]) -> None:
    ((name, value),) = change.items()
    with pytest.raises(InputError) as caught:
        ONE.check(replace(ONE, **change), "the collection other/")
    text = str(caught.value)
    assert text.startswith("the collection other/ is of another device or other settings: ")
    assert f": {name} is {value!r} and not {getattr(ONE, name)!r}; " in text and "collect and train" in text


def test_every_difference_is_named_and_telemetry_is_none() -> None:
    ONE.check(ONE, "itself")
    ONE.check(replace(ONE, telemetry="prometheus"), "itself")
    with pytest.raises(InputError, match=r"cores is 4 and not 8; threads is 2 and not 1; latencies"):
        ONE.check(replace(ONE, cores=4, threads=2, telemetry="prometheus"), "it")


def test_this_machine_is_itself_and_none_other() -> None:
    info = describe_device("cpu")
    version = onnxruntime.__version__
    here = replace(ONE, name=info.name, cores=info.cores, flags=info.flags, ort_version=version, threads=3)
    here.check_here()
    with pytest.raises(InputError, match=r"this machine is of another device.*cores is"):
        replace(here, cores=info.cores + 1).check_here()
    with pytest.raises(InputError, match="ort_version"):
        replace(here, ort_version="0.1").check_here()
    with pytest.raises(DeviceError):
        replace(here, kind="cuda").check_here(gpu=99)


def test_a_record_is_read_back() -> None:
    for one in (ONE, replace(ONE, threads=None, flags=(), compute_capability="9.0", conv_search="DEFAULT")):
        assert Fingerprint.from_dict(json.loads(json.dumps(one.to_dict()))) == one


@pytest.mark.parametrize(
    "record",
    [
        {name: value for name, value in ONE.to_dict().items() if name != "cores"},
        {name: value for name, value in ONE.to_dict().items() if name != "flags"},
        ONE.to_dict() | {"flags": None},
        ONE.to_dict() | {"surprise": 1},
        [],
        None,
    ],
)
def test_a_damaged_record_is_refused(record: Any) -> None:
    with pytest.raises(FileFormatError, match="fingerprint of a device cannot be read"):
        Fingerprint.from_dict(record)
