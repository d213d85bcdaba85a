"""Tests of decisions: selection by time and the cache on disk."""

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
from sparseflow.spiking.autotune.decision_cache import Decision, DecisionCache
from sparseflow.spiking.autotune.dispatch import CandidateSelector, compute_rate_bucket
from sparseflow.spiking.backends.blocks.geometry import select_block_size

HEADER = b'{"format": "sparseflow.spiking.decision-cache", "version": 3, '


def candidates(*names: str) -> dict[str, Callable[[], object]]:
    return {name: lambda: None for name in names}


@pytest.mark.parametrize(
    ("height", "block"),
    [(224, 16), (33, 16), (32, 16), (31, 8), (16, 8), (15, 4), (8, 4), (7, None), (1, None)],
)
def test_select_block_size(height: int, block: int | None) -> None:
    assert select_block_size(height) == block


@given(st.floats(1e-6, 1.0), st.floats(1.0, 1.25 - 1e-6))
def test_similar_rates_share_a_decision(rate: float, factor: float) -> None:
    assert abs(compute_rate_bucket(rate) - compute_rate_bucket(min(1.0, rate * factor))) <= 1
    assert compute_rate_bucket(rate) <= 0


def test_zero_and_double_rate_do_not_share_a_decision() -> None:
    assert compute_rate_bucket(0.0) < compute_rate_bucket(1e-6)
    assert compute_rate_bucket(0.1) != compute_rate_bucket(0.2)


# --- choosing -----------------------------------------------------------------------------------------------

TIMES = st.lists(st.floats(0.01, 100.0), min_size=5, max_size=9)


@settings(deadline=None, max_examples=30)
@given(data=st.data(), rounds=st.integers(5, 9))
def test_selected_candidate_is_significantly_faster(data: st.DataObject, rounds: int) -> None:
    """A candidate other than the baseline has its whole interval above 1."""
    draw = st.lists(st.floats(0.01, 100.0), min_size=rounds, max_size=rounds)
    times = {name: tuple(data.draw(draw)) for name in ("module", "dense", "sparse")}
    comparison = timing.Comparison(
        baseline="module", times_ms=times, order=(tuple(times),) * rounds, timer="made up", device="cpu",
        warmup=0, seed=0,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "compare", lambda *a, **k: comparison)
        decision = CandidateSelector(device="cpu").select("x", candidates(*times), "module")
    if decision.choice != "module":
        assert comparison.speedup(decision.choice).low > 1.0
        assert (
            decision.latency_ms[decision.choice] <= min(decision.latency_ms.values())
            or decision.choice != "module"
        )
    assert set(decision.latency_ms) == set(times) and not decision.from_cache


@pytest.mark.parametrize(
    ("sparse", "group_mode"),
    [
        ((1.0,) * 7, "sparse"),
        ((1.9,) * 7, "sparse"),
        ((2.0,) * 7, "module"),
        ((2.1,) * 7, "module"),
        # Faster in four rounds of seven, by far: the median says yes, its interval does not.
        ((0.1, 0.1, 0.1, 0.1, 9.0, 9.0, 9.0), "module"),
    ],
)
def test_select_uncertain_gain_keeps_the_baseline(
    sparse: tuple[float, ...], group_mode: str, prefer: Callable[..., Any]
) -> None:
    prefer(module=(2.0,) * 7, sparse=sparse)
    decision = CandidateSelector(device="cpu").select("x", candidates("module", "sparse"), "module")
    assert decision.choice == group_mode
    assert ("no candidate" in decision.reason) == (group_mode == "module")


def test_select_keeps_the_fastest(prefer: Callable[..., Any]) -> None:
    prefer("dense", "sparse")
    decision = CandidateSelector(device="cpu").select("x", candidates("module", "sparse", "dense"), "module")
    assert decision.choice == "dense" and decision.latency_ms == {"module": 5.0, "dense": 1.0, "sparse": 1.1}
    assert decision.reason.startswith("5.00x (5.00–5.00)")


def test_select_single_candidate_is_not_timed(prefer: Callable[..., Any]) -> None:
    times = prefer("sparse")
    decision = CandidateSelector(device="cpu").select("x", candidates("module"), "module")
    assert decision.choice == "module" and times.calls == [] and decision.latency_ms == {}


# --- remembering --------------------------------------------------------------------------------------------


def choose(cache: DecisionCache | None, key: str = "x", *names: str) -> Decision:
    return CandidateSelector(device="cpu", cache=cache).select(
        key, candidates("module", *(names or ("sparse",))), "module"
    )


def test_decision_is_cached_across_processes(tmp_path: Path, prefer: Callable[..., Any]) -> None:
    times = prefer("sparse")
    cache = DecisionCache(tmp_path / "deep" / "decisions.json")
    first = choose(cache)
    cache.save()
    second = choose(DecisionCache(cache.path))
    assert len(times.calls) == 1
    assert second.from_cache and not first.from_cache
    assert second.model_dump(exclude={"from_cache"}) == first.model_dump(exclude={"from_cache"})
    assert choose(DecisionCache(cache.path), "another").from_cache is False
    stored = json.loads(cache.path.read_text())
    assert stored["version"] == 3 and not any(d["from_cache"] for d in stored["decisions"].values())


def test_another_device_is_measured_separately(
    tmp_path: Path, prefer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = prefer("sparse")
    cache = DecisionCache(tmp_path / "decisions.json")
    choose(cache)
    monkeypatch.setattr(dispatch.devices.DeviceInfo, "key", lambda self: "another")
    assert not choose(cache).from_cache and len(times.calls) == 2


def test_another_version_of_a_package_is_measured_separately(
    tmp_path: Path, prefer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = prefer("sparse")
    cache = DecisionCache(tmp_path / "decisions.json")
    choose(cache)
    for package in ("torch", "numba", "sparseflow"):
        versions = {package: "99"}
        monkeypatch.setattr(dispatch, "get_version", lambda name, versions=versions: versions.get(name, "1"))
        dispatch.describe_versions.cache_clear()
        assert not choose(cache).from_cache
    monkeypatch.undo()
    dispatch.describe_versions.cache_clear()
    assert len(times.calls) == 4


def test_refresh_replaces_the_cached_decision(tmp_path: Path, prefer: Callable[..., Any]) -> None:
    cache = DecisionCache(tmp_path / "decisions.json")
    prefer("sparse")
    choose(cache)
    prefer(sparse=9.0)
    selector = CandidateSelector(device="cpu", cache=cache, refresh=True)
    assert selector.select("x", candidates("module", "sparse"), "module").choice == "module"
    cache.save()
    assert choose(DecisionCache(cache.path)).choice == "module"


def test_cached_choice_that_is_unavailable_is_not_used(tmp_path: Path, prefer: Callable[..., Any]) -> None:
    prefer("sparse")
    cache = DecisionCache(tmp_path / "decisions.json")
    assert choose(cache).choice == "sparse"
    actual = choose(cache, "x", "dense")
    assert actual.choice == "module" and not actual.from_cache


def test_without_a_cache_everything_is_measured(prefer: Callable[..., Any]) -> None:
    times = prefer("sparse")
    assert choose(None).choice == choose(None).choice == "sparse" and len(times.calls) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe\x00",
        b'{"version": 1, "decisions": {}}',
        HEADER + b'"decisions": {}, "more": 1}',
        HEADER + b'"decisions": {"x": {"choice": "sparse"}}}',
        HEADER + b'"decisions": {"x": {"choice": "sparse", "reason": "", "unknown": 1}}}',
        HEADER + b'"decisions": {"x": {"choice": 3, "reason": ""}}}',
        HEADER + b'"decisions": {"x": {"choice": "sparse", "reason": "", "latency_ms": {"a": "fast"}}}}',
        HEADER + b'"decisions": []}',
    ],
)
def test_optimize_damaged_cache_warns_once(
    tmp_path: Path, content: bytes, prefer: Callable[..., Any]
) -> None:
    prefer("sparse")
    path = tmp_path / "decisions.json"
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=r"decisions\.json") as reports:
        cache = DecisionCache(path)
        assert choose(cache).choice == "sparse"
        cache.save()
    assert len(reports) == 1
    assert choose(DecisionCache(path)).from_cache


def test_missing_cache_does_not_warn(tmp_path: Path) -> None:
    DecisionCache(tmp_path / "none" / "decisions.json")


@pytest.mark.parametrize("broken", ["a file in the folder's place", "a folder in the file's place"])
def test_unwritable_cache_gives_a_warning(tmp_path: Path, broken: str, prefer: Callable[..., Any]) -> None:
    prefer("sparse")
    path = tmp_path / "place" / "decisions.json"
    if broken.startswith("a file"):
        path.parent.write_text("")
    else:
        (path / "inner").mkdir(parents=True)
    with pytest.warns(UserWarning, match="SPARSEFLOW_CACHE|decision cache"):
        cache = DecisionCache(path)
        assert choose(cache).choice == "sparse"
        cache.save()
    assert not list(tmp_path.rglob("*.tmp"))


def test_two_processes_share_one_cache_file(tmp_path: Path, prefer: Callable[..., Any]) -> None:
    prefer("sparse")
    path = tmp_path / "decisions.json"
    first_cache, second_cache = DecisionCache(path), DecisionCache(path)
    choose(first_cache, "a")
    choose(second_cache, "b")
    second_cache.save()
    first_cache.save()
    assert choose(DecisionCache(path), "a").from_cache and choose(DecisionCache(path), "b").from_cache


def test_save_keeps_decisions_of_other_processes(tmp_path: Path) -> None:
    path = tmp_path / "decisions.json"
    old = DecisionCache(path)
    old.put("a", Decision(choice="module", reason="old"))
    old.save()
    first_cache, second_cache = DecisionCache(path), DecisionCache(path)
    second_cache.put("a", Decision(choice="sparse", reason="new"))
    second_cache.save()
    first_cache.put("b", Decision(choice="dense", reason="ours"))
    first_cache.save()
    actual = DecisionCache(path)
    assert (actual.get("a") or old).reason == "new"  # type: ignore[union-attr]
    assert (actual.get("b") or old).reason == "ours"  # type: ignore[union-attr]


def test_default_cache_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert DecisionCache().path == Path(os.environ["SPARSEFLOW_CACHE"]) / "decisions.json"
    monkeypatch.delenv("SPARSEFLOW_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert DecisionCache().path == tmp_path / "sparseflow" / "decisions.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert DecisionCache().path == tmp_path / "home" / ".cache" / "sparseflow" / "decisions.json"


def test_file_errors_are_not_raised() -> None:
    """Failures of the cache do not raise."""
    assert not any(name for name in vars(dispatch) if vars(dispatch)[name] is FileFormatError)
