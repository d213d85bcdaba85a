"""Sampling of tokens: greedy, nucleus and temperature."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparseflow.adaptive.engine.requests.sampling import (
    SamplingParams,
    UniformStream,
    argmax_tokens,
    sample_tokens,
)
from sparseflow.errors import InputError


def sample_scalar(logits: Tensor, temperature: float, top_p: float, number: float) -> int:
    """Scalar reference for one row."""
    chances = [math.exp(value / temperature) for value in (logits - logits.max()).tolist()]
    total = sum(chances)
    order = sorted(range(len(chances)), key=lambda index: -chances[index])
    nucleus, before = [], 0.0
    for index in order:
        if before >= top_p and nucleus:
            break
        nucleus.append(index)
        before += chances[index] / total
    remaining_mass, summed = sum(chances[index] for index in nucleus), 0.0
    for index in nucleus:
        summed += chances[index]
        if summed / remaining_mass > number:
            return index
    return nucleus[-1]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-9, 9), min_size=1, max_size=8, unique=True),
    st.floats(0.05, 5), st.floats(0.01, 1), st.floats(0, 1, exclude_max=True),
)  # fmt: skip
def test_sample_tokens_matches_scalar_reference(
    row: list[float], temperature: float, top_p: float, number: float
) -> None:
    logits = torch.tensor([row], dtype=torch.float64)
    sampling = SamplingParams(temperature=temperature, top_p=top_p)
    token = int(sample_tokens(logits, [sampling], [number])[0])
    # At an edge the result depends on rounding.
    nearby_numbers = [min(max(number + shift, 0.0), 1.0 - 1e-16) for shift in (-1e-9, 0.0, 1e-9)]
    tops = [min(max(top_p + shift, 1e-3), 1.0) for shift in (-1e-9, 0.0, 1e-9)]
    assert token in {
        sample_scalar(logits[0], temperature, top, nearby) for nearby in nearby_numbers for top in tops
    }


def test_sample_tokens_frequencies_match_probabilities() -> None:
    chances = [0.5, 0.3, 0.15, 0.05]
    logits = torch.tensor([chances]).log()
    draws = UniformStream(SamplingParams(temperature=1.0, seed=3))
    observed = Counter(int(sample_tokens(logits, [draws.sampling], [draws.next()])[0]) for _ in range(1000))
    for token, chance in enumerate(chances):
        assert abs(observed[token] / 1000 - chance) < 4 * math.sqrt(chance * (1 - chance) / 1000)
    stream = UniformStream(SamplingParams(temperature=1.0, top_p=0.6, seed=3))
    assert {int(sample_tokens(logits, [stream.sampling], [stream.next()])[0]) for _ in range(200)} == {0, 1}


def test_sample_tokens_rows_are_independent() -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 40, generator=g)
    samplings = [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=2.0, top_p=0.5),
        SamplingParams(),
        SamplingParams(temperature=0.3),
    ]
    numbers = [0.0, 0.4, 0.9, 0.7, 0.999]
    batched = sample_tokens(logits, samplings, numbers)
    for index in range(5):
        assert torch.equal(
            sample_tokens(logits[index : index + 1], [samplings[index]], [numbers[index]])[0], batched[index]
        )
    assert batched[0] == logits[0].argmax() and batched[3] == logits[3].argmax()


def test_argmax_tokens_selects_first_of_ties() -> None:
    assert argmax_tokens(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])).tolist() == [1, 0]


def test_nan_logits_select_minus_one() -> None:
    logits = torch.tensor([[1.0, float("nan"), 2.0], [1.0, 5.0, 2.0], [float("nan")] * 3])
    assert argmax_tokens(logits).tolist() == [-1, 1, -1]
    assert sample_tokens(logits, [SamplingParams(temperature=1.0)] * 3, [0.5] * 3).tolist()[::2] == [-1, -1]


def test_sample_tokens_never_selects_infinite_logits() -> None:
    logits = torch.tensor([[1.0, -math.inf, 4.0, -math.inf]])
    for number in (0.0, 0.5, 0.9999999999):
        assert sample_tokens(logits, [SamplingParams(temperature=1e-3)], [number]).tolist() == [2]
        assert int(sample_tokens(logits, [SamplingParams(temperature=9.0)], [number])[0]) in (0, 2)


def test_uniform_stream_depends_on_seed() -> None:
    base, same, other = (UniformStream(SamplingParams(temperature=1.0, seed=seed)) for seed in (5, 5, 6))
    first = [base.next() for _ in range(5)]
    assert first == [same.next() for _ in range(5)] != [other.next() for _ in range(5)]
    assert all(0 <= number < 1 for number in first) and UniformStream(SamplingParams()).next() == 0.0


@pytest.mark.parametrize(
    "overrides", [{"temperature": -1.0}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_p": 0.0},
              {"top_p": 1.5}, {"top_p": math.nan}, {"seed": -1}, {"seed": 2**63}],
)  # fmt: skip
def test_sampling_params_out_of_range_are_refused(overrides: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(overrides))):
        SamplingParams(**overrides)  # pyright: ignore[reportArgumentType]


def test_sample_tokens_row_counts_must_match() -> None:
    with pytest.raises(InputError):
        sample_tokens(torch.zeros(2, 3), [SamplingParams()], [0.0, 0.0])
