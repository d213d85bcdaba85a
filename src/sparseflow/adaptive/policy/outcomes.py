"""Tables of outcomes: score and measured latencies of every plan on every sample."""

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
_BUDGET_HEADROOM = 1.1
"""Largest budget, relative to the most expensive plan; every plan fits it."""


class Environment(Protocol):
    """Requests on which plans can be tried.

    Attributes:
        space: The plans.
        width: Size of language features and latency tokens.
    """

    @property
    def space(self) -> PlanSpace: ...

    @property
    def width(self) -> int: ...

    def __len__(self) -> int:
        """Number of requests."""
        ...

    def get_language(self, samples: Tensor) -> Tensor:
        """Language features: [n] int64 -> [n, width] float32."""
        ...

    def get_latency_tokens(self, samples: Tensor, tiers: Tensor, positions: Tensor) -> Tensor:
        """Latency tokens for samples, tier and position indices, each [n] int64 -> [n, width] float32."""
        ...

    def run(self, samples: Tensor, plans: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Run plans on requests.

        Args:
            samples: [n] int64.
            plans: Plan numbers, [n] int64.
            uniform: Uniform numbers in [0, 1) that select the latency repeat, [n].

        Returns:
            Scores in [0, 1] and latencies in milliseconds, each [n] float32.
        """
        ...

    def budget_range_ms(self) -> tuple[float, float]:
        """Range of relevant budgets, up to slightly above the latency of the largest plan."""
        ...

    def identity(self) -> dict[str, str | int]:
        """Data that identifies the environment in a checkpoint."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class OutcomeTable:
    """Outcome of every plan for every request of one data split.

    Attributes:
        space: The plans.
        correct: Score of each answer in [0, 1], [samples, plans] float32.
        latency_ms: Measured latencies, [samples, plans, repeats] float32.
        language: Language features, [samples, d].
        tokens: Latency tokens, [samples, tiers, positions, d], floating.
        images: Image number of each sample, [samples] int64; samples of one image stay together in splits and
            intervals. Default: one image per sample.

    Raises:
        InputError: Shapes do not match each other or the plans, or a value is not finite or out of range.
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
        expected_shapes = {
            "correct": (count, len(self.space)),
            "latency_ms": (count, len(self.space), max(1, self.latency_ms.shape[-1])),
            "language": (count, self.width),
            "tokens": (count, len(self.space.tiers), len(geometry.positions), self.width),
            "images": (count,),
        }
        for name, shape in expected_shapes.items():
            actual_shape = tuple(getattr(self, name).shape)
            if actual_shape != shape:
                raise InputError(f"`{name}` has shape {actual_shape}; expected {shape}")
        if not count:
            raise InputError("a table of outcomes needs at least one sample")
        if not bool(((self.correct >= 0) & (self.correct <= 1)).all()):
            raise InputError("`correct` must be in [0, 1]")
        if not bool((self.latency_ms.isfinite() & (self.latency_ms > 0)).all()):
            raise InputError("`latency_ms` must be finite and above 0")
        if not all(bool(features.isfinite().all()) for features in (self.language, self.tokens)):
            raise InputError("`language` and `tokens` must be finite")

    def __len__(self) -> int:
        return len(self.correct)

    @property
    def width(self) -> int:
        """Size of language features and latency tokens."""
        return self.language.shape[-1]

    @property
    def groups(self) -> list[int]:
        """Image of each sample."""
        assert self.images is not None
        return self.images.tolist()

    def get_language(self, samples: Tensor) -> Tensor:
        """Language features: [n] int64 -> [n, width] float32."""
        return self.language[samples].float()

    def get_latency_tokens(self, samples: Tensor, tiers: Tensor, positions: Tensor) -> Tensor:
        """Latency tokens for samples, tier and position indices, each [n] int64 -> [n, width] float32."""
        return self.tokens[samples, tiers, positions].float()

    def run(self, samples: Tensor, plans: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Run plans on requests, with a random measured latency; see `Environment.run`."""
        repeats = self.latency_ms.shape[2]
        # A float32 just below 1 can round up to the count.
        repeat = (uniform * repeats).long().clamp_max(repeats - 1)
        return self.correct[samples, plans], self.latency_ms[samples, plans, repeat]

    def budget_range_ms(self) -> tuple[float, float]:
        """Range of relevant budgets, from the 99 % latency quantiles of the plans."""
        costs = self.latency_quantiles_ms(_QUANTILE)
        return float(costs.min()), float(costs.max()) * _BUDGET_HEADROOM

    def latency_quantiles_ms(self, quantile: float) -> Tensor:
        """Latency quantile of each plan over all samples and repeats, [plans].

        Raises:
            InputError: The quantile is not in [0, 1].
        """
        if not 0.0 <= quantile <= 1.0:
            raise InputError(f"`quantile` (={quantile}) must be from 0 to 1")
        latencies = self.latency_ms.transpose(1, 2).flatten(0, 1).numpy()
        return torch.from_numpy(np.quantile(latencies, quantile, axis=0, method="higher").astype(np.float32))

    def identity(self) -> dict[str, str | int]:
        """Data that identifies the table in a checkpoint."""
        digest = hashlib.sha256()
        for tensor in (self.correct, self.latency_ms, self.language.float(), self.tokens.float()):
            digest.update(tensor.contiguous().numpy().tobytes())
        return {"samples": len(self), "plans": len(self.space), "digest": digest.hexdigest()[:16]}

    def select(self, samples: Tensor) -> OutcomeTable:
        """Table of a subset of the samples."""
        assert self.images is not None
        return OutcomeTable(
            space=self.space, correct=self.correct[samples], latency_ms=self.latency_ms[samples],
            language=self.language[samples], tokens=self.tokens[samples], images=self.images[samples],
        )  # fmt: skip

    def split(self, *shares: float, seed: int = 0) -> tuple[OutcomeTable, ...]:
        """Split into tables that share no image.

        Args:
            shares: Fraction of the images per part; they sum to 1.
            seed: Random seed.

        Raises:
            InputError: The fractions do not sum to 1, or a part would be empty.
        """
        if not shares or min(shares) <= 0.0 or not math.isclose(sum(shares), 1.0):
            raise InputError(f"`shares` (={shares}) must be above 0 and sum to 1")
        assert self.images is not None
        _, image_index = self.images.unique(return_inverse=True)
        count = int(image_index.max()) + 1
        image_rank = torch.from_numpy(np.random.default_rng(seed).permutation(count))[image_index]
        ends = [round(count * sum(shares[: part + 1])) for part in range(len(shares))]
        starts = [0, *ends[:-1]]
        if any(start >= end for start, end in zip(starts, ends, strict=True)):
            raise InputError(f"{count} images are too few for parts of {shares}; each needs at least one")
        return tuple(
            self.select(((image_rank >= start) & (image_rank < end)).nonzero()[:, 0])
            for start, end in zip(starts, ends, strict=True)
        )

    def save(self, path: Path | str) -> None:
        """Write the table; replaces the file.

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
        """Read a table.

        Raises:
            InputError: The file is missing.
            FileFormatError: The file is damaged or has another format.
        """
        metadata, arrays = load_tensors(path, _MARK, "table of outcomes")
        try:
            return cls(space=PlanSpace.from_dict(json.loads(metadata["space"])), **arrays)
        except (KeyError, TypeError, ValueError) as error:
            raise FileFormatError(f"{path} does not contain outcomes: {error}") from error


def draw_budgets(budget_range_ms: tuple[float, float], uniform: Tensor) -> Tensor:
    """Map uniform numbers to log-uniform budgets.

    Args:
        span_ms: Smallest and largest budget.
        uniform: Numbers in [0, 1), of any shape.

    Returns:
        Milliseconds, of the same shape.

    Raises:
        InputError: The range is empty or not positive.
    """
    low, high = budget_range_ms
    if not 0.0 < low <= high < math.inf:
        raise InputError(f"budgets from {low} to {high} ms must be above 0, finite and ordered")
    return low * (high / low) ** uniform


def budget_grid(budget_range_ms: tuple[float, float], count: int) -> Tensor:
    """Budgets at equal ratios, the midpoints of equal parts of `draw_budgets`, [count]."""
    if count < 1:
        raise InputError(f"`count` (={count}) must be at least 1")
    return draw_budgets(budget_range_ms, (torch.arange(count) + 0.5) / count)


Costs = Callable[[Environment, Tensor], Tensor]
"""Latency bound in milliseconds of each plan: (environment, samples [n] int64) -> [n, plans]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantileLatencies:
    """Latency bound of a plan as a quantile of its measured latencies, the same for all samples.

    Attributes:
        plans_ms: [plans].
    """

    plans_ms: Tensor

    @classmethod
    def from_outcomes(cls, outcomes: OutcomeTable, quantile: float = 0.99) -> QuantileLatencies:
        """Compute quantiles over all samples and repeats of a table."""
        return cls(plans_ms=outcomes.latency_quantiles_ms(quantile))

    def __call__(self, environment: Environment, samples: Tensor) -> Tensor:
        return self.plans_ms.expand(len(samples), -1)


def find_feasible(costs_ms: Tensor, budget_ms: Tensor) -> Tensor:
    """Plans that fit a budget.

    Args:
        costs_ms: Latency bounds, [n, plans].
        budget_ms: Budgets, [n].

    Returns:
        [n, plans] bool; if no plan fits, the cheapest is included so that one can be chosen.
    """
    fits = costs_ms <= budget_ms[:, None]
    cheapest = costs_ms == costs_ms.min(1, keepdim=True).values
    return fits | (cheapest & ~fits.any(1, keepdim=True))
