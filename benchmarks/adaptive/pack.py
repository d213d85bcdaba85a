r"""Pack a trained Grid-VQA model into a directory for the package data.

::

    PYTHONPATH=src python benchmarks/adaptive/pack.py runs/seed-0/model --importance runs/importance.json \
        --plan-quality runs/study/plan_quality.json \
        --archives cifar10-train.tar.gz cifar10-test.tar.gz --out src/sparseflow/adaptive/data/cifar

The archives are those of the training. Some of their images are packed unchanged and under the same names:
only images of the training's test split that are in no other split, so none of them was a training image,
regardless of the split of the packed archive. Repeated calls write the same archive.
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

from sparseflow.adaptive.data import IMPORTANCE_FILE, PLAN_QUALITY_FILE
from sparseflow.adaptive.grid_vqa.config import VqaConfig
from sparseflow.adaptive.grid_vqa.images import SPLITS, ImageBank, load_image_bank, read_archives
from sparseflow.adaptive.grid_vqa.model import IMAGES, SETTINGS, load_vqa_model
from sparseflow.adaptive.profile import compute_weights_id
from sparseflow.adaptive.profile.importance import BlockImportance
from sparseflow.adaptive.profile.plan_quality import PlanQuality
from sparseflow.core.files import write_atomic
from sparseflow.errors import InputError

MAX_QUESTION_IMAGES, MAX_OTHER_IMAGES = 360, 10
"""Maximum number of images per class: of classes in questions, and of other classes."""
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")


def iterate_files(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of an archive's images, in the order of `pictures`."""
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and "/" in member.name and member.name.lower().endswith(IMAGE_SUFFIXES):
                content = tar.extractfile(member)
                assert content is not None
                yield member.name, content.read()


def iterate_test_images(archives: Sequence[Path], bank: ImageBank) -> Iterator[tuple[str, str, bytes]]:
    """Yield class, name and content of each image that is only in the test split.

    Raises:
        InputError: An archive contains other files than images.
    """
    pixels = {
        split: {bank.images[index].tobytes() for index in np.concatenate(bank.splits[split])}
        for split in SPLITS
    }
    tests = pixels["test"] - pixels["train"] - pixels["val"]
    for archive in archives:
        files, source = list(iterate_files(archive)), read_archives([archive])
        if len(files) != len(source.names):
            raise InputError(f"{archive} must contain its images as files …/<class>/<name>.png or .jpg")
        for (name, content), label, image in zip(files, source.names, source.images, strict=True):
            if PurePosixPath(name).parts[-2].lower() != label:
                raise InputError(f"{archive}: {name} expected the class {label}")
            if image.tobytes() in tests:
                yield label, name, content


def write_images(out: Path, archives: Sequence[Path], settings: VqaConfig, bank: ImageBank) -> int:
    """Write an archive of test images; returns their number.

    Args:
        out: Archive to write.
        archives: Archives of the training.
        settings: Configuration of the training.
        bank: Images of the training, from these archives.

    Raises:
        InputError: The written archive contains training images; it is deleted.
    """
    question_labels, counts = settings.images.question_names or bank.names, Counter[str]()
    buffer = io.BytesIO()
    # No times or owners, so that repeated calls write the same archive.
    with (
        gzip.GzipFile(filename="", fileobj=buffer, mode="wb", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for label, name, content in iterate_test_images(archives, bank):
            if counts[label] == (MAX_QUESTION_IMAGES if label in question_labels else MAX_OTHER_IMAGES):
                continue
            counts[label] += 1
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    write_atomic(out, buffer.getvalue())
    try:
        check_archive(out, settings, bank)
    except BaseException:
        out.unlink()
        raise
    return counts.total()


def check_archive(archive: Path, settings: VqaConfig, bank: ImageBank) -> None:
    """Check that the packed images cover all classes and contain no training image.

    Args:
        archive: Packed images.
        settings: Configuration of the training.
        bank: Images of the training.

    Raises:
        InputError: A class is missing, or an image is a training image.
    """
    packed = load_image_bank(digits=settings.images.digits, archives=[archive], seed=settings.images.seed)
    if packed.names != bank.names:
        raise InputError(
            f"{archive} contains the classes {', '.join(packed.names)}; expected {', '.join(bank.names)}"
        )
    training_images = {bank.images[index].tobytes() for index in np.concatenate(bank.splits["train"])}
    for split in ("val", "test"):
        if any(
            packed.images[index].tobytes() in training_images
            for index in np.concatenate(packed.splits[split])
        ):
            raise InputError(f"{archive} contains training images in its {split} split")


def pack(
    model: Path, out: Path, *, importance: Path, plan_quality: Path, archives: Sequence[Path] = ()
) -> int:
    """Write the directory; returns the number of packed images.

    Args:
        model: Directory of the trained model.
        out: Directory to write; created if missing.
        importance: Importance of the model's blocks.
        plan_quality: Accuracy of the model's plans.
        archives: Image archives of the training, in its order.

    Raises:
        InputError: A file is missing or belongs to another model, or the archives differ from the training's.
        FileFormatError: A file is damaged.
    """
    network, _, settings = load_vqa_model(model)
    block_importance = BlockImportance.load(importance)
    if block_importance.model_id != compute_weights_id(network):
        raise InputError(f"{importance} belongs to another model than {model}")
    PlanQuality.load(plan_quality).check(compute_weights_id(network), block_importance.make_space())
    trained = [path.name for path in settings.images.archives]
    if [path.name for path in archives] != trained:
        raise InputError(f"`--archives` must be the archives of the training: {' '.join(trained) or 'none'}")
    out.mkdir(parents=True, exist_ok=True)
    count = 0
    if archives:
        images = settings.images
        bank = load_image_bank(digits=images.digits, archives=archives, seed=images.seed)
        count = write_images(out / IMAGES, archives, settings, bank)
    for file in sorted(model.iterdir()):
        if file.is_file():
            shutil.copyfile(file, out / file.name)
    record = json.loads((model / SETTINGS).read_text("utf-8"))
    # The directories of the archives are removed.
    record["settings"]["images"]["archives"] = trained
    write_atomic(out / SETTINGS, json.dumps(record, indent=1) + "\n")
    shutil.copyfile(importance, out / IMPORTANCE_FILE)
    shutil.copyfile(plan_quality, out / PLAN_QUALITY_FILE)
    return count


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="directory of the trained model")
    parser.add_argument("--importance", type=Path, required=True, help="importance of the blocks, JSON")
    parser.add_argument("--plan-quality", type=Path, required=True, help="accuracy of the plans, JSON")
    parser.add_argument("--archives", type=Path, nargs="*", default=[], help="image archives of the training")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    args = parser.parse_args(argv)
    images = pack(
        args.model,
        args.out,
        importance=args.importance,
        plan_quality=args.plan_quality,
        archives=args.archives,
    )
    size = sum(file.stat().st_size for file in args.out.iterdir())
    print(f"{args.out}: {size / 1e6:.1f} MB, {images} images")
    return 0


if __name__ == "__main__":
    sys.exit(main())
