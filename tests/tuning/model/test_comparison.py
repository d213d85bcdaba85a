"""Comparison of networks: folds, resuming and the report page."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

from sparseflow.core.costmodel import trees
from sparseflow.core.files import write_json
from sparseflow.core.report.figures import format_value
from sparseflow.errors import FileFormatError, InputError
from sparseflow.tuning.evaluation import PAGE_FILE, SCORES_FILE, SEARCHES_DIR, compute_scores, write_page
from sparseflow.tuning.model import comparison as module
from sparseflow.tuning.model.comparison import (
    BOOSTED,
    ENSEMBLE,
    ROWS_FILE,
    NetworkEntry,
    assign_folds,
    build_ablation_entries,
    build_named_entries,
    compare_networks,
    read_comparison,
)
from sparseflow.tuning.model.dataset import BatchSampling, RankingDataset
from sparseflow.tuning.model.net.pretrained import SHIPPED, load_shipped_network
from sparseflow.tuning.model.training import TrainConfig
from sparseflow.tuning.model.training_log import read_training_log
from sparseflow.tuning.search.comparison import SearchRecord
from sparseflow.tuning.search.methods import DEFAULT_METHOD
from tests.tuning.synthetic_labels import NO_PATTERN, SMALL, change, on_disk

QUICK = TrainConfig(
    net=SMALL, sampling=BatchSampling(schedules=6, matrices=2, tasks=2), steps=2, validate_every=2
)
FEW = [
    NetworkEntry(name="without", config=change(QUICK, net=NO_PATTERN), operators=("spmm", "spmv")),
    NetworkEntry(name="spmv_alone", config=QUICK, operators=("spmv",)),
    NetworkEntry(name=f"{BOOSTED}_spmm", config=None, operators=("spmm",)),
]


@pytest.fixture(autouse=True)
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trees._NUM_ROUNDS, trees.BOOSTED, 10)


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a label set with two operators and four families; the pattern of the last is unknown."""
    return on_disk(tmp_path_factory.mktemp("labels"), matrices=4)


def test_compare_evaluates_every_held_out_family(labels: Path, tmp_path: Path) -> None:
    messages: list[tuple[str, float]] = []
    rows = compare_networks(FEW, [labels], tmp_path, folds=3, progress=lambda *score: messages.append(score))
    assert {(row.entry, row.fold) for row in rows} == {(item.name, fold) for item in FEW for fold in range(3)}
    for entry in FEW:
        scores = [
            (score.operator, score.matrix) for row in rows if row.entry == entry.name for score in row.scores
        ]
        expected = [(name, f"m{index}") for name in entry.operators for index in range(4)]
        assert sorted(scores) == sorted(expected)
    assert messages[-1][1] == 1.0
    assert read_comparison(tmp_path) == rows
    repeated = compare_networks(
        FEW, [labels], tmp_path, folds=3, progress=lambda *_: pytest.fail("nothing is left to do")
    )
    assert repeated == rows
    with pytest.raises(InputError):
        compare_networks(FEW, [labels], tmp_path, folds=2)
    page = write_page(tmp_path).read_text()
    assert "Training loss" in page and "spmv_alone" in page and "random pick" in page
    records = [record for _, record in read_training_log(tmp_path)]
    assert sorted((record.model, record.remarks) for record in records) == [
        (name, f"fold {fold + 1} of 3, seed 0") for name in ("spmv_alone", "without") for fold in range(3)
    ]
    assert "fold 3 of 3, seed 0" in page
    # The curve is the mean over the folds.
    last = mean(record.validation_loss or 0.0 for record in records if record.model == "without")
    assert f"<td>{format_value(last)}</td>" in re.sub(r"<td[^>]*>", "<td>", page)
    lines = compute_scores(rows)
    assert {(line["model"], line["operator"]) for line in lines} == {
        ("without", "spmm"), ("without", "spmv"), ("spmv_alone", "spmv"), (f"{BOOSTED}_spmm", "spmm"),
    }  # fmt: skip
    assert {line["matrices"] for line in lines} == {4}
    assert {line["matrices"] for line in compute_scores(rows, known=True)} == {3}
    over = {(line["model"], line["operator"]): line["over_boosted"] for line in lines}
    assert over["without", "spmv"] is None and over["spmv_alone", "spmv"] is None, (
        "no trees were fitted for spmv"
    )
    assert over[f"{BOOSTED}_spmm", "spmm"]["top1"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    top = {line["model"]: line["top5"]["mean"] for line in lines if line["operator"] == "spmm"}
    gain = over["without", "spmm"]["top5"]
    assert gain["mean"] == pytest.approx(top["without"] - top[f"{BOOSTED}_spmm"])
    assert gain["low"] <= gain["mean"] <= gain["high"]


def test_ensemble_ranks_by_network_and_trees(
    labels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = NetworkEntry(
        name=f"{ENSEMBLE}_spmm", config=change(QUICK, net=NO_PATTERN), operators=("spmm",), with_trees=True
    )
    before = compare_networks([entry], [labels], tmp_path / "a", folds=2)
    # A network whose ranks decide nothing leaves the order of the trees.
    monkeypatch.setattr(module, "make_network_scorer", lambda *_: lambda group: np.zeros(len(group)))
    monkeypatch.setattr(module, "_rank", lambda scores: scores)
    after = compare_networks([entry], [labels], tmp_path / "b", folds=2)
    trees_only = compare_networks(FEW[2:], [labels], tmp_path / "c", folds=2)
    assert [row.scores for row in after] == [row.scores for row in trees_only]
    assert [row.scores for row in before] != [row.scores for row in trees_only]


def test_ranks_of_equal_scores_are_in_order() -> None:
    assert module._rank(np.array([0.3, 0.1, 0.3, 0.2])).tolist() == [2, 0, 3, 1]


def test_compare_seeds_are_separate_trainings(labels: Path, tmp_path: Path) -> None:
    rows = compare_networks(FEW[:1], [labels], tmp_path, folds=2)
    more = compare_networks(FEW[:1], [labels], tmp_path, folds=2, seeds=2)
    assert more[:2] == rows and [(row.seed, row.fold) for row in more] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert more[2].scores != more[0].scores
    assert compute_scores(more)[0]["tasks"] == 2 * compute_scores(rows)[0]["tasks"]
    with pytest.raises(InputError):
        compare_networks(FEW[:1], [labels], tmp_path, folds=2, seeds=0)


def test_compare_interrupted_resumes(labels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_networks(FEW[:1], [labels], tmp_path, folds=3)
    lines = (tmp_path / ROWS_FILE).read_text().splitlines()
    (tmp_path / ROWS_FILE).write_text("\n".join(lines[:2]) + "\n" + lines[2][:20])
    completed = []
    monkeypatch.setattr(
        module,
        "_train_cell",
        lambda *args, run=module._train_cell: completed.append(args[3].fold) or run(*args),
    )
    rows = compare_networks(FEW[:1], [labels], tmp_path, folds=3)
    assert completed == [2] and [row.fold for row in rows] == [0, 1, 2]


def test_assign_folds_balances_schedules(labels: Path) -> None:
    data = RankingDataset.from_label_sets([module.LabelSet.open(labels)])
    parts = assign_folds(data, 2)
    assert [len(part) for part in parts] == [2, 2]
    known = {group.task.family for group in data.groups if group.task.pattern is not None}
    assert sorted(len(known.intersection(part)) for part in parts) == [1, 2]
    for count in (1, 5):
        with pytest.raises(InputError):
            assign_folds(data, count)


def test_named_and_ablation_entries() -> None:
    entries = {entry.name: entry for entry in build_named_entries(QUICK, ["spmm", "spmv"])}
    assert set(entries) == {
        *(f"{name}_{op}" for op in ("spmm", "spmv") for name in (
            BOOSTED, "WACONet", "AutoSparseNet_WACONet", "AutoSparseNet", "AutoSparseNet_Pretrained",
            ENSEMBLE,
        )),
        "AutoSparseNet_Full", "AutoSparseNet_Pretrained",
    }  # fmt: skip
    waco, full = entries["WACONet_spmm"].config, entries["AutoSparseNet_Full"]
    assert waco is not None and waco.net.pattern is not None
    assert (waco.net.pattern.kind, waco.net.context_mode, waco.loss, waco.sampling.mode) == (
        "strided", "mlp", "margin", "naive",
    )  # fmt: skip
    assert full.operators == ("spmm", "spmv") and full.config is not None and full.config.net == SMALL
    started = entries["AutoSparseNet_Pretrained"].config
    assert started is not None and started.init == SHIPPED and started.steps < QUICK.steps
    assert started.net == change(load_shipped_network().config, dropout=SMALL.dropout)
    table = {entry.name: entry.config for entry in build_ablation_entries(QUICK, ["spmm"])}
    assert len(table) == len(build_ablation_entries(QUICK, ["spmm"])) == 5 * 3 + 5
    config = table["hdc_concat_no_pick"]
    assert config is not None and config.pick_weight == 0.0 and config.loss == QUICK.loss


def test_invalid_comparison_raises(labels: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        write_page(tmp_path)
    with pytest.raises(InputError):
        compare_networks([FEW[0], FEW[0]], [labels], tmp_path, folds=3)
    (tmp_path / ROWS_FILE).write_text('{"entry": "x", "fold": 0}\n')
    with pytest.raises(FileFormatError):
        read_comparison(tmp_path)


def test_page_shows_searches(labels: Path, tmp_path: Path) -> None:
    compare_networks(FEW[2:], [labels], tmp_path, folds=3)
    for method, ratios in (("evolutionary", (None, 2.0, 1.0, 0.5)), (DEFAULT_METHOD, (0.52, 0.6))):
        item = SearchRecord(
            problem="cca spmv", method=method, ratios=ratios, elapsed_s=(0.5, 1.0, 1.5, 2.0)[: len(ratios)],
            seconds={"measure": 2.0, "rerank": 1.0, "other": 0.5},
        )  # fmt: skip
        assert SearchRecord.load(item.save(tmp_path / SEARCHES_DIR / f"{method}.json")) == item
    assert item.count_until(0.5) == 1 and item.count_until(0.1) is None
    page = write_page(tmp_path)
    assert page == tmp_path / PAGE_FILE
    assert "2 s without the model and 0.5 s with the model in total" in page.read_text()
    for text in (
        "Searches: cca spmv",
        "1 measurements with the model are as good as 4 without it, 4.0 times fewer",
        "4×",
        "Time until as good",
        "Best schedule so far, by measurements",
        "Best schedule so far, by time",
        "evolutionary: measure 3, other 0.5; guided-evolutionary: measure 3",
    ):
        assert text in page.read_text()
    write_json(tmp_path / SCORES_FILE, {"environment": {"python": "3.99"}, "command": "evaluate 17"})
    text = write_page(tmp_path).read_text()
    assert "3.99" in text and "evaluate 17" in text
    for content in ("[]", '{"environment": {}, "command": 7}'):
        (tmp_path / SCORES_FILE).write_text(content)
        with pytest.raises(FileFormatError):
            write_page(tmp_path)
    (tmp_path / SCORES_FILE).unlink()
    (tmp_path / SEARCHES_DIR / "other.json").write_text("[]")
    with pytest.raises(FileFormatError):
        write_page(tmp_path)
