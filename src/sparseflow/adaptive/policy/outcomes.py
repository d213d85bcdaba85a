"""What controllers learn from: requests, what plans make of them, and how long that takes.

A table of outcomes holds every plan's score and repeated measured latencies for every request; a live
environment runs the model instead (`live.py`). Both answer the same calls.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sparseflow.adaptive.plan.space import PlanSpace
from sparseflow.core.artifact import load_tensors, save_tensors
from sparseflow.errors import FileFormatError, InputError

_MARK = {"sparseflow": "adaptive-outcomes", "version": "1"}
_QUANTILE = 0.99
_BEYOND = 1.1
"""Budgets are drawn up to so much above the dearest plan: there, everything fits."""


class Environment(Protocol):
    """Requests that plans can be tried on.

    Attributes:
        space: The plans.
        width: Of language features and latency tokens.
    """

    @property
    def space(self) -> PlanSpace: ...

    @property
    def width(self) -> int: ...

    def __len__(self) -> int:
        """How many requests there are."""
        ...

    def language_of(self, samples: Tensor) -> Tensor:
        """Language features: [n] int64 -> [n, width] float32."""
        ...

    def tokens_of(self, samples: Tensor, tiers: Tensor, positions: Tensor) -> Tensor:
        """Latency tokens at tiers and positions, both by index: three [n] int64 -> [n, width] float32."""
        ...

    def run(self, samples: Tensor, plans: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Try plans on requests.

        Args:
            samples: [n] int64.
            plans: Numbers of plans, [n] int64.
            uniform: [n] in [0, 1), what jitter is drawn from where it is drawn.

        Returns:
            Scores from 0 to 1, and milliseconds: [n] float32 each.
        """
        ...

    def span_ms(self) -> tuple[float, float]:
        """Budgets worth asking for, from the least feasible to a little above the dearest plan."""
        ...

    def identity(self) -> dict[str, str | int]:
        """What tells it from another, as a checkpoint remembers it."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class OutcomeTable:
    """Every plan's outcome for every request of one split of the data.

    Attributes:
        space: The plans.
        correct: Score of each answer, from 0 to 1: [samples, plans] float32.
        latency_ms: Measured times: [samples, plans, repeats] float32.
        language: Language features: [samples, d].
        tokens: Latency tokens: [samples, tiers, positions, d], of any floating type.
        images: Number of each sample's image, [samples] int64; samples of one image stay together in splits
            and intervals. By default each has its own.

    Raises:
        InputError: Shapes do not fit each other or the plans, or a value is not finite or out of range.
    """

    space: PlanSpace
    correct: Tensor
    latency_ms: Tensor
    language: Tensor
    tokens: Tensor
    images: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("correct", "latency_ms"):
            object.__setattr__(self, name, torch.as_tensor(getattr(self, name)).float())
        for name in ("language", "tokens"):
            object.__setattr__(self, name, torch.as_tensor(getattr(self, name)))
        count = len(self.correct)
        images = torch.arange(count) if self.images is None else torch.as_tensor(self.images)
        object.__setattr__(self, "images", images)
        geometry = self.space.geometry
        wanted = {
            "correct": (count, len(self.space)),
            "latency_ms": (count, len(self.space), max(1, self.latency_ms.shape[-1])),
            "language": (count, self.width),
            "tokens": (count, len(self.space.tiers), len(geometry.positions), self.width),
            "images": (count,),
        }
        for name, shape in wanted.items():
            found = tuple(getattr(self, name).shape)
            if found != shape:
                raise InputError(
                    f"`{name}` has the shape {found}; {shape} fits the plans and the other arrays"
                )
        if not count:
            raise InputError("a table of outcomes needs at least one sample")
        if not bool(((self.correct >= 0) & (self.correct <= 1)).all()):
            raise InputError("`correct` must be scores from 0 to 1")
        if not bool((self.latency_ms.isfinite() & (self.latency_ms > 0)).all()):
            raise InputError("`latency_ms` must be finite and above 0; leave out what was not measured")
        if not all(bool(each.isfinite().all()) for each in (self.language, self.tokens)):
            raise InputError("`language` and `tokens` must be finite; a model that gives others is broken")

    def __len__(self) -> int:
        return len(self.correct)

    @property
    def width(self) -> int:
        """Of language features and latency tokens."""
        return self.language.shape[-1]

    @property
    def groups(self) -> list[int]:
        """The image of each sample."""
        assert self.images is not None
        return self.images.tolist()

    def language_of(self, samples: Tensor) -> Tensor:
        """As `Environment`."""
        return self.language[samples].float()

    def tokens_of(self, samples: Tensor, tiers: Tensor, positions: Tensor) -> Tensor:
        """As `Environment`."""
        return self.tokens[samples, tiers, positions].float()

    def run(self, samples: Tensor, plans: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """As `Environment`; the latency is one of those measured, drawn anew each time."""
        repeats = self.latency_ms.shape[2]
        # A number just below 1 in float32 can round up to the count itself.
        repeat = (uniform * repeats).long().clamp_max(repeats - 1)
        return self.correct[samples, plans], self.latency_ms[samples, plans, repeat]

    def span_ms(self) -> tuple[float, float]:
        """As `Environment`, by the 99 % quantiles of each plan's measured times."""
        costs = self.quantiles_ms(_QUANTILE)
        return float(costs.min()), float(costs.max()) * _BEYOND

    def quantiles_ms(self, quantile: float) -> Tensor:
        """What each plan takes at most, in this share of all samples and repeats: [plans].

        Raises:
            InputError: The quantile is not one.
        """
        if not 0.0 <= quantile <= 1.0:
            raise InputError(f"`quantile` (={quantile}) must be from 0 to 1")
        every = self.latency_ms.transpose(1, 2).flatten(0, 1).numpy()
        return torch.from_numpy(np.quantile(every, quantile, axis=0, method="higher").astype(np.float32))

    def identity(self) -> dict[str, str | int]:
        """As `Environment`."""
        digest = hashlib.sha256()
        for each in (self.correct, self.latency_ms, self.language.float(), self.tokens.float()):
            digest.update(each.contiguous().numpy().tobytes())
        return {"samples": len(self), "plans": len(self.space), "digest": digest.hexdigest()[:16]}

    def take(self, samples: Tensor) -> OutcomeTable:
        """The table of some samples."""
        assert self.images is not None
        return OutcomeTable(
            space=self.space, correct=self.correct[samples], latency_ms=self.latency_ms[samples],
            language=self.language[samples], tokens=self.tokens[samples], images=self.images[samples],
        )  # fmt: skip

    def split(self, *shares: float, seed: int = 0) -> tuple[OutcomeTable, ...]:
        """Parts that share no image.

        Args:
            shares: Of the images, for each part; they sum to 1.
            seed: What the order of images is drawn from.

        Raises:
            InputError: Shares do not sum to 1, or there are too few images for every part to have one.
        """
        if not shares or min(shares) <= 0.0 or not math.isclose(sum(shares), 1.0):
            raise InputError(f"`shares` (={shares}) must be above 0 and sum to 1")
        assert self.images is not None
        _, of = self.images.unique(return_inverse=True)
        count = int(of.max()) + 1
        place = torch.from_numpy(np.random.default_rng(seed).permutation(count))[of]
        ends = [round(count * sum(shares[: at + 1])) for at in range(len(shares))]
        begins = [0, *ends[:-1]]
        if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
            raise InputError(f"{count} images are too few for parts of {shares}; each needs at least one")
        return tuple(
            self.take(((place >= begin) & (place < end)).nonzero()[:, 0])
            for begin, end in zip(begins, ends, strict=True)
        )

    def save(self, path: Path | str) -> None:
        """Write the table in place of what is there.

        Raises:
            OSError: The file cannot be written.
        """
        assert self.images is not None
        arrays = {
            "correct": self.correct, "latency_ms": self.latency_ms, "language": self.language,
            "tokens": self.tokens, "images": self.images,
        }  # fmt: skip
        save_tensors(path, arrays, _MARK | {"space": json.dumps(self.space.to_dict())})

    @classmethod
    def load(cls, path: Path | str) -> OutcomeTable:
        """Read a table that `save` wrote.

        Raises:
            InputError: There is no such file.
            FileFormatError: It is something else, or damaged.
        """
        metadata, arrays = load_tensors(path, _MARK, "table of outcomes")
        try:
            return cls(space=PlanSpace.from_dict(json.loads(metadata["space"])), **arrays)
        except (KeyError, TypeError, ValueError) as error:
            raise FileFormatError(f"{path} holds no outcomes that can be read: {error}") from error


def draw_budgets(span_ms: tuple[float, float], uniform: Tensor) -> Tensor:
    """Budgets that are as likely in each doubling.

    Args:
        span_ms: From and to.
        uniform: Numbers of [0, 1), of any shape.

    Returns:
        Milliseconds, of the same shape.

    Raises:
        InputError: The span is none.
    """
    low, high = span_ms
    if not 0.0 < low <= high < math.inf:
        raise InputError(f"budgets from {low} to {high} ms: both ends must be above 0, finite, and in order")
    return low * (high / low) ** uniform


def budget_grid(span_ms: tuple[float, float], count: int) -> Tensor:
    """Budgets at equal ratios, the middles of equal parts of what `draw_budgets` draws: [count]."""
    if count < 1:
        raise InputError(f"`count` (={count}) must be at least 1")
    return draw_budgets(span_ms, (torch.arange(count) + 0.5) / count)


Costs = Callable[[Environment, Tensor], Tensor]
"""What each plan takes at most, in milliseconds, for samples of an environment: [n] int64 -> [n, plans]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantileLatencies:
    """A plan's cost is a quantile of its measured latency, whatever the sample.

    Attributes:
        plans_ms: [plans].
    """

    plans_ms: Tensor

    @classmethod
    def of(cls, outcomes: OutcomeTable, quantile: float = 0.99) -> QuantileLatencies:
        """Over all samples and repeats of a table."""
        return cls(plans_ms=outcomes.quantiles_ms(quantile))

    def __call__(self, environment: Environment, samples: Tensor) -> Tensor:
        return self.plans_ms.expand(len(samples), -1)


def fitting(costs_ms: Tensor, budget_ms: Tensor) -> Tensor:
    """Which plans fit a budget.

    Args:
        costs_ms: [n, plans].
        budget_ms: [n].

    Returns:
        [n, plans] bool; where none fits, the cheapest is taken to, so that there is something to choose.
    """
    fits = costs_ms <= budget_ms[:, None]
    cheapest = costs_ms == costs_ms.min(1, keepdim=True).values
    return fits | (cheapest & ~fits.any(1, keepdim=True))
