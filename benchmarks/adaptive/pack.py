r"""A trained Grid-VQA model made into a folder as SparseFlow comes with, which `demo` shows.

::

    PYTHONPATH=src python benchmarks/adaptive/pack.py runs/seed-0/model --importance runs/importance.json \
        --worth runs/study/plan_quality.json --archives cifar10-train.tar.gz cifar10-test.tar.gz \
        --out src/sparseflow/adaptive/data/cifar

The archives are those of the training. Some of their images are packed, as the files that they are and under
the same names; only such as the training, with its seed, put into its test split, and that are in no other
one. So none of them was learnt from, whichever part a split of the few that are packed puts it into. The same
call writes the same archive.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import shutil
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from sparseflow.adaptive.data import IMPORTANCE, WORTH
from sparseflow.adaptive.grid_vqa.config import VqaConfig
from sparseflow.adaptive.grid_vqa.images import SPLITS, ImageBank, bank_of, pictures
from sparseflow.adaptive.grid_vqa.model import IMAGES, SETTINGS, load
from sparseflow.adaptive.profile import compute_weights_id
from sparseflow.adaptive.profile.importance import BlockImportance
from sparseflow.adaptive.profile.plan_quality import PlanQuality
from sparseflow.core.files import write_atomic
from sparseflow.errors import InputError

ASKED, OTHERS = 360, 10
"""Images of each name: of one that is asked about, and of one that is only there to be split."""
PICTURES = (".png", ".jpg", ".jpeg")


def files_of(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Names and bytes of an archive's images, in the order that `pictures` reads them."""
    with tarfile.open(archive) as opened:
        for member in opened:
            if member.isfile() and "/" in member.name and member.name.lower().endswith(PICTURES):
                content = opened.extractfile(member)
                assert content is not None
                yield member.name, content.read()


def unlearnt(archives: Sequence[Path], bank: ImageBank) -> Iterator[tuple[str, str, bytes]]:
    """The class, the name and the bytes of each image that lies in a bank's test split and in no other one.

    Raises:
        InputError: An archive holds something else than files of images.
    """
    pixels = {
        split: {bank.images[at].tobytes() for at in np.concatenate(bank.splits[split])} for split in SPLITS
    }
    tests = pixels["test"] - pixels["train"] - pixels["val"]
    for archive in archives:
        files, source = list(files_of(archive)), pictures([archive])
        if len(files) != len(source.names):
            raise InputError(f"{archive} must hold its images as files …/<class>/<name>.png or .jpg")
        for (name, content), label, image in zip(files, source.names, source.images, strict=True):
            if PurePosixPath(name).parts[-2].lower() != label:
                raise InputError(f"{archive}: {name} was read as {label}")
            if image.tobytes() in tests:
                yield label, name, content


def write_images(out: Path, archives: Sequence[Path], settings: VqaConfig, bank: ImageBank) -> int:
    """Write the archive of some images that a training put into its test split; how many.

    Args:
        out: The archive.
        archives: Those of the training.
        settings: Of the training.
        bank: Of the training, from these archives.

    Raises:
        InputError: What was written is not split as it must be; it is deleted.
    """
    asked, counts = settings.images.asked or bank.names, Counter[str]()
    written = io.BytesIO()
    # Neither times nor owners: they would make every call's archive another one.
    with (
        gzip.GzipFile(filename="", fileobj=written, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as made,
    ):
        for label, name, content in unlearnt(archives, bank):
            if counts[label] == (ASKED if label in asked else OTHERS):
                continue
            counts[label] += 1
            info = tarfile.TarInfo(name)
            info.size = len(content)
            made.addfile(info, io.BytesIO(content))
    write_atomic(out, written.getvalue())
    try:
        check(out, settings, bank)
    except BaseException:
        out.unlink()
        raise
    return counts.total()


def check(archive: Path, settings: VqaConfig, bank: ImageBank) -> None:
    """That images which are packed can be asked about, and that none was learnt from.

    Args:
        archive: The images that are packed.
        settings: Of the training.
        bank: Of the training.

    Raises:
        InputError: A name is missing, or an image was learnt from.
    """
    few = bank_of(digits=settings.images.digits, archives=[archive], seed=settings.images.seed)
    if few.names != bank.names:
        raise InputError(f"{archive} has images of {', '.join(few.names)}, not of {', '.join(bank.names)}")
    learnt = {bank.images[at].tobytes() for at in np.concatenate(bank.splits["train"])}
    for split in ("val", "test"):
        if any(few.images[at].tobytes() in learnt for at in np.concatenate(few.splits[split])):
            raise InputError(f"{archive} would ask about images that were learnt from ({split} split)")


def pack(model: Path, out: Path, *, importance: Path, worth: Path, archives: Sequence[Path] = ()) -> int:
    """Write the folder; how many images are in it.

    Args:
        model: Folder that a training wrote.
        out: Folder to write; made when absent.
        importance: Which blocks of the model can be skipped.
        worth: How good the plans are that follow from it.
        archives: Of images; those of the training, in its order, or none where it had none.

    Raises:
        InputError: A file is missing, or of another model, or the archives are not those of the training.
        FileFormatError: A file is damaged.
    """
    network, _, settings = load(model)
    found = BlockImportance.load(importance)
    if found.model_id != compute_weights_id(network):
        raise InputError(f"{importance} is of another model than {model}")
    PlanQuality.load(worth).check(compute_weights_id(network), found.make_space())
    trained = [path.name for path in settings.images.archives]
    if [path.name for path in archives] != trained:
        raise InputError(f"`--archives` must be those of the training, {' '.join(trained) or 'none'}")
    out.mkdir(parents=True, exist_ok=True)
    count = 0
    if archives:
        told = settings.images
        bank = bank_of(digits=told.digits, archives=archives, seed=told.seed)
        count = write_images(out / IMAGES, archives, settings, bank)
    for file in sorted(model.iterdir()):
        if file.is_file():
            shutil.copyfile(file, out / file.name)
    kept = json.loads((model / SETTINGS).read_text("utf-8"))
    # Where archives lay is nobody's business.
    kept["settings"]["images"]["archives"] = trained
    write_atomic(out / SETTINGS, json.dumps(kept, indent=1) + "\n")
    shutil.copyfile(importance, out / IMPORTANCE)
    shutil.copyfile(worth, out / WORTH)
    return count


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of the trained model")
    parser.add_argument("--importance", type=Path, required=True, help="JSON file, of this model")
    parser.add_argument("--worth", type=Path, required=True, help="JSON file of a study, of its plans")
    parser.add_argument("--archives", type=Path, nargs="*", default=[], help="those of the training")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    asked = parser.parse_args(given)
    images = pack(
        asked.model, asked.out, importance=asked.importance, worth=asked.worth, archives=asked.archives
    )
    size = sum(file.stat().st_size for file in asked.out.iterdir())
    print(f"{asked.out}: {size / 1e6:.1f} MB, {images} images")
    return 0


if __name__ == "__main__":
    sys.exit(main())
