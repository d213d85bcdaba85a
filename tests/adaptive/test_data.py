"""Tests of the pretrained models: files, accuracy, and separation of training and test images."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("sklearn")
pytest.importorskip("PIL")

from sparseflow.adaptive import data as module
from sparseflow.adaptive.data import (
    DEFAULT_MODEL,
    IMPORTANCE_FILE,
    PLAN_QUALITY_FILE,
    get_pretrained_dir,
    list_pretrained,
    resolve_model_dir,
)
from sparseflow.adaptive.grid_vqa.config import VqaConfig
from sparseflow.adaptive.grid_vqa.dataset import VqaDataset
from sparseflow.adaptive.grid_vqa.evaluate import check_answers
from sparseflow.adaptive.grid_vqa.images import DIGITS, load_image_bank
from sparseflow.adaptive.grid_vqa.model import IMAGES, load_vqa_model
from sparseflow.adaptive.grid_vqa.task import locate_archives
from sparseflow.adaptive.profile import compute_weights_id
from sparseflow.adaptive.profile.importance import BlockImportance
from sparseflow.adaptive.profile.plan_quality import PlanQuality
from sparseflow.errors import InputError

NAMES = list_pretrained()
IMAGE_ARCHIVES = sorted(Path(module.__file__).parent.glob(f"*/{IMAGES}"))


def test_resolve_model_dir_name_or_directory_returns_path(tmp_path: Path) -> None:
    assert DEFAULT_MODEL in NAMES
    assert get_pretrained_dir() == get_pretrained_dir(DEFAULT_MODEL) == resolve_model_dir(DEFAULT_MODEL)
    assert resolve_model_dir(str(tmp_path)) == resolve_model_dir(tmp_path) == tmp_path


def test_resolve_model_dir_unknown_name_raises(tmp_path: Path) -> None:
    available = ", ".join(NAMES)
    for unknown in ("unknown", str(tmp_path / "unknown"), "x" * 5000):
        with pytest.raises(InputError, match=f"{unknown} .*{available}"):
            resolve_model_dir(unknown)
    with pytest.raises(InputError, match=f"'unknown'.*{available}"):
        get_pretrained_dir("unknown")


@pytest.mark.parametrize("name", NAMES)
def test_pretrained_model_files_are_complete(name: str) -> None:
    model_dir = get_pretrained_dir(name)
    assert sum(path.stat().st_size for path in model_dir.iterdir()) < 13e6
    network, tokenizer, settings = load_vqa_model(model_dir)
    assert 12 <= settings.model.depth <= 16
    assert not any(path.parent.name for path in settings.images.archives)
    importance = BlockImportance.load(model_dir / IMPORTANCE_FILE)
    assert importance.model_id == compute_weights_id(network)
    PlanQuality.load(model_dir / PLAN_QUALITY_FILE).check(
        compute_weights_id(network), importance.make_space()
    )
    data = VqaDataset(locate_archives(settings, (), model_dir))
    for split in ("val", "test"):
        sample = next(data.iterate_samples(split, 1))
        text = tokenizer.decode(sample.inputs["input_ids"][0], skip_special_tokens=True)
        assert sample.question.split()[0] in text, "the tokenizer is that of the training"


@pytest.mark.parametrize(
    ("name", "count"),
    [
        (name, 128) if name == DEFAULT_MODEL else pytest.param(name, 24, marks=pytest.mark.slow)
        for name in NAMES
    ],
)
def test_pretrained_model_reaches_accuracy(name: str, count: int) -> None:
    model_dir = get_pretrained_dir(name)
    network, _, settings = load_vqa_model(model_dir)
    plan_quality = PlanQuality.load(model_dir / PLAN_QUALITY_FILE)
    full = plan_quality.space.geometry.full_plan()
    expected = plan_quality.accuracy[plan_quality.space.plans.index(full)]
    measured = check_answers(
        network, VqaDataset(locate_archives(settings, (), model_dir)), [full], split="test", count=count
    )
    # Above the accuracy without the image (below 0.6), and near the stored accuracy.
    assert measured.mean() > max(0.6, expected - 0.2)


@pytest.mark.parametrize("archive", IMAGE_ARCHIVES, ids=lambda path: path.parent.name)
def test_packed_images_are_not_training_images(archive: Path) -> None:
    assert archive.stat().st_size < 6e5
    with tarfile.open(archive) as tar:
        names = tar.getnames()
    # Names as in CIFAR-10's test archive, which was not used in training.
    assert all(name.split("/")[0] == "test" for name in names) and len(set(names)) == len(names)
    images = VqaConfig.model_validate({"images": {"archives": [archive]}}).images
    packed, digits = (
        load_image_bank(digits=True, archives=archives, seed=images.seed)
        for archives in (images.archives, ())
    )
    # Digits come first and are split as without an archive, so training digits stay in the training split.
    for label, name in enumerate(digits.names):
        assert packed.names[label] == name and name in DIGITS
        for split in digits.splits:
            assert np.array_equal(packed.splits[split][label], digits.splits[split][label])
    assert len(packed.names) == 20


def test_placed_archives_argument_precedes_directory_and_settings(
    tmp_path: Path,
) -> None:
    settings = VqaConfig.model_validate({"images": {"archives": ["of-training.tar"]}})
    assert locate_archives(settings, (), tmp_path) is settings
    (tmp_path / IMAGES).touch()
    assert locate_archives(settings, None, tmp_path).images.archives == (tmp_path / IMAGES,)
    assert locate_archives(settings, [Path("given.tar")], tmp_path).images.archives == (Path("given.tar"),)
