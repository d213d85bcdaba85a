"""The diagnosis, on this machine and on pretended ones."""

from __future__ import annotations

import json

import pytest

from sparseflow.core import doctor
from sparseflow.core.extras import EXTRAS


def test_this_machine_is_diagnosed() -> None:
    found = doctor.diagnose()
    assert found.devices[0].kind == "cpu"
    assert [check.name for check in found.extras] == list(EXTRAS)
    assert found.backends[0].ok, "torch itself always computes"
    assert json.loads(json.dumps(found.to_json()))["devices"][0]["key"] == found.devices[0].key()


def test_a_missing_package_comes_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "get_version", lambda name: None if name == "numba" else "1.2")
    extra, backend = doctor._extra("spiking"), doctor._numba()
    assert not extra.ok and "missing: numba" in extra.detail and "spikingjelly 1.2" in extra.detail
    assert extra.fix == "pip install 'sparseflow[spiking]'" == backend.fix
    assert not backend.ok


@pytest.mark.parametrize(
    ("gpus", "found", "interpreted", "ok", "words"),
    [
        (0, "3.6.0", None, False, "interpreter in tests only"),
        (0, None, None, False, "no CUDA device"),
        (2, None, None, False, "triton is not installed"),
        (2, "3.6.0", "1", False, "TRITON_INTERPRET=1"),
        (2, "3.6.0", None, True, "on 2 GPUs"),
    ],
)
def test_triton_is_usable_only_with_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    found: str | None,
    interpreted: str | None,
    ok: bool,
    words: str,
) -> None:
    monkeypatch.setattr(doctor, "get_version", lambda name: found)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if interpreted is not None:
        monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    check = doctor._triton(gpus)
    assert check.ok is ok and words in check.detail
    assert ok or gpus == 0 or check.fix
