"""Generation by the model's own forward: the tokens of transformers' own `generate` under the same plan."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseflow.adaptive.adapters import Adapter, get_adapter
from sparseflow.adaptive.engine.generate import GenerationResult, generate
from sparseflow.adaptive.engine.requests.request import (
    GenerationRequest,
    InitialDecision,
    PlanDecision,
    Rejection,
    RequestRejected,
)
from sparseflow.adaptive.engine.requests.sampling import SamplingParams
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan
from sparseflow.errors import InputError, PlanError, RunError
from tests.adaptive import tiny
from tests.adaptive.engine.serving import DEEP, NARROW, SHALLOW, attached, model

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


@pytest.fixture
def olmoe() -> Iterator[tuple[Adapter, PlanRuntime]]:
    with attached() as both:
        yield both


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
@pytest.mark.parametrize("text", [DEEP, SHALLOW, NARROW])
def test_one_row(family: str, text: Plan) -> None:
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
def test_rows_of_equal_length(family: str) -> None:
    with attached(family) as both:
        plan = replace(SHALLOW, tier="medium" if both[0].geometry.tiers else None)
        inputs = tiny.make_prompt(model(family), rows=3)
        result = generate(*both, inputs, plan, max_new_tokens=TOKENS)
        assert torch.equal(result.sequences, by_transformers(*both, inputs, plan))


def padded(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Words of rows of several lengths, padded on their left."""
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
def test_rows_padded_on_their_left(family: str) -> None:
    with attached(family) as both:
        inputs = padded((3, 9, 5))
        result = generate(*both, inputs, SHALLOW, max_new_tokens=TOKENS)
        assert torch.equal(result.sequences, by_transformers(*both, inputs, SHALLOW))
        for row, length in enumerate((3, 9, 5)):
            single = generate(*both, {"input_ids": inputs["input_ids"][row : row + 1, -length:]}, SHALLOW,
                             max_new_tokens=TOKENS)  # fmt: skip
            assert torch.equal(single.new_tokens[0], result.new_tokens[row])


def test_stop_tokens(olmoe: tuple[Adapter, PlanRuntime]) -> None:
    inputs = tiny.make_text_prompt(rows=3)
    full_tokens = generate(*olmoe, inputs, DEEP, max_new_tokens=TOKENS).new_tokens
    stop = [int(full_tokens[0, 2]), int(full_tokens[1, 5])]
    result = generate(*olmoe, inputs, DEEP, max_new_tokens=TOKENS, stop=stop, pad_id=0)
    expected = by_transformers(*olmoe, inputs, DEEP, eos_token_id=stop, pad_token_id=0)
    assert torch.equal(result.sequences, expected)
    row = {name: value[:1] for name, value in inputs.items()}
    single = generate(*olmoe, row, DEEP, max_new_tokens=TOKENS, stop=stop)
    first = next(index for index in range(TOKENS) if int(full_tokens[0, index]) in stop)
    assert single.new_tokens[0].tolist() == full_tokens[0, : first + 1].tolist()


def test_padding_of_rows_that_are_over(olmoe: tuple[Adapter, PlanRuntime]) -> None:
    inputs = tiny.make_text_prompt(rows=2, seed=4)
    full_tokens = generate(*olmoe, inputs, DEEP, max_new_tokens=TOKENS).new_tokens
    stop = [int(full_tokens[0, 1])]
    # The model's own padding, where it has one.
    result = generate(*olmoe, inputs, DEEP, max_new_tokens=TOKENS, stop=stop).new_tokens[0].tolist()
    end = result.index(stop[0])
    assert set(result[end + 1 :]) <= {olmoe[0].model.generation_config.pad_token_id}  # pyright: ignore[reportOptionalMemberAccess]
    padded_tokens = generate(*olmoe, inputs, DEEP, max_new_tokens=TOKENS, stop=stop, pad_id=9).new_tokens[0]
    assert set(padded_tokens[end + 1 :].tolist()) <= {9}


def test_sampling(olmoe: tuple[Adapter, PlanRuntime]) -> None:
    inputs, params = tiny.make_text_prompt(), SamplingParams(temperature=1.0, top_p=0.9, seed=3)

    def answer(sampling: Any, prompts: Any = inputs) -> Tensor:
        return generate(*olmoe, prompts, DEEP, max_new_tokens=TOKENS, sampling=sampling).new_tokens

    first = answer(params)
    assert torch.equal(first, answer(params)) and not torch.equal(first, answer(replace(params, seed=4)))
    rows = tiny.make_text_prompt(rows=2)
    ways = [SamplingParams(), params]
    actual = answer(ways, rows)
    for row in range(2):
        single = {name: value[row : row + 1] for name, value in rows.items()}
        assert torch.equal(answer(ways[row], single)[0], actual[row])
    with pytest.raises(InputError):
        answer([params], rows)


def test_tokens_as_they_come(olmoe: tuple[Adapter, PlanRuntime]) -> None:
    messages: list[list[int]] = []
    result = generate(
        *olmoe, tiny.make_text_prompt(rows=2), DEEP, max_new_tokens=4, on_tokens=messages.append
    )
    assert torch.equal(torch.tensor(messages).T, result.new_tokens)


def test_times(olmoe: tuple[Adapter, PlanRuntime]) -> None:
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


class Decider:
    """A decider that says what it was made to say, and keeps what it was told."""

    def __init__(self, plan: Plan, **decisions: Any) -> None:
        self.plan, self.decisions, self.calls = plan, decisions, []

    def choose_initial(self, request: GenerationRequest, remaining_ms: float) -> InitialDecision | Rejection:
        self.calls.append(("first", request.tokens, remaining_ms))
        if "refusal" in self.decisions:
            return self.decisions["refusal"]
        return InitialDecision(
            tier=self.plan.tier, insertion_position=1, max_new_tokens=self.decisions.get("tokens")
        )

    def replan(self, request: GenerationRequest, choice: InitialDecision, remaining_ms: float) -> int:
        self.calls.append(("again", choice.insertion_position, remaining_ms))
        return self.plan.insertion_position

    def choose_plan(
        self, latency_token: Tensor, request: GenerationRequest, remaining_ms: float
    ) -> PlanDecision:
        self.calls.append(("second", latency_token, remaining_ms))
        return PlanDecision(plan=self.plan, feasible=False, predicted_ms=5.0)


def test_a_decider() -> None:
    with attached("llava_siglip") as both:
        inputs, plan = tiny.make_prompt(model("llava_siglip")), replace(SHALLOW, tier="low")
        decide = Decider(plan)
        result = generate(*both, inputs, decide, max_new_tokens=TOKENS, budget_ms=1e6)
        assert [call[0] for call in decide.calls] == ["first", "again", "second"]
        remaining_ms_values = [call[2] for call in decide.calls]
        assert (
            1e6 > remaining_ms_values[0] >= remaining_ms_values[1] >= remaining_ms_values[2] > 0.0
            and decide.calls[0][1] == 66
        )
        assert decide.calls[1][1] == 1
        assert torch.equal(result.sequences, by_transformers(*both, inputs, plan))
        assert (result.plan, result.feasible, result.predicted_ms, result.budget_met) == (
            plan,
            False,
            5.0,
            True,
        )
        hidden: list[Any] = []
        hook = both[0].blocks[1].register_forward_hook(lambda module, args, output: hidden.append(output))
        generate(*both, inputs, plan, max_new_tokens=1)
        hook.remove()
        torch.testing.assert_close(decide.calls[2][1], hidden[0][0, -1], rtol=0.0, atol=1e-10)


def test_a_decider_that_refuses_or_cuts_short(olmoe: tuple[Adapter, PlanRuntime]) -> None:
    with pytest.raises(RequestRejected):
        generate(
            *olmoe,
            tiny.make_text_prompt(),
            Decider(DEEP, refusal=Rejection(reason="no", least_ms=12.0)),
            budget_ms=1.0,
        )
    result: GenerationResult = generate(
        *olmoe, tiny.make_text_prompt(), Decider(DEEP, tokens=2), max_new_tokens=TOKENS
    )
    assert result.new_tokens.shape == (1, 2)
    with pytest.raises(InputError):
        generate(*olmoe, tiny.make_text_prompt(rows=2), Decider(DEEP))


def test_bad_input(olmoe: tuple[Adapter, PlanRuntime]) -> None:
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


def test_nan() -> None:
    tiny_model = tiny.build_olmoe()
    tiny_model.lm_head.weight.data.fill_(float("nan"))
    adapter = get_adapter(tiny_model)
    with pytest.raises(RunError):
        generate(adapter, PlanRuntime(adapter), tiny.make_text_prompt(), DEEP)


@pytest.mark.gpu
@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_on_a_gpu(family: str) -> None:
    tiny_model = tiny.FAMILIES[family]().cuda()
    adapter = get_adapter(tiny_model)
    runtime = PlanRuntime(adapter)
    inputs = {name: value.cuda() for name, value in tiny.make_prompt(tiny_model, images=2).items()}
    plan = replace(SHALLOW, tier="low" if adapter.geometry.tiers else None)
    result = generate(adapter, runtime, inputs, plan, max_new_tokens=TOKENS)
    assert torch.equal(result.sequences, by_transformers(adapter, runtime, inputs, plan))
    assert result.timings.prefill_ms > 0.0 and result.timings.decode_ms > 0.0
