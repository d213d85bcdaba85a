"""Networks against each other: folds, going on, and the page that shows it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sparseflow.errors import FileFormatError, InputError
from sparseflow.tuning.model import comparison as module
from sparseflow.tuning.model.comparison import (
    BOOSTED,
    ROWS,
    Entry,
    ablation,
    folds_of,
    named,
    read_study,
    study,
)
from sparseflow.tuning.model.dataset import Dataset, Sampling
from sparseflow.tuning.model.net.pretrained import SHIPPED, shipped
from sparseflow.tuning.model.page import PAGE, SEARCHES, scores, write_page
from sparseflow.tuning.model.training import TrainConfig
from sparseflow.tuning.search.comparison import Searched
from tests.tuning.synthetic_labels import NO_PATTERN, SMALL, on_disk

QUICK = TrainConfig(net=SMALL, sampling=Sampling(schedules=6, matrices=2, tasks=2), steps=2, validate_every=2)
FEW = [
    Entry(name="without", config=replace(QUICK, net=NO_PATTERN), operators=("spmm", "spmv")),
    Entry(name="spmv_alone", config=QUICK, operators=("spmv",)),
    Entry(name=f"{BOOSTED}_spmm", config=None, operators=("spmm",)),
]


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A label set on disk: two operators, four families, the last one's pattern unknown."""
    return on_disk(tmp_path_factory.mktemp("labels"), matrices=4)


def test_every_network_is_judged_on_every_family_it_did_not_see(labels: Path, tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    rows = study(FEW, [labels], tmp_path, folds=3, progress=lambda *one: told.append(one))
    assert {(row.entry, row.fold) for row in rows} == {(each.name, fold) for each in FEW for fold in range(3)}
    for entry in FEW:
        judged = [(one.operator, one.matrix) for row in rows if row.entry == entry.name for one in row.judged]
        wanted = [(name, f"m{at}") for name in entry.operators for at in range(4)]
        assert sorted(judged) == sorted(wanted)
    assert told[-1][1] == 1.0
    assert read_study(tmp_path) == rows
    again = study(FEW, [labels], tmp_path, folds=3, progress=lambda *_: pytest.fail("nothing is left to do"))
    assert again == rows
    with pytest.raises(InputError, match="other folds"):
        study(FEW, [labels], tmp_path, folds=2)
    page = write_page(tmp_path, reproduce="again").read_text()
    assert "Loss in training" in page and "spmv_alone" in page and "random pick" in page
    lines = scores(rows)
    assert {(line["model"], line["operator"]) for line in lines} == {
        ("without", "spmm"), ("without", "spmv"), ("spmv_alone", "spmv"), (f"{BOOSTED}_spmm", "spmm"),
    }  # fmt: skip
    assert {line["matrices"] for line in lines} == {4}
    assert {line["matrices"] for line in scores(rows, known=True)} == {3}
    over = {(line["model"], line["operator"]): line["over_boosted"] for line in lines}
    assert over["without", "spmv"] is None and over["spmv_alone", "spmv"] is None, "no trees learnt that"
    assert over[f"{BOOSTED}_spmm", "spmm"]["top1"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    top = {line["model"]: line["top5"]["mean"] for line in lines if line["operator"] == "spmm"}
    gain = over["without", "spmm"]["top5"]
    assert gain["mean"] == pytest.approx(top["without"] - top[f"{BOOSTED}_spmm"])
    assert gain["low"] <= gain["mean"] <= gain["high"]


def test_every_seed_is_a_training_of_its_own(labels: Path, tmp_path: Path) -> None:
    rows = study(FEW[:1], [labels], tmp_path, folds=2)
    more = study(FEW[:1], [labels], tmp_path, folds=2, seeds=2)
    assert more[:2] == rows and [(row.seed, row.fold) for row in more] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert more[2].judged != more[0].judged
    assert scores(more)[0]["tasks"] == 2 * scores(rows)[0]["tasks"]
    with pytest.raises(InputError, match="seeds"):
        study(FEW[:1], [labels], tmp_path, folds=2, seeds=0)


def test_what_was_done_is_not_done_again(
    labels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study(FEW[:1], [labels], tmp_path, folds=3)
    lines = (tmp_path / ROWS).read_text().splitlines()
    (tmp_path / ROWS).write_text("\n".join(lines[:2]) + "\n" + lines[2][:20])
    done = []
    monkeypatch.setattr(module, "_run", lambda job, run=module._run: done.append(job.fold) or run(job))
    rows = study(FEW[:1], [labels], tmp_path, folds=3)
    assert done == [2] and [row.fold for row in rows] == [0, 1, 2]


def test_folds_hold_about_as_much_each(labels: Path) -> None:
    data = Dataset.of([module.LabelSet.open(labels)])
    parts = folds_of(data, 2)
    assert [len(part) for part in parts] == [2, 2]
    known = {group.task.family for group in data.groups if group.task.pattern is not None}
    assert sorted(len(known.intersection(part)) for part in parts) == [1, 2]
    for count in (1, 5):
        with pytest.raises(InputError, match="from 2 to the 4 families"):
            folds_of(data, count)


def test_the_networks_that_are_compared() -> None:
    entries = {entry.name: entry for entry in named(QUICK, ["spmm", "spmv"])}
    assert set(entries) == {
        *(f"{name}_{op}" for op in ("spmm", "spmv") for name in (
            BOOSTED, "WACONet", "AutoSparseNet_WACONet", "AutoSparseNet", "AutoSparseNet_Pretrained",
        )),
        "AutoSparseNet_Full", "AutoSparseNet_Pretrained",
    }  # fmt: skip
    waco, full = entries["WACONet_spmm"].config, entries["AutoSparseNet_Full"]
    assert waco is not None and waco.net.pattern is not None
    assert (waco.net.pattern.kind, waco.net.joined, waco.loss, waco.sampling.mode) == (
        "strided", "perceptron", "margin", "naive",
    )  # fmt: skip
    assert full.operators == ("spmm", "spmv") and full.config is not None and full.config.net == SMALL
    begun = entries["AutoSparseNet_Pretrained"].config
    assert begun is not None and begun.init == SHIPPED and begun.steps < QUICK.steps
    assert begun.net == replace(shipped().config, dropout=SMALL.dropout)
    table = {entry.name: entry.config for entry in ablation(QUICK, ["spmm"])}
    assert len(table) == len(ablation(QUICK, ["spmm"])) == 5 * 3 + 3
    config = table["hdc_concat_no_pick"]
    assert config is not None and config.pick == 0.0 and config.loss == QUICK.loss


def test_what_is_no_study_is_told(labels: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no study"):
        write_page(tmp_path)
    with pytest.raises(InputError, match="same name"):
        study([FEW[0], FEW[0]], [labels], tmp_path, folds=3)
    (tmp_path / ROWS).write_text('{"entry": "x", "fold": 0}\n')
    with pytest.raises(FileFormatError, match="no result of a study"):
        read_study(tmp_path)


def test_searches_are_drawn_beside_each_other(labels: Path, tmp_path: Path) -> None:
    study(FEW[2:], [labels], tmp_path, folds=3)
    (tmp_path / SEARCHES).mkdir()
    for method, ratios in (("annealing", (None, 2.0, 1.0, 0.5)), ("guided-annealing", (0.52, 0.6))):
        one = Searched(
            problem="cca spmv", method=method, ratios=ratios, seconds={"measure": 2.0, "rest": 0.5}
        )
        assert Searched.from_dict(json.loads(json.dumps(one.to_dict()))) == one
        (tmp_path / SEARCHES / f"{method}.json").write_text(json.dumps(one.to_dict()))
    assert one.arrived(0.5) == 1 and one.arrived(0.1) is None
    page = write_page(tmp_path)
    assert page == tmp_path / PAGE
    for text in ("Searches: cca spmv", "without the model", "Best schedule so far", "Where search time goes"):
        assert text in page.read_text()
    (tmp_path / SEARCHES / "other.json").write_text("[]")
    with pytest.raises(FileFormatError, match="is no search"):
        write_page(tmp_path)
