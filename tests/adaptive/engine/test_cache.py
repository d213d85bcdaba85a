"""Slots of the key-value cache: contents, allocation and reported lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparseflow.adaptive.engine.cache import SlotCache
from sparseflow.adaptive.plan.space import Plan
from sparseflow.errors import InputError, PlanError
from tests.adaptive.engine.serving import attached, words

PLAN = Plan(tier=None, insertion_position=1, top_k=2, blocks=(0, 2))
HEADS, WIDTH = 2, 3


def make_cache(*, slots: int = 3, tokens: int = 6) -> SlotCache:
    return SlotCache(PLAN, 4, slots=slots, tokens=tokens)


def make_random(rows: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, rows, HEADS, tokens, WIDTH, generator=g)
    return keys, values


def write_prompt(cache: SlotCache, slots: list[int], tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    keys, values = make_random(len(slots), tokens, seed)
    with cache.prefilling(torch.tensor(slots)):
        for block in PLAN.blocks:
            slot_values = cache.update(keys + block, values - block, block)
            assert torch.equal(slot_values[0], keys + block) and torch.equal(slot_values[1], values - block)
    return keys, values


def test_prefill_and_decode_write_their_slots() -> None:
    cache = make_cache()
    assert [cache.allocate(), cache.allocate()] == [0, 1] and cache.lengths == (0, 0)
    first = write_prompt(cache, [0], 4, seed=1)
    cache.advance([0], 4)
    second = write_prompt(cache, [1], 2, seed=2)
    cache.advance([1], 2)
    assert cache.lengths == (4, 2)
    step = make_random(2, 1, seed=3)
    with cache.decoding(torch.tensor([4, 2]), context=5):
        tokens = {block: cache.update(step[0] + block, step[1] - block, block) for block in PLAN.blocks}
    cache.advance([0, 1])
    assert cache.lengths == (5, 3)
    for block, (keys, values) in tokens.items():
        assert keys.shape == values.shape == (2, HEADS, 5, WIDTH)
        for row, (prompt, length) in enumerate(((first, 4), (second, 2))):
            expected = torch.cat([prompt[0][0], step[0][row]], 1) + block
            assert torch.equal(keys[row, :, : length + 1], expected)
            expected = torch.cat([prompt[1][0], step[1][row]], 1) - block
            assert torch.equal(values[row, :, : length + 1], expected)


def test_prefill_of_several_slots_and_decode_of_later_slots() -> None:
    cache = make_cache()
    for _ in range(3):
        cache.allocate()
    keys, _ = write_prompt(cache, [2, 0], 3)
    cache.advance([0, 1, 2], 3)
    step, _ = make_random(1, 1, seed=4)
    with cache.decoding(torch.tensor([3]), context=4, first=2):
        for block in PLAN.blocks:
            tokens = cache.update(step, step, block)[0]
            assert torch.equal(tokens[0, :, :3], keys[0] + block) and torch.equal(
                tokens[0, :, 3], step[0, :, 0]
            )


def test_only_blocks_of_plan_allocate_buffers() -> None:
    cache = make_cache()
    assert cache.memory_bytes == 0
    cache.allocate()
    write_prompt(cache, [0], 1)
    assert cache.memory_bytes == 2 * 2 * 3 * HEADS * 6 * WIDTH * 4
    assert [layer.keys is not None for layer in cache.blocks] == [True, False, True, False]
    with pytest.raises(PlanError), cache.prefilling(torch.tensor([0])):
        cache.update(*make_random(1, 1), 1)


def test_forward_with_unequal_blocks_is_refused() -> None:
    cache = make_cache()
    cache.allocate()
    with pytest.raises(PlanError), cache.prefilling(torch.tensor([0])):
        cache.update(*make_random(1, 2), 0)
    with pytest.raises(PlanError), cache.prefilling(torch.tensor([0])):
        cache.update(*make_random(1, 2), 0)
        cache.update(*make_random(1, 1), 2)
    # The first block was written by an earlier part.
    with cache.prefilling(torch.tensor([0]), after=2):
        cache.update(*make_random(1, 2), 2)
    with pytest.raises(InputError):
        cache.update(*make_random(1, 1), 0)


def test_sequence_lengths_and_mask_sizes() -> None:
    cache = make_cache()
    assert cache.get_seq_length() == 0 and cache.get_max_length() == 6 and not any(cache.is_sliding)
    cache.allocate()
    cache.allocate()
    write_prompt(cache, [0], 4)
    cache.advance([0], 4)
    assert [cache.get_seq_length(block) for block in range(4)] == [4, 0, 4, 0]
    with cache.prefilling(torch.tensor([1])):
        # A prefill attends only to itself, whatever the length of other slots.
        assert cache.get_seq_length(0) == 0 and cache.get_mask_sizes(3, 0) == (3, 0)
        for block in PLAN.blocks:
            cache.update(*make_random(1, 3), block)
            assert cache.get_seq_length(block) == 3
    cache.advance([1], 3)
    with cache.decoding(torch.tensor([4, 3]), context=6):
        assert cache.get_seq_length(0) == 4
        for block in PLAN.blocks:
            cache.update(*make_random(2, 1), block)
        assert [cache.get_seq_length(block) for block in range(4)] == [5, 0, 5, 0]
    # Older releases of transformers pass positions instead of a count.
    assert cache.blocks[0].get_mask_sizes(torch.arange(3)) == (3, 0)
    assert cache.blocks[0].get_max_cache_shape() == 6


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.sampled_from("tad"), st.integers(0, 9)), max_size=30))
def test_slots_in_use_are_always_the_first_ones(moves: list[tuple[str, int]]) -> None:
    cache = make_cache(slots=4, tokens=50)
    cache.blocks[0].buffers(*make_random(1, 1))
    buffer = cache.blocks[0].keys
    assert buffer is not None
    rows: list[list[float]] = []
    for number, (move, index) in enumerate(moves):
        if move == "t" and len(rows) < 4:
            assert cache.allocate() == len(rows)
            rows.append([])
        elif move == "a" and rows:
            slot = index % len(rows)
            buffer[slot, :, len(rows[slot])] = float(number)
            cache.advance([slot])
            rows[slot].append(float(number))
        elif move == "d" and rows:
            slot = index % len(rows)
            last = rows.pop()
            cache.release(slot)
            if slot < len(rows):
                rows[slot] = last
        assert cache.lengths == tuple(map(len, rows)) and cache.count == len(rows)
        for slot, row in enumerate(rows):
            assert buffer[slot, 0, : len(row), 0].tolist() == row


def test_copy_from_transformers_cache_fills_slot() -> None:
    plan = Plan(tier=None, insertion_position=2, top_k=3, blocks=(0, 1, 4))
    with attached() as (adapter, runtime):

        def ran(plan: Plan, tokens: int) -> Any:
            with runtime.use_plan(plan):
                return adapter.model(**words(tokens), use_cache=True).past_key_values

        cache = SlotCache(plan, 6, slots=2, tokens=8)
        cache.allocate()
        cache.allocate()
        request_cache = ran(plan, 5)
        cache.copy_from(1, request_cache)
        assert cache.lengths == (0, 5)
        for block in plan.blocks:
            slot_keys = cache.blocks[block].keys
            assert slot_keys is not None and torch.equal(
                slot_keys[1, :, :5], request_cache.layers[block].keys[0]
            )
        assert [layer.keys is not None for layer in cache.blocks] == [
            index in plan.blocks for index in range(6)
        ]
        with pytest.raises(InputError):
            cache.copy_from(0, ran(plan, 9))
        other = Plan(tier=None, insertion_position=2, top_k=3, blocks=(0, 1, 5))
        with pytest.raises(PlanError):
            cache.copy_from(0, ran(other, 2))
        with pytest.raises(InputError):
            cache.copy_from(2, request_cache)


def test_cache_invalid_counts_and_slots_are_refused() -> None:
    with pytest.raises(InputError, match="`slots`"):
        make_cache(slots=0)
    with pytest.raises(InputError, match="`tokens`"):
        make_cache(tokens=0)
    cache = make_cache(slots=1, tokens=2)
    with pytest.raises(InputError):
        cache.release(0)
    cache.allocate()
    with pytest.raises(InputError):
        cache.allocate()
    cache.advance([0], 2)
    with pytest.raises(InputError):
        cache.advance([0])
    cache.rewind([1])
    cache.advance([0])
    assert cache.lengths == (2,)
