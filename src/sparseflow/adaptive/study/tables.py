"""From a task and a profile to tables of outcomes: what is right, and what it takes."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparseflow.adaptive.environment import Outcomes
from sparseflow.adaptive.profile import Profile, model_id
from sparseflow.adaptive.study.answers import answers
from sparseflow.adaptive.study.latencies import Latencies, Size, latencies
from sparseflow.adaptive.task import Counts, Judged, Progress, Stretch, Task
from sparseflow.core.artifact import load_tensors, save_tensors
from sparseflow.core.training.distributed import DistributedContext
from sparseflow.errors import FileFormatError, InputError

FOLDER, LATENCIES = "outcomes", "latencies.safetensors"

_MARK = {"sparseflow": "adaptive-latencies", "version": "1"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Tables:
    """Outcomes to learn from, to validate with, and to be judged on; and what they are of.

    Attributes:
        train: As `Parts`, as the next two.
        validation: Shares no sample with the others.
        test: Shares no sample with the others.
        kinds: Of questions, of the test: name -> which samples, [samples] bool.
        size: Of the middle request of the test.
        latency: What requests of that size take.
    """

    train: Outcomes
    validation: Outcomes
    test: Outcomes
    kinds: Mapping[str, Tensor]
    size: Size
    latency: Latencies


def tables(
    task: Task,
    profile: Profile,
    folder: Path | str,
    *,
    counts: Counts,
    mine: DistributedContext,
    progress: Progress | None = None,
) -> Tables:
    """Make tables, or go on where an earlier call in the same folder was stopped.

    Args:
        task: Who is asked, and what; the model is of the profile's kind and number format.
        profile: Of its plans; it may be from another device: that is where latencies are of.
        folder: Keeps what was found, in `outcomes/`.
        counts: Of samples; there may be fewer, if the task has no more.
        mine: This process among all that share the folder.
        progress: Called with (what was done, fraction done).

    Raises:
        InputError: The profile is of another model or has too little, the task has too few samples, or the
            folder holds answers of another model or task.
        FileFormatError: A file of the folder is damaged.
    """
    mine_id = model_id(task.model)
    if profile.about.model_id != mine_id:
        raise InputError(
            f"this profile is of another model (id {profile.about.model_id}; yours is {mine_id}): profile "
            "yours with `sparseflow adaptive profile`"
        )
    root, parts = Path(folder) / FOLDER, task.parts(counts, progress if mine.rank == 0 else None)
    # What is wrong with the profile is said before hours of answers.
    images = 1.0 if profile.space.geometry.tiers and parts.images else 0.0
    latencies(profile, [Size(1, 1, images=images)])
    judged = answers(task, profile.space, root, parts.counts(), mine=mine, progress=progress)
    sizes = {split: _sizes(each, profile) for split, each in judged.items()}
    every = sorted(set().union(*sizes.values()))
    known = _latencies(profile, every, root / LATENCIES, mine)
    place = {size: at for at, size in enumerate(every)}

    def outcomes(part: Stretch) -> Outcomes:
        some = slice(part.first, part.first + part.count)
        here, ms = judged[part.split], torch.from_numpy(known.ms)
        return Outcomes(
            space=profile.space, correct=here.correct[some],
            latency_ms=ms[[place[size] for size in sizes[part.split][some]]], language=here.language[some],
            tokens=here.tokens[some, :, : len(profile.space.geometry.positions)],
        )  # fmt: skip

    test = judged[parts.test.split]
    size = _middle(sizes[parts.test.split])
    return Tables(
        train=outcomes(parts.train),
        validation=outcomes(parts.validation),
        test=outcomes(parts.test),
        kinds={
            kind: test.kinds == at for at, kind in enumerate(task.kinds) if bool((test.kinds == at).any())
        },
        size=size,
        latency=latencies(profile, [size]),
    )  # fmt: skip


def dtype_of(profile: Profile) -> torch.dtype:
    """The number format that a profile's model has: answers shall be those of the model that was timed."""
    told = profile.about.how.get(
        "dtype", "float32" if profile.about.device.get("kind") == "cpu" else "bfloat16"
    )
    found = getattr(torch, str(told), None)
    if not isinstance(found, torch.dtype):
        raise FileFormatError(f"the profile's model has a number format that is not known here: {told!r}")
    return found


def _sizes(judged: Judged, profile: Profile) -> list[Size]:
    lengths = zip(judged.text_tokens.tolist(), judged.new_tokens.tolist(), strict=True)
    if judged.vision_tokens is None:
        return [Size(*each) for each in lengths]
    images = [profile.about.images(count) for count in judged.vision_tokens.tolist()]
    return [Size(*each, images=some) for each, some in zip(lengths, images, strict=True)]


def _middle(sizes: list[Size]) -> Size:
    middle, images = statistics.median_low, [size.images for size in sizes if size.images is not None]
    return Size(
        middle([size.text_tokens for size in sizes]), middle([size.new_tokens for size in sizes]),
        middle(images) if images else None,
    )  # fmt: skip


def _latencies(profile: Profile, sizes: list[Size], path: Path, mine: DistributedContext) -> Latencies:
    """Kept in a file, too: a fit may differ in its last bits from one process to the next, and what was
    learnt from must stay the same."""
    told = [size[: 2 + (size.images is not None)] for size in sizes]
    text = json.dumps([profile.about.to_dict(), [visit.to_dict() for visit in profile.visits], told])
    of = hashlib.sha256(text.encode()).hexdigest()
    if mine.rank == 0 and (not path.is_file() or _read(path)[0] != of):
        made = latencies(profile, sizes)
        arrays = {"ms": torch.from_numpy(made.ms), "measured": torch.from_numpy(made.measured)}
        save_tensors(path, arrays, _MARK | {"of": of, "load": repr(made.load)})
    mine.barrier()
    return _read(path)[1]


def _read(path: Path) -> tuple[str, Latencies]:
    """What latencies are of, and these."""
    metadata, arrays = load_tensors(path, _MARK, "table of latencies")
    try:
        found = Latencies(
            ms=arrays["ms"].numpy(), measured=arrays["measured"].numpy(), load=float(metadata["load"])
        )
        return metadata["of"], found
    except (KeyError, ValueError) as error:
        raise FileFormatError(f"{path} holds no latencies that can be read: {error}; remove it") from error
