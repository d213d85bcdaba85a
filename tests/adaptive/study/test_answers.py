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


def of(model: Any, data: VqaDataset = DATA) -> GridVqaTask:
    return GridVqaTask(model=model, data=data, chunk_size=dataset.CHUNK)


@pytest.fixture(scope="module")
def model(made: Path) -> Any:
    return small.opened(made / "model")


@pytest.fixture(scope="module")
def space(model: Any) -> PlanSpace:
    return small.profile_of(model).space


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Split, first and count of all that the model is asked."""
    calls: list[tuple[str, int, int]] = []

    def noted(*given: Any, **named: Any) -> Any:
        calls.append((named["split"], named["first"], named["count"]))
        return evaluate.evaluate_plans(*given, **named)

    monkeypatch.setattr(task, "evaluate_plans", noted)
    return calls


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 32 samples, not of 256."""
    monkeypatch.setattr(dataset, "CHUNK", 32)


@pytest.mark.usefixtures("short_chunks")
def test_what_the_model_answers_chunk_by_chunk(model, space, tmp_path: Path, tried) -> None:
    told: list[tuple[str, float]] = []
    found = collect_outcomes(
        of(model), space, tmp_path, {"val": 40, "test": 20}, context=ALONE,
        progress=lambda what, share: told.append((what, share)),
    )  # fmt: skip
    assert tried == [("val", 0, 32), ("val", 32, 8), ("test", 0, 20)]
    assert told[-1] == ("plans evaluated on 20 test samples", 1.0)
    wanted: dict[Split, int] = {"val": 40, "test": 20}
    for split, count in wanted.items():
        whole = evaluate_plans(model, DATA, space, split=split, count=count)
        for field in fields(whole):
            one, other = getattr(found[split], field.name), getattr(whole, field.name)
            if field.name in ("plans", "vision_tokens"):
                assert one == other
            else:
                torch.testing.assert_close(one, other)
    assert 0.05 < found["val"].correct.mean() < 0.95, "a test of use has both"


def test_lengths_are_those_of_requests(model, space) -> None:
    judged = evaluate_plans(model, DATA, space.plans[:1], split="test", count=12)
    for at, sample in enumerate(DATA.iterate_samples("test", 12)):
        ids = sample.inputs["input_ids"]
        images = int((ids == DATA.vocabulary.image).sum())
        assert judged.text_tokens[at] == ids.shape[1] - images
        assert judged.new_tokens[at] == len(sample.answer.split()) + 1


@pytest.mark.usefixtures("short_chunks")
def test_it_goes_on_where_it_was_stopped(model, space, tmp_path: Path, tried) -> None:
    def stop(what: str, share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect_outcomes(of(model), space, tmp_path, {"val": 40, "test": 20}, context=ALONE, progress=stop)
    del tried[:]
    collect_outcomes(of(model), space, tmp_path, {"val": 40, "test": 20}, context=ALONE)
    assert tried == [("val", 32, 8), ("test", 0, 20)]
    del tried[:]
    fewer = collect_outcomes(of(model), space, tmp_path, {"val": 10, "test": 20}, context=ALONE)
    assert not tried and len(fewer["val"].kinds) == 10
    more = collect_outcomes(of(model), space, tmp_path, {"test": 30}, context=ALONE)
    assert tried == [("test", 0, 30)] and len(more["test"].kinds) == 30


def test_of_another_model_task_or_plans(model, space, made: Path, tmp_path: Path) -> None:
    collect_outcomes(of(model), space, tmp_path, {"test": 4}, context=ALONE)
    other = VqaDataset(small.SETTINGS.model_copy(update={"test_shares": {"list": 1.0}}), bank=bank())
    with pytest.raises(InputError, match=r"test-000000.safetensors has other task"):
        collect_outcomes(of(model, other), space, tmp_path, {"test": 4}, context=ALONE)
    backwards = PlanSpace.from_importance(
        space.geometry, [float(block) for block in range(space.geometry.depth)]
    )
    with pytest.raises(InputError, match=r"other plans"):
        collect_outcomes(of(model), backwards, tmp_path, {"test": 4}, context=ALONE)
    changed = small.opened(made / "model")
    with torch.no_grad():
        next(iter(changed.parameters())).add_(1.0)
    with pytest.raises(InputError, match=r"other weights"):
        collect_outcomes(of(changed), space, tmp_path, {"test": 4}, context=ALONE)
    with pytest.raises(InputError, match=r"`counts` .* at least 1 sample"):
        collect_outcomes(of(model), space, tmp_path, {"test": 0}, context=ALONE)
    with pytest.raises(InputError, match=r"`first` \(=3\) must be a multiple of 256"):
        evaluate_plans(model, DATA, space, count=4, first=3)


def test_a_damaged_chunk(model, space, tmp_path: Path) -> None:
    collect_outcomes(of(model), space, tmp_path, {"test": 4}, context=ALONE)
    path = tmp_path / "test-000000.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(FileFormatError, match=r"test-000000.safetensors"):
        collect_outcomes(of(model), space, tmp_path, {"test": 4}, context=ALONE)
