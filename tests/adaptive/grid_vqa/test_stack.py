"""The model in its parts gives what transformers gives, whole and by plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

pytest.importorskip("transformers")

from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.grid_vqa.dataset import VqaDataset
from sparseflow.adaptive.grid_vqa.model import build_vqa_model
from sparseflow.adaptive.grid_vqa.stack import ModelStack, get_block_steps
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan
from sparseflow.errors import ModelError
from tests.adaptive.grid_vqa.little import bank, loud, quick

DATA = VqaDataset(quick(), bank=bank())

# The norms of OLMoE compute in float32, whatever comes in.
TOLERANCE: dict[str, Any] = {"rtol": 0.0, "atol": 1e-5}


@pytest.mark.parametrize(
    "plan",
    [
        Plan(tier="high", insertion_position=1, top_k=3, blocks=(0, 1, 2, 3)),
        Plan(tier="high", insertion_position=1, top_k=1, blocks=(0, 2, 3)),
        Plan(tier="medium", insertion_position=2, top_k=2, blocks=(0, 1, 3)),
        Plan(tier="low", insertion_position=3, top_k=1, blocks=(0, 1, 2, 3)),
    ],
    ids=lambda plan: plan.id,
)
def test_logits_equal_model_with_plan_runtime(plan: Plan) -> None:
    torch.manual_seed(0)
    model = loud(build_vqa_model(DATA.config, DATA.vocabulary))
    adapter, stack = get_adapter(model), ModelStack(model)
    runtime = PlanRuntime(adapter)
    for sample in DATA.iterate_samples("val", 2):
        inputs = sample.inputs | {"pixel_values": sample.inputs["pixel_values"].double()}
        text = inputs["input_ids"][:, 1 + 14 * stack.crop_tokens :]
        with torch.no_grad():
            with runtime.use_plan(plan):
                expected = model(**adapter.reduce_to_tier(inputs, plan.tier)).logits
            vision = stack.project(stack.encode_crops(inputs["pixel_values"][None]))
            logits = stack.forward_plan(plan, vision, text)
        assert expected.abs().max() > 1.0
        torch.testing.assert_close(logits, expected[:, -text.shape[1] : -1], **TOLERANCE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo reads it
@pytest.mark.filterwarnings("ignore:\\s*Online softmax is disabled:UserWarning")  # of Inductor
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_compiled_layers_give_same_values_and_gradients(device: str) -> None:
    torch.manual_seed(0)
    data = VqaDataset(quick(), device, bank=bank())
    model = loud(build_vqa_model(data.config, data.vocabulary)).to(device).train()
    plan = Plan(tier="medium", insertion_position=1, top_k=2, blocks=(0, 1, 3))
    batch = data.make_train_batch(0, tier="medium", batch_size=3)
    losses, gradients = [], []
    for compiled in (False, True):
        stack, balance = ModelStack(model, compiled=compiled), []
        model.zero_grad()
        logits = stack.forward_plan(
            plan, stack.project(stack.encode_crops(batch.crops.double())), batch.text, balance
        )
        task = functional.cross_entropy(logits.flatten(0, 1), batch.text[:, 1:].flatten())
        loss = task + 0.1 * torch.stack(balance).mean()
        loss.backward()
        losses.append(loss.detach())
        gradients.append(
            {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        )
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0.0)
    for name, value in gradients[0].items():
        close = max(1e-9 * float(value.abs().max()), 1e-15)
        torch.testing.assert_close(gradients[1][name], value, rtol=0.0, atol=close, msg=name)


def test_right_padding_does_not_change_logits() -> None:
    torch.manual_seed(0)
    stack = ModelStack(loud(build_vqa_model(DATA.config, DATA.vocabulary)))
    batch = DATA.make_train_batch(0)
    plan = Plan(tier="medium", insertion_position=1, top_k=2, blocks=(0, 1, 3))
    with torch.no_grad():
        vision = stack.project(stack.encode_crops(batch.crops.double()))
        full = stack.forward_plan(
            plan, vision, functional.pad(batch.text, (0, 3), value=DATA.vocabulary.unknown)
        )
        for index, length in enumerate(batch.lengths.tolist()):
            single = stack.forward_plan(
                plan, vision[index : index + 1], batch.text[index : index + 1, :length]
            )
            torch.testing.assert_close(full[index, : length - 1], single[0], **TOLERANCE)


def test_balance_loss_is_minimal_for_uniform_routing() -> None:
    torch.manual_seed(0)
    stack = ModelStack(build_vqa_model(DATA.config, DATA.vocabulary))
    image, text = torch.randn(2, 56, 16), torch.zeros(2, 3, dtype=torch.int64)
    hidden, rotary = stack.embed(image, text, "high")
    router = stack.model.model.language_model.layers[0].mlp.gate.weight
    collected: list[torch.Tensor] = []
    with torch.no_grad():
        for weight in (torch.zeros(4, 16), torch.randn(4, 16) * torch.tensor([[1.0], [1.0], [9.0], [9.0]])):
            router.copy_(weight)
            stack.run_block((0, 1), hidden, rotary, collected)
    # With equal chances it is 1, whichever expert is taken.
    assert float(collected[0]) == pytest.approx(1.0) and float(collected[1]) > 1.1


def test_get_block_steps_uses_top_k_after_insertion() -> None:
    plan = Plan(tier="low", insertion_position=2, top_k=1, blocks=(0, 1, 3))
    assert get_block_steps(plan, 3) == ((0, 3), (1, 3), (3, 1))


def test_stack_of_other_model_raises() -> None:
    torch.manual_seed(0)
    model = build_vqa_model(DATA.config, DATA.vocabulary)
    model.config.text_config.norm_topk_prob = True
    with pytest.raises(ModelError, match="normalization"):
        ModelStack(model)
    model.config.text_config.norm_topk_prob = False
    model.config.vision_config.hidden_act = "relu"
    with pytest.raises(ModelError, match=r"GELU .*\('relu', 'silu'\)"):
        ModelStack(model)
    model.config.vision_config.hidden_act = "gelu_pytorch_tanh"
    model.config.vision_feature_layer = -2
    with pytest.raises(ModelError, match="layer -2"):
        ModelStack(model)
    model.config.model_type = "other"
    with pytest.raises(ModelError, match="other, siglip_vision_model, olmoe"):
        ModelStack(model)
