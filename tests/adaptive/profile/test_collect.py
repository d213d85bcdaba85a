"""Profiles: what is measured, in which order, and that nothing of it is lost or measured twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparseflow.adaptive.plan.space import Plan
from sparseflow.adaptive.profile import (
    Measurement,
    PlanProfile,
    RequestTimes,
    background,
    collect,
    collect_profile,
    spread,
)
from sparseflow.adaptive.profile.storage import journal_path
from sparseflow.errors import FileFormatError, InputError, RunError
from tests.adaptive.fake_runner import VISION, FakeRunner, space

SPACE = space(6, 3)
PLANS = spread(SPACE, 6, seed=1)
QUICK: dict[str, Any] = {"buckets": (4, 9), "plans": PLANS, "repeats": 2, "steps": 3}


def measured(runner: FakeRunner, out: Path, **changed: Any) -> PlanProfile:
    return collect_profile(runner, SPACE, out, load=runner.busy, **QUICK | changed)


def test_everything_is_measured_and_kept(tmp_path: Path) -> None:
    runner, told = FakeRunner(), []
    found = measured(
        runner, tmp_path / "new" / "p.parquet", loads=(0.0, 0.5), batches=(1, 2),
        progress=lambda what, done: told.append((what, done)),
    )  # fmt: skip
    keys = {visit.turn for visit in found.visits}
    assert keys == {
        (plan.id, tokens, batch, load, number)
        for plan in PLANS for tokens in (4, 9) for batch in (1, 2) for load in (0.0, 0.5) for number in (0, 1)
    }  # fmt: skip
    assert len(found.visits) == len(keys) == 96 == len(told)
    assert all(len(visit.steps_ms) == 3 and visit.error is None for visit in found.visits)
    assert told[-1][1] == 1.0 and [done for _, done in told] == sorted(done for _, done in told)
    # Each cell is run once, short, before its first sample, and never again.
    warm = Counter((plan, tokens, batch) for plan, tokens, steps, batch in runner.calls if steps == 2)
    assert set(warm.values()) == {1} and len(warm) == 24
    assert PlanProfile.read(tmp_path / "new" / "p.parquet") == found
    assert not journal_path(tmp_path / "new" / "p.parquet").exists()
    assert found.about.vision_tokens == VISION and found.space == SPACE
    assert found.environments[0]["timer"] == "perf_counter" and found.environments[0]["seed"] == 0


def test_rows_hold_all_samples_by_phase(tmp_path: Path) -> None:
    found = measured(FakeRunner(), tmp_path / "p.parquet")
    rows = {(row["phase"], row["plan"], row["tokens"]): row["samples_ms"] for row in found.rows()}
    assert len(rows) == 2 * 6 * 2
    for plan in PLANS:
        for tokens in (4, 9):
            mine = [v for v in found.visits if (v.plan, v.text_tokens) == (plan, tokens)]
            assert rows["prefill", plan.id, tokens] == [visit.prefill_ms for visit in mine]
            assert rows["decode", plan.id, tokens] == [step for visit in mine for step in visit.steps_ms]


def test_rounds_run_every_cell_in_an_order_of_their_own(tmp_path: Path) -> None:
    def orders(name: str, seed: int) -> list[list[tuple[str, int]]]:
        found = measured(FakeRunner(), tmp_path / name, seed=seed, warmup=0)
        return [[(v.plan.id, v.text_tokens) for v in found.visits if v.round == number] for number in (0, 1)]

    first, second = orders("a.parquet", 3)
    assert sorted(first) == sorted(second) and first != second and first != sorted(first)
    assert orders("b.parquet", 3) == [first, second] != orders("c.parquet", 4)


def test_what_is_there_is_not_measured_again(tmp_path: Path) -> None:
    file, runner = tmp_path / "p.parquet", FakeRunner()
    first = measured(runner, file, plans=PLANS[:3])
    again = FakeRunner(seed=9)
    assert measured(again, file, plans=PLANS[:3]) == first and not again.calls
    more = measured(again, file, repeats=3, loads=(0.0, 0.7), buckets=(4, 9, 17))
    assert more.visits[: len(first.visits)] == first.visits
    assert len(more.visits) == 6 * 3 * 3 * 2 and len(more.environments) == 2
    assert {visit.session for visit in more.visits[len(first.visits) :]} == {1}


def test_more_steps_are_measured_and_fewer_are_kept(tmp_path: Path) -> None:
    file, runner = tmp_path / "p.parquet", FakeRunner()
    first = measured(runner, file, plans=PLANS[:2], steps=3)
    more = measured(FakeRunner(seed=1), file, plans=PLANS[:3], steps=5)
    assert more.visits[: len(first.visits)] == first.visits
    assert [len(visit.steps_ms) for visit in more.visits[len(first.visits) :]] == [5] * 12
    assert len({visit.key for visit in more.visits}) == len(more.visits) == 8 + 12
    # Those with more steps are enough for who asks for fewer.
    again = FakeRunner(seed=2)
    assert measured(again, file, plans=PLANS[:3], steps=4) == more and not again.calls
    rows = {row["plan"]: row for row in more.rows() if row["phase"] == "decode" and row["tokens"] == 4}
    assert [len(rows[plan.id]["samples_ms"]) for plan in PLANS[:3]] == [16, 16, 10]


def test_what_fails_with_more_steps_is_noted_beside_what_did_not(tmp_path: Path) -> None:
    file, bad = tmp_path / "p.parquet", PLANS[0]
    first = measured(FakeRunner(), file, plans=PLANS[:2], steps=3)
    broken = FakeRunner(fails=lambda plan, tokens: plan == bad and tokens == 9)
    more = measured(broken, file, plans=PLANS[:2], steps=5)
    assert len(more.timed) == 8 + 6 and more.visits[:8] == first.visits
    assert {visit.turn[:2] for visit in more.visits if visit.error} == {(bad.id, 9)}
    better = measured(FakeRunner(), file, plans=PLANS[:2], steps=5)
    assert better.visits == better.timed and len(better.timed) == 16


KILLED = """
import os, signal, sys
from tests.adaptive.fake_runner import FakeRunner
from tests.adaptive.profile.test_collect import measured
from pathlib import Path
done = []
def stop(what, share):
    done.append(share)
    if len(done) == 7:
        os.kill(os.getpid(), signal.SIGKILL)
measured(FakeRunner(), Path(sys.argv[1]), progress=stop)
"""


def test_a_kill_loses_nothing(tmp_path: Path) -> None:
    file, root = tmp_path / "p.parquet", Path(__file__).parents[2]
    path = f"{root / 'src'}{os.pathsep}{root}"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(file)], env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert done.returncode == -signal.SIGKILL and not file.exists()
    # The line that it was writing is torn.
    with journal_path(file).open("ab") as torn:
        torn.write(b'{"visit": {"plan"')
    held = PlanProfile.read(file)
    assert len(held.visits) == 7
    runner = FakeRunner(seed=1)
    found = measured(runner, file, warmup=0)
    assert found.visits[:7] == held.visits and len(found.visits) == 24 and len(runner.calls) == 17
    assert file.exists() and not journal_path(file).exists()
    # A kill between the table and the end of the journal leaves visits in both.
    lines = [
        {"environment": dict(found.environments[1]), "session": 1},
        {"visit": found.visits[-1].to_dict()},
    ]
    journal_path(file).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert PlanProfile.read(file) == found


def test_an_exception_keeps_what_came_before(tmp_path: Path) -> None:
    def stop(what: str, done: float) -> None:
        if done > 0.4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(FakeRunner(), tmp_path / "p.parquet", progress=stop)
    assert len(PlanProfile.read(tmp_path / "p.parquet").visits) == 10
    assert len(measured(FakeRunner(), tmp_path / "p.parquet").visits) == 24


def test_what_cannot_be_run_is_noted_and_tried_again(tmp_path: Path) -> None:
    file, bad = tmp_path / "p.parquet", PLANS[0]
    found = measured(FakeRunner(fails=lambda plan, tokens: plan == bad and tokens == 9), file)
    failed = [visit for visit in found.visits if visit.error]
    assert [(visit.plan, visit.text_tokens) for visit in failed] == [(bad, 9)] * 2
    assert failed[0].error == "out of memory" and failed[0].prefill_ms is None
    assert len(found.timed) == 22 and not any(
        row["tokens"] == 9 and row["plan"] == bad.id for row in found.rows()
    )
    runner = FakeRunner()
    better = measured(runner, file)
    assert len(better.timed) == len(better.visits) == 24
    assert {(plan, tokens) for plan, tokens, _, _ in runner.calls} == {(bad.id, 9)}


def test_a_device_that_is_lost_ends_it(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="20 requests in a row could not be run: out of memory"):
        measured(FakeRunner(fails=lambda *_: True), tmp_path / "p.parquet")
    with pytest.raises(RunError, match="none of 4 requests could be run: out of memory"):
        measured(FakeRunner(fails=lambda *_: True), tmp_path / "q.parquet", plans=PLANS[:1])


def test_a_profile_is_of_one_model_and_one_device(tmp_path: Path) -> None:
    file = tmp_path / "p.parquet"
    found = measured(FakeRunner(), file)
    found.check("fake", "cpu")
    with pytest.raises(InputError, match=r"another model \(id fake; yours is other\)"):
        found.check("other", "cpu")
    elsewhere = replace(found, about=replace(found.about, device={**found.about.device, "name": "Abacus"}))
    with pytest.raises(InputError, match=r"another device \(name 'Abacus', here .*profile the model here"):
        elsewhere.check("fake", "cpu")
    for name, value in (
        ("model_id", "other"),
        ("how", {"runner": "other"}),
        ("vision_tokens", {**VISION, "high": 999}),
    ):
        runner = FakeRunner()
        setattr(runner, name, value)
        with pytest.raises(InputError, match=f"has another `{name}`.*name another file"):
            measured(runner, file)
    with pytest.raises(InputError, match="another `space`"):
        collect_profile(FakeRunner(), space(6, 2), file, buckets=(4,))
    assert PlanProfile.read(file) == found


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"buckets": ()}, "`buckets`"),
        ({"buckets": (4, 0)}, "`buckets`"),
        ({"buckets": (4, 4)}, "names one twice"),
        ({"buckets": (4.0,)}, "`buckets`"),
        ({"batches": (0,)}, "`batches`"),
        ({"repeats": 0}, "`repeats`"),
        ({"steps": 0}, "`steps`"),
        ({"warmup": -1}, "`warmup`"),
        ({"loads": ()}, "`loads`"),
        ({"loads": (1.2,)}, "`loads`"),
        ({"loads": (float("nan"),)}, "`loads`"),
        ({"plans": ()}, "`plans`"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_run(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    runner = FakeRunner()
    with pytest.raises(InputError, match=message):
        measured(runner, tmp_path / "p.parquet", **changed)
    assert not runner.calls and not any(tmp_path.iterdir())


def test_plans_that_cannot_be_run_are_refused(tmp_path: Path) -> None:
    runner = FakeRunner()
    runner.vision_tokens = {}
    with pytest.raises(InputError, match="give the runner an example"):
        measured(runner, tmp_path / "p.parquet")
    with pytest.raises(InputError, match="blocks \\[7\\] are not there"):
        measured(
            runner,
            tmp_path / "p.parquet",
            plans=[Plan(tier=None, insertion_position=1, top_k=1, blocks=(0, 7))],
        )


@pytest.mark.usefixtures("refused_at_once")
def test_two_do_not_write_one_profile(tmp_path: Path) -> None:
    def meanwhile(what: str, done: float) -> None:
        with pytest.raises(RunError, match="being written by another process"):
            measured(FakeRunner(), tmp_path / "p.parquet")

    measured(FakeRunner(), tmp_path / "p.parquet", progress=meanwhile, plans=PLANS[:1])


def test_files_that_are_no_profile(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pytest.raises(InputError, match="there is no profile"):
        PlanProfile.read(tmp_path / "none.parquet")
    file = tmp_path / "p.parquet"
    file.write_bytes(b"PAR1 not really")
    with pytest.raises(FileFormatError, match="not a Parquet file"):
        PlanProfile.read(file)
    with pytest.raises(FileFormatError, match="not a Parquet file"):
        measured(FakeRunner(), file)
    pq.write_table(pa.table({"a": [1]}), file)
    with pytest.raises(FileFormatError, match="holds no profile"):
        PlanProfile.read(file)
    file.unlink()
    for text, message in (
        ('{"visit": {}}', "not a visit"), ('{"environment": {}}', "no profile's journal"),
        ('{"about": {}}', "model and device"), ("[1]", "must be an object"), ("nonsense", "is not a row"),
        ('{"environment": {}, "session": 0}', "no profile's journal"),
    ):  # fmt: skip
        journal_path(file).write_text(text + "\n")
        with pytest.raises(FileFormatError, match=message):
            PlanProfile.read(file)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.floats(0, 1), at=st.floats(0, 1), value=st.integers(0, 255))
def test_damaged_files_are_told_or_read(tmp_path: Path, cut: float, at: float, value: int) -> None:
    whole = tmp_path / "whole.parquet"
    if not whole.exists():
        measured(FakeRunner(), whole, plans=PLANS[:2])
    content = bytearray(whole.read_bytes())
    content[int(at * (len(content) - 1))] = value
    damaged = tmp_path / "damaged.parquet"
    for data in (bytes(content), whole.read_bytes()[: int(cut * len(content))]):
        damaged.write_bytes(data)
        try:
            PlanProfile.read(damaged)
        except InputError:
            continue


def test_a_visit_is_also_each_shorter_request() -> None:
    visit = Measurement(plan=PLANS[0], text_tokens=4, prefill_ms=5.0, steps_ms=(1.0, 2.0, 4.0))
    assert [visit.total_ms(count) for count in (1, 2, 3, 4)] == [5.0, 6.0, 8.0, 12.0]
    for count in (0, 5):
        with pytest.raises(InputError, match="`new_tokens`"):
            visit.total_ms(count)
    assert Measurement.from_dict(json.loads(json.dumps(visit.to_dict()))) == visit


@pytest.mark.parametrize(
    "changed",
    [
        {"prefill_ms": 0.0}, {"prefill_ms": float("nan")}, {"steps_ms": (1.0, -1.0)},
        {"steps_ms": (float("inf"),)}, {"prefill_ms": None}, {"error": "both"}, {"text_tokens": 0},
        {"batch": 0}, {"load": 1.5}, {"round": -1},
    ],
)  # fmt: skip
def test_visits_are_checked(changed: dict[str, Any]) -> None:
    whole: dict[str, Any] = {"plan": PLANS[0], "text_tokens": 4, "prefill_ms": 5.0}
    with pytest.raises(InputError):
        Measurement(**whole | changed)


@pytest.mark.parametrize("times", [(0.0, ()), (1.0, (0.0,)), (float("nan"), ()), (1.0, (float("inf"),))])
def test_times_are_checked(times: tuple[float, tuple[float, ...]]) -> None:
    with pytest.raises(InputError, match="must be a finite time above 0 ms"):
        RequestTimes(prefill_ms=times[0], steps_ms=times[1])


@given(count=st.integers(6, 260), seed=st.integers(0, 5), text_only=st.integers(0, 80))
@settings(max_examples=25, deadline=None)
def test_spread_plans_tell_about_the_others(count: int, seed: int, text_only: int) -> None:
    whole = space()
    found = spread(whole, count, seed=seed, text_only=text_only)
    seen = [plan for plan in found if plan.tier is not None]
    assert len(set(found)) == len(found) and set(seen) <= set(whole.plans)
    assert len(seen) == min(count, 225) and len(found) - len(seen) == min(text_only, 75)
    for tier in whole.tiers:
        mine = [plan for plan in seen if plan.tier == tier]
        assert {16, 12} <= {len(plan.blocks) for plan in mine}
        assert {8, 4} <= {plan.top_k for plan in mine}
    assert found == spread(whole, count, seed=seed, text_only=text_only)


def test_plans_of_some_tiers_can_be_spread_alone() -> None:
    found = spread(space(), 8, tiers=("low", "medium"), text_only=2)
    assert [plan.tier for plan in found] == ["low"] * 4 + ["medium"] * 4 + [None] * 2
    assert [plan.tier for plan in spread(space(), 8, tiers=(), text_only=2)] == [None] * 2
    assert spread(space(), 8, tiers=("low", "medium", "high")) == spread(space(), 8)


def test_too_few_plans_are_refused() -> None:
    for count, text_only in ((5, 0), (6, -1)):
        with pytest.raises(InputError, match="at least 6, two a tier"):
            spread(space(), count, text_only=text_only)


def test_a_model_without_images_has_plans_without_tier(tmp_path: Path) -> None:
    plain, runner = space(6, 3, images=False), FakeRunner()
    runner.vision_tokens = {}
    found = collect_profile(
        runner, plain, tmp_path / "p.parquet", buckets=(4,), plans=spread(plain, 4), repeats=1
    )
    assert {visit.plan.tier for visit in found.visits} == {None} and not found.about.vision_tokens


def test_vision_tokens_ascend(tmp_path: Path) -> None:
    runner = FakeRunner()
    runner.vision_tokens = {"low": 9, "medium": 4, "high": 20}
    with pytest.raises(InputError, match="must ascend"):
        measured(runner, tmp_path / "p.parquet")


def test_no_load_needs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "Stressor", None)
    with background("cpu")(0.0):
        pass


@pytest.mark.slow
def test_a_load_is_held(tmp_path: Path) -> None:
    runner = FakeRunner()
    found = collect_profile(
        runner, SPACE, tmp_path / "p.parquet", buckets=(4,), plans=PLANS[:1], loads=(0.1,), repeats=1, steps=1
    )
    assert found.visits[0].load == 0.1
