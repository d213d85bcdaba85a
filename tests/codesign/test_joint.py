"""Joint training: when the hardware counts, that the guard lets go of it, and runs that are stopped."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseflow.codesign import joint
from sparseflow.codesign.decision import Decision
from sparseflow.codesign.joint import BASELINES, Designed, JointTrainer, Mode
from sparseflow.codesign.rewrite import RewritePlan, check
from sparseflow.codesign.saved import PLAN, load_plan
from sparseflow.codesign.trace import TRACE, Trace, layers_of, opened, replay
from sparseflow.core.training.checkpoint import FILE as CHECKPOINT
from sparseflow.errors import FileFormatError, InputError, RunError
from tests.codesign.test_hardware import wrong_with
from tests.codesign.toys import Toy, hardware, quick

ROOT = Path(__file__).parents[2]
PAYS: dict[str, Any] = {"hardware": {"link": "ucie"}}
"""Links over which splits pay."""


def trained(
    folder: Path, task: Toy | None = None, *, mode: Mode = "joint", progress: Any = None, **changes: Any
) -> tuple[Toy, list[Designed]]:
    task = task or Toy()
    settings = quick(**changes)
    found = JointTrainer(task, hardware(**changes), settings, folder, mode=mode).run(progress)
    return task, found


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / TRACE).read_bytes().splitlines()]
    del rows[0]["environment"]
    return rows


def epochs_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows_of(folder) if row["kind"] == "epoch"]


def same_run(one: tuple[Toy, list[Designed]], other: tuple[Toy, list[Designed]]) -> None:
    assert one[1] == other[1]
    torch.testing.assert_close(one[0].state(), other[0].state(), rtol=0.0, atol=0.0)


def test_a_run_leaves_its_trace_and_its_plan(tmp_path: Path) -> None:
    task, (found,) = trained(tmp_path, **PAYS)
    rows = rows_of(tmp_path)
    assert [row["kind"] for row in rows] == ["begin", *["epoch"] * 5, "end"]
    assert [row["epoch"] for row in rows[1:]] == [1, 2, 3, 4, 5, 5]
    assert found.mode == "joint" and found.accuracy == task.accuracy() == rows[-1]["accuracy"]
    assert Decision.from_dict(rows[-1]["decision"]) == found.decision
    assert rows[-1]["priced"]["objective"] == found.priced.objective
    plan = load_plan(tmp_path / PLAN)
    assert plan.decision == found.decision and tuple(plan.layers) == task.finished().layers(8)
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
    for weight in (0.25, 0.5):
        trained(tmp_path / str(weight), schedule={"most": weight, "epsilon": 0.9}, joint={"alpha_steps": 0})
    one, other = (epochs_of(tmp_path / str(weight)) for weight in (0.25, 0.5))
    assert one[1]["numbers"] == other[1]["numbers"] and one[2]["numbers"] != other[2]["numbers"]
    tasks = [
        trained(tmp_path / f"again {weight}", schedule={"most": weight, "epsilon": 0.9},
                joint={"alpha_steps": 0})[0]
        for weight in (0.25, 0.5)
    ]  # fmt: skip
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
    told = [record.getMessage() for record in caplog.records if record.name == joint.__name__]
    assert len(told) == 2 and "lets go" in told[0] and "counts again" in told[1]
    assert "epoch 4: accuracy 0.5000, reference 0.9000" in told[0]


def test_what_the_hardware_takes_from_accuracy_comes_back(tmp_path: Path) -> None:
    # Gates close under the hardware's weight, and with them goes accuracy.
    task, (found,) = trained(tmp_path, Toy(16), schedule={"most": 40.0, "epsilon": 0.02, "good_epochs": 1})
    rows = epochs_of(tmp_path)
    reference = rows[1]["accuracy"]
    fell = next(at for at, row in enumerate(rows) if row["guard"]["frozen"])
    assert rows[fell]["lambda_hw"] > 0.0 and rows[fell]["accuracy"] < reference - 0.02
    after = next(at for at in range(fell, len(rows)) if not rows[at]["guard"]["frozen"])
    assert after > fell and all(row["lambda_hw"] == 0.0 for row in rows[fell + 1 : after + 1])
    assert rows[after]["accuracy"] >= reference - 0.02
    assert len({json.dumps(row["decision"]) for row in rows[fell - 1 : after]}) == 1
    if after + 1 < len(rows):
        assert rows[after + 1]["lambda_hw"] > 0.0 and task.pulled[after + 1]
    assert found.violations == sum(row["guard"]["frozen"] for row in rows) > 0


def test_every_decision_that_is_taken_lowers_the_objective(tmp_path: Path) -> None:
    trained(tmp_path, Toy(7), **PAYS)
    hw, rows = opened(tmp_path / TRACE)
    for before, after in pairwise(rows[1:]):
        layers = layers_of(after["layers"])
        one, other = (Decision.from_dict(row["decision"]) for row in (before, after))
        if one != other:
            assert hw.price(layers, other).objective < hw.price(layers, one).objective


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


@pytest.mark.parametrize("settle", [1, 3, 5, 7])
def test_a_baseline_has_as_many_rounds_as_joint_training(settle: int, tmp_path: Path) -> None:
    counts = []
    for mode in ("joint", "two-stage"):
        trained(tmp_path / mode, Toy(5, accuracies=[0.5] * 5), mode=mode, schedule={"settle": settle})
        counts.append(rows_of(tmp_path / mode)[-1]["round"])
    assert counts[0] == counts[1] == max(0, 6 - settle)


def test_layers_are_split_only_where_that_is_asked_for(tmp_path: Path) -> None:
    _, (split,) = trained(tmp_path / "fine", **PAYS)
    _, (plain,) = trained(tmp_path / "coarse", **PAYS, joint={"use_fine_split": False})
    assert split.decision.rewrite_plan is not None
    rows = rows_of(tmp_path / "coarse")[1:]
    assert plain.decision.rewrite_plan is None and not any(row["decision"]["rewrite_plan"] for row in rows)


def test_a_design_fits_the_model_that_was_trained(tmp_path: Path) -> None:
    # Units of split layers change from epoch to epoch.
    task, (found,) = trained(tmp_path, Toy(7), **PAYS, schedule={"most": 5.0, "epsilon": 0.9})
    layers = task.finished().layers(8)
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
    layers = task.finished().layers(8)
    assert len(layers) == 4
    # What `verify` asks of a plan.
    assert [name for names in found.decision.segments for name in names] == [layer.name for layer in layers]


def test_a_model_that_outgrows_the_decision_gets_another(tmp_path: Path) -> None:
    # All layers are on one slot at first, which then holds too little.
    task, found = trained(tmp_path, Toy(5, grows_at=2), mapping={"mode": "serial"})
    first = Decision.from_dict(rows_of(tmp_path)[1]["decision"])
    assert set(first.mapping) == {0}
    saved = load_plan(tmp_path / PLAN)
    assert tuple(saved.layers) == task.finished().layers(8)
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


class Stopped(Exception):
    """Stands for whatever stops a run."""


def stop_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, count: int, *, after: bool) -> None:
    """Stop before or after a function is called for the n-th time, from 0."""
    original: Callable[..., Any] = getattr(owner, name)
    calls: list[int] = []

    def stopping(*args: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == count + 1 and not after:
            raise Stopped
        found = original(*args, **named)
        if len(calls) == count + 1:
            raise Stopped
        return found

    monkeypatch.setattr(owner, name, stopping)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode in ("joint", "two-stage"):
        folder = tmp_path_factory.mktemp(mode)
        found[mode] = folder, trained(folder, Toy(4), mode=mode, **PAYS)
    return found


def goes_on(folder: Path, mode: Mode, unbroken: dict[str, Any]) -> None:
    """A run that was stopped gives what one that was not does."""
    other, wanted = unbroken[mode]
    same_run(trained(folder, Toy(4), mode=mode, **PAYS), wanted)
    assert rows_of(folder) == rows_of(other)
    assert (folder / PLAN).read_bytes() == (other / PLAN).read_bytes()


WRITES: dict[Mode, int] = {"joint": 6, "two-stage": 11}
"""Rows of these runs: a beginning, four epochs, rounds, and ends."""


@pytest.mark.parametrize(
    ("mode", "count"), [(mode, count) for mode, writes in WRITES.items() for count in range(writes)]
)
def test_it_goes_on_after_any_row(
    mode: Mode, count: int, tmp_path: Path, unbroken: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, Trace, "write", count, after=count % 2 == 0)
    with pytest.raises(Stopped):
        trained(tmp_path, Toy(4), mode=mode, **PAYS)
    monkeypatch.undo()
    with (tmp_path / TRACE).open("ab") as file:
        file.write(b'{"kind": "epo')  # what a kill in mid-write leaves
    goes_on(tmp_path, mode, unbroken)


@pytest.mark.parametrize(
    ("mode", "count"), [("joint", 0), ("joint", 2), ("joint", 3), ("two-stage", 3), ("two-stage", 5)]
)
@pytest.mark.parametrize("after", [False, True])
def test_it_goes_on_after_any_checkpoint(
    mode: Mode,
    count: int,
    after: bool,
    tmp_path: Path,
    unbroken: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop_at(monkeypatch, joint.checkpoint, "write", count, after=after)
    with pytest.raises(Stopped):
        trained(tmp_path, Toy(4), mode=mode, **PAYS)
    monkeypatch.undo()
    goes_on(tmp_path, mode, unbroken)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.codesign.test_joint import PAYS, trained
from tests.codesign.toys import Toy

def progress(what, share):
    if (what, round(share * 12)) == (sys.argv[3], int(sys.argv[4])):
        os.kill(os.getpid(), signal.SIGKILL)

trained(Path(sys.argv[1]), Toy(4), mode=sys.argv[2], progress=progress, **PAYS)
"""


@pytest.mark.parametrize(
    ("mode", "what", "at"), [("joint", "epoch 3", "8"), ("two-stage", "hardware round 2 of 3", "8")]
)
def test_after_sigkill_it_goes_on_as_if_unbroken(
    mode: Mode, what: str, at: str, tmp_path: Path, unbroken: dict[str, Any]
) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    died = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), mode, what, at],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert (tmp_path / CHECKPOINT).is_file() and not (tmp_path / PLAN).exists()
    goes_on(tmp_path, mode, unbroken)


def test_a_run_that_is_done_is_not_done_again(tmp_path: Path) -> None:
    first = trained(tmp_path, Toy(3))
    told: list[str] = []
    again = trained(tmp_path, Toy(3), progress=lambda what, _: told.append(what))
    same_run(first, again)
    assert told == ["deciding the hardware"] and len(rows_of(tmp_path)) == 5


def test_another_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, Toy(1), schedule={"settle": 1})
    before = (tmp_path / TRACE).read_bytes()
    with pytest.raises(InputError, match=r"another training, with other mode"):
        trained(tmp_path, Toy(1), mode="two-stage", schedule={"settle": 1})
    with pytest.raises(InputError, match=r"with other settings\.loss\.lambda_T"):
        trained(tmp_path, Toy(1), schedule={"settle": 1}, loss={"lambda_T": 2.0})
    with pytest.raises(InputError, match=r"`mode` \(='both'\) must be one of: joint, two-stage"):
        trained(tmp_path, Toy(1), mode="both")  # pyright: ignore[reportArgumentType]
    assert (tmp_path / TRACE).read_bytes() == before


def test_damage_is_told(tmp_path: Path) -> None:
    trained(tmp_path, Toy(2))
    trace, checkpoint = (tmp_path / TRACE).read_bytes(), (tmp_path / CHECKPOINT).read_bytes()
    lines = trace.splitlines(keepends=True)
    for content in (
        b"".join(lines[:2]),
        b"",
        trace[: len(lines[0]) + 5],
        b"".join([lines[0], b"{\n", *lines]),
    ):
        (tmp_path / TRACE).write_bytes(content)
        with pytest.raises(FileFormatError, match="trace"):
            trained(tmp_path, Toy(2))
    (tmp_path / TRACE).unlink()
    with pytest.raises(FileFormatError, match="holds 0 rows"):
        trained(tmp_path, Toy(2))
    (tmp_path / TRACE).write_bytes(trace)
    for content in (checkpoint[:-30], b"torn"):
        (tmp_path / CHECKPOINT).write_bytes(content)
        with pytest.raises(FileFormatError, match="checkpoint"):
            trained(tmp_path, Toy(2))
    (tmp_path / CHECKPOINT).write_bytes(checkpoint)
    assert trained(tmp_path, Toy(2))[1]


def test_two_runs_in_one_folder_at_the_same_time(tmp_path: Path) -> None:
    refused: list[str] = []

    def meanwhile(what: str, share: float) -> None:
        if what == "epoch 3" and not refused:
            with pytest.raises(RunError, match="another process") as error:
                trained(tmp_path, Toy(4), **PAYS)
            refused.append(str(error.value))

    found = trained(tmp_path, Toy(4), progress=meanwhile, **PAYS)
    assert refused and len(rows_of(tmp_path)) == WRITES["joint"]
    same_run(found, trained(tmp_path / "alone", Toy(4), **PAYS))


@pytest.mark.parametrize("accuracies", [[0.5, float("nan")], [1.5, 0.5]])
def test_an_accuracy_that_is_none_ends_the_run(accuracies: Sequence[float], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"accuracy \(=(nan|1\.5)\) must be from 0 to 1"):
        trained(tmp_path, Toy(2, accuracies=accuracies))
