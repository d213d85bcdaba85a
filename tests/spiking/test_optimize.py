"""`optimize` and `restore`: the same model, the same numbers, and always a way back."""

from __future__ import annotations

import copy
import importlib.util
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("spikingjelly")
pytest.importorskip("numba")

from spikingjelly.activation_based import functional, layer, neuron

import sparseflow
from sparseflow.core import timing
from sparseflow.errors import InputError, MissingExtraError, ModelError, SampleError
from sparseflow.spiking.accelerated import MOST_PLANS, Accelerated, accelerated
from sparseflow.spiking.backend import EventBackend
from sparseflow.spiking.deciding import _disagreement
from sparseflow.spiking.modules import SparseConv2d
from sparseflow.spiking.plan import Plan
from tests.spiking.families import CASES, FAMILIES
from tests.spiking.nets import (
    Constant,
    Loop,
    Opaque,
    Small,
    dyadic,
    from_rest,
    images,
    membranes,
    ready,
    same,
    small,
)
from tests.spiking.test_state import differences, state

X = images(3, 2)
Prefer = Callable[..., Any]


def numbers(net: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in net.state_dict().items()}


def plan_of(net: nn.Module) -> Plan:
    (plan,) = accelerated(net).plans()
    assert plan is not None
    return plan


def ways(net: nn.Module) -> dict[str, str]:
    return {group.name: group.way for group in plan_of(net).groups}


@pytest.fixture
def planned(prefer: Prefer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Optimise with the sparse way preferred; the list that it returns grows with each run of a plan."""

    def run(net: nn.Module, *args: Any, **options: Any) -> list[int]:
        prefer("sparse", "dense")
        assert sparseflow.optimize(net, *args, **options) is net
        runs: list[int] = []
        original = Plan.run
        monkeypatch.setattr(Plan, "run", lambda self, *a, **k: runs.append(1) or original(self, *a, **k))
        return runs

    return run


# --- the same model -----------------------------------------------------------------------------------------

KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "plan": (small, {}),
    "static": (small, {"policy": "static"}),
    "layers": (lambda: ready(Opaque()), {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_restore_takes_everything_back(kind: str, prefer: Prefer) -> None:
    prefer("sparse", "events")
    build, options = KINDS[kind]
    net = build()
    expected, held, kept = from_rest(net, X), state(net), numbers(net)
    functional.reset_net(net)
    held = state(net)
    assert sparseflow.optimize(net, X, **options) is net
    assert list(net.state_dict()) == list(kept) and same(numbers(net), kept)
    changed = [name for name, m in net.named_modules() if isinstance(m, SparseConv2d)]
    assert (
        changed == ([] if kind == "plan" else ["conv2"] if kind == "static" else ["conv2", "conv3"])
        or kind == "static"
    )
    assert same(from_rest(net, X), expected) and same(from_rest(net, X), expected)
    functional.reset_net(net)
    assert sparseflow.restore(net) is net
    assert differences(state(net), held) == []
    assert "forward" not in vars(net) and same(from_rest(net, X), expected)
    assert sparseflow.restore(net) is net


def test_restore_of_a_model_that_was_never_optimised_does_nothing() -> None:
    net = small()
    held = state(net)
    assert sparseflow.restore(net) is net and differences(state(net), held) == []


def test_a_forward_of_its_own_comes_back(planned: Callable[..., Any]) -> None:
    net = small()
    original = net.forward
    net.forward = lambda x: original(x) * 2
    own, expected = net.forward, from_rest(net, X)
    runs = planned(net, X)
    assert same(from_rest(net, X), expected)
    sparseflow.restore(net)
    assert net.forward is own and same(from_rest(net, X), expected)
    assert runs == [] or runs  # whether such a network is planned is left open; its output is not


def test_restored_weights_are_todays(prefer: Prefer) -> None:
    """What was loaded into a network whose modules are replaced stays when they come back."""
    prefer("events")
    net = small()
    sparseflow.optimize(net, X, policy="static")
    assert isinstance(net.conv2, SparseConv2d)
    negative = {key: -value if "conv" in key else value for key, value in numbers(net).items()}
    net.load_state_dict(negative, assign=True)
    net.train()
    sparseflow.restore(net)
    assert same(numbers(net), negative) and net.conv2.training and type(net.conv2) is layer.Conv2d


def test_optimise_again_and_again(planned: Callable[..., Any]) -> None:
    net = small()
    expected, held = from_rest(net, X), numbers(net)
    planned(net, X)
    first = accelerated(net)
    sparseflow.optimize(net, X)
    assert accelerated(net) is not first
    assert same(from_rest(net, X), expected)
    sparseflow.restore(net)
    assert "forward" not in vars(net)
    sparseflow.optimize(net, X)
    assert same(from_rest(net, X), expected) and same(numbers(net), held)
    sparseflow.restore(net)
    assert "forward" not in vars(net) and same(from_rest(net, X), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_deep_copy_is_independent(kind: str, prefer: Prefer) -> None:
    prefer("sparse", "events")
    build, options = KINDS[kind]
    net = build()
    expected = from_rest(net, X)
    sparseflow.optimize(net, X, **options)
    functional.reset_net(net)
    twin = copy.deepcopy(net)
    ours, theirs = accelerated(net), accelerated(twin)
    assert theirs.model is twin and ours.model is net and theirs is not ours
    decided = dict(ours.decisions)
    with torch.no_grad():
        twin.conv2.weight.neg_()
        twin.sn2.v_threshold = 0.5
    changed = from_rest(twin, X)
    assert same(from_rest(net, X), expected) and not same(changed, expected)
    theirs.decisions.clear()
    assert ours.decisions == decided
    sparseflow.restore(twin)
    assert "forward" not in vars(twin) and "forward" in vars(net)
    assert type(twin.conv2) is layer.Conv2d and same(from_rest(twin, X), changed)
    assert same(from_rest(net, X), expected)


def test_a_copy_of_a_network_that_needs_a_sample_to_be_traced(planned: Callable[..., Any]) -> None:
    net, x = ready(Constant()), images(2)
    expected = from_rest(net, x)
    runs = planned(net, x)
    twin = copy.deepcopy(net)
    assert same(from_rest(twin, x), expected) and len(runs) >= 2
    assert "not measured" not in str(sparseflow.explain(twin))


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimised_model_can_be_pickled(kind: str, prefer: Prefer) -> None:
    prefer("sparse", "events")
    build, options = KINDS[kind]
    net = build()
    expected = from_rest(net, X)
    sparseflow.optimize(net, X, **options)
    from_rest(net, X)
    functional.reset_net(net)
    twin = pickle.loads(pickle.dumps(net))
    assert same(from_rest(twin, X), expected)
    sparseflow.restore(twin)
    assert type(twin.conv2) is layer.Conv2d and same(from_rest(twin, X), expected)


def test_a_state_dict_goes_to_disk_and_into_a_fresh_model(planned: Callable[..., Any]) -> None:
    net = small()
    expected = from_rest(net, X)
    planned(net, X)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    other = ready(Small(), seed=5)
    assert not same(from_rest(other, X), expected)
    other.load_state_dict(torch.load(file, weights_only=True))
    functional.reset_net(other)
    # Leaks and epsilons are no part of a state_dict.
    for name, module in other.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = net.get_submodule(name).eps
    assert same(from_rest(other, X), expected)


# --- the same numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_every_family_is_the_same_or_says_why_not(name: str, mode: str, prefer: Prefer) -> None:
    prefer("sparse", "dense")
    net, x = FAMILIES[name](mode)
    dyadic(net)
    x = x.mul(16).round().div(16)
    held = numbers(net)
    with torch.no_grad():
        functional.reset_net(net)
        expected = [net(x), net(x)]
        v = membranes(net)
        functional.reset_net(net)
    sparseflow.optimize(net, x)
    assert list(net.state_dict()) == list(held) and same(numbers(net), held)
    with torch.no_grad():
        found = [net(x), net(x)]
    if name in ("masnn", "ms_resnet", "spiking_vggws_ottt"):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    else:
        assert same(found, expected) and same(membranes(net), v)
    rows = sparseflow.explain(net).layers
    convs = [n for n, m in net.named_modules() if isinstance(m, nn.Conv2d)]
    assert [row.name for row in rows] == convs
    assert all(row.why and row.why != "run the network once, or give optimize() a sample" for row in rows)
    sites = {site.name: site for site in accelerated(net).graph.sites}
    for row in rows:
        if row.backend == "events":
            assert sites[row.name].replaceable
        elif not sites[row.name].replaceable and row.group is None:
            assert row.why == sites[row.name].reason
    functional.reset_net(net)
    sparseflow.restore(net)
    with torch.no_grad():
        assert same(net(x), expected[0])


def test_what_timing_itself_chooses_is_the_same_too() -> None:
    for build in (small, lambda: ready(Opaque())):
        net = build()
        expected, v = from_rest(net, X), membranes(net)
        sparseflow.optimize(net, X)
        assert same(from_rest(net, X), expected) and same(membranes(net), v)
        assert accelerated(net).whole is not None


@pytest.mark.parametrize("mode", ["s", "m"])
def test_membranes_are_carried_and_reset_as_before(mode: str, planned: Callable[..., Any]) -> None:
    net = small(mode)
    x = X if mode == "m" else images(2)
    xs = [x, x + 1, x - 1]
    functional.reset_net(net)
    with torch.no_grad():
        expected = [(net(x), membranes(net)) for x in xs]
    functional.reset_net(net)
    runs = planned(net, x)
    assert all(not isinstance(v, torch.Tensor) for v in membranes(net).values()), "as it was: at rest"
    for _ in range(2):
        with torch.no_grad():
            assert same([(net(x), membranes(net)) for x in xs], expected)
        functional.reset_net(net)
        assert net.sn1.v == 0.0
    assert len(runs) == 6


def test_a_network_optimised_in_the_middle_of_a_sequence_goes_on(planned: Callable[..., Any]) -> None:
    net = small()
    functional.reset_net(net)
    with torch.no_grad():
        net(X)
        before, expected, v = membranes(net), net(X), membranes(net)
        functional.reset_net(net)
        net(X)
        runs = planned(net, X)
        assert same(membranes(net), before)
        assert same(net(X), expected) and same(membranes(net), v) and runs == [1]


def test_other_batches_sizes_and_steps(planned: Callable[..., Any]) -> None:
    net = small()
    inputs = [images(3, 5), images(3, 1), images(3, 2, size=12), images(1, 2), X]
    expected = [from_rest(net, x) for x in inputs]
    runs = planned(net, X)
    for x, out in zip(inputs, expected, strict=True):
        assert same(from_rest(net, x), out)
    assert len(accelerated(net).plans()) == 5 and len(runs) > 5
    before = len(runs)
    for x, out in zip(inputs, expected, strict=True):
        assert same(from_rest(net, x), out)
    assert len(runs) == before + 5, "each shape is measured once"


def test_a_batch_of_another_size_without_a_reset(planned: Callable[..., Any]) -> None:
    net, xs = small(), [images(3, n) for n in (2, 3, 3, 2)]
    functional.reset_net(net)
    with torch.no_grad():
        expected = [net(x) for x in xs], membranes(net)
        functional.reset_net(net)
        planned(net, X)
        assert same(([net(x) for x in xs], membranes(net)), expected)


def test_networks_that_look_at_shapes_take_other_shapes(planned: Callable[..., Any]) -> None:
    """One graph asserts a rank, the other a number of time steps."""
    for net, sample, others in (
        (ready(Constant()), images(2), [X, images(4)]),
        (ready(Constant()), X, [images(2)]),
        (ready(Loop()), X, [images(2, 2), images(5, 2), X]),
    ):
        expected = [from_rest(net, x) for x in others]
        runs = planned(net, sample)
        for x, out in zip(others, expected, strict=True):
            assert same(from_rest(net, x), out)
        assert runs


def test_only_so_many_shapes_are_kept(planned: Callable[..., Any]) -> None:
    net = small()
    planned(net, X)
    for n in range(1, 12):
        from_rest(net, images(1, n))
    assert len(accelerated(net).plans()) == MOST_PLANS
    expected = from_rest(sparseflow.restore(net), X)
    sparseflow.optimize(net, X)
    assert same(from_rest(net, X), expected)


def test_inputs_that_are_no_numbers(planned: Callable[..., Any]) -> None:
    net, x = small(), X.clone()
    x[0, 0, 1, 3, 3] = float("nan")
    expected, v = from_rest(net, x), membranes(net)
    runs = planned(net, X)
    assert same(from_rest(net, x), expected) and same(membranes(net), v) and runs
    assert v["sn1"].isnan().any()


def test_an_empty_batch_and_a_call_by_keyword(planned: Callable[..., Any]) -> None:
    net = small()
    expected, empty = from_rest(net, X), from_rest(net, X[:, :0])
    runs = planned(net, X)
    functional.reset_net(net)
    with torch.no_grad():
        assert net(X[:, :0]).shape == empty.shape
        functional.reset_net(net)
        assert same(net(x=X), expected)
    assert runs == []
    with pytest.raises(TypeError, match="x"):
        net()
    with pytest.raises(TypeError):
        net(X, X)


def test_a_single_image_without_a_batch_axis(planned: Callable[..., Any]) -> None:
    net = ready(nn.Sequential(nn.Conv2d(3, 4, 3), neuron.IFNode(), nn.Conv2d(4, 4, 3), neuron.IFNode()))
    x = images()
    expected = from_rest(net, x)
    planned(net, x)
    assert same(from_rest(net, x), expected)


def test_under_inference_mode(planned: Callable[..., Any]) -> None:
    net = small()
    expected = from_rest(net, X)
    functional.reset_net(net)
    with torch.inference_mode():
        runs = planned(net, X)
        assert same(net(X), expected)
    assert same(from_rest(net, X), expected) and len(runs) == 2


def test_a_child_may_be_optimised_before_its_parent(planned: Callable[..., Any]) -> None:
    net = nn.Sequential(small(), nn.Flatten(0, 1)).eval()
    expected = from_rest(net, X)
    planned(net[0], X)
    assert same(from_rest(net, X), expected)
    sparseflow.optimize(net, X)
    assert same(from_rest(net, X), expected)
    sparseflow.restore(net)
    assert isinstance(vars(net[0])["forward"], Accelerated) and same(from_rest(net, X), expected)


def test_the_sample_is_not_written_to(planned: Callable[..., Any]) -> None:
    x = X.clone()
    net = small()
    planned(net, x)
    from_rest(net, x)
    assert same(x, X)


# --- never slower -------------------------------------------------------------------------------------------


def test_each_group_takes_its_fastest_way(prefer: Prefer) -> None:
    prefer("dense", "sparse")
    net = small()
    sparseflow.optimize(net, X)
    assert set(ways(net).values()) == {"dense"}
    prefer("sparse", "dense", module=0.5)
    sparseflow.optimize(net, X, cache=False)
    assert set(ways(net).values()) == {"module"}


@pytest.mark.parametrize("plan", [5.0, 5.1, (1.0, 1.0, 1.0, 1.0, 9.0, 9.0, 9.0)])
def test_a_plan_that_is_not_surely_faster_is_dropped(plan: Any, prefer: Prefer) -> None:
    prefer("sparse", plan=plan)
    net = small()
    expected = from_rest(net, X)
    sparseflow.optimize(net, X)
    state = accelerated(net)
    assert state.plans() == [None] and state.whole is not None and state.whole.way == "own"
    assert same(from_rest(net, X), expected)
    assert sparseflow.explain(net).summary.startswith("left as it was: nothing surely beat")


@pytest.mark.parametrize("way", ["dense", "sparse"])
def test_a_way_that_computes_something_else_is_refused(
    way: str, prefer: Prefer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(way, "dense", "sparse")
    prepare = EventBackend.prepare

    def lying(self: EventBackend, spec: Any, shape: Any, convolution: Any, *more: Any) -> Any:
        group = prepare(self, spec, shape, convolution, *more)

        def run(*args: Any, **kwargs: Any) -> Any:
            if convolution == way and spec.sources and kwargs["v"] is None:
                kwargs["v"] = torch.full((shape.images, *shape.output), 0.5)
            return group(*args, **kwargs)

        return run

    monkeypatch.setattr(EventBackend, "prepare", lying)
    net = small()
    expected = from_rest(net, X)
    functional.reset_net(net)
    sparseflow.optimize(net, X)
    assert way not in [w for name, w in ways(net).items() if name != "conv1"]
    why = accelerated(net).decisions["conv2"].why
    assert f"'{way}' disagreed with the network's own modules" in why and "spikes differ" in why
    assert same(from_rest(net, X), expected)


def test_a_few_spikes_at_the_threshold_may_flip() -> None:
    expected = torch.zeros(100, 1000)
    found = expected.clone()
    found.view(-1)[:11] = 1
    assert _disagreement(found, expected, torch.float32) is None
    found.view(-1)[:12] = 1
    assert "12 of 100000 spikes differ" in str(_disagreement(found, expected, torch.float32))


# --- what changes afterwards --------------------------------------------------------------------------------


def negate(net: Any) -> None:
    with torch.no_grad():
        net.conv2.weight.neg_()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": negate,
    "load_state_dict": lambda n: n.load_state_dict(
        {k: -v if "conv" in k else v for k, v in numbers(n).items()}
    ),
    "load_state_dict, assigned": lambda n: n.load_state_dict(
        {k: -v if "conv" in k else v for k, v in numbers(n).items()}, assign=True
    ),
    "a buffer": lambda n: n.bn2.running_mean.add_(0.5),
    "a parameter replaced": lambda n: setattr(n.conv2, "weight", nn.Parameter(-n.conv2.weight.detach())),
    "data replaced": lambda n: setattr(n.conv2.weight, "data", -n.conv2.weight.detach()),
    "a convolution replaced": lambda n: setattr(n, "conv2", ready(Small(), seed=9).conv2),
    "a neuron replaced": lambda n: setattr(n, "sn2", neuron.IFNode(v_threshold=0.25, step_mode="m")),
    "the head replaced": lambda n: setattr(n, "fc", layer.Linear(8, 3, step_mode="m")),
    "a threshold": lambda n: setattr(n.sn2, "v_threshold", 0.25),
    "a reset": lambda n: setattr(n.sn2, "v_reset", None),
    "sequences recorded": lambda n: setattr(n.sn2, "store_v_seq", True),
    "a forward replaced": lambda n: setattr(n.sn2, "forward", lambda x: (x > 1).float()),
    "a BatchNorm to training": lambda n: (setattr(n.bn2, "eps", 1e-5), n.bn2.train()),
}


@pytest.mark.parametrize("when", ["before the first call", "between calls"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_honoured(change: str, when: str, planned: Callable[..., Any]) -> None:
    net = small()
    before = from_rest(net, X)
    runs = planned(net, X)
    if when == "between calls":
        assert same(from_rest(net, X), before)
    CHANGES[change](net)
    twin = copy.deepcopy(net)
    found = from_rest(net, X)
    again = from_rest(net, X)
    expected = from_rest(sparseflow.restore(twin), X)
    if change != "a BatchNorm to training":
        assert same(found, expected) and same(again, expected)
    else:
        torch.testing.assert_close(found, expected)
        assert int(net.bn2.num_batches_tracked) == 2, "the module itself ran, once a call"
    assert change == "sequences recorded" or not same(found, before)
    if change == "sequences recorded":
        assert net.sn2.v_seq.shape == (3, 2, 6, 8, 8)
    assert same(from_rest(sparseflow.restore(net), X), expected) or change == "a BatchNorm to training"
    assert runs or change in ("a BatchNorm to training", "a forward replaced")


def test_a_plain_parameter_is_todays(planned: Callable[..., Any]) -> None:
    class Shifted(Small):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.inner.shift = nn.Parameter(torch.zeros(1, 2, 6, 8, 8))

        def features(self, x: torch.Tensor) -> torch.Tensor:
            s = self.sn1(self.bn1(self.conv1(x)))
            return self.sn3(self.conv3(self.sn2(self.bn2(self.conv2(s)) + self.inner.shift)))

    for assign in (False, True):
        net = ready(Shifted())
        before = from_rest(net, X)
        runs = planned(net, X)
        numbers_now = numbers(net) | {"inner.shift": torch.ones(1, 2, 6, 8, 8)}
        net.load_state_dict(numbers_now, assign=assign)
        found = from_rest(net, X)
        assert runs and not same(found, before)
        assert same(from_rest(sparseflow.restore(net), X), found)


def test_another_dtype_and_step_mode(planned: Callable[..., Any]) -> None:
    net = small()
    expected = from_rest(net, X).double()
    planned(net, X)
    from_rest(net, X)
    net.double()
    assert same(from_rest(net, X.double()), expected)
    with pytest.raises(RuntimeError, match=r"dtype|type"):
        from_rest(net, X)
    net.float()
    assert same(from_rest(net, X), expected.float())
    functional.set_step_mode(net, "s")
    functional.reset_net(net)
    with torch.no_grad():
        steps = torch.stack([net(x) for x in X])
    assert same(steps, expected.float())
    functional.set_step_mode(net, "m")
    assert same(from_rest(net, X), expected.float())


def test_what_is_written_through_data_is_seen_after_optimising_again(planned: Callable[..., Any]) -> None:
    """torch keeps no count of such writes; the docstrings say so. This pins down where the limit is."""
    net = small()
    before = from_rest(net, X)
    planned(net, X)
    from_rest(net, X)
    net.conv2.weight.data.neg_()
    assert same(from_rest(net, X), before)
    sparseflow.optimize(net, X)
    found = from_rest(net, X)
    assert not same(found, before) and same(from_rest(sparseflow.restore(net), X), found)


# --- hooks, training, gradients -----------------------------------------------------------------------------


def test_hooks_registered_later_fire(planned: Callable[..., Any]) -> None:
    net: Any = nn.Sequential(nn.Sequential(small()), nn.Identity()).eval()
    expected = from_rest(net, X)
    runs = planned(net, X)
    inner = net[0][0]
    for module in (net[0], inner, inner.conv2, inner.bn2, inner.sn2, inner.fc, net[1], net):
        calls: list[int] = []
        handles = [
            module.register_forward_hook(lambda *a, calls=calls: calls.append(1)),
            module.register_forward_pre_hook(lambda *a, calls=calls: calls.append(2)),
        ]
        assert same(from_rest(net, X), expected)
        assert sorted(calls) == [1, 2], type(module).__name__
        for handle in handles:
            handle.remove()
    runs.clear()
    assert same(from_rest(net, X), expected) and runs == [1], "back on the plan"


def test_a_hook_that_changes_a_value_changes_the_output(planned: Callable[..., Any]) -> None:
    net = small()
    before = from_rest(net, X)
    planned(net, X)
    net.sn2.register_forward_hook(lambda m, i, o: o * 0)
    found = from_rest(net, X)
    assert not same(found, before) and same(from_rest(sparseflow.restore(net), X), found)


def gradients(net: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    functional.reset_net(net)
    net.zero_grad()
    net(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_training_falls_back_with_gradients_intact(kind: str, prefer: Prefer) -> None:
    prefer("sparse", "events")
    build, options = KINDS[kind]
    net, plain = build(), build()
    sparseflow.optimize(net, X, **options)
    for module in (net, plain):
        module.train()
        for part in module.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.eps = 1e-5
    expected, found = gradients(plain, X), gradients(net, X)
    assert found.keys() == expected.keys() and len(found) > 6
    for name, value in expected.items():
        assert torch.equal(found[name], value) and (value.abs().sum() > 0 or "bias" in name), name
    assert same(numbers(net), numbers(plain)), "BatchNorm has seen the same"
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    optimiser.step()
    net.eval()
    after = from_rest(net, X)
    assert same(from_rest(sparseflow.restore(net), X), after)


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_that_wants_gradients_gets_them(kind: str, prefer: Prefer) -> None:
    prefer("sparse", "events")
    build, options = KINDS[kind]
    net, plain = build(), build()
    sparseflow.optimize(net, X, **options)
    grads = []
    for module in (plain, net):
        functional.reset_net(module)
        x = X.clone().requires_grad_()
        module(x).square().sum().backward()
        grads.append(x.grad)
    assert grads[0].abs().sum() > 0 and same(*grads)


def test_in_eval_mode_weights_get_no_gradients(planned: Callable[..., Any]) -> None:
    """As documented: an optimised network in eval mode is for inference."""
    net = small()
    planned(net, X)
    functional.reset_net(net)
    assert not net(X).requires_grad


# --- without a sample ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "x"), [(small, X), (lambda: ready(Constant()), images(2)), (lambda: ready(Loop()), X)]
)
def test_without_a_sample_the_first_call_measures(
    build: Any, x: torch.Tensor, planned: Callable[..., Any]
) -> None:
    net = build()
    expected = from_rest(net, x)
    functional.reset_net(net)
    held = state(net)
    runs = planned(net)
    explanation = sparseflow.explain(net)
    assert explanation.summary == "not measured yet" and "not measured yet" in str(explanation)
    assert all(r.ms_before is None for r in explanation.layers) and accelerated(net).plans() == []
    assert differences(state(net), held) in ([], [("", "forward", "")])
    assert same(from_rest(net, x), expected) and runs
    assert sparseflow.explain(net).summary != "not measured yet" and len(accelerated(net).plans()) == 1
    runs.clear()
    assert same(from_rest(net, x), expected) and runs == [1]


def test_without_a_sample_a_network_that_cannot_be_traced_is_watched(prefer: Prefer) -> None:
    prefer("events")
    net = ready(Opaque())
    expected = from_rest(net, X)
    sparseflow.optimize(net)
    assert type(net.conv2) is layer.Conv2d
    assert same(from_rest(net, X), expected)
    assert isinstance(net.conv2, SparseConv2d) and isinstance(net.conv3, SparseConv2d)
    assert not isinstance(net.conv1, SparseConv2d)
    assert same(from_rest(net, X), expected) and same(from_rest(net, images(3, 4))[:, :2], expected) is False
    assert "could not be traced" in sparseflow.explain(net).summary
    sparseflow.restore(net)
    assert same(from_rest(net, X), expected)


def test_a_first_call_with_bad_input_fails_as_the_network_does(planned: Callable[..., Any]) -> None:
    bad = images(3, 2, channels=4)
    with pytest.raises(RuntimeError) as plain:
        from_rest(small(), bad)
    net = small()
    planned(net)
    held = state(net)
    with pytest.raises(RuntimeError) as found:
        from_rest(net, bad)
    assert str(found.value) == str(plain.value)
    functional.reset_net(net)
    assert differences(state(net), held) == []
    assert same(from_rest(net, X), from_rest(small(), X))


# --- bad input ----------------------------------------------------------------------------------------------


def spoiled(name: str, value: float, dtype: torch.dtype | None = None) -> Callable[[], Any]:
    def build() -> Any:
        net = small()
        tensor = dict([*net.named_parameters(), *net.named_buffers()])[name]
        with torch.no_grad():
            tensor.view(-1)[-1] = value
        return net if dtype is None else net.to(dtype)

    return build


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyConv2d(3, 3), neuron.IFNode()).eval()


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "None": (lambda: None, "must be a torch.nn.Module, not NoneType"),
    "a class": (lambda: Small, "must be a torch.nn.Module, not type"),
    "a function": (lambda: torch.relu, "must be a torch.nn.Module"),
    "training": (lambda: small().train(), r"training mode; call model\.eval\(\)"),
    "no neuron": (lambda: nn.Sequential(nn.Conv2d(3, 3, 3)).eval(), "no spiking neuron.*register_neuron"),
    "NaN": (spoiled("conv2.weight", float("nan")), r"`conv2\.weight` holds NaN or Inf"),
    "Inf": (spoiled("fc.bias", float("inf")), r"`fc\.bias` holds NaN or Inf"),
    "-Inf in half": (spoiled("bn1.weight", float("-inf"), torch.float16), r"`bn1\.weight` holds NaN or Inf"),
    "NaN in a buffer": (spoiled("bn2.running_var", float("nan")), r"`bn2\.running_var` holds NaN or Inf"),
    "meta": (lambda: small().to("meta"), r"`conv1\.weight` is on the meta device"),
    "lazy": (lazy, r"`0\.weight` has no shape yet"),
}


@pytest.mark.parametrize("sample", [None, X], ids=["without a sample", "with one"])
@pytest.mark.parametrize("model", MODELS)
def test_bad_models_are_named_and_left_alone(model: str, sample: torch.Tensor | None) -> None:
    build, words = MODELS[model]
    net = build()
    held = state(net) if isinstance(net, nn.Module) and model not in ("meta", "lazy") else {}
    rng = torch.random.get_rng_state()
    with pytest.raises(ModelError, match=words):
        sparseflow.optimize(net, sample)
    if held:
        assert differences(state(net), held) == []
    assert not isinstance(net, nn.Module) or "forward" not in vars(net)
    assert torch.equal(torch.random.get_rng_state(), rng)


SAMPLES: dict[str, tuple[Any, str]] = {
    "rank": (images(2), r"shape \(2, 3, 8, 8\)"),
    "channels": (images(3, 2, channels=4), r"shape \(3, 2, 4, 8, 8\)"),
    "too small": (torch.zeros(3), r"shape \(3,\)"),
    "dtype": (X.double(), r"shape \(3, 2, 3, 8, 8\), torch\.float64"),
    "integers": (X.long(), r"torch\.int64"),
    "device": (X.to("meta"), "the sample is on meta, the model on cpu"),
    "a list of numbers": ([1.0, 2.0], "must be a tensor or a tuple of tensors, not float"),
    "numpy": (X.numpy(), "not ndarray"),
    "a mapping": ({"x": X}, "not dict"),
    "a word": ("x", "not str"),
    "two inputs": ((X, X), r"shape \(3, 2, 3, 8, 8\), \(3, 2, 3, 8, 8\)"),
    "none": ((), "cannot take a sample"),
}


@pytest.mark.parametrize("policy", ["measured", "static"])
@pytest.mark.parametrize("before", ["fresh", "optimised", "replaced"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_bad_samples_are_named_and_the_model_is_left_alone(
    sample: str, before: str, policy: Any, prefer: Prefer
) -> None:
    prefer("sparse", "events")
    value, words = SAMPLES[sample]
    net = small()
    from_rest(net, X)
    if before != "fresh":
        sparseflow.optimize(net, X, policy="measured" if before == "optimised" else "static")
    held, rng = state(net), torch.random.get_rng_state()
    expected = from_rest(copy.deepcopy(net), X)
    with pytest.raises(SampleError, match=words):
        sparseflow.optimize(net, value, policy=policy)
    assert differences(state(net), held) == []
    assert torch.equal(torch.random.get_rng_state(), rng)
    assert same(from_rest(net, X), expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": "fast"}, r"`policy` \(='fast'\) must be 'measured' or 'static'"),
        ({"dtype": torch.int8}, r"`dtype` \(=torch\.int8\)"),
        ({"dtype": "fp16"}, r"`dtype` \(='fp16'\)"),
        ({"policy": "static"}, "needs a sample"),
    ],
)
def test_bad_options_are_named_and_the_model_is_left_alone(options: dict[str, Any], words: str) -> None:
    net = small()
    held = state(net)
    with pytest.raises(InputError, match=words):
        sparseflow.optimize(net, **options)
    assert differences(state(net), held) == []


def test_a_failure_while_measuring_leaves_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(timing, "compare", stop)
    for build in (small, lambda: ready(Opaque())):
        net = build()
        from_rest(net, X)
        held = state(net)
        with pytest.raises(KeyboardInterrupt):
            sparseflow.optimize(net, X)
        assert differences(state(net), held) == []


def test_optimising_leaves_no_trace_but_its_forward(planned: Callable[..., Any]) -> None:
    net = small()
    from_rest(net, X)
    held, rng = state(net), torch.random.get_rng_state()
    planned(net, X)
    assert differences(state(net), held) == [("", "forward", "")]
    assert torch.equal(torch.random.get_rng_state(), rng)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


@pytest.mark.parametrize("sample", [None, X], ids=["without a sample", "with one"])
def test_a_missing_numba_names_its_extra(sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "numba" else find(name, *a)
    )
    net = small()
    held = state(net)
    with pytest.raises(MissingExtraError, match=r"`numba` .*sparseflow\[spiking\]"):
        sparseflow.optimize(net, sample)
    assert differences(state(net), held) == []


def test_a_cpu_has_nothing_for_halves(prefer: Prefer) -> None:
    prefer("sparse")
    net = small()
    expected = from_rest(net, X)
    sparseflow.optimize(net, X, dtype=torch.float16)
    why = "no backend for torch.float32 with dtype=torch.float16 on cpu"
    assert sparseflow.explain(net).summary == f"left as it was: {why}"
    assert same(from_rest(net, X), expected)
    half = small().to(torch.bfloat16)
    sparseflow.optimize(half, X.to(torch.bfloat16))
    assert "no backend for torch.bfloat16 on cpu" in sparseflow.explain(half).summary


# --- the static policy --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "block"), [(40, 16), (32, 16), (16, 8), (8, 4), (7, None)])
def test_the_static_policy_goes_by_height(size: int, block: int | None) -> None:
    net, x = small(), images(1, 1, size=size)
    expected = from_rest(net, x)
    sparseflow.optimize(net, x, policy="static")
    for name in ("conv2", "conv3"):
        conv = net.get_submodule(name)
        assert isinstance(conv, SparseConv2d) == (block is not None)
        assert block is None or (conv.block_size, conv.backend) == (block, "events")
    assert not isinstance(net.conv1, SparseConv2d)
    assert same(from_rest(net, x), expected)
    rows = {row.name: row for row in sparseflow.explain(net).layers}
    assert rows["conv2"].why == (
        f"{size} rows: blocks of {block}"
        if block
        else f"{size} rows: below 8 the blocks cost more than they save"
    )
    assert rows["conv1"].why == "fed by the network's input"


def test_the_static_policy_leaves_what_it_cannot_replace() -> None:
    class Odd(Small):
        def __init__(self) -> None:
            super().__init__()
            self.conv3 = layer.Conv2d(6, 8, 1, padding=1)
            functional.set_step_mode(self, "m")

        def features(self, x: torch.Tensor) -> torch.Tensor:
            s = self.sn1(self.bn1(self.conv1(x)))
            s = self.sn2(self.bn2(self.conv2(self.bn2(self.conv2(s)) * 0 + s)))
            return self.sn3(self.conv3(s))

    net = ready(Odd())
    expected = from_rest(net, X)
    sparseflow.optimize(net, X, policy="static")
    assert not any(isinstance(m, SparseConv2d) for m in net.modules())
    rows = {row.name: row for row in sparseflow.explain(net).layers}
    assert "padding (1, 1)" in rows["conv3"].why and "called 2 times" in rows["conv2"].why
    assert same(from_rest(net, X), expected)


def test_the_static_policy_without_numba_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparseflow.spiking import modules

    monkeypatch.setattr(modules, "find_spec", lambda name: None)
    net = small()
    expected = from_rest(net, X)
    sparseflow.optimize(net, X, policy="static")
    assert "extra `spiking`" in sparseflow.explain(net).layers[1].why
    assert same(from_rest(net, X), expected)


# --- the cache ----------------------------------------------------------------------------------------------


def test_decisions_are_remembered(prefer: Prefer, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    times = prefer("sparse", "dense")
    net = small()
    sparseflow.optimize(net, X, cache=file)
    assert len(times.asked) == 4 and file.exists()
    first = {name: d.model_dump(exclude={"remembered"}) for name, d in accelerated(net).decisions.items()}
    times.asked.clear()
    other = small()
    sparseflow.optimize(other, X, cache=file)
    assert times.asked == [("own", "plan")], "groups are remembered; the whole is always checked"
    again = accelerated(other).decisions
    assert all(d.remembered for d in again.values())
    assert {name: d.model_dump(exclude={"remembered"}) for name, d in again.items()} == first
    assert ways(other) == ways(net)
    times.asked.clear()
    sparseflow.optimize(small(), images(3, 4), cache=file)
    assert len(times.asked) == 4, "another batch is another shape"


def test_groups_of_different_sizes_do_not_share_a_decision(prefer: Prefer, tmp_path: Path) -> None:
    class Neurons(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool, self.a, self.b = nn.AvgPool2d(2), neuron.IFNode(), neuron.IFNode()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.pool(self.a(x)))

    times = prefer("dense")
    sparseflow.optimize(Neurons().eval(), images(2), cache=tmp_path / "c.json")
    assert times.asked == [("module", "dense"), ("module", "dense"), ("own", "plan")]


@pytest.mark.parametrize("kind", ["plan", "layers"])
def test_a_cache_that_cannot_be_written_does_not_cost_the_optimisation(
    kind: str, prefer: Prefer, tmp_path: Path
) -> None:
    prefer("sparse", "events")
    (tmp_path / "file").write_text("")
    build, options = KINDS[kind]
    net = build()
    expected = from_rest(net, X)
    with pytest.warns(UserWarning, match=r"cannot be (used|remembered)"):
        sparseflow.optimize(net, X, cache=tmp_path / "file" / "decisions.json", **options)
    assert accelerated(net).whole is not None and same(from_rest(net, X), expected)


def test_a_damaged_cache_is_rebuilt(prefer: Prefer, tmp_path: Path) -> None:
    times = prefer("sparse")
    file = tmp_path / "c.json"
    file.write_text("{")
    with pytest.warns(UserWarning, match="rebuilt"):
        sparseflow.optimize(small(), X, cache=file)
    times.asked.clear()
    sparseflow.optimize(small(), X, cache=file)
    assert times.asked == [("own", "plan")]


def test_no_cache_is_written_when_none_is_wanted(
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
        told: list[tuple[str, int, int]] = []
        sparseflow.optimize(build(), X, progress=lambda *a, told=told: told.append(a))
        parts = [done / total for _, done, total in told]
        assert parts == sorted(parts) and parts[0] >= 0 and parts[-1] <= 1 and len(told) >= 2


def test_layer_times(planned: Callable[..., Any]) -> None:
    net = small()
    from_rest(net, X)
    before = membranes(net)
    planned(net, X)
    times = sparseflow.layer_times(net, X)
    assert list(times) == ["conv1", "conv2", "conv3"] and all(ms > 0 for ms in times.values())
    assert same(membranes(net), before)
    assert list(sparseflow.layer_times(net, images(3, 4))) == list(times), "measured when first asked about"
    with pytest.raises(ModelError, match="has not been optimised"):
        sparseflow.layer_times(small(), X)
    with pytest.raises(ModelError, match="has not been optimised"):
        sparseflow.layer_times(np.zeros(3), X)  # type: ignore[arg-type]


def test_layer_times_of_a_network_left_as_it_was(prefer: Prefer) -> None:
    prefer("sparse", plan=9.0)
    net = small()
    sparseflow.optimize(net, X)
    assert sparseflow.layer_times(net, X) == {}
