"""Prefill of prompts in one piece and split: logits, keys and values, and plan decisions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseflow.adaptive.adapters import Adapter, get_adapter
from sparseflow.adaptive.engine.cache import SlotCache
from sparseflow.adaptive.engine.decode import get_decode_plan
from sparseflow.adaptive.engine.graphs import GraphCache
from sparseflow.adaptive.engine.kernel_patcher import KernelPatcher
from sparseflow.adaptive.engine.prefill.embedding import PromptEmbedder, on_decoder_call
from sparseflow.adaptive.engine.prefill.prefill import PrefillOutput, PrefillRunner
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan, Tier
from sparseflow.errors import ModelError, PlanError
from tests.adaptive import tiny
from tests.adaptive.counting import count_calls
from tests.adaptive.engine.serving import (
    DEEP,
    LATER,
    NARROW,
    SHALLOW,
    attached,
    copy_state,
    is_unchanged,
    model,
    words,
)

SIZES = {"one piece": None, "split": (8, 24, 64, 96)}
EXACT = 1e-10


def prefill_of(
    adapter: Adapter, runtime: PlanRuntime, sizes: tuple[int, ...] | None, tokens: int = 96
) -> PrefillRunner:
    graphs = GraphCache(next(adapter.decoder.parameters()).device)
    kernel_patcher = KernelPatcher(adapter)
    return PrefillRunner(adapter, runtime, graphs, kernel_patcher=kernel_patcher, tokens=tokens, sizes=sizes)


def cache_of(adapter: Adapter, plan: Plan, *, slots: int = 3, tokens: int = 96) -> SlotCache:
    key = get_decode_plan(plan, adapter.geometry)
    return SlotCache(key, adapter.geometry.depth, slots=slots, tokens=tokens, state=len(adapter.state))


def run(
    prefill: PrefillRunner,
    inputs: Any,
    plan: Plan,
    cache: SlotCache,
    *,
    decide: Callable[[Tensor], Plan] | None = None,
) -> PrefillOutput:
    """Run a prompt of the highest tier."""
    reduced = prefill.adapter.reduce_to_tier(inputs, plan.tier)
    rows, images = range(len(reduced["input_ids"])), prefill.adapter.count_vision_tokens(reduced) > 0
    return prefill.run(
        reduced,
        plan.tier,
        plan.insertion_position,
        images=images,
        decide=decide or (lambda token: plan),
        allocate=lambda plan: (cache, [cache.allocate() for _ in rows]),
    )


def expected(adapter: Adapter, runtime: PlanRuntime, inputs: Any, plan: Plan) -> tuple[Tensor, Any]:
    """Logits and cache by the model's own forward."""
    reduced = adapter.reduce_to_tier(inputs, plan.tier)
    positions, _ = adapter.compute_positions(reduced)
    with runtime.use_plan(plan):
        output: Any = adapter.model(**{**reduced, "position_ids": positions}, use_cache=True)
    return output.logits[:, -1], output.past_key_values


@pytest.mark.parametrize("mode", SIZES)
@pytest.mark.parametrize("family", list(tiny.FAMILIES))
@pytest.mark.parametrize("text", [DEEP, LATER, SHALLOW, NARROW])
def test_prefill_matches_model(mode: str, family: str, text: Plan) -> None:
    with attached(family) as (adapter, runtime):
        prefill = prefill_of(adapter, runtime, SIZES[mode])
        prompts: list[tuple[Any, Plan]] = [(words(5), text), (words(11, 1), text)]
        if adapter.geometry.tiers:
            prompts[1] = (tiny.make_prompt(model(family)), replace(text, tier="low"))
        cache = cache_of(adapter, text)
        # Earlier contents of a slot must not matter.
        for layer in (cache.blocks[block] for block in text.blocks):
            layer.buffers(torch.zeros(1, 1, 1, 8).double(), torch.zeros(1, 1, 1, 8).double())
            assert layer.keys is not None and layer.values is not None
            layer.keys.fill_(1e3)
            layer.values.fill_(1e3)
        for slot, (inputs, plan) in enumerate(prompts):
            logits, expected_cache = expected(adapter, runtime, inputs, plan)
            result = run(prefill, inputs, plan, cache)
            assert result.plan == plan and cache.count == slot + 1
            torch.testing.assert_close(result.logits, logits, rtol=0.0, atol=EXACT)
            length = cache.lengths[slot]
            for block in plan.blocks:
                slot_keys = cache.blocks[block].keys
                assert slot_keys is not None and length == expected_cache.layers[block].keys.shape[2]
                torch.testing.assert_close(
                    slot_keys[slot, :, :length], expected_cache.layers[block].keys[0], rtol=0, atol=EXACT
                )


@pytest.mark.parametrize("mode", SIZES)
def test_decide_receives_latency_token(mode: str) -> None:
    with attached("llava_siglip") as (adapter, runtime):
        plan = replace(SHALLOW, tier="low")
        inputs, observed = tiny.make_prompt(model("llava_siglip")), []

        def decide(token: Tensor) -> Plan:
            observed.append(token)
            return plan

        with count_calls(adapter.blocks) as counts:
            run(
                prefill_of(adapter, runtime, SIZES[mode]),
                inputs,
                plan,
                cache_of(adapter, plan),
                decide=decide,
            )
        if mode == "one piece":
            assert counts.attention == {0: 1, 1: 1, 4: 1} and counts.experts_per_token() == {0: 6, 1: 6, 4: 3}
        hidden: list[Any] = []
        hook = adapter.blocks[1].register_forward_hook(lambda module, args, output: hidden.append(output))
        expected(adapter, runtime, inputs, plan)
        hook.remove()
        torch.testing.assert_close(observed, [hidden[0][0, -1]], rtol=0.0, atol=EXACT)


@pytest.mark.parametrize("mode", SIZES)
def test_inconsistent_decision_is_refused(mode: str) -> None:
    with attached() as (adapter, runtime):
        prefill, cache = prefill_of(adapter, runtime, SIZES[mode]), cache_of(adapter, SHALLOW)
        with pytest.raises(PlanError):
            run(prefill, words(4), SHALLOW, cache, decide=lambda _: DEEP)
        wrong = replace(SHALLOW, top_k=7)
        with pytest.raises(PlanError):
            run(prefill, words(4), SHALLOW, cache, decide=lambda _: wrong)
        assert cache.count == 0
        with pytest.raises(PlanError):
            run(prefill, words(4), NARROW, cache)


def test_several_rows_run_in_one_piece() -> None:
    with attached("llava_siglip") as (adapter, runtime):
        plan = replace(SHALLOW, tier="medium")
        inputs = tiny.make_prompt(model("llava_siglip"), rows=2)
        cache = cache_of(adapter, plan)
        # Several rows always run in one piece.
        result = run(prefill_of(adapter, runtime, (64, 96)), inputs, plan, cache)
        assert cache.lengths == (30, 30)
        torch.testing.assert_close(
            result.logits, expected(adapter, runtime, inputs, plan)[0], rtol=0.0, atol=EXACT
        )


def test_rope_offset_of_images_is_returned() -> None:
    adapter = get_adapter(tiny.build_qwen3_vl_moe())
    runtime = PlanRuntime(adapter)
    plan = replace(DEEP, tier="high")
    module, name = adapter.state[0]
    result = run(
        prefill_of(adapter, runtime, None),
        tiny.make_prompt(model("qwen3_vl_moe")),
        plan,
        cache_of(adapter, plan),
    )
    # The positions of 12 vision tokens, 3 x 4, span 4.
    assert result.ropes == (-8,)
    assert getattr(module, name) is None


def test_decoder_with_further_inputs_runs_in_one_piece(caplog: pytest.LogCaptureFixture) -> None:
    with attached("qwen3_vl_moe") as (adapter, runtime):
        prefill = prefill_of(adapter, runtime, (32, 64))
        inputs, plan = tiny.make_prompt(model("qwen3_vl_moe")), replace(DEEP, tier="high")
        with caplog.at_level(logging.INFO):
            run(prefill, inputs, plan, cache_of(adapter, plan))
            run(prefill, inputs, plan, cache_of(adapter, plan))
        assert caplog.text.count("deepstack_visual_embeds") == 1
        # Warm-up detects it as well.
        warmed = prefill_of(adapter, runtime, (32, 64))
        for task in warmed.warm_up(plan, cache_of(adapter, plan), inputs):
            task()
        assert warmed._embedder is not None and warmed._embedder.fallback_reason is not None


def test_decoder_that_is_more_than_its_blocks_runs_in_one_piece(caplog: pytest.LogCaptureFixture) -> None:
    tiny_model = tiny.build_olmoe()
    adapter = get_adapter(tiny_model)

    def scaled(module: Any, args: Any, named: dict[str, Any]) -> Any:
        """As architectures that scale embeddings within the decoder."""
        if named.get("inputs_embeds") is None:
            named["inputs_embeds"] = adapter.embed(named.pop("input_ids"))
        return args, named | {"inputs_embeds": 3.0 * named["inputs_embeds"]}

    adapter.decoder.register_forward_pre_hook(scaled, with_kwargs=True)
    runtime = PlanRuntime(adapter)
    with caplog.at_level(logging.WARNING):
        prefill = prefill_of(adapter, runtime, (8, 64))
        assert "logits differ by" in caplog.text
        result = run(prefill, words(5), SHALLOW, cache_of(adapter, SHALLOW))
        torch.testing.assert_close(
            result.logits, expected(adapter, runtime, words(5), SHALLOW)[0], rtol=0.0, atol=EXACT
        )


def entering(adapter: Adapter, inputs: Any) -> Tensor:
    """Input of the first block in the model's own forward."""
    observed: list[Tensor] = []
    with on_decoder_call(adapter, lambda named: observed.append(named["inputs_embeds"])):
        adapter.model(**inputs)
    return observed[0]


def make_empty_slots(adapter: Adapter, tokens: int) -> Tensor:
    """Buffer of embeddings for this many tokens."""
    return adapter.embed(torch.zeros(1, tokens, dtype=torch.int64))


def test_embedder_compares_first_capture_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model = model("llava_siglip")
    with attached("llava_siglip") as (adapter, _):
        vision = PromptEmbedder(adapter, GraphCache("cpu"), (24, 32, 80), make_empty_slots(adapter, 80))
        mask_calls: list[int] = []
        masks = type(tiny_model.model).get_placeholder_mask
        monkeypatch.setattr(
            type(tiny_model.model),
            "get_placeholder_mask",
            lambda *args, **named: mask_calls.append(1) or masks(*args, **named),
        )
        for seed in range(4):
            inputs = adapter.reduce_to_tier(
                tiny.make_prompt(tiny_model, tokens=3 + seed, seed=seed), "medium" if seed % 2 else "low"
            )
            embeddings = vision.embed(inputs, images=True)
            assert embeddings is not None and embeddings.shape[1] == inputs["input_ids"].shape[1]
            torch.testing.assert_close(embeddings, entering(adapter, inputs), rtol=0.0, atol=EXACT)
        # Once in the first comparison, and in each forward of this test.
        assert len(mask_calls) == 1 + 4 and "get_placeholder_mask" not in vars(tiny_model.model)
        work = vision.warm_up(adapter.reduce_to_tier(tiny.make_prompt(tiny_model), "medium"))
        # 20 vision tokens, a separator and nine text tokens fit into two sizes.
        assert len(work) == 2
        for task in work:
            task()
        assert len(mask_calls) == 5


def test_embedder_with_differing_capture_falls_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_model = model("llava_siglip")
    with attached("llava_siglip") as (adapter, _), caplog.at_level(logging.WARNING):
        inputs = adapter.reduce_to_tier(tiny.make_prompt(tiny_model), "low")
        for wrong, expected_text in ((5, "would differ"), ("token", "TypeError")):
            vision = PromptEmbedder(adapter, GraphCache("cpu"), (32,), make_empty_slots(adapter, 32))
            vision._image_token = wrong  # pyright: ignore[reportAttributeAccessIssue]
            if wrong == "token":
                monkeypatch.setattr(GraphCache, "run", lambda self, key, body: body("unexpected"))
            for _ in range(2):
                embeddings = vision.embed(inputs, images=True)
                assert embeddings is not None
                torch.testing.assert_close(embeddings, entering(adapter, inputs), rtol=0.0, atol=EXACT)
            assert expected_text in caplog.text and vision._can_capture is False


@pytest.mark.parametrize("mode", SIZES)
def test_model_that_returns_all_logits_matches(mode: str) -> None:
    tiny_model = tiny.build_olmoe()
    model_forward = tiny_model.forward

    def forward(
        input_ids: Any = None,
        inputs_embeds: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: Any = None,
    ) -> Any:
        """Forward without `logits_to_keep`, as remote code may have."""
        return model_forward(
            input_ids=input_ids, inputs_embeds=inputs_embeds, position_ids=position_ids,
            past_key_values=past_key_values, use_cache=use_cache,
        )  # fmt: skip

    tiny_model.forward = forward
    adapter = get_adapter(tiny_model)
    runtime = PlanRuntime(adapter)
    result = run(prefill_of(adapter, runtime, SIZES[mode]), words(5), SHALLOW, cache_of(adapter, SHALLOW))
    with runtime.use_plan(SHALLOW):
        full_output = tiny_model(input_ids=words(5)["input_ids"]).logits[:, -1]
    torch.testing.assert_close(result.logits, full_output, rtol=0.0, atol=EXACT)


def test_decoder_that_is_not_called_is_refused() -> None:
    tiny_model = tiny.build_llava_siglip()
    adapter = get_adapter(tiny_model)
    runtime = PlanRuntime(adapter)
    prefill = prefill_of(adapter, runtime, (64,))
    adapter._decoder = torch.nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ModelError):
        run(prefill, tiny.make_prompt(tiny_model), replace(DEEP, tier="low"), cache_of(adapter, DEEP))


@pytest.mark.parametrize("mode", SIZES)
def test_prefill_leaves_model_unchanged(mode: str) -> None:
    tiny_model = tiny.build_llava_siglip()
    adapter = get_adapter(tiny_model)
    runtime = PlanRuntime(adapter)
    run(
        prefill_of(adapter, runtime, None),
        tiny.make_prompt(tiny_model),
        replace(DEEP, tier="low"),
        cache_of(adapter, DEEP),
    )
    before, forwards = (
        copy_state(tiny_model),
        {id(module): vars(module).get("forward") for module in tiny_model.modules()},
    )
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in tiny_model.modules()]
    prefill = prefill_of(adapter, runtime, SIZES[mode])
    plan = replace(SHALLOW, tier="low")
    for task in prefill.warm_up(plan, cache_of(adapter, plan)):
        task()
    run(prefill, tiny.make_prompt(tiny_model), plan, cache_of(adapter, plan))
    with pytest.raises(ZeroDivisionError):
        run(prefill, tiny.make_prompt(tiny_model), plan, cache_of(adapter, plan), decide=lambda _: 1 / 0)  # pyright: ignore[reportArgumentType]
    assert is_unchanged(tiny_model, before)
    assert forwards == {id(module): vars(module).get("forward") for module in tiny_model.modules()}
    assert hooks == [
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in tiny_model.modules()
    ]
    runtime.remove()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("tier", ["low", None])
def test_meanwhile_is_called_on_gpu_only(device: str, tier: Tier | None) -> None:
    tiny_model = tiny.build_llava_siglip().to(device)
    adapter = get_adapter(tiny_model)
    plan, order = replace(DEEP, tier=tier), []

    def decide(token: Tensor) -> Plan:
        order.append("decide")
        return plan

    prefill = prefill_of(adapter, PlanRuntime(adapter), (16, 40, 96))
    inputs = {name: value.to(device) for name, value in tiny.make_prompt(tiny_model).items()}
    case = (
        adapter.reduce_to_tier(inputs, tier) if tier else {"input_ids": torch.ones_like(inputs["input_ids"])}
    )
    cache = cache_of(adapter, DEEP)
    for _ in range(2):  # the first image also runs the model's own forward
        order.clear()
        prefill.run(
            case,
            plan.tier,
            plan.insertion_position,
            images=tier is not None,
            decide=decide,
            allocate=lambda plan: (cache, [cache.allocate()]),
            meanwhile=lambda: order.append("meanwhile"),
        )
    assert order == (["decide"] if device == "cpu" else ["meanwhile", "decide"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_captured_prompts_on_gpu_match_model(dtype: torch.dtype) -> None:
    tiny_model = tiny.build_llava_siglip(dtype=dtype).cuda()
    adapter = get_adapter(tiny_model)
    runtime = PlanRuntime(adapter)
    graphs = GraphCache("cuda")
    prefill = PrefillRunner(
        adapter, runtime, graphs, kernel_patcher=KernelPatcher(adapter), tokens=96, sizes=(16, 40, 96)
    )
    for seed in range(2):
        for text in (DEEP, SHALLOW, NARROW):
            cache = cache_of(adapter, text, slots=4)
            for tier in ("low", "medium", "high", "low"):
                plan = replace(text, tier=tier)
                inputs = {
                    name: value.cuda() for name, value in tiny.make_prompt(tiny_model, seed=seed).items()
                }
                result = run(prefill, inputs, plan, cache)
                tolerance = EXACT if dtype == torch.float64 else 1e-3
                logits = expected(adapter, runtime, inputs, plan)[0]
                torch.testing.assert_close(result.logits, logits, rtol=tolerance, atol=tolerance)
    assert not graphs.failures
    assert sum("image" in key for key in graphs.captured if isinstance(key, tuple)) == 3
