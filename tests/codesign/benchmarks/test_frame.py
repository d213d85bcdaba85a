"""Tests of `benchmarks/codesign/frame.py`."""

from __future__ import annotations

import json
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[3] / "benchmarks" / "codesign" / "frame.py"


@pytest.fixture
def frame() -> Any:
    spec = util.spec_from_file_location("codesign_frame", FILE)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("wrong", [[], ["a bound is too high", "memory is exceeded"]])
def test_failed_run_is_recorded(frame: Any, wrong: list[str], tmp_path: Path) -> None:
    parser = frame.make_parser("What it does.", seed="weights")
    parser.add_argument("--budget", type=float, default=float("inf"))
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args(["--seed", "3", "--out", str(tmp_path / "a.json"), "--folder", str(tmp_path)])
    record = frame.start_record(args) | {"samples": [1.5]}
    assert frame.finish_record(args, record, wrong, lambda record: []) == int(bool(wrong))
    saved = json.loads((tmp_path / "a.json").read_text())
    assert saved["settings"] == {"seed": 3, "budget": None} and saved["samples"] == [1.5]
    assert saved["environment"]["seed"] == 3 and saved["environment"]["device"]["name"]
    assert saved.get("failed") == ("a bound is too high; memory is exceeded" if wrong else None)


def test_record_omits_paths(frame: Any, tmp_path: Path) -> None:
    args = frame.make_parser(None).parse_args([])
    assert (
        args.out is None and frame.finish_record(args, frame.start_record(args), [], lambda record: []) == 0
    )
    with pytest.raises(SystemExit):
        frame.make_parser(None, required=True).parse_args([])
    assert str(FILE.parent) not in sys.path and not list(tmp_path.iterdir())


def test_tolerance_without_splits_is_zero(frame: Any) -> None:
    assert frame.logits_tolerance("bfloat16", split=False) == 0.0
    assert 0.0 < frame.logits_tolerance("float64", split=True) < frame.logits_tolerance("float32", split=True)
