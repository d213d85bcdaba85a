"""Decisions: never the slower way, remembered on disk, and no file can do harm."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.core import timing
from sparseflow.errors import FileFormatError
from sparseflow.spiking.autotune import dispatch
from sparseflow.spiking.autotune.decision_cache import Decision, DecisionCache, default_cache_path
from sparseflow.spiking.autotune.dispatch import Chooser, rate_bucket
from sparseflow.spiking.backends.blocks.geometry import static_block


def candidates(*names: str) -> dict[str, Callable[[], object]]:
    return {name: lambda: None for name in names}


@pytest.mark.parametrize(
    ("height", "block"),
    [(224, 16), (33, 16), (32, 16), (31, 8), (16, 8), (15, 4), (8, 4), (7, None), (1, None)],
)
def test_the_static_rule(height: int, block: int | None) -> None:
    assert static_block(height) == block


@given(st.floats(1e-6, 1.0), st.floats(1.0, 1.25 - 1e-6))
def test_similar_rates_share_a_decision(rate: float, factor: float) -> None:
    assert abs(rate_bucket(rate) - rate_bucket(min(1.0, rate * factor))) <= 1
    assert rate_bucket(rate) <= 0


def test_silence_and_double_the_rate_do_not_share_one() -> None:
    assert rate_bucket(0.0) < rate_bucket(1e-6)
    assert rate_bucket(0.1) != rate_bucket(0.2)


# --- choosing -----------------------------------------------------------------------------------------------

TIMES = st.lists(st.floats(0.01, 100.0), min_size=5, max_size=9)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), rounds=st.integers(5, 9))
def test_what_is_chosen_is_surely_faster(data: st.DataObject, rounds: int) -> None:
    """For whatever samples: a way other than the baseline has its whole interval above 1."""
    draw = st.lists(st.floats(0.01, 100.0), min_size=rounds, max_size=rounds)
    times = {name: tuple(data.draw(draw)) for name in ("module", "dense", "sparse")}
    comparison = timing.Comparison(
        baseline="module", times_ms=times, order=(tuple(times),) * rounds, timer="made up", device="cpu",
        warmup=0, seed=0,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "compare", lambda *a, **k: comparison)
        decision = Chooser(device="cpu").choose("x", candidates(*times), "module")
    if decision.way != "module":
        assert comparison.speedup(decision.way).low > 1.0
        assert decision.ms[decision.way] <= min(decision.ms.values()) or decision.way != "module"
    assert set(decision.ms) == set(times) and not decision.remembered


@pytest.mark.parametrize(
    ("sparse", "way"),
    [
        ((1.0,) * 7, "sparse"),
        ((1.9,) * 7, "sparse"),
        ((2.0,) * 7, "module"),
        ((2.1,) * 7, "module"),
        # Faster in four rounds of seven, by far: the median says yes, its interval does not.
        ((0.1, 0.1, 0.1, 0.1, 9.0, 9.0, 9.0), "module"),
    ],
)
def test_a_doubtful_gain_is_none(sparse: tuple[float, ...], way: str, prefer: Callable[..., Any]) -> None:
    prefer(module=(2.0,) * 7, sparse=sparse)
    decision = Chooser(device="cpu").choose("x", candidates("module", "sparse"), "module")
    assert decision.way == way
    assert ("nothing surely beat" in decision.why) == (way == "module")


def test_the_fastest_of_several_is_kept(prefer: Callable[..., Any]) -> None:
    prefer("dense", "sparse")
    decision = Chooser(device="cpu").choose("x", candidates("module", "sparse", "dense"), "module")
    assert decision.way == "dense" and decision.ms == {"module": 5.0, "dense": 1.0, "sparse": 1.1}
    assert decision.why.startswith("5.00x (5.00–5.00)")


def test_a_single_candidate_is_not_timed(prefer: Callable[..., Any]) -> None:
    times = prefer("sparse")
    decision = Chooser(device="cpu").choose("x", candidates("module"), "module")
    assert decision.way == "module" and times.asked == [] and decision.ms == {}


# --- remembering --------------------------------------------------------------------------------------------


def choose(cache: DecisionCache | None, key: str = "x", *names: str) -> Decision:
    return Chooser(device="cpu", cache=cache).choose(
        key, candidates("module", *(names or ("sparse",))), "module"
    )


def test_a_decision_is_remembered_across_processes(tmp_path: Path, prefer: Callable[..., Any]) -> None:
    times = prefer("sparse")
    cache = DecisionCache(tmp_path / "deep" / "decisions.json")
    first = choose(cache)
    cache.save()
    again = choose(DecisionCache(cache.path))
    assert len(times.asked) == 1
    assert again.remembered and not first.remembered
    assert again.model_dump(exclude={"remembered"}) == first.model_dump(exclude={"remembered"})
    assert choose(DecisionCache(cache.path), "another").remembered is False
    stored = json.loads(cache.path.read_text())
    assert stored["version"] == 1 and not any(d["remembered"] for d in stored["decisions"].values())


def test_another_device_is_measured_anew(
    tmp_path: Path, prefer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = prefer("sparse")
    cache = DecisionCache(tmp_path / "decisions.json")
    choose(cache)
    monkeypatch.setattr(dispatch.devices.DeviceInfo, "key", lambda self: "another")
    assert not choose(cache).remembered and len(times.asked) == 2


def test_a_way_that_is_closed_today_is_not_taken_from_the_past(
    tmp_path: Path, prefer: Callable[..., Any]
) -> None:
    prefer("sparse")
    cache = DecisionCache(tmp_path / "decisions.json")
    assert choose(cache).way == "sparse"
    found = choose(cache, "x", "dense")
    assert found.way == "module" and not found.remembered


def test_without_a_cache_everything_is_measured(prefer: Callable[..., Any]) -> None:
    times = prefer("sparse")
    assert choose(None).way == choose(None).way == "sparse" and len(times.asked) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe\x00",
        b'{"version": 2, "decisions": {}}',
        b'{"version": 1, "decisions": {}, "more": 1}',
        b'{"version": 1, "decisions": {"x": {"way": "sparse"}}}',
        b'{"version": 1, "decisions": {"x": {"way": "sparse", "why": "", "unknown": 1}}}',
        b'{"version": 1, "decisions": {"x": {"way": 3, "why": ""}}}',
        b'{"version": 1, "decisions": {"x": {"way": "sparse", "why": "", "ms": {"a": "fast"}}}}',
        b'{"version": 1, "decisions": []}',
    ],
)
def test_a_damaged_cache_is_rebuilt_with_one_warning(
    tmp_path: Path, content: bytes, prefer: Callable[..., Any]
) -> None:
    prefer("sparse")
    path = tmp_path / "decisions.json"
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=r"decisions\.json cannot be used .*rebuilt") as told:
        cache = DecisionCache(path)
        assert choose(cache).way == "sparse"
        cache.save()
    assert len(told) == 1
    assert choose(DecisionCache(path)).remembered


def test_a_missing_cache_is_no_news(tmp_path: Path) -> None:
    DecisionCache(tmp_path / "none" / "decisions.json")


@pytest.mark.parametrize("broken", ["a file in the folder's place", "a folder in the file's place"])
def test_a_place_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, broken: str, prefer: Callable[..., Any]
) -> None:
    prefer("sparse")
    path = tmp_path / "place" / "decisions.json"
    if broken.startswith("a file"):
        path.parent.write_text("")
    else:
        (path / "inner").mkdir(parents=True)
    with pytest.warns(UserWarning, match="SPARSEFLOW_CACHE|rebuilt"):
        cache = DecisionCache(path)
        assert choose(cache).way == "sparse"
        cache.save()
    assert not list(tmp_path.rglob("*.tmp"))


def test_two_processes_add_to_one_file(tmp_path: Path, prefer: Callable[..., Any]) -> None:
    prefer("sparse")
    path = tmp_path / "decisions.json"
    ours, theirs = DecisionCache(path), DecisionCache(path)
    choose(ours, "a")
    choose(theirs, "b")
    theirs.save()
    ours.save()
    assert choose(DecisionCache(path), "a").remembered and choose(DecisionCache(path), "b").remembered


def test_what_others_measured_since_is_not_overwritten_with_what_was_read(tmp_path: Path) -> None:
    path = tmp_path / "decisions.json"
    old = DecisionCache(path)
    old.put("a", Decision(way="module", why="old"))
    old.save()
    ours, theirs = DecisionCache(path), DecisionCache(path)
    theirs.put("a", Decision(way="sparse", why="new"))
    theirs.save()
    ours.put("b", Decision(way="dense", why="ours"))
    ours.save()
    found = DecisionCache(path)
    assert (found.get("a") or old).why == "new"  # type: ignore[union-attr]
    assert (found.get("b") or old).why == "ours"  # type: ignore[union-attr]


def test_where_decisions_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert default_cache_path() == Path(os.environ["SPARSEFLOW_CACHE"]) / "decisions.json"
    monkeypatch.delenv("SPARSEFLOW_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_path() == tmp_path / "sparseflow" / "decisions.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_path() == tmp_path / "home" / ".cache" / "sparseflow" / "decisions.json"


def test_file_errors_are_none_of_the_callers_business() -> None:
    """A cache is a convenience: no exception class of ours stands for its failures."""
    assert not any(name for name in vars(dispatch) if vars(dispatch)[name] is FileFormatError)
