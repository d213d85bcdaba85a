"""Running of plans by forward hooks."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparseflow.adaptive.adapters import Adapter, DecoderAdapter, get_adapter
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan, PlanSpace
from sparseflow.errors import InputError, ModelError, PlanError
from tests.adaptive import tiny
from tests.adaptive.counting import count_calls

EXACT = 1e-10
PLAN_STRIDE = 17
"""Every n-th plan is run; benchmarks/adaptive/exact.py runs all."""


@cache
def _model(family: str) -> Any:
    return tiny.FAMILIES[family]()


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@contextmanager
def attached(model: Any) -> Iterator[PlanRuntime]:
    """Plan runtime of a model, removed at the end because tests share models."""
    runtime = PlanRuntime(get_adapter(model))
    try:
        yield runtime
    finally:
        if runtime.installed:
            runtime.remove()


@pytest.fixture
def olmoe() -> Iterator[tuple[Any, PlanRuntime]]:
    model = _model("olmoe")
    with attached(model) as runtime:
        yield model, runtime


def plan(blocks: str = "012345", top_k: int = 6, position: int = 1, tier: Any = None) -> Plan:
    return Plan(tier=tier, insertion_position=position, top_k=top_k, blocks=tuple(map(int, blocks)))


def space_of(adapter: Adapter) -> PlanSpace:
    depth = adapter.geometry.depth
    return PlanSpace.from_importance(adapter.geometry, [(5 * block + 3) % depth for block in range(depth)])


def run_model(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Logits of one forward without cache."""
    return model(**inputs, use_cache=False).logits


def one_by_one(model: Any, inputs: dict[str, Tensor], last: int = 5) -> tuple[Tensor, Any]:
    """Logits of a prompt whose last tokens are decoded one by one, and the cache."""
    ids = inputs["input_ids"]
    count = ids.shape[1] - last
    prompt_tokens = {
        name: value[:, :count] if value.shape[:2] == ids.shape else value for name, value in inputs.items()
    }
    output = model(**prompt_tokens, use_cache=True)
    logits = [output.logits]
    for index in range(count, ids.shape[1]):
        output = model(input_ids=ids[:, index : index + 1], past_key_values=output.past_key_values)
        logits.append(output.logits)
    return torch.cat(logits, 1), output.past_key_values


def grown(inputs: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    """Prompt extended by more text."""
    more = ids.shape[1] - inputs["input_ids"].shape[1]
    collected = {**inputs, "input_ids": ids}
    for name, value in (("attention_mask", 1), ("mm_token_type_ids", 0)):
        if name in inputs:
            collected[name] = nn.functional.pad(inputs[name], (0, more), value=value)
    return collected


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_plans_run_their_blocks_and_cached_matches_uncached(family: str) -> None:
    model = _model(family)
    adapter = get_adapter(model)
    full_inputs = tiny.make_prompt(model, images=2, rows=2)
    full_logits = run_model(model, full_inputs)
    with attached(model) as runtime:
        for current_plan in space_of(adapter).plans[::PLAN_STRIDE]:
            inputs = adapter.reduce_to_tier(full_inputs, current_plan.tier)
            with runtime.use_plan(current_plan) as running, count_calls(adapter.blocks) as counts:
                expected = run_model(model, inputs)
                assert counts.attention == dict.fromkeys(current_plan.blocks, 1)
                widths = {
                    block: 6 if block < current_plan.insertion_position else current_plan.top_k
                    for block in current_plan.blocks
                }
                assert counts.experts_per_token() == widths
                assert set(counts.tokens.values()) == {inputs["input_ids"].numel()}
                assert running.executed_blocks == list(
                    current_plan.blocks
                ) and running.executed_routers == set(current_plan.blocks)
                logits, caches = one_by_one(model, inputs)
            assert (logits - expected).abs().max() < EXACT
            lengths = adapter.get_kv_lengths(caches)
            assert lengths == dict.fromkeys(current_plan.blocks, inputs["input_ids"].shape[1])
            is_full = (
                current_plan.tier in (None, "high") and len(current_plan.blocks) == current_plan.top_k == 6
            )
            same_shape = logits.shape == full_logits.shape
            assert is_full == (same_shape and bool(((logits - full_logits).abs() < EXACT).all()))


@pytest.mark.parametrize("family", ["olmoe", "mixtral"])
def test_skipped_blocks_match_model_of_kept_blocks(family: str) -> None:
    model, inputs = _model(family), tiny.make_text_prompt(tokens=12, rows=2)
    kept_blocks = (0, 1, 3, 5)
    smaller = tiny.FAMILIES[family](depth=len(kept_blocks))
    weights = {}
    for name, value in model.state_dict().items():
        head, _, tail = name.partition("layers.")
        block, _, suffix = tail.partition(".")
        if not tail:
            weights[name] = value
        elif int(block) in kept_blocks:
            weights[f"{head}layers.{kept_blocks.index(int(block))}.{suffix}"] = value
    smaller.load_state_dict(weights)
    with attached(model) as runtime, runtime.use_plan(plan("0135", position=2)):
        assert torch.equal(run_model(model, inputs), run_model(smaller, inputs))
        assert torch.equal(one_by_one(model, inputs)[0], one_by_one(smaller, inputs)[0])


class _Identity(nn.Module):
    def forward(self, hidden_states: Tensor, **named: Any) -> Tensor:
        return hidden_states


@pytest.mark.parametrize("family", ["llava_siglip", "llava_clip", "qwen3_vl_moe"])
def test_skipped_blocks_match_model_with_identity_blocks(family: str) -> None:
    model = _model(family)
    inputs = tiny.make_prompt(model)
    emptied = copy.deepcopy(model)
    layers: Any = get_adapter(emptied).decoder.layers
    # Qwen3-VL adds visual features after early blocks, even if those are skipped.
    layers[1], layers[4] = _Identity(), _Identity()
    with attached(model) as runtime, runtime.use_plan(plan("0235", tier="high")):
        assert torch.equal(run_model(model, inputs), run_model(emptied, inputs))


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("top_k", [2, 5])
def test_narrow_top_k_matches_model_with_that_top_k(family: str, top_k: int) -> None:
    model, narrow = _model(family), tiny.FAMILIES[family](top_k=top_k)
    narrow.load_state_dict(model.state_dict())
    decoder, inputs = get_adapter(narrow), tiny.make_prompt(model)
    tier = "high" if "pixel_values" in inputs else None
    # Blocks before the insertion keep the model's top-k.
    for block in (0, 1):
        router: Any = decoder.router(decoder.blocks[block])
        router.top_k = 6
    with attached(model) as runtime, runtime.use_plan(plan(top_k=top_k, position=2, tier=tier)):
        assert torch.equal(run_model(model, inputs), run_model(narrow, inputs))


def test_geometry_reads_top_k_of_live_routers() -> None:
    model = tiny.build_olmoe()
    model.config.num_experts_per_tok = 2
    assert get_adapter(model).geometry.top_k == 6


@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
def test_plan_with_other_expert_implementation_matches(experts: str) -> None:
    model = _model("olmoe")
    inputs = tiny.make_text_prompt(rows=2)
    with attached(model) as runtime, runtime.use_plan(plan("01345", top_k=3)):
        expected = run_model(model, inputs)
        model.set_experts_implementation(experts)
        try:
            assert (run_model(model, inputs) - expected).abs().max() < EXACT
        finally:
            model.set_experts_implementation("eager")


def _insides(model: nn.Module) -> dict[str, Any]:
    """Attributes of all modules, by identity unless plain values."""

    def describe(value: Any) -> Any:
        if isinstance(value, dict):
            return [(key, describe(inner)) for key, inner in value.items()]
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            # Qwen3-VL stores a new tensor at each forward.
            return value.tolist()
        return value if isinstance(value, int | float | str | bool | None) else id(value)

    return {name: describe(vars(module)) for name, module in model.named_modules()}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_remove_restores_model(family: str) -> None:
    model = tiny.FAMILIES[family]()
    adapter = get_adapter(model)
    inputs = tiny.make_prompt(model)
    before, weights = (
        run_model(model, inputs),
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
    )
    insides, forward = _insides(model), model.forward
    runtime = PlanRuntime(adapter)
    assert runtime.installed and _insides(model) != insides
    assert list(model.state_dict()) == list(weights)
    assert inspect.signature(model.forward) == inspect.signature(forward)
    assert torch.equal(run_model(model, inputs), before)
    with runtime.use_plan(plan("0134", top_k=2, tier="high" if "pixel_values" in inputs else None)):
        assert not torch.equal(run_model(model, inputs), before)
    assert torch.equal(run_model(model, inputs), before)
    runtime.remove()
    runtime.remove()
    assert not runtime.installed and _insides(model) == insides and model.forward == forward
    assert torch.equal(run_model(model, inputs), before)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    with (
        pytest.raises(InputError),
        runtime.use_plan(adapter.geometry.full_plan()),
    ):
        pass
    second_runtime = PlanRuntime(adapter)
    with pytest.raises(ModelError):
        PlanRuntime(get_adapter(model))
    second_runtime.remove()


def test_remove_restores_instance_forward() -> None:
    model = tiny.build_olmoe()
    calls = []
    block = model.model.layers[3]
    original = block.forward

    def watched(*args: Any, **named: Any) -> Any:
        calls.append(3)
        return original(*args, **named)

    block.forward = watched
    insides = _insides(model)
    with attached(model) as runtime:
        with runtime.use_plan(plan("0124")):
            run_model(model, tiny.make_text_prompt())
        assert not calls
        with runtime.use_plan(plan("0123")):
            run_model(model, tiny.make_text_prompt())
        assert calls == [3]
    assert _insides(model) == insides and block.forward is watched


def test_remove_with_replaced_forward_is_refused(olmoe: tuple[Any, PlanRuntime]) -> None:
    model, runtime = olmoe
    block = model.model.layers[3]
    hooked_forward = block.forward
    block.forward = partial(hooked_forward)
    with pytest.raises(ModelError):
        runtime.remove()
    assert runtime.installed
    block.forward = hooked_forward
    runtime.remove()


@pytest.mark.parametrize("family", ["olmoe", "qwen3_vl_moe"])
def test_copy_and_pickle_have_no_runtime_and_own_weights(family: str) -> None:
    model = _model(family)
    inputs = tiny.make_text_prompt()
    before = run_model(model, inputs)
    file = io.BytesIO()
    with attached(model) as runtime:
        torch.save(model, file)
        file.seek(0)
        for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            with runtime.use_plan(plan("013", top_k=2)):
                assert torch.equal(run_model(copied, inputs), before)
            attention: Any = get_adapter(copied).blocks[2].self_attn
            attention.v_proj.weight.zero_()
            assert not torch.equal(run_model(copied, inputs), before)
            PlanRuntime(get_adapter(copied)).remove()
            assert torch.equal(run_model(model, inputs), before)


def test_narrowed_routers_use_reloaded_weights() -> None:
    model, other, inputs = tiny.build_olmoe(), tiny.build_olmoe(seed=1), tiny.make_text_prompt()
    with attached(model) as runtime, runtime.use_plan(plan(top_k=3)):
        before = run_model(model, inputs)
        model.load_state_dict(other.state_dict(), assign=True)
        after = run_model(model, inputs)
        moved = run_model(model.float(), inputs)
    assert (after - before).abs().max() > 0.1 and moved.dtype == torch.float32
    other_runtime = PlanRuntime(get_adapter(other))
    with other_runtime.use_plan(plan(top_k=3)):
        assert torch.equal(run_model(other, inputs), after)


def test_runtime_and_model_are_freed_together() -> None:
    model = tiny.build_olmoe()
    runtime = PlanRuntime(get_adapter(model))
    model_ref = weakref.ref(model)
    del model, runtime
    gc.collect()
    assert model_ref() is None


def test_plan_change_within_request_is_refused(olmoe: tuple[Any, PlanRuntime]) -> None:
    model, runtime = olmoe
    ids = tiny.make_text_prompt()["input_ids"]
    first, other = plan("0134", top_k=4), plan("0124", top_k=4)
    with runtime.use_plan(first):
        cache = model(input_ids=ids, use_cache=True).past_key_values
    with runtime.use_plan(other), pytest.raises(PlanError):
        model(input_ids=ids[:, :1], past_key_values=cache)
    with (
        runtime.use_decided_plan(None, 1, lambda hidden: first),
        pytest.raises(PlanError),
    ):
        model(input_ids=ids[:, :1], past_key_values=cache)
    with pytest.raises(PlanError):
        model(input_ids=ids[:, :1], past_key_values=cache)
    # The cache is still usable.
    with runtime.use_plan(first):
        model(input_ids=ids[:, :1], past_key_values=cache)
    assert runtime.adapter.get_kv_lengths(cache) == dict.fromkeys(first.blocks, 10)
    model(input_ids=ids, past_key_values=(without := model(input_ids=ids).past_key_values))
    with runtime.use_plan(first), pytest.raises(PlanError):
        model(input_ids=ids, past_key_values=without)


def test_use_plan_invalid_plan_is_refused(olmoe: tuple[Any, PlanRuntime]) -> None:
    with pytest.raises(PlanError):
        plan("12345")
    _, runtime = olmoe
    for wrong, expected_text in (
        (plan(top_k=7), r"`top_k` \(=7\)"),
        (plan("0126"), "6"),
        (plan(tier="low"), "tier"),
    ):
        with pytest.raises(PlanError, match=expected_text), runtime.use_plan(wrong):
            pass


def test_copied_cache_keeps_its_plan(olmoe: tuple[Any, PlanRuntime]) -> None:
    model, runtime = olmoe
    ids, selected_plan = tiny.make_text_prompt()["input_ids"], plan("0145", top_k=3)
    with runtime.use_plan(selected_plan):
        cache = model(input_ids=ids, use_cache=True).past_key_values
        branches = [copy.deepcopy(cache) for _ in range(2)]
        logits = [model(input_ids=ids[:, :2], past_key_values=branch).logits for branch in branches]
        assert torch.equal(*logits)
    with runtime.use_plan(plan("0125", top_k=3)), pytest.raises(PlanError):
        model(input_ids=ids, past_key_values=branches[0])


def test_reset_cache_accepts_other_plan(olmoe: tuple[Any, PlanRuntime]) -> None:
    from transformers import DynamicCache, StaticCache

    model, runtime = olmoe
    inputs = tiny.make_text_prompt()
    cache = StaticCache(config=model.config, max_cache_len=16)
    with runtime.use_plan(plan("0145")):
        model(**inputs, past_key_values=cache)
    cache.reset()
    with runtime.use_plan(plan("0123", top_k=3)):
        output = model(**inputs, past_key_values=cache).logits
        expected = model(**inputs, past_key_values=DynamicCache(config=model.config)).logits
    assert (output - expected).abs().max() < EXACT
    cache.reset()
    model(**inputs, past_key_values=cache)


def test_cache_of_failed_forward_is_refused(olmoe: tuple[Any, PlanRuntime]) -> None:
    from transformers import DynamicCache

    model, runtime = olmoe
    inputs = tiny.make_text_prompt()
    ids = inputs["input_ids"]
    cache = DynamicCache(config=model.config)

    def no_memory(module: nn.Module, args: Any) -> None:
        raise torch.OutOfMemoryError

    with runtime.use_plan(plan("01235")) as running:
        model(**inputs, past_key_values=cache)
        hook = model.model.layers[3].register_forward_pre_hook(no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            model(input_ids=ids[:, :1], past_key_values=cache)
        fresh = DynamicCache(config=model.config)
        with pytest.raises(torch.OutOfMemoryError):
            model(**inputs, past_key_values=fresh)
        hook.remove()
        with pytest.raises(PlanError):
            model(input_ids=ids[:, :1], past_key_values=cache)
        with pytest.raises(PlanError):
            model(**inputs, past_key_values=fresh)
        # Other requests are unaffected.
        assert run_model(model, inputs).isfinite().all() and running.executed_blocks == [0, 1, 2, 3, 5]


def test_modified_or_offloaded_cache_is_refused(olmoe: tuple[Any, PlanRuntime]) -> None:
    model, runtime = olmoe
    ids = tiny.make_text_prompt()["input_ids"]
    with runtime.use_plan(plan("0135")):
        cache = model(input_ids=ids, use_cache=True).past_key_values
        cache.layers[3].crop(-1)
        with pytest.raises(PlanError):
            model(input_ids=ids[:, :1], past_key_values=cache)
        offloaded = type(cache)(config=model.config)
        offloaded.offloading = True
        with pytest.raises(PlanError):
            model(input_ids=ids, past_key_values=offloaded)


def test_cache_lengths_are_not_read_during_capture(
    olmoe: tuple[Any, PlanRuntime], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, runtime = olmoe
    ids, selected_plan = tiny.make_text_prompt()["input_ids"], plan("0145", top_k=3)
    with runtime.use_plan(selected_plan):
        cache = model(input_ids=ids, use_cache=True).past_key_values
        expected = model(input_ids=ids[:, :1], past_key_values=copy.deepcopy(cache)).logits
        with monkeypatch.context() as patched:
            patched.setattr(torch.cuda, "is_available", lambda: True)
            patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            patched.setattr(type(runtime.adapter), "get_kv_lengths", None)
            assert torch.equal(model(input_ids=ids[:, :1], past_key_values=cache).logits, expected)
        # The cache still knows its plan.
        model(input_ids=ids[:, :1], past_key_values=cache)
    with runtime.use_plan(plan()), pytest.raises(PlanError):
        model(input_ids=ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_decided_plan_runs_from_insertion(family: str) -> None:
    model = _model(family)
    inputs = tiny.make_prompt(model, rows=2)
    tier = "high" if "pixel_values" in inputs else None
    observed: list[Tensor] = []
    selected_plan = plan("0125", top_k=3, position=2, tier=tier)

    def decide(hidden: Tensor) -> Plan:
        observed.append(hidden.clone())
        return selected_plan

    expected = model(**inputs, output_hidden_states=True, use_cache=False).hidden_states[2]
    with attached(model) as runtime:
        with runtime.use_plan(selected_plan):
            logits = one_by_one(model, inputs)[0]
        with runtime.use_decided_plan(tier, 2, decide) as running:
            assert running.plan is None
            assert torch.equal(one_by_one(model, inputs)[0], logits)
            assert running.plan == selected_plan and len(observed) == 1
    # Qwen3-VL adds nothing to text tokens after a block.
    assert (observed[0][:, -1] - expected[:, -6]).abs().max() < EXACT


def test_inconsistent_decision_is_refused(olmoe: tuple[Any, PlanRuntime]) -> None:
    model, runtime = olmoe
    inputs = tiny.make_text_prompt()
    for decided, expected_text in (
        (plan(position=3), "p3"),
        (plan(top_k=7, position=2), r"`top_k` \(=7\)"),
        (plan("0126", position=2), "6"),
        (None, "None"),
    ):
        with (
            pytest.raises(PlanError, match=expected_text or None),
            runtime.use_decided_plan(None, 2, lambda hidden, d=decided: d),  # pyright: ignore[reportArgumentType]
        ):
            run_model(model, inputs)
    for tier, position in (("low", 2), (None, 6), (None, 0)):
        with pytest.raises(PlanError), runtime.use_decided_plan(tier, position, lambda hidden: plan()):  # type: ignore[arg-type]
            pass

    # A failing policy fails only its call.
    def broken(hidden: Tensor) -> Plan:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), runtime.use_decided_plan(None, 2, broken):
        run_model(model, inputs)
    assert run_model(model, inputs).isfinite().all()


def test_threads_run_their_own_plans(olmoe: tuple[Any, PlanRuntime]) -> None:
    model, runtime = olmoe
    inputs = tiny.make_text_prompt(rows=2)
    plans = [plan("0123", top_k=2), plan("0145", top_k=4), plan("012345", top_k=6), None]

    def run(current_plan: Plan | None) -> Tensor:
        with torch.no_grad(), ExitStack() as stack:
            if current_plan is not None:
                stack.enter_context(runtime.use_plan(current_plan))
            return one_by_one(model, inputs)[0]

    single = [run(current_plan) for current_plan in plans]
    assert all(not torch.equal(a, b) for a, b in pairwise(single[:3])) and torch.equal(*single[2:])
    collected: dict[int, list[Tensor]] = {index: [] for index in range(len(plans))}
    start = threading.Barrier(len(plans))

    def work(index: int) -> None:
        start.wait()
        collected[index].extend(run(plans[index]) for _ in range(3))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(plans))]
    # Threads do not inherit the plan of this context.
    with runtime.use_plan(plans[1]):  # type: ignore[arg-type]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for index, expected in enumerate(single):
        assert len(collected[index]) == 3 and all(
            torch.equal(logits, expected) for logits in collected[index]
        )


def test_nested_plans_and_errors_restore_outer_plan(olmoe: tuple[Any, PlanRuntime]) -> None:
    model, runtime = olmoe
    inputs = tiny.make_text_prompt()
    bare = run_model(model, inputs)
    with runtime.use_plan(plan("012")):
        outer = run_model(model, inputs)
        with pytest.raises(KeyError), runtime.use_plan(plan("034", top_k=2)):
            assert not torch.equal(run_model(model, inputs), outer)
            raise KeyError
        assert torch.equal(run_model(model, inputs), outer)
    assert torch.equal(run_model(model, inputs), bare)


def test_runtimes_of_two_models_are_independent() -> None:
    first, second, inputs = _model("olmoe"), tiny.build_olmoe(seed=3), tiny.make_text_prompt()
    bare = run_model(second, inputs)
    runtime, other_runtime = PlanRuntime(get_adapter(first)), PlanRuntime(get_adapter(second))
    with runtime.use_plan(plan("012")):
        assert torch.equal(run_model(second, inputs), bare)
        with other_runtime.use_plan(plan("034", top_k=2)) as running:
            run_model(first, inputs)
            assert running.executed_blocks == []
    runtime.remove()
    other_runtime.remove()


def skip_without_cache_crop() -> None:
    """Skip if this release of transformers cannot crop a cache with an empty block."""
    from transformers.cache_utils import DynamicLayer

    try:
        DynamicLayer().crop(-1)
    except TypeError:
        pytest.skip("older releases of transformers cannot crop a block without tokens")


@pytest.mark.parametrize(
    "generation_options",
    [
        {},
        {"cache_implementation": "static"},
        {"do_sample": True, "top_k": 5},
        {"num_beams": 3},
        {"num_return_sequences": 2, "do_sample": True},
        {"prompt_lookup_num_tokens": 2},
        {"use_cache": False},
    ],
    ids=lambda generation_options: "-".join(generation_options) or "greedy",
)
@pytest.mark.parametrize("family", ["olmoe", "llava_siglip", "qwen3_vl_moe"])
def test_transformers_generate_runs_plan(family: str, generation_options: dict[str, Any]) -> None:
    model = _model(family)
    if "prompt_lookup_num_tokens" in generation_options:
        skip_without_cache_crop()
    adapter = get_adapter(model)
    inputs = tiny.make_prompt(model)
    selected_plan = plan("0235", top_k=3, position=1, tier="low" if "pixel_values" in inputs else None)
    small = adapter.reduce_to_tier(inputs, selected_plan.tier)
    with (
        attached(model) as runtime,
        runtime.use_plan(selected_plan),
        count_calls(adapter.blocks) as counts,
        torch.random.fork_rng(devices=[]),
    ):
        torch.manual_seed(0)
        # A generated placeholder would be an image without pixels.
        special = list(range(60, tiny.VOCABULARY))
        result = model.generate(**small, max_new_tokens=5, suppress_tokens=special, **generation_options)
        assert set(counts.attention) == set(selected_plan.blocks)
        assert counts.experts_per_token() == {0: 6.0, 2: 3.0, 3: 3.0, 5: 3.0}
        if not generation_options:
            count = small["input_ids"].shape[1]
            for index in range(count, result.shape[1]):
                assert (
                    run_model(model, grown(small, result[:, :index]))[0, -1, :60].argmax() == result[0, index]
                )


def test_recorded_outputs_of_skipped_blocks_keep_index(olmoe: tuple[Any, PlanRuntime]) -> None:
    model, runtime = olmoe
    inputs = tiny.make_text_prompt()
    with runtime.use_plan(plan("0135", top_k=3)):
        output = model(
            **inputs, output_hidden_states=True, output_router_logits=True, output_attentions=False
        )
        assert len(output.hidden_states) == 7 and len(output.router_logits) == 4
        assert output.aux_loss.isfinite()
        for block in (2, 4):
            assert torch.equal(output.hidden_states[block], output.hidden_states[block + 1])
        for block in (0, 1, 3):
            assert not torch.equal(output.hidden_states[block], output.hidden_states[block + 1])
        outputs = model(*inputs.values(), return_dict=False)
        assert torch.equal(outputs[0], output.logits)
        cache = outputs[1]
        assert runtime.adapter.get_kv_lengths(cache) == dict.fromkeys((0, 1, 3, 5), 9)


def test_gradients_reach_only_executed_blocks() -> None:
    model, inputs = tiny.build_olmoe(), tiny.make_text_prompt()
    runtime = PlanRuntime(get_adapter(model))
    with torch.enable_grad(), runtime.use_plan(plan("0135", top_k=2)):
        model(**inputs, labels=inputs["input_ids"], output_router_logits=True).loss.backward()
    for block, layer in enumerate(model.model.layers):
        parts = [parameter.grad is not None for parameter in layer.parameters()]
        assert all(parts) if block in (0, 1, 3, 5) else not any(parts)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_is_refused(reentrant: bool) -> None:
    model, inputs = tiny.build_olmoe(), tiny.make_text_prompt()
    runtime = PlanRuntime(get_adapter(model))
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    with torch.enable_grad(), runtime.use_plan(plan("0135")):
        model.train()
        with pytest.raises(PlanError):
            model(**inputs, use_cache=False)
        model.eval()
        model(**inputs)
        getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
        model.train()
        model(**inputs, use_cache=False).logits.sum().backward()


def test_router_with_foreign_forward_is_refused_except_accelerate(olmoe: tuple[Any, PlanRuntime]) -> None:
    model, runtime = olmoe
    runtime.remove()
    router = model.model.layers[2].mlp.gate
    model_forward = router.forward
    router.forward = partial(model_forward)
    with pytest.raises(ModelError):
        PlanRuntime(get_adapter(model))
    # As accelerate leaves it on a model spread over devices.
    router._hf_hook = object()
    other_runtime = PlanRuntime(get_adapter(model))
    with other_runtime.use_plan(plan(top_k=2)), count_calls(model.model.layers) as counts:
        run_model(model, tiny.make_text_prompt())
        assert counts.experts_per_token()[2] == 2.0
    other_runtime.remove()
    assert isinstance(router.forward, partial)
    del router.forward, router._hf_hook


@pytest.mark.slow
def test_compiled_model_runs_plan(olmoe: tuple[Any, PlanRuntime]) -> None:
    model, runtime = olmoe
    inputs = tiny.make_text_prompt()
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="eager")
    bare = run_model(model, inputs)
    assert (run_model(compiled, inputs) - bare).abs().max() < EXACT
    for compiled_plan in (plan("0123", top_k=2), plan("0145", top_k=4)):
        with runtime.use_plan(compiled_plan) as running:
            expected = run_model(model, inputs)
            assert (run_model(compiled, inputs) - expected).abs().max() < EXACT
            assert running.executed_blocks == list(compiled_plan.blocks)
    assert (run_model(compiled, inputs) - bare).abs().max() < EXACT
    torch._dynamo.reset()


class _NoRouters(DecoderAdapter):
    def router(self, block: nn.Module) -> None:
        return None

    def _top_k(self) -> int:
        return 6


class _IgnoresTopK(DecoderAdapter):
    def with_top_k(self, router: nn.Module, top_k: int) -> nn.Module:
        return copy.copy(router)


class _WrongBlocks(DecoderAdapter):
    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        return tuple(copy.copy(block) for block in self._blocks)


class _WrongRouters(DecoderAdapter):
    def router(self, block: nn.Module) -> nn.Module:
        router_module = super().router(block)
        assert router_module is not None
        return vars(self).setdefault(f"_{id(block)}", copy.copy(router_module))


class _FewBlocks(DecoderAdapter):
    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        return self._blocks[:-1]


@pytest.mark.parametrize("adapter", [_NoRouters, _IgnoresTopK, _FewBlocks])
def test_adapter_without_effect_is_refused_on_installation(adapter: Any) -> None:
    model = tiny.build_olmoe()
    insides = _insides(model)
    with pytest.raises(ModelError):
        PlanRuntime(adapter(model))
    assert _insides(model) == insides


@pytest.mark.parametrize("adapter", [_WrongBlocks, _WrongRouters])
def test_adapter_without_effect_is_refused_at_call(adapter: Any) -> None:
    model = tiny.build_olmoe()
    with (
        PlanRuntime(adapter(model)).use_plan(plan("0134")),
        pytest.raises(ModelError),
    ):
        run_model(model, tiny.make_text_prompt())


def test_top_k_without_experts_after_insertion_is_refused() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config: dict[str, Any] = tiny.make_text_config(depth=4, top_k=3, experts=4) | {"mlp_only_layers": [1, 3]}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**config, moe_intermediate_size=8)).eval()
    runtime = PlanRuntime(get_adapter(model))
    assert runtime.geometry.top_k == 3
    with (
        pytest.raises(PlanError),
        runtime.use_plan(plan("013", top_k=2)),
    ):
        pass
    with runtime.use_plan(plan("013", top_k=3)), runtime.use_plan(plan("023", top_k=2)):
        pass


def test_model_without_weights_is_refused() -> None:
    model = tiny.build_olmoe().to("meta")
    with pytest.raises(ModelError, match="`meta`"):
        PlanRuntime(get_adapter(model))


def test_inputs_of_other_tier_are_refused() -> None:
    for family in ("llava_siglip", "qwen3_vl_moe"):
        model = _model(family)
        adapter = get_adapter(model)
        inputs, only_text = tiny.make_prompt(model), tiny.make_text_prompt()
        with attached(model) as runtime:
            with runtime.use_plan(plan("0134", tier="medium")):
                run_model(model, adapter.reduce_to_tier(inputs, "medium"))
                for wrong in (inputs, only_text):
                    with pytest.raises(PlanError):
                        run_model(model, wrong)
                    with pytest.raises(PlanError):
                        model(
                            wrong["input_ids"],
                            **{name: value for name, value in wrong.items() if name != "input_ids"},
                        )
            with runtime.use_plan(plan("0134")):
                run_model(model, only_text)
                with pytest.raises(PlanError, match="`tier`"):
                    run_model(model, inputs)


def test_interleaved_requests_keep_their_model_state() -> None:
    model = _model("qwen3_vl_moe")
    adapter = get_adapter(model)
    with attached(model) as runtime:
        plans = [plan("0134", tier="low"), plan("01345", top_k=3, tier="high"), plan("0123")]
        requests = [
            adapter.reduce_to_tier(tiny.make_prompt(model, images=count, seed=count), request_plan.tier)
            for count, request_plan in zip((1, 3, 0), plans, strict=True)
        ]
        single, batched, caches = [], [], []
        for request_plan, inputs in zip(plans, requests, strict=True):
            with runtime.use_plan(request_plan):
                single.append(one_by_one(model, inputs)[0][:, -5:])
                prompt_tokens = {
                    name: value[:, :-5] if value.shape[:2] == inputs["input_ids"].shape else value
                    for name, value in inputs.items()
                }
                caches.append(model(**prompt_tokens, use_cache=True).past_key_values)
        for index in range(-5, 0):
            for request_plan, inputs, past in zip(plans, requests, caches, strict=True):
                ids = inputs["input_ids"]
                with runtime.use_plan(request_plan):
                    token = ids[:, ids.shape[1] + index][:, None]
                    batched.append(model(input_ids=token, past_key_values=past).logits)
        for index, expected in enumerate(single):
            assert torch.equal(torch.cat(batched[index::3], 1), expected)
