"""Use of patched models: compilation, copies, training, masks, other sizes, and refusals."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparseflow.errors import InputError, SampleError
from sparseflow.pruning import ModelFamily, get_kept_positions, patch, unpatch
from tests.pruning.models import check_static_shapes
from tests.pruning.patching.zoo import CASES, randomize, transformers

_SIZES: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 40,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip


QUICKLY_COMPILED = ("vit", "dinov3")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICKLY_COMPILED else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
@torch.no_grad()
def test_patched_model_compiles_as_one_graph(name: str) -> None:
    case = CASES[name]
    model = case.build()
    patch(model, stages={1: 0.5, 3: 0.25})
    expected = case.run(model)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=name != "timesformer")
    torch.testing.assert_close(case.run(compiled), expected, rtol=1e-9, atol=1e-9)
    with torch._dynamo.config.patch(error_on_recompile=True):  # eager calls leave positions behind
        case.run(model)
        case.run(compiled)
        case.run(compiled)
    with pytest.raises(InputError, match=r"torch\.compile"):
        get_kept_positions(model)
    with pytest.raises(InputError, match="compiled"):
        unpatch(compiled)


@torch.no_grad()
def test_compiled_models_do_not_share_graphs() -> None:
    case = CASES["vit"]
    model = case.build()
    models = {0: model}
    for stage in (1, 2):  # other blocks have the hooks
        models[stage] = copy.deepcopy(model)
        patch(models[stage], stages={stage: 0.5})
    patched_twice = copy.deepcopy(models[1])
    patch(patched_twice, stages={1: 0.25})
    models[3] = patched_twice
    expected = {stage: case.run(value) for stage, value in models.items()}
    torch._dynamo.reset()
    for stage, value in models.items():
        compiled: Any = torch.compile(value, backend=check_static_shapes, fullgraph=True)
        torch.testing.assert_close(case.run(compiled), expected[stage], rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_tome_accepts_boolean_masks() -> None:
    """transformers passes a mask of ones where it cannot read it, such as in a compiled call."""
    case = CASES["vit"]
    model = case.build()
    duplicate = copy.deepcopy(model)
    for module in duplicate.modules():
        if isinstance(module, transformers.models.vit.modeling_vit.ViTLayer):
            module.register_forward_pre_hook(_pass_mask)
    for value in (model, duplicate):
        patch(value, selector="tome")
    torch.testing.assert_close(case.run(duplicate), case.run(model))


def _pass_mask(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    batch, num_tokens = args[0].shape[:2]
    return args[0], torch.ones(batch, 1, num_tokens, num_tokens, dtype=torch.bool)


@torch.no_grad()
def test_patched_model_can_be_pickled() -> None:
    case = CASES["vit"]
    model = case.build()
    original_classes = [type(module) for module in model.modules()]
    patch(model)
    duplicate = pickle.loads(pickle.dumps(model))
    assert torch.equal(case.run(duplicate), case.run(model))
    unpatch(duplicate)
    assert [type(module) for module in duplicate.modules()] == original_classes


@torch.no_grad()
def test_copy_of_patched_model_is_independent(tmp_path: Path) -> None:
    case = CASES["vit"]
    model = case.build()
    dense = case.run(model)
    patch(model)
    pruned, duplicate = case.run(model), copy.deepcopy(model)
    assert torch.equal(case.run(duplicate), pruned)
    unpatch(duplicate)
    assert torch.equal(case.run(duplicate), dense)
    assert torch.equal(case.run(model), pruned)
    model.save_pretrained(tmp_path)
    loaded = transformers.ViTForImageClassification.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(case.run(loaded), dense)


@torch.no_grad()
def test_patch_again_replaces_the_settings() -> None:
    case = CASES["vit"]
    model, other = case.build(), case.build()
    patch(model, keep=0.25)
    patch(model, stages={2: 0.5}, selector="uniform")
    patch(other, stages={2: 0.5}, selector="uniform")
    assert torch.equal(case.run(model), case.run(other))
    patch(model, keep=1)
    unpatch(other)
    assert torch.equal(case.run(model), case.run(other))


@pytest.mark.parametrize("reentrant", [False, True])
def test_patched_model_trains_with_gradient_checkpointing(reentrant: bool) -> None:
    case = CASES["vit"]
    gradients = []
    for checkpointing in (False, True):
        model = case.build()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        patch(model, stages={1: 0.5})
        model.train()
        case.run(model).square().sum().backward()
        gradients.append({name: value.grad for name, value in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-9, atol=1e-9)
    assert all(gradient is not None and gradient.any() for gradient in gradients[0].values())


@torch.no_grad()
def test_attention_mask_applies_to_the_kept_tokens() -> None:
    model = CASES["vit"].build()
    pixels = CASES["vit"].make_input()["pixel_values"]
    mask = torch.ones(3, 17, dtype=torch.long)
    mask[:, 9:] = 0
    patch(model, stages={2: 0.5}, selector="uniform")
    changed = pixels.clone()
    changed[:, :, 16:] += 1.0  # rows of patches that nothing attends to
    outputs = [model(value, attention_mask=mask).logits for value in (pixels, changed)]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(outputs[0], model(pixels).logits)


@torch.no_grad()
def test_input_of_another_size_uses_its_grid() -> None:
    model = CASES["vit"].build()
    patch(model, keep=0.5)
    pixels = torch.randn(2, 3, 32, 48).double()
    output = model(pixels, interpolate_pos_encoding=True, output_hidden_states=True)
    assert [state.shape[1] for state in output.hidden_states] == [25, 25, 13, 13, 13]
    assert int(get_kept_positions(model)[1].max()) < 24


@torch.no_grad()
def test_autocast_and_half_precision_run() -> None:
    model = CASES["dinov3"].build().float()
    patch(model, keep=0.5)
    inputs = {"pixel_values": torch.randn(2, 3, 32, 32)}
    expected = model(**inputs).pooler_output
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(**inputs).pooler_output.isfinite().all()
    pixels = inputs["pixel_values"].bfloat16()
    assert model.bfloat16()(pixels).pooler_output.shape == expected.shape


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.linear(tokens)


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 8, 8)
        self.blocks = nn.Sequential(_Block(), _Block(), _Block())

    def forward(self, pixels: Tensor) -> Tensor:
        return self.blocks(self.patches(pixels).flatten(2).mT)


class _Adapter(ModelFamily):
    def get_input_shape(self, encoder: nn.Module) -> tuple[int, ...]:
        return 3, 32, 32


@torch.no_grad()
def test_adapter_describes_a_model_of_the_user() -> None:
    model = _Encoder()
    pixels = torch.randn(2, 3, 32, 32)
    expected = model(pixels)
    adapter = _Adapter(name="mine", blocks="blocks", projection="patches")
    result = patch(model, stages={1: 0.5}, adapter=adapter)
    assert result.tokens == (16, 8, 8)
    pruned = model(pixels)
    index = get_kept_positions(model)[1][..., None].expand(-1, -1, 8)
    torch.testing.assert_close(pruned, expected.gather(1, index))


def test_refused_models_name_the_reason() -> None:
    config = transformers.ViTConfig(**_SIZES)
    dense = transformers.ViTForMaskedImageModeling(config)
    with pytest.raises(InputError, match=r"ViTForMaskedImageModeling.*`vit`"):
        patch(dense)
    patch(dense.vit)
    with pytest.raises(InputError, match=r"DINOv2.*ModelFamily"):
        patch(_Encoder())
    pair = nn.ModuleDict({"student": transformers.ViTModel(config), "teacher": transformers.ViTModel(config)})
    with pytest.raises(InputError, match="`student`, `teacher`"):
        patch(pair)
    with pytest.raises(InputError, match="block 4"):
        patch(dense.vit, stages={4: 0.5})
    with pytest.raises(InputError, match="0"):
        patch(dense.vit, keep=0.0)
    with pytest.raises(InputError, match="median"):
        patch(dense.vit, selector="median")
    dense.vit.compile(backend="eager")
    with pytest.raises(InputError, match="compiled"):
        patch(dense.vit)


@torch.no_grad()
def test_calls_that_need_all_patches_are_refused() -> None:
    case = CASES["vjepa2"]
    model = randomize(transformers.VJEPA2Model(transformers.VJEPA2Config(**_SIZES | case.changes)))
    patch(model)
    with pytest.raises(InputError, match="VJEPA2Predictor"):
        model(**case.make_input())
    tokens = model(**case.make_input(), skip_predictor=True).last_hidden_state
    assert tokens.shape == (3, 16, 24)
    case = CASES["videomae"]
    model = case.build()
    patch(model)
    masked = torch.arange(32).expand(3, -1) < 8
    with pytest.raises(SampleError, match="24 tokens"):
        model.videomae(**case.make_input(), bool_masked_pos=masked)
