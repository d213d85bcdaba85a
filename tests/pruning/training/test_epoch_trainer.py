"""A VideoViT as a task that others drive: the training it would do alone, stopped and gone on with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")

from sparseflow.core.training import checkpoint
from sparseflow.core.training.epoch_trainer import EpochTrainer
from sparseflow.errors import InputError, RunError
from sparseflow.pruning import compact
from sparseflow.pruning.compaction.layered_model import Steps
from sparseflow.pruning.compaction.saved_model import load
from sparseflow.pruning.data.datasets import data_of
from sparseflow.pruning.training.epoch_trainer import VideoTask
from sparseflow.pruning.training.train import train
from tests.pruning.small import quick


def weights(task: VideoTask) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in task.model.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)


def test_it_is_a_task() -> None:
    with VideoTask(quick()) as task:
        found: EpochTrainer = task
        assert found.epochs == 2 and 0.0 <= found.evaluate_accuracy() <= 1.0


def test_epochs_are_those_of_a_training_of_its_own(tmp_path: Path) -> None:
    alone = train(quick(), tmp_path)
    said: list[tuple[str, float]] = []
    with VideoTask(quick()) as task:
        numbers = [task.train_epoch(progress=lambda *one: said.append(one)) for _ in range(2)]
        assert_same(dict(task.model.state_dict()), dict(alone.model.state_dict()))
        assert alone.accuracy is not None and task.evaluate_accuracy() == alone.accuracy.video_top1
    assert {"loss", "task", "right", "L_AST", "rate"} <= set(numbers[0])
    assert [share for _, share in said] == pytest.approx([step / 6 for step in range(1, 7)] * 2)
    assert said[0][0].startswith("epoch 1 of 2, loss ") and said[-1][0].startswith("epoch 2 of 2")


def test_a_term_of_nothing_changes_nothing() -> None:
    found = []
    for extra in (None, lambda: torch.zeros(()), lambda: torch.zeros((), dtype=torch.float64)):
        with VideoTask(quick(train={"epochs": 1})) as task:
            numbers = task.train_epoch(extra)
            found.append((weights(task), numbers["loss"], numbers.get("extra")))
    assert_same(found[0][0], found[1][0])
    assert_same(found[0][0], found[2][0])
    assert found[0][1] == found[1][1] and [each[2] for each in found] == [None, 0.0, 0.0]


def test_one_more_term_reaches_the_gates() -> None:
    calls: list[float] = []
    open_: list[float] = []
    for weight in (0.0, 50.0):
        with VideoTask(quick(train={"epochs": 1, "gate_rate": 100.0})) as task:

            def extra(task: VideoTask = task, weight: float = weight) -> torch.Tensor:
                layers = task.differentiable_layers(2)
                flops = torch.stack([torch.as_tensor(layer.flops) for layer in layers]).sum()
                calls.append(float(flops.detach()))
                return weight * flops.double() / calls[0]

            numbers = task.train_epoch(extra)
            assert numbers["extra"] == pytest.approx(weight * sum(calls[-6:]) / 6 / calls[0], rel=1e-5)
            gates = task.model.gates
            assert gates is not None
            open_.append(float(gates.values(hard=False)["channel"].detach().mean()))
    assert len(calls) == 12 and open_[1] < open_[0]


def test_gates_are_hard_from_where_they_are_asked_to_be() -> None:
    seen = []
    with VideoTask(quick(train={"epochs": 2, "hard_from": 0.5})) as task:
        for _ in range(2):
            task.train_epoch(lambda: seen.append(task.model.hard_gates) or torch.zeros(()))
    assert seen == [False] * (len(seen) // 2) + [True] * (len(seen) // 2)


def test_a_state_goes_on_bit_for_bit(tmp_path: Path) -> None:
    with VideoTask(quick()) as task:
        task.train_epoch()
        checkpoint.save(tmp_path, {"task": task.state_dict(), "fingerprint": {}})
        task.evaluate_accuracy()
        task.train_epoch(lambda: 0.1 * task.model.head.weight.square().sum())
        wanted = (
            weights(task),
            task.evaluate_accuracy(),
            task.differentiable_layers(3),
            task.export_model().describe_layers(3),
        )
    state = checkpoint.load(tmp_path, {})
    assert state is not None  # tensors, numbers, texts, lists and dictionaries only
    with VideoTask(quick()) as other:
        other.load_state_dict(state["task"])
        other.train_epoch(lambda: 0.1 * other.model.head.weight.square().sum())
        assert_same(weights(other), wanted[0])
        assert other.evaluate_accuracy() == wanted[1] and other.export_model().describe_layers(3) == wanted[3]
        assert [layer.flops for layer in other.differentiable_layers(3)] == [
            layer.flops for layer in wanted[2]
        ]


def test_a_state_of_the_end_can_be_asked_without_training() -> None:
    with VideoTask(quick()) as task:
        for _ in range(2):
            task.train_epoch()
        state, accuracy, layers = (
            task.state_dict(),
            task.evaluate_accuracy(),
            task.export_model().describe_layers(2),
        )
        state = {name: each.copy() if isinstance(each, dict) else each for name, each in state.items()}
    with VideoTask(quick()) as other:
        other.load_state_dict(state)
        assert (
            other.export_model().describe_layers(2) == layers
        )  # before anything else has put it in evaluation mode
        assert other.evaluate_accuracy() == accuracy


def test_what_is_finished_is_a_copy_that_computes_the_same() -> None:
    with VideoTask(quick()) as task:
        task.train_epoch()
        before = weights(task)
        found = task.export_model()
        assert isinstance(found, Steps) and found.model.compacted and found.model.gates is None
        with torch.no_grad():
            for parameter in found.model.parameters():
                parameter.zero_()
        assert_same(weights(task), before)
        task.train_epoch()  # and training goes on


def test_what_is_saved_is_what_is_finished(tmp_path: Path) -> None:
    with VideoTask(quick()) as task:
        task.train_epoch()
        task.save(tmp_path / "model.safetensors")
        found, wanted = load(tmp_path / "model.safetensors"), task.export_model().model
    assert_same(dict(found.state_dict()), dict(wanted.state_dict()))
    assert list(Steps(found.eval()).describe_layers(2)) == list(Steps(wanted).describe_layers(2))


@pytest.mark.parametrize("batch", [1, 5])
def test_layers_are_for_batches_of_the_size_asked_for(batch: int) -> None:
    with VideoTask(quick()) as task:
        soft, hard = task.differentiable_layers(batch), task.export_model().describe_layers(batch)
        assert {layer.batch for layer in (*soft, *hard)} == {batch}
        assert [layer.name for layer in soft][:2] == ["embed", "blocks.0.attention"]
        assert all(isinstance(layer.flops, torch.Tensor) and layer.flops.ndim == 0 for layer in soft)
        assert list(hard) == list(Steps(compact(task.model)).describe_layers(batch))


def test_a_dense_model_is_a_task_too() -> None:
    with VideoTask(quick(mode="dense", train={"epochs": 1})) as task:
        task.train_epoch(lambda: torch.zeros(()))
        assert [layer.flops for layer in task.export_model().describe_layers(2)] == [
            pytest.approx(float(torch.as_tensor(layer.flops))) for layer in task.differentiable_layers(2)
        ]


def test_data_of_ones_own_is_used() -> None:
    data = data_of(quick())
    with VideoTask(quick(), data=replace(data, epoch_clips=16)) as task:
        said: list[str] = []
        task.train_epoch(progress=lambda what, _: said.append(what))
        assert len(said) == 2


def test_torchs_generator_is_left_alone() -> None:
    torch.manual_seed(3)
    with VideoTask(quick(train={"epochs": 1})) as task:
        task.train_epoch()
        found = weights(task)
    drawn = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(2))
    torch.rand(17)
    with VideoTask(quick(train={"epochs": 1})) as other:
        other.train_epoch()
        assert_same(weights(other), found)
    with VideoTask(quick(train={"epochs": 1, "seed": 1})) as another:
        assert not torch.equal(another.model.head.weight, other.model.head.weight)


@pytest.mark.parametrize("nested", [False, True])
def test_two_tasks_at_the_same_time_do_not_meet(nested: bool) -> None:
    with VideoTask(quick(train={"epochs": 1})) as alone:
        alone.train_epoch()
        wanted = weights(alone)
    torch.manual_seed(5)
    first = VideoTask(quick(train={"epochs": 1}))
    second = VideoTask(quick(train={"epochs": 1, "seed": 2}))
    with first, second:
        for task in (second, first) if nested else (first, second):
            task.train_epoch()
        assert_same(weights(first), wanted)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))


def test_settings_that_cannot_be_used_leave_the_generator_alone() -> None:
    torch.manual_seed(7)
    with pytest.raises(InputError, match="fewer than a step's 64"):
        VideoTask(quick(train={"batch_size": 64}))
    torch.manual_seed(8)
    with pytest.raises(InputError, match="batch"):
        VideoTask(quick()).differentiable_layers(0)
    drawn = torch.rand(1)
    torch.manual_seed(8)
    assert torch.equal(drawn, torch.rand(1))


def test_a_term_that_is_not_finite_ends_the_training() -> None:
    with VideoTask(quick()) as task, pytest.raises(RunError, match="its loss is nan"):
        task.train_epoch(lambda: torch.tensor(float("nan")))
