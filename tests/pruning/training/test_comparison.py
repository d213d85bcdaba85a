"""Comparison of selectors: models, resume, summaries and the report page."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")

from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning import ScoreConfig
from sparseflow.pruning.api import compare_models
from sparseflow.pruning.compaction.saved_model import load_model
from sparseflow.pruning.data.datasets import load_video_dataset
from sparseflow.pruning.evaluation.accuracy import evaluate_accuracy
from sparseflow.pruning.model.config import SELECTORS
from sparseflow.pruning.training import comparison
from sparseflow.pruning.training.comparison import (
    GRADUAL_TOME,
    RESULTS_FILE,
    ROWS_FILE,
    SelectorRow,
    list_ablations,
    list_selector_models,
    measure_latencies,
    summarize_accuracy,
    train_models,
    write_results,
)
from tests.pruning.small import quick

TINY = quick(data={"train_clips": 16, "test_clips": 12}, train={"epochs": 1, "batch_size": 8})


def test_list_selector_models_changes_only_the_selector() -> None:
    configs = list_selector_models(TINY)
    assert [name for name in configs if name != GRADUAL_TOME] == ["dense", *SELECTORS]
    gradual = list_selector_models(quick(model={"depth": 3}, ast={"stages": {"1": 0.25}}))[GRADUAL_TOME]
    assert gradual.ast.selector == "tome" and gradual.ast.stages == pytest.approx({1: 0.5, 2: 0.25})
    assert configs["dense"].mode == "dense"
    assert configs["tome"].ast.keep == {"channel": 0.5}
    assert configs["random"].ast == replace(TINY.ast, selector="random")
    with pytest.raises(InputError, match="'dense'"):
        list_selector_models(quick(mode="dense"))


def test_list_ablations_changes_one_part_each() -> None:
    configs = list_ablations(TINY)
    assert configs["ast, no time"].ast == replace(TINY.ast, score=ScoreConfig(time=0.0)) and len(configs) == 6
    assert configs["one frame"].data.model_dump()["frozen"] is True


def test_shares_raise_all_stages_to_a_power() -> None:
    config = quick(ast={"stages": {"0": 0.81, "1": 0.09}, "keep": {}})
    configs = list_selector_models(config, [0.3, 0.09])
    assert [name for name in configs if not name.startswith(GRADUAL_TOME)] == [
        "dense", *(f"{name} {share:g}" for name in SELECTORS for share in (0.3, 0.09))
    ]  # fmt: skip
    assert configs[f"{GRADUAL_TOME} 0.09"].ast.stages[1] == pytest.approx(0.09)
    assert configs["random 0.3"].ast.stages == pytest.approx({0: 0.9, 1: 0.3})
    assert list(list_ablations(config, 0.3))[:2] == ["ast 0.3, no time", "ast 0.3, no space"]
    with pytest.raises(InputError, match="share"):
        list_selector_models(config, [0.0])
    with pytest.raises(InputError, match="below 1"):
        list_selector_models(quick(ast={"stages": {"1": 1.0}}), [0.5])


def test_models_are_compared_with_ast_of_the_same_share() -> None:
    names = {
        "random 0.3": "ast 0.3", "ast 0.3, no time": "ast 0.3", "tome": "ast", "one frame": "ast",
        "evs 0.1, training-free": "ast 0.1, training-free", "ast, no time": "ast",
    }  # fmt: skip
    assert {name: comparison._get_ast_name(name) for name in names} == names


@pytest.mark.usefixtures("no_page")
def test_compare_models_at_several_shares_and_without_training(tmp_path: Path) -> None:
    config = quick(
        ast={"stages": {"1": 0.5}, "keep": {}}, data={"train_clips": 16, "test_clips": 12},
        train={"epochs": 1, "batch_size": 8},
    )  # fmt: skip
    result = compare_models(
        config, tmp_path, num_seeds=1, names=["dense", "ast", "random 0.25"], shares=[0.5, 0.25],
        training_free=True, batch_size=2, rounds=2,
    )  # fmt: skip
    trained = ["dense", "ast 0.5", "ast 0.25", "random 0.25"]
    assert [row.model for row in result.models] == [
        *trained, *(f"{name}, training-free" for name in trained[1:])
    ]  # fmt: skip
    assert [row.model for row in result.latency] == trained
    page = result.page.read_text()
    assert "Accuracy over time, after training" in page and "with the weights of the dense model" in page
    dense = load_model(tmp_path / "dense/seed-0/model.safetensors")
    model = list_selector_models(config, [0.5])["ast 0.5"].build_model(8, 1)
    model.load_state_dict(model.state_dict() | dense.state_dict())
    accuracy = evaluate_accuracy(model.eval(), load_video_dataset(config).test, batch_size=8)
    assert result.models[4].accuracy == accuracy.video_top1
    refused: tuple[tuple[list[str], str], ...] = ((["ast"], "'dense'"), (["ast 0.3"], "ast 0.3"))
    for names, message in refused:
        with pytest.raises(InputError, match=message):
            compare_models(config, tmp_path, names=names, shares=[0.5], training_free=True)


@pytest.mark.usefixtures("no_page")
def test_train_models_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    selector_models = list_selector_models(TINY)
    models = {name: selector_models[name] for name in ("dense", "ast")}
    messages: list[tuple[str, float]] = []
    rows = train_models(
        models, tmp_path, num_seeds=2, progress=lambda text, fraction: messages.append((text, fraction))
    )
    expected = {(name, seed) for name in models for seed in (0, 1)}
    assert {(row.entry, row.seed) for row in rows} == expected
    assert messages[-1][1] == 1.0
    lines = (tmp_path / ROWS_FILE).read_text().splitlines()
    (tmp_path / ROWS_FILE).write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:10])
    trained = []

    def train_model(root: Path, cell: Any, device: str, original: Any = comparison._train_model) -> Any:
        trained.append(cell.name)
        return original(root, cell, device)

    monkeypatch.setattr(comparison, "_train_model", train_model)
    assert train_models(models, tmp_path, num_seeds=2) == rows and trained == ["ast"]
    latencies = measure_latencies(list(models), tmp_path, batch_size=2, rounds=2)
    assert [latency.model for latency in latencies] == ["dense", "ast"]
    assert latencies[1].gflops < latencies[0].gflops and len(latencies[0].times_ms) == 2
    page = write_results(tmp_path, rows, latencies, config=TINY, device="cpu", command="again").read_text()
    record = json.loads((tmp_path / RESULTS_FILE).read_text())
    assert record["models"] == [asdict(summary) for summary in summarize_accuracy(rows)]
    assert "Accuracy on test videos" in page and "over dense" in page
    with pytest.raises(InputError, match="'dense'"):
        measure_latencies(["ast"], tmp_path)
    other = quick(data={"train_clips": 16, "test_clips": 12}, train={"epochs": 1, "batch_size": 4})
    with pytest.raises(InputError, match="dense"):
        train_models({"dense": list_selector_models(other)["dense"]}, tmp_path, num_seeds=2)
    (tmp_path / ROWS_FILE).write_text('{"entry": "x"}\n')
    with pytest.raises(FileFormatError, match=ROWS_FILE):
        train_models(models, tmp_path)


def test_summarize_accuracy_pairs_differences_by_seed() -> None:
    def make_row(entry: str, seed: int, accuracy: float) -> SelectorRow:
        return SelectorRow(
            entry=entry, seed=seed, settings="", clip_top1=accuracy, video_top1=accuracy, stats={}
        )

    rows = [make_row("dense", 0, 0.5), make_row("dense", 1, 0.9), make_row("ast", 0, 0.4),
            make_row("ast", 1, 0.8)]  # fmt: skip
    dense, ast = summarize_accuracy(rows)
    assert ast.accuracy == pytest.approx(0.6)
    assert (ast.over_dense, ast.over_dense_low) == pytest.approx((-0.1, -0.1))
    assert dense.over_ast is not None and dense.over_dense == 0.0
