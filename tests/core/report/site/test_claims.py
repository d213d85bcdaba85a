"""Claims of a results directory and their history in git."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparseflow.core.report.site.claims import load_claims, load_history, select_headlines
from sparseflow.errors import FileFormatError, InputError


def commit(directory: Path, *, delete: bool = False, **changes: Any) -> None:
    path = directory / "spiking" / "claims.json"
    if delete:
        path.unlink()
    else:
        claims = (
            json.loads(path.read_text()) if path.exists() else [{"id": "spiking/1-speedup", "claim": "a"}]
        )
        path.write_text(json.dumps([claims[0] | changes]))
    options = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    for command in (("init", "-q"), ("add", "-A"), (*options, "commit", "-qm", "a")):
        subprocess.run(["git", "-C", str(directory), *command], check=True, capture_output=True)


def test_load_claims_reads_interval_and_direction(claims_dir: Path) -> None:
    claim, lost = load_claims(claims_dir)
    assert claim.formatted_value == "3.2x" and claim.interval == "3 to 3.4" and claim.larger_is_better
    assert claim.wing == "spiking" and lost.interval == "" and not lost.met


def test_load_claims_without_files_raises(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"claims\.json"):
        load_claims(tmp_path)


@pytest.mark.parametrize(
    "content", ["{", "{}", "[1]", '[{"id": 1}]', '[{"id": "a/1", "claim": "b", "value": []}]']
)
def test_load_claims_of_another_format_raises(claims_dir: Path, content: str) -> None:
    (claims_dir / "spiking" / "claims.json").write_text(content)
    with pytest.raises(FileFormatError, match=r"claims\.json"):
        load_claims(claims_dir)


def test_select_headlines_reads_ids(claims_dir: Path) -> None:
    claims = load_claims(claims_dir)
    other = [replace(claims[0], id="spiking/2-other"), *claims]
    assert [claim.id for claim in select_headlines(claims_dir, other)] == [
        "spiking/2-other",
        "tuning/1-speedup",
    ]
    (claims_dir / "headlines.json").write_text('["spiking/1-speedup", "tuning/9-unknown"]')
    assert [claim.id for claim in select_headlines(claims_dir, other)] == [
        "spiking/1-speedup",
        "tuning/1-speedup",
    ]
    (claims_dir / "headlines.json").write_text("{}")
    with pytest.raises(FileFormatError, match=r"headlines\.json"):
        select_headlines(claims_dir, claims)


def test_load_history_keeps_one_point_per_measurement(claims_dir: Path) -> None:
    commit(claims_dir)
    commit(claims_dir, git="bbbb", note="the same value")
    commit(claims_dir, git="cccc", value=4.5)
    commit(claims_dir, delete=True)
    commit(claims_dir, git="dddd", value="damaged", date=[])
    history = load_history(claims_dir)
    assert [(point.git, point.value) for point in history["spiking/1-speedup"]] == [
        ("bbbb", 3.2),
        ("cccc", 4.5),
    ]
    assert len(history["tuning/1-speedup"]) == 1


def test_load_history_outside_of_a_checkout_is_empty(claims_dir: Path) -> None:
    assert load_history(claims_dir) == {}
