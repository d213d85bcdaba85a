"""Prompts, whole and in parts: the logits of the model, keys and values in slots, decisions in place."""

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
    model,
    parameters,
    same,
    words,
)

SIZES = {"whole": None, "in parts": (8, 24, 64, 96)}
EXACT = 1e-10


def prefill_of(
    adapter: Adapter, runtime: PlanRuntime, sizes: tuple[int, ...] | None, tokens: int = 96
) -> PrefillRunner:
    device = next(adapter.decoder.parameters()).device
    return PrefillRunner(adapter, runtime, GraphCache(device), tokens=tokens, sizes=sizes)


def cache_of(adapter: Adapter, plan: Plan, *, slots: int = 3, tokens: int = 96) -> SlotCache:
    key = get_decode_plan(plan, adapter.geometry)
    return SlotCache(key, adapter.geometry.depth, slots=slots, tokens=tokens, state=len(adapter.state))


def run(
    prefill: PrefillRunner,
    inputs: Any,
    plan: Plan,
    cache: SlotCache,
    *,
    replan: Callable[[int], int] = lambda position: position,
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
        replan=replan,
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
def test_gives_what_the_model_gives(mode: str, family: str, text: Plan) -> None:
    with attached(family) as (adapter, runtime), torch.no_grad():
        prefill = prefill_of(adapter, runtime, SIZES[mode])
        prompts: list[tuple[Any, Plan]] = [(words(5), text), (words(11, 1), text)]
        if adapter.geometry.tiers:
            prompts[1] = (tiny.make_prompt(model(family)), replace(text, tier="low"))
        cache = cache_of(adapter, text)
        # What a slot held before must not matter.
        for layer in (cache.blocks[block] for block in text.blocks):
            layer.buffers(torch.zeros(1, 1, 1, 8).double(), torch.zeros(1, 1, 1, 8).double())
            assert layer.keys is not None and layer.values is not None
            layer.keys.fill_(1e3)
            layer.values.fill_(1e3)
        for slot, (inputs, plan) in enumerate(prompts):
            logits, expected_cache = expected(adapter, runtime, inputs, plan)
            result = run(prefill, inputs, plan, cache)
            assert (result.plan, result.slots, result.cache) == (plan, (slot,), cache)
            torch.testing.assert_close(result.logits, logits, rtol=0.0, atol=EXACT)
            length = cache.lengths[slot]
            for block in plan.blocks:
                slot_keys = cache.blocks[block].keys
                assert slot_keys is not None and length == expected_cache.layers[block].keys.shape[2]
                torch.testing.assert_close(
                    slot_keys[slot, :, :length], expected_cache.layers[block].keys[0], rtol=0, atol=EXACT
                )


@pytest.mark.parametrize("mode", SIZES)
def test_the_second_controller_sees_the_latency_token(mode: str) -> None:
    with attached("llava_siglip") as (adapter, runtime), torch.no_grad():
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
        if mode == "whole":
            assert counts.attention == {0: 1, 1: 1, 4: 1} and counts.experts_per_token() == {0: 6, 1: 6, 4: 3}
        hidden: list[Any] = []
        hook = adapter.blocks[1].register_forward_hook(lambda module, args, output: hidden.append(output))
        expected(adapter, runtime, inputs, plan)
        hook.remove()
        torch.testing.assert_close(observed, [hidden[0][0, -1]], rtol=0.0, atol=EXACT)


@pytest.mark.parametrize("mode", SIZES)
def test_the_position_may_change_after_the_vision_encoder(mode: str) -> None:
    with attached("llava_siglip") as (adapter, runtime), torch.no_grad():
        plan, queries = replace(SHALLOW, tier="low"), []
        before = replace(plan, insertion_position=1)

        def replan(position: int) -> int:
            queries.append(position)
            return 2

        inputs, cache = tiny.make_prompt(model("llava_siglip")), cache_of(adapter, plan)
        result = run(
            prefill_of(adapter, runtime, SIZES[mode]),
            inputs,
            before,
            cache,
            replan=replan,
            decide=lambda _: plan,
        )
        assert queries == [1] and result.plan == plan
        torch.testing.assert_close(
            result.logits, expected(adapter, runtime, inputs, plan)[0], rtol=0.0, atol=EXACT
        )


@pytest.mark.parametrize("mode", SIZES)
def test_decisions_must_fit_together(mode: str) -> None:
    with attached() as (adapter, runtime), torch.no_grad():
        prefill, cache = prefill_of(adapter, runtime, SIZES[mode]), cache_of(adapter, SHALLOW)
        with pytest.raises(PlanError):
            run(prefill, words(4), SHALLOW, cache, decide=lambda _: DEEP)
        with pytest.raises(PlanError):
            run(prefill, words(4), SHALLOW, cache, replan=lambda _: 9)
        wrong = replace(SHALLOW, top_k=7)
        with pytest.raises(PlanError):
            run(prefill, words(4), SHALLOW, cache, decide=lambda _: wrong)
        assert cache.count == 0
        with pytest.raises(PlanError):
            run(prefill, words(4), NARROW, cache)


def test_several_rows_at_once() -> None:
    with attached("llava_siglip") as (adapter, runtime), torch.no_grad():
        plan = replace(SHALLOW, tier="medium")
        inputs = tiny.make_prompt(model("llava_siglip"), rows=2)
        cache = cache_of(adapter, plan)
        # However it is asked for, several rows run whole.
        result = run(prefill_of(adapter, runtime, (64, 96)), inputs, plan, cache)
        assert result.slots == (0, 1) and cache.lengths == (30, 30)
        torch.testing.assert_close(
            result.logits, expected(adapter, runtime, inputs, plan)[0], rtol=0.0, atol=EXACT
        )


def test_rotary_positions_of_images() -> None:
    adapter = get_adapter(tiny.build_qwen3_vl_moe())
    runtime = PlanRuntime(adapter)
    with torch.no_grad():
        plan = replace(DEEP, tier="high")
        module, name = adapter.state[0]
        result = run(
            prefill_of(adapter, runtime, None),
            tiny.make_prompt(model("qwen3_vl_moe")),
            plan,
            cache_of(adapter, plan),
        )
        # 12 vision tokens of 3 x 4 take the place of 4.
        assert result.ropes == (-8,)
        assert getattr(module, name) is None


def test_a_decoder_that_is_given_more_runs_whole(caplog: pytest.LogCaptureFixture) -> None:
    with attached("qwen3_vl_moe") as (adapter, runtime), torch.no_grad():
        prefill = prefill_of(adapter, runtime, (32, 64))
        inputs, plan = tiny.make_prompt(model("qwen3_vl_moe")), replace(DEEP, tier="high")
        with caplog.at_level(logging.INFO):
            run(prefill, inputs, plan, cache_of(adapter, plan))
            run(prefill, inputs, plan, cache_of(adapter, plan))
        assert caplog.text.count("deepstack_visual_embeds") == 1
        # Warming up finds that out, too, with all that the model asks for.
        warmed = prefill_of(adapter, runtime, (32, 64))
        for part in warmed.warm_up(plan, cache_of(adapter, plan), inputs):
            part()
        assert warmed._embedder is not None and warmed._embedder.fallback_reason is not None


def test_a_decoder_that_does_more_than_its_blocks_runs_whole(caplog: pytest.LogCaptureFixture) -> None:
    tiny_model = tiny.build_olmoe()
    adapter = get_adapter(tiny_model)

    def scaled(module: Any, args: Any, named: dict[str, Any]) -> Any:
        """As architectures that scale embeddings within the decoder."""
        if named.get("inputs_embeds") is None:
            named["inputs_embeds"] = adapter.embed(named.pop("input_ids"))
        return args, named | {"inputs_embeds": 3.0 * named["inputs_embeds"]}

    adapter.decoder.register_forward_pre_hook(scaled, with_kwargs=True)
    runtime = PlanRuntime(adapter)
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        prefill = prefill_of(adapter, runtime, (8, 64))
        assert "logits differ by" in caplog.text
        result = run(prefill, words(5), SHALLOW, cache_of(adapter, SHALLOW))
        torch.testing.assert_close(
            result.logits, expected(adapter, runtime, words(5), SHALLOW)[0], rtol=0.0, atol=EXACT
        )


def entering(adapter: Adapter, inputs: Any) -> Tensor:
    """What enters the first block in the model's own forward."""
    observed: list[Tensor] = []
    with on_decoder_call(adapter, lambda named: observed.append(named["inputs_embeds"])):
        adapter.model(**inputs)
    return observed[0]


def make_empty_slots(adapter: Adapter, tokens: int) -> Tensor:
    """Where embeddings of so many tokens lie."""
    return adapter.embed(torch.zeros(1, tokens, dtype=torch.int64))


def test_images_are_compared_once_and_recorded_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model = model("llava_siglip")
    with attached("llava_siglip") as (adapter, _), torch.no_grad():
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
        # Once by the first, and in each forward here.
        assert len(mask_calls) == 1 + 4 and "get_placeholder_mask" not in vars(tiny_model.model)
        work = vision.warm_up(adapter.reduce_to_tier(tiny.make_prompt(tiny_model), "medium"))
        # 20 vision tokens, one after them, and nine words fit into two sizes.
        assert len(work) == 2
        for item in work:
            item()
        assert len(mask_calls) == 5


def test_images_that_a_recording_would_see_otherwise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_model = model("llava_siglip")
    with attached("llava_siglip") as (adapter, _), torch.no_grad(), caplog.at_level(logging.WARNING):
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
def test_a_model_that_gives_all_logits(mode: str) -> None:
    tiny_model = tiny.build_olmoe()
    model_forward = tiny_model.forward

    def forward(
        input_ids: Any = None,
        inputs_embeds: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: Any = None,
    ) -> Any:
        """As remote code may be: without a way to ask for fewer."""
        return model_forward(
            input_ids=input_ids, inputs_embeds=inputs_embeds, position_ids=position_ids,
            past_key_values=past_key_values, use_cache=use_cache,
        )  # fmt: skip

    tiny_model.forward = forward
    adapter = get_adapter(tiny_model)
    runtime = PlanRuntime(adapter)
    with torch.no_grad():
        result = run(prefill_of(adapter, runtime, SIZES[mode]), words(5), SHALLOW, cache_of(adapter, SHALLOW))
        with runtime.use_plan(SHALLOW):
            full_output = tiny_model(input_ids=words(5)["input_ids"]).logits[:, -1]
        torch.testing.assert_close(result.logits, full_output, rtol=0.0, atol=EXACT)


def test_an_adapter_that_names_another_module() -> None:
    tiny_model = tiny.build_llava_siglip()
    adapter = get_adapter(tiny_model)
    runtime = PlanRuntime(adapter)
    with torch.no_grad():
        prefill = prefill_of(adapter, runtime, (64,))
        adapter._decoder = torch.nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(ModelError):
            run(prefill, tiny.make_prompt(tiny_model), replace(DEEP, tier="low"), cache_of(adapter, DEEP))


@pytest.mark.parametrize("mode", SIZES)
def test_the_model_stays_as_it_is(mode: str) -> None:
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
        parameters(tiny_model),
        {id(module): vars(module).get("forward") for module in tiny_model.modules()},
    )
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in tiny_model.modules()]
    with torch.no_grad():
        prefill = prefill_of(adapter, runtime, SIZES[mode])
        plan = replace(SHALLOW, tier="low")
        for module in prefill.warm_up(plan, cache_of(adapter, plan)):
            module()
        run(prefill, tiny.make_prompt(tiny_model), plan, cache_of(adapter, plan))
        with pytest.raises(ZeroDivisionError):
            run(prefill, tiny.make_prompt(tiny_model), plan, cache_of(adapter, plan), decide=lambda _: 1 / 0)  # pyright: ignore[reportArgumentType]
    assert same(tiny_model, before)
    assert forwards == {id(module): vars(module).get("forward") for module in tiny_model.modules()}
    assert hooks == [
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in tiny_model.modules()
    ]
    runtime.remove()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("tier", ["low", None])
def test_deciders_get_ready_while_a_gpu_works(device: str, tier: Tier | None) -> None:
    tiny_model = tiny.build_llava_siglip().to(device)
    adapter = get_adapter(tiny_model)
    plan, order = replace(DEEP, tier=tier), []

    def decide(token: Tensor) -> Plan:
        order.append("decide")
        return plan

    with torch.no_grad():
        prefill = PrefillRunner(
            adapter, PlanRuntime(adapter), GraphCache(device), tokens=96, sizes=(16, 40, 96)
        )
        inputs = {name: value.to(device) for name, value in tiny.make_prompt(tiny_model).items()}
        case = (
            adapter.reduce_to_tier(inputs, tier)
            if tier
            else {"input_ids": torch.ones_like(inputs["input_ids"])}
        )
        cache = cache_of(adapter, DEEP)
        for _ in range(2):  # the first image runs by the model's own way, to be compared with
            order.clear()
            prefill.run(
                case,
                plan.tier,
                plan.insertion_position,
                images=tier is not None,
                replan=lambda position: position,
                decide=decide,
                allocate=lambda plan: (cache, [cache.allocate()]),
                meanwhile=lambda: order.append("meanwhile"),
            )
    assert order == (["decide"] if device == "cpu" else ["meanwhile", "decide"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_recorded_prompts_on_a_gpu(dtype: torch.dtype) -> None:
    tiny_model = tiny.build_llava_siglip(dtype=dtype).cuda()
    adapter = get_adapter(tiny_model)
    runtime = PlanRuntime(adapter)
    graphs = GraphCache("cuda")
    with torch.no_grad():
        prefill = PrefillRunner(adapter, runtime, graphs, tokens=96, sizes=(16, 40, 96))
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
