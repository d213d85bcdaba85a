"""Plans compute exactly what their network computes, in every mode of each group."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("spikingjelly")
pytest.importorskip("numba")

from spikingjelly.activation_based import functional, layer, neuron

from sparseflow.errors import RunError
from sparseflow.spiking.backends.events import format
from sparseflow.spiking.backends.events.backend import EventBackend
from sparseflow.spiking.graph.analysis import analyze
from sparseflow.spiking.graph.registry import register_neuron, unregister_neuron
from sparseflow.spiking.runtime.feature_form import FeatureForm
from sparseflow.spiking.runtime.plan import Plan, SpikeTensor
from tests.spiking.families import BY_VALUE, CASES, FAMILIES
from tests.spiking.nets import (
    Constant,
    Loop,
    Small,
    dyadic,
    force,
    from_rest,
    images,
    membranes,
    planned,
    ready,
    same,
    small,
)

WAYS = ("module", "dense", "sparse")


def run_twice(net: nn.Module, run: Callable[..., Any], x: torch.Tensor) -> list[Any]:
    """Return outputs and membranes of two consecutive calls of a network or its plan from rest."""
    functional.reset_net(net)
    with torch.no_grad():
        return [(run(x), membranes(net)) for _ in range(2)]


def agree_twice(actual: list[Any], expected: list[Any], *, exact: bool = True) -> None:
    """Compare the results of `run_twice`."""
    assert not same(expected[0][1], expected[1][1]), "the second call starts from the first one's membranes"
    if exact:
        assert same(actual, expected)
    else:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


def agree(net: nn.Module, x: torch.Tensor, group_mode: str) -> dict[str, str]:
    """Check outputs and membranes of two consecutive calls from rest. Returns each group's mode."""
    plan = planned(net, x)
    ways = force(plan, group_mode, x)
    agree_twice(run_twice(net, plan.run, x), run_twice(net, net, x))
    return ways


# --- the thirteen families ----------------------------------------------------------------------------------


SPARSE_GROUPS = {
    "spiking_resnet": 8,
    "sew_resnet": 13,
    "ms_resnet": 6,
    "spiking_vgg": 3,
    "parametric_lif_net": 3,
    "spikformer": 8,
    "qkformer": 21,
    "spike_driven_transformer": 10,
    "maxformer": 16,
    "masnn": 4,
    "snas_net": 3,
    "spike_dhs": 37,
    "spiking_vggws_ottt": 0,
}
"""Numbers of groups that run sparse if all of them should."""


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_every_family_in_every_group_mode(name: str, mode: str) -> None:
    net, x = FAMILIES[name](mode)
    dyadic(net)
    x = x.mul(16).round().div(16)
    plan = planned(net, x)
    expected = run_twice(net, net, x)
    for group_mode in WAYS:
        ways = force(plan, group_mode, x)
        agree_twice(run_twice(net, plan.run, x), expected, exact=name not in BY_VALUE)
        assert group_mode == "module" or not ways or set(ways.values()) & {group_mode, "dense"}
        assert list(ways.values()).count("sparse") == (SPARSE_GROUPS[name] if group_mode == "sparse" else 0)


# --- neurons and layers -------------------------------------------------------------------------------------

NEURONS: dict[str, Callable[[], nn.Module]] = {
    "IF": neuron.IFNode,
    "IF soft": lambda: neuron.IFNode(v_reset=None),
    "IF reset to -0.5": lambda: neuron.IFNode(v_threshold=0.75, v_reset=-0.5),
    "LIF": neuron.LIFNode,
    "LIF without decayed input": lambda: neuron.LIFNode(decay_input=False),
    "LIF soft": lambda: neuron.LIFNode(tau=2.0, v_reset=None),
    "LIF reset to 0.25": lambda: neuron.LIFNode(tau=2.0, v_reset=0.25),
    "LIF reset to -1, input whole": lambda: neuron.LIFNode(tau=2.0, v_reset=-1.0, decay_input=False),
    "PLIF": lambda: neuron.ParametricLIFNode(init_tau=2.0),
    "PLIF soft": lambda: neuron.ParametricLIFNode(init_tau=2.0, v_reset=None, decay_input=False),
}


@pytest.mark.parametrize("group_mode", ["dense", "sparse"])
@pytest.mark.parametrize("mode", ["s", "m"])
@pytest.mark.parametrize("make", NEURONS.values(), ids=NEURONS)
def test_every_neuron(make: Any, mode: str, group_mode: str) -> None:
    x = images(3, 2) if mode == "m" else images(2)
    ways = agree(small(mode, make), x, group_mode)
    assert ways == {"conv1": "dense", "conv2": group_mode, "conv3": group_mode}


@pytest.mark.parametrize("group_mode", ["dense", "sparse"])
@pytest.mark.parametrize(("bias", "affine"), [(True, True), (True, False), (False, False)])
def test_bias_and_plain_batchnorm(bias: bool, affine: bool, group_mode: str) -> None:
    agree(small(bias=bias, affine=affine), images(3, 2), group_mode)


@pytest.mark.parametrize("group_mode", ["dense", "sparse"])
@pytest.mark.parametrize(
    "conv",
    [
        lambda: layer.Conv2d(6, 6, 3, stride=2, padding=1, step_mode="m"),
        lambda: layer.Conv2d(6, 6, 3, padding="same", step_mode="m"),
        lambda: layer.Conv2d(6, 6, 3, padding="valid", step_mode="m"),
        lambda: layer.Conv2d(6, 6, 3, stride=2, step_mode="m"),
        lambda: layer.Conv2d(6, 6, 1, stride=2, step_mode="m"),
        lambda: layer.Conv2d(6, 6, 1, padding=1, step_mode="m"),
        lambda: layer.Conv2d(6, 6, 1, step_mode="m"),
    ],
)
def test_every_geometry_at_odd_sizes(conv: Any, group_mode: str) -> None:
    net = Small()
    net.conv2 = conv()
    ready(net)
    for size in (3, 5, 8):
        ways = agree(net, images(3, 1, size=size), group_mode)
        assert ways["conv2"] == group_mode


class Resnet(Small):
    """Residuals before and behind neurons, stacked, strided, and through an average pool."""

    def __init__(self, mode: str) -> None:
        super().__init__(mode)
        self.conv4, self.sn4 = layer.Conv2d(6, 8, 3, stride=2, padding=1), neuron.LIFNode()
        self.down = layer.Conv2d(6, 8, 1, stride=2)
        self.conv5, self.sn5 = layer.Conv2d(8, 8, 3, padding=1), neuron.IFNode()
        self.pool = layer.AvgPool2d(2)
        self.conv6, self.sn6 = layer.Conv2d(8, 8, 3, padding=1), neuron.IFNode()
        functional.set_step_mode(self, mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.sn1(self.bn1(self.conv1(x)))
        b = self.sn2(self.bn2(self.conv2(a)) + a + a * 2)
        c = self.sn4(self.conv4(b) + self.down(a))
        d = self.sn5(self.conv5(c)) + c  # small integers
        e = self.sn6(self.conv6(self.pool(d)) + self.pool(c)) + self.pool(d)
        return self.fc(e.flatten(-2).mean(-1))


@pytest.mark.parametrize("group_mode", ["dense", "sparse"])
@pytest.mark.parametrize("mode", ["s", "m"])
def test_residuals_of_every_kind(mode: str, group_mode: str) -> None:
    agree(ready(Resnet(mode)), images(3, 2) if mode == "m" else images(2), group_mode)


@pytest.mark.parametrize("group_mode", ["dense", "sparse"])
def test_integers_go_through_several_sew_blocks(group_mode: str) -> None:
    class Sew(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = self.sn1(self.bn1(self.conv1(x)))
            b = self.sn2(self.bn2(self.conv2(a))) + a
            c = b + a + b  # up to 5, outside of every group
            return self.fc(self.sn3(self.conv3(c)).flatten(-2).mean(-1))

    agree(ready(Sew()), images(3, 2), group_mode)


@pytest.mark.parametrize("group_mode", ["dense", "sparse"])
def test_shared_convolution_and_shared_neuron(group_mode: str) -> None:
    class Shared(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = self.sn1(self.bn1(self.conv1(x)))
            b = self.sn2(self.bn2(self.conv2(a)))
            c = self.sn2(self.bn2(self.conv2(b)))
            return self.fc(self.sn3(self.conv3(c)).flatten(-2).mean(-1))

    ways = agree(ready(Shared()), images(3, 2), group_mode)
    assert set(ways) == {"conv1", "conv3"}


@pytest.mark.parametrize("group_mode", ["dense", "sparse"])
@pytest.mark.parametrize("pool", [nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d((1, 1)), nn.AvgPool2d(2)])
def test_pools_read_spikes(pool: nn.Module, group_mode: str) -> None:
    class Pooled(Small):
        def __init__(self) -> None:
            super().__init__("s")
            self.pool = pool
            self.fc = nn.LazyLinear(5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.pool(self.features(x)).flatten(1))

    net = Pooled()
    net(images(2))
    agree(ready(net), images(2), group_mode)


# --- shapes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_mode", WAYS)
def test_constant_stem_is_computed_once(group_mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = ready(Constant()), images(2)
    agree(net, x, group_mode)
    plan = planned(net, x)
    force(plan, group_mode, x)
    observed: list[tuple[int, ...]] = []
    convolve = F.conv2d
    monkeypatch.setattr(
        F, "conv2d", lambda x, *a, **k: observed.append(tuple(x.shape)) or convolve(x, *a, **k)
    )
    functional.reset_net(net)
    with torch.no_grad():
        plan.run(x)
    assert observed[0] == (2, 3, 8, 8)


class _RepeatedBatch(Small):
    """Repeats the features of one image over the batch, not over time."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn1(self.conv1(x.unsqueeze(0))).repeat(2, 1, 1, 1)
        return self.sn3(self.conv3(self.sn2(self.bn2(self.conv2(self.sn1(x))))))


@pytest.mark.parametrize("group_mode", WAYS)
def test_repetition_over_the_batch_is_not_one_over_time(group_mode: str) -> None:
    agree(ready(_RepeatedBatch("s")), images(3, 1)[0, 0], group_mode)


@pytest.mark.parametrize("group_mode", ["dense", "sparse"])
def test_plan_runs_other_batch_and_image_sizes(group_mode: str) -> None:
    net = small()
    plan = planned(net, images(3, 2))
    force(plan, group_mode, images(3, 2))
    for x in (images(3, 5), images(3, 1, size=12), images(1, 2), images(7, 1, size=6), images(3, 2)):
        expected, v = from_rest(net, x), membranes(net)
        functional.reset_net(net)
        assert same(plan.run(x), expected) and same(membranes(net), v)


def test_prepared_group_fits_its_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend may allocate buffers for the shape that it gets."""
    monkeypatch.setattr(EventBackend, "shape_agnostic", False)
    prepare = EventBackend.prepare

    def strict(self: EventBackend, spec: Any, shape: Any, *args: Any) -> Any:
        group = prepare(self, spec, shape, *args)

        def run(*args: Any, **kwargs: Any) -> Any:
            out, v = group(*args, **kwargs)
            assert v is not None and tuple(v.shape) == (shape.images, *shape.output)
            assert kwargs["steps"] == shape.steps
            return out, v

        return run

    monkeypatch.setattr(EventBackend, "prepare", strict)
    net = small()
    plan = planned(net, images(3, 2))
    for x in (images(3, 2), images(3, 5), images(2, 5), images(3, 2)):
        for group_mode in ("dense", "sparse", "dense"):
            for group in plan.groups:
                group.mode = "dense" if group.name == "conv1" else group_mode  # type: ignore[assignment]
            functional.reset_net(net)
            with torch.no_grad():
                plan.run(x)


@pytest.mark.parametrize("group_mode", ["dense", "sparse"])
@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.flatten(0, 1).to(memory_format=torch.channels_last).unflatten(0, x.shape[:2]),
        lambda x: x[:1].expand(3, -1, -1, -1, -1),
        lambda x: x.flip(-1).transpose(-1, -2),
        lambda x: torch.stack([x, x], -1)[..., 0],
    ],
    ids=["channels last", "expanded", "transposed", "strided"],
)
def test_memory_layouts(layout: Any, group_mode: str) -> None:
    agree(small(), layout(images(3, 2)), group_mode)


@pytest.mark.parametrize("group_mode", ["dense", "sparse"])
def test_membranes_of_another_batch_fail_as_in_the_network(group_mode: str) -> None:
    net = small()
    plan = planned(net, images(3, 2))
    force(plan, group_mode, images(3, 2))
    functional.reset_net(net)
    with torch.no_grad():
        expected = [net(images(3, n)) for n in (2, 3, 3)], membranes(net)
        functional.reset_net(net)
        actual = [plan.run(images(3, n)) for n in (2, 3, 3)], membranes(net)
    assert same(actual, expected)


@pytest.mark.parametrize("group_mode", ["dense", "sparse"])
def test_membrane_set_by_hand_is_the_initial_state(group_mode: str) -> None:
    net, x = small(), images(3, 2)
    plan = planned(net, x)
    force(plan, group_mode, x)
    functional.reset_net(net)
    net.sn2.v = 0.25
    with torch.no_grad():
        expected, v = net(x), membranes(net)
        functional.reset_net(net)
        net.sn2.v = 0.25
        assert same(plan.run(x), expected) and same(membranes(net), v)
    assert not same(from_rest(net, x), expected)


class Shifted(Small):
    """Adds a parameter to what reaches a neuron."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(3)))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.sn1(self.bn1(self.conv1(x)))
        x = self.sn2(self.bn2(self.conv2(x)) + self.shift)
        return self.sn3(self.conv3(x))


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((1, 2, 6, 8, 8), None),
        ((3, 2, 6, 8, 8), None),
        ((6, 1, 1), "dimensions of its layers"),
        ((1, 1, 6, 1, 1), "different shapes"),
        ((1, 1, 6, 8, 8), "different shapes"),
        ((3, 1, 6, 8, 8), "different shapes"),
        ((1, 2, 1, 8, 8), "different shapes"),
    ],
)
def test_broadcast_additions(shape: tuple[int, ...], reason: str | None) -> None:
    net, x = ready(Shifted(*shape)), images(3, 2)
    plan = planned(net, x)
    actual: list[str | None] = []

    def record_mismatch(group: Any, env: Any) -> SpikeTensor:
        actual.append(group.get_shape_mismatch(env))
        return group.run(env)

    with torch.no_grad():
        plan.run(x, group_runner=record_mismatch)
    assert actual[1] == reason or (reason is not None and reason in str(actual[1]))
    ways = agree(net, x, "sparse")
    assert ways["conv2"] == ("module" if reason else "sparse")


def test_skip_broadcast_over_time_runs_the_modules() -> None:
    class First(Small):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            s = self.sn1(self.bn1(self.conv1(x)))
            return self.sn3(self.conv3(self.sn2(self.bn2(self.conv2(s)) + s[:1])))

    ways = agree(ready(First()), images(3, 2), "sparse")
    assert ways["conv2"] == "module"


# --- inputs and outputs -------------------------------------------------------------------------------------


def test_several_inputs_defaults_and_nested_outputs() -> None:
    class Rich(Small):
        def forward(  # type: ignore[override]
            self, x: torch.Tensor, y: torch.Tensor, scale: float = 2.0, mask: Any = None
        ) -> Any:
            a = self.sn1(self.bn1(self.conv1(x + y)))
            b = self.sn2(self.bn2(self.conv2(a)))
            out = self.fc(self.sn3(self.conv3(b)).flatten(-2).mean(-1)) * scale
            return {"out": out, "spikes": (a, [b])}

    net, x, y = ready(Rich()), images(3, 2), images(3, 2, seed=1)
    plan = planned(net, x, y)
    assert force(plan, "sparse", x, y)["conv2"] == "sparse"
    expected = from_rest(net, x, y)
    functional.reset_net(net)
    assert expected["spikes"][1][0].sum() > 0
    assert same(plan.run(x, y), expected)


def test_convolution_called_by_keyword() -> None:
    class Keyword(Small):
        def __init__(self) -> None:
            super().__init__("s")
            self.conv2 = nn.Conv2d(6, 6, 3, padding=1)

        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.sn1(self.bn1(self.conv1(x)))
            return self.sn3(self.conv3(self.sn2(self.conv2(input=x))))

    assert agree(ready(Keyword()), images(2), "sparse")["conv2"] == "sparse"


def test_values_are_dropped_after_their_last_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = small(), images(3, 2)
    plan = planned(net, x)
    force(plan, "sparse", x)
    alive: list[int] = []

    def record_values(group: Any, env: Any) -> SpikeTensor:
        alive.append(len(env))
        return group.run(env)

    with torch.no_grad():
        plan.run(x, group_runner=record_values)
    assert alive == [1, 1, 1]


# --- forms of spikes ----------------------------------------------------------------------------------------


def test_spikes_convert_lazily_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = EventBackend()
    dense = (images(3, 2) > 0.5).float()
    calls: list[str] = []
    for name in ("encode", "decode"):
        original = getattr(EventBackend, name)
        monkeypatch.setattr(
            EventBackend, name, lambda self, *a, name=name, f=original: calls.append(name) or f(self, *a)
        )
    spikes = SpikeTensor(backend, dense=dense, form=FeatureForm(), dtype=torch.float32)
    assert spikes.dense is dense and spikes.sequence is dense and calls == []
    assert spikes.native is spikes.native and calls == ["encode"]
    back = SpikeTensor(backend, native=spikes.native, form=FeatureForm(), dtype=torch.float32)
    assert same(back.spatial_mean(), dense.mean((-2, -1))) and calls == ["encode"]
    assert same(back.dense, dense) and same(back.dense, dense) and calls == ["encode", "decode"]
    single = SpikeTensor(backend, dense=dense[0], form=FeatureForm(single_step=True), dtype=torch.float32)
    assert same(single.sequence, dense[:1]) and same(single.dense, dense[0])
    second = SpikeTensor(
        backend, native=single.native, form=FeatureForm(single_step=True), dtype=torch.float32
    )
    assert same(second.dense, dense[0]) and same(second.spatial_mean(), dense[0].mean((-2, -1)))


def test_groups_emit_what_their_readers_take() -> None:
    net, x = small(), images(3, 2)
    plan = planned(net, x)
    force(plan, "sparse", x)
    assert [group.output_form for group in plan.groups] == ["native", "native", "dense"]
    force(plan, "dense", x)
    assert [group.output_form for group in plan.groups] == ["dense", "dense", "dense"]


def test_neuron_with_undeclared_outputs_raises() -> None:
    class Liar(neuron.IFNode):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            assert isinstance(out, torch.Tensor)
            return out * 0.5

    register_neuron(Liar)
    try:
        net = ready(Small())
        net.sn1 = Liar(step_mode="m")
        plan = planned_without_sample(net)
        with torch.no_grad(), pytest.raises(RunError, match=r"\(.*\)"):
            assert [group.name for group in plan.groups] == ["conv2", "conv3"]
            plan.groups[0].mode = "sparse"
            plan.run(images(3, 2))
    finally:
        unregister_neuron(Liar)


def planned_without_sample(net: nn.Module) -> Any:
    from sparseflow.spiking.runtime.plan import Plan

    return Plan(analyze(net), EventBackend())


# --- when the network's own code must run -------------------------------------------------------------------


def test_plan_hooks_on_bypassed_modules_prevent_it() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(small())
            self.head = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x))

    net, x = Nested().eval(), images(3, 2)
    plan = planned(net, x)
    force(plan, "sparse", x)
    assert plan.get_bypass_conflict() is None and not plan.needs_module_calls()
    for name in (
        "body",
        "body.0",
        "body.0.conv2",
        "body.0.bn2",
        "body.0.sn2",
        "body.0.sn2.surrogate_function",
    ):
        for register in ("register_forward_hook", "register_forward_pre_hook"):
            handle = getattr(net.get_submodule(name), register)(lambda *a: None)
            assert "hooks" in str(plan.get_bypass_conflict()) and plan.needs_module_calls()
            handle.remove()
            assert plan.get_bypass_conflict() is None
    calls: list[int] = []
    handle = net.head.register_forward_hook(lambda *a: calls.append(1))
    assert plan.get_bypass_conflict() is None and plan.needs_module_calls()
    with torch.no_grad():
        plan.run(x)
    assert calls == [1]
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda *a: None)
    assert plan.get_bypass_conflict() is not None
    handle.remove()
    net.body[0].conv2.forward = lambda x: x  # type: ignore[union-attr, method-assign]
    assert "Conv2d" in str(plan.get_bypass_conflict())
    del net.body[0].conv2.forward  # type: ignore[union-attr]
    assert plan.get_bypass_conflict() is None
    net.body[0].bn2.train()  # type: ignore[union-attr]
    assert "training mode" in str(plan.get_bypass_conflict())


@pytest.mark.parametrize("group_mode", ["dense", "sparse"])
def test_dropped_weights_are_prepared_again(group_mode: str) -> None:
    net, x = small(), images(3, 2)
    plan = planned(net, x)
    force(plan, group_mode, x)
    before = from_rest(net, x)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(-1)
    expected = from_rest(net, x)
    functional.reset_net(net)
    plan.invalidate()
    assert not same(before, expected) and same(plan.run(x), expected)


# --- memory -------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Tracks the bytes of tensors that are created while it is active, and of pooled events.

    Attributes:
        peak: The most that were alive at once. What an operation allocates and frees inside is not seen.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.current_bytes = self.peak = 0
        self._known: dict[int, int] = {}
        pool = format._BufferPool
        take, give = pool.acquire, pool.release
        monkeypatch.setattr(pool, "acquire", lambda p, nbytes: self._count(take(p, nbytes), 1))
        monkeypatch.setattr(pool, "release", lambda p, buffer: give(p, self._count(buffer, -1)))

    def _count(self, buffer: Any, sign: int) -> Any:
        self._add(sign * buffer.raw.nbytes)
        return buffer

    def _add(self, nbytes: int) -> None:
        self.current_bytes += nbytes
        self.peak = max(self.peak, self.current_bytes)

    def _see(self, tree: Any, *, new: bool) -> None:
        for item in tree_leaves(tree):
            if isinstance(item, torch.Tensor) and item.untyped_storage()._cdata not in self._known:
                storage = item.untyped_storage()
                self._known[storage._cdata] = storage.nbytes() if new else 0
                self._add(self._known[storage._cdata])
                weakref.finalize(storage, self._drop, storage._cdata)

    def _drop(self, key: int) -> None:
        self.current_bytes -= self._known.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._see((args, kwargs or {}), new=False)
        out = func(*args, **(kwargs or {}))
        self._see(out, new=True)
        return out


@pytest.mark.parametrize(
    ("family", "images_", "group_mode"),
    [
        ("small", 1, "dense"), ("small", 8, "sparse"),
        ("spiking_resnet", 1, "dense"), ("spiking_resnet", 8, "sparse"),
        ("sew_resnet", 1, "sparse"), ("sew_resnet", 8, "dense"),
    ],
)  # fmt: skip
def test_plan_frees_values_early(
    family: str, images_: int, group_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak memory of a plan is at most that of the network's own code."""
    if family == "small":
        net, x = small(channels=32), images(4, images_, size=16)
    else:
        net, x = FAMILIES[family]("m")
        x = x.repeat(2, images_, 1, 1, 1)
    plan = planned(net, x)
    force(plan, group_mode, x)
    peaks = []
    for run in (net, plan.run):
        for _ in range(2):
            functional.reset_net(net)
            with monkeypatch.context() as patch, torch.no_grad():
                live = LiveBytes(patch)
                with live:
                    run(x)
            peaks.append(live.peak)
    _, original, _, network_bytes = peaks  # the first call of each prepares
    assert 0 < network_bytes <= original, f"{network_bytes} bytes against {original}"


def test_plans_of_one_network_share_shape_agnostic_groups() -> None:
    net = small()
    shared: Any = weakref.WeakValueDictionary()
    plans = [Plan(analyze(net, (x,)), EventBackend(), shared) for x in (images(3, 2), images(3, 5))]
    for plan, x in zip(plans, (images(3, 2), images(3, 5)), strict=True):
        force(plan, "sparse", x)
    first, second = plans[0].groups[1], plans[1].groups[1]
    assert first._prepared["sparse"] is second._prepared["sparse"]
    for plan in plans:
        plan.invalidate()
    del first, second
    assert not shared, "forgotten weights take no memory"


# --- networks that fold the time axis into the batch --------------------------------------------------------


class _Container(Small):
    """Layers of torch in spikingjelly's containers."""

    def __init__(self) -> None:
        super().__init__()
        self.block1 = layer.SeqToANNContainer(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6))
        self.block2 = layer.SeqToANNContainer(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6))
        self.block3 = layer.MultiStepContainer(nn.Conv2d(6, 8, 1, stride=2))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.sn3(self.block3(self.sn2(self.block2(self.sn1(self.block1(x))))))


class _Flattened(Small):
    """Reshapes around each convolution, with a residual in the folded form."""

    def __init__(self) -> None:
        super().__init__()
        functional.set_step_mode(nn.ModuleList([self.conv1, self.bn1, self.conv2, self.bn2, self.conv3]), "s")

    def features(self, x: torch.Tensor) -> torch.Tensor:
        steps, batch = x.shape[:2]
        x = self.bn1(self.conv1(x.flatten(0, 1))).reshape(steps, batch, 6, 8, 8).contiguous()
        x = self.sn1(x)
        y = x.flatten(0, 1)
        y = self.bn2(self.conv2(y)) + y
        x = self.sn2(y.view(steps, -1, *y.shape[1:]))
        return self.sn3(self.conv3(x.flatten(0, 1)).unflatten(0, (steps, batch)))


class _TimeDistributed(nn.Module):
    """Runs a layer on [T * N, ...], as most published code does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = [x.shape[0], x.shape[1]]
        y = self.inner(x.reshape((shape[0] * shape[1], *x.shape[2:])))
        return y.view(shape + list(y.size())[1:])


class _Distributed(Small):
    """A max pooling and a ReLU in the folded form, too; every layer has its own wrapper."""

    def __init__(self) -> None:
        super().__init__()
        functional.set_step_mode(self, "s")
        functional.set_step_mode(nn.ModuleList([self.sn1, self.sn2, self.sn3, self.fc]), "m")
        self.pool = _TimeDistributed(nn.MaxPool2d(2))
        for name in ("conv1", "bn1", "conv2", "bn2", "conv3"):
            setattr(self, name, _TimeDistributed(getattr(self, name)))
        self.relu = _TimeDistributed(nn.ReLU())

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.sn1(self.bn1(self.conv1(x))))
        x = self.sn2(self.bn2(self.conv2(x)))
        return self.sn3(self.relu(self.conv3(x)))


class _BatchFirst(Small):
    """A loop over the time steps of [N, T, 3, 8, 8], whose stem reads the first step only."""

    def __init__(self) -> None:
        super().__init__("s")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1)
        spikes = []
        for _ in range(x.shape[1]):
            y = self.sn1(self.bn1(self.conv1(x[:, 0])))
            y = self.sn2(self.bn2(self.conv2(y)) + y)
            spikes.append(self.sn3(self.conv3(y)).unsqueeze(0))
        return self.fc(torch.cat(spikes, dim=0).flatten(-2).mean(-1))


FOLDED: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "containers": (_Container, {"block1.0": "dense", "block2.0": "sparse", "block3.0": "sparse"}),
    "reshapes": (_Flattened, {"conv1": "dense", "conv2": "sparse", "conv3": "sparse"}),
    "loop": (Loop, {"net.conv1": "dense", "net.conv2": "sparse", "net.conv3": "sparse"}),
    "batch first": (_BatchFirst, {"conv1": "dense", "conv2": "sparse", "conv3": "sparse"}),
    "wrappers": (
        _Distributed,
        {"conv1.inner": "dense", "conv2.inner": "sparse", "sn3": "dense", "conv3.inner": "sparse"},
    ),
}


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("group_mode", WAYS)
@pytest.mark.parametrize("name", FOLDED)
def test_networks_that_fold_the_time_axis(name: str, group_mode: str, batch_size: int) -> None:
    build, expected = FOLDED[name]
    net = ready(build())
    ways = agree(net, images(3, batch_size), group_mode)
    assert group_mode != "sparse" or ways == expected


def test_a_folded_network_passes_spikes_in_native_form() -> None:
    net = ready(_Distributed())
    plan = planned(net, images(3, 2))
    force(plan, "sparse", images(3, 2))
    assert [group.output_form for group in plan.groups[:3]] == ["native", "native", "dense"]
    calls = [step.node.target for step in plan._steps if step.group is None and step.node.op == "call_method"]
    assert calls == ["flatten", "mean"], "those of the classifier"


# --- convolutions whose output no fused neuron reads --------------------------------------------------------


class _Pooled(Small):
    """A slice between convolution and neuron, and a residual of the neurons' inputs."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv1(x)
        y = self.bn2(self.conv2(self.sn1(x)))
        return self.sn3(self.conv3(self.sn2(y + x))[..., ::2, ::2])


def test_convolutions_without_a_neuron_to_fuse() -> None:
    x = images(3, 2)
    net = ready(_Pooled())
    expected = {"sn1": "dense", "conv2": "sparse", "conv3": "sparse", "sn3": "dense"}
    assert agree(net, x, "sparse") == expected
    assert agree(net, x, "dense") == dict.fromkeys(expected, "dense")
    net = ready(_Pooled())
    functional.set_step_mode(net, "s")
    assert agree(net, images(2), "sparse") == expected


@pytest.mark.parametrize("make", [neuron.KLIFNode, neuron.QIFNode, lambda: neuron.PSN(3)])
def test_convolutions_before_neurons_of_other_dynamics(make: Callable[[], nn.Module]) -> None:
    net = small("m", make)
    x = images(3, 2)
    plan = planned(net, x)
    assert force(plan, "sparse", x) == {"conv1": "dense", "conv2": "sparse", "conv3": "sparse"}
    expected = from_rest(net, x)
    functional.reset_net(net)
    with torch.no_grad():
        assert same(plan.run(x), expected)


# --- linear layers and one-dimensional convolutions ---------------------------------------------------------


class _Head(Small):
    """Two linear layers with neurons behind the maps, and a classifier of spikes."""

    def __init__(self, step_mode: str = "m") -> None:
        super().__init__()
        self.fc1, self.bn4, self.sn4 = layer.Linear(8 * 16, 12), layer.BatchNorm1d(12), neuron.IFNode()
        self.fc2, self.sn5, self.fc = layer.Linear(12, 6, bias=False), neuron.LIFNode(), layer.Linear(6, 5)
        functional.set_step_mode(self, step_mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.sn4(self.bn4(self.fc1(self.features(x).flatten(-3))))
        return self.fc(self.sn5(self.fc2(x)))


class _Tokens(Small):
    """Layers of tokens [T, N, L, C] with the transposed BatchNorms of spiking transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.bn_q, self.sn_q = nn.Linear(8, 10), nn.BatchNorm1d(10), neuron.LIFNode(step_mode="m")
        self.mlp, self.sn_m = nn.Linear(10, 8, bias=False), neuron.LIFNode(step_mode="m")
        self.conv = nn.Conv1d(8, 7, 1)
        self.bn_c, self.sn_c = nn.BatchNorm1d(7), neuron.IFNode(step_mode="m")
        self.fc = layer.Linear(7, 5, step_mode="m")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x).flatten(3).transpose(-1, -2)
        steps, batch, length, _ = x.shape
        q = self.bn_q(self.q(x.flatten(0, 1)).transpose(-1, -2)).transpose(-1, -2)
        q = self.sn_q(q.reshape(steps, batch, length, -1).contiguous())
        x = x + self.sn_m(self.mlp(q))
        y = self.bn_c(self.conv(x.transpose(-1, -2).flatten(0, 1)))
        return self.fc(self.sn_c(y.reshape(steps, batch, 7, length)).mean(-1))


@pytest.mark.parametrize("group_mode", WAYS)
@pytest.mark.parametrize("mode", ["s", "m"])
def test_neurons_behind_linear_layers(mode: str, group_mode: str) -> None:
    net = ready(_Head(mode))
    ways = agree(net, images(3, 2) if mode == "m" else images(2), group_mode)
    assert {ways[name] for name in ("fc1", "fc2", "fc")} == {group_mode}


@pytest.mark.parametrize("group_mode", WAYS)
def test_neurons_behind_tokens_and_sequences(group_mode: str) -> None:
    ways = agree(ready(_Tokens()), images(3, 2), group_mode)
    assert {ways[name] for name in ("q", "mlp", "conv")} == {group_mode}


class _Classifier(Small):
    """A classifier in a container, behind maps of spikes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = layer.SeqToANNContainer(nn.Flatten(), nn.Linear(8 * 16, 12, bias=False))
        self.sn4, self.fc = neuron.IFNode(step_mode="m"), layer.SeqToANNContainer(nn.Linear(12, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.sn4(self.head(self.features(x))))


def test_classifier_in_containers() -> None:
    ways = agree(ready(_Classifier()), images(3, 2), "sparse")
    assert {ways[name] for name in ("head.1", "fc.0")} == {"sparse"}


@pytest.mark.parametrize("kind", ["map", "vector", "sequence", "tokens"])
@pytest.mark.parametrize("single_step", [False, True])
def test_feature_forms_are_inverse(kind: Any, single_step: bool) -> None:
    form = FeatureForm(kind, single_step)
    x = torch.randn(*range(2, 2 + form.rank))
    maps = form.to_maps(x)
    assert maps.dim() == 5 and torch.equal(form.from_maps(maps), x)
    assert torch.equal(form.reduce(form.expand(x)), x)
