"""The fused neuron against the reference of groups, bit for bit on a dyadic grid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="the packed kernels need triton")

from sparseflow.errors import InputError
from sparseflow.spiking.backends.packed.format import allocate_packed, make_channel_table, pack
from sparseflow.spiking.backends.packed.neuron import NeuronOutput, run_neuron
from sparseflow.spiking.backends.reference import run_group_reference
from sparseflow.spiking.backends.spec import GroupSpec, MaxPooling, NeuronSpec
from tests.spiking.backends.neurons import IF, LIF, NEURONS, SHIFTED, SOFT
from tests.spiking.backends.packed.cases import DEVICE, assert_activity, assert_packed, grid, seeded, spikes

pytestmark = pytest.mark.usefixtures("poisoned_empty")


def _expected(
    spec: NeuronSpec,
    currents: list[torch.Tensor],
    bias: torch.Tensor | None = None,
    skips: list[torch.Tensor] | None = None,
    posts: list[torch.Tensor] | None = None,
    v: torch.Tensor | None = None,
    steps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    skips, posts = skips or [], posts or []
    channels = [*currents, *skips][0].shape[2]
    group = GroupSpec(
        sources=(),
        bias=torch.zeros(channels, device=DEVICE) if bias is None else bias,
        neuron=spec,
        skips=len(skips),
        dense_inputs=len(currents),
        post_skips=len(posts),
    )
    floats = [x.float() for x in currents]
    return run_group_reference(group, [], skips, floats, posts, v, time_steps=steps)


def _check(actual: NeuronOutput, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    out, v = expected
    if actual.packed is not None:
        assert_packed(actual.packed, out)
    if actual.dense is not None:
        assert torch.equal(actual.dense.float(), out)
        assert actual.dense.permute(0, 1, 3, 4, 2).is_contiguous()
    if actual.v is not None:
        assert torch.equal(actual.v.permute(0, 3, 1, 2), v)


@pytest.mark.parametrize("name", NEURONS)
@pytest.mark.parametrize("shape", [(4, 2, 64, 5, 3), (3, 1, 70, 2, 2), (1, 1, 1, 1, 1), (2, 2, 130, 3, 4)])
def test_neurons_and_shapes(name: str, shape: tuple[int, ...]) -> None:
    g = seeded(1)
    x, bias = grid(g, *shape) * 3, grid(g, shape[2])
    actual = run_neuron([x], NEURONS[name], bias=bias, dense=torch.float16, write_v=True)
    expected = _expected(NEURONS[name], [x], bias)
    assert 0 < expected[0].mean() < 1 or x.numel() < 9
    _check(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("memory", ["channels last", "channels first"])
def test_currents_of_any_dtype_and_order(dtype: torch.dtype, memory: str) -> None:
    x = (grid(seeded(2), 4, 2, 72, 4, 4) * 4).to(dtype)
    if memory == "channels last":
        x = x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    _check(run_neuron([x], LIF, dense=dtype, write_v=True), _expected(LIF, [x]))


def test_everything_at_once() -> None:
    g = seeded(3)
    shape = (4, 2, 70, 3, 5)
    x, y, constant, bias = grid(g, *shape), grid(g, *shape), grid(g, 1, *shape[1:]), grid(g, 70)
    skips = [spikes(g, *shape), spikes(g, *shape)]
    v = grid(g, *shape[1:])
    rows = v.permute(0, 2, 3, 1).contiguous()
    before = rows.clone()
    currents = [x, y.half(), constant]
    for spec in (SHIFTED, SOFT):
        actual = run_neuron(currents, spec, bias=bias, skips=[pack(s) for s in skips], v=rows, write_v=True)
        _check(actual, _expected(spec, currents, bias, skips, v=v))
        assert torch.equal(rows, before)


def test_constant_current_runs_over_all_steps() -> None:
    x = grid(seeded(4), 1, 2, 64, 3, 3)
    _check(run_neuron([x], LIF, steps=6, write_v=True), _expected(LIF, [x], steps=6))
    repeated = x.expand(6, -1, -1, -1, -1)
    _check(run_neuron([repeated], LIF, write_v=True), _expected(LIF, [x], steps=6))


@pytest.mark.parametrize("pooling", [MaxPooling(3, 2, 1), MaxPooling(2, 2), MaxPooling(3, 1, 1)])
@pytest.mark.parametrize("steps", [1, 4])
def test_pooled_current(pooling: MaxPooling, steps: int) -> None:
    g = seeded(11)
    x, bias = grid(g, steps, 2, 70, 7, 5) * 3, grid(g, 70)
    pooled = F.max_pool2d(x.flatten(0, 1), pooling.size, pooling.stride, pooling.padding).unflatten(
        0, (steps, 2)
    )
    actual = run_neuron([x], LIF, steps=4, bias=bias, dense=torch.float32, write_v=True, pooling=pooling)
    _check(actual, _expected(LIF, [pooled], bias, steps=4))


def test_only_skips() -> None:
    g = seeded(5)
    skips = [spikes(g, 4, 1, 65, 3, 3), spikes(g, 4, 1, 65, 3, 3)]
    actual = run_neuron([], LIF, skips=[pack(s) for s in skips], write_v=True)
    _check(actual, _expected(LIF, [], skips=skips))


def test_shortcuts_behind_the_neuron_are_added_in_dense_form() -> None:
    g = seeded(6)
    x, s = grid(g, 4, 2, 70, 3, 3) * 4, spikes(g, 4, 2, 70, 3, 3)
    integers = torch.randint(0, 4, x.shape, generator=g).to(DEVICE)
    posts: list[Any] = [pack(s), integers.half()]
    actual = run_neuron([x], IF, post_skips=posts, packed=False, dense=torch.float16)
    assert actual.packed is None and actual.v is None
    _check(actual, _expected(IF, [x], posts=[s, integers.float()]))
    assert actual.dense is not None and actual.dense.max() > 1
    with pytest.raises(InputError, match="integers"):
        run_neuron([x], IF, post_skips=posts)


def test_run_neuron_continues_from_the_last_membrane() -> None:
    x = grid(seeded(7), 4, 2, 64, 3, 3)
    first = run_neuron([x[:2]], LIF, write_v=True)
    second = run_neuron([x[2:]], LIF, v=first.v, write_v=True)
    full, last = _expected(LIF, [x])
    assert second.packed is not None and second.v is not None
    assert_packed(second.packed, full[2:])
    assert torch.equal(second.v.permute(0, 3, 1, 2), last)


@pytest.mark.parametrize("channels", [64, 70])
def test_membranes_in_another_channel_order(channels: int) -> None:
    g = seeded(10)
    x, start = grid(g, 3, 2, channels, 3, 3) * 3, grid(g, 2, channels, 3, 3)
    positions = torch.randperm(channels, generator=g)
    v = torch.empty(2, 3, 3, channels, device=DEVICE)
    v[..., positions] = start.permute(0, 2, 3, 1)
    table = make_channel_table(positions, channels, DEVICE)
    actual = run_neuron([x], SHIFTED, v=v, write_v=True, v_columns=table)
    expected, last = _expected(SHIFTED, [x], v=start)
    assert actual.packed is not None and actual.v is not None
    assert_packed(actual.packed, expected)
    assert torch.equal(actual.v[..., positions].permute(0, 3, 1, 2), last)
    with pytest.raises(InputError, match=f"int32 \\[{channels}\\]"):
        run_neuron([x], SHIFTED, v=v, v_columns=positions)


def test_packed_output_is_written_to_destination() -> None:
    x = grid(seeded(8), 2, 1, 70, 3, 3) * 4
    out = allocate_packed(2, 1, 70, 3, 3, DEVICE)
    actual = run_neuron([x], IF, packed=out)
    assert actual.packed is out and actual.dense is None and actual.v is None
    assert_packed(out, _expected(IF, [x])[0])


@pytest.mark.parametrize("shape", [(4, 3, 70, 5, 3), (32, 1, 64, 4, 9), (3, 2, 200, 7, 7), (1, 1, 1, 1, 1)])
@pytest.mark.parametrize("tile", [2, 16, 32])
def test_activity_marks_what_fires(shape: tuple[int, int, int, int, int], tile: int) -> None:
    x = (torch.rand(shape, generator=seeded(9)) < 0.002).float().to(DEVICE)
    out = allocate_packed(*shape, DEVICE, tile=tile)
    # without memory; behind the last pixel the bias alone would fire, if that counted
    run_neuron([x * 2 - 2.0], replace(IF, alpha=0.0), bias=torch.ones(shape[2], device=DEVICE), packed=out)
    assert_packed(out, x)
    assert_activity(out, tile)
    with pytest.raises(InputError, match="power of two"):
        run_neuron([x], IF, packed=allocate_packed(*shape, DEVICE, tile=48))


def test_unusable_input_is_named() -> None:
    x = torch.zeros(2, 1, 8, 3, 3, device=DEVICE)
    with pytest.raises(InputError, match="current or skip"):
        run_neuron([], IF)
    with pytest.raises(InputError, match=r"\(2, 1, 8, 3, 4\)"):
        run_neuron([x, torch.zeros(2, 1, 8, 3, 4, device=DEVICE)], IF)
    with pytest.raises(InputError, match="membrane"):
        run_neuron([x], IF, v=torch.zeros(1, 8, 3, 3, device=DEVICE))
    with pytest.raises(InputError, match="packed spikes"):
        run_neuron([x], IF, packed=False)
    with pytest.raises(InputError, match="`packed`"):
        run_neuron([x], IF, packed=allocate_packed(1, 1, 8, 3, 3, DEVICE))
