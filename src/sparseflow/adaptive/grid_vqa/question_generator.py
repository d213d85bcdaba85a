"""Random questions with matching scenes, such that a question alone reveals nothing about its answer.

Each kind of question samples its answer first, uniformly and independent of the wording, and then a scene for
which it is correct. The accuracy of guessing is therefore one over the number of answers; see
`evaluate.BlindBaseline`.

All functions are batched: B scenes of S cells; token ids are those of `Vocabulary`.
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
"""Wordings of each kind, all equally likely."""

SMALL = ("small", "tiny")
"""Words of the templates that describe an item as small."""
MAX_COUNT = 3
"""Largest answer of a counting question."""
YES, NO, EMPTY, NEXT = "yes", "no", "nothing", ";"

_EMPTY_FRACTION = 0.1
"""Fraction of empty cells in naming scenes."""
_SLOTS = ("x", "y", "row", "column")
_NO_SLOT = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class QuestionDomain:
    """Names and cells that questions are about.

    Attributes:
        names: All names of a bank.
        question_names: Names in questions, at least 3.
        grid: Rows and columns.
    """

    names: tuple[str, ...]
    question_names: tuple[str, ...]
    grid: int

    def __post_init__(self) -> None:
        unknown = [name for name in self.question_names if name not in self.names]
        if unknown:
            raise InputError(f"there are no images of {unknown[0]!r}; names are {', '.join(self.names)}")
        if len(set(self.question_names)) < 3 or len(set(self.question_names)) < len(self.question_names):
            raise InputError(
                "`question_names` must be at least three distinct names, got "
                f"{', '.join(self.question_names) or 'none'}"
            )

    @property
    def cells(self) -> int:
        return self.grid**2

    @property
    def small_names(self) -> tuple[str, ...]:
        """Names of small items: digits, which are recognizable at that size, if there are any."""
        return tuple(name for name in self.question_names if name in DIGITS) or self.question_names

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Vocabulary of all questions and answers."""
        templates = " ".join(" ".join(wordings) for wordings in TEMPLATES.values())
        numbers = [str(number) for number in range(max(MAX_COUNT, self.grid) + 1)]
        return Vocabulary(
            [*re.sub(r"\{\w+\}", "", templates).split(), *self.names, *numbers, YES, NO, EMPTY, NEXT]
        )

    def count_answers(self, kind: Kind) -> int | None:
        """Number of possible answers of a kind; None if it depends on the scene."""
        counts: dict[Kind, int | None] = {
            "at": len(self.question_names),
            "count": MAX_COUNT + 1,
            "where": self.grid,
            "left": 2,
            "small": len(self.small_names),
            "list": None,
        }
        return counts[kind]


@dataclass(frozen=True, kw_only=True, eq=False)
class QuestionBatch:
    """Questions with their scenes.

    Attributes:
        scenes: Scenes.
        kinds: Index into `KINDS`, [B] int64.
        slots: Name, second name, row and column in the question; -1 if the kind has none, [B, 4] int64.
        text: Question, `<answer>`, answer, `<eos>`, padding, [B, tokens] int64.
        prompts: Tokens up to and including `<answer>`, [B] int64.
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

    def select(self, first: int, last: int) -> QuestionBatch:
        """Questions `first` to `last`."""
        rows = slice(first, last)
        lengths = self.lengths[rows]
        return QuestionBatch(
            scenes=SceneBatch(names=self.scenes.names[rows], small=self.scenes.small[rows]),
            kinds=self.kinds[rows], slots=self.slots[rows], text=self.text[rows, : lengths.max(initial=0)],
            prompts=self.prompts[rows], lengths=lengths,
        )  # fmt: skip


def sample_questions(
    domain: QuestionDomain, frequencies: Mapping[Kind, float], count: int, generator: np.random.Generator
) -> QuestionBatch:
    """Sample questions and their scenes.

    Args:
        domain: Names and cells.
        frequencies: Frequencies of kinds; missing kinds do not occur.
        count: Number of questions.
        generator: Random generator, the only source of randomness.
    """
    weights = np.array([frequencies.get(kind, 0.0) for kind in KINDS])
    kinds = generator.choice(len(KINDS), size=count, p=weights / weights.sum())
    names = np.full((count, domain.cells), NOTHING)
    small = np.zeros((count, domain.cells), bool)
    slots = np.full((count, len(_SLOTS)), _NO_SLOT)
    answers = np.full((count, domain.cells + domain.grid), domain.vocabulary.pad)
    for index, kind in enumerate(KINDS):
        rows = np.flatnonzero(kinds == index)
        # Also for an absent kind, so that the random numbers of the others do not depend on it.
        kind_batch = _KindBatch(domain, len(rows), generator)
        getattr(kind_batch, f"draw_{kind}")()
        names[rows], small[rows], slots[rows] = kind_batch.names, kind_batch.small, kind_batch.slots
        answers[rows, : kind_batch.answers.shape[1]] = kind_batch.answers
    prompts = _phrase_questions(domain, kinds, slots, generator)
    pad, vocabulary = domain.vocabulary.pad, domain.vocabulary
    separators = [np.full((count, 1), token) for token in (vocabulary.answer, vocabulary.eos)]
    text = _remove_padding(np.concatenate([prompts, separators[0], answers, separators[1]], axis=1), pad)
    lengths = (text != pad).sum(1)
    return QuestionBatch(
        scenes=SceneBatch(names=names, small=small), kinds=kinds, slots=slots,
        text=text[:, : lengths.max(initial=0)], prompts=(prompts != pad).sum(1) + 1, lengths=lengths,
    )  # fmt: skip


def sample_scenes(
    domain: QuestionDomain, frequencies: np.ndarray, small: float, count: int, generator: np.random.Generator
) -> SceneBatch:
    """Sample scenes of all names without questions, to train the vision tower.

    Args:
        domain: Names and cells.
        frequencies: Frequency of each name, [names], with sum 1.
        small: Fraction of cells with a small item, uniform over the names of small items.
        count: Number of scenes.
        generator: Random generator.
    """
    shape = (count, domain.cells)
    names = generator.choice(len(frequencies), shape, p=frequencies)
    small_names = generator.choice([domain.names.index(name) for name in domain.small_names], shape)
    uniform = generator.random(shape)
    is_small = uniform < small
    return SceneBatch(
        names=np.where(uniform >= 1.0 - _EMPTY_FRACTION, NOTHING, np.where(is_small, small_names, names)),
        small=is_small,
    )


class _KindBatch:
    """Scenes and answers of one kind of question, with one method per kind."""

    def __init__(self, domain: QuestionDomain, count: int, generator: np.random.Generator) -> None:
        self.domain, self.count, self.generator = domain, count, generator
        self.names = np.full((count, domain.cells), NOTHING)
        self.small = np.zeros((count, domain.cells), bool)
        self.slots = np.full((count, len(_SLOTS)), _NO_SLOT)
        self.answers = np.zeros((count, 0), np.int64)
        self._rows = np.arange(count)
        self._question_labels = np.array([domain.names.index(name) for name in domain.question_names])
        self._words = domain.vocabulary.ids(domain.names)
        # Random order of the cells of each scene.
        self._order = generator.random((count, domain.cells)).argsort(1)

    def draw_at(self) -> None:
        self._place_items(
            self._sample_count(self.domain.cells - 1), self._sample_names((self.count, self.domain.cells))
        )
        cell = self._order[:, 0]
        self.slots[:, 2], self.slots[:, 3] = cell // self.domain.grid + 1, cell % self.domain.grid + 1
        self._set_answers(self._words[self.names[self._rows, cell]])

    def draw_count(self) -> None:
        counts = self.generator.integers(0, MAX_COUNT + 1, self.count)
        num_distractors = self.generator.integers(1, self.domain.cells - MAX_COUNT + 1, self.count)
        target = self.generator.integers(0, len(self._question_labels), (self.count, 1))
        distractors = self._sample_distractors(target)
        first = np.arange(self.domain.cells) < counts[:, None]
        self._place_items(
            counts + num_distractors, self._question_labels[np.where(first, target, distractors)]
        )
        self.slots[:, 0] = self._question_labels[target[:, 0]]
        self._set_answers(
            self.domain.vocabulary.ids([str(number) for number in range(MAX_COUNT + 1)])[counts]
        )

    def draw_where(self) -> None:
        grid = self.domain.grid
        row, column = self.generator.integers(0, grid, (2, self.count))
        target = self.generator.integers(0, len(self._question_labels), (self.count, 1))
        distractors = self._sample_distractors(target)
        self._place_items(self._sample_count(self.domain.cells - 2), self._question_labels[distractors])
        self.names[self._rows, row * grid + column] = self._question_labels[target[:, 0]]
        self.slots[:, 0] = self._question_labels[target[:, 0]]
        self._set_answers(self.domain.vocabulary.ids([str(number + 1) for number in range(grid)])[column])

    def draw_left(self) -> None:
        grid = self.domain.grid
        columns = self.generator.random((self.count, grid)).argsort(1)[:, :2]
        rows = self.generator.integers(0, grid, (self.count, 2))
        pair = self.generator.integers(
            0, [len(self._question_labels), len(self._question_labels) - 1], (self.count, 2)
        )
        pair[:, 1] += pair[:, 1] >= pair[:, 0]
        distractors = self._sample_distractors(pair)
        self._place_items(self._sample_count(self.domain.cells - 2) - 1, self._question_labels[distractors])
        for index in (0, 1):
            self.names[self._rows, rows[:, index] * grid + columns[:, index]] = self._question_labels[
                pair[:, index]
            ]
        self.slots[:, :2] = self._question_labels[pair]
        no, yes = self.domain.vocabulary.ids([NO, YES])
        self._set_answers(np.where(columns[:, 0] < columns[:, 1], yes, no))

    def draw_small(self) -> None:
        self._place_items(
            self._sample_count(self.domain.cells - 1), self._sample_names((self.count, self.domain.cells))
        )
        cell = self._order[:, -1]
        choice = np.array([self.domain.names.index(name) for name in self.domain.small_names])
        self.names[self._rows, cell] = choice[self.generator.integers(0, len(choice), self.count)]
        self.small[self._rows, cell] = True
        self._set_answers(self._words[self.names[self._rows, cell]])

    def draw_list(self) -> None:
        grid, vocabulary = self.domain.grid, self.domain.vocabulary
        self._place_items(
            self._sample_count(max(3, self.domain.cells // 2 + 1), low=2),
            self._sample_names((self.count, self.domain.cells)),
        )
        occupied = self.names != NOTHING
        words = np.where(occupied, self._words[self.names], vocabulary.pad).reshape(self.count, grid, grid)
        empty, following = vocabulary.ids([EMPTY, NEXT])
        empty_rows = np.where(occupied.reshape(self.count, grid, grid).any(2), vocabulary.pad, empty)
        ends = np.full((self.count, grid), following)
        ends[:, -1] = vocabulary.pad
        rows = np.concatenate([words, empty_rows[:, :, None], ends[:, :, None]], axis=2)
        # A row has its items or "nothing", so a list has at most cells plus separators tokens.
        self.answers = _remove_padding(rows.reshape(self.count, grid * (grid + 2)), vocabulary.pad)[
            :, : self.domain.cells + grid - 1
        ]

    def _sample_distractors(self, targets: np.ndarray) -> np.ndarray:
        """Indices of question names other than the `targets` of each scene: [B, any] -> [B, S]."""
        num_others = len(self._question_labels) - targets.shape[1]
        distractors = self.generator.integers(0, num_others, (self.count, self.domain.cells))
        for target in np.sort(targets, axis=1).T:
            distractors += distractors >= target[:, None]
        return distractors

    def _sample_names(self, shape: tuple[int, ...]) -> np.ndarray:
        return self._question_labels[self.generator.integers(0, len(self._question_labels), shape)]

    def _sample_count(self, high: int, *, low: int = 1) -> np.ndarray:
        """Number of items, [B]."""
        return self.generator.integers(low, high + 1, self.count)

    def _place_items(self, counts: np.ndarray, names: np.ndarray) -> None:
        """Place the first `counts` of `names`, [B, S], into the first cells of each scene's random order."""
        placed = np.where(np.arange(self.domain.cells) < counts[:, None], names, NOTHING)
        np.put_along_axis(self.names, self._order, placed, axis=1)

    def _set_answers(self, words: np.ndarray) -> None:
        self.answers = words[:, None]


def _phrase_questions(
    domain: QuestionDomain, kinds: np.ndarray, slots: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Questions in a random wording of their kind: [B, tokens], padded on the right."""
    wordings, first = _encode_templates(domain)
    counts = np.array([len(TEMPLATES[kind]) for kind in KINDS])
    templates = wordings[first[kinds] + (generator.random(len(kinds)) * counts[kinds]).astype(np.int64)]
    vocabulary = domain.vocabulary
    words = vocabulary.ids(domain.names)[slots[:, :2]]
    numbers = vocabulary.ids([str(number) for number in range(domain.grid + 1)])
    # -1 (no such slot) selects an arbitrary word, which no template of that kind uses.
    filled = np.concatenate([words, numbers[slots[:, 2:]]], axis=1)
    return np.where(
        templates < 0, np.take_along_axis(filled, np.maximum(-templates - 1, 0), axis=1), templates
    )


def _encode_templates(domain: QuestionDomain) -> tuple[np.ndarray, np.ndarray]:
    """All wordings, [n, tokens], with slot i as -1 - i, and the index of the first wording of each kind."""
    rows: list[list[int]] = []
    first: list[int] = []
    for kind in KINDS:
        first.append(len(rows))
        for template in TEMPLATES[kind]:
            words = template.split()
            rows.append(
                [
                    -1 - _SLOTS.index(word[1:-1]) if word[0] == "{" else int(domain.vocabulary.ids(word)[0])
                    for word in words
                ]
            )
    padded = np.full((len(rows), max(map(len, rows))), domain.vocabulary.pad)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded, np.array(first)


def _remove_padding(tokens: np.ndarray, pad: int) -> np.ndarray:
    """Move padding between tokens to the right: [B, any]."""
    order = np.argsort(tokens == pad, axis=1, kind="stable")
    return np.take_along_axis(tokens, order, axis=1)
