"""Claims: only whole and honest ones are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparseflow.core import claims
from sparseflow.errors import FileFormatError, InputError


def fields(**changes: Any) -> dict[str, Any]:
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
def results(tmp_path: Path) -> Path:
    (tmp_path / "spiking").mkdir()
    (tmp_path / "spiking" / "resnet18.json").write_text("[1]")
    return tmp_path


def test_claims_are_added_replaced_and_sorted(results: Path) -> None:
    for name, value in (("10-z", 2.0), ("2-b", 1.5), ("2-a", 1.6), ("2-b", 1.7)):
        claims.update(results, fields(id=f"spiking/{name}", value=value))
    found = claims.load(results / "spiking" / "claims.json")
    assert [(claim.id, claim.value) for claim in found] == [
        ("spiking/2-a", 1.6),
        ("spiking/2-b", 1.7),
        ("spiking/10-z", 2.0),
    ]
    assert json.loads((results / "spiking" / "claims.json").read_text())[0] == fields(
        id="spiking/2-a", value=1.6
    )


def test_no_file_is_no_claims(tmp_path: Path) -> None:
    assert claims.load(tmp_path / "claims.json") == []


@pytest.mark.parametrize("value", [True, "layer1.0.conv1", 3, 0.98])
def test_a_value_may_be_a_number_a_truth_or_a_word(results: Path, value: object) -> None:
    claim = claims.update(results, fields(value=value, target="as stated", met=True))
    assert claim.value == value and type(claim.value) in (type(value), float)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id": "spiking/resnet"}, "id"),
        ({"id": "cooking/1-x"}, "id"),
        ({"value": float("nan")}, "value"),
        ({"claim": ""}, "claim"),
        ({"device": ""}, "device"),
        ({"samples": "/etc/passwd.json"}, "samples"),
        ({"samples": "../x.json"}, "samples"),
        ({"samples": "spiking/x.csv"}, "samples"),
        ({"date": "yesterday"}, "date"),
        ({"surplus": 1}, "surplus"),
        ({"met": False}, "contradicts"),
        ({"value": 1.39}, "contradicts"),
        ({"target": "< 1", "met": True}, "contradicts"),
    ],
)
def test_what_is_not_a_claim_is_refused_and_nothing_written(
    results: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        claims.update(results, fields(**changes))
    assert not (results / "spiking" / "claims.json").exists()


def test_a_target_missed_is_a_good_claim(results: Path) -> None:
    assert claims.update(results, fields(value=1.1, met=False)).met is False


def test_no_claim_without_samples(results: Path) -> None:
    with pytest.raises(FileFormatError, match="not there"):
        claims.update(results, fields(samples="spiking/none.parquet"))
    (results / "spiking" / "large.json").write_bytes(b"1" * (claims.MAX_SAMPLES_BYTES + 1))
    with pytest.raises(FileFormatError, match="must not be larger"):
        claims.update(results, fields(samples="spiking/large.json"))


@pytest.mark.parametrize("content", ["", "{}", "[1]", '[{"id": "spiking/1-a"}]'])
def test_a_file_of_another_form_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "claims.json").write_text(content)
    with pytest.raises(FileFormatError, match=r"claims\.json is not a list of claims"):
        claims.load(tmp_path / "claims.json")


def test_an_id_stands_once(results: Path) -> None:
    (results / "spiking" / "claims.json").write_text(json.dumps([fields(), fields()]))
    with pytest.raises(FileFormatError, match="more than one claim"):
        claims.load(results / "spiking" / "claims.json")


def test_a_record_becomes_claims_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "spiking" / "resnet18.json"
    kept.parent.mkdir()
    circumstances = {"device": {"name": "a GPU"}, "git": "abcdef123456"}
    kept.write_text(json.dumps({"environment": circumstances, "ratio": 1.52}))
    told = {"device", "samples", "git", "date"}

    def steps(record: Any) -> list[dict[str, Any]]:
        return [{k: v for k, v in fields(value=record["ratio"]).items() if k not in told}]

    monkeypatch.setattr("sys.argv", ["record.py", "steps", str(kept)])
    assert claims.record_command("What it does.", tmp_path, {"steps": steps}) == 0
    (found,) = claims.load(tmp_path / "spiking" / "claims.json")
    assert (found.value, found.device, found.samples) == (1.52, "a GPU", "spiking/resnet18.json")
    assert capsys.readouterr().out == "met  spiking/3-resnet18-b32-t4: 1.52 x (>= 1.4)\n"
    monkeypatch.setattr("sys.argv", ["record.py", "other", str(kept)])
    with pytest.raises(SystemExit):
        claims.record_command("What it does.", tmp_path, {"steps": steps})
