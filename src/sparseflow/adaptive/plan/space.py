"""Plans: how much of a model one request runs.

A plan has three knobs and a place where the last two begin to act:

- the *tier* says how many vision tokens an image becomes;
- the *insertion position* p (1 to 5) is the number of blocks that always run whole; the second controller
  looks at the token that leaves them;
- *top-k* is the number of experts a token goes to in the blocks from p on;
- *blocks* are those that run. The first p always do, and block 0 must: caches tell their length by it.

Of a model of 16 blocks, position p keeps 11 + p to 16 of them, so 5 + 4 + 3 + 2 + 1 counts, times five values
of top-k, times three tiers: 225 plans. Models of other depths skip as large a share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal, get_args

from sparseflow.errors import FileFormatError, InputError, PlanError

Tier = Literal["low", "medium", "high"]
TIERS: tuple[Tier, ...] = get_args(Tier)
"""From few vision tokens to many."""
POSITIONS = (1, 2, 3, 4, 5)
TOP_KS = 5
"""Values of top-k: that of the model, and up to four fewer."""
OPTIONS = 5
"""Most counts of blocks to choose among at one position."""
_DEPTH = 16
"""The depth at which a step from one count of blocks to the next is one block."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much of a model one request runs; it does not change while the request lives.

    Attributes:
        tier: How many vision tokens an image becomes; None where there is no image.
        insertion_position: Number of first blocks that always run, with the model's own top-k; 1 to 5.
        top_k: Experts for each token in the blocks after those.
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
            raise PlanError(f"`blocks` (={self.blocks!r}) must be the indices of those that run") from None
        if self.tier is not None and self.tier not in TIERS:
            raise PlanError(
                f"`tier` (={self.tier!r}) must be one of {', '.join(TIERS)}, or None without image"
            )
        for name in ("insertion_position", "top_k"):
            if type(getattr(self, name)) is not int:
                raise PlanError(f"`{name}` (={getattr(self, name)!r}) must be a whole number")
        if self.insertion_position not in POSITIONS:
            raise PlanError(f"`insertion_position` (={self.insertion_position}) must be one of 1 to 5")
        if self.top_k < 1:
            raise PlanError(f"`top_k` (={self.top_k}) must be at least 1")
        if any(type(block) is not int for block in self.blocks):
            raise PlanError(f"`blocks` (={self.blocks!r}) must be whole numbers")
        if list(self.blocks) != sorted(set(self.blocks)) or min(self.blocks, default=0) < 0:
            raise PlanError(f"`blocks` (={self.blocks}) must ascend from 0, each of them once")
        missing = sorted(set(range(self.insertion_position)) - set(self.blocks))
        if missing:
            why = "a cache tells its length by block 0" if 0 in missing else "they lie before the insertion"
            raise PlanError(
                f"blocks {missing} cannot be skipped: {why}; keep blocks 0 to {self.insertion_position - 1}"
            )

    @property
    def id(self) -> str:
        """A short name, as `high-p1-k8-b0.1.2.5`; the same plan has the same one, everywhere."""
        kept = ".".join(map(str, self.blocks))
        return f"{self.tier or 'text'}-p{self.insertion_position}-k{self.top_k}-b{kept}"

    def runs(self, block: int) -> bool:
        """Whether a block runs."""
        return block in self.blocks

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {
            "tier": self.tier,
            "insertion_position": self.insertion_position,
            "top_k": self.top_k,
            "blocks": list(self.blocks),
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Plan:
        """What `to_dict` gave.

        Raises:
            FileFormatError: It is no plan.
        """
        try:
            blocks = tuple(record["blocks"])
            return cls(
                tier=record["tier"], insertion_position=record["insertion_position"], top_k=record["top_k"],
                blocks=blocks,
            )  # fmt: skip
        except (KeyError, TypeError, PlanError) as error:
            raise FileFormatError(f"not a plan: {record!r} ({error})") from error


@dataclass(frozen=True, kw_only=True)
class ModelGeometry:
    """What of a model plans choose among.

    Attributes:
        depth: Number of decoder blocks; at least 2.
        top_k: Experts for each token in the model as it is; 1 or more.
        tiers: Those that it has, ascending; none where it takes no images.
    """

    depth: int
    top_k: int
    tiers: tuple[Tier, ...] = TIERS

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiers", tuple(self.tiers))
        for name in ("depth", "top_k"):
            if type(getattr(self, name)) is not int:
                raise InputError(f"`{name}` (={getattr(self, name)!r}) must be a whole number")
        if self.depth < 2:
            raise InputError(f"`depth` (={self.depth}) must be at least 2: block 0 cannot be skipped")
        if self.top_k < 1:
            raise InputError(f"`top_k` (={self.top_k}) must be at least 1")
        if list(self.tiers) != [tier for tier in TIERS if tier in self.tiers]:
            raise InputError(f"`tiers` (={self.tiers}) must be of {', '.join(TIERS)}, in this order")

    @property
    def positions(self) -> tuple[int, ...]:
        """Insertion positions with a block after them."""
        return tuple(p for p in POSITIONS if p < self.depth)

    @property
    def top_ks(self) -> tuple[int, ...]:
        """Values of knob 2, ascending; the last is the model's own."""
        return tuple(range(max(1, self.top_k - TOP_KS + 1), self.top_k + 1))

    def totals(self, position: int) -> tuple[int, ...]:
        """Values of knob 3 at an insertion position: how many blocks run in all, ascending; the last is all.

        Raises:
            PlanError: There is no such position.
        """
        if position not in self.positions:
            raise PlanError(f"`insertion_position` (={position}) must be one of {self.positions}")
        steps = range(POSITIONS[-1] - position, -1, -1)
        most = self.depth - position
        skipped = dict.fromkeys(min(round(step * self.depth / _DEPTH), most) for step in steps)
        return tuple(self.depth - count for count in skipped)

    def check(self, plan: Plan) -> None:
        """That the model can run a plan.

        Raises:
            PlanError: It cannot; the message says which knob is out of range.
        """
        # None is a request without image, also to a model that takes them.
        if plan.tier is not None and plan.tier not in self.tiers:
            had = f"it has {', '.join(self.tiers)}" if self.tiers else "it takes no images, so use None"
            raise PlanError(f"this model has no tier {plan.tier!r}: {had}")
        if plan.insertion_position not in self.positions:
            raise PlanError(
                f"`insertion_position` (={plan.insertion_position}) must be one of {self.positions}"
            )
        if plan.top_k > self.top_k:
            raise PlanError(
                f"`top_k` (={plan.top_k}) is more than the {self.top_k} experts that tokens go to"
            )
        beyond = [block for block in plan.blocks if block >= self.depth]
        if beyond:
            raise PlanError(f"blocks {beyond} are not there: the model has blocks 0 to {self.depth - 1}")

    def full(self, *, images: bool = True) -> Plan:
        """The plan that leaves the model as it is.

        Args:
            images: Whether the request has an image.
        """
        tier = self.tiers[-1] if images and self.tiers else None
        return Plan(tier=tier, insertion_position=1, top_k=self.top_k, blocks=tuple(range(self.depth)))

    def expert_calls(self, plan: Plan) -> int:
        """How many experts one token goes to, over all blocks that run."""
        whole = plan.insertion_position
        return whole * self.top_k + (len(plan.blocks) - whole) * plan.top_k

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {"depth": self.depth, "top_k": self.top_k, "tiers": list(self.tiers)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> ModelGeometry:
        """What `to_dict` gave.

        Raises:
            FileFormatError: It is no geometry.
        """
        try:
            return cls(depth=record["depth"], top_k=record["top_k"], tiers=tuple(record["tiers"]))
        except (KeyError, TypeError, InputError) as error:
            raise FileFormatError(f"not a model's geometry: {record!r} ({error})") from error


@dataclass(frozen=True)
class PlanAction:
    """A plan as the controllers choose it: an index into the values of each knob."""

    tier: int
    position: int
    top_k: int
    option: int


@dataclass(frozen=True, kw_only=True)
class PlanSpace:
    """All plans of a model, and their numbers.

    Attributes:
        geometry: What there is to choose among.
        sets: (insertion position, number of blocks) -> the blocks that run, for every such pair.
            `importance.py` finds them.
    """

    geometry: ModelGeometry
    sets: Mapping[tuple[int, int], tuple[int, ...]]
    _actions: Mapping[Plan, PlanAction] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for position in self.geometry.positions:
            for total in self.geometry.totals(position):
                blocks = self.sets.get((position, total))
                if blocks is None or len(blocks) != total:
                    raise InputError(
                        f"position {position} with {total} blocks needs a set of {total}, not {blocks}; "
                        "measure the importance of blocks anew"
                    )
        actions: dict[Plan, PlanAction] = {}
        for action in self._every():
            actions.setdefault(self.plan(action), action)
        for plan in actions:
            self.geometry.check(plan)
        object.__setattr__(self, "_actions", actions)

    @classmethod
    def of(cls, geometry: ModelGeometry, importance: Sequence[float] | None = None) -> PlanSpace:
        """Keep the blocks that are worth the most one by one.

        Args:
            geometry: What there is to choose among.
            importance: What is lost without a block, for each. Of equal ones the earlier is kept. By default
                it is guessed: every second block of the later half goes first, those about three quarters of
                the depth before others, and the first block and the last one are kept. In models that were
                looked into, the deeper blocks are the redundant ones, but for the very last: Men et al.
                2024, "ShortGPT" (arXiv:2403.03853); Gromov et al. 2024, "The Unreasonable Ineffectiveness of
                the Deeper Layers" (arXiv:2403.17887).

        Raises:
            InputError: It is not one finite number for each block.
        """
        if importance is None:
            importance = _guessed(geometry.depth)
        if len(importance) != geometry.depth or not all(abs(value) < float("inf") for value in importance):
            raise InputError(
                f"`importance` must be {geometry.depth} finite numbers, one a block; it is {list(importance)}"
            )
        sets = {}
        for position in geometry.positions:
            after = sorted(range(position, geometry.depth), key=lambda block: (-importance[block], block))
            for total in geometry.totals(position):
                sets[position, total] = tuple(range(position)) + tuple(sorted(after[: total - position]))
        return cls(geometry=geometry, sets=sets)

    @property
    def tiers(self) -> tuple[Tier | None, ...]:
        """Those of the model; only None where it takes no images."""
        return self.geometry.tiers or (None,)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Every plan once, the smallest tier first."""
        return tuple(self._actions)

    def __len__(self) -> int:
        return len(self._actions)

    def plan(self, action: PlanAction) -> Plan:
        """The plan of an action.

        Raises:
            PlanError: An index is beyond the knob's values, as where a masked option was taken.
        """
        geometry = self.geometry
        for name, values in (
            ("tier", self.tiers), ("position", geometry.positions), ("top_k", geometry.top_ks),
        ):  # fmt: skip
            if not 0 <= getattr(action, name) < len(values):
                raise PlanError(f"{action}: `{name}` must be below {len(values)}")
        position = geometry.positions[action.position]
        totals = geometry.totals(position)
        if not 0 <= action.option < len(totals):
            raise PlanError(f"{action}: position {position} has {len(totals)} counts of blocks")
        return Plan(
            tier=self.tiers[action.tier],
            insertion_position=position,
            top_k=geometry.top_ks[action.top_k],
            blocks=self.sets[position, totals[action.option]],
        )

    def action(self, plan: Plan) -> PlanAction:
        """The first action that gives a plan.

        Raises:
            PlanError: None does.
        """
        try:
            return self._actions[plan]
        except KeyError:
            raise PlanError(f"{plan.id} is not among the {len(self)} plans of this space") from None

    def options(self) -> tuple[tuple[bool, ...], ...]:
        """For each position, which of the five options of knob 3 there are; the others are to be masked."""
        counts = [len(self.geometry.totals(position)) for position in self.geometry.positions]
        return tuple(tuple(at < count for at in range(OPTIONS)) for count in counts)

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it."""
        sets = [{"position": p, "blocks": list(blocks)} for (p, _), blocks in sorted(self.sets.items())]
        return {"geometry": self.geometry.to_dict(), "sets": sets}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> PlanSpace:
        """What `to_dict` gave.

        Raises:
            FileFormatError: It is no space of plans.
        """
        try:
            sets = {(row["position"], len(row["blocks"])): tuple(row["blocks"]) for row in record["sets"]}
            return cls(geometry=ModelGeometry.from_dict(record["geometry"]), sets=sets)
        except (KeyError, TypeError, InputError) as error:
            raise FileFormatError(f"not a space of plans ({error})") from error

    def _every(self) -> Iterator[PlanAction]:
        geometry = self.geometry
        for tier, position, top_k in product(
            range(len(self.tiers)), range(len(geometry.positions)), range(len(geometry.top_ks))
        ):
            for option in range(len(geometry.totals(geometry.positions[position]))):
                yield PlanAction(tier, position, top_k, option)


def _guessed(depth: int) -> list[float]:
    """Importance of blocks that nobody has measured: their ranks, the first to be skipped has 0."""
    later = range(depth // 2, depth - 1)
    # Every second one of these is as many as plans skip at most, or one fewer.
    order = sorted(later, key=lambda block: ((depth - block) % 2, abs(block - 0.75 * depth), block))
    order += [*range(depth // 2 - 1, 0, -1), depth - 1, 0]
    return [float(order.index(block)) for block in range(depth)]
