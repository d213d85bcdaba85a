"""The GPU's backend: prepared groups against the reference, and whole plans against their networks, exactly.

Runs in Triton's interpreter where there is no GPU; there the twin stands in for the Hopper kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="the packed kernels need triton")
pytest.importorskip("spikingjelly")

from spikingjelly.activation_based import functional, neuron

from sparseflow.errors import InputError
from sparseflow.spiking.backends.base import ChannelLayout, ChannelOrder, GroupShape
from sparseflow.spiking.backends.packed import variant_timing
from sparseflow.spiking.backends.packed.backend import PackedBackend
from sparseflow.spiking.backends.packed.format import PackedSpikes, unpack
from sparseflow.spiking.backends.packed.hopper import group as hopper
from sparseflow.spiking.backends.packed.triton_fallback import TritonFallbackGroup
from sparseflow.spiking.backends.reference import run_group_reference
from sparseflow.spiking.backends.spec import GroupSpec
from sparseflow.spiking.graph.analysis import analyze
from sparseflow.spiking.models.spiking_resnet import lif_neuron, spiking_resnet
from sparseflow.spiking.runtime import channel_layout
from sparseflow.spiking.runtime.channel_layout import permute_group
from sparseflow.spiking.runtime.plan import GroupStep, NodeValues, Plan, SpikeTensor
from tests.spiking.backends.neurons import LIF, SHIFTED
from tests.spiking.backends.packed.cases import DEVICE, grid, seeded, source, spikes
from tests.spiking.nets import Small, force, images, membranes, ready, same

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.fixture(autouse=True)
def _exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a GPU: neither TF32 nor Winograd, which round even these weights.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)


# --- prepared groups --------------------------------------------------------------------------------------


def _shape(spec: GroupSpec, inputs: list[torch.Tensor], expected: torch.Tensor) -> GroupShape:
    t, n, c, h, w = expected.shape
    return GroupShape(
        steps=t,
        images=n,
        sources=tuple((x.shape[2], x.shape[3], x.shape[4]) for x in inputs),
        output=(c, h, w),
    )


def _values(out: Any) -> torch.Tensor:
    if isinstance(out, PackedSpikes):
        return unpack(out)
    return out.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("convolution", ["sparse", "dense"])
@pytest.mark.parametrize("post", [0, 1])
@pytest.mark.parametrize("out", ["native", "dense"])
def test_groups_are_the_reference(dtype: torch.dtype, convolution: Any, post: int, out: Any) -> None:
    g = seeded(1)
    first, second = source(g, 40, 70, 3, 2), source(g, 20, 70, 1, 2)
    spec = GroupSpec(
        sources=(first, second), bias=grid(g, 70), neuron=SHIFTED, skips=2, dense_inputs=2, post_skips=post
    )
    inputs = [spikes(g, 2, 1, 40, 5, 4), spikes(g, 2, 1, 20, 5, 4)]
    bits, integers = spikes(g, 2, 1, 70, 3, 2), 2 * spikes(g, 2, 1, 70, 3, 2)
    dense = [grid(g, 2, 1, 70, 3, 2), grid(g, 1, 1, 70, 3, 2)]
    posts = [3 * spikes(g, 2, 1, 70, 3, 2)] * post
    v = grid(g, 1, 70, 3, 2)
    before = v.clone()
    expected, expected_v = run_group_reference(spec, inputs, [bits, integers], dense, posts, v)
    backend = PackedBackend(DEVICE, dtype)
    shape = _shape(spec, inputs, expected)
    assert backend.get_unsupported_reason(spec, shape) is None
    prepared = backend.prepare(spec, shape, convolution)
    fed = [backend.encode(x, 1) if convolution == "sparse" else x.to(dtype) for x in inputs]
    actual, found_v = prepared(
        fed,
        [backend.encode(bits, 1), backend.encode(integers, 2)],
        [x.to(dtype) for x in dense],
        [backend.encode(x, 3) for x in posts],
        steps=2,
        v=v,
        out=out,
    )
    if out == "dense":
        assert actual.dtype == dtype
    else:
        assert isinstance(actual, torch.Tensor if post else PackedSpikes)
        assert actual.shape == expected.shape
    assert torch.equal(_values(actual), expected)
    assert found_v is not None and found_v.dtype == torch.float32 and torch.equal(found_v, expected_v)
    assert torch.equal(v, before), "the membrane handed in is the caller's"


@pytest.mark.parametrize("convolution", ["sparse", "dense"])
def test_prepared_group_returns_new_membranes_in_network_order(convolution: Any) -> None:
    g = seeded(8)
    spec = GroupSpec(sources=(source(g, 16, 24, 3),), bias=grid(g, 24), neuron=LIF)
    x = spikes(g, 2, 1, 16, 4, 4)
    shape = GroupShape(steps=2, images=1, sources=((16, 4, 4),), output=(24, 4, 4))
    order = ChannelOrder.from_permutation(torch.randperm(24, generator=g).to(DEVICE))
    backend = PackedBackend(DEVICE, torch.float32)
    moved = permute_group(spec, outputs=order.permutation)
    prepared = backend.prepare(moved, shape, convolution, ChannelLayout(output=order))
    fed = backend.encode(x, 1) if convolution == "sparse" else x
    v = expected_v = None
    for _ in range(3):
        expected, expected_v = run_group_reference(spec, [x], v=expected_v)
        before, start = v, None if v is None else v.clone()
        out, v = prepared([fed], [], [], [], steps=2, v=v, out="dense")
        assert v is not None and torch.equal(v, expected_v)
        assert torch.equal(out, expected[:, :, order.permutation])
        if before is not None:
            assert v.data_ptr() != before.data_ptr() and same(before, start)


def test_group_without_convolution_equals_reference() -> None:
    g = seeded(3)
    spec = GroupSpec(sources=(), bias=torch.zeros(8, device=DEVICE), neuron=LIF, dense_inputs=1)
    x = grid(g, 1, 2, 8, 3, 3) * 6
    expected, expected_v = run_group_reference(spec, [], (), [x], time_steps=4)
    backend = PackedBackend(DEVICE, torch.float32)
    shape = GroupShape(steps=4, images=2, sources=(), output=(8, 3, 3))
    assert "no convolution of spikes" in str(backend.get_unsupported_reason(spec, shape))
    actual, v = backend.prepare(spec, shape, "dense")([], [], [x], [], steps=4, v=None, out="native")
    assert torch.equal(_values(actual), expected)
    assert v is not None and torch.equal(v, expected_v)


def test_prepare_unsupported_group_raises() -> None:
    g = seeded(4)
    spec = GroupSpec(sources=(source(g, 8, 8, 3),), bias=grid(g, 8), neuron=LIF)
    shape = GroupShape(steps=2, images=1, sources=((8, 4, 4),), output=(8, 4, 4))
    backend = PackedBackend(DEVICE, torch.float16)
    assert backend.get_unsupported_reason(spec, shape) is None
    integers = replace(shape, max_value=2)
    assert backend.get_unsupported_reason(spec, integers) == "integer spikes do not fit into one bit"
    with pytest.raises(InputError, match="one bit"):
        backend.prepare(spec, integers, "sparse")
    with pytest.raises(InputError, match="float64"):
        PackedBackend(DEVICE, torch.float64)
    prepared = backend.prepare(spec, shape, "sparse")
    with pytest.raises(InputError, match="3 time steps, expected 2"):
        prepared([backend.encode(spikes(g, 3, 1, 8, 4, 4), 1)], [], [], [], steps=2, v=None, out="native")


def test_native_form_decodes_and_averages() -> None:
    backend = PackedBackend(DEVICE, torch.float16)
    x = spikes(seeded(5), 2, 3, 70, 4, 2)
    for native in (backend.encode(x.half(), 2), backend.encode(x.half(), 1)):
        assert torch.equal(backend.decode(native), x.half())
        assert torch.equal(backend.spatial_mean(native), x.mean(dim=(-2, -1)).half())
    assert isinstance(backend.encode(x, 1), PackedSpikes) and backend.encode_addend(x, 1) is x


def test_variants_are_timed_once_for_groups_of_the_same_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    queries: list[list[str]] = []

    def fastest(candidates: Any) -> str:
        queries.append(list(candidates))
        for prepare in candidates.values():
            prepare()()
        return queries[-1][-1]

    monkeypatch.setattr(variant_timing, "find_fastest", fastest)
    g = seeded(6)
    shape = GroupShape(steps=2, images=1, sources=((8, 2, 2),), output=(8, 2, 2))
    backend = PackedBackend(DEVICE, torch.float16, tune=3)
    for skips in (0, 0, 1):
        spec = GroupSpec(
            sources=(source(g, 8, 8, 1),), bias=grid(g, 8), neuron=LIF, skips=skips, dense_inputs=skips
        )
        prepared: Any = backend.prepare(spec, shape, "sparse")
        assert prepared.variant == queries[-1][-1]
    assert len(queries) == 2 and len(queries[0]) == 3
    default: Any = PackedBackend(DEVICE, torch.float16).prepare(spec, shape, "sparse")
    assert default.variant == queries[0][0] and len(queries) == 2


def test_on_hopper_the_gluon_kernel_gets_at_most_one_dense_addend(monkeypatch: pytest.MonkeyPatch) -> None:
    observed: list[tuple[int, int]] = []

    class Stand(TritonFallbackGroup):
        def __init__(self, spec: GroupSpec, *, variant: str | None, **options: Any) -> None:
            assert hopper.get_hopper_unsupported_reason(spec) is None
            super().__init__(spec, **options)

        def __call__(self, spikes: Any, skips: Any = (), dense: Any = (), *pending: Any) -> Any:
            observed.append((len(skips), len(dense)))
            return super().__call__(spikes, skips, dense, *pending)

    monkeypatch.setattr(PackedBackend, "is_hopper", lambda self: True)
    monkeypatch.setattr(hopper, "HopperGroup", Stand)
    g = seeded(7)
    spec = GroupSpec(sources=(source(g, 64, 64, 3),), bias=grid(g, 64), neuron=LIF, skips=1, dense_inputs=2)
    x, integers = spikes(g, 4, 1, 64, 4, 4), 2 * spikes(g, 4, 1, 64, 4, 4)
    dense = [grid(g, 1, 1, 64, 4, 4), grid(g, 4, 1, 64, 4, 4)]
    expected, expected_v = run_group_reference(spec, [x], [integers], dense)
    backend = PackedBackend(DEVICE, torch.float16)
    prepared: Any = backend.prepare(spec, _shape(spec, [x], expected), "sparse")
    assert prepared.kernel == "gluon"
    actual, v = prepared(
        [backend.encode(x, 1)], [backend.encode(integers, 2)], dense, [], steps=4, v=None, out="native"
    )
    assert observed == [(0, 1)]
    assert torch.equal(_values(actual), expected) and torch.equal(v, expected_v)
    odd = GroupSpec(sources=(source(g, 64, 48, 3),), bias=grid(g, 48), neuron=LIF)
    other: Any = backend.prepare(odd, replace(_shape(spec, [x], expected), output=(48, 4, 4)), "sparse")
    assert other.kernel == "triton"


# --- whole plans ------------------------------------------------------------------------------------------


def _run(plan: Plan, x: torch.Tensor) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the network's output and the dense spikes of every group."""
    observed: dict[str, torch.Tensor] = {}

    def record_group(group: GroupStep, env: NodeValues) -> SpikeTensor:
        actual = group.run(env)
        # The native form must survive until others read it; what it holds now is what they will see.
        observed[group.name] = actual.dense.clone()
        return actual

    with torch.no_grad():
        return plan.run(x, group_runner=record_group), observed


def _planned(net: nn.Module, x: torch.Tensor, dtype: torch.dtype = torch.float32) -> Plan:
    return Plan(analyze(net.to(DEVICE), (x.to(DEVICE),)), PackedBackend(DEVICE, dtype))


def _agree(
    net: nn.Module,
    x: torch.Tensor,
    group_mode: str,
    dtype: torch.dtype = torch.float32,
    plan: Plan | None = None,
) -> dict[str, str]:
    """Check every spike and membrane of two consecutive calls from rest."""
    net, x = net.to(DEVICE), x.to(DEVICE)
    plan = plan or _planned(net, x, dtype)
    functional.reset_net(net)
    expected = [(*_run(plan, x), membranes(net)) for _ in range(2)]
    ways = force(plan, group_mode, x)
    for run in expected:
        actual, observed, v = *_run(plan, x), membranes(net)
        for name, value in run[1].items():
            assert torch.equal(observed[name].float(), value.float()), name
        assert same(actual, run[0])
        for name, value in run[2].items():
            assert torch.equal(v[name].float(), value.float()), name
    assert all(value.unique().numel() > 1 for value in list(expected[0][1].values())[:3])
    assert not same(expected[0][2], expected[1][2]), "the second call starts from the first one's membranes"
    functional.reset_net(net)
    with torch.no_grad():
        original = net(x)
        functional.reset_net(net)
        assert torch.equal(plan.run(x), original)
    return ways


def _if_neuron() -> nn.Module:
    return neuron.IFNode(step_mode="m")


def _short(net: Any) -> nn.Module:
    """Keep one block per stage, with random exact weights."""
    for stage in (net.layer1, net.layer2, net.layer3, net.layer4):
        del stage[1:]
    return ready(net)


@pytest.mark.parametrize("group_mode", ["dense", "sparse"])
@pytest.mark.parametrize(("residual", "stem"), [("spiking", "imagenet"), ("sew_add", "cifar")])
def test_spiking_resnet_plan_equals_modules(residual: Any, stem: Any, group_mode: str) -> None:
    width = 16 if residual == "spiking" else 8  # two blocks of channels at the end, or one
    net = _short(spiking_resnet(18, width=width, T=2, residual=residual, stem=stem, neuron=_if_neuron))
    ways = _agree(net, images(1, size=16 if stem == "imagenet" else 8), group_mode)
    assert "module" not in ways.values()
    if group_mode == "sparse":
        # behind a SEW addition, integers reach a block's first convolution and its shortcut's
        used = [name for name, selected in ways.items() if selected == "sparse"]
        blocks = [f"layer{i}.0.conv" for i in (1, 2, 3, 4)]
        second = ["layer1.0.conv1", *(f"{block}2" for block in blocks)]
        both = [f"{block}{i}" for block in blocks for i in (1, 2)]
        assert sorted(used) == sorted(both if residual == "spiking" else second)


@pytest.mark.parametrize(
    ("residual", "stem", "group_mode"),
    [("spiking", "imagenet", "sparse"), ("sew_add", "cifar", "sparse"), ("sew_add", "cifar", "dense")],
)
def test_reordered_channels_equal_network(
    residual: Any, stem: Any, group_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = 16 if residual == "sew_add" else 8
    monkeypatch.setattr(PackedBackend, "channel_block", width // 2)
    monkeypatch.setattr(channel_layout, "MIN_REORDER_GAIN", 0.0)
    net = _short(spiking_resnet(18, width=width, T=2, residual=residual, stem=stem, neuron=_if_neuron))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, norm in net.named_modules():
            if isinstance(norm, nn.BatchNorm2d) and name != "bn1":
                # Channels whose sums never reach the threshold, whatever comes in.
                quiet = torch.randperm(norm.num_features, generator=generator)[: norm.num_features // 2]
                norm.weight[quiet], norm.bias[quiet] = 0.0, -8.0
    x = images(1, size=16 if stem == "imagenet" else 8).to(DEVICE)
    plan = _planned(net, x)
    with torch.no_grad():
        plan.choose_layouts(x)
    layouts = {group.name: group.layout for group in plan.groups}
    moved = {name for name, actual in layouts.items() if actual.output is not None}
    assert {"layer1.0.conv1", "layer2.0.conv1", "layer4.0.conv1"} <= moved
    assert any(actual.silent_fraction >= 0.25 for actual in layouts.values())
    assert any(actual.emit_activity for actual in layouts.values())
    _agree(net, x, group_mode, plan=plan)


def test_bottleneck_with_lif_neurons_equals_network() -> None:
    ways = _agree(_short(spiking_resnet(50, width=4, T=2, neuron=lif_neuron)), images(1), "sparse")
    assert list(ways.values()).count("sparse") == 12


@pytest.mark.parametrize("group_mode", ["dense", "sparse"])
@pytest.mark.parametrize("mode", ["s", "m"])
def test_step_modes_in_half_precision(mode: str, group_mode: str) -> None:
    net = ready(Small(mode, lif_neuron, channels=6) if mode == "m" else Small(mode), gain=2.0)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, (nn.Conv2d, nn.BatchNorm2d)):
                # few enough binary digits for fp16 sums to be exact
                for p in module.parameters():
                    p.mul_(4).round_().div_(4) if isinstance(module, nn.Conv2d) else p.fill_(1)
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
    x = images(3, 2) if mode == "m" else images(2)
    _agree(net.half(), x.mul(2).round().div(2).half(), group_mode, torch.float16)
