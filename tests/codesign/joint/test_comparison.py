"""Comparing: every seed and mode, going on where it was stopped, and what the numbers say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from sparseflow.codesign.joint.comparison import compare, results, write_results
from sparseflow.codesign.joint.trace import TRACE, replay
from sparseflow.codesign.joint.trainer import BASELINES, Designed
from sparseflow.errors import InputError
from tests.codesign.toys import chain, hardware, make_toy, quick

COMPARING = import_module("sparseflow.codesign.joint.comparison")
"""The module: the wing has a function of that name."""

DESIGNS = {"joint", *BASELINES}


def design(mode: str, *, energy: float = 1.0, accuracy: float = 0.9, violations: int = 0) -> Designed:
    """A design whose energy-delay product is `energy`."""
    hw, layers = hardware(), chain()
    decision = hw.begin(layers)
    priced = hw.price(layers, decision)
    stats = replace(priced.stats, energy_mj=energy, total_latency_ms=1.0)
    return Designed(
        mode=mode, accuracy=accuracy, decision=decision, priced=replace(priced, stats=stats),
        violations=violations,
    )  # fmt: skip


def told(found: Mapping[int, Sequence[Designed]]) -> dict[str, Any]:
    return results(found, quick(), device="cpu", command="the command")


def both(joint: Sequence[float], two: Sequence[float], *, accuracy: float = 0.9) -> dict[int, list[Designed]]:
    return {
        seed: [
            design("joint", energy=one, accuracy=accuracy),
            design("two-stage", energy=other),
        ]
        for seed, (one, other) in enumerate(zip(joint, two, strict=True))
    }


def test_every_seed_and_mode_is_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, float]] = []
    found = compare(quick(), make_toy, tmp_path, seeds=2, progress=lambda *one: said.append(one))
    assert set(found) == {0, 1} and all({each.mode for each in runs} == DESIGNS for runs in found.values())
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "joint-0",
        "joint-1",
        "two-stage-0",
        "two-stage-1",
    ]
    assert [share for _, share in said] == [0.25, 0.5, 0.75, 1.0] and said[0][0].startswith("seed 0: joint ")
    for folder in tmp_path.iterdir():
        seed = int(folder.name[-1])
        first = json.loads((folder / TRACE).read_text().splitlines()[0])
        assert first["settings"]["joint"]["seed"] == seed == first["environment"]["seed"]
        assert all(each.same for each in replay(folder / TRACE))
    # Nothing is trained again.
    monkeypatch.setattr(
        "tests.codesign.toys.Toy.train_epoch", lambda *_, **__: pytest.fail("a finished run was trained")
    )
    assert compare(quick(), make_toy, tmp_path, seeds=2) == found


def test_it_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compare(quick(), make_toy, tmp_path / "whole", seeds=2, modes=("joint",))
    trained: list[Path] = []
    original = COMPARING._run

    def stopping(job: Any) -> Any:
        trained.append(job.folder)
        if len(trained) == 2:
            raise KeyboardInterrupt
        return original(job)

    monkeypatch.setattr(COMPARING, "_run", stopping)
    with pytest.raises(KeyboardInterrupt):
        compare(quick(), make_toy, tmp_path / "stopped", seeds=2, modes=("joint",))
    assert compare(quick(), make_toy, tmp_path / "stopped", seeds=2, modes=("joint",)) == whole


def test_some_modes_only(tmp_path: Path) -> None:
    found = compare(quick(), make_toy, tmp_path, seeds=1, modes=("joint",))
    assert [each.mode for each in found[0]] == ["joint"]
    assert told(found)["verdict"] == "Joint training and its two-stage baseline were not both run."
    assert [line["ratio"] for line in told(found)["modes"]] == [None]


@pytest.mark.slow
def test_several_workers_find_the_same(tmp_path: Path) -> None:
    one = compare(quick(), make_toy, tmp_path / "one", seeds=2)
    two = compare(quick(), make_toy, tmp_path / "two", seeds=2, workers=2)
    order = ("joint", *BASELINES)
    for seed in (0, 1):
        assert sorted(one[seed], key=lambda each: order.index(each.mode)) == sorted(
            two[seed], key=lambda each: order.index(each.mode)
        )


def test_settings_of_another_comparison_are_refused(tmp_path: Path) -> None:
    compare(quick(), make_toy, tmp_path, seeds=1, modes=("joint",))
    with pytest.raises(ValueError, match=r"settings\.loss\.lambda_T"):
        compare(quick(loss={"lambda_T": 3.0}), make_toy, tmp_path, seeds=1, modes=("joint",))


def test_joint_training_wins_where_every_seed_says_so() -> None:
    found = told(both([0.7, 0.75, 0.8, 0.72, 0.78], [1.0] * 5))
    assert found["verdict"].startswith(
        "Joint training wins: accuracies are equal (+0.00 points); energy-delay is"
    )
    lines = {line["mode"]: line for line in found["modes"]}
    assert lines["joint"]["ratio"] == pytest.approx((0.7 * 0.75 * 0.8 * 0.72 * 0.78) ** 0.2)
    assert 0.7 < lines["joint"]["low"] < lines["joint"]["ratio"] < lines["joint"]["high"] < 0.8
    assert lines["two-stage"]["ratio"] == lines["two-stage"]["low"] == 1.0
    assert lines["joint"]["energy_delay"] == pytest.approx(0.75) and lines["joint"]["seeds"] == 5


def test_the_baseline_wins_where_every_seed_says_so() -> None:
    found = told(both([2.0, 2.2, 1.9], [1.0, 1.1, 0.9]))
    assert found["verdict"].startswith("The two-stage baseline wins: ")
    assert "2.036 of two-stage's (2.000 to 2.111)" in found["verdict"]


@pytest.mark.parametrize("joint", [[0.5, 2.0, 0.5, 2.0], [1.0, 1.0, 1.0, 1.0], [0.9, 1.02, 1.05, 0.97]])
def test_neither_wins_where_seeds_differ_or_all_is_equal(joint: list[float]) -> None:
    assert told(both(joint, [1.0] * 4))["verdict"].startswith("Neither wins: ")


@pytest.mark.parametrize(
    ("joint", "said"),
    [
        (0.91, "not equal (+1.00 points)"),
        (0.904, "are equal (+0.40 points)"),
        (0.88, "not equal (-2.00 points)"),
    ],
)
def test_accuracies_that_differ_are_told(joint: float, said: str) -> None:
    found = told(both([0.7, 0.75], [1.0, 1.0], accuracy=joint))
    assert said in found["verdict"]


@pytest.mark.parametrize(
    ("joint", "accuracy", "said"),
    [
        (
            [0.7, 0.75],
            0.88,
            "Neither wins, since what is less costs accuracy: accuracies are not equal (-2.00",
        ),
        ([0.7, 0.75], 0.92, "Joint training wins: accuracies are not equal (+2.00 points)"),
        (
            [2.0, 2.2],
            0.92,
            "Neither wins, since what is less costs accuracy: accuracies are not equal (+2.00",
        ),
        ([2.0, 2.2], 0.88, "The two-stage baseline wins: accuracies are not equal (-2.00 points)"),
        ([0.7, 0.75], 0.896, "Joint training wins: accuracies are equal (-0.40 points)"),
    ],
)
def test_who_wins_does_not_pay_with_accuracy(joint: list[float], accuracy: float, said: str) -> None:
    found = both(joint, [1.0, 1.0])
    for designs in found.values():
        designs[0] = replace(designs[0], accuracy=accuracy)
    assert told(found)["verdict"].startswith(said)


def test_designs_are_in_the_order_of_modes_whichever_ended_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def last_first(function: Any, items: Sequence[Any], **_: Any) -> Any:
        return ((at, function(items[at])) for at in reversed(range(len(items))))

    monkeypatch.setattr(COMPARING, "map_unordered", last_first)
    found = compare(quick(), make_toy, tmp_path, seeds=2)
    assert [[each.mode for each in designs] for designs in found.values()] == [["joint", *BASELINES]] * 2


def test_a_comparison_needs_a_seed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"`seeds` \(=0\)"):
        compare(quick(), make_toy, tmp_path, seeds=0)


def test_of_one_seed_nothing_follows() -> None:
    found = told(both([0.5], [1.0]))
    assert found["verdict"].startswith("Of one seed nothing follows: ") and "0.500" in found["verdict"]
    assert all(line["low"] is None and line["high"] is None for line in found["modes"])


def test_seeds_that_only_one_side_has_are_no_pairs() -> None:
    found = both([0.5, 0.5, 9.0], [1.0, 1.0, 1.0])
    del found[2][1]
    lines = {line["mode"]: line for line in told(found)["modes"]}
    assert lines["joint"]["ratio"] == pytest.approx(0.5) and lines["joint"]["seeds"] == 3


def test_what_is_told_is_json_and_whole(tmp_path: Path) -> None:
    found = both([0.7, 0.8], [1.0, 1.0])
    found[0].append(design("mapping-only", violations=0))
    found[0][0] = design("joint", energy=0.7, violations=3)
    path = write_results(tmp_path, told(found))
    again = json.loads(path.read_text())
    assert [line["mode"] for line in again["modes"]] == ["joint", "two-stage", "mapping-only"]
    assert again["modes"][0]["violations"] == 3 and len(again["runs"]) == 5
    assert again["command"] == "the command" and again["settings"] == quick().model_dump(mode="json")
    run = again["runs"][0]
    assert (run["seed"], run["mode"], run["energy_delay"]) == (0, "joint", 0.7)
    assert run["chips"] == ["npu-m"] * 3 and run["priced"]["chips"] == 3
    assert "NaN" not in path.read_text() and again["environment"]
