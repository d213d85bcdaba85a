"""Text-only models: registered model types and refused ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparseflow.adaptive.adapters import DecoderAdapter, get_adapter, register
from sparseflow.adaptive.adapters.decoders import ROUTERS
from sparseflow.adaptive.plan.adapter import _ADAPTERS
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import ModelGeometry, Plan
from sparseflow.errors import ModelError, PlanError
from tests.adaptive import tiny
from tests.adaptive.counting import count_calls

GROUPS = {
    "n_routed_experts": 5,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
OTHERS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5},
    "glm4_moe": GROUPS,
    "deepseek_v3": GROUPS
    | {
        "num_local_experts": 5, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 8,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 5, "moe_k": 4, "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
    },
}  # fmt: skip
EXACT = {"deepseek_v3": 1e-5}
"""Tolerance of models that compute in float32 internally; 1e-10 for others."""


def build_decoder(kind: str, **overrides: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    arguments: dict[str, Any] = tiny.make_text_config(depth=4, top_k=4, experts=5)
    arguments |= {"moe_intermediate_size": 8, "num_key_value_heads": 2, **OTHERS.get(kind, {}), **overrides}
    if "num_local_experts" in arguments or "n_routed_experts" in arguments:
        del arguments["num_experts"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **arguments))
    model = model.double().eval()
    model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("kind", sorted(set(ROUTERS) - {"qwen3_vl_moe_text"}))
def test_registered_model_types_run_plans(kind: str) -> None:
    model = build_decoder(kind)
    adapter = get_adapter(model)
    assert adapter.geometry == ModelGeometry(depth=4, top_k=4, tiers=())
    ids = tiny.make_text_prompt(rows=2)["input_ids"]
    plan = Plan(tier=None, insertion_position=1, top_k=2, blocks=(0, 1, 3))
    runtime = PlanRuntime(adapter)
    with runtime.use_plan(plan), count_calls(adapter.blocks) as counts:
        expected = model(input_ids=ids, use_cache=False).logits
        assert counts.attention == {0: 1, 1: 1, 3: 1}
        with_experts = {block for block in plan.blocks if adapter.router(adapter.blocks[block]) is not None}
        assert with_experts >= {1, 3}
        assert counts.experts_per_token() == {block: 4.0 if block == 0 else 2.0 for block in with_experts}
        output = model(input_ids=ids[:, :5])
        logits = [output.logits]
        for index in range(5, 9):
            output = model(input_ids=ids[:, index : index + 1], past_key_values=output.past_key_values)
            logits.append(output.logits)
    assert (torch.cat(logits, 1) - expected).abs().max() < EXACT.get(kind, 1e-10)
    assert adapter.get_kv_lengths(output.past_key_values) == {0: 9, 1: 9, 3: 9}
    assert (model(input_ids=ids).logits - expected).abs().max() > 1e-3


def test_model_without_head_runs_plan() -> None:
    model = tiny.build_olmoe()
    inner = model.model
    adapter = get_adapter(inner)
    assert adapter.decoder is inner and adapter.geometry == get_adapter(model).geometry
    inputs, plan = tiny.make_text_prompt(), Plan(tier=None, insertion_position=2, top_k=3, blocks=(0, 1, 4))
    full_runtime, headless = PlanRuntime(get_adapter(model)), None
    with full_runtime.use_plan(plan):
        expected = model(**inputs).logits
    full_runtime.remove()
    headless = PlanRuntime(adapter)
    with headless.use_plan(plan):
        assert torch.equal(model.lm_head(inner(**inputs).last_hidden_state), expected)


def test_sliding_window_model_runs_plan() -> None:
    model = build_decoder("mixtral", sliding_window=4)
    adapter = get_adapter(model)
    ids = tiny.make_text_prompt(tokens=12)["input_ids"]
    with PlanRuntime(adapter).use_plan(Plan(tier=None, insertion_position=1, top_k=3, blocks=(0, 2, 3))):
        expected = model(input_ids=ids, use_cache=False).logits
        output = model(input_ids=ids[:, :7])
        logits = [output.logits]
        for index in range(7, 12):
            output = model(input_ids=ids[:, index : index + 1], past_key_values=output.past_key_values)
            logits.append(output.logits)
    assert (torch.cat(logits, 1) - expected).abs().max() < 1e-10
    assert adapter.get_kv_lengths(output.past_key_values) == {0: 12, 2: 12, 3: 12}


def test_embeddings_positions_and_tiers_of_text_model() -> None:
    model = tiny.build_mixtral()
    adapter = get_adapter(model)
    inputs = tiny.make_text_prompt(rows=2)
    assert torch.equal(adapter.embed(inputs["input_ids"]), model.model.embed_tokens(inputs["input_ids"]))
    assert adapter.count_vision_tokens(inputs) == 0
    reduced = adapter.reduce_to_tier(inputs, None)
    assert reduced == inputs and reduced is not inputs
    for refuse in (adapter.reduce_to_tier, adapter.check_tier):
        with pytest.raises(PlanError):
            refuse(inputs, "low")
    # Left padding, as for generation.
    inputs["attention_mask"][1, :3] = 0
    positions, after = adapter.compute_positions(inputs)
    assert positions[1].tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 5] and after.tolist() == [9, 6]
    expected = model(input_ids=inputs["input_ids"][1:, 3:]).logits
    assert (model(**inputs, position_ids=positions).logits[1:, 3:] - expected).abs().max() < 1e-10
    assert adapter.compute_positions({"input_ids": inputs["input_ids"]})[1].tolist() == [9, 9]


def test_get_adapter_unknown_model_is_refused() -> None:
    with pytest.raises(ModelError):
        get_adapter(nn.Linear(2, 2))
    model: Any = nn.Linear(2, 2)
    model.config = SimpleNamespace(model_type="llama")
    with pytest.raises(ModelError):
        get_adapter(model)
    collected = []
    register("llama", lambda model: collected.append(model))  # type: ignore[arg-type, return-value]
    try:
        get_adapter(model)
        assert collected == [model]
    finally:
        del _ADAPTERS["llama"]


def test_model_that_differs_from_config_is_refused() -> None:
    model: Any = nn.Linear(2, 2)
    model.config = SimpleNamespace(model_type="olmoe")
    with pytest.raises(ModelError):
        get_adapter(model)
    short = tiny.build_olmoe()
    del short.model.layers[-1]
    with pytest.raises(ModelError):
        get_adapter(short)
    unlike = tiny.build_olmoe()
    unlike.model.layers[2].mlp.gate.top_k = 5
    with pytest.raises(ModelError):
        get_adapter(unlike)
    for layer in unlike.model.layers:
        del layer.mlp.gate
    with pytest.raises(ModelError):
        get_adapter(unlike)


def test_mixed_attention_types_are_refused() -> None:
    model = tiny.build_olmoe()
    model.config.layer_types = ["full_attention", "sliding_attention"] * 3
    with pytest.raises(ModelError):
        get_adapter(model)


def test_unknown_experts_are_refused() -> None:
    model = tiny.build_olmoe()
    model.config.model_type = "someones_moe"
    with pytest.raises(ModelError):
        DecoderAdapter(model)


def test_kv_lengths_are_read_from_cache() -> None:
    adapter = get_adapter(tiny.build_olmoe())
    for cache in (((), ()), SimpleNamespace(layers=[object()])):
        with pytest.raises(ModelError):
            adapter.get_kv_lengths(cache)
    fake_cache = SimpleNamespace(get_seq_length=lambda: torch.tensor(3))
    none = SimpleNamespace(get_seq_length=lambda: torch.tensor(0))
    plain = SimpleNamespace(get_seq_length=lambda: 4)
    assert adapter.get_kv_lengths(SimpleNamespace(layers=[fake_cache, none, plain])) == {0: 3, 2: 4}


def test_router_without_top_k_is_refused() -> None:
    adapter = get_adapter(tiny.build_olmoe())
    with pytest.raises(ModelError, match="`top_k`"):
        adapter.with_top_k(nn.Linear(2, 2), 1)


def test_narrowed_router_shares_weights() -> None:
    model = tiny.build_olmoe()
    adapter = get_adapter(model)
    router: Any = adapter.router(adapter.blocks[0])
    view = adapter.with_top_k(router, 2)
    assert router.top_k == 6 and adapter.measure_top_k(view) == 2 and adapter.measure_top_k(router) == 6
    x: Tensor = torch.randn(5, tiny.WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    router.weight.mul_(-1.0)
    assert torch.equal(adapter.get_selected_experts(view(x)), adapter.get_selected_experts(router(x))[:, :2])
