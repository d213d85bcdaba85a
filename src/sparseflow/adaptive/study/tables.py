"""From a Grid-VQA model and a profile to tables of outcomes: what is right, and what it takes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseflow.adaptive.environment import Outcomes
from sparseflow.adaptive.grid_vqa.dataset import Data
from sparseflow.adaptive.grid_vqa.evaluate import Judged
from sparseflow.adaptive.grid_vqa.images import Split
from sparseflow.adaptive.grid_vqa.settings import KINDS
from sparseflow.adaptive.profile import Profile, model_id
from sparseflow.adaptive.study.answers import answers
from sparseflow.adaptive.study.latencies import Latencies, Size, latencies
from sparseflow.core.training.ranks import Ranks
from sparseflow.core.weights import read_weights, write_weights
from sparseflow.errors import FileFormatError, InputError

Progress = Callable[[str, float], None]

FOLDER, LATENCIES = "outcomes", "latencies.safetensors"

_MARK = {"sparseflow": "adaptive-latencies", "version": "1"}


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How many samples there are to learn from, to validate with, and to be judged on.

    Raises:
        InputError: One is below 1.
    """

    train: int = 2048
    validation: int = 1024
    test: int = 2048

    def __post_init__(self) -> None:
        for name, count in vars(self).items():
            if type(count) is not int or count < 1:
                raise InputError(f"`{name}` (={count!r}) must be a whole number of samples, at least 1")


@dataclass(frozen=True, kw_only=True, eq=False)
class Tables:
    """Outcomes to learn from, to validate with, and to be judged on; and what they are of.

    Attributes:
        train: From the first samples of the validation split; see `answers`.
        validation: From those after them.
        test: From the test split.
        kinds: Of questions, of the test: name -> which samples, [samples] bool.
        size: Text and new tokens of the middle request of the test.
        latency: What requests of that size take.
    """

    train: Outcomes
    validation: Outcomes
    test: Outcomes
    kinds: Mapping[str, Tensor]
    size: Size
    latency: Latencies


def tables(
    model: Any,
    data: Data,
    profile: Profile,
    folder: Path | str,
    *,
    counts: Counts,
    mine: Ranks,
    progress: Progress | None = None,
) -> Tables:
    """Make tables, or go on where an earlier call in the same folder was stopped.

    Args:
        model: A Grid-VQA model, on the device of `data`; of the profile's kind and number format.
        data: The task.
        profile: Of its plans; it may be from another device: that is where latencies are of.
        folder: Keeps what was found, in `outcomes/`.
        counts: Of samples.
        mine: This process among all that share the folder.
        progress: Called with (what was done, fraction done).

    Raises:
        InputError: The profile is of another model or has too little, or the folder holds answers of another
            model or task.
        FileFormatError: A file of the folder is damaged.
    """
    mine_id = model_id(model)
    if profile.about.model_id != mine_id:
        raise InputError(
            f"this profile is of another model (id {profile.about.model_id}; yours is {mine_id}): profile "
            "yours with `sparseflow adaptive profile`"
        )
    root = Path(folder) / FOLDER
    wanted: dict[Split, int] = {"val": counts.train + counts.validation, "test": counts.test}
    judged = answers(model, data, profile.space, root, wanted, mine=mine, progress=progress)
    sizes = sorted({size for each in judged.values() for size in _sizes(each)})
    known = _latencies(profile, sizes, root / LATENCIES, mine)
    place = {size: at for at, size in enumerate(sizes)}
    found = {
        split: _outcomes(each, torch.from_numpy(known.ms), place, profile) for split, each in judged.items()
    }
    val, test = found["val"], judged["test"]
    middle = tuple(int(each.median()) for each in (test.text_tokens, test.new_tokens))
    size = (middle[0], middle[1])
    return Tables(
        train=val.take(torch.arange(counts.train)),
        validation=val.take(torch.arange(counts.train, len(val))),
        test=found["test"],
        kinds={
            kind: test.kinds == at for at, kind in enumerate(KINDS) if bool((test.kinds == at).any())
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


def _sizes(judged: Judged) -> list[Size]:
    return list(zip(judged.text_tokens.tolist(), judged.new_tokens.tolist(), strict=True))


def _outcomes(judged: Judged, ms: Tensor, place: Mapping[Size, int], profile: Profile) -> Outcomes:
    positions = len(profile.space.geometry.positions)
    return Outcomes(
        space=profile.space, correct=judged.correct,
        latency_ms=ms[[place[size] for size in _sizes(judged)]], language=judged.language,
        tokens=judged.tokens[:, :, :positions],
    )  # fmt: skip


def _latencies(profile: Profile, sizes: list[Size], path: Path, mine: Ranks) -> Latencies:
    """Kept in a file, too: a fit may differ in its last bits from one process to the next, and what was
    learnt from must stay the same."""
    text = json.dumps([profile.about.to_dict(), [visit.to_dict() for visit in profile.visits], sizes])
    of = hashlib.sha256(text.encode()).hexdigest()
    if mine.rank == 0 and (not path.is_file() or _read(path)[0] != of):
        made = latencies(profile, sizes)
        arrays = {"ms": torch.from_numpy(made.ms), "measured": torch.from_numpy(made.measured)}
        write_weights(path, arrays, _MARK | {"of": of, "load": repr(made.load)})
    mine.wait()
    return _read(path)[1]


def _read(path: Path) -> tuple[str, Latencies]:
    """What latencies are of, and these."""
    metadata, arrays = read_weights(path, _MARK, "table of latencies")
    try:
        found = Latencies(
            ms=arrays["ms"].numpy(), measured=arrays["measured"].numpy(), load=float(metadata["load"])
        )
        return metadata["of"], found
    except (KeyError, ValueError) as error:
        raise FileFormatError(f"{path} holds no latencies that can be read: {error}; remove it") from error
