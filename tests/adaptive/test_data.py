"""Models that come with SparseFlow: each is whole, right, and asked about images it has not learnt from."""

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
    DEFAULT,
    IMPORTANCE,
    WORTH,
    model_folder,
    shipped,
    shipped_names,
)
from sparseflow.adaptive.grid_vqa.config import settings_of
from sparseflow.adaptive.grid_vqa.dataset import VqaDataset
from sparseflow.adaptive.grid_vqa.evaluate import accuracy
from sparseflow.adaptive.grid_vqa.images import DIGITS, bank_of
from sparseflow.adaptive.grid_vqa.model import IMAGES, load
from sparseflow.adaptive.grid_vqa.task import placed
from sparseflow.adaptive.profile import compute_weights_id
from sparseflow.adaptive.profile.importance import BlockImportance
from sparseflow.adaptive.profile.plan_quality import PlanQuality
from sparseflow.errors import InputError

NAMES = shipped_names()
PACKED = sorted(Path(module.__file__).parent.glob(f"*/{IMAGES}"))


def test_names_and_folders(tmp_path: Path) -> None:
    assert DEFAULT in NAMES and shipped() == shipped(DEFAULT) == model_folder(DEFAULT)
    assert model_folder(str(tmp_path)) == model_folder(tmp_path) == tmp_path
    told = rf"come with SparseFlow: {', '.join(NAMES)}"
    for unknown in ("nothing", str(tmp_path / "nothing"), "x" * 5000):
        with pytest.raises(InputError, match=f"there is no folder {unknown}; these {told}"):
            model_folder(unknown)
    with pytest.raises(InputError, match="no model 'nothing' comes with SparseFlow; these do: "):
        shipped("nothing")


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_small_deep_and_whole(name: str) -> None:
    folder = shipped(name)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 25e6
    network, tokenizer, settings = load(folder)
    assert 12 <= settings.model.depth <= 16
    assert not any(path.parent.name for path in settings.images.archives), "where they lay is not told"
    found = BlockImportance.load(folder / IMPORTANCE)
    assert found.model_id == compute_weights_id(network)
    PlanQuality.load(folder / WORTH).check(compute_weights_id(network), found.make_space())
    data = VqaDataset(placed(settings, (), folder))
    for split in ("val", "test"):
        sample = next(data.samples(split, 1))
        read = tokenizer.decode(sample.inputs["input_ids"][0], skip_special_tokens=True)
        assert sample.question.split()[0] in read, "its words have the numbers that it learnt"


@pytest.mark.parametrize(
    ("name", "count"),
    [(name, 128) if name == DEFAULT else pytest.param(name, 24, marks=pytest.mark.slow) for name in NAMES],
)
def test_a_model_is_right(name: str, count: int) -> None:
    folder = shipped(name)
    network, _, settings = load(folder)
    worth = PlanQuality.load(folder / WORTH)
    full = worth.space.geometry.full_plan()
    told = worth.accuracy[worth.space.plans.index(full)]
    right = accuracy(network, VqaDataset(placed(settings, (), folder)), [full], split="test", count=count)
    # Far more than the question alone tells, and what was measured when it was shipped.
    assert right.mean() > max(0.6, told - 0.2)


@pytest.mark.parametrize("archive", PACKED, ids=lambda path: path.parent.name)
def test_images_were_not_learnt_from(archive: Path) -> None:
    assert archive.stat().st_size < 6e5
    with tarfile.open(archive) as opened:
        names = opened.getnames()
    # They have the names that they have in CIFAR-10's archive of test images, none of which was in training.
    assert all(name.split("/")[0] == "test" for name in names) and len(set(names)) == len(names)
    kept = settings_of({"images": {"archives": [archive]}}).images
    few, alone = (bank_of(digits=True, archives=each, seed=kept.seed) for each in (kept.archives, ()))
    # Digits come first, so they are split as without any archive: those of the training stay in training.
    for label, name in enumerate(alone.names):
        assert few.names[label] == name and name in DIGITS
        for split in alone.splits:
            assert np.array_equal(few.splits[split][label], alone.splits[split][label])
    assert len(few.names) == 20


def test_an_archive_that_is_given_goes_before_one_in_the_folder_and_that_before_the_settings(
    tmp_path: Path,
) -> None:
    settings = settings_of({"images": {"archives": ["of-training.tar"]}})
    assert placed(settings, (), tmp_path) is settings
    (tmp_path / IMAGES).touch()
    assert placed(settings, None, tmp_path).images.archives == (tmp_path / IMAGES,)
    assert placed(settings, [Path("given.tar")], tmp_path).images.archives == (Path("given.tar"),)
