"""Plans: how much of a model one request runs.

A plan has

- a *tier*: the number of vision tokens per image;
- an *insertion position* p (1 to 5): the first p blocks always run in full, and stage 2 reads the last prompt
  token after them;
- a *top-k*: experts per token in the blocks from p on;
- *blocks*: the blocks that run. The first p always do, and block 0 must, because caches report their length
  by it.

In a model of 16 blocks, position p keeps between 11 + p and 16 of them: 5 + 4 + 3 + 2 + 1 block counts, times
five values of top-k, times three tiers: 225 plans. Models of other depths skip the same fraction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from typing import Any, Literal, get_args

from sparseflow.core.checks import check_at_least, check_between
from sparseflow.errors import FileFormatError, InputError, PlanError

Tier = Literal["low", "medium", "high"]
TIERS: tuple[Tier, ...] = get_args(Tier)
"""From fewest to most vision tokens."""
POSITIONS = (1, 2, 3, 4, 5)
TOP_KS = 5
"""Number of top-k values: the model's own and up to four smaller ones."""
OPTIONS = 5
"""Maximum number of block counts per insertion position."""
MAX_DEPTH = 10_000
"""Maximum number of decoder blocks."""
_DEPTH = 16
"""Depth at which consecutive block counts differ by one block."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much of a model one request runs; constant for the life of the request.

    Attributes:
        tier: Vision tokens per image; None without images.
        insertion_position: Number of leading blocks that always run with the model's own top-k; 1 to 5.
        top_k: Experts per token in the blocks after those.
        blocks: Indices of the blocks that run, ascending.

    Raises:
        PlanError: No model could run it.
    """

    tier: Tier | None
    insertion_position: int
    top_k: int
    blocks: tuple[int, ...]

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "blocks", tuple(self.blocks))
        except TypeError:
            raise PlanError(f"`blocks` (={self.blocks!r}) must be a sequence of block indices") from None
        if self.tier is not None and self.tier not in TIERS:
            raise PlanError(
                f"`tier` (={self.tier!r}) must be one of {', '.join(TIERS)}, or None without images"
            )
        if type(self.insertion_position) is not int or self.insertion_position not in POSITIONS:
            raise PlanError(
                f"`insertion_position` (={self.insertion_position!r}) must be an integer from 1 to 5"
            )
        if type(self.top_k) is not int or self.top_k < 1:
            raise PlanError(f"`top_k` (={self.top_k!r}) must be an integer of at least 1")
        if any(type(block) is not int or block < 0 for block in self.blocks) or (
            list(self.blocks) != sorted(set(self.blocks))
        ):
            raise PlanError(
                f"`blocks` (={self.blocks!r}) must be integers of at least 0, ascending and unique"
            )
        missing = sorted(set(range(self.insertion_position)) - set(self.blocks))
        if missing:
            reason = (
                "caches report their length by block 0" if 0 in missing else "they are before the insertion"
            )
            raise PlanError(
                f"blocks {missing} cannot be skipped: {reason}; keep blocks 0 to "
                f"{self.insertion_position - 1}"
            )

    @property
    def id(self) -> str:
        """Stable short name, such as `high-p1-k8-b0.1.2.5`."""
        blocks = ".".join(map(str, self.blocks))
        return f"{self.tier or 'text'}-p{self.insertion_position}-k{self.top_k}-b{blocks}"

    def runs(self, block: int) -> bool:
        """Whether a block runs."""
        return block in self.blocks

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON data."""
        return {**asdict(self), "blocks": list(self.blocks)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Plan:
        """Create a plan from `to_dict` data.

        Raises:
            FileFormatError: The data is not a plan.
        """
        try:
            return cls(**{field.name: record[field.name] for field in fields(cls)})
        except (KeyError, TypeError, PlanError) as error:
            raise FileFormatError(f"invalid plan {record!r}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class ModelGeometry:
    """Properties of a model that determine its plans.

    Attributes:
        depth: Number of decoder blocks, 2 to `MAX_DEPTH`.
        top_k: Experts per token in the unmodified model, at least 1.
        tiers: Available tiers, ascending; empty if the model takes no images.
    """

    depth: int
    top_k: int
    tiers: tuple[Tier, ...] = TIERS

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiers", tuple(self.tiers))
        # Block 0 cannot be skipped.
        check_at_least(2, depth=self.depth)
        check_at_least(1, top_k=self.top_k)
        # Plan spaces list the blocks; a damaged file must not exhaust the memory.
        check_between(2, MAX_DEPTH, depth=self.depth)
        if list(self.tiers) != [tier for tier in TIERS if tier in self.tiers]:
            raise InputError(f"`tiers` (={self.tiers}) must be a subset of {', '.join(TIERS)}, in this order")

    @property
    def positions(self) -> tuple[int, ...]:
        """Insertion positions that have a block after them."""
        return tuple(p for p in POSITIONS if p < self.depth)

    @property
    def top_ks(self) -> tuple[int, ...]:
        """Values of top-k, ascending; the last is the model's own."""
        return tuple(range(max(1, self.top_k - TOP_KS + 1), self.top_k + 1))

    def block_counts(self, position: int) -> tuple[int, ...]:
        """Block counts at an insertion position, ascending; the last is the depth.

        Raises:
            PlanError: The position does not exist.
        """
        if position not in self.positions:
            raise PlanError(f"`insertion_position` (={position}) must be one of {self.positions}")
        steps = range(POSITIONS[-1] - position, -1, -1)
        max_skipped = self.depth - position
        skipped = dict.fromkeys(min(round(step * self.depth / _DEPTH), max_skipped) for step in steps)
        return tuple(self.depth - count for count in skipped)

    def check(self, plan: Plan) -> None:
        """Check that the model can run a plan.

        Raises:
            PlanError: It cannot; the message names the parameter out of range.
        """
        # None is a request without images, which every model accepts.
        if plan.tier is not None and plan.tier not in self.tiers:
            available = f"it has {', '.join(self.tiers)}" if self.tiers else "it takes no images; use None"
            raise PlanError(f"this model has no tier {plan.tier!r}; {available}")
        if plan.insertion_position not in self.positions:
            raise PlanError(
                f"`insertion_position` (={plan.insertion_position}) must be one of {self.positions}"
            )
        if plan.top_k > self.top_k:
            raise PlanError(f"`top_k` (={plan.top_k}) must be at most {self.top_k}")
        out_of_range = [block for block in plan.blocks if block >= self.depth]
        if out_of_range:
            raise PlanError(f"blocks {out_of_range} do not exist; the model has blocks 0 to {self.depth - 1}")

    def full_plan(self, *, images: bool = True) -> Plan:
        """Plan that leaves the model unchanged.

        Args:
            images: Whether the request has images.
        """
        tier = self.tiers[-1] if images and self.tiers else None
        return Plan(tier=tier, insertion_position=1, top_k=self.top_k, blocks=tuple(range(self.depth)))

    def expert_calls(self, plan: Plan) -> int:
        """Experts that one token visits over all blocks that run."""
        full_blocks = plan.insertion_position
        return full_blocks * self.top_k + (len(plan.blocks) - full_blocks) * plan.top_k

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON data."""
        return {**asdict(self), "tiers": list(self.tiers)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> ModelGeometry:
        """Create a geometry from `to_dict` data.

        Raises:
            FileFormatError: The data is not a geometry.
        """
        try:
            return cls(**{field.name: record[field.name] for field in fields(cls)})
        except (KeyError, TypeError, InputError) as error:
            raise FileFormatError(f"invalid model geometry {record!r}: {error}") from error


@dataclass(frozen=True)
class PlanAction:
    """Indices of a plan's tier, position, top-k and block count, as the controllers choose them."""

    tier: int
    position: int
    top_k: int
    option: int


@dataclass(frozen=True, kw_only=True)
class PlanSpace:
    """All plans of a model, in a fixed order.

    Attributes:
        geometry: Geometry of the model.
        sets: (insertion position, number of blocks) -> blocks that run, for every such pair; measured by
            `profile.importance`.
    """

    geometry: ModelGeometry
    sets: Mapping[tuple[int, int], tuple[int, ...]]
    _actions: Mapping[Plan, PlanAction] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for position in self.geometry.positions:
            for total in self.geometry.block_counts(position):
                blocks = self.sets.get((position, total))
                if blocks is None or len(blocks) != total:
                    raise InputError(
                        f"position {position} needs a set of {total} blocks, not {blocks}; measure "
                        "the block importance again"
                    )
        actions: dict[Plan, PlanAction] = {}
        for action in self._iterate_actions():
            actions.setdefault(self.plan(action), action)
        for plan in actions:
            self.geometry.check(plan)
        object.__setattr__(self, "_actions", actions)

    @classmethod
    def from_importance(cls, geometry: ModelGeometry, importance: Sequence[float] | None = None) -> PlanSpace:
        """Build the space that keeps the individually most important blocks.

        Args:
            geometry: Geometry of the model.
            importance: Accuracy lost without each block; ties keep the earlier block. The default is a guess:
                every second block of the later half is skipped first, those near three quarters of the depth
                before others, and the first and last block are kept. Deep blocks except the last are the
                redundant ones: Men et al. 2024, "ShortGPT" (arXiv:2403.03853); Gromov et al. 2024, "The
                Unreasonable Ineffectiveness of the Deeper Layers" (arXiv:2403.17887).

        Raises:
            InputError: `importance` is not one finite number per block.
        """
        if importance is None:
            importance = _guess_importance(geometry.depth)
        if len(importance) != geometry.depth or not all(abs(value) < float("inf") for value in importance):
            raise InputError(
                f"`importance` (={list(importance)}) must be {geometry.depth} finite numbers, one per block"
            )
        sets = {}
        for position in geometry.positions:
            after = sorted(range(position, geometry.depth), key=lambda block: (-importance[block], block))
            for total in geometry.block_counts(position):
                sets[position, total] = tuple(range(position)) + tuple(sorted(after[: total - position]))
        return cls(geometry=geometry, sets=sets)

    @property
    def tiers(self) -> tuple[Tier | None, ...]:
        """Tiers of the model; only None if it takes no images."""
        return self.geometry.tiers or (None,)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Each plan once, smallest tier first."""
        return tuple(self._actions)

    def __len__(self) -> int:
        return len(self._actions)

    def plan(self, action: PlanAction) -> Plan:
        """Plan of an action.

        Raises:
            PlanError: An index is out of range, for example because a masked option was chosen.
        """
        geometry = self.geometry
        for name, values in (
            ("tier", self.tiers), ("position", geometry.positions), ("top_k", geometry.top_ks),
        ):  # fmt: skip
            if not 0 <= getattr(action, name) < len(values):
                raise PlanError(f"{action}: `{name}` must be below {len(values)}")
        position = geometry.positions[action.position]
        totals = geometry.block_counts(position)
        if not 0 <= action.option < len(totals):
            raise PlanError(f"{action}: position {position} has {len(totals)} block counts")
        return Plan(
            tier=self.tiers[action.tier],
            insertion_position=position,
            top_k=geometry.top_ks[action.top_k],
            blocks=self.sets[position, totals[action.option]],
        )

    def action(self, plan: Plan) -> PlanAction:
        """First action that yields a plan.

        Raises:
            PlanError: No action does.
        """
        try:
            return self._actions[plan]
        except KeyError:
            raise PlanError(f"{plan.id} is not one of the {len(self)} plans of this space") from None

    def option_mask(self) -> tuple[tuple[bool, ...], ...]:
        """For each position, which of the five block counts exist."""
        counts = [len(self.geometry.block_counts(position)) for position in self.geometry.positions]
        return tuple(tuple(index < count for index in range(OPTIONS)) for count in counts)

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON data."""
        sets = [{"position": p, "blocks": list(blocks)} for (p, _), blocks in sorted(self.sets.items())]
        return {"geometry": self.geometry.to_dict(), "sets": sets}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> PlanSpace:
        """Create a space from `to_dict` data.

        Raises:
            FileFormatError: The data is not a plan space.
        """
        try:
            sets = {(row["position"], len(row["blocks"])): tuple(row["blocks"]) for row in record["sets"]}
            return cls(geometry=ModelGeometry.from_dict(record["geometry"]), sets=sets)
        except (KeyError, TypeError, InputError) as error:
            raise FileFormatError(f"invalid plan space: {error}") from error

    def _iterate_actions(self) -> Iterator[PlanAction]:
        geometry = self.geometry
        for tier, position, top_k in product(
            range(len(self.tiers)), range(len(geometry.positions)), range(len(geometry.top_ks))
        ):
            for option in range(len(geometry.block_counts(geometry.positions[position]))):
                yield PlanAction(tier, position, top_k, option)


def _guess_importance(depth: int) -> list[float]:
    """Assumed importance of blocks: rank in the order in which they are skipped."""
    later = range(depth // 2, depth - 1)
    # Every second one of these covers the maximum number of skipped blocks, or one fewer.
    order = sorted(later, key=lambda block: ((depth - block) % 2, abs(block - 0.75 * depth), block))
    order += [*range(depth // 2 - 1, 0, -1), depth - 1, 0]
    return [float(order.index(block)) for block in range(depth)]
