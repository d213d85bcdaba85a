"""Epoch trainer: equal to `train`, resumable, and isolated from the global generator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")

from sparseflow.core.training import checkpoint
from sparseflow.core.training.epoch_trainer import EpochTrainer
from sparseflow.errors import InputError, RunError
from sparseflow.pruning import compact
from sparseflow.pruning.compaction.layered_model import LayeredVideoViT
from sparseflow.pruning.compaction.saved_model import load_model
from sparseflow.pruning.training.task import VideoEpochTrainer
from sparseflow.pruning.training.train import train
from tests.pruning.small import quick

OneEpoch = tuple[dict[str, torch.Tensor], Mapping[str, float]]


def weights(task: VideoEpochTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in task.model.state_dict().items()}


def assert_same(update: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(update, other, rtol=0.0, atol=0.0)


@pytest.fixture(scope="module")
def one_epoch() -> OneEpoch:
    """Weights and metrics after one epoch."""
    with VideoEpochTrainer(quick(train={"epochs": 1})) as task:
        numbers = task.train_epoch()
        return weights(task), numbers


def test_trainer_implements_epoch_trainer() -> None:
    with VideoEpochTrainer(quick()) as task:
        exported: EpochTrainer = task
        assert exported.epochs == 2 and 0.0 <= exported.evaluate_accuracy() <= 1.0


@pytest.mark.usefixtures("no_page")
def test_epochs_match_train(tmp_path: Path) -> None:
    single = train(quick(), tmp_path)
    messages: list[tuple[str, float]] = []
    with VideoEpochTrainer(quick()) as task:
        numbers = [task.train_epoch(progress=lambda *update: messages.append(update)) for _ in range(2)]
        assert_same(dict(task.model.state_dict()), dict(single.model.state_dict()))
        assert single.accuracy is not None and task.evaluate_accuracy() == single.accuracy.video_top1
    assert {"loss", "task", "accuracy", "L_AST", "rate"} <= set(numbers[0])
    assert [share for _, share in messages] == pytest.approx([step / 6 for step in range(1, 7)] * 2)
    assert messages[0][0].startswith("epoch 1 of 2, loss ") and messages[-1][0].startswith("epoch 2 of 2")


def test_zero_extra_loss_changes_nothing(one_epoch: OneEpoch) -> None:
    expected, metrics = one_epoch
    assert "extra" not in metrics
    for dtype in (torch.float32, torch.float64):
        with VideoEpochTrainer(quick(train={"epochs": 1})) as task:
            numbers = task.train_epoch(lambda dtype=dtype: torch.zeros((), dtype=dtype))
            assert_same(weights(task), expected)
        assert numbers["loss"] == metrics["loss"] and numbers["extra"] == 0.0


def test_extra_loss_reaches_gates() -> None:
    calls: list[float] = []
    open_: list[float] = []
    for weight in (0.0, 50.0):
        with VideoEpochTrainer(quick(train={"epochs": 1, "gate_rate": 100.0})) as task:

            def extra(task: VideoEpochTrainer = task, weight: float = weight) -> torch.Tensor:
                layers = task.differentiable_layers(2)
                flops = torch.stack([torch.as_tensor(layer.flops) for layer in layers]).sum()
                calls.append(float(flops.detach()))
                return weight * flops.double() / calls[0]

            numbers = task.train_epoch(extra)
            assert numbers["extra"] == pytest.approx(weight * sum(calls[-6:]) / 6 / calls[0], rel=1e-5)
            gates = task.model.gates
            assert gates is not None
            open_.append(float(gates.compute_gates(hard=False)["channel"].detach().mean()))
    assert len(calls) == 12 and open_[1] < open_[0]


def test_hard_from_switches_to_hard_gates() -> None:
    hardness = []
    with VideoEpochTrainer(quick(train={"hard_from": 0.5}, data={"train_clips": 16})) as task:
        for _ in range(2):
            task.train_epoch(lambda: hardness.append(task.model.hard_gates) or torch.zeros(()))
    assert hardness == [False, False, True, True]


def test_state_dict_resumes_bitwise(tmp_path: Path) -> None:
    with VideoEpochTrainer(quick()) as task:
        task.train_epoch()
        checkpoint.save(tmp_path, {"task": task.state_dict(), "fingerprint": {}})
        task.evaluate_accuracy()
        task.train_epoch(lambda: 0.1 * task.model.head.weight.square().sum())
        expected, accuracy = weights(task), task.evaluate_accuracy()
        soft, hard = task.differentiable_layers(3), task.export_model().describe_layers(3)
    state = checkpoint.load(tmp_path, {})
    assert state is not None  # tensors, numbers, texts, lists and dictionaries only
    with VideoEpochTrainer(quick()) as other:
        other.load_state_dict(state["task"])
        other.train_epoch(lambda: 0.1 * other.model.head.weight.square().sum())
        assert_same(weights(other), expected)
        assert other.evaluate_accuracy() == accuracy and other.export_model().describe_layers(3) == hard
        flops = [layer.flops for layer in other.differentiable_layers(3)]
        assert flops == [layer.flops for layer in soft]


def test_finished_state_can_be_evaluated() -> None:
    settings = quick(train={"epochs": 1})
    with VideoEpochTrainer(settings) as task:
        task.train_epoch()
        state, accuracy = task.state_dict(), task.evaluate_accuracy()
        layers = task.export_model().describe_layers(2)
        state = {name: item.copy() if isinstance(item, dict) else item for name, item in state.items()}
    with VideoEpochTrainer(settings) as other:
        other.load_state_dict(state)
        # The new model is still in training mode.
        assert other.export_model().describe_layers(2) == layers
        assert other.evaluate_accuracy() == accuracy


def test_export_model_is_an_equal_copy() -> None:
    with VideoEpochTrainer(quick()) as task:
        task.train_epoch()
        before = weights(task)
        exported = task.export_model()
        assert isinstance(exported, LayeredVideoViT)
        assert exported.model.compacted and exported.model.gates is None
        with torch.no_grad():
            for parameter in exported.model.parameters():
                parameter.zero_()
        assert_same(weights(task), before)
        task.train_step()  # training can continue


def test_save_writes_the_exported_model(tmp_path: Path) -> None:
    with VideoEpochTrainer(quick()) as task:
        task.train_epoch()
        task.save(tmp_path / "model.safetensors")
        exported, expected = load_model(tmp_path / "model.safetensors"), task.export_model().model
    assert_same(dict(exported.state_dict()), dict(expected.state_dict()))
    assert list(LayeredVideoViT(exported.eval()).describe_layers(2)) == list(
        LayeredVideoViT(expected).describe_layers(2)
    )


@pytest.mark.parametrize("batch_size", [1, 5])
def test_differentiable_layers_scale_with_batch(batch_size: int) -> None:
    with VideoEpochTrainer(quick()) as task:
        soft, hard = task.differentiable_layers(batch_size), task.export_model().describe_layers(batch_size)
        assert {layer.batch_size for layer in (*soft, *hard)} == {batch_size}
        assert [layer.name for layer in soft][:2] == ["embed", "blocks.0.attention"]
        assert all(isinstance(layer.flops, torch.Tensor) and layer.flops.ndim == 0 for layer in soft)
        assert list(hard) == list(LayeredVideoViT(compact(task.model)).describe_layers(batch_size))


def test_dense_model_trains() -> None:
    with VideoEpochTrainer(quick(mode="dense", train={"epochs": 1})) as task:
        task.train_epoch(lambda: torch.zeros(()))
        assert [layer.flops for layer in task.export_model().describe_layers(2)] == [
            pytest.approx(float(torch.as_tensor(layer.flops))) for layer in task.differentiable_layers(2)
        ]


def test_global_generator_is_restored_and_not_used(one_epoch: OneEpoch) -> None:
    torch.manual_seed(3)
    with VideoEpochTrainer(quick(train={"epochs": 1})) as task:
        task.train_epoch()
        assert_same(weights(task), one_epoch[0])
    number = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(number, torch.rand(2))
    with VideoEpochTrainer(quick(train={"epochs": 1, "seed": 1})) as other:
        assert not torch.equal(other.model.head.weight, task.model.head.weight)


@pytest.mark.parametrize("nested", [False, True])
def test_concurrent_trainers_are_independent(nested: bool, one_epoch: OneEpoch) -> None:
    torch.manual_seed(5)
    first = VideoEpochTrainer(quick(train={"epochs": 1}))
    second = VideoEpochTrainer(quick(train={"epochs": 1, "seed": 2}))
    with first, second:
        for task in (second, first) if nested else (first, second):
            task.train_epoch()
        assert_same(weights(first), one_epoch[0])
    number = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(number, torch.rand(1))


def test_invalid_config_restores_generator() -> None:
    torch.manual_seed(7)
    with pytest.raises(InputError, match="64"):
        VideoEpochTrainer(quick(train={"batch_size": 64}))
    torch.manual_seed(8)
    with pytest.raises(InputError, match="batch_size"):
        VideoEpochTrainer(quick()).differentiable_layers(0)
    number = torch.rand(1)
    torch.manual_seed(8)
    assert torch.equal(number, torch.rand(1))


def test_infinite_extra_loss_raises() -> None:
    with VideoEpochTrainer(quick()) as task, pytest.raises(RunError, match="loss is nan"):
        task.train_epoch(lambda: torch.tensor(float("nan")))
