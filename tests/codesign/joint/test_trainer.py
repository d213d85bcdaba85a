"""Tests of `codesign.joint.trainer`."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseflow.codesign.design.decision import HardwareDecision
from sparseflow.codesign.design.saved_plan import PLAN_FILE, load_plan
from sparseflow.codesign.hardware.slots import ChipSlotConfig
from sparseflow.codesign.joint import trainer
from sparseflow.codesign.joint.trace import TRACE_FILE, read_trace, replay
from sparseflow.codesign.joint.trainer import BASELINES, DesignResult, JointTrainer
from sparseflow.codesign.workload.splits import RewritePlan, check_rewrite_plan
from sparseflow.errors import InputError, RunError
from tests.codesign.toys import PAYS, Sized, Toy, hardware, quick, rows_of, trained, wrong_with


def epochs_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows_of(folder)[1:] if row["kind"] == "epoch"]


@pytest.fixture(scope="module")
def split_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Toy, DesignResult]:
    """Directory, task and result of a run whose design has splits."""
    folder = tmp_path_factory.mktemp("split")
    task, (result,) = trained(folder, **PAYS)
    return folder, task, result


def test_run_writes_trace_and_plan(split_run: tuple[Path, Toy, DesignResult]) -> None:
    folder, task, result = split_run
    rows = rows_of(folder)
    assert [row["kind"] for row in rows[1:]] == [*["epoch"] * 5, "end"]
    assert [row["epoch"] for row in rows[1:]] == [1, 2, 3, 4, 5, 5]
    assert result.mode == "joint" and result.accuracy == task.evaluate_accuracy() == rows[-1]["accuracy"]
    assert HardwareDecision.from_dict(rows[-1]["decision"]) == result.decision
    assert rows[-1]["cost"]["objective"] == result.cost.objective
    plan = load_plan(folder / PLAN_FILE)
    assert plan.decision == result.decision and tuple(plan.layers) == task.export_model().describe_layers(8)
    assert plan.hardware.evaluate_cost(plan.layers, plan.decision) == result.cost
    (record,) = json.loads((folder / PLAN_FILE).read_text())["extra"]["designs"]
    assert record["mode"] == "joint" and record["energy_delay"] == result.cost.energy_delay
    assert all(item.is_exact for item in replay(folder / TRACE_FILE))
    assert all(row["numbers"]["loss"] >= 0.0 for row in epochs_of(folder))


def test_hardware_loss_is_zero_during_warmup(tmp_path: Path) -> None:
    task, _ = trained(tmp_path, Toy(6), schedule={"warmup_epochs": 3, "ramp_epochs": 2, "max_weight": 0.4})
    rows = epochs_of(tmp_path)
    assert [row["lambda_hw"] for row in rows] == pytest.approx([0.0, 0.0, 0.0, 0.2, 0.4, 0.4])
    assert task.pulled == [False, False, False, True, True, True]
    assert [row["reference_accuracy"] is None for row in rows] == [True, True, False, False, False, False]
    assert [row["round"] for row in rows] == [0, 0, 1, 2, 3, 4]
    # Nothing is decided either.
    assert rows[0]["decision"] == rows[1]["decision"] and rows[0]["alpha"] == rows[1]["alpha"]


def test_extra_loss_is_weight_times_hw_loss(tmp_path: Path) -> None:
    tasks = [
        trained(
            tmp_path / str(maximum),
            schedule={"max_weight": maximum, "epsilon": 0.9},
            joint={"alpha_steps": 0},
        )[0]
        for maximum in (0.25, 0.5)
    ]
    first, other = (epochs_of(tmp_path / str(maximum)) for maximum in (0.25, 0.5))
    assert first[1]["numbers"] == other[1]["numbers"] and first[2]["numbers"] != other[2]["numbers"]
    # In the first step both see the same model and the same draw.
    assert tasks[1].pulls[0] == pytest.approx(2.0 * tasks[0].pulls[0], rel=1e-6)


def test_larger_weight_closes_gates(tmp_path: Path) -> None:
    gates = []
    for maximum in (0.0, 1.0, 10.0):
        task, _ = trained(tmp_path / str(maximum), Toy(6), schedule={"max_weight": maximum, "epsilon": 0.99})
        gates.append(float(task.gates.detach().mean()))
    assert gates[0] == 3.0 and gates[0] > gates[1] > gates[2]


def test_hw_every_skips_steps(tmp_path: Path) -> None:
    task, _ = trained(tmp_path, joint={"hw_every": 2})
    assert len(task.pulls) == 9 and [pull_value != 0.0 for pull_value in task.pulls] == [False, True] * 4 + [
        False
    ]


def test_guard_freezes_and_resumes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accuracies = [0.9, 0.9, 0.89, 0.5, 0.9, 0.9, 0.9, 0.9]
    with caplog.at_level(logging.WARNING):
        task, (result,) = trained(tmp_path, Toy(8, accuracies=accuracies))
    rows = epochs_of(tmp_path)
    assert [row["lambda_hw"] for row in rows] == [0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.5, 0.5]
    assert [row["frozen"] for row in rows] == [False] * 3 + [True, True] + [False] * 3
    assert task.pulled == [weight > 0.0 for weight in [row["lambda_hw"] for row in rows]]
    assert result.violations == 2
    # Frozen: nothing discrete changes, and the slots' logits do not either.
    assert rows[2]["decision"] == rows[3]["decision"] == rows[4]["decision"]
    assert rows[2]["alpha"] == rows[3]["alpha"] == rows[4]["alpha"]
    assert [row["round"] for row in rows] == [0, 1, 2, 2, 2, 3, 4, 5]
    values = [record.getMessage() for record in caplog.records if record.name == trainer.__name__]
    assert len(values) == 2 and "disabled" in values[0] and "enabled" in values[1]
    assert "epoch 4: accuracy 0.5000, reference 0.9000" in values[0]


def test_accuracy_recovers_while_frozen(tmp_path: Path) -> None:
    # Gates close under the hardware's weight, and with them goes accuracy.
    task, (result,) = trained(
        tmp_path, Toy(12), schedule={"max_weight": 4.0, "epsilon": 0.02, "good_epochs": 1}
    )
    rows = epochs_of(tmp_path)
    reference = rows[1]["accuracy"]
    fell = next(index for index, row in enumerate(rows) if row["frozen"])
    assert rows[fell]["lambda_hw"] > 0.0 and rows[fell]["accuracy"] < reference - 0.02
    after = next(index for index in range(fell, len(rows)) if not rows[index]["frozen"])
    assert all(row["lambda_hw"] == 0.0 for row in rows[fell + 1 : after + 1])
    assert rows[after]["accuracy"] >= reference - 0.02 > rows[after - 1]["accuracy"]
    assert rows[after + 1]["lambda_hw"] > 0.0 and task.pulled[after + 1]
    contents = [[row["decision"][name] for name in ("chips", "mapping", "positions_mm")] for row in rows]
    assert all(content == contents[fell - 1] for content in contents[fell:after])
    assert result.violations == sum(row["frozen"] for row in rows) > 0


def test_decisions_never_raise_objective(tmp_path: Path) -> None:
    trained(tmp_path, Toy(7), **PAYS)
    hw, _, rows = read_trace(tmp_path / TRACE_FILE)
    for before, after in pairwise(rows):
        cost_before, cost_after = (hw.evaluate_cost(after.layers, row.decision) for row in (before, after))
        assert cost_after.objective <= cost_before.objective


def test_two_stage_run_adds_baselines(tmp_path: Path) -> None:
    task, result = trained(tmp_path, Toy(5), mode="two-stage", **PAYS)
    assert tuple(item.mode for item in result) == BASELINES and task.pulls == []
    assert torch.equal(task.gates.detach(), torch.full((2,), 3.0))
    rows = rows_of(tmp_path)
    assert [row["kind"] for row in rows[1:]] == [*["epoch"] * 5, *["round"] * 4, *["end"] * 3]
    assert [row["mode"] for row in rows[-3:]] == list(BASELINES)
    first = HardwareDecision.from_dict(rows[1]["decision"])
    assert all(row["decision"] == rows[1]["decision"] and row["lambda_hw"] == 0.0 for row in rows[1:6])
    two, mapping, layout = (item.decision for item in result)
    assert (mapping.chips, mapping.positions_mm) == (first.chips, first.positions_mm)
    assert (layout.chips, layout.segments, layout.mapping, layout.rewrite_plan) == (
        first.chips, first.segments, first.mapping, None
    )  # fmt: skip
    start = rows[5]["cost"]["objective"]
    assert all(item.cost.objective <= start for item in result)
    assert result[0].cost.objective < start and two != first
    assert load_plan(tmp_path / PLAN_FILE).decision == two and all(item.violations == 0 for item in result)
    assert len(json.loads((tmp_path / PLAN_FILE).read_text())["extra"]["designs"]) == 3


def test_modes_are_identical_during_warmup(tmp_path: Path) -> None:
    for mode in ("joint", "two-stage"):
        trained(tmp_path / mode, mode=mode, schedule={"warmup_epochs": 3})
    first, other = (epochs_of(tmp_path / mode) for mode in ("joint", "two-stage"))
    for name in ("numbers", "accuracy", "layers"):
        assert [row[name] for row in first[:3]] == [row[name] for row in other[:3]]
        assert first[3][name] != other[3][name]


@pytest.mark.parametrize("settle", [1, 3, 5, 7])
def test_two_stage_has_as_many_rounds_as_joint(settle: int, tmp_path: Path) -> None:
    counts = []
    for mode in ("joint", "two-stage"):
        trained(tmp_path / mode, Toy(5, accuracies=[0.5] * 5), mode=mode, schedule={"warmup_epochs": settle})
        counts.append(rows_of(tmp_path / mode)[-1]["round"])
    assert counts[0] == counts[1] == max(0, 6 - settle)


def test_two_stage_uses_temperatures_of_joint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where the draw is cold from its first round on, slots hardly ever leave the first chip.
    heat: dict[str, list[float]] = {"joint": [], "two-stage": []}
    original = JointTrainer._update_alpha

    def visited(self: JointTrainer) -> None:
        heat[self.mode].append(self.slots.tau)
        original(self)

    monkeypatch.setattr(JointTrainer, "_update_alpha", visited)
    for mode in ("joint", "two-stage"):
        trained(tmp_path / mode, Toy(5, accuracies=[0.5] * 5), mode=mode)
    assert len(heat["joint"]) == len(heat["two-stage"]) == 4
    assert heat["two-stage"] == pytest.approx(heat["joint"])


def test_use_fine_split_false_splits_nothing(
    split_run: tuple[Path, Toy, DesignResult], tmp_path: Path
) -> None:
    _, _, split = split_run
    _, (plain,) = trained(tmp_path, **PAYS, joint={"use_fine_split": False})
    assert split.decision.rewrite_plan is not None
    rows = rows_of(tmp_path)[1:]
    assert plain.decision.rewrite_plan is None and not any(row["decision"]["rewrite_plan"] for row in rows)


def test_design_fits_trained_model(tmp_path: Path) -> None:
    # Units of split layers change from epoch to epoch.
    task, (result,) = trained(tmp_path, Toy(7), **PAYS, schedule={"max_weight": 5.0, "epsilon": 0.9})
    layers = task.export_model().describe_layers(8)
    assert [name for names in result.decision.segments for name in names] == [layer.name for layer in layers]
    check_rewrite_plan(
        layers, result.decision.rewrite_plan or RewritePlan(splits=()), result.decision.assign_layers(layers)
    )


ALONE: dict[str, Any] = {"hardware": {"slots": 1, "chips": ["npu-m"]}}
"""Nothing can be decided, so the first decision stays the best."""


@pytest.mark.parametrize("changes", [{}, ALONE])
@pytest.mark.parametrize("gone_from", [2, 4])
def test_design_after_removed_layers(gone_from: int, changes: dict[str, Any], tmp_path: Path) -> None:
    task, (result,) = trained(tmp_path, Toy(5, gone_from=gone_from), **changes)
    layers = task.export_model().describe_layers(8)
    assert len(layers) == 4
    # What `verify` asks of a plan.
    assert [name for names in result.decision.segments for name in names] == [layer.name for layer in layers]


def test_growing_model_is_remapped(tmp_path: Path) -> None:
    # All layers are on one slot at first, which then holds too little.
    task, result = trained(tmp_path, Toy(5, grows_at=2), mapping={"mode": "serial"})
    first = HardwareDecision.from_dict(rows_of(tmp_path)[1]["decision"])
    assert set(first.mapping) == {0}
    saved = load_plan(tmp_path / PLAN_FILE)
    assert tuple(saved.layers) == task.export_model().describe_layers(8)
    assert saved.hardware.evaluate_cost(saved.layers, saved.decision) == result[0].cost


def test_every_decision_is_legal(tmp_path: Path) -> None:
    trained(tmp_path, Toy(6), wafer={"refine_steps": 40}, joint={"alpha_rate": 1.0, "alpha_steps": 6})
    hw, _, rows = read_trace(tmp_path / TRACE_FILE)
    for row in rows:
        assert not wrong_with(hw, row.decision), row.epoch


def test_alpha_steps_zero_keeps_alpha(tmp_path: Path) -> None:
    trained(tmp_path, joint={"alpha_steps": 0})
    assert all(row["alpha"] == rows_of(tmp_path)[1]["alpha"] for row in rows_of(tmp_path)[1:])


def test_run_reports_progress_and_keeps_rng_state(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    for mode in ("joint", "two-stage"):
        record: list[tuple[str, float]] = []
        trained(tmp_path / mode, mode=mode, progress=lambda *first, record=record: record.append(first))
        epochs = [share for kind, share in record if kind.startswith("epoch")]
        assert epochs == pytest.approx([index / 15 for index in range(1, 16)])
        assert record[-1] == ("refining the hardware", 1.0) and all(
            0.0 <= share <= 1.0 for _, share in record
        )
    assert sum(kind.startswith("hardware round") for kind, _ in record) == 4
    assert torch.equal(torch.random.get_rng_state(), before)


def test_seed_changes_samples(tmp_path: Path) -> None:
    tasks = [trained(tmp_path / str(index), joint={"seed": seed})[0] for index, seed in enumerate((0, 0, 1))]
    assert tasks[0].pulls == tasks[1].pulls != tasks[2].pulls


@pytest.mark.parametrize("accuracies", [[0.5, float("nan")], [1.5, 0.5]])
def test_invalid_accuracy_ends_the_run(accuracies: Sequence[float], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\(=(nan|1\.5)\)"):
        trained(tmp_path, Toy(2, accuracies=accuracies))


def test_trace_contains_alpha_and_probabilities(tmp_path: Path) -> None:
    trained(tmp_path, Toy(4), joint={"alpha_rate": 1.0})
    rows = rows_of(tmp_path)[1:]
    for row in rows:
        alpha, likely = torch.tensor(row["alpha"]), torch.tensor(row["probabilities"])
        assert alpha.shape == likely.shape == (3, 4) and set(alpha.flatten().tolist()) == {0.0, 1.0}
        torch.testing.assert_close(likely.sum(1), torch.ones(3))
        assert likely.min() > 0.0 and likely.max() < 1.0 and torch.equal(alpha.argmax(1), likely.argmax(1))
    # Before the hardware counts slots lean to the first chip, by 2 in logits; temperatures change nothing.
    first = torch.softmax(torch.tensor([0.0, 2.0, 0.0, 0.0]), 0)
    torch.testing.assert_close(torch.tensor(rows[0]["probabilities"]), first.expand(3, 4))
    assert rows[0]["probabilities"] != rows[-1]["probabilities"]


def messages(caplog: pytest.LogCaptureFixture, minimum: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= minimum]


@pytest.mark.parametrize(("mode", "rounds"), [("joint", 4), ("two-stage", 4)])
def test_round_is_logged_at_info_and_splits_at_debug(
    mode: Any, rounds: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="sparseflow"):
        trained(tmp_path, Toy(5, accuracies=[0.5] * 5), mode=mode, **PAYS, joint={"plan_every": 1})
    record, details = messages(caplog, logging.INFO), messages(caplog, logging.DEBUG)
    of_rounds = [line for line in record if line.startswith("round ")]
    assert len(of_rounds) == rounds
    rows = [row for row in rows_of(tmp_path)[1:] if row["kind"] == ("epoch" if mode == "joint" else "round")]
    for number, (line, row) in enumerate(zip(of_rounds, rows[-rounds:], strict=True), start=1):
        contents = [name for name in row["decision"]["chips"] if name is not None]
        assert line.startswith(f"round {number}, epoch {row['epoch']}: objective ")
        assert f"-> {row['cost']['objective']:.6g}; " in line
        assert all(f"{contents.count(name)} {name}" in line for name in contents)
        assert ("rewrite_plan is None" in line) is (row["decision"]["rewrite_plan"] is None)
    # What the planner says of the last plan of the design stays.
    last = json.loads((tmp_path / PLAN_FILE).read_text())["extra"]["considered"]
    splits = [line for line in record if "split of " in line]
    assert len(splits) == len(last) > 0
    # One more says what follows.
    assert sum("rewrite_plan is None: " in line or "layers split: " in line for line in record) == 1
    for line, item in zip(splits, last, strict=True):
        assert f"split of {item['name']} into {tuple(item['sizes'])} on slots {tuple(item['slots'])}" in line
    assert sum("split of " in line for line in details) > 3 * len(last)


def test_planner_details_are_not_logged_at_info(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="sparseflow"):
        trained(tmp_path, Toy(5, accuracies=[0.5] * 5), **PAYS)
    assert not [record for record in caplog.records if record.levelno < logging.INFO]


@pytest.mark.parametrize("mode", ["joint", "two-stage"])
def test_model_too_large_for_initial_chips_is_refused(mode: Any, tmp_path: Path) -> None:
    # As it begins the model needs 60 MB; at its most 15 GB, and the chips hold 12.
    task = Sized([10, 10, 10, 10], 2500)
    message = "12000 MB: 3000"
    with pytest.raises(InputError, match=message):
        trained(tmp_path, task, mode=mode)
    assert task.completed == 0 and not (tmp_path / TRACE_FILE).exists()


def test_growing_model_returns_to_initial_chips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ChipSlotConfig, "decode", lambda slots: [slots.chips[0]] * 3)  # 1 GB each
    task = Sized([10, 10, 10, 10, 1100, 1100, 1100], 1200)
    with caplog.at_level(logging.WARNING):
        _, (result,) = trained(tmp_path, task, loss={"lambda_area": 100.0})
    chips = [set(row["decision"]["chips"]) for row in epochs_of(tmp_path)]
    assert chips == [{"npu-m"}, {"npu-s"}, {"npu-s"}, {"npu-m"}, {"npu-m"}, {"npu-m"}]
    (record,) = [line for line in messages(caplog, logging.WARNING) if "no longer fits" in line]
    assert record.startswith("epoch 4: ")
    assert "6600 MB" in record and all(item.is_exact for item in replay(tmp_path / TRACE_FILE))
    assert result.cost.stats.memory_mb and max(result.cost.stats.memory_mb) <= 4000.0


@pytest.mark.parametrize("mode", ["joint", "two-stage"])
def test_model_beyond_open_gates_ends_the_run(mode: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="15000"):
        trained(tmp_path, Sized([10, 10, 2500, 2500], 20), mode=mode)


def test_other_config_of_hardware_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        JointTrainer(Toy(), hardware(), quick(loss={"lambda_T": 2.0}), tmp_path)


def test_plan_of_run_contains_splits_and_bound(split_run: tuple[Path, Toy, DesignResult]) -> None:
    folder, _, result = split_run
    extra = load_plan(folder / PLAN_FILE).extra
    assert set(extra) == {"considered", "lower_bound_ms", "gap", "finished", "designs"}
    assert extra["considered"] and extra["finished"] is True and 0.0 <= extra["gap"] < 1.0
    # Of the design without its splits.
    coarse = hardware(**PAYS)
    plan = load_plan(folder / PLAN_FILE)
    coarse.reference = plan.hardware.reference
    total_latency_ms = coarse.evaluate_cost(
        plan.layers, replace(result.decision, rewrite_plan=None)
    ).stats.total_latency_ms
    assert extra["gap"] == pytest.approx((total_latency_ms - extra["lower_bound_ms"]) / total_latency_ms)
