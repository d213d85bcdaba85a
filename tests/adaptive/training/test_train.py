"""Controller training: goodput, resume, determinism and failures."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.controllers.networks import Stage1
from sparseflow.adaptive.policy.evaluation import compare_policies, evaluate_policy
from sparseflow.adaptive.policy.outcomes import OutcomeTable, budget_grid
from sparseflow.adaptive.policy.policies import ControllerPolicy
from sparseflow.adaptive.training.config import GrpoConfig
from sparseflow.adaptive.training.joint import JointTrainer
from sparseflow.adaptive.training.train import CONTROLLERS, ControllerTrainResult, train
from sparseflow.core.training.checkpoint import CHECKPOINT_FILE
from sparseflow.core.training.distributed import DistributedContext
from sparseflow.core.training.history import read_history
from sparseflow.errors import FileFormatError, InputError, RunError
from tests.adaptive.synthetic import compute_max_goodput, make_lookup_policy, make_outcomes, make_space
from tests.killed import ROOT, environment, run_script

ALONE = DistributedContext(rank=0, world_size=1, device=torch.device("cpu"))

QUICK: dict[str, Any] = {
    "steps": 8, "warm_start": 4, "prompts": 8, "minibatches": 2, "reference_every": 3, "validate_every": 4,
    "validation": 64, "checkpoint_every": 5,
}  # fmt: skip


def tables() -> tuple[OutcomeTable, OutcomeTable]:
    return make_outcomes(64, seed=1), make_outcomes(32, seed=2)


def config(**changes: Any) -> GrpoConfig:
    return GrpoConfig(**QUICK | changes)


def quick(folder: Path, progress: Any = None, **changes: Any) -> ControllerTrainResult:
    train_table, held_out = tables()
    return train(config(**changes), train_table, folder, held_out=held_out, model_id="m", progress=progress)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state = torch.load(folder / CHECKPOINT_FILE, weights_only=True)
    return state["task"]["controllers"]


def assert_same(first: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(first, other, rtol=0.0, atol=0.0)


def measure_gain(steps: int, folder: Path, *, masked: bool, seed: int) -> tuple[float, float, float, float]:
    """Gain over the lookup table (lower end), shortfall from the best policy, attainment, and mean gain."""
    train_table, held_out, test = (
        make_outcomes(1024, seed=1),
        make_outcomes(256, seed=2),
        make_outcomes(256, seed=3),
    )
    costs_ms = train_table.latency_quantiles_ms() if masked else None
    settings = GrpoConfig(steps=steps, seed=seed)
    train_result = train(settings, train_table, folder, held_out=held_out, model_id="m", costs_ms=costs_ms)
    budgets = budget_grid(train_table.budget_range_ms(), 24)
    lookup = evaluate_policy(make_lookup_policy(train_table), test, budgets)
    evaluation = evaluate_policy(
        ControllerPolicy(controllers=train_result.controllers, costs_ms=costs_ms), test, budgets
    )
    bound = compute_max_goodput(256, seed=3, budgets_ms=budgets, costs_ms=costs_ms).mean()
    gain = compare_policies(evaluation, lookup)["goodput"]
    return gain.low, float(bound) - evaluation.goodput.mean, evaluation.attainment.mean, gain.mean


def test_train_masked_beats_lookup_table(tmp_path: Path) -> None:
    gain, shortfall, attainment, _ = measure_gain(40, tmp_path, masked=True, seed=0)
    assert gain > 0.03 and shortfall < 0.06 and attainment > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_train_masked_approaches_max_goodput(seed: int, tmp_path: Path) -> None:
    gain, shortfall, attainment, _ = measure_gain(150, tmp_path, masked=True, seed=seed)
    assert gain > 0.07 and shortfall < 0.02 and attainment > 0.995


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_train_unmasked_learns_latency_from_rewards(seed: int, tmp_path: Path) -> None:
    gain, shortfall, attainment, _ = measure_gain(150, tmp_path, masked=False, seed=seed)
    assert gain > 0.05 and shortfall < 0.07 and attainment > 0.98


@dataclass(frozen=True, kw_only=True)
class CompleteRun:
    """Directory and result of an uninterrupted training; read only."""

    folder: Path
    trained: ControllerTrainResult
    messages: list[tuple[str, float]]


@pytest.fixture(scope="module")
def complete_run(tmp_path_factory: pytest.TempPathFactory) -> CompleteRun:
    folder, messages = tmp_path_factory.mktemp("complete"), []
    return CompleteRun(
        folder=folder, trained=quick(folder, lambda *event: messages.append(event)), messages=messages
    )


def test_train_writes_history_and_best_controllers(complete_run: CompleteRun) -> None:
    trained, folder, messages = complete_run.trained, complete_run.folder, complete_run.messages
    rows = list(read_history(folder))
    train_table = [row for row in rows if row["kind"] == "train"]
    evaluations = [row for row in rows if row["kind"] == "held_out"]
    assert [row["step"] for row in train_table] == list(range(1, 13))
    assert [row["step"] for row in evaluations] == [0, 4, 8, 12], (
        "the first validation precedes the first step"
    )
    assert "imitation" in train_table[3] and {"reward", "accuracy", "attainment", "kl", "multiplier"} < set(
        train_table[4]
    )
    assert [share for _, share in messages] == pytest.approx([index / 12 for index in range(1, 13)])
    best = max(evaluations, key=lambda row: (row["score"], row["step"]))
    assert trained.step == best["step"] and trained.validation["score"] == best["score"]
    loaded = Controllers.load(folder / CONTROLLERS, model_id="m")
    assert loaded.plan_frequency.sum() == pytest.approx(1.0)
    assert_same(dict(loaded.state_dict()), dict(trained.controllers.state_dict()))
    second_trainer = JointTrainer(config(), tables()[0], None, "m", ALONE)
    second_trainer.controllers.load_state_dict(loaded.state_dict())
    assert second_trainer.validate(tables()[1]) == trained.validation


def test_train_in_finished_directory_loads_result_or_raises(
    complete_run: CompleteRun, tmp_path: Path
) -> None:
    first = complete_run.trained
    shutil.copytree(complete_run.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / CONTROLLERS).unlink()
    resumed = quick(tmp_path, lambda *_: pytest.fail("it trained"))
    assert (resumed.step, resumed.validation) == (first.step, first.validation)
    assert_same(dict(resumed.controllers.state_dict()), dict(first.controllers.state_dict()))
    with pytest.raises(InputError):
        quick(tmp_path, rate=0.1)
    train_table, held_out = tables()
    with pytest.raises(InputError):
        train(config(), make_outcomes(64, seed=5), tmp_path, held_out=held_out, model_id="m")
    with pytest.raises(InputError):
        train(config(), train_table, tmp_path, held_out=held_out, model_id="other")
    (tmp_path / CHECKPOINT_FILE).write_bytes(b"torn")
    with pytest.raises(FileFormatError):
        quick(tmp_path)
    with pytest.raises(InputError):
        quick(tmp_path / CONTROLLERS)


KILLED = """
import sys
import torch._dynamo  # for all forks; optimizers import it late
from functools import partial
from pathlib import Path
from tests.adaptive.training.test_train import quick
from tests.killed import killed_when

for step in sys.argv[2:]:
    killed_when(partial(quick, Path(sys.argv[1], step)), lambda _, share: share > float(step) / 12 - 0.01)
"""
KILLS = {3: 1, 7: 6}
"""Step in which a training is killed -> first step after the resume."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of killed trainings, named by the step; one process imports the modules for all."""
    root = tmp_path_factory.mktemp("killed")
    run_script(KILLED, str(root), *map(str, KILLS))
    return root


@pytest.mark.parametrize("dies", KILLS)
def test_train_after_sigkill_gives_same_weights(dies: int, killed: Path, complete_run: CompleteRun) -> None:
    folder = killed / str(dies)
    assert Controllers.load(folder / CONTROLLERS).model_id == "m"
    steps: list[int] = []
    resumed = quick(folder, lambda _, share: steps.append(round(12 * share)))
    assert steps == list(range(KILLS[dies], 13))
    target = complete_run.trained
    assert (resumed.step, resumed.validation) == (target.step, target.validation)
    assert_same(weights(folder), weights(complete_run.folder))
    assert_same(dict(resumed.controllers.state_dict()), dict(target.controllers.state_dict()))
    assert list(read_history(folder)) == list(read_history(complete_run.folder))


def test_train_depends_on_seed_and_not_on_global_generator(complete_run: CompleteRun, tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    quick(tmp_path / "same")
    assert torch.equal(torch.rand(1), expected), "the global generator was used"
    assert_same(weights(complete_run.folder), weights(tmp_path / "same"))
    quick(tmp_path / "other", seed=1)
    assert not torch.equal(
        weights(complete_run.folder)["stage1.fuse.weight"], weights(tmp_path / "other")["stage1.fuse.weight"]
    )


@pytest.mark.parametrize("broken", ["logits", "gradient"])
def test_train_with_non_finite_values_raises_and_keeps_checkpoint(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    if broken == "logits":
        forward = Stage1.forward

        def nan(self: Stage1, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
            calls.append(1)
            return tuple(
                logits * (float("nan") if len(calls) == 40 else 1.0) for logits in forward(self, *args)
            )

        monkeypatch.setattr(Stage1, "forward", nan)
    else:
        clip = torch.nn.utils.clip_grad_norm_

        def inf(parameters: Any, max_norm: float) -> torch.Tensor:
            calls.append(1)
            return torch.tensor(float("inf")) if len(calls) == 20 else clip(parameters, max_norm)

        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", inf)
    with pytest.raises(RunError):
        quick(tmp_path, checkpoint_every=1)
    monkeypatch.undo()
    saved_step = torch.load(tmp_path / CHECKPOINT_FILE, weights_only=True)["step"]
    assert 0 < saved_step < 12
    assert all(bool(weight.isfinite().all()) for weight in weights(tmp_path).values())
    steps: list[int] = []
    quick(tmp_path, lambda _, share: steps.append(round(12 * share)), checkpoint_every=1)
    assert steps[0] == saved_step + 1


@pytest.mark.parametrize("size", [2, 4])
def test_processes_divide_minibatches_of_one_process(size: int) -> None:
    settings = config(warm_start=0)
    train_table, _ = tables()
    single = JointTrainer(settings, train_table, None, "m", ALONE)
    samples, budgets, chance = single._sample_prompts()
    parts = []
    for rank in range(size):
        rank_trainer = JointTrainer(
            settings,
            train_table,
            None,
            "m",
            DistributedContext(rank=rank, world_size=size, device=torch.device("cpu")),
        )
        parts.append(rank_trainer._sample_prompts())
    # A minibatch of one is made of the same minibatch of all.
    for number in range(settings.minibatches):
        for index, full in enumerate((samples, budgets, chance.view(8, -1))):
            shared = [part[index].view(8 // size, -1).chunk(settings.minibatches)[number] for part in parts]
            torch.testing.assert_close(
                torch.cat(shared), full.view(8, -1).chunk(settings.minibatches)[number]
            )
    with pytest.raises(InputError):
        JointTrainer(
            settings,
            train_table,
            None,
            "m",
            DistributedContext(rank=0, world_size=3, device=torch.device("cpu")),
        )


RANK = """
import sys
from pathlib import Path
from tests.adaptive.training.test_train import quick
quick(Path(sys.argv[1]), steps=3, warm_start=1)
"""


@pytest.mark.slow
def test_train_with_two_processes_equals_one_process(tmp_path: Path) -> None:
    single = quick(tmp_path / "one", steps=3, warm_start=1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = environment(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path / "two")],
            cwd=ROOT, env=shared | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        for process in started:
            _, stderr = process.communicate(timeout=120)
            assert process.returncode == 0, stderr
    finally:
        for process in started:
            process.kill()
            process.communicate()
    first, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    # Adam divides by roots of tiny numbers: the order of a sum shows, magnified.
    torch.testing.assert_close(first, two, rtol=1e-3, atol=2e-4)
    numbers = [
        [row for row in read_history(tmp_path / name) if row["kind"] == "train"] for name in ("one", "two")
    ]
    for actual, expected in zip(*numbers, strict=True):
        assert actual.keys() == expected.keys()
        assert list(actual.values())[2:] == pytest.approx(list(expected.values())[2:], rel=1e-3, abs=1e-4)
    # Another number of processes may go on, and finds nothing left to do.
    resumed = quick(tmp_path / "two", lambda *_: pytest.fail("it trained"), steps=3, warm_start=1)
    assert resumed.validation == pytest.approx(single.validation, rel=1e-3)


def test_train_by_imitation_of_text_model_reduces_loss(tmp_path: Path) -> None:
    plans = make_space(depth=3, top_k=2, tiers=0)
    train_table, held_out = make_outcomes(48, seed=1, plans=plans), make_outcomes(24, seed=2, plans=plans)
    train_result = train(
        config(steps=0, warm_start=30, validate_every=10),
        train_table,
        tmp_path,
        held_out=held_out,
        model_id="text",
    )
    policy = ControllerPolicy(controllers=train_result.controllers)
    assert set(policy.choose(held_out, torch.arange(24), torch.full((24,), 60.0)).tolist()) <= set(
        range(len(plans))
    )
    losses = [row["imitation"] for row in read_history(tmp_path) if row["kind"] == "train"]
    assert losses[-1] < 0.8 * losses[0]


def test_train_with_held_out_of_other_plans_raises(tmp_path: Path) -> None:
    train_table, _ = tables()
    with pytest.raises(InputError):
        train(
            GrpoConfig(),
            train_table,
            tmp_path,
            held_out=make_outcomes(8, plans=make_space(depth=3)),
            model_id="m",
        )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"group": 8}, "group"), ({"steps": -1}, "steps"), ({"steps": 0}, ""),
        ({"rate": 0.0}, "rate"), ({"rate": float("nan")}, "rate"), ({"clip": -1.0}, "clip"),
        ({"kl": -0.1}, "kl"), ({"entropy": float("inf")}, "entropy"), ({"prompts": 5}, ""),
        ({"multiplier": 20.0}, ""), ({"violations": 1.0}, "violations"),
        ({"budgets_ms": (5.0, 1.0)}, ""), ({"seed": True}, "seed"),
        ({"validate_every": 0}, "validate_every"),
    ],
)  # fmt: skip
def test_config_with_invalid_setting_raises(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match or None):
        GrpoConfig(**change)
