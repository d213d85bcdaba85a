"""Running requests of real models: the sizes that were asked for, and what makes two models the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan, PlanSpace
from sparseflow.adaptive.profile import (
    EagerRunner,
    PlanProfile,
    ProfileRunner,
    collect_profile,
    compute_model_id,
)
from sparseflow.errors import InputError, PlanError
from tests.adaptive import tiny
from tests.adaptive.counting import count_calls

FLOAT = torch.float32


def runner_of(model: Any, **options: Any) -> EagerRunner:
    runtime = PlanRuntime(get_adapter(model))
    example = tiny.make_prompt(model) if runtime.geometry.tiers else None
    return EagerRunner(runtime, **{"device": "cpu", "example": example} | options)


class Seen:
    """Notes every call of a model: tokens, batch and what was in the cache before."""

    def __init__(self, model: Any) -> None:
        self.calls: list[tuple[int, int, int, bool]] = []
        self.ids: list[torch.Tensor] = []
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, options: Any, named: dict[str, Any]) -> None:
        ids, cache = named["input_ids"], named.get("past_key_values")
        stored = 0 if cache is None else cache.get_seq_length()
        self.calls.append((len(ids), ids.shape[1], stored, named.get("pixel_values") is not None))
        self.ids.append(ids.clone())


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("batch", [1, 3])
def test_run_returns_times_of_requested_size(family: str, batch: int) -> None:
    model = tiny.FAMILIES[family](dtype=FLOAT)
    runner, observed = runner_of(model), Seen(model)
    geometry = get_adapter(model).geometry
    plan = Plan(tier="medium" if geometry.tiers else None, insertion_position=2, top_k=3, blocks=(0, 1, 3, 5))
    timed = runner.run(plan, 17, steps=4, batch=batch)
    prompt = 17 + (runner.vision_tokens[plan.tier] if plan.tier else 0)
    assert observed.calls[0] == (1, prompt, 0, plan.tier is not None)
    assert observed.calls[1:] == [(batch, 1, prompt + index, False) for index in range(4)]
    assert timed.prefill_ms > 0.0 and len(timed.steps_ms) == 4
    assert runner.run(plan, 17, steps=0).steps_ms == ()


@pytest.mark.parametrize("family", ["olmoe", "llava_siglip", "qwen3_vl_moe"])
def test_run_executes_blocks_of_plan(family: str) -> None:
    model = tiny.FAMILIES[family](dtype=FLOAT)
    runner, blocks = runner_of(model), get_adapter(model).blocks
    with count_calls(blocks) as counts:
        runner.run(Plan(tier=None, insertion_position=1, top_k=2, blocks=(0, 2, 5)), 6, steps=2)
    assert counts.attention == {0: 3, 2: 3, 5: 3}
    assert counts.experts_per_token() == {0: 6.0, 2: 2.0, 5: 2.0}


def test_prompts_of_tiers_have_their_vision_tokens() -> None:
    model = tiny.build_llava_siglip(dtype=FLOAT)
    runner = runner_of(model)
    assert runner.vision_tokens == {"low": 4, "medium": 20, "high": 56}
    assert (
        isinstance(runner, EagerRunner)
        and runner.model_id == compute_model_id(model)
        and runner.device == "cpu"
    )
    assert runner.config == {"runner": "eager", "dtype": "float32", "attention": "sdpa", "experts": "eager"}
    _protocol: ProfileRunner = runner
    assert _protocol is runner


def test_prompts_have_no_special_tokens_and_differ() -> None:
    model = tiny.build_qwen3_vl_moe(dtype=FLOAT)
    runner, observed = runner_of(model), Seen(model)
    full = get_adapter(model).geometry.full_plan(images=False)
    runner.run(full, 400, steps=0)
    runner.run(full, 400, steps=0)
    first, second = observed.ids
    special = {tiny.IMAGE, tiny.VIDEO, tiny.VISION_START, tiny.VISION_END, 0, 1, 2}
    assert not special & set(first.flatten().tolist()) and not torch.equal(first, second)
    # Rows of a batch go on with tokens of their own.
    observed.ids.clear()
    runner.run(full, 4, steps=8, batch=4)
    assert any(len(set(ids.flatten().tolist())) > 1 for ids in observed.ids[1:])


def test_prompt_shorter_than_example_is_cut() -> None:
    model = tiny.build_llava_siglip(dtype=FLOAT)
    runner, observed = runner_of(model), Seen(model)
    plan = get_adapter(model).geometry.full_plan()
    runner.run(plan, 1, steps=0)
    assert observed.calls[0][1] == 57
    before = tiny.make_prompt(model)
    before["input_ids"] = before["input_ids"].flip(1)
    with pytest.raises(InputError, match="10 text tokens"):
        EagerRunner(
            PlanRuntime(get_adapter(tiny.build_llava_siglip(dtype=FLOAT))), device="cpu", example=before
        ).run(plan, 3, steps=0)


def test_run_with_invalid_request_or_example_raises() -> None:
    model = tiny.build_llava_siglip(dtype=FLOAT)
    runtime = PlanRuntime(get_adapter(model))
    full_plan = runtime.geometry.full_plan()
    text_runner = EagerRunner(runtime, device="cpu")
    assert not text_runner.vision_tokens
    with pytest.raises(InputError, match="`example`"):
        text_runner.run(full_plan, 5, steps=1)
    for text, steps, batch in ((0, 1, 1), (1, -1, 1), (1, 1, 0)):
        with pytest.raises(InputError, match="must be an integer of at least"):
            text_runner.run(full_plan, text, steps=steps, batch=batch)
    with pytest.raises(InputError, match="`example`"):
        EagerRunner(runtime, device="cpu", example=tiny.make_prompt(model, rows=2))
    with pytest.raises(InputError, match="`example`"):
        EagerRunner(runtime, device="cpu", example=tiny.make_text_prompt())
    with pytest.raises(PlanError):
        text_runner.run(Plan(tier=None, insertion_position=1, top_k=7, blocks=(0,)), 5, steps=1)
    with pytest.raises(InputError, match=r"`device` \(=cuda\).*cpu"):
        EagerRunner(runtime, device="cuda")
    model.train()
    with pytest.raises(InputError, match="training mode"):
        EagerRunner(runtime, device="cpu")


def test_collect_profile_of_real_model(tmp_path: Path) -> None:
    model = tiny.build_llava_siglip(depth=3, top_k=2, experts=3, dtype=FLOAT)
    runner = runner_of(model)
    space = PlanSpace.from_importance(get_adapter(model).geometry, [3.0, 2.0, 1.0])
    plans = [space.plans[0], space.plans[-1]]
    profile = collect_profile(
        runner, space, tmp_path / "p.parquet", text_tokens=(5,), plans=plans, rounds=1, decode_steps=2
    )
    assert [len(measurement.steps_ms) for measurement in profile.measurements] == [2, 2]
    PlanProfile.load(tmp_path / "p.parquet").check(compute_model_id(model), "cpu")


def trained(model: Any) -> Any:
    for weight in model.parameters():
        weight.data += 1.0
    return model


@pytest.mark.parametrize(
    "changed",
    [
        trained,
        lambda model: model.train(),
        lambda model: (setattr(model.config, "use_cache", False), model)[1],
    ],
)
def test_model_id_after_harmless_change_is_unchanged(changed: Callable[[Any], Any]) -> None:
    model = tiny.build_llava_siglip(dtype=FLOAT)
    before = compute_model_id(model)
    assert (
        compute_model_id(changed(model))
        == before
        == compute_model_id(tiny.build_llava_siglip(dtype=FLOAT, seed=5))
    )


def test_model_id_after_reload_or_attach_is_unchanged(tmp_path: Path) -> None:
    for created in tiny.FAMILIES.values():
        model = created(dtype=FLOAT)
        before = compute_model_id(model)
        runtime = PlanRuntime(get_adapter(model))
        assert compute_model_id(model) == before
        runtime.remove()
        model.save_pretrained(tmp_path)
        assert compute_model_id(type(model).from_pretrained(tmp_path)) == before


def test_model_id_of_other_architecture_differs() -> None:
    created = [
        tiny.build_olmoe(dtype=FLOAT),
        tiny.build_olmoe(depth=5, dtype=FLOAT),
        tiny.build_olmoe(top_k=5, dtype=FLOAT),
        tiny.build_olmoe(experts=9, dtype=FLOAT),
        tiny.build_olmoe(dtype=torch.bfloat16),
        tiny.build_mixtral(dtype=FLOAT),
        tiny.build_llava_siglip(dtype=FLOAT),
        tiny.build_llava_clip(dtype=FLOAT),
        nn.Linear(2, 3),
        nn.Linear(2, 4),
    ]
    assert len({compute_model_id(model) for model in created}) == len(created)


def test_run_over_max_tokens_raises() -> None:
    runner = runner_of(tiny.build_llava_siglip(dtype=FLOAT), max_tokens=40)
    assert runner.config["max_tokens"] == 40
    assert "max_tokens" not in runner_of(tiny.build_olmoe(dtype=FLOAT)).config
    low, high = (
        Plan(tier=tier, insertion_position=1, top_k=2, blocks=(0, 1)) for tier in ("low", "high")
    )  # fmt: skip
    assert len(runner.run(low, 30, steps=6).steps_ms) == 6
    for plan, steps in ((low, 7), (high, 1)):
        with pytest.raises(InputError, match=r"`max_tokens` \(=40\)"):
            runner.run(plan, 30, steps=steps)
