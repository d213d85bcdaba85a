"""Answers in files: the very ones that the model gives, each made once, and never those of another model."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from sparseflow.adaptive.grid_vqa import dataset, evaluate, task
from sparseflow.adaptive.grid_vqa.dataset import VqaDataset
from sparseflow.adaptive.grid_vqa.evaluate import evaluate_plans
from sparseflow.adaptive.grid_vqa.task import GridVqaTask
from sparseflow.adaptive.plan.space import PlanSpace
from sparseflow.adaptive.questions.task import Split
from sparseflow.adaptive.study.outcome_tables import collect_outcomes
from sparseflow.core.training.distributed import DistributedContext
from sparseflow.errors import FileFormatError, InputError
from tests.adaptive.grid_vqa.little import bank
from tests.adaptive.study import small

ALONE = DistributedContext(rank=0, world_size=1, device=torch.device("cpu"))
DATA = VqaDataset(small.SETTINGS, bank=bank())


def make_task(model: Any, data: VqaDataset = DATA) -> GridVqaTask:
    return GridVqaTask(model=model, data=data, chunk_size=dataset.CHUNK)


@pytest.fixture(scope="module")
def model(study_inputs: Path) -> Any:
    return small.opened(study_inputs / "model")


@pytest.fixture(scope="module")
def space(model: Any) -> PlanSpace:
    return small.profile_of(model).space


@pytest.fixture
def evaluated_chunks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Split, first and count of all that the model is asked."""
    calls: list[tuple[str, int, int]] = []

    def noted(*args: Any, **named: Any) -> Any:
        calls.append((named["split"], named["first"], named["count"]))
        return evaluate.evaluate_plans(*args, **named)

    monkeypatch.setattr(task, "evaluate_plans", noted)
    return calls


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 32 samples, not of 256."""
    monkeypatch.setattr(dataset, "CHUNK", 32)


@pytest.mark.usefixtures("short_chunks")
def test_collect_outcomes_equals_evaluation_of_all_samples(
    model, space, tmp_path: Path, evaluated_chunks
) -> None:
    messages: list[tuple[str, float]] = []
    outcomes = collect_outcomes(
        make_task(model), space, tmp_path, {"val": 40, "test": 20}, context=ALONE,
        progress=lambda message, share: messages.append((message, share)),
    )  # fmt: skip
    assert evaluated_chunks == [("val", 0, 32), ("val", 32, 8), ("test", 0, 20)]
    assert messages[-1] == ("plans evaluated on 20 test samples", 1.0)
    counts: dict[Split, int] = {"val": 40, "test": 20}
    for split, count in counts.items():
        expected = evaluate_plans(model, DATA, space, split=split, count=count)
        for field in fields(expected):
            first, other = getattr(outcomes[split], field.name), getattr(expected, field.name)
            if field.name in ("plans", "vision_tokens"):
                assert first == other
            else:
                torch.testing.assert_close(first, other)
    assert 0.05 < outcomes["val"].correct.mean() < 0.95


def test_outcome_lengths_equal_requests(model, space) -> None:
    outcomes = evaluate_plans(model, DATA, space.plans[:1], split="test", count=12)
    for index, sample in enumerate(DATA.iterate_samples("test", 12)):
        ids = sample.inputs["input_ids"]
        images = int((ids == DATA.vocabulary.image).sum())
        assert outcomes.text_tokens[index] == ids.shape[1] - images
        assert outcomes.new_tokens[index] == len(sample.answer.split()) + 1


@pytest.mark.usefixtures("short_chunks")
def test_collect_outcomes_resumes(model, space, tmp_path: Path, evaluated_chunks) -> None:
    def stop(message: str, share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect_outcomes(
            make_task(model), space, tmp_path, {"val": 40, "test": 20}, context=ALONE, progress=stop
        )
    del evaluated_chunks[:]
    collect_outcomes(make_task(model), space, tmp_path, {"val": 40, "test": 20}, context=ALONE)
    assert evaluated_chunks == [("val", 32, 8), ("test", 0, 20)]
    del evaluated_chunks[:]
    fewer = collect_outcomes(make_task(model), space, tmp_path, {"val": 10, "test": 20}, context=ALONE)
    assert not evaluated_chunks and len(fewer["val"].kinds) == 10
    more = collect_outcomes(make_task(model), space, tmp_path, {"test": 30}, context=ALONE)
    assert evaluated_chunks == [("test", 0, 30)] and len(more["test"].kinds) == 30


def test_collect_outcomes_into_directory_of_other_model_raises(
    model, space, study_inputs: Path, tmp_path: Path
) -> None:
    collect_outcomes(make_task(model), space, tmp_path, {"test": 4}, context=ALONE)
    other = VqaDataset(small.SETTINGS.model_copy(update={"test_shares": {"list": 1.0}}), bank=bank())
    with pytest.raises(InputError, match=r"test-000000.safetensors has other task"):
        collect_outcomes(make_task(model, other), space, tmp_path, {"test": 4}, context=ALONE)
    backwards = PlanSpace.from_importance(
        space.geometry, [float(block) for block in range(space.geometry.depth)]
    )
    with pytest.raises(InputError, match=r"other plans"):
        collect_outcomes(make_task(model), backwards, tmp_path, {"test": 4}, context=ALONE)
    changed = small.opened(study_inputs / "model")
    with torch.no_grad():
        next(iter(changed.parameters())).add_(1.0)
    with pytest.raises(InputError, match=r"other weights"):
        collect_outcomes(make_task(changed), space, tmp_path, {"test": 4}, context=ALONE)
    with pytest.raises(InputError, match=r"`counts` .* at least 1 sample"):
        collect_outcomes(make_task(model), space, tmp_path, {"test": 0}, context=ALONE)
    with pytest.raises(InputError, match=r"`first` \(=3\) must be a multiple of 256"):
        evaluate_plans(model, DATA, space, count=4, first=3)


def test_collect_outcomes_with_damaged_chunk_raises(model, space, tmp_path: Path) -> None:
    collect_outcomes(make_task(model), space, tmp_path, {"test": 4}, context=ALONE)
    path = tmp_path / "test-000000.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(FileFormatError, match=r"test-000000.safetensors"):
        collect_outcomes(make_task(model), space, tmp_path, {"test": 4}, context=ALONE)
