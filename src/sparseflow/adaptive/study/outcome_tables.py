"""From a task and a profile to tables of outcomes: what is right, and what it takes."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseflow.adaptive.plan.space import PlanSpace
from sparseflow.adaptive.policy.outcomes import OutcomeTable
from sparseflow.adaptive.profile import PlanProfile, model_id, weights_id
from sparseflow.adaptive.questions.task import (
    PlanOutcomes,
    Progress,
    SampleCounts,
    SampleRange,
    Split,
    StudyTask,
)
from sparseflow.adaptive.study.latencies import LatencySamples, RequestSize, latencies
from sparseflow.core.artifact import load_tensors, save_tensors
from sparseflow.core.training.distributed import DistributedContext
from sparseflow.errors import FileFormatError, InputError

_ANSWERS_MARK = {"sparseflow": "adaptive-answers", "version": "1"}
_STORED = {
    "correct": torch.uint8, "kinds": torch.uint8, "text_tokens": torch.int32, "new_tokens": torch.int32,
    "vision_tokens": torch.int32,
}  # fmt: skip
"""Of what is whole numbers, as files keep it; the rest is float32."""


def answers(
    task: StudyTask,
    space: PlanSpace,
    folder: Path,
    counts: Mapping[Split, int],
    *,
    mine: DistributedContext,
    progress: Progress | None = None,
) -> dict[Split, PlanOutcomes]:
    """The first samples of splits under every plan: from files, and what is missing there from the model.

    Args:
        task: Who is asked, and what.
        space: The plans.
        folder: Where chunks are; made when absent.
        counts: How many samples of each split.
        mine: This process among all that share the folder.
        progress: Called with (what was done, fraction done).

    Raises:
        InputError: A count is not positive, the model cannot run a plan, or the folder holds chunks of
            another model, task or plans.
        FileFormatError: A chunk is damaged.
    """
    if min(counts.values(), default=0) < 1:
        raise InputError(f"`counts` (={dict(counts)}) must be at least 1 sample of each split")
    folder.mkdir(parents=True, exist_ok=True)
    told, size = _told(task, space), task.chunk
    chunks: list[tuple[Split, int, int]] = [
        (split, first, min(size, count - first))
        for split, count in counts.items()
        for first in range(0, count, size)
    ]
    missing: list[tuple[Split, int, int]] = []
    for split, first, count in chunks:
        path = _path(folder, split, first)
        if not path.is_file() or len(_read_chunk(path, told, space).kinds) < count:
            missing.append((split, first, count))
    # Before anybody writes: all must share out the same list.
    mine.barrier()
    for number, (split, first, count) in enumerate(missing):
        if number % mine.world_size != mine.rank:
            continue
        tell = progress if mine.rank == 0 else None
        done = len(chunks) - len(missing) + number
        found = task.outcomes(
            space, split=split, first=first, count=count, progress=_within(tell, done, len(chunks))
        )
        _write(_path(folder, split, first), found, told)
        if tell is not None:
            tell(f"plans tried on {first + len(found.kinds)} {split} samples", (done + 1) / len(chunks))
    mine.barrier()
    return {
        split: _joined(
            [_read_chunk(_path(folder, split, first), told, space) for first in range(0, count, size)], count
        )
        for split, count in counts.items()
    }


def _told(task: StudyTask, space: PlanSpace) -> dict[str, Any]:
    """What answers depend on."""
    return {
        "weights": weights_id(task.model),
        "dtype": str(next(task.model.parameters()).dtype).removeprefix("torch."),
        "task": dict(task.identity()),
        "plans": space.to_dict(),
    }


def _within(progress: Progress | None, done: int, of: int) -> Progress | None:
    if progress is None:
        return None
    return lambda what, share: progress(what, (done + share) / of)


def _path(folder: Path, split: Split, first: int) -> Path:
    return folder / f"{split}-{first:06d}.safetensors"


def _write(path: Path, found: PlanOutcomes, told: Mapping[str, Any]) -> None:
    arrays = {name: each.to(_STORED.get(name, torch.float32)) for name, each in _arrays(found).items()}
    save_tensors(path, arrays, _ANSWERS_MARK | {"of": json.dumps(told, sort_keys=True)})


def _read_chunk(path: Path, told: Mapping[str, Any], space: PlanSpace) -> PlanOutcomes:
    metadata, arrays = load_tensors(path, _ANSWERS_MARK, "chunk of answers")
    try:
        there = json.loads(metadata["of"])
        differ = sorted(name for name in told if there.get(name) != told[name])
        found = PlanOutcomes(
            plans=space.plans,
            **{name: each.long() if name in _STORED else each for name, each in arrays.items()},
        )
        if not differ and found.correct.shape[1:] != (len(space),):
            raise ValueError(f"answers of {list(found.correct.shape)}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileFormatError(f"{path} holds no answers that can be read: {error}; remove it") from error
    if differ:
        raise InputError(
            f"{path} is of other {', '.join(differ)}; name another folder, or remove {path.parent}"
        )
    return found


def _joined(parts: list[PlanOutcomes], count: int) -> PlanOutcomes:
    whole = [_arrays(part) for part in parts]
    arrays = {name: torch.cat([each[name] for each in whole])[:count] for name in whole[0]}
    return PlanOutcomes(plans=parts[0].plans, **arrays | {"correct": arrays["correct"].float()})


def _arrays(judged: PlanOutcomes) -> dict[str, Tensor]:
    """What there is of each sample, by name."""
    found = {each.name: getattr(judged, each.name) for each in fields(judged) if each.name != "plans"}
    return {name: each for name, each in found.items() if each is not None}


FOLDER, LATENCIES = "outcomes", "latencies.safetensors"

_LATENCIES_MARK = {"sparseflow": "adaptive-latencies", "version": "1"}


@dataclass(frozen=True, kw_only=True, eq=False)
class StudyTables:
    """Outcomes to learn from, to validate with, and to be judged on; and what they are of.

    Attributes:
        train: As `Parts`, as the next two.
        validation: Shares no sample with the others.
        test: Shares no sample with the others.
        kinds: Of questions, of the test: name -> which samples, [samples] bool.
        size: Of the middle request of the test.
        latency: What requests of that size take.
    """

    train: OutcomeTable
    validation: OutcomeTable
    test: OutcomeTable
    kinds: Mapping[str, Tensor]
    size: RequestSize
    latency: LatencySamples


def tables(
    task: StudyTask,
    profile: PlanProfile,
    folder: Path | str,
    *,
    counts: SampleCounts,
    mine: DistributedContext,
    progress: Progress | None = None,
) -> StudyTables:
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
    latencies(profile, [RequestSize(1, 1, images=images)])
    judged = answers(task, profile.space, root, parts.counts(), mine=mine, progress=progress)
    sizes = {split: _sizes(each, profile) for split, each in judged.items()}
    every = sorted(set().union(*sizes.values()))
    known = _latencies(profile, every, root / LATENCIES, mine)
    place = {size: at for at, size in enumerate(every)}

    def outcomes(part: SampleRange) -> OutcomeTable:
        some = slice(part.first, part.first + part.count)
        here, ms = judged[part.split], torch.from_numpy(known.ms)
        return OutcomeTable(
            space=profile.space, correct=here.correct[some],
            latency_ms=ms[[place[size] for size in sizes[part.split][some]]], language=here.language[some],
            tokens=here.tokens[some, :, : len(profile.space.geometry.positions)],
        )  # fmt: skip

    test = judged[parts.test.split]
    size = _middle(sizes[parts.test.split])
    return StudyTables(
        train=outcomes(parts.train),
        validation=outcomes(parts.validation),
        test=outcomes(parts.test),
        kinds={
            kind: test.kinds == at for at, kind in enumerate(task.kinds) if bool((test.kinds == at).any())
        },
        size=size,
        latency=latencies(profile, [size]),
    )  # fmt: skip


def dtype_of(profile: PlanProfile) -> torch.dtype:
    """The number format that a profile's model has: answers shall be those of the model that was timed."""
    told = profile.about.how.get(
        "dtype", "float32" if profile.about.device.get("kind") == "cpu" else "bfloat16"
    )
    found = getattr(torch, str(told), None)
    if not isinstance(found, torch.dtype):
        raise FileFormatError(f"the profile's model has a number format that is not known here: {told!r}")
    return found


def _sizes(judged: PlanOutcomes, profile: PlanProfile) -> list[RequestSize]:
    lengths = zip(judged.text_tokens.tolist(), judged.new_tokens.tolist(), strict=True)
    if judged.vision_tokens is None:
        return [RequestSize(*each) for each in lengths]
    images = [profile.about.images(count) for count in judged.vision_tokens.tolist()]
    return [RequestSize(*each, images=some) for each, some in zip(lengths, images, strict=True)]


def _middle(sizes: list[RequestSize]) -> RequestSize:
    middle, images = statistics.median_low, [size.images for size in sizes if size.images is not None]
    return RequestSize(
        middle([size.text_tokens for size in sizes]), middle([size.new_tokens for size in sizes]),
        middle(images) if images else None,
    )  # fmt: skip


def _latencies(
    profile: PlanProfile, sizes: list[RequestSize], path: Path, mine: DistributedContext
) -> LatencySamples:
    """Kept in a file, too: a fit may differ in its last bits from one process to the next, and what was
    learnt from must stay the same."""
    told = [size[: 2 + (size.images is not None)] for size in sizes]
    text = json.dumps([profile.about.to_dict(), [visit.to_dict() for visit in profile.visits], told])
    of = hashlib.sha256(text.encode()).hexdigest()
    if mine.rank == 0 and (not path.is_file() or _read_latencies(path)[0] != of):
        made = latencies(profile, sizes)
        arrays = {"ms": torch.from_numpy(made.ms), "measured": torch.from_numpy(made.measured)}
        save_tensors(path, arrays, _LATENCIES_MARK | {"of": of, "load": repr(made.load)})
    mine.barrier()
    return _read_latencies(path)[1]


def _read_latencies(path: Path) -> tuple[str, LatencySamples]:
    """What latencies are of, and these."""
    metadata, arrays = load_tensors(path, _LATENCIES_MARK, "table of latencies")
    try:
        found = LatencySamples(
            ms=arrays["ms"].numpy(), measured=arrays["measured"].numpy(), load=float(metadata["load"])
        )
        return metadata["of"], found
    except (KeyError, ValueError) as error:
        raise FileFormatError(f"{path} holds no latencies that can be read: {error}; remove it") from error
