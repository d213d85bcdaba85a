"""Comparisons: who takes part, going on, and the numbers and the page that come of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.training import comparison as module
from sparseflow.pruning.training.comparison import (
    ROWS,
    Row,
    ablations,
    compare,
    latencies,
    rivals,
    summary,
    write_results,
)
from sparseflow.pruning.training.page import write_comparison
from tests.pruning.small import quick

TINY = quick(data={"train_clips": 16, "test_clips": 12}, train={"epochs": 1, "batch_size": 8})


def test_who_takes_part() -> None:
    found = {entry.name: entry.settings for entry in rivals(TINY)}
    assert list(found) == ["dense", "ast", "random", "uniform", "tome", "attention"]
    assert found["dense"].mode == "dense"
    assert found["tome"].ast["keep"] == {"channel": 0.5} and found["random"].ast["keep"] == TINY.ast["keep"]
    parts = {entry.name: entry.settings for entry in ablations(TINY)}
    assert parts["ast, no time"].ast["score"] == {"time": 0.0} and len(parts) == 6
    assert parts["one frame"].data.model_dump()["frozen"] is True
    with pytest.raises(InputError, match="`mode` is dense"):
        rivals(quick(mode="dense"))


def test_it_goes_on_and_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The page of the comparison is looked at; those of its trainings take longer than these.
    monkeypatch.setattr("sparseflow.pruning.training.train.write_page", lambda *_: None)
    entries = [entry for entry in rivals(TINY) if entry.name in ("dense", "ast", "random")]
    told: list[tuple[str, float]] = []
    rows = compare(entries, tmp_path, seeds=2, progress=lambda *one: told.append(one))
    assert {(row.entry, row.seed) for row in rows} == {
        (each.name, seed) for each in entries for seed in (0, 1)
    }
    assert told[-1][1] == 1.0
    lines = (tmp_path / ROWS).read_text().splitlines()
    (tmp_path / ROWS).write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:10])
    done = []
    monkeypatch.setattr(module, "_run", lambda job, run=module._run: done.append(job.entry.name) or run(job))
    assert compare(entries, tmp_path, seeds=2) == rows and done == ["random"]
    times = latencies(entries, tmp_path, batch=2, rounds=2)
    assert [line["model"] for line in times] == ["dense", "ast", "random"]
    assert times[1]["gflops"] < times[0]["gflops"] and len(times[0]["times_ms"]) == 2
    found = write_results(tmp_path, rows, times, settings=TINY, device="cpu", command="again")
    assert json.loads((tmp_path / "comparison.json").read_text())["models"] == found["models"]
    page = write_comparison(tmp_path, found).read_text()
    assert "Accuracy on test videos" in page and "random" in page
    with pytest.raises(InputError, match="without the dense model"):
        latencies(entries[1:], tmp_path)
    other = quick(data={"train_clips": 16, "test_clips": 12}, train={"epochs": 1, "batch_size": 4})
    with pytest.raises(InputError, match="trained by other settings"):
        compare(rivals(other)[:1], tmp_path, seeds=2)
    with pytest.raises(InputError, match="names of their own"):
        compare([entries[0], entries[0]], tmp_path)
    (tmp_path / ROWS).write_text('{"entry": "x"}\n')
    with pytest.raises(FileFormatError, match="no result of a comparison"):
        compare(entries, tmp_path)


def test_differences_are_those_of_the_same_seed() -> None:
    def row(entry: str, seed: int, accuracy: float) -> Row:
        return Row(entry=entry, seed=seed, settings="", clip_top1=accuracy, video_top1=accuracy, stats={})

    rows = [row("dense", 0, 0.5), row("dense", 1, 0.9), row("ast", 0, 0.4), row("ast", 1, 0.8)]
    found = {line["model"]: line for line in summary(rows)}
    assert found["ast"]["accuracy"] == pytest.approx(0.6)
    assert (found["ast"]["over_dense"], found["ast"]["over_dense_low"]) == pytest.approx((-0.1, -0.1))
    assert "over_ast" in found["dense"] and found["dense"]["over_dense"] == 0.0
