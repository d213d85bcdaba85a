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
from sparseflow.adaptive.profile import weights_id
from sparseflow.adaptive.profile.importance import (
    AccuracyDrop,
    BlockImportance,
    fewest_evaluations,
    measure_importance,
    space_of,
)
from sparseflow.errors import FileFormatError, InputError, RunError

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
    assert found.samples == 60 and found.full == pytest.approx(0.9)
    for block, single in enumerate(found.singles, start=1):
        assert single.without == (block,) and single.drop == pytest.approx(model.drop((block,)))
        # The spread of a mean of 60, about two standard errors to each side.
        error = float(np.std(model.noise[:, block])) / math.sqrt(60)
        assert single.low < single.drop < single.high
        assert single.high - single.low == pytest.approx(2 * 1.96 * error, rel=0.15)


def test_sets_are_found_though_they_are_no_sums() -> None:
    model = Model()
    found = measure_importance(model, SMALL)
    additive = sorted(range(1, 16), key=lambda block: found.singles[block - 1].drop)[:2]
    assert set(additive) == set(NEIGHBOURS)
    for each in found.chosen:
        gone = each.drop.without
        assert not set(NEIGHBOURS) <= set(gone)
        assert each.drop.drop == pytest.approx(model.drop(gone))
    assert found.alone(NEIGHBOURS) < 0.1 < model.drop(NEIGHBOURS)
    space = found.space()
    assert len(space) == 225 and space.geometry == SMALL
    assert set(space.sets) == {(p, total) for p in range(1, 6) for total in range(11 + p, 17)}


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), depth=st.sampled_from([9, 12, 16]))
def test_a_wide_beam_finds_the_best_of_all_sets(seed: int, depth: int) -> None:
    model, geometry = Model(depth, 8, seed), ModelGeometry(depth=depth, top_k=4)
    found = measure_importance(model, geometry, beam=10_000)
    for each in found.chosen:
        every = combinations(range(each.position, depth), len(each.drop.without))
        best = min(model.drop(without) for without in every)
        assert each.drop.drop == pytest.approx(best, abs=1e-9)
    # A beam of four comes near, at a part of the cost.
    few = measure_importance(model, geometry, beam=4)
    assert few.evaluations <= found.evaluations
    for narrow, wide in zip(few.chosen, found.chosen, strict=True):
        assert narrow.drop.drop <= wide.drop.drop + 0.02


@settings(max_examples=30, deadline=None)
@given(depth=st.integers(2, 40), top_k=st.integers(1, 8), beam=st.integers(1, 3), more=st.integers(0, 60))
def test_any_geometry_and_any_budget(depth: int, top_k: int, beam: int, more: int) -> None:
    geometry, model = ModelGeometry(depth=depth, top_k=top_k), Model(depth, 5)
    budget = fewest_evaluations(geometry) + more
    told: list[float] = []
    found = measure_importance(
        model, geometry, beam=beam, budget=budget, progress=lambda what, done: told.append(done)
    )
    assert found.evaluations == len(model.calls) == len(set(model.calls)) == len(told) <= budget
    assert told == sorted(told) and told[-1] <= 1.0
    space = found.space()
    for position in geometry.positions:
        for total in geometry.totals(position):
            assert len(space.sets[position, total]) == total
            assert set(range(position)) <= set(space.sets[position, total])
    with pytest.raises(InputError, match="must be at least"):
        measure_importance(model, geometry, budget=fewest_evaluations(geometry) - 1)


def test_scores_may_be_tensors_or_lists() -> None:
    geometry = ModelGeometry(depth=3, top_k=2)

    def lists(blocks: tuple[int, ...]) -> list[float]:
        return [len(blocks) / 3, 0.0]

    def tensors(blocks: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([len(blocks) / 3, 0.0], requires_grad=True)

    assert measure_importance(lists, geometry).full == 0.5
    assert measure_importance(tensors, geometry).singles[1].drop == pytest.approx(1 / 6, abs=1e-7)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda blocks: [], "one finite number for each sample"),
        (lambda blocks: 0.5, "one finite number for each sample"),
        (lambda blocks: [[0.5]], "one finite number for each sample"),
        (lambda blocks: [math.nan], "1 that are not finite"),
        (lambda blocks: ["good"], "one number for each sample"),
        (lambda blocks: [0.5] * len(blocks), "gave 15 samples, and others had 16"),
    ],
)
def test_bad_scores_are_refused(score: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        measure_importance(score, SMALL)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(InputError, match="`beam`"):
        measure_importance(Model(), SMALL, beam=0)
    with pytest.raises(InputError, match=r"`budget` \(=5\) must be at least 22"):
        measure_importance(Model(), SMALL, budget=5)


def test_what_was_scored_is_not_scored_again(tmp_path: Path) -> None:
    journal, model = tmp_path / "new" / "scores.jsonl", Model()
    found = measure_importance(model, SMALL, budget=60, journal=journal, model_id="m")
    again = Model()
    assert (
        measure_importance(again, SMALL, budget=60, journal=journal, model_id="m") == found
        and not again.calls
    )
    more = measure_importance(again, SMALL, budget=80, journal=journal, model_id="m")
    assert more.evaluations == len(journal.read_text().splitlines()) - 1 >= 80
    assert not set(again.calls) & set(model.calls)


KILLED = """
import os, signal, sys
from sparseflow.adaptive.profile.importance import importance
from tests.adaptive.profile.test_importance import SMALL, Model
done = []
def stop(what, share):
    done.append(share)
    if len(done) == 30:
        os.kill(os.getpid(), signal.SIGKILL)
importance(Model(), SMALL, journal=sys.argv[1], progress=stop)
"""


def test_a_kill_loses_nothing(tmp_path: Path) -> None:
    journal, root = tmp_path / "scores.jsonl", Path(__file__).parents[2]
    path = f"{root / 'src'}{os.pathsep}{root}"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(journal)], env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    with journal.open("ab") as torn:
        torn.write(b'{"without": [1, 2], "sco')
    model, whole = Model(), Model()
    found = measure_importance(model, SMALL, journal=journal)
    assert found == measure_importance(whole, SMALL, journal=tmp_path / "other.jsonl")
    assert len(whole.calls) - len(model.calls) == 30


def test_a_journal_is_of_one_model(tmp_path: Path) -> None:
    journal = tmp_path / "scores.jsonl"
    measure_importance(Model(), SMALL, budget=22, journal=journal, model_id="one")
    kept = journal.read_bytes()
    for geometry, name in ((SMALL, "two"), (ModelGeometry(depth=12, top_k=8), "one")):
        with pytest.raises(InputError, match=r"scores of another model.*name another file"):
            measure_importance(Model(), geometry, journal=journal, model_id=name)
    with pytest.raises(InputError, match="and others had 60"):
        measure_importance(Model(samples=7), SMALL, journal=journal, model_id="one")
    assert journal.read_bytes() == kept
    for text, message in (
        ('{"format": "other"}\n', "holds no scores"), ("nonsense\n", "is not a row"),
        (kept.decode().splitlines()[0] + '\n{"without": [1]}\n', "line 2, is no score"),
        (kept.decode().splitlines()[0] + '\n{"without": [1], "scores": [null]}\n', "line 2, is no score"),
    ):  # fmt: skip
        journal.write_text(text)
        with pytest.raises(FileFormatError, match=message):
            measure_importance(Model(), SMALL, journal=journal, model_id="one")


@pytest.mark.usefixtures("refused_at_once")
def test_two_do_not_write_one_journal(tmp_path: Path) -> None:
    def score(blocks: tuple[int, ...]) -> list[float]:
        with pytest.raises(RunError, match="being written by another process"):
            measure_importance(Model(), SMALL, journal=tmp_path / "scores.jsonl")
        return [1.0]

    measure_importance(score, ModelGeometry(depth=2, top_k=1), journal=tmp_path / "scores.jsonl")


def test_it_is_saved_and_read(tmp_path: Path) -> None:
    found, file = measure_importance(Model(), SMALL, budget=40, model_id="m"), tmp_path / "importance.json"
    found.write(file)
    assert BlockImportance.read(file) == found and BlockImportance.read(file).space() == found.space()
    with pytest.raises(InputError, match="there is no file"):
        BlockImportance.read(tmp_path / "none.json")
    file.write_text("{")
    with pytest.raises(FileFormatError, match="is not JSON"):
        BlockImportance.read(file)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), "other"), (("geometry", "depth"), 1), (("geometry", "depth"), 12), (("singles",), []),
        (("singles", 0, "without"), [2]), (("singles", 0, "drop"), math.nan), (("full",), "x"),
        (("singles", 0, "drop"), "much"),
        (("chosen",), []), (("chosen", 0, "without"), [0, 1, 2, 3]), (("chosen", 0, "position"), 9),
        (("chosen", 0, "without"), [3, 2, 1, 4]), (("samples",), None),
    ],
)  # fmt: skip
def test_damaged_files_are_refused(path: tuple[Any, ...], value: Any) -> None:
    record = json.loads(json.dumps(measure_importance(Model(), SMALL, budget=22).to_dict()))
    place = record
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(FileFormatError):
        BlockImportance.from_dict(record)


def test_plans_are_by_what_was_found_of_the_same_model(tmp_path: Path) -> None:
    model, file = torch.nn.Linear(2, 2), tmp_path / "importance.json"
    assert space_of(model, SMALL, None) == PlanSpace.of(SMALL)
    for name in ("", weights_id(model)):
        found = measure_importance(Model(), SMALL, budget=22, model_id=name)
        found.write(file)
        assert space_of(model, SMALL, file) == found.space()
    with pytest.raises(InputError, match=r"importance.json is of another model \(id [0-9a-f]+; yours is"):
        space_of(torch.nn.Linear(2, 2), SMALL, file)


def test_block_0_is_worth_no_question() -> None:
    found = measure_importance(Model(), SMALL, budget=22)
    for without in ((0,), (16,), (-1, 2)):
        with pytest.raises(InputError, match="must be of 1 to 15"):
            found.alone(without)
    with pytest.raises(ValueError, match="no drop of accuracy"):
        AccuracyDrop.from_dict({"without": [0], "drop": 0.1, "low": 0.0, "high": 0.2})
