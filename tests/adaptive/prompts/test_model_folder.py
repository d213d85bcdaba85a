"""A model's folder, and prompts for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

from sparseflow import adaptive
from sparseflow.adaptive.data import get_pretrained_dir
from sparseflow.cli.root import run
from sparseflow.errors import FileFormatError, InputError


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


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"[" * 100_000),
        ("config.json", b"[1]"),
        ("config.json", b'{"model_type": "llava", "vision_feature_select_strategy": 1e308}'),
        ("tokenizer_config.json", b"null"),
        ("tokenizer.json", b"null"),
        ("tokenizer.json", b'{"version": "1.0", "added_tokens": [], "model": {"type": 5}}'),
        ("preprocessor_config.json", b"\xff\xfe"),
        ("model.safetensors", b"no weights"),
    ],
)
def test_open_folder_with_damaged_file_raises(name: str, content: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in get_pretrained_dir().iterdir():
        if file.is_file() and file.name != name:
            (folder / file.name).symlink_to(file)
    (folder / name).write_bytes(content)
    with pytest.raises((FileFormatError, InputError)) as caught:
        adaptive.open_folder(folder)
    assert len(str(caught.value)) < 600 and "\n" not in str(caught.value)


def test_commands_take_names_of_shipped_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["adaptive", "generate", "digits", "how many three", "--max-new-tokens", "1", "--json"]) == 0
    assert '"tier": null' in capsys.readouterr().out
