"""The plain-Triton group against the reference: bit for bit on a dyadic grid, and close to fp64 off it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the packed kernels need triton")

from sparseflow.errors import InputError
from sparseflow.spiking.backends.packed.format import pack, unpack
from sparseflow.spiking.backends.packed.triton_fallback import (
    TritonFallbackGroup,
    list_fallback_variants,
    pack_fallback_weights,
)
from sparseflow.spiking.backends.reference import run_group_reference
from sparseflow.spiking.backends.spec import GroupSpec, NeuronSpec, SpikeSource
from tests.spiking.backends.neurons import IF, LIF, NEURONS, SHIFTED
from tests.spiking.backends.packed.cases import (
    DEVICE,
    assert_activity,
    assert_packed,
    grid,
    rows,
    seeded,
    source,
    spikes,
)

pytestmark = pytest.mark.usefixtures("poisoned_empty")


def _spec(
    g: torch.Generator, *sources: SpikeSource, neuron: NeuronSpec = LIF, skips: int = 0, dense: int = 0
) -> GroupSpec:
    c_out = sources[0].weight.shape[0]
    return GroupSpec(sources=sources, bias=grid(g, c_out), neuron=neuron, skips=skips, dense_inputs=dense)


def _variants(spec: GroupSpec, *, parts: int = 1, T: int) -> list[str]:
    """Names of the variants that are different here: the interpreter has neither warps nor stages."""
    actual = list_fallback_variants(spec, T=T, parts=parts)
    if DEVICE == "cpu":
        actual = list({(v.bm, v.bn, v.tc): v for v in reversed(actual)}.values())[::-1]
    return [v.name for v in actual]


def _check(
    spec: GroupSpec,
    inputs: list[torch.Tensor],
    skips: list[torch.Tensor] | None = None,
    dense: list[torch.Tensor] | None = None,
    v: torch.Tensor | None = None,
    *,
    parts: int = 1,
    variant: str | None = None,
) -> None:
    skips, dense = skips or [], dense or []
    expected, expected_v = run_group_reference(spec, inputs, skips, dense, v=v)
    assert 0.02 < expected.mean() < 0.98, "the case says nothing: (almost) all neurons agree"
    t, n, _, h, w = expected.shape
    sizes = [(x.shape[3], x.shape[4]) for x in inputs]
    group = TritonFallbackGroup(
        spec, T=t, N=n, H=h, W=w, device=DEVICE, parts=parts, variant=variant, in_sizes=sizes
    )
    actual, found_v = group(
        [pack(x) for x in inputs],
        [pack(s) for s in skips],
        [rows(d) for d in dense],
        None if v is None else v.permute(0, 2, 3, 1).contiguous(),
        True,
    )
    assert_packed(actual, expected)
    assert found_v is not None and torch.equal(found_v.permute(0, 3, 1, 2), expected_v)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [(7, 5), (4, 6)])
def test_geometry(k: int, stride: int, size: tuple[int, int]) -> None:
    g = seeded(k + 10 * stride)
    spec = _spec(g, source(g, 70, 96, k, stride))
    _check(spec, [spikes(g, 2, 2, 70, *size, rate=0.4)])


@pytest.mark.parametrize(("k", "padding"), [(3, 0), (1, 1)])
def test_uncommon_padding(k: int, padding: int) -> None:
    g = seeded(2)
    single_source = SpikeSource(weight=grid(g, 64, 32, k, k), padding=padding)
    _check(_spec(g, single_source), [spikes(g, 2, 1, 32, 5, 4, rate=0.4)])


@pytest.mark.parametrize("name", NEURONS)
@pytest.mark.parametrize("steps", [1, 3, 4])
def test_neurons_and_steps(name: str, steps: int) -> None:
    g = seeded(3)
    spec = _spec(g, source(g, 64, 64, 3), neuron=NEURONS[name])
    v = grid(g, 1, 64, 4, 4)
    _check(spec, [spikes(g, steps, 1, 64, 4, 4)], v=v)


@pytest.mark.parametrize("parts", [1, 2])
def test_all_variants_with_everything(parts: int) -> None:
    g = seeded(4)
    first, second = source(g, 40, 128, 3, 2), source(g, 70, 128, 1, 2)
    spec = _spec(g, first, second, neuron=SHIFTED, skips=2, dense=2)
    inputs = [spikes(g, 4, 2, 40, 9, 7), spikes(g, 4, 2, 70, 9, 7)]
    skips = [spikes(g, 4, 2, 128, 5, 4), spikes(g, 4, 2, 128, 5, 4)]
    dense = [grid(g, 4, 2, 128, 5, 4).half(), grid(g, 1, 2, 128, 5, 4)]
    v = grid(g, 2, 128, 5, 4)
    names = [actual.name for actual in list_fallback_variants(spec, T=4, parts=parts)]
    assert len(names) == len(set(names)) >= 4
    for name in _variants(spec, T=4, parts=parts):
        _check(spec, inputs, skips, dense, v, parts=parts, variant=name)


@pytest.mark.parametrize("position", ["corner", "edge", "inside"])
def test_one_spike_reaches_its_neighbours_only(position: str) -> None:
    y, x = {"corner": (0, 0), "edge": (3, 5), "inside": (2, 2)}[position]
    weight = torch.ones(64, 64, 3, 3, device=DEVICE)
    spec = GroupSpec(
        sources=(SpikeSource(weight=weight, padding=1),), bias=torch.zeros(64, device=DEVICE), neuron=IF
    )
    s = torch.zeros(1, 2, 64, 4, 6, device=DEVICE)
    s[0, 1, 63, y, x] = 1
    group = TritonFallbackGroup(spec, T=1, N=2, H=4, W=6, device=DEVICE)
    fired = unpack(group([pack(s)])[0])
    expected = torch.zeros(4, 6, device=DEVICE)
    expected[max(y - 1, 0) : y + 2, max(x - 1, 0) : x + 2] = 1
    assert torch.equal(fired[0, 1], expected.expand(64, -1, -1))
    assert not fired[0, 0].any()


@pytest.mark.parametrize(("k", "stride"), [(3, 1), (3, 2), (1, 2)])
@pytest.mark.parametrize("size", [(5, 3), (4, 4), (1, 2)])
def test_full_images_see_zeros_around_them(k: int, stride: int, size: tuple[int, int]) -> None:
    g = seeded(10)
    silent = replace(IF, v_threshold=1e9)  # the membrane is the sum of all currents
    spec = replace(_spec(g, source(g, 64, 64, k, stride)), neuron=silent)
    x = torch.ones(2, 3, 64, *size, device=DEVICE)
    expected, expected_v = run_group_reference(spec, [x])
    _, _, _, h, w = expected.shape
    group = TritonFallbackGroup(spec, T=2, N=3, H=h, W=w, device=DEVICE, in_sizes=[size])
    v = group([pack(x)], write_v=True)[1]
    assert v is not None and torch.equal(v.permute(0, 3, 1, 2), expected_v)


@pytest.mark.parametrize(("c_out", "k", "rate"), [(70, 3, 0.02), (128, 1, 0.1)])
def test_activity_marks_what_fires(c_out: int, k: int, rate: float) -> None:
    g = seeded(11)
    spec = _spec(g, source(g, 64, c_out, k))
    spec = replace(spec, bias=torch.full((c_out,), -0.25, device=DEVICE))
    x = spikes(g, 2, 2, 64, 7, 5, rate=rate)
    for name in _variants(spec, T=2):
        group = TritonFallbackGroup(spec, T=2, N=2, H=7, W=5, device=DEVICE, variant=name, emit_activity=True)
        for fed in (x, torch.zeros_like(x)):
            actual = group([pack(fed)])[0]
            assert_packed(actual, run_group_reference(spec, [fed])[0])
            assert_activity(actual, 16)
            assert actual.activity is not None and actual.activity.any() == fed.any()


def test_every_channel_uses_its_weights() -> None:
    weight = torch.eye(128, device=DEVICE).reshape(128, 128, 1, 1)
    spec = GroupSpec(sources=(SpikeSource(weight=weight),), bias=torch.zeros(128, device=DEVICE), neuron=IF)
    s = spikes(seeded(5), 2, 1, 128, 5, 5)
    group = TritonFallbackGroup(spec, T=2, N=1, H=5, W=5, device=DEVICE)
    assert torch.equal(unpack(group([pack(s)])[0]), s)


def test_reused_buffers_give_zeros_after_spikes() -> None:
    g = seeded(6)
    spec = GroupSpec(sources=(source(g, 64, 96, 3),), bias=torch.zeros(96, device=DEVICE), neuron=IF)
    group = TritonFallbackGroup(spec, T=2, N=1, H=4, W=4, device=DEVICE)
    noisy, v = group([pack(spikes(g, 2, 1, 64, 4, 4, rate=1.0))], write_v=True)
    assert noisy.data.any() and v is not None and v.any()
    silent, v_again = group([pack(torch.zeros(2, 1, 64, 4, 4, device=DEVICE))], write_v=True)
    assert silent is noisy and v_again is v
    assert not silent.data.any() and not v.any()


@pytest.mark.parametrize("c_out", [70, 128])
def test_membranes_in_another_channel_order(c_out: int) -> None:
    g = seeded(12)
    spec = _spec(g, source(g, 64, c_out, 3), neuron=SHIFTED, dense=1)
    x, dense, v = spikes(g, 2, 2, 64, 3, 5), grid(g, 2, 2, c_out, 3, 5), grid(g, 2, c_out, 3, 5)
    positions = torch.randperm(c_out, generator=g).to(DEVICE)
    expected, expected_v = run_group_reference(spec, [x], (), [dense], v=v)
    for variant in _variants(spec, T=2):
        group = TritonFallbackGroup(
            spec, T=2, N=2, H=3, W=5, device=DEVICE, variant=variant, v_columns=positions
        )
        supported = torch.empty(2, 3, 5, c_out, device=DEVICE)
        supported[..., positions] = v.permute(0, 2, 3, 1)
        actual, last = group([pack(x)], (), [rows(dense)], supported, True)
        assert_packed(actual, expected)
        assert last is not None and torch.equal(last[..., positions].permute(0, 3, 1, 2), expected_v)
    with pytest.raises(InputError, match=f"a permutation of {c_out}"):
        TritonFallbackGroup(spec, T=2, N=2, H=3, W=5, device=DEVICE, v_columns=positions.clamp(max=c_out - 2))


def test_two_parts_are_as_accurate_as_fp32() -> None:
    g = seeded(7)
    weight = (torch.randn(64, 128, 3, 3, generator=g) * 0.05).to(DEVICE)
    single_source = SpikeSource(weight=weight, padding=1)
    # nothing fires, so the membrane is the sum of all currents
    silent = NeuronSpec(alpha=1.0, beta=1.0, delta=0.0, v_threshold=1e9, v_reset=0.0)
    spec = GroupSpec(sources=(single_source,), bias=torch.zeros(64, device=DEVICE), neuron=silent)
    s = spikes(g, 4, 1, 128, 5, 5)
    _, exact = run_group_reference(spec, [s], dtype=torch.float64)
    error = {}
    for parts in (1, 2):
        group = TritonFallbackGroup(spec, T=4, N=1, H=5, W=5, device=DEVICE, parts=parts)
        _, v = group([pack(s)], write_v=True)
        assert v is not None
        error[parts] = ((v.permute(0, 3, 1, 2) - exact).norm() / exact.norm()).item()
    assert error[1] < 2**-10
    assert error[2] < 3e-7


@pytest.mark.parametrize(("parts", "bits"), [(1, 11), (2, 22)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 3e4])
def test_weights_are_kept_to_their_bits(parts: int, bits: int, scale: float) -> None:
    g = seeded(8)
    weight = torch.randn(70, 96, 3, 3, generator=g) * scale
    second = torch.randn(70, 64, 1, 1, generator=g) * scale
    sources = SpikeSource(weight=weight, padding=1), SpikeSource(weight=second)
    laid, factor = pack_fallback_weights(GroupSpec(sources=sources, bias=torch.zeros(70), neuron=IF), parts)
    assert laid.shape == ((2 * 9 + 1) * parts * 64, 128) and torch.isfinite(laid).all()
    steps = laid.double().view(19, parts, 64, 128).sum(1) * 2 * factor
    back = steps[:18].reshape(2, 9, 64, 128).permute(3, 0, 2, 1).reshape(128, 128, 3, 3)
    assert not back[70:].any() and not back[:, 96:].any()
    largest = max(weight.abs().max(), second.abs().max())
    assert (back[:70, :96] - weight.double()).abs().max() <= 2.0**-bits * largest
    assert (steps[18, :, :70].T - second[..., 0, 0].double()).abs().max() <= 2.0**-bits * largest


def test_refusals_are_named() -> None:
    g = seeded(9)
    good = _spec(g, source(g, 8, 8, 3))
    assert TritonFallbackGroup.get_unsupported_reason(good) is None
    five = SpikeSource(weight=grid(g, 8, 8, 5, 5), padding=2)
    nan = SpikeSource(weight=torch.full((8, 8, 1, 1), float("nan")))
    cases = {
        "no convolution": replace(good, sources=()),
        "at most 2": replace(good, sources=good.sources * 3),
        "integers": replace(good, post_skips=1),
        "kernel 5": replace(good, sources=(five,)),
        "stride 3": replace(good, sources=(replace(good.sources[0], stride=3),)),
        "NaN": replace(good, sources=(nan,)),
    }
    for reason, spec in cases.items():
        log = TritonFallbackGroup.get_unsupported_reason(spec)
        assert log is not None and reason in log
        with pytest.raises(InputError, match=reason):
            TritonFallbackGroup(spec, T=1, N=1, H=4, W=4, device=DEVICE)
    with pytest.raises(InputError, match="'m1'"):
        TritonFallbackGroup(good, T=1, N=1, H=4, W=4, device=DEVICE, variant="m1")
    with pytest.raises(InputError, match=r"4x5.*4x4"):
        TritonFallbackGroup(good, T=1, N=1, H=4, W=4, device=DEVICE, in_sizes=[(4, 5)])
