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
def model(made: Path) -> Any:
    return small.opened(made / "model")


def of(model: Any, profile: PlanProfile, folder: Path, **counts: int) -> StudyTables:
    return build_study_tables(
        GridVqaTask(model=model, data=DATA), profile, folder, counts=SampleCounts(**counts), context=ALONE
    )


def test_answers_and_latencies_of_the_same_requests(model, tmp_path: Path) -> None:
    profile = small.profile_of(model, noise=0.0)
    found = of(model, profile, tmp_path, train=30, validation=20, test=40)
    judged = {
        name: evaluate_plans(model, DATA, profile.space, split=name, count=50) for name in ("val", "test")
    }
    for table, split, some in (
        (found.train, "val", slice(30)),
        (found.validation, "val", slice(30, 50)),
        (found.test, "test", slice(40)),
    ):
        assert torch.equal(table.correct, judged[split].correct[some])
        torch.testing.assert_close(table.language, judged[split].language[some])
        torch.testing.assert_close(table.tokens, judged[split].tokens[some])
        for at in range(len(table)):
            text, new = (
                int(getattr(judged[split], name)[some][at]) for name in ("text_tokens", "new_tokens")
            )
            wanted = [small.truth(plan, text, new) for plan in profile.space.plans]
            np.testing.assert_allclose(table.latency_ms[at].mean(1), wanted, rtol=0.05)
    assert set(found.kinds) == {"left", "list"}
    for kind, which in found.kinds.items():
        assert torch.equal(which, judged["test"].kinds[:40] == KINDS.index(kind))
    assert found.size[1] == 2 and found.latency.ms.shape == (1, len(profile.space), 3)


def test_latencies_are_kept_and_made_anew_for_another_profile(
    model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, few = small.profile_of(model), {"train": 8, "validation": 4, "test": 8}
    made: list[int] = []
    real = room.sample_latencies

    def noted(profile: PlanProfile, sizes: Any) -> Any:
        made.append(len(sizes))
        return real(profile, sizes)

    monkeypatch.setattr(room, "sample_latencies", noted)
    first = of(model, profile, tmp_path, **few)
    assert len(made) == 3  # before any answer, of all sizes, and of the one that pictures are of
    again = of(model, profile, tmp_path, **few)
    assert len(made) == 5 and again.train.identity() == first.train.identity()
    other = of(model, small.profile_of(model, repeats=2), tmp_path, **few)
    assert len(made) == 8 and other.train.latency_ms.shape[2] == 2
    path = tmp_path / OUTCOMES_DIR / LATENCIES_FILE
    path.write_bytes(b"nothing")
    with pytest.raises(FileFormatError, match=r"latencies.safetensors"):
        of(model, profile, tmp_path, **few)


def test_a_profile_of_another_model_and_counts_of_none(model, tmp_path: Path) -> None:
    profile = small.profile_of(model)
    other = replace(profile, metadata=replace(profile.metadata, model_id="other"))
    with pytest.raises(InputError, match="id other"):
        of(model, other, tmp_path)
    with pytest.raises(InputError, match=r"`validation` \(=0\)"):
        SampleCounts(validation=0)


def test_the_number_format_is_the_profiles(model) -> None:
    profile = small.profile_of(model)

    def told(**how: str) -> torch.dtype:
        return get_dtype(replace(profile, metadata=replace(profile.metadata, config=how)))

    assert told(dtype="bfloat16") == torch.bfloat16 and told(dtype="float64") == torch.float64
    assert told() == torch.float32  # of a CPU
    with pytest.raises(FileFormatError, match=r"'nn'"):
        told(dtype="nn")
