"""Tables of outcomes: answers and latencies of the same requests, side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from sparseflow.adaptive.grid_vqa.config import KINDS
from sparseflow.adaptive.grid_vqa.dataset import VqaDataset
from sparseflow.adaptive.grid_vqa.evaluate import evaluate_plans
from sparseflow.adaptive.grid_vqa.task import GridVqaTask
from sparseflow.adaptive.profile import PlanProfile
from sparseflow.adaptive.questions.task import SampleCounts
from sparseflow.adaptive.study import outcome_tables as room
from sparseflow.adaptive.study.outcome_tables import (
    LATENCIES_FILE,
    OUTCOMES_DIR,
    StudyTables,
    build_study_tables,
    get_dtype,
)
from sparseflow.core.training.distributed import DistributedContext
from sparseflow.errors import FileFormatError, InputError
from tests.adaptive.grid_vqa.little import bank
from tests.adaptive.study import small

ALONE = DistributedContext(rank=0, world_size=1, device=torch.device("cpu"))
DATA = VqaDataset(small.SETTINGS, bank=bank())


@pytest.fixture(scope="module")
def model(study_inputs: Path) -> Any:
    return small.opened(study_inputs / "model")


def build_tables(model: Any, profile: PlanProfile, folder: Path, **counts: int) -> StudyTables:
    return build_study_tables(
        GridVqaTask(model=model, data=DATA), profile, folder, counts=SampleCounts(**counts), context=ALONE
    )


def test_build_study_tables_joins_outcomes_and_latencies(model, tmp_path: Path) -> None:
    profile = small.profile_of(model, noise=0.0)
    tables = build_tables(model, profile, tmp_path, train=30, validation=20, test=40)
    outcomes = {
        name: evaluate_plans(model, DATA, profile.space, split=name, count=50) for name in ("val", "test")
    }
    for table, split, rows in (
        (tables.train, "val", slice(30)),
        (tables.validation, "val", slice(30, 50)),
        (tables.test, "test", slice(40)),
    ):
        assert torch.equal(table.correct, outcomes[split].correct[rows])
        torch.testing.assert_close(table.language, outcomes[split].language[rows])
        torch.testing.assert_close(table.tokens, outcomes[split].tokens[rows])
        for index in range(len(table)):
            text, new = (
                int(getattr(outcomes[split], name)[rows][index]) for name in ("text_tokens", "new_tokens")
            )
            expected = [small.truth(plan, text, new) for plan in profile.space.plans]
            np.testing.assert_allclose(table.latency_ms[index].mean(1), expected, rtol=0.05)
    assert set(tables.kinds) == {"left", "list"}
    for kind, which in tables.kinds.items():
        assert torch.equal(which, outcomes["test"].kinds[:40] == KINDS.index(kind))
    assert tables.size[1] == 2 and tables.latency.ms.shape == (1, len(profile.space), 3)


def test_build_study_tables_stores_latencies_of_profile(
    model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, counts = small.profile_of(model), {"train": 8, "validation": 4, "test": 8}
    created: list[int] = []
    real = room.sample_latencies

    def noted(profile: PlanProfile, sizes: Any) -> Any:
        created.append(len(sizes))
        return real(profile, sizes)

    monkeypatch.setattr(room, "sample_latencies", noted)
    first = build_tables(model, profile, tmp_path, **counts)
    assert len(created) == 3  # before any answer, of all sizes, and of the one that pictures are of
    second = build_tables(model, profile, tmp_path, **counts)
    assert len(created) == 5 and second.train.identity() == first.train.identity()
    other = build_tables(model, small.profile_of(model, repeats=2), tmp_path, **counts)
    assert len(created) == 8 and other.train.latency_ms.shape[2] == 2
    path = tmp_path / OUTCOMES_DIR / LATENCIES_FILE
    path.write_bytes(b"nothing")
    with pytest.raises(FileFormatError, match=r"latencies.safetensors"):
        build_tables(model, profile, tmp_path, **counts)


def test_build_study_tables_of_other_profile_raises(model, tmp_path: Path) -> None:
    profile = small.profile_of(model)
    other = replace(profile, metadata=replace(profile.metadata, model_id="other"))
    with pytest.raises(InputError, match="id other"):
        build_tables(model, other, tmp_path)
    with pytest.raises(InputError, match=r"`validation` \(=0\)"):
        SampleCounts(validation=0)


def test_get_dtype_is_that_of_profile(model) -> None:
    profile = small.profile_of(model)

    def read_dtype(**profile_config: str) -> torch.dtype:
        return get_dtype(replace(profile, metadata=replace(profile.metadata, config=profile_config)))

    assert read_dtype(dtype="bfloat16") == torch.bfloat16 and read_dtype(dtype="float64") == torch.float64
    assert read_dtype() == torch.float32  # of a CPU
    with pytest.raises(FileFormatError, match=r"'nn'"):
        read_dtype(dtype="nn")
