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
from pydantic import TypeAdapter

from sparseflow.adaptive.plan.space import Plan
from sparseflow.adaptive.profile import (
    Measurement,
    PlanProfile,
    collect,
    collect_profile,
    make_background_load,
    select_representative_plans,
)
from sparseflow.adaptive.profile.storage import _ROWS as ROWS
from sparseflow.adaptive.profile.storage import ProfileHeader, get_journal_path
from sparseflow.core.journal import Journal
from sparseflow.errors import FileFormatError, InputError, RunError
from tests.adaptive.fake_runner import VISION_TOKENS, FakeRunner, make_space
from tests.conformance import check_artifact_file, check_journal_file

SPACE = make_space(6, 3)
MEASUREMENT = TypeAdapter(Measurement)


def journal_row(measurement: Measurement) -> dict[str, Any]:
    return {"measurement": MEASUREMENT.dump_python(measurement, mode="json")}


PLANS = select_representative_plans(SPACE, 6, seed=1)
QUICK: dict[str, Any] = {"text_tokens": (4, 9), "plans": PLANS, "rounds": 2, "decode_steps": 3}


def measured(runner: FakeRunner, out: Path, **changed: Any) -> PlanProfile:
    return collect_profile(runner, SPACE, out, background=runner.apply_load, **QUICK | changed)


def test_collect_measures_every_cell(tmp_path: Path) -> None:
    runner, messages = FakeRunner(), []
    profile = measured(
        runner, tmp_path / "new" / "p.parquet", loads=(0.0, 0.5), batch_sizes=(1, 2),
        progress=lambda message, fraction: messages.append((message, fraction)),
    )  # fmt: skip
    keys = {measurement.case for measurement in profile.measurements}
    assert keys == {
        (plan.id, tokens, batch, load, number)
        for plan in PLANS for tokens in (4, 9) for batch in (1, 2) for load in (0.0, 0.5) for number in (0, 1)
    }  # fmt: skip
    assert len(profile.measurements) == len(keys) == 96 == len(messages)
    assert all(
        len(measurement.steps_ms) == 3 and measurement.error is None for measurement in profile.measurements
    )
    assert messages[-1][1] == 1.0 and [completed for _, completed in messages] == sorted(
        completed for _, completed in messages
    )
    # Each cell is run once, short, before its first sample, and never again.
    warm = Counter((plan, tokens, batch) for plan, tokens, steps, batch in runner.calls if steps == 2)
    assert set(warm.values()) == {1} and len(warm) == 24
    assert PlanProfile.load(tmp_path / "new" / "p.parquet") == profile
    assert not get_journal_path(tmp_path / "new" / "p.parquet").exists()
    assert profile.metadata.vision_tokens == VISION_TOKENS and profile.space == SPACE
    assert profile.environments[0]["timer"] == "perf_counter" and profile.environments[0]["seed"] == 0


def test_collect_shuffles_cells_in_each_round(tmp_path: Path) -> None:
    def orders(name: str, seed: int) -> list[list[tuple[str, int]]]:
        profile = measured(FakeRunner(), tmp_path / name, seed=seed, warmup_runs=0)
        return [
            [(v.plan.id, v.text_tokens) for v in profile.measurements if v.round == number]
            for number in (0, 1)
        ]

    first, second = orders("a.parquet", 3)
    assert sorted(first) == sorted(second) and first != second and first != sorted(first)
    assert orders("b.parquet", 3) == [first, second] != orders("c.parquet", 4)


def test_collect_skips_existing_measurements(tmp_path: Path) -> None:
    file, runner = tmp_path / "p.parquet", FakeRunner()
    first = measured(runner, file, plans=PLANS[:3])
    second = FakeRunner(seed=9)
    assert measured(second, file, plans=PLANS[:3]) == first and not second.calls
    more = measured(second, file, rounds=3, loads=(0.0, 0.7), text_tokens=(4, 9, 17))
    assert more.measurements[: len(first.measurements)] == first.measurements
    assert len(more.measurements) == 6 * 3 * 3 * 2 and len(more.environments) == 2
    assert {measurement.session for measurement in more.measurements[len(first.measurements) :]} == {1}


def test_collect_with_more_steps_keeps_shorter_measurements(tmp_path: Path) -> None:
    file, runner = tmp_path / "p.parquet", FakeRunner()
    first = measured(runner, file, plans=PLANS[:2], decode_steps=3)
    more = measured(FakeRunner(seed=1), file, plans=PLANS[:3], decode_steps=5)
    assert more.measurements[: len(first.measurements)] == first.measurements
    assert [len(measurement.steps_ms) for measurement in more.measurements[len(first.measurements) :]] == [
        5
    ] * 12
    assert len({measurement.key for measurement in more.measurements}) == len(more.measurements) == 8 + 12
    # Those with more steps are enough for who asks for fewer.
    second = FakeRunner(seed=2)
    assert measured(second, file, plans=PLANS[:3], decode_steps=4) == more and not second.calls
    num_steps = Counter[str]()
    for measurement in more.measurements:
        num_steps[measurement.plan.id] += len(measurement.steps_ms) * (measurement.text_tokens == 4)
    assert [num_steps[plan.id] for plan in PLANS[:3]] == [16, 16, 10]


def test_collect_failure_with_more_steps_keeps_shorter_measurements(tmp_path: Path) -> None:
    file, bad = tmp_path / "p.parquet", PLANS[0]
    first = measured(FakeRunner(), file, plans=PLANS[:2], decode_steps=3)
    broken = FakeRunner(fails=lambda plan, tokens: plan == bad and tokens == 9)
    more = measured(broken, file, plans=PLANS[:2], decode_steps=5)
    assert len(more.successful) == 8 + 6 and more.measurements[:8] == first.measurements
    assert {measurement.case[:2] for measurement in more.measurements if measurement.error} == {(bad.id, 9)}
    better = measured(FakeRunner(), file, plans=PLANS[:2], decode_steps=5)
    assert better.measurements == better.successful and len(better.successful) == 16


KILLED = """
import os, signal, sys
from tests.conformance import check_artifact_file, check_journal_file
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


def test_collect_after_sigkill_resumes(tmp_path: Path) -> None:
    file, root = tmp_path / "p.parquet", Path(__file__).parents[3]
    path = f"{root / 'src'}{os.pathsep}{root}"
    completed = subprocess.run(
        [sys.executable, "-c", KILLED, str(file)], env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert completed.returncode == -signal.SIGKILL and not file.exists()
    # The line that it was writing is torn.
    with get_journal_path(file).open("ab") as torn:
        torn.write(b'{"measurement": {"plan"')
    stored = PlanProfile.load(file)
    assert len(stored.measurements) == 7
    runner = FakeRunner(seed=1)
    profile = measured(runner, file, warmup_runs=0)
    assert (
        profile.measurements[:7] == stored.measurements
        and len(profile.measurements) == 24
        and len(runner.calls) == 17
    )
    assert file.exists() and not get_journal_path(file).exists()
    # A kill between the table and the end of the journal leaves visits in both.
    lines = [
        {"environment": dict(profile.environments[1]), "session": 1},
        journal_row(profile.measurements[-1]),
    ]
    header = ProfileHeader.from_metadata(profile.metadata).to_dict()
    get_journal_path(file).write_text("".join(json.dumps(line) + "\n" for line in (header, *lines)))
    assert PlanProfile.load(file) == profile


def test_collect_exception_keeps_measurements(tmp_path: Path) -> None:
    def stop(message: str, fraction: float) -> None:
        if fraction > 0.4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(FakeRunner(), tmp_path / "p.parquet", progress=stop)
    assert len(PlanProfile.load(tmp_path / "p.parquet").measurements) == 10
    assert len(measured(FakeRunner(), tmp_path / "p.parquet").measurements) == 24


def test_collect_failed_requests_are_recorded_and_repeated(tmp_path: Path) -> None:
    file, bad = tmp_path / "p.parquet", PLANS[0]
    profile = measured(FakeRunner(fails=lambda plan, tokens: plan == bad and tokens == 9), file)
    failed = [measurement for measurement in profile.measurements if measurement.error]
    assert [(measurement.plan, measurement.text_tokens) for measurement in failed] == [(bad, 9)] * 2
    assert failed[0].error == "out of memory" and failed[0].prefill_ms is None
    assert len(profile.successful) == 22
    runner = FakeRunner()
    better = measured(runner, file)
    assert len(better.successful) == len(better.measurements) == 24
    assert {(plan, tokens) for plan, tokens, _, _ in runner.calls} == {(bad.id, 9)}


def test_collect_stops_after_consecutive_failures(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"20 .*out of memory"):
        measured(FakeRunner(fails=lambda *_: True), tmp_path / "p.parquet")
    with pytest.raises(RunError, match=r"4 .*out of memory"):
        measured(FakeRunner(fails=lambda *_: True), tmp_path / "q.parquet", plans=PLANS[:1])


def test_collect_into_profile_of_other_model_or_device_raises(tmp_path: Path) -> None:
    file = tmp_path / "p.parquet"
    profile = measured(FakeRunner(), file)
    profile.check("fake", "cpu")
    with pytest.raises(InputError, match=r"fake.*other"):
        profile.check("other", "cpu")
    elsewhere = replace(
        profile, metadata=replace(profile.metadata, device={**profile.metadata.device, "name": "Abacus"})
    )
    with pytest.raises(InputError, match="'Abacus'"):
        elsewhere.check("fake", "cpu")
    for name, value in (
        ("model_id", "other"),
        ("config", {"runner": "other"}),
        ("vision_tokens", {**VISION_TOKENS, "high": 999}),
    ):
        runner = FakeRunner()
        setattr(runner, name, value)
        with pytest.raises(InputError, match=name):
            measured(runner, file)
    with pytest.raises(InputError, match="space"):
        collect_profile(FakeRunner(), make_space(6, 2), file, text_tokens=(4,))
    assert PlanProfile.load(file) == profile


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"text_tokens": ()}, "`text_tokens`"),
        ({"text_tokens": (4, 0)}, "`text_tokens`"),
        ({"text_tokens": (4, 4)}, r"\(4, 4\)"),
        ({"text_tokens": (4.0,)}, "`text_tokens`"),
        ({"batch_sizes": (0,)}, "`batch_sizes`"),
        ({"rounds": 0}, "`rounds`"),
        ({"decode_steps": 0}, "`decode_steps`"),
        ({"warmup_runs": -1}, "`warmup_runs`"),
        ({"loads": ()}, "`loads`"),
        ({"loads": (1.2,)}, "`loads`"),
        ({"loads": (float("nan"),)}, "`loads`"),
        ({"plans": ()}, "`plans`"),
    ],
)
def test_collect_with_invalid_argument_raises(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    runner = FakeRunner()
    with pytest.raises(InputError, match=message):
        measured(runner, tmp_path / "p.parquet", **changed)
    assert not runner.calls and not any(tmp_path.iterdir())


def test_collect_unsupported_plans_raises(tmp_path: Path) -> None:
    runner = FakeRunner()
    runner.vision_tokens = {}
    with pytest.raises(InputError, match="`example`"):
        measured(runner, tmp_path / "p.parquet")
    with pytest.raises(InputError, match="\\[7\\]"):
        measured(
            runner,
            tmp_path / "p.parquet",
            plans=[Plan(tier=None, insertion_position=1, top_k=1, blocks=(0, 7))],
        )


@pytest.mark.usefixtures("refused_at_once")
def test_collect_while_locked_raises(tmp_path: Path) -> None:
    def meanwhile(message: str, fraction: float) -> None:
        with pytest.raises(RunError, match="another process"):
            measured(FakeRunner(), tmp_path / "p.parquet")

    measured(FakeRunner(), tmp_path / "p.parquet", progress=meanwhile, plans=PLANS[:1])


def test_load_of_other_files_raises(tmp_path: Path) -> None:
    file = tmp_path / "p.parquet"
    profile = measured(FakeRunner(), file, plans=PLANS[:2])
    check_artifact_file(PlanProfile.load, file, "sparseflow adaptive profile")
    file.write_bytes(b"PAR1 not really")
    with pytest.raises(FileFormatError):
        measured(FakeRunner(), file)
    file.unlink()
    header = ProfileHeader.from_metadata(profile.metadata)
    rows = [{"environment": {}, "session": 0}, *map(journal_row, profile.measurements)]
    journal = get_journal_path(file)
    journal.write_text("".join(json.dumps(line) + "\n" for line in (header.to_dict(), *rows)))
    assert PlanProfile.load(file).measurements == profile.measurements

    def open_rows() -> list[Any]:
        with Journal(journal, ROWS, header=header) as opened:
            return opened.rows

    check_journal_file(open_rows, journal)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.floats(0, 1), position=st.floats(0, 1), value=st.integers(0, 255))
def test_load_of_damaged_file_raises_or_reads(
    tmp_path: Path, cut: float, position: float, value: int
) -> None:
    full = tmp_path / "whole.parquet"
    if not full.exists():
        measured(FakeRunner(), full, plans=PLANS[:2])
    content = bytearray(full.read_bytes())
    content[int(position * (len(content) - 1))] = value
    damaged = tmp_path / "damaged.parquet"
    for data in (bytes(content), full.read_bytes()[: int(cut * len(content))]):
        damaged.write_bytes(data)
        try:
            PlanProfile.load(damaged)
        except InputError:
            continue


def test_total_ms_of_shorter_requests() -> None:
    measurement = Measurement(plan=PLANS[0], text_tokens=4, prefill_ms=5.0, steps_ms=(1.0, 2.0, 4.0))
    assert [measurement.total_ms(count) for count in (1, 2, 3, 4)] == [5.0, 6.0, 8.0, 12.0]
    for count in (0, 5):
        with pytest.raises(InputError, match="`new_tokens`"):
            measurement.total_ms(count)
    assert MEASUREMENT.validate_python(MEASUREMENT.dump_python(measurement, mode="json")) == measurement


@pytest.mark.parametrize(
    "changed",
    [
        {"prefill_ms": 0.0}, {"prefill_ms": float("nan")}, {"steps_ms": (1.0, -1.0)},
        {"steps_ms": (float("inf"),)}, {"prefill_ms": None}, {"error": "both"}, {"text_tokens": 0},
        {"batch": 0}, {"load": 1.5}, {"round": -1},
    ],
)  # fmt: skip
def test_measurement_with_invalid_value_raises(changed: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"plan": PLANS[0], "text_tokens": 4, "prefill_ms": 5.0}
    with pytest.raises(InputError):
        Measurement(**arguments | changed)


@given(count=st.integers(6, 260), seed=st.integers(0, 5), text_only=st.integers(0, 80))
@settings(max_examples=25, deadline=None)
def test_select_representative_plans_covers_extremes(count: int, seed: int, text_only: int) -> None:
    space = make_space()
    plans = select_representative_plans(space, count, seed=seed, num_text_plans=text_only)
    image_plans = [plan for plan in plans if plan.tier is not None]
    assert len(set(plans)) == len(plans) and set(image_plans) <= set(space.plans)
    assert len(image_plans) == min(count, 225) and len(plans) - len(image_plans) == min(text_only, 75)
    for tier in space.tiers:
        tier_plans = [plan for plan in image_plans if plan.tier == tier]
        assert {16, 12} <= {len(plan.blocks) for plan in tier_plans}
        assert {8, 4} <= {plan.top_k for plan in tier_plans}
    assert plans == select_representative_plans(space, count, seed=seed, num_text_plans=text_only)


def test_select_representative_plans_of_some_tiers() -> None:
    plans = select_representative_plans(make_space(), 8, tiers=("low", "medium"), num_text_plans=2)
    assert [plan.tier for plan in plans] == ["low"] * 4 + ["medium"] * 4 + [None] * 2
    assert [
        plan.tier for plan in select_representative_plans(make_space(), 8, tiers=(), num_text_plans=2)
    ] == [None] * 2
    assert select_representative_plans(
        make_space(), 8, tiers=("low", "medium", "high")
    ) == select_representative_plans(make_space(), 8)


def test_select_representative_plans_with_too_small_count_raises() -> None:
    for count, text_only in ((5, 0), (6, -1)):
        with pytest.raises(InputError, match="at least"):
            select_representative_plans(make_space(), count, num_text_plans=text_only)


def test_collect_model_without_images_has_no_tiers(tmp_path: Path) -> None:
    plain, runner = make_space(6, 3, images=False), FakeRunner()
    runner.vision_tokens = {}
    profile = collect_profile(
        runner,
        plain,
        tmp_path / "p.parquet",
        text_tokens=(4,),
        plans=select_representative_plans(plain, 4),
        rounds=1,
    )
    assert {measurement.plan.tier for measurement in profile.measurements} == {
        None
    } and not profile.metadata.vision_tokens


def test_metadata_with_descending_vision_tokens_raises(tmp_path: Path) -> None:
    runner = FakeRunner()
    runner.vision_tokens = {"low": 9, "medium": 4, "high": 20}
    with pytest.raises(InputError, match="`vision_tokens`"):
        measured(runner, tmp_path / "p.parquet")


def test_background_load_0_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "Stressor", None)
    with make_background_load("cpu")(0.0):
        pass


@pytest.mark.slow
def test_collect_under_load_records_it(tmp_path: Path) -> None:
    runner = FakeRunner()
    profile = collect_profile(
        runner,
        SPACE,
        tmp_path / "p.parquet",
        text_tokens=(4,),
        plans=PLANS[:1],
        loads=(0.1,),
        rounds=1,
        decode_steps=1,
    )
    assert profile.measurements[0].load == 0.1
