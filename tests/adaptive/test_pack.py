"""Tests of packing a trained model: a complete directory, and images of the test split only."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("sklearn")
pytest.importorskip("PIL")

from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.data import IMPORTANCE_FILE, PLAN_QUALITY_FILE
from sparseflow.adaptive.demo import run_demo
from sparseflow.adaptive.grid_vqa.dataset import VqaDataset
from sparseflow.adaptive.grid_vqa.model import IMAGES, load_vqa_model
from sparseflow.adaptive.profile import compute_weights_id
from sparseflow.adaptive.profile.importance import measure_importance
from sparseflow.adaptive.profile.plan_quality import PlanQuality
from sparseflow.cli.root import run
from sparseflow.errors import InputError
from tests.adaptive.grid_vqa.little import quick, untrained
from tests.adaptive.grid_vqa.test_images import archive, noise, png


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Arguments of `pack`. The classes are cat and dog, and two test images are also training images."""
    root = tmp_path_factory.mktemp("trained")
    train, test = noise(40), noise(30, seed=1)
    test[:2] = train[:2]

    def write_archive(split: str, images: np.ndarray) -> Path:
        files = {
            f"{split}/{'cat' if index % 2 else 'dog'}/{index:02}.png": png(image)
            for index, image in enumerate(images)
        }
        return archive(root / f"{split}.tar.gz", files)

    archives = [write_archive("train", train), write_archive("test", test)]
    settings = quick(
        **{"images.archives": list(map(str, archives)), "images.question_names": ["cat", "one", "two"]}
    )
    network, _, _ = load_vqa_model(untrained(root / "model", settings))
    model_id = compute_weights_id(network)
    importance = measure_importance(
        lambda blocks: np.ones(4), get_adapter(network).geometry, beam=1, model_id=model_id
    )
    (root / IMPORTANCE_FILE).write_text(json.dumps(importance.to_dict()))
    space = importance.make_space()
    accuracy = (0.5,) * len(space)
    quality = PlanQuality(model_id=model_id, space=space, accuracy=accuracy, samples=4, task="t")
    quality.save(root / PLAN_QUALITY_FILE)
    return {
        "model": root / "model", "importance": root / IMPORTANCE_FILE,
        "plan_quality": root / PLAN_QUALITY_FILE, "archives": archives,
    }  # fmt: skip


def make_argv(trained: dict[str, Any], out: Path) -> list[str]:
    return [
        str(trained["model"]), "--importance", str(trained["importance"]),
        "--plan-quality", str(trained["plan_quality"]),
        "--archives", *map(str, trained["archives"]), "--out", str(out),
    ]  # fmt: skip


def test_pack_demo_runs_without_archives(
    script: Callable[[str], Any],
    trained: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pack, out = script("pack"), tmp_path / "cats"
    monkeypatch.setattr(pack, "MAX_OTHER_IMAGES", 9)
    assert pack.main(make_argv(trained, out)) == 0 and "23 images" in capsys.readouterr().out
    with tarfile.open(out / IMAGES) as tar:
        names = tar.getnames()
    # Images 0 (dog) and 1 (cat) are training images; dogs do not occur in questions, so 9 suffice.
    assert names == sorted(names, key=lambda name: name[-6:]) and {name[:5] for name in names} == {"test/"}
    assert not {name[-6:-4] for name in names} & {"00", "01"}
    assert sum("cat" in name for name in names) == 14 and sum("dog" in name for name in names) == 9
    images = json.loads((out / "grid_vqa.json").read_text())["settings"]["images"]
    assert images["archives"] == ["train.tar.gz", "test.tar.gz"]
    content = (out / IMAGES).read_bytes()
    pack.main(make_argv(trained, out))
    assert (out / IMAGES).read_bytes() == content

    options = ["--num-questions", "2", "--num-budgets", "2", "--out", str(tmp_path / "runs")]
    capsys.readouterr()
    assert run(["adaptive", "demo", "--model", str(out), *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "cats"
    (out / IMAGES).unlink()
    with pytest.raises(InputError, match=r"train\.tar\.gz"):
        run_demo(out, out_dir=tmp_path / "runs")


def test_pack_files_of_another_model_raise(
    script: Callable[[str], Any], trained: dict[str, Any], tmp_path: Path
) -> None:
    pack, out = script("pack"), tmp_path / "out"
    with pytest.raises(InputError, match=r"train\.tar\.gz test\.tar\.gz"):
        pack.pack(**trained | {"archives": trained["archives"][::-1], "out": out})
    record = json.loads(trained["importance"].read_text()) | {"model_id": "other"}
    (tmp_path / "other.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"other\.json"):
        pack.pack(**trained | {"importance": tmp_path / "other.json", "out": out})
    assert not out.exists()


def test_check_archive_training_images_raise(script: Callable[[str], Any], trained: dict[str, Any]) -> None:
    pack, (train, test) = script("pack"), trained["archives"]
    settings = load_vqa_model(trained["model"])[2]
    bank = VqaDataset(settings).bank
    with pytest.raises(InputError, match=r"train\.tar\.gz"):
        pack.check_archive(train, settings, bank)
    assert {label for label, _, _ in pack.iterate_test_images([train, test], bank)} == {"cat", "dog"}
    assert not any(name.startswith("train") for _, name, _ in pack.iterate_test_images([train, test], bank))
