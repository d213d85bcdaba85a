"""Joint training: when the hardware counts, that the guard lets go of it, and what designs come to."""

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

from sparseflow.codesign.design.decision import Decision
from sparseflow.codesign.design.saved_plan import PLAN, load_plan
from sparseflow.codesign.hardware.slots import ChipSlotConfig
from sparseflow.codesign.joint import trainer
from sparseflow.codesign.joint.trace import TRACE, opened, replay
from sparseflow.codesign.joint.trainer import BASELINES, JointTrainer
from sparseflow.codesign.workload.layers import layers_of
from sparseflow.codesign.workload.splits import RewritePlan, check
from sparseflow.errors import InputError, RunError
from tests.codesign.toys import PAYS, Sized, Toy, hardware, quick, rows_of, trained, wrong_with


def epochs_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows_of(folder) if row["kind"] == "epoch"]


def test_a_run_leaves_its_trace_and_its_plan(tmp_path: Path) -> None:
    task, (found,) = trained(tmp_path, **PAYS)
    rows = rows_of(tmp_path)
    assert [row["kind"] for row in rows] == ["begin", *["epoch"] * 5, "end"]
    assert [row["epoch"] for row in rows[1:]] == [1, 2, 3, 4, 5, 5]
    assert found.mode == "joint" and found.accuracy == task.evaluate_accuracy() == rows[-1]["accuracy"]
    assert Decision.from_dict(rows[-1]["decision"]) == found.decision
    assert rows[-1]["priced"]["objective"] == found.priced.objective
    plan = load_plan(tmp_path / PLAN)
    assert plan.decision == found.decision and tuple(plan.layers) == task.export_model().describe_layers(8)
    assert plan.hardware.price(plan.layers, plan.decision) == found.priced
    (told,) = json.loads((tmp_path / PLAN).read_text())["designs"]
    assert told["mode"] == "joint" and told["energy_delay"] == found.priced.energy_delay
    assert all(each.same for each in replay(tmp_path / TRACE))
    assert all(row["numbers"]["loss"] >= 0.0 for row in rows if row["kind"] == "epoch")


def test_the_hardware_does_not_count_before_the_reference_is_fixed(tmp_path: Path) -> None:
    task, _ = trained(tmp_path, Toy(6), schedule={"settle": 3, "ramp": 2, "most": 0.4})
    rows = epochs_of(tmp_path)
    assert [row["lambda_hw"] for row in rows] == pytest.approx([0.0, 0.0, 0.0, 0.2, 0.4, 0.4])
    assert task.pulled == [False, False, False, True, True, True]
    assert [row["guard"]["reference"] is None for row in rows] == [True, True, False, False, False, False]
    assert [row["round"] for row in rows] == [0, 0, 1, 2, 3, 4]
    # Nothing is decided either.
    assert rows[0]["decision"] == rows[1]["decision"] and rows[0]["alpha"] == rows[1]["alpha"]


def test_the_pull_is_the_weight_times_the_loss(tmp_path: Path) -> None:
    tasks = [
        trained(tmp_path / str(most), schedule={"most": most, "epsilon": 0.9}, joint={"alpha_steps": 0})[0]
        for most in (0.25, 0.5)
    ]
    one, other = (epochs_of(tmp_path / str(most)) for most in (0.25, 0.5))
    assert one[1]["numbers"] == other[1]["numbers"] and one[2]["numbers"] != other[2]["numbers"]
    # In the first step both see the same model and the same draw.
    assert tasks[1].pulls[0] == pytest.approx(2.0 * tasks[0].pulls[0], rel=1e-6)


def test_more_of_the_hardware_closes_more(tmp_path: Path) -> None:
    gates = []
    for most in (0.0, 1.0, 10.0):
        task, _ = trained(tmp_path / str(most), Toy(6), schedule={"most": most, "epsilon": 0.99})
        gates.append(float(task.gates.detach().mean()))
    assert gates[0] == 3.0 and gates[0] > gates[1] > gates[2]


def test_steps_between_are_left_out(tmp_path: Path) -> None:
    task, _ = trained(tmp_path, joint={"hw_every": 2})
    assert len(task.pulls) == 9 and [pull != 0.0 for pull in task.pulls] == [False, True] * 4 + [False]


def test_the_guard_lets_go_and_takes_hold_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accuracies = [0.9, 0.9, 0.89, 0.5, 0.9, 0.9, 0.9, 0.9]
    with caplog.at_level(logging.WARNING):
        task, (found,) = trained(tmp_path, Toy(8, accuracies=accuracies))
    rows = epochs_of(tmp_path)
    assert [row["lambda_hw"] for row in rows] == [0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.5, 0.5]
    assert [row["guard"]["frozen"] for row in rows] == [False] * 3 + [True, True] + [False] * 3
    assert task.pulled == [weight > 0.0 for weight in [row["lambda_hw"] for row in rows]]
    assert found.violations == 2
    # Frozen: nothing discrete changes, and the slots' logits do not either.
    assert rows[2]["decision"] == rows[3]["decision"] == rows[4]["decision"]
    assert rows[2]["alpha"] == rows[3]["alpha"] == rows[4]["alpha"]
    assert [row["round"] for row in rows] == [0, 1, 2, 2, 2, 3, 4, 5]
    told = [record.getMessage() for record in caplog.records if record.name == trainer.__name__]
    assert len(told) == 2 and "lets go" in told[0] and "counts again" in told[1]
    assert "epoch 4: accuracy 0.5000, reference 0.9000" in told[0]


def test_what_the_hardware_takes_from_accuracy_comes_back(tmp_path: Path) -> None:
    # Gates close under the hardware's weight, and with them goes accuracy.
    task, (found,) = trained(tmp_path, Toy(12), schedule={"most": 4.0, "epsilon": 0.02, "good_epochs": 1})
    rows = epochs_of(tmp_path)
    reference = rows[1]["accuracy"]
    fell = next(at for at, row in enumerate(rows) if row["guard"]["frozen"])
    assert rows[fell]["lambda_hw"] > 0.0 and rows[fell]["accuracy"] < reference - 0.02
    after = next(at for at in range(fell, len(rows)) if not rows[at]["guard"]["frozen"])
    assert all(row["lambda_hw"] == 0.0 for row in rows[fell + 1 : after + 1])
    assert rows[after]["accuracy"] >= reference - 0.02 > rows[after - 1]["accuracy"]
    assert rows[after + 1]["lambda_hw"] > 0.0 and task.pulled[after + 1]
    held = [[row["decision"][name] for name in ("chips", "mapping", "positions_mm")] for row in rows]
    assert all(each == held[fell - 1] for each in held[fell:after])
    assert found.violations == sum(row["guard"]["frozen"] for row in rows) > 0


def test_every_decision_that_is_taken_lowers_the_objective(tmp_path: Path) -> None:
    trained(tmp_path, Toy(7), **PAYS)
    hw, rows = opened(tmp_path / TRACE)
    for before, after in pairwise(rows[1:]):
        layers = layers_of(after["layers"])
        one, other = (Decision.from_dict(row["decision"]) for row in (before, after))
        assert hw.price(layers, other).objective <= hw.price(layers, one).objective


def test_two_stages_and_the_other_baselines(tmp_path: Path) -> None:
    task, found = trained(tmp_path, Toy(5), mode="two-stage", **PAYS)
    assert tuple(each.mode for each in found) == BASELINES and task.pulls == []
    assert torch.equal(task.gates.detach(), torch.full((2,), 3.0))
    rows = rows_of(tmp_path)
    assert [row["kind"] for row in rows] == ["begin", *["epoch"] * 5, *["round"] * 4, *["end"] * 3]
    assert [row["mode"] for row in rows[-3:]] == list(BASELINES)
    first = Decision.from_dict(rows[1]["decision"])
    assert all(row["decision"] == rows[1]["decision"] and row["lambda_hw"] == 0.0 for row in rows[1:6])
    two, mapping, layout = (each.decision for each in found)
    assert (mapping.chips, mapping.positions_mm) == (first.chips, first.positions_mm)
    assert (layout.chips, layout.segments, layout.mapping, layout.rewrite_plan) == (
        first.chips, first.segments, first.mapping, None
    )  # fmt: skip
    start = rows[5]["priced"]["objective"]
    assert all(each.priced.objective <= start for each in found)
    assert found[0].priced.objective < start and two != first
    assert load_plan(tmp_path / PLAN).decision == two and all(each.violations == 0 for each in found)
    assert len(json.loads((tmp_path / PLAN).read_text())["designs"]) == 3


def test_both_modes_begin_alike(tmp_path: Path) -> None:
    for mode in ("joint", "two-stage"):
        trained(tmp_path / mode, mode=mode, schedule={"settle": 3})
    one, other = (epochs_of(tmp_path / mode) for mode in ("joint", "two-stage"))
    for name in ("numbers", "accuracy", "layers"):
        assert [row[name] for row in one[:3]] == [row[name] for row in other[:3]]
        assert one[3][name] != other[3][name]


@pytest.mark.parametrize("settle", [1, 3, 5, 7])
def test_a_baseline_has_as_many_rounds_as_joint_training(settle: int, tmp_path: Path) -> None:
    counts = []
    for mode in ("joint", "two-stage"):
        trained(tmp_path / mode, Toy(5, accuracies=[0.5] * 5), mode=mode, schedule={"settle": settle})
        counts.append(rows_of(tmp_path / mode)[-1]["round"])
    assert counts[0] == counts[1] == max(0, 6 - settle)


def test_a_baseline_draws_chips_as_joint_training_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where the draw is cold from its first round on, slots hardly ever leave the first chip.
    heat: dict[str, list[float]] = {"joint": [], "two-stage": []}
    original = JointTrainer._alpha_round

    def seen(self: JointTrainer) -> None:
        heat[self.mode].append(self.slots.tau)
        original(self)

    monkeypatch.setattr(JointTrainer, "_alpha_round", seen)
    for mode in ("joint", "two-stage"):
        trained(tmp_path / mode, Toy(5, accuracies=[0.5] * 5), mode=mode)
    assert len(heat["joint"]) == len(heat["two-stage"]) == 4
    assert heat["two-stage"] == pytest.approx(heat["joint"])


def test_layers_are_split_only_where_that_is_asked_for(tmp_path: Path) -> None:
    _, (split,) = trained(tmp_path / "fine", **PAYS)
    _, (plain,) = trained(tmp_path / "coarse", **PAYS, joint={"use_fine_split": False})
    assert split.decision.rewrite_plan is not None
    rows = rows_of(tmp_path / "coarse")[1:]
    assert plain.decision.rewrite_plan is None and not any(row["decision"]["rewrite_plan"] for row in rows)


def test_a_design_fits_the_model_that_was_trained(tmp_path: Path) -> None:
    # Units of split layers change from epoch to epoch.
    task, (found,) = trained(tmp_path, Toy(7), **PAYS, schedule={"most": 5.0, "epsilon": 0.9})
    layers = task.export_model().describe_layers(8)
    assert [name for names in found.decision.segments for name in names] == [layer.name for layer in layers]
    check(layers, found.decision.rewrite_plan or RewritePlan(splits=()), found.decision.homes(layers))


ALONE: dict[str, Any] = {"hardware": {"slots": 1, "chips": ["npu-m"]}}
"""Nothing can be decided, so the first decision stays the best."""


@pytest.mark.parametrize("changes", [{}, ALONE])
@pytest.mark.parametrize("gone_from", [2, 4])
def test_a_design_is_of_the_layers_that_are_left(
    gone_from: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    task, (found,) = trained(tmp_path, Toy(5, gone_from=gone_from), **changes)
    layers = task.export_model().describe_layers(8)
    assert len(layers) == 4
    # What `verify` asks of a plan.
    assert [name for names in found.decision.segments for name in names] == [layer.name for layer in layers]


def test_a_model_that_outgrows_the_decision_gets_another(tmp_path: Path) -> None:
    # All layers are on one slot at first, which then holds too little.
    task, found = trained(tmp_path, Toy(5, grows_at=2), mapping={"mode": "serial"})
    first = Decision.from_dict(rows_of(tmp_path)[1]["decision"])
    assert set(first.mapping) == {0}
    saved = load_plan(tmp_path / PLAN)
    assert tuple(saved.layers) == task.export_model().describe_layers(8)
    assert saved.hardware.price(saved.layers, saved.decision) == found[0].priced


def test_chips_have_room_in_every_decision(tmp_path: Path) -> None:
    trained(tmp_path, Toy(6), wafer={"refine_steps": 40}, joint={"alpha_rate": 1.0, "alpha_steps": 6})
    hw, rows = opened(tmp_path / TRACE)
    for row in rows[1:]:
        assert not wrong_with(hw, Decision.from_dict(row["decision"])), row["epoch"]


def test_without_steps_of_logits_slots_lean_to_the_first(tmp_path: Path) -> None:
    trained(tmp_path, joint={"alpha_steps": 0})
    assert all(row["alpha"] == rows_of(tmp_path)[1]["alpha"] for row in rows_of(tmp_path)[1:])


def test_progress_goes_forwards_and_random_numbers_are_left_alone(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    for mode in ("joint", "two-stage"):
        told: list[tuple[str, float]] = []
        trained(tmp_path / mode, mode=mode, progress=lambda *one, told=told: told.append(one))
        epochs = [share for what, share in told if what.startswith("epoch")]
        assert epochs == pytest.approx([at / 15 for at in range(1, 16)])
        assert told[-1] == ("deciding the hardware", 1.0) and all(0.0 <= share <= 1.0 for _, share in told)
    assert sum(what.startswith("hardware round") for what, _ in told) == 4
    assert torch.equal(torch.random.get_rng_state(), before)


def test_seeds_draw_other_chips(tmp_path: Path) -> None:
    tasks = [trained(tmp_path / str(at), joint={"seed": seed})[0] for at, seed in enumerate((0, 0, 1))]
    assert tasks[0].pulls == tasks[1].pulls != tasks[2].pulls


@pytest.mark.parametrize("accuracies", [[0.5, float("nan")], [1.5, 0.5]])
def test_an_accuracy_that_is_none_ends_the_run(accuracies: Sequence[float], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\(=(nan|1\.5)\)"):
        trained(tmp_path, Toy(2, accuracies=accuracies))


def test_what_is_drawn_is_told_beside_what_is_most_likely(tmp_path: Path) -> None:
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


def messages(caplog: pytest.LogCaptureFixture, least: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= least]


@pytest.mark.parametrize(("mode", "rounds"), [("joint", 4), ("two-stage", 4)])
def test_a_round_is_a_line_and_its_splits_are_details(
    mode: Any, rounds: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="sparseflow"):
        trained(tmp_path, Toy(5, accuracies=[0.5] * 5), mode=mode, **PAYS, joint={"plan_every": 1})
    told, details = messages(caplog, logging.INFO), messages(caplog, logging.DEBUG)
    of_rounds = [line for line in told if line.startswith("round ")]
    assert len(of_rounds) == rounds
    rows = [row for row in rows_of(tmp_path) if row["kind"] == ("epoch" if mode == "joint" else "round")]
    for number, (line, row) in enumerate(zip(of_rounds, rows[-rounds:], strict=True), start=1):
        held = [name for name in row["decision"]["chips"] if name is not None]
        assert line.startswith(f"round {number}, epoch {row['epoch']}: objective ")
        assert f"-> {row['priced']['objective']:.6g}; " in line
        assert all(f"{held.count(name)} {name}" in line for name in held)
        assert ("rewrite_plan is None" in line) is (row["decision"]["rewrite_plan"] is None)
    # What the planner says of the last plan of the design stays.
    last = json.loads((tmp_path / PLAN).read_text())["considered"]
    splits = [line for line in told if "split of " in line]
    assert len(splits) == len(last) > 0
    # One more says what follows.
    assert sum("rewrite_plan is None: " in line or "layers split: " in line for line in told) == 1
    for line, each in zip(splits, last, strict=True):
        assert f"split of {each['name']} into {tuple(each['sizes'])} on slots {tuple(each['slots'])}" in line
    assert sum("split of " in line for line in details) > 3 * len(last)


def test_details_are_for_whoever_asks_for_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="sparseflow"):
        trained(tmp_path, Toy(5, accuracies=[0.5] * 5), **PAYS)
    assert not [record for record in caplog.records if record.levelno < logging.INFO]
    assert not trainer.planner_log.filters


@pytest.mark.parametrize("mode", ["joint", "two-stage"])
def test_what_the_first_chips_cannot_hold_is_told_at_the_start(mode: Any, tmp_path: Path) -> None:
    # As it begins the model needs 60 MB; at its most 15 GB, and the chips hold 12.
    task = Sized([10, 10, 10, 10], 2500)
    message = r"not with all of its gates open: .*needs 15000 MB and all 3 chips hold 12000 MB: 3000 MB"
    with pytest.raises(InputError, match=message):
        trained(tmp_path, task, mode=mode)
    assert task.done == 0 and not (tmp_path / TRACE).read_bytes()


def test_a_model_that_outgrows_the_chips_that_were_chosen_gets_the_first_ones_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ChipSlotConfig, "decode", lambda slots: [slots.chips[0]] * 3)  # 1 GB each
    task = Sized([10, 10, 10, 10, 1100, 1100, 1100], 1200)
    with caplog.at_level(logging.WARNING):
        _, (found,) = trained(tmp_path, task, loss={"lambda_area": 100.0})
    chips = [set(row["decision"]["chips"]) for row in epochs_of(tmp_path)]
    assert chips == [{"npu-m"}, {"npu-s"}, {"npu-s"}, {"npu-m"}, {"npu-m"}, {"npu-m"}]
    (told,) = [line for line in messages(caplog, logging.WARNING) if "outgrown" in line]
    assert told.startswith("epoch 4: the model has outgrown its chips, back to the first: ")
    assert "6600 MB" in told and all(each.same for each in replay(tmp_path / TRACE))
    assert found.priced.stats.memory_mb and max(found.priced.stats.memory_mb) <= 4000.0


@pytest.mark.parametrize("mode", ["joint", "two-stage"])
def test_a_model_that_grows_beyond_what_it_said_ends_the_run(mode: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="15000"):
        trained(tmp_path, Sized([10, 10, 2500, 2500], 20), mode=mode)


def test_the_hardware_is_of_the_same_settings(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`settings`"):
        JointTrainer(Toy(), hardware(), quick(loss={"lambda_T": 2.0}), tmp_path)


def test_the_plan_of_a_run_tells_of_splits_and_of_a_bound(tmp_path: Path) -> None:
    _, (found,) = trained(tmp_path, **PAYS)
    told = load_plan(tmp_path / PLAN).extra
    assert set(told) == {"considered", "lower_bound_ms", "gap", "finished", "designs"}
    assert told["considered"] and told["finished"] is True and 0.0 <= told["gap"] < 1.0
    # Of the design without its splits.
    coarse = hardware(**PAYS)
    plan = load_plan(tmp_path / PLAN)
    coarse.fix_reference(vars(plan.hardware.zeros))
    whole = coarse.price(plan.layers, replace(found.decision, rewrite_plan=None)).stats.total_latency_ms
    assert told["gap"] == pytest.approx((whole - told["lower_bound_ms"]) / whole)
