"""Packing a trained model: the folder can be shipped, and its images are of the test split only."""

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
from sparseflow.adaptive.data import IMPORTANCE, WORTH
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
    """What `pack` takes. Of cats and dogs, and two test images are training images as well."""
    root = tmp_path_factory.mktemp("trained")
    train, test = noise(40), noise(30, seed=1)
    test[:2] = train[:2]

    def named(part: str, images: np.ndarray) -> Path:
        files = {f"{part}/{'cat' if at % 2 else 'dog'}/{at:02}.png": png(x) for at, x in enumerate(images)}
        return archive(root / f"{part}.tar.gz", files)

    archives = [named("train", train), named("test", test)]
    settings = quick(**{"images.archives": list(map(str, archives)), "images.question_names": ["cat", "one", "two"]})
    network, _, _ = load_vqa_model(untrained(root / "model", settings))
    who = compute_weights_id(network)
    found = measure_importance(lambda blocks: np.ones(4), get_adapter(network).geometry, beam=1, model_id=who)
    (root / IMPORTANCE).write_text(json.dumps(found.to_dict()))
    space = found.make_space()
    worth = PlanQuality(model_id=who, space=space, accuracy=(0.5,) * len(space), samples=4, task="t")
    worth.save(root / WORTH)
    return {
        "model": root / "model", "importance": root / IMPORTANCE, "worth": root / WORTH, "archives": archives,
    }  # fmt: skip


def words(trained: dict[str, Any], out: Path) -> list[str]:
    """The same on a command line."""
    return [
        str(trained["model"]), "--importance", str(trained["importance"]), "--worth", str(trained["worth"]),
        "--archives", *map(str, trained["archives"]), "--out", str(out),
    ]  # fmt: skip


def test_a_packed_model_is_shown_without_its_archives(
    script: Callable[[str], Any],
    trained: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pack, out = script("pack"), tmp_path / "cats"
    monkeypatch.setattr(pack, "OTHERS", 9)
    assert pack.main(words(trained, out)) == 0 and "23 images" in capsys.readouterr().out
    with tarfile.open(out / IMAGES) as opened:
        names = opened.getnames()
    # Image 0 is a dog and image 1 a cat of the training; of dogs, which nobody asks about, there are enough.
    assert names == sorted(names, key=lambda name: name[-6:]) and {name[:5] for name in names} == {"test/"}
    assert not {name[-6:-4] for name in names} & {"00", "01"}
    assert sum("cat" in name for name in names) == 14 and sum("dog" in name for name in names) == 9
    kept = json.loads((out / "grid_vqa.json").read_text())["settings"]["images"]
    assert kept["archives"] == ["train.tar.gz", "test.tar.gz"]
    before = (out / IMAGES).read_bytes()
    pack.main(words(trained, out))
    assert (out / IMAGES).read_bytes() == before

    few = ["--questions", "2", "--budgets", "2", "--out", str(tmp_path / "runs")]
    capsys.readouterr()
    assert run(["adaptive", "demo", "--model", str(out), *few, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "cats"
    (out / IMAGES).unlink()
    with pytest.raises(InputError, match=r"there is no archive train\.tar\.gz"):
        run_demo(out, out=tmp_path / "runs")


def test_what_is_refused(script: Callable[[str], Any], trained: dict[str, Any], tmp_path: Path) -> None:
    pack, out = script("pack"), tmp_path / "out"
    with pytest.raises(InputError, match=r"those of the training, train\.tar\.gz test\.tar\.gz"):
        pack.pack(**trained | {"archives": trained["archives"][::-1], "out": out})
    told = json.loads(trained["importance"].read_text()) | {"model_id": "other"}
    (tmp_path / "other.json").write_text(json.dumps(told))
    with pytest.raises(InputError, match=r"other\.json is of another model"):
        pack.pack(**trained | {"importance": tmp_path / "other.json", "out": out})
    assert not out.exists()


def test_images_that_were_learnt_from_are_found_out(
    script: Callable[[str], Any], trained: dict[str, Any]
) -> None:
    pack, (train, test) = script("pack"), trained["archives"]
    settings = load_vqa_model(trained["model"])[2]
    bank = VqaDataset(settings).bank
    with pytest.raises(InputError, match=r"train\.tar\.gz would ask about images that were learnt from"):
        pack.check(train, settings, bank)
    assert {label for label, _, _ in pack.unlearnt([train, test], bank)} == {"cat", "dog"}
    assert not any(name.startswith("train") for _, name, _ in pack.unlearnt([train, test], bank))
