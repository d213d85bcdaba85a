"""Tests of the diagnosis, on this machine and on simulated ones."""

from __future__ import annotations

import json

import pytest

from sparseflow.core.device import doctor
from sparseflow.core.extras import EXTRAS


def test_diagnose_this_machine() -> None:
    diagnosis = doctor.diagnose()
    assert diagnosis.devices[0].kind == "cpu"
    assert [check.name for check in diagnosis.extras] == list(EXTRAS)
    assert diagnosis.backends[0].ok, "torch always works"
    record = json.loads(json.dumps(diagnosis.to_json()))
    assert record["devices"][0]["key"] == diagnosis.devices[0].key()


def test_check_extra_missing_package_names_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "get_version", lambda name: None if name == "numba" else "1.2")
    extra, backend = doctor._check_extra("spiking"), doctor._check_numba()
    assert not extra.ok and "missing: numba" in extra.detail and "spikingjelly 1.2" in extra.detail
    assert extra.fix == "pip install 'sparseflow[spiking]'" == backend.fix
    assert not backend.ok


@pytest.mark.parametrize(
    ("gpus", "version", "interpret", "ok", "detail"),
    [
        (0, "3.6.0", None, False, "3.6.0"),
        (0, None, None, False, "no CUDA device"),
        (2, None, None, False, "not installed"),
        (2, "3.6.0", "1", False, "TRITON_INTERPRET=1"),
        (2, "3.6.0", None, True, "2 GPUs"),
    ],
)
def test_check_triton(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    version: str | None,
    interpret: str | None,
    ok: bool,
    detail: str,
) -> None:
    monkeypatch.setattr(doctor, "get_version", lambda name: version)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if interpret is not None:
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
    check = doctor._check_triton(gpus)
    assert check.ok is ok and detail in check.detail
    assert ok or gpus == 0 or check.fix
