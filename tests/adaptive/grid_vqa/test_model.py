"""The model's folder: transformers alone reads it, and it holds what was saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.adapters.crops import expand_placeholders, make_nested_crops
from sparseflow.adaptive.grid_vqa.dataset import VqaDataset
from sparseflow.adaptive.grid_vqa.model import SETTINGS, build_vqa_model, load_vqa_model, save_vqa_model
from sparseflow.errors import FileFormatError, InputError
from tests.adaptive.grid_vqa.little import bank, quick

DATA = VqaDataset(quick(), bank=bank())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = build_vqa_model(DATA.config, DATA.vocabulary)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save_vqa_model(model, DATA.config, DATA.vocabulary, root)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0.0, atol=0.0)
    return root


def test_saved_directory_loads_with_transformers(folder: Path) -> None:
    plain = transformers.LlavaForConditionalGeneration.from_pretrained(folder)
    assert plain.dtype == torch.bfloat16 and get_adapter(plain).geometry.depth == 4
    model, tokenizer, settings = load_vqa_model(folder)
    assert settings == DATA.config and model.dtype == torch.float32 and not model.training
    assert tokenizer.get_vocab() == DATA.vocabulary.tokenizer.get_vocab()
    for (name, first), other in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(first.float(), other), name


def test_served_request_equals_sample_inputs(folder: Path) -> None:
    model, tokenizer, settings = load_vqa_model(folder)
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    for sample in DATA.iterate_samples("test", 3):
        content = [{"type": "image"}, {"type": "text", "text": sample.question}]
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        ids = expand_placeholders(
            prompt["input_ids"], model.config.image_token_index, 14 * settings.model.crop_tokens
        )
        pixels = make_nested_crops(
            torch.from_numpy(sample.canvas).permute(2, 0, 1), processor["size"]["height"],
            mean=processor["image_mean"], std=processor["image_std"],
        )  # fmt: skip
        assert torch.equal(ids, sample.inputs["input_ids"]) and torch.equal(
            pixels, sample.inputs["pixel_values"]
        )
        with torch.no_grad():
            answer = model.generate(**sample.inputs, max_new_tokens=3, do_sample=False)
        assert answer.shape[1] <= ids.shape[1] + 3


def test_load_vqa_model_of_invalid_directory_raises(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"grid_vqa\.json"):
        load_vqa_model(tmp_path)
    (tmp_path / SETTINGS).write_text("{}")
    with pytest.raises(FileFormatError, match="not a readable"):
        load_vqa_model(tmp_path)
    (tmp_path / SETTINGS).write_text((folder / SETTINGS).read_text())
    with pytest.raises(FileFormatError, match="not a readable"):
        load_vqa_model(tmp_path)
