"""The event kernel's fused groups against the plain-torch reference, bit for bit on a dyadic grid."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba", reason="the event kernels need numba (extra `spiking`)")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparseflow.errors import InputError
from sparseflow.spiking.backends.base import ConvolutionKind, SpikeForm
from sparseflow.spiking.backends.events import format as format_module
from sparseflow.spiking.backends.events import group as group_module
from sparseflow.spiking.backends.events.backend import decode, encode
from sparseflow.spiking.backends.events.format import Events
from sparseflow.spiking.backends.events.group import EventGroup
from sparseflow.spiking.backends.events.kernels import compiler
from sparseflow.spiking.backends.reference import run_convolution_reference, run_group_reference
from sparseflow.spiking.backends.spec import GroupSpec, SpikeSource
from tests.spiking.backends.neurons import IF, LIF, NEURONS, SHIFTED, SOFT


def _grid(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Multiples of 1/64 in [-0.5, 0.5]: sums of thousands of them are exact in float32."""
    return torch.randint(-32, 33, shape, generator=generator).float() / 64


def _spikes(generator: torch.Generator, *shape: int, rate: float = 0.2, largest: int = 1) -> torch.Tensor:
    fired = (torch.rand(shape, generator=generator) < rate).float()
    return fired * torch.randint(1, largest + 1, shape, generator=generator)


def _dense(out: Events | torch.Tensor) -> torch.Tensor:
    return decode(out) if isinstance(out, Events) else out


def _source(generator: torch.Generator, c_in: int, c_out: int, k: int, stride: int = 1) -> SpikeSource:
    return SpikeSource(weight=_grid(generator, c_out, c_in, k, k), stride=stride, padding=k // 2)


def _check(
    spec: GroupSpec,
    spikes: list[torch.Tensor],
    skips: list[torch.Tensor] | None = None,
    dense: list[torch.Tensor] | None = None,
    post_skips: list[torch.Tensor] | None = None,
    v: torch.Tensor | None = None,
    *,
    time_steps: int | None = None,
    prepared: EventGroup | None = None,
) -> None:
    """Event and dense convolution, event and dense output: all equal to the reference in every bit."""
    skips, dense, post_skips = skips or [], dense or [], post_skips or []
    expected, expected_v = run_group_reference(
        spec, spikes, skips, dense, post_skips, v, time_steps=time_steps
    )
    convolution: ConvolutionKind
    for convolution in ("sparse", "dense"):
        sparse = convolution == "sparse"
        group = prepared if prepared is not None and sparse else EventGroup(spec, convolution)
        inputs: list[Any] = [encode(x) for x in spikes] if sparse else spikes
        other_inputs = [encode(x) for x in skips], dense, [encode(x) for x in post_skips]
        out: SpikeForm
        for out in ("native", "dense"):
            actual, actual_v = group(inputs, *other_inputs, steps=time_steps, v=v, out=out)
            assert isinstance(actual, Events) == (out == "native")
            assert torch.equal(_dense(actual), expected), (convolution, out)
            assert torch.equal(actual_v, expected_v), (convolution, out)
            if isinstance(actual, Events):
                assert actual.max_value >= expected.max()


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poison fresh memory with NaN (all ones), so that an unwritten output fails."""
    module = group_module.torch
    empty = torch.empty
    monkeypatch.setattr(module, "empty", lambda *size, **kw: empty(*size, **kw).fill_(float("nan")))
    pool = format_module._POOL
    take = pool.acquire

    def poisoned(nbytes: int) -> Any:
        buffer = take(nbytes)
        buffer.raw[:] = 255
        return buffer

    monkeypatch.setattr(pool, "acquire", poisoned)


@pytest.mark.parametrize("k", [1, 3, 5, 7])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("size", [(1, 1), (4, 4), (5, 7), (8, 3)])
def test_kernels_strides_and_odd_sizes(k: int, stride: int, size: tuple[int, int]) -> None:
    g = torch.Generator().manual_seed(k * 10 + stride)
    spec = GroupSpec(sources=(_source(g, 9, 21, k, stride),), bias=_grid(g, 21), neuron=LIF)
    _check(spec, [_spikes(g, 4, 3, 9, *size)])


@pytest.mark.parametrize(
    ("k", "stride", "padding"),
    [(1, 2, 0), (1, 2, 1), (3, 2, 0), (3, 2, 1), (2, 2, 0), (4, 4, 0), (5, 1, 0), (5, 2, 4), (2, 3, 1)],
)
def test_unusual_padding(k: int, stride: int, padding: int) -> None:
    g = torch.Generator().manual_seed(7)
    source = SpikeSource(weight=_grid(g, 8, 5, k, k), stride=stride, padding=padding)
    _check(GroupSpec(sources=(source,), bias=_grid(g, 8), neuron=IF), [_spikes(g, 2, 1, 5, 6, 5)])


@pytest.mark.parametrize("c_out", [1, 15, 16, 17, 32, 48, 64, 100, 128, 300])
def test_output_channels(c_out: int) -> None:
    g = torch.Generator().manual_seed(c_out)
    spec = GroupSpec(sources=(_source(g, 5, c_out, 3),), bias=_grid(g, c_out), neuron=SOFT)
    _check(spec, [_spikes(g, 2, 2, 5, 3, 4)])


@pytest.mark.parametrize("c_in", [1, 16, 33, 256])
def test_input_channels(c_in: int) -> None:
    g = torch.Generator().manual_seed(c_in)
    spec = GroupSpec(sources=(_source(g, c_in, 24, 3),), bias=_grid(g, 24), neuron=IF)
    _check(spec, [_spikes(g, 2, 1, c_in, 4, 3)])


def test_weights_that_need_several_tiles_and_blocks() -> None:
    g = torch.Generator().manual_seed(5)
    spec = GroupSpec(sources=(_source(g, 256, 256, 3),), bias=_grid(g, 256), neuron=LIF)
    group = EventGroup(spec, "sparse")
    assert group._packed.tiles > 1
    _check(spec, [_spikes(g, 4, 2, 256, 4, 4, rate=0.05)], prepared=group)


@pytest.mark.parametrize("neuron", NEURONS)
@pytest.mark.parametrize("time_steps", [1, 4, 5])
@pytest.mark.parametrize("images", [1, 3])
def test_neurons_time_and_batch(neuron: str, time_steps: int, images: int) -> None:
    g = torch.Generator().manual_seed(time_steps)
    spec = GroupSpec(sources=(_source(g, 6, 20, 3),), bias=_grid(g, 20), neuron=NEURONS[neuron])
    v = _grid(g, images, 20, 5, 4)
    _check(spec, [_spikes(g, time_steps, images, 6, 5, 4)])
    _check(spec, [_spikes(g, time_steps, images, 6, 5, 4)], v=v.contiguous(memory_format=torch.channels_last))


def test_single_steps_carry_the_membrane() -> None:
    """Step mode 's': four calls of T=1 are one call of T=4."""
    g = torch.Generator().manual_seed(3)
    spec = GroupSpec(sources=(_source(g, 6, 20, 3),), bias=_grid(g, 20), neuron=SHIFTED)
    x = _spikes(g, 4, 2, 6, 5, 4)
    expected, expected_v = run_group_reference(spec, [x])
    group, v = EventGroup(spec, "sparse"), None
    for t in range(4):
        out, v = group([encode(x[t : t + 1])], v=v)
        assert torch.equal(_dense(out), expected[t : t + 1])
    assert v is not None and torch.equal(v, expected_v)


def test_group_does_not_modify_the_initial_membrane() -> None:
    g = torch.Generator().manual_seed(4)
    spec = GroupSpec(sources=(_source(g, 3, 4, 1),), bias=_grid(g, 4), neuron=IF)
    v = _grid(g, 1, 4, 2, 2)
    before = v.clone()
    EventGroup(spec, "sparse")([encode(_spikes(g, 2, 1, 3, 2, 2))], v=v)
    assert torch.equal(v, before)


@pytest.mark.parametrize("c_out", [16, 20, 160])
def test_every_kind_of_input_at_once(c_out: int) -> None:
    g = torch.Generator().manual_seed(c_out)
    spec = GroupSpec(
        sources=(_source(g, 7, c_out, 3, 2), _source(g, 5, c_out, 1, 2)),
        bias=_grid(g, c_out),
        neuron=LIF,
        skips=2,
        dense_inputs=3,
        post_skips=2,
    )
    out = (2, c_out, 4, 3)
    _check(
        spec,
        [_spikes(g, 3, 2, 7, 7, 5), _spikes(g, 3, 2, 5, 8, 6)],
        [_spikes(g, 3, *out), _spikes(g, 3, *out, largest=3)],
        [_grid(g, 1, *out), _grid(g, 3, *out), _grid(g, 1, *out)],
        [_spikes(g, 3, *out), _spikes(g, 3, *out, largest=4, rate=0.9)],
        _grid(g, *out),
    )


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("skips", [0, 1])
def test_dense_inputs_alone(constant: bool, skips: int) -> None:
    g = torch.Generator().manual_seed(8)
    spec = GroupSpec(sources=(), bias=_grid(g, 19), neuron=LIF, dense_inputs=1, skips=skips)
    dense = _grid(g, 1 if constant else 4, 2, 19, 5, 4) * 4
    _check(spec, [], [_spikes(g, 4, 2, 19, 5, 4)] * skips, [dense], time_steps=4)


def test_dense_convolution_of_a_constant_input_runs_once() -> None:
    g = torch.Generator().manual_seed(8)
    spec = GroupSpec(sources=(_source(g, 3, 20, 3),), bias=_grid(g, 20), neuron=LIF)
    x = _grid(g, 1, 2, 3, 6, 6)
    expected, v = run_group_reference(spec, [x.expand(4, -1, -1, -1, -1)])
    out, actual_v = EventGroup(spec, "dense")([x], steps=4)
    assert torch.equal(_dense(out), expected)
    assert torch.equal(actual_v, v)


def test_silent_time_steps_and_images() -> None:
    g = torch.Generator().manual_seed(9)
    spec = GroupSpec(sources=(_source(g, 20, 20, 3),), bias=_grid(g, 20), neuron=LIF)
    x = _spikes(g, 4, 3, 20, 5, 5)
    x[1], x[:, 1], x[3, 2, :, 2] = 0.0, 0.0, 0.0
    _check(spec, [x])
    _check(spec, [torch.zeros_like(x)])


@pytest.mark.parametrize("stride", [1, 2])
def test_everything_fires(stride: int) -> None:
    g = torch.Generator().manual_seed(10)
    spec = GroupSpec(sources=(_source(g, 40, 40, 3, stride),), bias=torch.full((40,), 9.0), neuron=IF)
    _check(spec, [torch.ones(2, 2, 40, 5, 6)])


@pytest.mark.parametrize("corner", [(0, 0), (0, -1), (-1, 0), (-1, -1)])
@pytest.mark.parametrize("stride", [1, 2])
def test_one_spike_in_a_corner(corner: tuple[int, int], stride: int) -> None:
    g = torch.Generator().manual_seed(11)
    spec = GroupSpec(
        sources=(_source(g, 3, 17, 3, stride),), bias=torch.zeros(17), neuron=replace(IF, v_threshold=0.25)
    )
    for channel in (0, 2):
        x = torch.zeros(1, 1, 3, 6, 5)
        x[0, 0, channel, corner[0], corner[1]] = 1.0
        _check(spec, [x])


@pytest.mark.parametrize("largest", [2, 5])
def test_integer_input(largest: int) -> None:
    g = torch.Generator().manual_seed(12)
    spec = GroupSpec(sources=(_source(g, 20, 24, 3),), bias=_grid(g, 24), neuron=LIF)
    _check(spec, [_spikes(g, 2, 2, 20, 5, 4, rate=0.9, largest=largest)])


def test_rows_of_more_than_65536_entries() -> None:
    g = torch.Generator().manual_seed(13)
    c, w = 80, 1000
    spec = GroupSpec(sources=(_source(g, c, c, 3),), bias=_grid(g, c), neuron=LIF, skips=1, post_skips=1)
    x, y = _spikes(g, 2, 1, c, 3, w, rate=0.02), _spikes(g, 2, 1, c, 3, w, rate=0.02, largest=2)
    assert encode(x).wide
    _check(spec, [x], [y], [], [y])


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("openmp", [True, False])
def test_any_number_of_threads(workers: int, openmp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "_CYCLES_PER_THREAD", 1)
    if not openmp:
        monkeypatch.setattr(compiler, "_load_openmp", lambda: None)
    g = torch.Generator().manual_seed(14)
    spec = GroupSpec(sources=(_source(g, 20, 130, 3),), bias=_grid(g, 130), neuron=LIF)
    before = torch.get_num_threads()
    torch.set_num_threads(workers)
    try:
        for images in (1, 2, 13):
            _check(spec, [_spikes(g, 2, images, 20, 7, 5)])
    finally:
        torch.set_num_threads(before)


def test_calls_from_several_threads_take_turns() -> None:
    g = torch.Generator().manual_seed(19)
    spec = GroupSpec(sources=(_source(g, 16, 32, 3),), bias=_grid(g, 32), neuron=LIF)
    group = EventGroup(spec, "sparse")
    inputs = [_spikes(g, 4, 2, 16, 9, 9) for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda x: _dense(group([encode(x)])[0]), inputs * 3))
    for x, out in zip(inputs * 3, outputs, strict=True):
        assert torch.equal(out, run_group_reference(spec, [x])[0])


_channels = st.sampled_from([1, 5, 16, 33, 64, 70])


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    c_in=st.lists(_channels, min_size=1, max_size=3),
    c_out=_channels,
    size=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    time_steps=st.sampled_from([1, 2, 3, 4, 6, 9]),
    images=st.integers(1, 3),
    rate=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    steady=st.booleans(),
    neuron=st.sampled_from(list(NEURONS)),
    skips=st.integers(0, 2),
    posts=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_random_groups(
    c_in: list[int],
    c_out: int,
    size: tuple[int, int],
    time_steps: int,
    images: int,
    rate: float,
    steady: bool,
    neuron: str,
    skips: int,
    posts: int,
    seed: int,
) -> None:
    """Sources of different widths share time steps differently; all must add up."""
    g = torch.Generator().manual_seed(seed)
    kernels = [1 + 2 * int(torch.randint(0, 2, (), generator=g)) for _ in c_in]

    def spikes(channels: int) -> torch.Tensor:
        x = _spikes(g, time_steps, images, channels, *size, rate=rate, largest=1 + seed % 2)
        return x[:1].expand(time_steps, -1, -1, -1, -1) if steady else x

    spec = GroupSpec(
        sources=tuple(_source(g, c, c_out, k) for c, k in zip(c_in, kernels, strict=True)),
        bias=_grid(g, c_out),
        neuron=NEURONS[neuron],
        skips=skips,
        post_skips=posts,
    )
    _check(
        spec,
        [spikes(c) for c in c_in],
        [spikes(c_out) for _ in range(skips)],
        [],
        [spikes(c_out) for _ in range(posts)],
    )


@pytest.mark.slow
@pytest.mark.parametrize("cpu", [("generic", ""), ("haswell", "+avx,+avx2,+fma,+bmi,+bmi2,+popcnt,+sse4.2")])
def test_machines_without_avx512(cpu: tuple[str, str], tmp_path: Path) -> None:
    """The same tests in a process that generates code for an older machine."""
    selected = "test_random_groups or test_every_kind or test_output_channels or test_rows_of_more"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", selected, __file__],
        env=os.environ
        | {"NUMBA_CPU_NAME": cpu[0], "NUMBA_CPU_FEATURES": cpu[1], "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:]


def test_one_group_serves_inputs_of_changing_size() -> None:
    g = torch.Generator().manual_seed(15)
    spec = GroupSpec(sources=(_source(g, 20, 40, 3),), bias=_grid(g, 40), neuron=LIF)
    group = EventGroup(spec, "sparse")
    for t, n, h, w in ((1, 1, 2, 2), (4, 3, 9, 8), (2, 1, 3, 5), (5, 2, 4, 4)):
        _check(spec, [_spikes(g, t, n, 20, h, w)], prepared=group)


def test_earlier_outputs_stay_valid_while_they_are_held() -> None:
    g = torch.Generator().manual_seed(16)
    spec = GroupSpec(sources=(_source(g, 8, 16, 3),), bias=_grid(g, 16), neuron=LIF)
    group = EventGroup(spec, "sparse")
    inputs = [_spikes(g, 2, 1, 8, 4, 4) for _ in range(3)]
    outputs = [group([encode(x)])[0] for x in inputs]
    for x, out in zip(inputs, outputs, strict=True):
        assert torch.equal(_dense(out), run_group_reference(spec, [x])[0])


def test_sums_are_the_convolution_alone() -> None:
    g = torch.Generator().manual_seed(17)
    source = _source(g, 20, 70, 3, 2)
    spec = GroupSpec(sources=(source,), bias=_grid(g, 70), neuron=IF)
    x = _spikes(g, 2, 3, 20, 7, 6, largest=2)
    expected = run_convolution_reference(source, x) + spec.bias.view(-1, 1, 1)
    assert torch.equal(EventGroup(spec, "sparse").convolve([encode(x)]), expected)


@pytest.mark.parametrize(
    ("c_in", "c_out", "k", "rate"), [(32, 32, 3, 0.1), (256, 64, 3, 0.3), (256, 256, 1, 0.2)]
)
def test_error_against_float64_is_that_of_dense(c_in: int, c_out: int, k: int, rate: float) -> None:
    g = torch.Generator().manual_seed(18)
    weight = torch.randn(c_out, c_in, k, k, generator=g)
    source = SpikeSource(weight=weight, padding=k // 2)
    spec = GroupSpec(sources=(source,), bias=torch.zeros(c_out), neuron=IF)
    x = _spikes(g, 2, 2, c_in, 8, 8, rate=rate)
    exact = run_convolution_reference(source, x.double())
    own_error = (EventGroup(spec, "sparse").convolve([encode(x)]).double() - exact).square().mean().sqrt()
    dense = (run_convolution_reference(source, x).double() - exact).square().mean().sqrt()
    assert own_error <= 1.1 * dense


def _spec(**changes: Any) -> GroupSpec:
    weight = torch.zeros(4, 3, 3, 3)
    plain = GroupSpec(sources=(SpikeSource(weight=weight, padding=1),), bias=torch.zeros(4), neuron=IF)
    return replace(plain, **changes)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (_spec(sources=()), "at least one source or dense input"),
        (_spec(bias=torch.zeros(5)), "does not fit the bias"),
        (_spec(sources=(SpikeSource(weight=torch.zeros(4, 3, 5, 5), padding=5),)), "at most 4, got 5"),
        (_spec(sources=(SpikeSource(weight=torch.zeros(4, 3, 1, 1), padding=2),)), "at most 1, got 2"),
    ],
)
def test_prepare_refuses_what_it_cannot_run(spec: GroupSpec, message: str) -> None:
    with pytest.raises(InputError, match=message):
        EventGroup(spec, "sparse")


def test_call_refuses_inputs_that_do_not_fit() -> None:
    x = torch.zeros(2, 1, 3, 4, 4)
    group = EventGroup(_spec(skips=1, dense_inputs=1), "sparse")
    skip, dense = encode(torch.zeros(2, 1, 4, 4, 4)), torch.zeros(2, 1, 4, 4, 4)
    skip_empty = encode(torch.zeros(2, 0, 4, 4, 4))
    for message, arguments in {
        "takes 1 `skips`, got 0": ([encode(x)], [], [dense]),
        "cannot take a Tensor": ([x], [skip], [dense]),
        "takes 3 channels": ([encode(x[:, :, :2])], [skip], [dense]),
        "different shapes": ([encode(x)], [encode(torch.zeros(2, 1, 4, 4, 5))], [dense]),
        "4 channels and 2 time steps": ([encode(x)], [skip], [torch.zeros(3, 1, 4, 4, 4)]),
        "at least 1": ([encode(x[:, :0])], [skip_empty], [dense[:, :0]]),
        "must be .T or 1, N, C, H, W.": ([encode(x)], [skip], [torch.zeros(1, 4, 4, 4)]),
    }.items():
        with pytest.raises(InputError, match=message):
            group(*arguments)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="`v` must be"):
        group([encode(x)], [skip], [dense], v=torch.zeros(1, 4, 4, 5))
