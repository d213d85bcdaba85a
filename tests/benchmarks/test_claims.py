"""Tests of claims: validation, merging, and the command line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from benchmarks import claims
from benchmarks.claims import Claim
from sparseflow.errors import FileFormatError

SCRIPT = """
from benchmarks.claims import Claim

def make_claims(record):
    yield Claim(id="spiking/3-a", claim="Fast.", value=record["ratio"], target=">= 1.4", command="c")
"""


def make_fields(**changes: Any) -> dict[str, Any]:
    return {
        "id": "spiking/3-resnet18-b32-t4",
        "claim": "A trained network runs faster.",
        "value": 1.52,
        "unit": "x",
        "target": ">= 1.4",
        "met": True,
        "baseline": "strongest dense",
        "device": "a GPU",
        "command": "sparseflow spiking bench",
        "samples": "spiking/resnet18.json",
        "git": "abcdef123456",
        "date": "2026-11-21",
        **changes,
    }


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    (tmp_path / "spiking").mkdir()
    (tmp_path / "spiking" / "resnet18.json").write_text("[1]")
    return tmp_path


def test_merge_claims_adds_replaces_and_sorts(results: Path) -> None:
    for slug, value in (("10-z", 2.0), ("2-b", 1.5), ("2-a", 1.6), ("2-b", 1.7)):
        claims.merge_claims([Claim(**make_fields(id=f"spiking/{slug}", value=value))], results)
    path = results / "spiking" / "claims.json"
    assert [(claim.id, claim.value) for claim in claims.load_claims(path)] == [
        ("spiking/2-a", 1.6),
        ("spiking/2-b", 1.7),
        ("spiking/10-z", 2.0),
    ]
    assert json.loads(path.read_text())[0] == make_fields(id="spiking/2-a", value=1.6)


def test_merge_claims_keeps_details(results: Path) -> None:
    details = {"low": 1.4, "seeds": 3, "compiled": True, "kernel": "packed"}
    claims.merge_claims([Claim(**make_fields(details=details))], results)
    (claim,) = claims.load_claims(results / "spiking" / "claims.json")
    assert claim.details == details


def test_load_claims_missing_file_is_empty(tmp_path: Path) -> None:
    assert claims.load_claims(tmp_path / "claims.json") == []


@pytest.mark.parametrize("value", [True, "layer1.0.conv1", 3, 0.98])
def test_claim_accepts_bool_text_and_number(value: object) -> None:
    claim = Claim(**make_fields(value=value, target="as stated", met=True))
    assert claim.value == value and type(claim.value) in (type(value), float)


@pytest.mark.parametrize(
    ("value", "target", "met"),
    [(1.5, ">= 1.4", True), (1.3, ">= 1.4", False), (0, "== 0", True), (2e-11, "<= 1e-10", True)],
)
def test_claim_derives_met_from_target(value: float, target: str, met: bool) -> None:
    fields = make_fields(value=value, target=target)
    del fields["met"]
    assert Claim(**fields).met is met


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"id": "spiking/resnet"}, "id"),
        ({"id": "cooking/1-x"}, "id"),
        ({"value": float("nan")}, "value"),
        ({"claim": ""}, "claim"),
        ({"samples": "/etc/passwd.json"}, "samples"),
        ({"samples": "../x.json"}, "samples"),
        ({"samples": "spiking/x.csv"}, "samples"),
        ({"date": "yesterday"}, "date"),
        ({"surplus": 1}, "surplus"),
        ({"met": False}, "met"),
        ({"value": 1.39}, "1.39"),
        ({"target": "< 1", "met": True}, "< 1"),
    ],
)
def test_claim_invalid_field_raises(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        Claim(**make_fields(**changes))


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"device": ""}, "device"),
        ({"git": ""}, "git"),
        ({"samples": ""}, "samples"),
        ({"samples": "spiking/none.parquet"}, "none.parquet"),
        ({"samples": "spiking/large.json"}, str(claims.MAX_SAMPLES_BYTES + 1)),
        ({"claim": "word " * 26}, "26"),
    ],
)
def test_merge_claims_incomplete_claim_raises(results: Path, changes: dict[str, Any], value: str) -> None:
    (results / "spiking" / "large.json").write_bytes(b"1" * (claims.MAX_SAMPLES_BYTES + 1))
    with pytest.raises(FileFormatError, match=value):
        claims.merge_claims([Claim(**make_fields(**changes))], results)
    assert not (results / "spiking" / "claims.json").exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'[{"id": "spiking/1-a"}]', b"\xff", b"[" * 10**5])
def test_load_claims_malformed_file_raises(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "claims.json").write_bytes(content)
    with pytest.raises(FileFormatError, match=r"claims\.json"):
        claims.load_claims(tmp_path / "claims.json")


def test_load_claims_duplicate_id_raises(results: Path) -> None:
    (results / "spiking" / "claims.json").write_text(json.dumps([make_fields(), make_fields()]))
    with pytest.raises(FileFormatError, match="3-resnet18-b32-t4"):
        claims.load_claims(results / "spiking" / "claims.json")


def test_record_claims_fills_in_conditions(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = results / "spiking" / "resnet18.json"
    record = {"environment": {"device": {"name": "a GPU"}, "git": "abcdef123456"}}
    claim = Claim(id="spiking/3-a", claim="Fast.", value=1.52, unit="x", target=">= 1.4", command="c")
    claims.record_claims([claim], record, path, results)
    (merged,) = claims.load_claims(results / "spiking" / "claims.json")
    assert (merged.device, merged.samples, merged.git) == ("a GPU", "spiking/resnet18.json", "abcdef123456")
    assert capsys.readouterr().out == "met  spiking/3-a: 1.52 x (>= 1.4)\n"


def test_record_claims_outside_results_only_prints(results: Path, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("runs") / "record.json"
    claim = Claim(id="spiking/3-a", claim="Fast.", value=1.52, command="c", device="a GPU")
    claims.record_claims([claim], {}, path, results)
    claims.record_claims([claim], {}, None, results)
    claims.record_claims([claim], {"failed": "no GPU"}, results / "spiking" / "resnet18.json", results)
    assert not (results / "spiking" / "claims.json").exists()


def test_main_record_list_and_check(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(claims, "record_claims", partial(claims.record_claims, results=results))
    script = results / "script_with_claims.py"
    script.write_text(SCRIPT)
    record = results / "spiking" / "resnet18.json"
    record.write_text(json.dumps({"device": "a GPU", "git": "abc", "ratio": 1.3}))
    monkeypatch.syspath_prepend(str(results))
    assert claims.main(["record", str(script), str(record)]) == 0
    capsys.readouterr()
    monkeypatch.setattr(claims, "check_claim", lambda claim: None)
    assert claims.main(["list", "spiking"]) == 0
    assert capsys.readouterr().out == "NOT MET  spiking/3-a: 1.3  (>= 1.4)\n"
    record.write_text("not JSON")
    assert claims.main(["record", str(script), str(record)]) == 1
    assert claims.main(["check"]) == 0


def test_load_record_reads_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"settings": {}}\n{"a": 1}\n{"a": 2}\n')
    assert claims.load_record(path) == {"settings": {}, "rows": [{"a": 1}, {"a": 2}]}


def test_write_samples_rounds_to_six_digits(results: Path) -> None:
    assert claims.write_samples("spiking/a.json", {"ms": 0.123456789}, results) == "spiking/a.json"
    assert json.loads((results / "spiking" / "a.json").read_text()) == {"ms": 0.123457}
