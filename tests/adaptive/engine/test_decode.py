"""Decode steps of slots, compared with `generate` of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparseflow.adaptive.adapters import Adapter, get_adapter
from sparseflow.adaptive.engine.cache import SlotCache
from sparseflow.adaptive.engine.decode import (
    DecodeRunner,
    check_attention,
    doubling_sizes,
    get_decode_plan,
    select_size,
)
from sparseflow.adaptive.engine.graphs import GraphCache
from sparseflow.adaptive.engine.kernel_patcher import KernelPatcher
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan
from sparseflow.errors import InputError, ModelError
from tests.adaptive import tiny
from tests.adaptive.counting import count_calls
from tests.adaptive.engine.serving import DEEP, LATER, NARROW, SHALLOW, attached, words

PROMPTS = (5, 9, 2)


def generated(adapter: Adapter, runtime: PlanRuntime, plan: Plan, inputs: Any, tokens: int) -> list[int]:
    """New tokens from `generate` of transformers."""
    model: Any = adapter.model
    with runtime.use_plan(plan):
        result = model.generate(
            **inputs,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            max_new_tokens=tokens,
            do_sample=False,
        )
    return result[0, inputs["input_ids"].shape[1] :].tolist()


def start_request(adapter: Adapter, runtime: PlanRuntime, plan: Plan, cache: SlotCache, inputs: Any) -> int:
    """Run a prompt and copy it into a slot; returns the first token."""
    with runtime.use_plan(plan):
        output: Any = adapter.model(**inputs, use_cache=True)
    cache.copy_from(cache.allocate(), output.past_key_values)
    return int(output.logits[0, -1].argmax())


def steps_of(
    adapter: Adapter, runtime: PlanRuntime, *, rows: int = 4, tokens: int = 40, **options: Any
) -> DecodeRunner:
    options = {"kernel_patcher": KernelPatcher(adapter)} | options
    graphs = GraphCache(next(adapter.decoder.parameters()).device)
    return DecodeRunner(adapter, runtime, graphs, rows=rows, tokens=tokens, **options)


@pytest.mark.parametrize("family", ["olmoe", "mixtral", "llava_siglip", "qwen3_vl_moe"])
@pytest.mark.parametrize("plan", [DEEP, SHALLOW])
def test_decode_rows_of_different_length_match_transformers(family: str, plan: Plan) -> None:
    with attached(family) as (adapter, runtime):
        steps = steps_of(adapter, runtime, contexts=[8, 16])
        cache = SlotCache(
            get_decode_plan(plan, adapter.geometry), 6, slots=4, tokens=40, state=len(adapter.state)
        )
        inputs = [words(tokens, seed) for seed, tokens in enumerate(PROMPTS)]
        expected = [generated(adapter, runtime, plan, input, 12) for input in inputs]
        generated_tokens = [[start_request(adapter, runtime, plan, cache, input)] for input in inputs]
        for _ in range(11):
            for row, token in zip(
                generated_tokens, steps.run(cache, [row[-1] for row in generated_tokens])[1], strict=True
            ):
                row.append(token)
        assert generated_tokens == expected


def test_decode_runs_blocks_and_experts_of_plan() -> None:
    with attached() as (adapter, runtime):
        steps = steps_of(adapter, runtime, rows=2)
        cache = SlotCache(get_decode_plan(SHALLOW, adapter.geometry), 6, slots=2, tokens=40)
        start_request(adapter, runtime, SHALLOW, cache, words(4))
        with count_calls(adapter.blocks) as counts:
            steps.run(cache, [5])
        assert counts.attention == {0: 1, 1: 1, 4: 1}
        assert counts.experts_per_token() == {0: 6, 1: 6, 4: 3}


def test_decode_with_joining_and_leaving_rows_matches_transformers() -> None:
    with attached() as (adapter, runtime):
        steps = steps_of(adapter, runtime)
        cache = SlotCache(get_decode_plan(NARROW, adapter.geometry), 6, slots=4, tokens=40)
        inputs = [words(tokens, seed) for seed, tokens in enumerate((3, 6, 9))]
        expected = [generated(adapter, runtime, NARROW, input, 9) for input in inputs]
        rows = [[start_request(adapter, runtime, NARROW, cache, input)] for input in inputs[:2]]

        def step() -> None:
            for row, token in zip(rows, steps.run(cache, [row[-1] for row in rows])[1], strict=True):
                row.append(token)

        step()
        rows.append([start_request(adapter, runtime, NARROW, cache, inputs[2])])
        step()
        assert rows[0] == expected[0][:3]
        # The last row moves to the first slot.
        cache.release(0)
        rows = [rows[2], rows[1]]
        while len(rows[0]) < 9:
            step()
        assert rows[0] == expected[2] and rows[1][:9] == expected[1]


def test_decode_of_later_slots_matches_transformers() -> None:
    with attached() as (adapter, runtime):
        steps = steps_of(adapter, runtime)
        cache = SlotCache(get_decode_plan(DEEP, adapter.geometry), 6, slots=4, tokens=40)
        inputs = [words(4, seed) for seed in range(3)]
        rows = [[start_request(adapter, runtime, DEEP, cache, input)] for input in inputs]
        expected = [generated(adapter, runtime, DEEP, input, 3) for input in inputs]
        for _ in range(2):
            rows[0] += steps.run(cache, [rows[0][-1]])[1]
            result = steps.run(cache, [rows[1][-1], rows[2][-1]], first=1)[1]
            rows[1].append(result[0])
            rows[2].append(result[1])
        assert rows == expected


def test_decode_of_some_slots_leaves_others_unchanged() -> None:
    with attached() as (adapter, runtime):
        # Three rows would be padded to four, but the fourth slot is in use.
        steps = steps_of(adapter, runtime)
        cache = SlotCache(get_decode_plan(DEEP, adapter.geometry), 6, slots=4, tokens=40)
        inputs = [words(3 + seed, seed) for seed in range(4)]
        rows = [[start_request(adapter, runtime, DEEP, cache, input)] for input in inputs]
        expected = [generated(adapter, runtime, DEEP, input, 3) for input in inputs]
        for _ in range(2):
            result = steps.run(cache, [row[-1] for row in rows[:3]])[1]
            result += steps.run(cache, [rows[3][-1]], first=3)[1]
            for row, token in zip(rows, result, strict=True):
                row.append(token)
        assert rows == expected


def test_decode_logits_match_model() -> None:
    with attached() as (adapter, runtime):
        steps = steps_of(adapter, runtime)
        cache = SlotCache(get_decode_plan(DEEP, adapter.geometry), 6, slots=4, tokens=40)
        prompts = [words(tokens, seed)["input_ids"] for seed, tokens in enumerate(PROMPTS)]
        for token_ids in prompts:
            start_request(adapter, runtime, DEEP, cache, {"input_ids": token_ids})
        logits, best = steps.run(cache, [7, 8, 9])
        for row, (prompt, token) in enumerate(zip(prompts, (7, 8, 9), strict=True)):
            with runtime.use_plan(DEEP):
                full_output: Any = adapter.model(input_ids=torch.cat([prompt, torch.tensor([[token]])], 1))
            torch.testing.assert_close(logits[row], full_output.logits[0, -1], rtol=0.0, atol=1e-10)
            assert best[row] == int(full_output.logits[0, -1].argmax())


def test_decode_plan_drops_what_ends_with_prompt() -> None:
    with attached() as (adapter, _):
        geometry = adapter.geometry
        assert get_decode_plan(DEEP, geometry) == get_decode_plan(LATER, geometry) == DEEP
        assert get_decode_plan(SHALLOW, geometry) == SHALLOW
    with attached("llava_siglip") as (adapter, _):
        high = Plan(tier="high", insertion_position=2, top_k=3, blocks=(0, 1, 4))
        low = Plan(tier="low", insertion_position=2, top_k=3, blocks=(0, 1, 4))
        assert get_decode_plan(high, adapter.geometry) == get_decode_plan(low, adapter.geometry) == SHALLOW


def test_size_selection_pads_to_next_size() -> None:
    assert (
        doubling_sizes(1) == (1,) and doubling_sizes(6) == (1, 2, 4, 6) and doubling_sizes(8) == (1, 2, 4, 8)
    )
    assert doubling_sizes(300, first=128) == (128, 256, 300)
    assert [select_size((1, 2, 4), target) for target in (1, 2, 3, 4)] == [1, 2, 4, 4]
    with pytest.raises(InputError):
        select_size((1, 2, 4), 5)


def test_warm_up_leaves_empty_cache() -> None:
    with attached() as (adapter, runtime):
        steps = steps_of(adapter, runtime, rows=2, tokens=16, contexts=[4])
        cache = SlotCache(DEEP, 6, slots=2, tokens=16)
        work = steps.warm_up(cache)
        assert len(work) == len(steps.batches) * len(steps.contexts) == 4
        for task in work:
            task()
        assert cache.count == 0 and cache.memory_bytes > 0


def test_decode_unused_or_full_slot_is_refused() -> None:
    with attached() as (adapter, runtime):
        steps = steps_of(adapter, runtime, tokens=6)
        cache = SlotCache(DEEP, 6, slots=2, tokens=6)
        with pytest.raises(InputError):
            steps.run(cache, [3])
        start_request(adapter, runtime, DEEP, cache, words(6))
        with pytest.raises(InputError):
            steps.run(cache, [3])


def test_check_attention_unsupported_models_are_refused() -> None:
    adapter = get_adapter(tiny.build_mixtral())
    config: Any = adapter.decoder.config
    check_attention(adapter, 512)
    with pytest.raises(ModelError):
        check_attention(adapter, 513)
    config.sliding_window = 100
    check_attention(adapter, 100)
    with pytest.raises(ModelError):
        check_attention(adapter, 101)
    config.sliding_window = None
    config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ModelError):
        check_attention(adapter, 100)


def test_decode_with_eager_attention_matches_transformers() -> None:
    model = tiny.build_olmoe(dtype=torch.float32)
    model.set_attn_implementation("eager")
    adapter = get_adapter(model)
    runtime = PlanRuntime(adapter)
    steps = steps_of(adapter, runtime)
    cache = SlotCache(DEEP, 6, slots=4, tokens=40)
    inputs = words(5)
    row = [start_request(adapter, runtime, DEEP, cache, inputs)]
    for _ in range(5):
        row += steps.run(cache, [row[-1]])[1]
    assert row == generated(adapter, runtime, DEEP, inputs, 6)


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
def test_decode_with_kernels_matches_transformers() -> None:
    pytest.importorskip("triton", reason="the kernels need triton")
    adapter = get_adapter(tiny.build_olmoe(depth=3, dtype=torch.float32))
    runtime = PlanRuntime(adapter)
    plan = Plan(tier=None, insertion_position=1, top_k=3, blocks=(0, 2))
    kernel_patcher = KernelPatcher(adapter, kernels=True)
    steps = steps_of(adapter, runtime, rows=2, kernel_patcher=kernel_patcher)
    cache = SlotCache(plan, 3, slots=2, tokens=40)
    inputs = [words(tokens, seed) for seed, tokens in enumerate((5, 3))]
    generated_tokens = [[start_request(adapter, runtime, plan, cache, input)] for input in inputs]
    for _ in range(3):
        for row, token in zip(
            generated_tokens, steps.run(cache, [row[-1] for row in generated_tokens])[1], strict=True
        ):
            row.append(token)
    assert generated_tokens == [generated(adapter, runtime, plan, input, 4) for input in inputs]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("plan", [DEEP, SHALLOW])
def test_captured_decode_on_gpu_matches_transformers(dtype: torch.dtype, plan: Plan) -> None:
    adapter = get_adapter(tiny.build_olmoe(dtype=dtype).cuda())
    runtime = PlanRuntime(adapter)
    steps = steps_of(adapter, runtime, contexts=[8, 16])
    cache = SlotCache(get_decode_plan(plan, adapter.geometry), 6, slots=4, tokens=40)
    inputs = [{"input_ids": words(tokens, seed)["input_ids"].cuda()} for seed, tokens in enumerate(PROMPTS)]
    expected = [generated(adapter, runtime, plan, input, 12) for input in inputs]
    generated_tokens = [[start_request(adapter, runtime, plan, cache, input)] for input in inputs]
    for _ in range(11):
        for row, token in zip(
            generated_tokens, steps.run(cache, [row[-1] for row in generated_tokens])[1], strict=True
        ):
            row.append(token)
    assert generated_tokens == expected
    # Contexts of 16 and 40 tokens.
    assert len(steps.graphs.captured) == 2 and not steps.graphs.failures
