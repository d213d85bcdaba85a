"""Questions about scenes: drawn together with the scene, so that a question alone says nothing of its answer.

Each kind of question draws its answer first, uniformly, whatever the words of the question are, and then a
scene of which it is true. Who guesses without looking is right as often as there are answers: see `blind`.

Everything is drawn for a whole batch at once: B scenes of S cells; token numbers are a `Vocabulary`'s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sparseflow.adaptive.grid_vqa.config import KINDS, Kind
from sparseflow.adaptive.grid_vqa.images import DIGITS
from sparseflow.adaptive.grid_vqa.scenes import NOTHING, SceneBatch
from sparseflow.adaptive.grid_vqa.vocabulary import Vocabulary
from sparseflow.errors import InputError

TEMPLATES: Mapping[Kind, tuple[str, ...]] = {
    "at": (
        "what is at row {row} column {column} ?",
        "which item is in row {row} , column {column} ?",
        "name the item in column {column} of row {row} .",
    ),
    "count": (
        "how many items show {x} ?",
        "count the items that show {x} .",
        "what is the number of {x} items ?",
    ),
    "where": (
        "in which column is {x} ?",
        "which column is the item {x} in ?",
        "name the column of {x} .",
    ),
    "left": (
        "is {x} left of {y} ?",
        "is the item {x} to the left of the item {y} ?",
        "does {x} lie left of {y} ?",
    ),
    "small": (
        "what is the small item ?",
        "which item is small ?",
        "name the tiny item .",
    ),
    "list": (
        "list the items row by row .",
        "name all items , row by row .",
        "what is in each row ?",
    ),
}
"""Ways to ask; all of a kind's are as likely."""

SMALL = ("small", "tiny")
"""Words of these that say that an item is small."""
MOST = 3
"""The most that a question counts to."""
YES, NO, EMPTY, NEXT = "yes", "no", "nothing", ";"

_EMPTY = 0.1
"""Share of cells with nothing in them, where cells are to be named."""
_SLOTS = ("x", "y", "row", "column")
_UNASKED = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class QuestionDomain:
    """What questions can be about.

    Attributes:
        names: All names of a bank.
        asked: Those that questions are about; at least 3.
        grid: Rows, and columns.
    """

    names: tuple[str, ...]
    asked: tuple[str, ...]
    grid: int

    def __post_init__(self) -> None:
        unknown = [name for name in self.asked if name not in self.names]
        if unknown:
            raise InputError(f"there are no images of {unknown[0]!r}, only of {', '.join(self.names)}")
        if len(set(self.asked)) < 3 or len(set(self.asked)) < len(self.asked):
            raise InputError(
                f"questions need three names or more, each once, not {', '.join(self.asked) or 'none'}"
            )

    @property
    def cells(self) -> int:
        return self.grid**2

    @property
    def small(self) -> tuple[str, ...]:
        """Names of small items: digits, which can be told at that size, where there are any."""
        return tuple(name for name in self.asked if name in DIGITS) or self.asked

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Every word that a question or an answer may have."""
        templates = " ".join(" ".join(each) for each in TEMPLATES.values())
        numbers = [str(number) for number in range(max(MOST, self.grid) + 1)]
        return Vocabulary(
            [*re.sub(r"\{\w+\}", "", templates).split(), *self.names, *numbers, YES, NO, EMPTY, NEXT]
        )

    def answers(self, kind: Kind) -> int | None:
        """How many answers there are to a question of a kind; None where there are as many as scenes."""
        ways: dict[Kind, int | None] = {
            "at": len(self.asked), "count": MOST + 1, "where": self.grid, "left": 2, "small": len(self.small),
            "list": None,
        }  # fmt: skip
        return ways[kind]


@dataclass(frozen=True, kw_only=True, eq=False)
class QuestionBatch:
    """Questions about scenes.

    Attributes:
        scenes: What lies where.
        kinds: Index into `KINDS`, [B] int64.
        slots: What they are about: name, second name, row, column; -1 where a kind has none: [B, 4] int64.
        text: Question, `<answer>`, answer, `<eos>`, padding: [B, tokens] int64.
        prompts: Tokens up to and with `<answer>`, [B] int64.
        lengths: Tokens without padding, [B] int64.
    """

    scenes: SceneBatch
    kinds: np.ndarray
    slots: np.ndarray
    text: np.ndarray
    prompts: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.kinds)

    def part(self, first: int, last: int) -> QuestionBatch:
        """Some of them."""
        mine = slice(first, last)
        lengths = self.lengths[mine]
        return QuestionBatch(
            scenes=SceneBatch(names=self.scenes.names[mine], small=self.scenes.small[mine]),
            kinds=self.kinds[mine], slots=self.slots[mine], text=self.text[mine, : lengths.max(initial=0)],
            prompts=self.prompts[mine], lengths=lengths,
        )  # fmt: skip


def draw(
    world: QuestionDomain, shares: Mapping[Kind, float], count: int, random: np.random.Generator
) -> QuestionBatch:
    """Draw questions and their scenes.

    Args:
        world: What they can be about.
        shares: Of kinds; those that are left out do not come.
        count: How many.
        random: What is drawn from; nothing else decides.
    """
    weights = np.array([shares.get(kind, 0.0) for kind in KINDS])
    kinds = random.choice(len(KINDS), size=count, p=weights / weights.sum())
    names = np.full((count, world.cells), NOTHING)
    small = np.zeros((count, world.cells), bool)
    slots = np.full((count, len(_SLOTS)), _UNASKED)
    answers = np.full((count, world.cells + world.grid), world.vocabulary.pad)
    for at, kind in enumerate(KINDS):
        mine = np.flatnonzero(kinds == at)
        # Also of a kind that none is of: what is drawn for the next must not depend on it.
        made = _Kind(world, len(mine), random)
        getattr(made, f"draw_{kind}")()
        names[mine], small[mine], slots[mine] = made.names, made.small, made.slots
        answers[mine, : made.answers.shape[1]] = made.answers
    asked = _worded(world, kinds, slots, random)
    pad, vocabulary = world.vocabulary.pad, world.vocabulary
    marks = [np.full((count, 1), mark) for mark in (vocabulary.answer, vocabulary.eos)]
    text = _left(np.concatenate([asked, marks[0], answers, marks[1]], axis=1), pad)
    lengths = (text != pad).sum(1)
    return QuestionBatch(
        scenes=SceneBatch(names=names, small=small), kinds=kinds, slots=slots,
        text=text[:, : lengths.max(initial=0)], prompts=(asked != pad).sum(1) + 1, lengths=lengths,
    )  # fmt: skip


def draw_names(
    world: QuestionDomain, often: np.ndarray, small: float, count: int, random: np.random.Generator
) -> SceneBatch:
    """Draw scenes without questions, of all names: what a vision tower learns to name.

    Args:
        world: Names and cells.
        often: How often each name comes, [names], summing up to 1.
        small: Share of cells with a small item, of those names that small ones have, each as often.
        count: How many scenes.
        random: What is drawn from.
    """
    shape = (count, world.cells)
    names = random.choice(len(often), shape, p=often)
    small_names = random.choice([world.names.index(name) for name in world.small], shape)
    which = random.random(shape)
    tiny = which < small
    return SceneBatch(
        names=np.where(which >= 1.0 - _EMPTY, NOTHING, np.where(tiny, small_names, names)), small=tiny
    )


class _Kind:
    """Scenes and answers of one kind of question; a method for each kind."""

    def __init__(self, world: QuestionDomain, count: int, random: np.random.Generator) -> None:
        self.world, self.count, self.random = world, count, random
        self.names = np.full((count, world.cells), NOTHING)
        self.small = np.zeros((count, world.cells), bool)
        self.slots = np.full((count, len(_SLOTS)), _UNASKED)
        self.answers = np.zeros((count, 0), np.int64)
        self._rows = np.arange(count)
        self._asked = np.array([world.names.index(name) for name in world.asked])
        self._words = world.vocabulary.ids(world.names)
        # Cells in an order of each scene's own.
        self._order = random.random((count, world.cells)).argsort(1)

    def draw_at(self) -> None:
        self._fill(self._few(self.world.cells - 1), self._any((self.count, self.world.cells)))
        here = self._order[:, 0]
        self.slots[:, 2], self.slots[:, 3] = here // self.world.grid + 1, here % self.world.grid + 1
        self._answer(self._words[self.names[self._rows, here]])

    def draw_count(self) -> None:
        wanted = self.random.integers(0, MOST + 1, self.count)
        other = self.random.integers(1, self.world.cells - MOST + 1, self.count)
        one = self.random.integers(0, len(self._asked), (self.count, 1))
        rest = self.random.integers(0, len(self._asked) - 1, (self.count, self.world.cells))
        rest += rest >= one
        first = np.arange(self.world.cells) < wanted[:, None]
        self._fill(wanted + other, self._asked[np.where(first, one, rest)])
        self.slots[:, 0] = self._asked[one[:, 0]]
        self._answer(self.world.vocabulary.ids([str(number) for number in range(MOST + 1)])[wanted])

    def draw_where(self) -> None:
        grid = self.world.grid
        row, column = self.random.integers(0, grid, (2, self.count))
        one = self.random.integers(0, len(self._asked), (self.count, 1))
        rest = self.random.integers(0, len(self._asked) - 1, (self.count, self.world.cells))
        rest += rest >= one
        self._fill(self._few(self.world.cells - 2), self._asked[rest])
        self.names[self._rows, row * grid + column] = self._asked[one[:, 0]]
        self.slots[:, 0] = self._asked[one[:, 0]]
        self._answer(self.world.vocabulary.ids([str(number + 1) for number in range(grid)])[column])

    def draw_left(self) -> None:
        grid = self.world.grid
        columns = self.random.random((self.count, grid)).argsort(1)[:, :2]
        rows = self.random.integers(0, grid, (self.count, 2))
        pair = self.random.integers(0, [len(self._asked), len(self._asked) - 1], (self.count, 2))
        pair[:, 1] += pair[:, 1] >= pair[:, 0]
        low, high = np.sort(pair, 1).T[:, :, None]
        rest = self.random.integers(0, len(self._asked) - 2, (self.count, self.world.cells))
        rest += rest >= low
        rest += rest >= high
        self._fill(self._few(self.world.cells - 2) - 1, self._asked[rest])
        for at in (0, 1):
            self.names[self._rows, rows[:, at] * grid + columns[:, at]] = self._asked[pair[:, at]]
        self.slots[:, :2] = self._asked[pair]
        no, yes = self.world.vocabulary.ids([NO, YES])
        self._answer(np.where(columns[:, 0] < columns[:, 1], yes, no))

    def draw_small(self) -> None:
        self._fill(self._few(self.world.cells - 1), self._any((self.count, self.world.cells)))
        here = self._order[:, -1]
        choice = np.array([self.world.names.index(name) for name in self.world.small])
        self.names[self._rows, here] = choice[self.random.integers(0, len(choice), self.count)]
        self.small[self._rows, here] = True
        self._answer(self._words[self.names[self._rows, here]])

    def draw_list(self) -> None:
        grid, vocabulary = self.world.grid, self.world.vocabulary
        self._fill(
            self._few(max(3, self.world.cells // 2 + 1), least=2), self._any((self.count, self.world.cells))
        )
        there = self.names != NOTHING
        words = np.where(there, self._words[self.names], vocabulary.pad).reshape(self.count, grid, grid)
        empty, following = vocabulary.ids([EMPTY, NEXT])
        bare = np.where(there.reshape(self.count, grid, grid).any(2), vocabulary.pad, empty)
        ends = np.full((self.count, grid), following)
        ends[:, -1] = vocabulary.pad
        rows = np.concatenate([words, bare[:, :, None], ends[:, :, None]], axis=2)
        # A row has its items or "nothing", never both, so cells and separators are all that a list needs.
        self.answers = _left(rows.reshape(self.count, grid * (grid + 2)), vocabulary.pad)[
            :, : self.world.cells + grid - 1
        ]

    def _any(self, shape: tuple[int, ...]) -> np.ndarray:
        return self._asked[self.random.integers(0, len(self._asked), shape)]

    def _few(self, most: int, *, least: int = 1) -> np.ndarray:
        """How many items, [B]."""
        return self.random.integers(least, most + 1, self.count)

    def _fill(self, counts: np.ndarray, names: np.ndarray) -> None:
        """Lay the first `counts` of `names`, [B, S], into the first cells of each scene's order."""
        laid = np.where(np.arange(self.world.cells) < counts[:, None], names, NOTHING)
        np.put_along_axis(self.names, self._order, laid, axis=1)

    def _answer(self, words: np.ndarray) -> None:
        self.answers = words[:, None]


def _worded(
    world: QuestionDomain, kinds: np.ndarray, slots: np.ndarray, random: np.random.Generator
) -> np.ndarray:
    """Questions in one of their kind's wordings: [B, tokens], padded on the right."""
    ways, first = _templates(world)
    counts = np.array([len(TEMPLATES[kind]) for kind in KINDS])
    chosen = ways[first[kinds] + (random.random(len(kinds)) * counts[kinds]).astype(np.int64)]
    vocabulary = world.vocabulary
    named = vocabulary.ids(world.names)[slots[:, :2]]
    numbers = vocabulary.ids([str(number) for number in range(world.grid + 1)])
    # -1 where a kind has no such slot picks some word, which no template of that kind has a place for.
    filled = np.concatenate([named, numbers[slots[:, 2:]]], axis=1)
    return np.where(chosen < 0, np.take_along_axis(filled, np.maximum(-chosen - 1, 0), axis=1), chosen)


def _templates(world: QuestionDomain) -> tuple[np.ndarray, np.ndarray]:
    """All wordings, [n, tokens], slot i as -1 - i; and the first one of each kind."""
    rows: list[list[int]] = []
    first: list[int] = []
    for kind in KINDS:
        first.append(len(rows))
        for template in TEMPLATES[kind]:
            words = template.split()
            rows.append(
                [
                    -1 - _SLOTS.index(word[1:-1]) if word[0] == "{" else int(world.vocabulary.ids(word)[0])
                    for word in words
                ]
            )
    padded = np.full((len(rows), max(map(len, rows))), world.vocabulary.pad)
    for at, row in enumerate(rows):
        padded[at, : len(row)] = row
    return padded, np.array(first)


def _left(tokens: np.ndarray, pad: int) -> np.ndarray:
    """Tokens without the padding between them: [B, any], padded on the right."""
    order = np.argsort(tokens == pad, axis=1, kind="stable")
    return np.take_along_axis(tokens, order, axis=1)
