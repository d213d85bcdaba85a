"""What a model answers under every plan, in files: chunk by chunk, so that a kill loses one at most.

Processes that torchrun started share the chunks out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseflow.adaptive.plan import PlanSpace
from sparseflow.adaptive.profile import weights_id
from sparseflow.adaptive.task import Judged, Progress, Split, Task
from sparseflow.core.artifact import load_tensors, save_tensors
from sparseflow.core.training.distributed import DistributedContext
from sparseflow.errors import FileFormatError, InputError

_MARK = {"sparseflow": "adaptive-answers", "version": "1"}
_STORED = {
    "correct": torch.uint8, "kinds": torch.uint8, "text_tokens": torch.int32, "new_tokens": torch.int32,
    "vision_tokens": torch.int32,
}  # fmt: skip
"""Of what is whole numbers, as files keep it; the rest is float32."""


def answers(
    task: Task,
    space: PlanSpace,
    folder: Path,
    counts: Mapping[Split, int],
    *,
    mine: DistributedContext,
    progress: Progress | None = None,
) -> dict[Split, Judged]:
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
        if not path.is_file() or len(_read(path, told, space).kinds) < count:
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
            [_read(_path(folder, split, first), told, space) for first in range(0, count, size)], count
        )
        for split, count in counts.items()
    }


def _told(task: Task, space: PlanSpace) -> dict[str, Any]:
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


def _write(path: Path, found: Judged, told: Mapping[str, Any]) -> None:
    arrays = {name: each.to(_STORED.get(name, torch.float32)) for name, each in _arrays(found).items()}
    save_tensors(path, arrays, _MARK | {"of": json.dumps(told, sort_keys=True)})


def _read(path: Path, told: Mapping[str, Any], space: PlanSpace) -> Judged:
    metadata, arrays = load_tensors(path, _MARK, "chunk of answers")
    try:
        there = json.loads(metadata["of"])
        differ = sorted(name for name in told if there.get(name) != told[name])
        found = Judged(
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


def _joined(parts: list[Judged], count: int) -> Judged:
    whole = [_arrays(part) for part in parts]
    arrays = {name: torch.cat([each[name] for each in whole])[:count] for name in whole[0]}
    return Judged(plans=parts[0].plans, **arrays | {"correct": arrays["correct"].float()})


def _arrays(judged: Judged) -> dict[str, Tensor]:
    """What there is of each sample, by name."""
    found = {each.name: getattr(judged, each.name) for each in fields(judged) if each.name != "plans"}
    return {name: each for name, each in found.items() if each is not None}
