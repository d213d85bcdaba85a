"""Tests of measured decisions: never slower, never another result, cached on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("spikingjelly")
pytest.importorskip("numba")

from spikingjelly.activation_based import functional, neuron

import sparseflow
from sparseflow.core.telemetry.cpu_contention import CpuUsageMonitor
from sparseflow.spiking import accelerated
from sparseflow.spiking.accelerated import get_accelerated_forward
from sparseflow.spiking.autotune.candidates import _describe_flips
from sparseflow.spiking.backends.events.backend import EventBackend
from tests.spiking.nets import (
    KINDS,
    Opaque,
    from_rest,
    images,
    ready,
    same,
    small,
)

X = images(3, 2)
Prefer = Callable[..., Any]


def ways(net: nn.Module) -> dict[str, str]:
    """Return the mode of each group in the only plan of `net`."""
    (plan,) = get_accelerated_forward(net).list_plans()
    assert plan is not None
    return {group.name: group.mode for group in plan.groups}


# --- never slower -------------------------------------------------------------------------------------------


def test_each_group_takes_its_fastest_candidate(prefer: Prefer) -> None:
    prefer("dense", "sparse")
    net = small()
    sparseflow.optimize(net, X)
    assert set(ways(net).values()) == {"dense"}
    prefer("sparse", "dense", module=0.5)
    sparseflow.optimize(net, X, cache=False)
    assert set(ways(net).values()) == {"module"}


@pytest.mark.parametrize("plan", [5.0, 5.1, (1.0, 1.0, 1.0, 1.0, 9.0, 9.0, 9.0)])
def test_plan_without_certain_gain_is_dropped(plan: Any, prefer: Prefer) -> None:
    prefer("sparse", plan=plan)
    net = small()
    expected = from_rest(net, X)
    sparseflow.optimize(net, X)
    state = get_accelerated_forward(net)
    assert (
        state.list_plans() == [None]
        and state.network_decision is not None
        and state.network_decision.choice == "own"
    )
    assert same(from_rest(net, X), expected)
    explanation = sparseflow.explain(net)
    assert explanation.summary.startswith("unchanged: no candidate")
    *groups, head = explanation.layers
    assert all(row.backend == "dense" and row.reason.startswith("not used") for row in groups)
    assert (head.backend, head.reason) == ("dense", "fed by a mean")


@pytest.mark.parametrize("group_mode", ["dense", "sparse"])
def test_candidate_with_wrong_output_is_rejected(
    group_mode: str, prefer: Prefer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(group_mode, "dense", "sparse")
    prepare = EventBackend.prepare

    def lying(self: EventBackend, spec: Any, shape: Any, convolution: Any, *more: Any) -> Any:
        group = prepare(self, spec, shape, convolution, *more)

        def run(*args: Any, **kwargs: Any) -> Any:
            if convolution == group_mode and spec.sources and kwargs["v"] is None:
                kwargs["v"] = torch.full((shape.images, *shape.output), 0.5)
            return group(*args, **kwargs)

        return run

    monkeypatch.setattr(EventBackend, "prepare", lying)
    net = small()
    expected = from_rest(net, X)
    functional.reset_net(net)
    sparseflow.optimize(net, X)
    assert group_mode not in [w for name, w in ways(net).items() if name != "conv1"]
    reason = get_accelerated_forward(net).decisions["conv2"].reason
    assert f"'{group_mode}' differs from the network's own modules" in reason and "spikes differ" in reason
    assert same(from_rest(net, X), expected)


def test_mismatch_below_the_limit_is_accepted() -> None:
    expected = torch.zeros(100, 1000)
    actual = expected.clone()
    actual.view(-1)[:11] = 1
    assert _describe_flips(actual, expected, torch.float32) is None
    actual.view(-1)[:12] = 1
    assert "12 of 100000 spikes differ" in str(_describe_flips(actual, expected, torch.float32))


# --- the cache ----------------------------------------------------------------------------------------------


def test_decisions_are_remembered(prefer: Prefer, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    times = prefer("sparse", "dense")
    net = small()
    sparseflow.optimize(net, X, cache=file)
    assert len(times.calls) == 4 and file.exists()
    first = {
        name: d.model_dump(exclude={"from_cache"})
        for name, d in get_accelerated_forward(net).decisions.items()
    }
    times.calls.clear()
    other = small()
    sparseflow.optimize(other, X, cache=file)
    assert times.calls == [("own", "plan")], "groups are remembered; the whole is always checked"
    second = get_accelerated_forward(other).decisions
    assert all(d.from_cache for d in second.values())
    assert {name: d.model_dump(exclude={"from_cache"}) for name, d in second.items()} == first
    assert ways(other) == ways(net)
    times.calls.clear()
    sparseflow.optimize(small(), images(3, 4), cache=file)
    assert len(times.calls) == 4, "another batch is another shape"


def test_disturbed_decisions_are_not_cached(
    prefer: Prefer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "decisions.json"
    times = prefer("sparse", "dense")
    monkeypatch.setattr(CpuUsageMonitor, "measure_other_share", lambda self: 0.4)
    net = small()
    sparseflow.optimize(net, X, cache=file)
    assert "40 % of the CPUs" in sparseflow.explain(net).summary and not file.exists()
    monkeypatch.setattr(CpuUsageMonitor, "measure_other_share", lambda self: 0.05)
    times.calls.clear()
    sparseflow.optimize(net, X, cache=file)
    assert len(times.calls) == 4 and file.exists()
    assert "CPUs" not in sparseflow.explain(net).summary


def test_cached_latencies_that_contradict_the_network_are_measured_again(
    prefer: Prefer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "decisions.json"
    prefer("sparse", "dense", module=50.0)
    sparseflow.optimize(small(), X, cache=file)
    times = prefer("sparse", "dense", module=1.5)
    monkeypatch.setattr(accelerated, "MAX_GROUPS_OVER_NETWORK", 1.5)
    net = small()
    sparseflow.optimize(net, X, cache=file)
    assert len(times.calls) == 5, "the network, then three groups and the network again"
    assert [row.latency_before_ms for row in sparseflow.explain(net).layers if row.group] == [1.5] * 3
    times.calls.clear()
    other = small()
    sparseflow.optimize(other, X, cache=file)
    rows = [row for row in sparseflow.explain(other).layers if row.group]
    assert (
        len(times.calls) == 1
        and len(rows) == 3
        and all(row.from_cache and "from the cache" in row.reason for row in rows)
    )


def test_groups_of_different_sizes_do_not_share_a_decision(prefer: Prefer, tmp_path: Path) -> None:
    class Neurons(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool, self.a, self.b = nn.AvgPool2d(2), neuron.IFNode(), neuron.IFNode()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.pool(self.a(x)))

    times = prefer("dense")
    sparseflow.optimize(Neurons().eval(), images(2), cache=tmp_path / "c.json")
    assert times.calls == [("module", "dense"), ("module", "dense"), ("own", "plan")]


@pytest.mark.parametrize("kind", ["plan", "layers"])
def test_optimize_unwritable_cache_still_optimizes(kind: str, prefer: Prefer, tmp_path: Path) -> None:
    prefer("sparse", "events")
    (tmp_path / "file").write_text("")
    build, options = KINDS[kind]
    net = build()
    expected = from_rest(net, X)
    with pytest.warns(UserWarning, match="decision cache"):
        sparseflow.optimize(net, X, cache=tmp_path / "file" / "decisions.json", **options)
    assert get_accelerated_forward(net).network_decision is not None and same(from_rest(net, X), expected)


def test_damaged_cache_is_rebuilt(prefer: Prefer, tmp_path: Path) -> None:
    times = prefer("sparse")
    file = tmp_path / "c.json"
    file.write_text("{")
    with pytest.warns(UserWarning, match="decision cache"):
        sparseflow.optimize(small(), X, cache=file)
    times.calls.clear()
    sparseflow.optimize(small(), X, cache=file)
    assert times.calls == [("own", "plan")]


def test_no_cache_is_written_if_disabled(
    prefer: Prefer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer("sparse")
    monkeypatch.setenv("SPARSEFLOW_CACHE", str(tmp_path / "nothing"))
    sparseflow.optimize(small(), X, cache=False)
    assert not (tmp_path / "nothing").exists()
    sparseflow.optimize(small(), X)
    assert (tmp_path / "nothing" / "decisions.json").exists()


# --- telling ------------------------------------------------------------------------------------------------


def test_progress_goes_forward_to_the_end(prefer: Prefer) -> None:
    prefer("sparse", "events")
    for build in (small, lambda: ready(Opaque())):
        fractions: list[float] = []
        sparseflow.optimize(
            build(), X, progress=lambda _, completed, fractions=fractions: fractions.append(completed)
        )
        assert fractions == sorted(fractions) and fractions[0] >= 0 and fractions[-1] <= 1
        assert len(fractions) >= 2
