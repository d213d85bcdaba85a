"""A model's folder, and prompts for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

from sparseflow import adaptive
from sparseflow.adaptive.data import get_pretrained_dir
from sparseflow.errors import InputError


@pytest.fixture(scope="module")
def model_folder() -> adaptive.ModelFolder:
    return adaptive.open_folder(get_pretrained_dir())


@pytest.fixture
def image(tmp_path: Path) -> Path:
    from PIL import Image

    file = tmp_path / "grid.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (72, 72, 3), np.uint8)).save(file)
    return file


def test_from_words_and_a_file_to_an_answer(model_folder: adaptive.ModelFolder, image: Path) -> None:
    prompt = model_folder.prompt("how many three are model_folder", [image])
    assert prompt.images == 1 and prompt.inputs["pixel_values"].shape[0] == 14
    with adaptive.attach(model_folder.model) as ctl:
        result = ctl.generate(**prompt.inputs, max_new_tokens=2)
        assert result.plan == ctl.runtime.geometry.full_plan() and result.new_tokens.shape[1] <= 2
        low = ctl.adapter.reduce_to_tier(prompt.inputs, "low")["input_ids"].shape[1]
        text = ctl.generate(**model_folder.prompt("how many three are model_folder").inputs, max_new_tokens=1)
        assert text.plan.tier is None and text.prompt_tokens < low < result.prompt_tokens


def test_what_cannot_be_used_is_told(model_folder: adaptive.ModelFolder, image: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"image .*absent\.png cannot be read: No such file"):
        model_folder.prompt("what", [tmp_path / "absent.png"])
    broken = tmp_path / "broken.png"
    broken.write_bytes(image.read_bytes()[:100])
    with pytest.raises(InputError, match=r"image .*broken\.png: "):
        model_folder.prompt("what", [broken])
    with pytest.raises(InputError, match="tokens"):
        model_folder.prompt("what " * 500, [image])
    with pytest.raises(InputError, match=r"config\.json"):
        adaptive.open_folder(tmp_path)
