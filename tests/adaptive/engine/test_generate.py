"""Generation with the model's own forward, compared with `generate` of transformers under the same plan."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseflow.adaptive.adapters import Adapter, get_adapter
from sparseflow.adaptive.engine.generate import generate
from sparseflow.adaptive.engine.requests.request import Rejection, RequestRejected
from sparseflow.adaptive.engine.requests.sampling import SamplingParams
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan, Tier
from sparseflow.errors import InputError, PlanError, RunError
from tests.adaptive import tiny
from tests.adaptive.engine.serving import DEEP, NARROW, SHALLOW, ScriptedPolicy, attached, model

TOKENS = 10


def by_transformers(
    adapter: Adapter, runtime: PlanRuntime, inputs: Any, plan: Plan, **options: Any
) -> Tensor:
    model_forward: Any = adapter.model
    with runtime.use_plan(plan):
        return model_forward.generate(
            **adapter.reduce_to_tier(inputs, plan.tier),
            **({"max_new_tokens": TOKENS, "do_sample": False} | options),
        )


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
@pytest.mark.parametrize("text", [DEEP, SHALLOW, NARROW])
def test_generate_single_row_matches_transformers(family: str, text: Plan) -> None:
    with attached(family) as both:
        prompts: list[tuple[Any, Plan]] = [(tiny.make_text_prompt(), text)]
        if both[0].geometry.tiers:
            inputs = tiny.make_prompt(model(family), images=2)
            prompts += [(inputs, replace(text, tier=tier)) for tier in ("low", "high")]
        for inputs, plan in prompts:
            result = generate(*both, inputs, plan, max_new_tokens=TOKENS)
            assert torch.equal(result.sequences, by_transformers(*both, inputs, plan))
            assert result.plan == plan and result.new_tokens.shape == (1, TOKENS)


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_generate_rows_of_equal_length_match_transformers(family: str) -> None:
    with attached(family) as both:
        plan = replace(SHALLOW, tier="medium" if both[0].geometry.tiers else None)
        inputs = tiny.make_prompt(model(family), rows=3)
        result = generate(*both, inputs, plan, max_new_tokens=TOKENS)
        assert torch.equal(result.sequences, by_transformers(*both, inputs, plan))


def padded(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Rows of several lengths, padded on the left."""
    max_length = max(lengths)
    ids, mask = (
        torch.zeros(len(lengths), max_length, dtype=torch.int64),
        torch.zeros(len(lengths), max_length).long(),
    )
    for row, length in enumerate(lengths):
        ids[row, max_length - length :] = tiny.make_text_prompt(tokens=length, seed=row)["input_ids"][0]
        mask[row, max_length - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("family", ["olmoe", "mixtral", "qwen3_vl_moe"])
def test_generate_left_padded_rows_match_transformers(family: str) -> None:
    with attached(family) as both:
        inputs = padded((3, 9, 5))
        result = generate(*both, inputs, SHALLOW, max_new_tokens=TOKENS)
        assert torch.equal(result.sequences, by_transformers(*both, inputs, SHALLOW))
        for row, length in enumerate((3, 9, 5)):
            single = generate(*both, {"input_ids": inputs["input_ids"][row : row + 1, -length:]}, SHALLOW,
                             max_new_tokens=TOKENS)  # fmt: skip
            assert torch.equal(single.new_tokens[0], result.new_tokens[row])


@pytest.mark.parametrize("family", ["olmoe", "llava_clip", "qwen3_vl_moe"])
@pytest.mark.parametrize(
    "mask",
    [[[1] * 6, [1] * 5 + [0]], [[1] * 6, [1, 1, 0, 1, 1, 1]], [[0] * 6, [1] * 6], [[1, 1, 1, 1, 1, 0]]],
)
def test_generate_padding_after_first_token_raises(family: str, mask: list[list[int]]) -> None:
    with attached(family) as both:
        inputs = tiny.make_prompt(model(family), tokens=6, rows=len(mask))
        inputs["attention_mask"][:, -6:] = torch.tensor(mask)
        plan = replace(SHALLOW, tier="low" if both[0].geometry.tiers else None)
        with pytest.raises(InputError, match="padding"):
            generate(*both, inputs, plan, max_new_tokens=2)


@pytest.mark.parametrize("family", ["llava_clip", "qwen3_vl_moe"])
@pytest.mark.parametrize("tier", ["low", "high"])
def test_generate_left_padded_images_match_single_rows(family: str, tier: Tier) -> None:
    with attached(family) as both:
        plan = replace(SHALLOW, tier=tier)
        rows = [tiny.make_prompt(model(family), tokens=length, seed=length) for length in (4, 7)]
        per_token = ("input_ids", "attention_mask", "mm_token_type_ids")
        first = {
            name: torch.nn.functional.pad(value, (3, 0)) if name in per_token else value
            for name, value in rows[0].items()
        }
        inputs = {name: torch.cat([first[name], rows[1][name]]) for name in first}
        result = generate(*both, inputs, plan, max_new_tokens=TOKENS)
        for row, single in enumerate(rows):
            expected = generate(*both, single, plan, max_new_tokens=TOKENS)
            assert torch.equal(result.new_tokens[row], expected.new_tokens[0])


def test_generate_stop_tokens_end_rows(olmoe: tuple[Adapter, PlanRuntime]) -> None:
    inputs = tiny.make_text_prompt(rows=3)
    full_tokens = generate(*olmoe, inputs, DEEP, max_new_tokens=TOKENS).new_tokens
    stop = [int(full_tokens[0, 2]), int(full_tokens[1, 5])]
    result = generate(*olmoe, inputs, DEEP, max_new_tokens=TOKENS, stop=stop)
    expected = by_transformers(*olmoe, inputs, DEEP, eos_token_id=stop)
    assert torch.equal(result.sequences, expected)
    row = {name: value[:1] for name, value in inputs.items()}
    single = generate(*olmoe, row, DEEP, max_new_tokens=TOKENS, stop=stop)
    first = next(index for index in range(TOKENS) if int(full_tokens[0, index]) in stop)
    assert single.new_tokens[0].tolist() == full_tokens[0, : first + 1].tolist()


def test_generate_finished_rows_are_padded(olmoe: tuple[Adapter, PlanRuntime]) -> None:
    inputs = tiny.make_text_prompt(rows=2, seed=4)
    full_tokens = generate(*olmoe, inputs, DEEP, max_new_tokens=TOKENS).new_tokens
    stop = [int(full_tokens[0, 1])]
    # The model's own pad token.
    result = generate(*olmoe, inputs, DEEP, max_new_tokens=TOKENS, stop=stop).new_tokens[0].tolist()
    end = result.index(stop[0])
    assert set(result[end + 1 :]) <= {olmoe[0].model.generation_config.pad_token_id}  # pyright: ignore[reportOptionalMemberAccess]


def test_generate_sampling_depends_on_seed_only(olmoe: tuple[Adapter, PlanRuntime]) -> None:
    inputs, params = tiny.make_text_prompt(), SamplingParams(temperature=1.0, top_p=0.9, seed=3)

    def sample(sampling: SamplingParams, prompts: Any = inputs) -> Tensor:
        return generate(*olmoe, prompts, DEEP, max_new_tokens=TOKENS, sampling=sampling).new_tokens

    first = sample(params)
    assert torch.equal(first, sample(params)) and not torch.equal(first, sample(replace(params, seed=4)))
    rows = tiny.make_text_prompt(rows=2)
    for row, new_tokens in enumerate(sample(params, rows)):
        single = {name: value[row : row + 1] for name, value in rows.items()}
        assert torch.equal(sample(params, single)[0], new_tokens)


def test_generate_on_tokens_receives_every_step(olmoe: tuple[Adapter, PlanRuntime]) -> None:
    messages: list[list[int]] = []
    result = generate(
        *olmoe, tiny.make_text_prompt(rows=2), DEEP, max_new_tokens=4, on_tokens=messages.append
    )
    assert torch.equal(torch.tensor(messages).T, result.new_tokens)


def test_generate_timings_sum_to_total(olmoe: tuple[Adapter, PlanRuntime]) -> None:
    result = generate(
        *olmoe,
        tiny.make_text_prompt(),
        DEEP,
        max_new_tokens=3,
        received_s=time.perf_counter() - 2.0,
        budget_ms=1e3,
    )
    times = result.timings
    parts = (times.decide_ms, times.vision_ms, times.prefill_ms, times.decode_ms)
    assert min(parts) >= 0.0 and times.queued_ms >= 2000.0
    assert times.total_ms >= times.queued_ms + sum(parts) and result.budget_met is False
    assert generate(*olmoe, tiny.make_text_prompt(), DEEP, max_new_tokens=1).budget_met is None


def test_generate_with_policy_runs_chosen_plan() -> None:
    with attached("llava_siglip") as both:
        inputs, plan = tiny.make_prompt(model("llava_siglip")), replace(SHALLOW, tier="low")
        policy = ScriptedPolicy(plan, feasible=False)
        result = generate(*both, inputs, policy, max_new_tokens=TOKENS, budget_ms=1e6)
        (name, tokens, initial_ms), (next_name, latency_token, final_ms) = policy.calls
        assert (name, tokens, next_name) == ("choose_initial", 66, "choose_plan")
        assert 1e6 > initial_ms >= final_ms > 0.0
        assert torch.equal(result.sequences, by_transformers(*both, inputs, plan))
        assert (result.plan, result.feasible, result.predicted_ms) == (plan, False, 9.0)
        assert result.budget_met
        hidden: list[Any] = []
        hook = both[0].blocks[1].register_forward_hook(lambda module, args, output: hidden.append(output))
        generate(*both, inputs, plan, max_new_tokens=1)
        hook.remove()
        torch.testing.assert_close(latency_token, hidden[0][0, -1], rtol=0.0, atol=1e-10)


def test_generate_with_policy_that_rejects_or_truncates_follows_it(
    olmoe: tuple[Adapter, PlanRuntime],
) -> None:
    rejecting = ScriptedPolicy(DEEP, rejection=Rejection(reason="no", least_ms=12.0))
    with pytest.raises(RequestRejected):
        generate(*olmoe, tiny.make_text_prompt(), rejecting, budget_ms=1.0)
    truncating = ScriptedPolicy(DEEP, max_new_tokens=2)
    result = generate(*olmoe, tiny.make_text_prompt(), truncating, max_new_tokens=TOKENS)
    assert result.new_tokens.shape == (1, 2)
    with pytest.raises(InputError):
        generate(*olmoe, tiny.make_text_prompt(rows=2), ScriptedPolicy(DEEP))


def test_generate_invalid_arguments_are_refused(olmoe: tuple[Adapter, PlanRuntime]) -> None:
    with pytest.raises(InputError):
        generate(*olmoe, {"input_ids": torch.zeros(3)}, DEEP)
    with pytest.raises(InputError):
        generate(*olmoe, tiny.make_text_prompt(), DEEP, max_new_tokens=0)
    with pytest.raises(InputError):
        generate(*olmoe, tiny.make_text_prompt(), DEEP, budget_ms=-1.0)
    with pytest.raises(PlanError):
        generate(*olmoe, tiny.make_text_prompt(), replace(DEEP, tier="low"))
    with pytest.raises(PlanError):
        generate(*olmoe, tiny.make_text_prompt(), replace(DEEP, top_k=9))


def test_generate_nan_logits_raise() -> None:
    tiny_model = tiny.build_olmoe()
    tiny_model.lm_head.weight.data.fill_(float("nan"))
    adapter = get_adapter(tiny_model)
    with pytest.raises(RunError):
        generate(adapter, PlanRuntime(adapter), tiny.make_text_prompt(), DEEP)


@pytest.mark.gpu
@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_generate_on_gpu_matches_transformers(family: str) -> None:
    tiny_model = tiny.FAMILIES[family]().cuda()
    adapter = get_adapter(tiny_model)
    runtime = PlanRuntime(adapter)
    inputs = {name: value.cuda() for name, value in tiny.make_prompt(tiny_model, images=2).items()}
    plan = replace(SHALLOW, tier="low" if adapter.geometry.tiers else None)
    result = generate(adapter, runtime, inputs, plan, max_new_tokens=TOKENS)
    assert torch.equal(result.sequences, by_transformers(adapter, runtime, inputs, plan))
    assert result.timings.prefill_ms > 0.0 and result.timings.decode_ms > 0.0
