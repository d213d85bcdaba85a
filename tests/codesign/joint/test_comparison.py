"""Tests of `codesign.joint.comparison`."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from sparseflow.codesign.joint.comparison import compare_designs, summarize_designs
from sparseflow.codesign.joint.trace import TRACE_FILE, replay
from sparseflow.codesign.joint.trainer import BASELINES, DesignResult
from sparseflow.errors import InputError
from tests.codesign.toys import chain, hardware, make_toy, quick

pytestmark = pytest.mark.usefixtures("undrawn_figures")

COMPARING = import_module("sparseflow.codesign.joint.comparison")
"""The module: the wing has a function of that name."""

DESIGNS = {"joint", *BASELINES}


@functools.cache
def evaluate_initial() -> tuple[Any, Any]:
    """Initial decision of the toy and its cost."""
    hw, layers = hardware(), chain()
    decision = hw.initial_decision(layers)
    return decision, hw.evaluate_cost(layers, decision)


def design(mode: str, *, energy: float = 1.0, accuracy: float = 0.9, violations: int = 0) -> DesignResult:
    """A design whose energy-delay product is `energy`."""
    decision, priced = evaluate_initial()
    stats = replace(priced.stats, energy_mj=energy, total_latency_ms=1.0)
    return DesignResult(
        mode=mode, accuracy=accuracy, decision=decision, cost=replace(priced, stats=stats),
        violations=violations,
    )  # fmt: skip


def summarize(result: Mapping[int, Sequence[DesignResult]]) -> dict[str, Any]:
    return summarize_designs(result, quick(), device="cpu", command="the command")


def both(
    joint: Sequence[float], two: Sequence[float], *, accuracy: float = 0.9
) -> dict[int, list[DesignResult]]:
    return {
        seed: [
            design("joint", energy=first, accuracy=accuracy),
            design("two-stage", energy=other),
        ]
        for seed, (first, other) in enumerate(zip(joint, two, strict=True))
    }


def test_compare_designs_runs_each_seed_and_mode_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message: list[tuple[str, float]] = []
    designs = compare_designs(
        quick(), make_toy, tmp_path, num_seeds=2, progress=lambda *single: message.append(single)
    )
    assert set(designs) == {0, 1} and all({run.mode for run in runs} == DESIGNS for runs in designs.values())
    assert sorted(run.name for run in tmp_path.iterdir()) == [
        "joint-0",
        "joint-1",
        "two-stage-0",
        "two-stage-1",
    ]
    assert [share for _, share in message] == [0.25, 0.5, 0.75, 1.0] and message[0][0].startswith(
        "seed 0: joint "
    )
    for folder in tmp_path.iterdir():
        seed = int(folder.name[-1])
        first = json.loads((folder / TRACE_FILE).read_text().splitlines()[0])
        assert first["settings"]["joint"]["seed"] == seed == first["environment"]["seed"]
        assert all(run.is_exact for run in replay(folder / TRACE_FILE))
    # Nothing is trained again.
    monkeypatch.setattr(
        "tests.codesign.toys.Toy.train_epoch", lambda *_, **__: pytest.fail("a finished run was trained")
    )
    assert compare_designs(quick(), make_toy, tmp_path, num_seeds=2) == designs


def test_compare_designs_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    designs = compare_designs(quick(), make_toy, tmp_path / "whole", num_seeds=2, modes=("joint",))
    trained: list[Path] = []
    original = COMPARING._run_job

    def stopping(job: Any) -> Any:
        trained.append(job.out_dir)
        if len(trained) == 2:
            raise KeyboardInterrupt
        return original(job)

    monkeypatch.setattr(COMPARING, "_run_job", stopping)
    with pytest.raises(KeyboardInterrupt):
        compare_designs(quick(), make_toy, tmp_path / "stopped", num_seeds=2, modes=("joint",))
    assert compare_designs(quick(), make_toy, tmp_path / "stopped", num_seeds=2, modes=("joint",)) == designs


def test_compare_designs_of_one_mode(tmp_path: Path) -> None:
    designs = compare_designs(quick(), make_toy, tmp_path, num_seeds=1, modes=("joint",))
    assert [item.mode for item in designs[0]] == ["joint"]
    assert summarize(designs)["verdict"] == "Joint training or its two-stage baseline was not run."
    assert [line["ratio"] for line in summarize(designs)["modes"]] == [None]


@pytest.mark.slow
def test_compare_designs_with_workers_is_identical(tmp_path: Path) -> None:
    designs = compare_designs(quick(), make_toy, tmp_path / "one", num_seeds=2)
    two = compare_designs(quick(), make_toy, tmp_path / "two", num_seeds=2, workers=2)
    order = ("joint", *BASELINES)
    for seed in (0, 1):
        assert sorted(designs[seed], key=lambda item: order.index(item.mode)) == sorted(
            two[seed], key=lambda item: order.index(item.mode)
        )


def test_compare_designs_with_other_config_is_refused(tmp_path: Path) -> None:
    compare_designs(quick(), make_toy, tmp_path, num_seeds=1, modes=("joint",))
    with pytest.raises(ValueError, match=r"settings\.loss\.lambda_T"):
        compare_designs(quick(loss={"lambda_T": 3.0}), make_toy, tmp_path, num_seeds=1, modes=("joint",))


def test_verdict_joint_wins() -> None:
    result = summarize(both([0.7, 0.75, 0.8, 0.72, 0.78], [1.0] * 5))
    assert result["verdict"].startswith("Joint training wins: accuracies are equal (+0.00 points); ")
    lines = {line["mode"]: line for line in result["modes"]}
    assert lines["joint"]["ratio"] == pytest.approx((0.7 * 0.75 * 0.8 * 0.72 * 0.78) ** 0.2)
    assert 0.7 < lines["joint"]["low"] < lines["joint"]["ratio"] < lines["joint"]["high"] < 0.8
    assert lines["two-stage"]["ratio"] == lines["two-stage"]["low"] == 1.0
    assert lines["joint"]["energy_delay"] == pytest.approx(0.75) and lines["joint"]["seeds"] == 5


def test_verdict_baseline_wins() -> None:
    result = summarize(both([2.0, 2.2, 1.9], [1.0, 1.1, 0.9]))
    assert result["verdict"].startswith("The two-stage baseline wins: ")
    assert "2.036 of the two-stage baseline's (2.000 to 2.111)" in result["verdict"]


@pytest.mark.parametrize("joint", [[0.5, 2.0, 0.5, 2.0], [1.0, 1.0, 1.0, 1.0], [0.9, 1.02, 1.05, 0.97]])
def test_verdict_without_winner(joint: list[float]) -> None:
    assert summarize(both(joint, [1.0] * 4))["verdict"].startswith("No winner: ")


@pytest.mark.parametrize(
    ("joint", "message"),
    [
        (0.91, "not equal (+1.00 points)"),
        (0.904, "are equal (+0.40 points)"),
        (0.88, "not equal (-2.00 points)"),
    ],
)
def test_verdict_states_accuracy_difference(joint: float, message: str) -> None:
    result = summarize(both([0.7, 0.75], [1.0, 1.0], accuracy=joint))
    assert message in result["verdict"]


@pytest.mark.parametrize(
    ("joint", "accuracy", "message"),
    [
        (
            [0.7, 0.75],
            0.88,
            "No winner, because the lower energy-delay product has lower accuracy: accuracies are not equal "
            "(-2.00",
        ),
        ([0.7, 0.75], 0.92, "Joint training wins: accuracies are not equal (+2.00 points)"),
        (
            [2.0, 2.2],
            0.92,
            "No winner, because the lower energy-delay product has lower accuracy: accuracies are not equal "
            "(+2.00",
        ),
        ([2.0, 2.2], 0.88, "The two-stage baseline wins: accuracies are not equal (-2.00 points)"),
        ([0.7, 0.75], 0.896, "Joint training wins: accuracies are equal (-0.40 points)"),
    ],
)
def test_verdict_requires_equal_or_better_accuracy(joint: list[float], accuracy: float, message: str) -> None:
    result = both(joint, [1.0, 1.0])
    for designs in result.values():
        designs[0] = replace(designs[0], accuracy=accuracy)
    assert summarize(result)["verdict"].startswith(message)


def test_compare_designs_orders_results_by_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def last_first(function: Any, items: Sequence[Any], **_: Any) -> Any:
        return ((index, function(items[index])) for index in reversed(range(len(items))))

    names = {"joint": ["joint"], "two-stage": list(BASELINES)}
    monkeypatch.setattr(COMPARING, "map_unordered", last_first)
    monkeypatch.setattr(COMPARING, "_run_job", lambda job: [design(mode) for mode in names[job.mode]])
    result = compare_designs(quick(), make_toy, tmp_path, num_seeds=2)
    assert [[item.mode for item in designs] for designs in result.values()] == [["joint", *BASELINES]] * 2


def test_compare_designs_without_seeds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\(=0\)"):
        compare_designs(quick(), make_toy, tmp_path, num_seeds=0)


def test_verdict_of_one_seed_is_no_conclusion() -> None:
    result = summarize(both([0.5], [1.0]))
    assert result["verdict"].startswith("One seed is not enough for a conclusion: ")
    assert "0.500" in result["verdict"]
    assert all(line["low"] is None and line["high"] is None for line in result["modes"])


def test_ratio_uses_common_seeds_only() -> None:
    result = both([0.5, 0.5, 9.0], [1.0, 1.0, 1.0])
    del result[2][1]
    lines = {line["mode"]: line for line in summarize(result)["modes"]}
    assert lines["joint"]["ratio"] == pytest.approx(0.5) and lines["joint"]["seeds"] == 3


def test_summary_is_json() -> None:
    result = both([0.7, 0.8], [1.0, 1.0])
    result[0].append(design("mapping-only", violations=0))
    result[0][0] = design("joint", energy=0.7, violations=3)
    record = json.loads(json.dumps(summarize(result), allow_nan=False))
    assert [line["mode"] for line in record["modes"]] == ["joint", "two-stage", "mapping-only"]
    assert record["modes"][0]["violations"] == 3 and len(record["runs"]) == 5
    assert record["command"] == "the command" and record["settings"] == quick().model_dump(mode="json")
    run = record["runs"][0]
    assert (run["seed"], run["mode"], run["energy_delay"]) == (0, "joint", 0.7)
    assert run["decision"]["chips"] == ["npu-m"] * 3 and run["cost"]["chips"] == 3
    assert record["environment"]
