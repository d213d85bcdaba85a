"""What a Grid-VQA model answers under every plan, in files: chunk by chunk, so that a kill loses one at most.

Processes that torchrun started share the chunks out. Which samples controllers learn from: not those of the
split that the model learnt from, whose answers it half knows, so that cheap plans look better than they are.
The samples of the validation split that come first are learnt from, those after them choose margins and
weights, and the test split judges.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from sparseflow.adaptive.grid_vqa.dataset import CHUNK, Data
from sparseflow.adaptive.grid_vqa.evaluate import Judged, outcomes
from sparseflow.adaptive.grid_vqa.images import Split
from sparseflow.adaptive.plan import PlanSpace
from sparseflow.adaptive.profile import weights_id
from sparseflow.core.training.ranks import Ranks
from sparseflow.core.weights import read_weights, write_weights
from sparseflow.errors import FileFormatError, InputError

Progress = Callable[[str, float], None]

_MARK = {"sparseflow": "adaptive-answers", "version": "1"}
_SMALL = ("correct", "kinds", "text_tokens", "new_tokens")
"""What fits into a byte."""


def answers(
    model: Any,
    data: Data,
    space: PlanSpace,
    folder: Path,
    counts: Mapping[Split, int],
    *,
    mine: Ranks,
    progress: Progress | None = None,
) -> dict[Split, Judged]:
    """The first samples of splits under every plan: from files, and what is missing there from the model.

    Args:
        model: The model, on the device of `data`.
        data: The task.
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
    told = _told(model, data, space)
    chunks: list[tuple[Split, int]] = [
        (split, first) for split, count in counts.items() for first in range(0, count, CHUNK)
    ]
    missing: list[tuple[Split, int]] = []
    for split, first in chunks:
        path = _path(folder, split, first)
        if not path.is_file() or len(_read(path, told, space).kinds) < _size(counts[split], first):
            missing.append((split, first))
    # Before anybody writes: all must share out the same list.
    mine.wait()
    for number, (split, first) in enumerate(missing):
        if number % mine.size != mine.rank:
            continue
        found = outcomes(model, data, space, split=split, first=first, count=_size(counts[split], first))
        _write(_path(folder, split, first), found, told)
        if progress is not None and mine.rank == 0:
            done = len(chunks) - len(missing) + number + 1
            progress(f"plans tried on {first + len(found.kinds)} {split} samples", done / len(chunks))
    mine.wait()
    return {
        split: _joined(
            [_read(_path(folder, split, first), told, space) for first in range(0, count, CHUNK)], count
        )
        for split, count in counts.items()
    }


def _told(model: Any, data: Data, space: PlanSpace) -> dict[str, Any]:
    """What answers depend on."""
    task = data.settings.model_dump(
        mode="json", include={"images": {"digits", "asked", "seed"}, "scene": True, "test_shares": True}
    )
    return {
        "weights": weights_id(model),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "task": task | {"names": list(data.bank.names), "images_in_all": len(data.bank.images)},
        "plans": space.to_dict(),
    }


def _path(folder: Path, split: Split, first: int) -> Path:
    return folder / f"{split}-{first:06d}.safetensors"


def _size(count: int, first: int) -> int:
    return min(CHUNK, count - first)


def _write(path: Path, found: Judged, told: Mapping[str, Any]) -> None:
    arrays = {
        field.name: getattr(found, field.name).to(torch.uint8 if field.name in _SMALL else torch.float32)
        for field in fields(found)
        if field.name != "plans"
    }
    write_weights(path, arrays, _MARK | {"of": json.dumps(told, sort_keys=True)})


def _read(path: Path, told: Mapping[str, Any], space: PlanSpace) -> Judged:
    metadata, arrays = read_weights(path, _MARK, "chunk of answers")
    try:
        there = json.loads(metadata["of"])
        differ = sorted(name for name in told if there.get(name) != told[name])
        found = Judged(
            plans=space.plans,
            **{name: each.long() if name in _SMALL else each for name, each in arrays.items()},
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
    arrays = {
        field.name: torch.cat([getattr(part, field.name) for part in parts])[:count]
        for field in fields(Judged)
        if field.name != "plans"
    }
    return Judged(plans=parts[0].plans, **arrays | {"correct": arrays["correct"].float()})
