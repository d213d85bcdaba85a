"""Which blocks can go: against all sets, one by one, and going on after a kill."""

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
    count_min_evaluations,
    load_plan_space,
    measure_importance,
)
from sparseflow.errors import FileFormatError, InputError, RunError
from tests.conformance import check_artifact_file

SMALL = ModelGeometry(depth=16, top_k=8)
NEIGHBOURS = (6, 7)
"""Two blocks that stand in for each other: either can go, and not both."""


class Model:
    """Each block is worth something to each sample, and neighbours stand in for each other.

    Args:
        depth: Blocks.
        samples: How many are scored.
        seed: What worths are drawn from.
    """

    def __init__(self, depth: int = 16, samples: int = 60, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.depth, self.calls = depth, []
        self.worth = generator.gamma(2.0, 0.01, size=depth)
        self.worth[[block for block in NEIGHBOURS if block < depth]] = 1e-4
        self.noise = generator.normal(0, 0.02, size=(samples, depth))

    def __call__(self, blocks: tuple[int, ...]) -> np.ndarray:
        self.calls.append(blocks)
        assert list(blocks) == sorted(set(blocks)) and 0 in blocks
        gone = [block for block in range(self.depth) if block not in blocks]
        both = 0.4 if set(NEIGHBOURS) <= set(gone) else 0.0
        return 0.9 - self.worth[gone].sum() - both - self.noise[:, gone].sum(axis=1)

    def drop(self, without: tuple[int, ...]) -> float:
        """What is lost, exactly."""
        whole = tuple(range(self.depth))
        kept = tuple(block for block in whole if block not in without)
        return float((self(whole) - self(kept)).mean())


def test_singles_and_intervals() -> None:
    model = Model()
    found = measure_importance(model, SMALL)
    assert found.samples == 60 and found.full_score == pytest.approx(0.9)
    for block, single in enumerate(found.single_drops, start=1):
        assert single.blocks == (block,) and single.drop == pytest.approx(model.drop((block,)))
        # The spread of a mean of 60, about two standard errors to each side.
        error = float(np.std(model.noise[:, block])) / math.sqrt(60)
        assert single.low < single.drop < single.high
        assert single.high - single.low == pytest.approx(2 * 1.96 * error, rel=0.15)


def test_sets_are_found_though_they_are_no_sums() -> None:
    model = Model()
    found = measure_importance(model, SMALL)
    additive = sorted(range(1, 16), key=lambda block: found.single_drops[block - 1].drop)[:2]
    assert set(additive) == set(NEIGHBOURS)
    for each in found.skips:
        gone = each.drop.blocks
        assert not set(NEIGHBOURS) <= set(gone)
        assert each.drop.drop == pytest.approx(model.drop(gone))
    assert found.sum_single_drops(NEIGHBOURS) < 0.1 < model.drop(NEIGHBOURS)
    space = found.make_space()
    assert len(space) == 225 and space.geometry == SMALL
    assert set(space.sets) == {(p, total) for p in range(1, 6) for total in range(11 + p, 17)}


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), depth=st.sampled_from([9, 12, 16]))
def test_a_wide_beam_finds_the_best_of_all_sets(seed: int, depth: int) -> None:
    model, geometry = Model(depth, 8, seed), ModelGeometry(depth=depth, top_k=4)
    found = measure_importance(model, geometry, beam=10_000)
    for each in found.skips:
        every = combinations(range(each.position, depth), len(each.drop.blocks))
        best = min(model.drop(without) for without in every)
        assert each.drop.drop == pytest.approx(best, abs=1e-9)
    # A beam of four comes near, at a part of the cost.
    few = measure_importance(model, geometry, beam=4)
    assert few.evaluations <= found.evaluations
    for narrow, wide in zip(few.skips, found.skips, strict=True):
        assert narrow.drop.drop <= wide.drop.drop + 0.02


@settings(max_examples=30, deadline=None)
@given(depth=st.integers(2, 40), top_k=st.integers(1, 8), beam=st.integers(1, 3), more=st.integers(0, 60))
def test_any_geometry_and_any_budget(depth: int, top_k: int, beam: int, more: int) -> None:
    geometry, model = ModelGeometry(depth=depth, top_k=top_k), Model(depth, 5)
    budget = count_min_evaluations(geometry) + more
    told: list[float] = []
    found = measure_importance(
        model, geometry, beam=beam, max_evaluations=budget, progress=lambda what, done: told.append(done)
    )
    assert found.evaluations == len(model.calls) == len(set(model.calls)) == len(told) <= budget
    assert told == sorted(told) and told[-1] <= 1.0
    space = found.make_space()
    for position in geometry.positions:
        for total in geometry.block_counts(position):
            assert len(space.sets[position, total]) == total
            assert set(range(position)) <= set(space.sets[position, total])
    with pytest.raises(InputError, match="must be at least"):
        measure_importance(model, geometry, max_evaluations=count_min_evaluations(geometry) - 1)


def test_scores_may_be_tensors_or_lists() -> None:
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
def test_bad_scores_are_refused(score: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        measure_importance(score, SMALL)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(InputError, match="`beam`"):
        measure_importance(Model(), SMALL, beam=0)
    with pytest.raises(InputError, match=r"\(=5\).*22"):
        measure_importance(Model(), SMALL, max_evaluations=5)


def test_what_was_scored_is_not_scored_again(tmp_path: Path) -> None:
    journal, model = tmp_path / "new" / "scores.jsonl", Model()
    found = measure_importance(model, SMALL, max_evaluations=60, journal_path=journal, model_id="m")
    again = Model()
    assert (
        measure_importance(again, SMALL, max_evaluations=60, journal_path=journal, model_id="m") == found
        and not again.calls
    )
    more = measure_importance(again, SMALL, max_evaluations=80, journal_path=journal, model_id="m")
    assert more.evaluations == len(journal.read_text().splitlines()) - 1 >= 80
    assert not set(again.calls) & set(model.calls)


KILLED = """
import os, signal, sys
from sparseflow.adaptive.profile.importance import measure_importance
from tests.adaptive.profile.test_importance import SMALL, Model
done = []
def stop(what, share):
    done.append(share)
    if len(done) == 30:
        os.kill(os.getpid(), signal.SIGKILL)
measure_importance(Model(), SMALL, journal_path=sys.argv[1], progress=stop)
"""


def test_a_kill_loses_nothing(tmp_path: Path) -> None:
    journal, root = tmp_path / "scores.jsonl", Path(__file__).parents[3]
    path = f"{root / 'src'}{os.pathsep}{root}"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(journal)], env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    with journal.open("ab") as torn:
        torn.write(b'{"removed": [1, 2], "sco')
    model, whole = Model(), Model()
    found = measure_importance(model, SMALL, journal_path=journal)
    assert found == measure_importance(whole, SMALL, journal_path=tmp_path / "other.jsonl")
    assert len(whole.calls) - len(model.calls) == 30


def test_a_journal_is_of_one_model(tmp_path: Path) -> None:
    journal = tmp_path / "scores.jsonl"
    measure_importance(Model(), SMALL, max_evaluations=22, journal_path=journal, model_id="one")
    kept = journal.read_bytes()
    for geometry, name in ((SMALL, "two"), (ModelGeometry(depth=12, top_k=8), "one")):
        with pytest.raises(InputError, match="model_id|geometry"):
            measure_importance(Model(), geometry, journal_path=journal, model_id=name)
    with pytest.raises(InputError, match="60"):
        measure_importance(Model(samples=7), SMALL, journal_path=journal, model_id="one")
    assert journal.read_bytes() == kept
    for text, message in (
        ('{"format": "other"}\n', "other"), ("nonsense\n", "line 1"),
        (kept.decode().splitlines()[0] + '\n{"removed": [1]}\n', "line 2"),
        (kept.decode().splitlines()[0] + '\n{"removed": [1], "scores": [null]}\n', "line 2"),
    ):  # fmt: skip
        journal.write_text(text)
        with pytest.raises(FileFormatError, match=message):
            measure_importance(Model(), SMALL, journal_path=journal, model_id="one")


@pytest.mark.usefixtures("refused_at_once")
def test_two_do_not_write_one_journal(tmp_path: Path) -> None:
    def score(blocks: tuple[int, ...]) -> list[float]:
        with pytest.raises(RunError, match="another process"):
            measure_importance(Model(), SMALL, journal_path=tmp_path / "scores.jsonl")
        return [1.0]

    measure_importance(score, ModelGeometry(depth=2, top_k=1), journal_path=tmp_path / "scores.jsonl")


def test_it_is_saved_and_read(tmp_path: Path) -> None:
    found, file = (
        measure_importance(Model(), SMALL, max_evaluations=40, model_id="m"),
        tmp_path / "importance.json",
    )
    found.save(file)
    assert (
        BlockImportance.load(file) == found and BlockImportance.load(file).make_space() == found.make_space()
    )
    check_artifact_file(BlockImportance.load, file, BlockImportance.HINT)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), "other"), (("geometry", "depth"), 1), (("geometry", "depth"), 12), (("single_drops",), []),
        (("single_drops", 0, "blocks"), [2]), (("single_drops", 0, "drop"), math.nan), (("full_score",), "x"),
        (("single_drops", 0, "drop"), "much"),
        (("skips",), []), (("skips", 0, "drop", "blocks"), [0, 1, 2, 3]), (("skips", 0, "position"), 9),
        (("skips", 0, "drop", "blocks"), [3, 2, 1, 4]), (("samples",), None),
    ],
)  # fmt: skip
def test_damaged_files_are_refused(path: tuple[Any, ...], value: Any) -> None:
    record = json.loads(json.dumps(measure_importance(Model(), SMALL, max_evaluations=22).to_dict()))
    place = record
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(FileFormatError):
        BlockImportance.from_dict(record, "importance.json")


def test_plans_are_by_what_was_found_of_the_same_model(tmp_path: Path) -> None:
    model, file = torch.nn.Linear(2, 2), tmp_path / "importance.json"
    assert load_plan_space(model, SMALL, None) == PlanSpace.from_importance(SMALL)
    for name in ("", compute_weights_id(model)):
        found = measure_importance(Model(), SMALL, max_evaluations=22, model_id=name)
        found.save(file)
        assert load_plan_space(model, SMALL, file) == found.make_space()
    with pytest.raises(InputError, match="importance.json"):
        load_plan_space(torch.nn.Linear(2, 2), SMALL, file)


def test_block_0_is_worth_no_question() -> None:
    found = measure_importance(Model(), SMALL, max_evaluations=22)
    for without in ((0,), (16,), (-1, 2)):
        with pytest.raises(InputError, match="1 to 15"):
            found.sum_single_drops(without)
    with pytest.raises(InputError, match="at least 1"):
        AccuracyDrop(blocks=(0,), drop=0.1, low=0.0, high=0.2)
