"""Block importance: the search against exhaustive search, resuming after a kill, and its file."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.adaptive.plan.space import ModelGeometry, PlanSpace
from sparseflow.adaptive.profile import compute_weights_id
from sparseflow.adaptive.profile.importance import (
    AccuracyDrop,
    BlockImportance,
    load_plan_space,
    measure_importance,
)
from sparseflow.errors import FileFormatError, InputError, RunError
from tests.conformance import check_artifact_file

SMALL = ModelGeometry(depth=16, top_k=8)
REDUNDANT_BLOCKS = (6, 7)
"""Two redundant blocks: either can be removed, but not both."""


class FakeScore:
    """Score function: each block adds to the score of each sample, and two blocks are redundant.

    Args:
        depth: Number of blocks.
        samples: Number of samples.
        seed: Seed of the contributions.
    """

    def __init__(self, depth: int = 16, samples: int = 60, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.depth, self.calls = depth, []
        self.contribution = generator.gamma(2.0, 0.01, size=depth)
        self.contribution[[block for block in REDUNDANT_BLOCKS if block < depth]] = 1e-4
        self.noise = generator.normal(0, 0.02, size=(samples, depth))

    def __call__(self, blocks: tuple[int, ...]) -> np.ndarray:
        self.calls.append(blocks)
        assert list(blocks) == sorted(set(blocks)) and 0 in blocks
        removed = [block for block in range(self.depth) if block not in blocks]
        penalty = 0.4 if set(REDUNDANT_BLOCKS) <= set(removed) else 0.0
        return 0.9 - self.contribution[removed].sum() - penalty - self.noise[:, removed].sum(axis=1)

    def compute_drop(self, removed: tuple[int, ...]) -> float:
        """Exact loss of score without some blocks."""
        blocks = tuple(range(self.depth))
        remaining = tuple(block for block in blocks if block not in removed)
        return float((self(blocks) - self(remaining)).mean())


def test_measure_importance_single_blocks_have_exact_drop_and_interval() -> None:
    score = FakeScore()
    importance = measure_importance(score, SMALL)
    assert importance.samples == 60 and importance.full_score == pytest.approx(0.9)
    for block, single in enumerate(importance.single_drops, start=1):
        assert single.blocks == (block,) and single.drop == pytest.approx(score.compute_drop((block,)))
        # Standard error of a mean of 60 samples; a 95 % interval is 1.96 standard errors to each side.
        error = float(np.std(score.noise[:, block])) / math.sqrt(60)
        assert single.low < single.drop < single.high
        assert single.high - single.low == pytest.approx(2 * 1.96 * error, rel=0.15)


def test_measure_importance_redundant_blocks_are_not_skipped_together() -> None:
    score = FakeScore()
    importance = measure_importance(score, SMALL)
    least_important = sorted(range(1, 16), key=lambda block: importance.single_drops[block - 1].drop)[:2]
    assert set(least_important) == set(REDUNDANT_BLOCKS)
    for skip in importance.skips:
        removed = skip.drop.blocks
        assert not set(REDUNDANT_BLOCKS) <= set(removed)
        assert skip.drop.drop == pytest.approx(score.compute_drop(removed))
    single_drops = sum(importance.single_drops[block - 1].drop for block in REDUNDANT_BLOCKS)
    assert single_drops < 0.1 < score.compute_drop(REDUNDANT_BLOCKS)
    space = importance.make_space()
    assert len(space) == 225 and space.geometry == SMALL
    assert set(space.sets) == {(p, total) for p in range(1, 6) for total in range(11 + p, 17)}


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), depth=st.sampled_from([9, 12, 16]))
def test_measure_importance_wide_beam_matches_exhaustive_search(seed: int, depth: int) -> None:
    score, geometry = FakeScore(depth, 8, seed), ModelGeometry(depth=depth, top_k=4)
    importance = measure_importance(score, geometry, beam=10_000)
    for skip in importance.skips:
        block_sets = combinations(range(skip.position, depth), len(skip.drop.blocks))
        min_drop = min(score.compute_drop(blocks) for blocks in block_sets)
        assert skip.drop.drop == pytest.approx(min_drop, abs=1e-9)
    # A beam of four is nearly as good with fewer evaluations.
    narrow_importance = measure_importance(score, geometry, beam=4)
    assert narrow_importance.evaluations <= importance.evaluations
    for narrow, wide in zip(narrow_importance.skips, importance.skips, strict=True):
        assert narrow.drop.drop <= wide.drop.drop + 0.02


@settings(max_examples=15, deadline=None)
@given(depth=st.integers(2, 24), top_k=st.integers(1, 8), beam=st.integers(1, 3))
def test_measure_importance_any_geometry_selects_every_set(depth: int, top_k: int, beam: int) -> None:
    geometry, score = ModelGeometry(depth=depth, top_k=top_k), FakeScore(depth, 5)
    fractions: list[float] = []
    importance = measure_importance(
        score, geometry, beam=beam, progress=lambda message, fraction: fractions.append(fraction)
    )
    assert importance.evaluations == len(score.calls) == len(set(score.calls)) == len(fractions)
    assert fractions == sorted(fractions) and fractions[-1] <= 1.0
    space = importance.make_space()
    for position in geometry.positions:
        for total in geometry.block_counts(position):
            assert len(space.sets[position, total]) == total
            assert set(range(position)) <= set(space.sets[position, total])


def test_measure_importance_list_or_tensor_scores_are_accepted() -> None:
    geometry = ModelGeometry(depth=3, top_k=2)

    def lists(blocks: tuple[int, ...]) -> list[float]:
        return [len(blocks) / 3, 0.0]

    def tensors(blocks: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([len(blocks) / 3, 0.0], requires_grad=True)

    assert measure_importance(lists, geometry).full_score == 0.5
    assert measure_importance(tensors, geometry).single_drops[1].drop == pytest.approx(1 / 6, abs=1e-7)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda blocks: [], "one finite number per sample"),
        (lambda blocks: 0.5, "one finite number per sample"),
        (lambda blocks: [[0.5]], "one finite number per sample"),
        (lambda blocks: [math.nan], "1 non-finite"),
        (lambda blocks: ["good"], "one number per sample"),
        (lambda blocks: [0.5] * len(blocks), "15 samples.*16"),
    ],
)
def test_measure_importance_bad_scores_raise_input_error(score: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        measure_importance(score, SMALL)


def test_measure_importance_bad_arguments_raise_input_error() -> None:
    with pytest.raises(InputError, match="`beam`"):
        measure_importance(FakeScore(), SMALL, beam=0)


def test_measure_importance_journal_rows_are_not_evaluated_again(tmp_path: Path) -> None:
    journal, score = tmp_path / "new" / "scores.jsonl", FakeScore()
    importance = measure_importance(score, SMALL, beam=1, journal_path=journal, model_id="m")
    second_score = FakeScore()
    resumed = measure_importance(second_score, SMALL, beam=1, journal_path=journal, model_id="m")
    assert resumed == importance and not second_score.calls
    extended = measure_importance(second_score, SMALL, beam=2, journal_path=journal, model_id="m")
    assert extended.evaluations == len(journal.read_text().splitlines()) - 1 > importance.evaluations
    assert not set(second_score.calls) & set(score.calls)


KILL_SCRIPT = """
import os, signal, sys
from sparseflow.adaptive.profile.importance import measure_importance
from tests.adaptive.profile.test_importance import SMALL, FakeScore
fractions = []
def kill_at_30(message, fraction):
    fractions.append(fraction)
    if len(fractions) == 30:
        os.kill(os.getpid(), signal.SIGKILL)
measure_importance(FakeScore(), SMALL, journal_path=sys.argv[1], progress=kill_at_30)
"""


def test_measure_importance_after_kill_resumes_from_journal(tmp_path: Path) -> None:
    journal, root = tmp_path / "scores.jsonl", Path(__file__).parents[3]
    path = f"{root / 'src'}{os.pathsep}{root}"
    process = subprocess.run(
        [sys.executable, "-c", KILL_SCRIPT, str(journal)], env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert process.returncode == -signal.SIGKILL
    with journal.open("ab") as file:
        file.write(b'{"removed": [1, 2], "sco')
    score, uninterrupted_score = FakeScore(), FakeScore()
    importance = measure_importance(score, SMALL, journal_path=journal)
    assert importance == measure_importance(uninterrupted_score, SMALL, journal_path=tmp_path / "other.jsonl")
    assert len(uninterrupted_score.calls) - len(score.calls) == 30


def test_measure_importance_foreign_or_damaged_journal_is_refused(tmp_path: Path) -> None:
    journal = tmp_path / "scores.jsonl"
    measure_importance(FakeScore(), SMALL, beam=1, journal_path=journal, model_id="one")
    content = journal.read_bytes()
    for geometry, model_id in ((SMALL, "two"), (ModelGeometry(depth=12, top_k=8), "one")):
        with pytest.raises(InputError, match=r"model_id|geometry"):
            measure_importance(FakeScore(), geometry, journal_path=journal, model_id=model_id)
    with pytest.raises(InputError, match="60"):
        measure_importance(FakeScore(samples=7), SMALL, journal_path=journal, model_id="one")
    assert journal.read_bytes() == content
    for text, message in (
        ('{"format": "other"}\n', "other"), ("nonsense\n", "line 1"),
        (content.decode().splitlines()[0] + '\n{"removed": [1]}\n', "line 2"),
        (content.decode().splitlines()[0] + '\n{"removed": [1], "scores": [null]}\n', "line 2"),
    ):  # fmt: skip
        journal.write_text(text)
        with pytest.raises(FileFormatError, match=message):
            measure_importance(FakeScore(), SMALL, journal_path=journal, model_id="one")


@pytest.mark.usefixtures("refused_at_once")
def test_measure_importance_locked_journal_raises_run_error(tmp_path: Path) -> None:
    def score(blocks: tuple[int, ...]) -> list[float]:
        with pytest.raises(RunError, match=tmp_path.name):
            measure_importance(FakeScore(), SMALL, journal_path=tmp_path / "scores.jsonl")
        return [1.0]

    measure_importance(score, ModelGeometry(depth=2, top_k=1), journal_path=tmp_path / "scores.jsonl")


def test_block_importance_save_and_load_round_trips(tmp_path: Path) -> None:
    importance = measure_importance(FakeScore(), SMALL, beam=1, model_id="m")
    path = tmp_path / "importance.json"
    importance.save(path)
    loaded = BlockImportance.load(path)
    assert loaded == importance and loaded.make_space() == importance.make_space()
    check_artifact_file(BlockImportance.load, path, BlockImportance.HINT)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), "other"), (("geometry", "depth"), 1), (("geometry", "depth"), 12),
        (("single_drops",), []),
        (("single_drops", 0, "blocks"), [2]), (("single_drops", 0, "drop"), math.nan), (("full_score",), "x"),
        (("single_drops", 0, "drop"), "much"),
        (("skips",), []), (("skips", 0, "drop", "blocks"), [0, 1, 2, 3]), (("skips", 0, "position"), 9),
        (("skips", 0, "drop", "blocks"), [3, 2, 1, 4]), (("samples",), None),
    ],
)  # fmt: skip
def test_block_importance_damaged_record_raises_file_format_error(path: tuple[Any, ...], value: Any) -> None:
    record = json.loads(json.dumps(measure_importance(FakeScore(), SMALL, beam=1).to_dict()))
    parent = record
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    with pytest.raises(FileFormatError):
        BlockImportance.from_dict(record, "importance.json")


def test_load_plan_space_of_another_model_raises_input_error(tmp_path: Path) -> None:
    model, path = torch.nn.Linear(2, 2), tmp_path / "importance.json"
    assert load_plan_space(model, SMALL, None) == PlanSpace.from_importance(SMALL)
    for model_id in ("", compute_weights_id(model)):
        importance = measure_importance(FakeScore(), SMALL, beam=1, model_id=model_id)
        importance.save(path)
        assert load_plan_space(model, SMALL, path) == importance.make_space()
    with pytest.raises(InputError, match=r"importance\.json"):
        load_plan_space(torch.nn.Linear(2, 2), SMALL, path)


def test_accuracy_drop_of_block_0_raises_input_error() -> None:
    with pytest.raises(InputError, match=r"\[0\]"):
        AccuracyDrop(blocks=(0,), drop=0.1, low=0.0, high=0.2)
