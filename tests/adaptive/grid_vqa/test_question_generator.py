"""Questions: each is true of its scene, read anew from the words; and no question tells its answer."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.adaptive.grid_vqa.config import KINDS, Kind
from sparseflow.adaptive.grid_vqa.question_generator import (
    MAX_COUNT,
    TEMPLATES,
    QuestionBatch,
    QuestionDomain,
    sample_questions,
    sample_scenes,
)
from sparseflow.adaptive.grid_vqa.scenes import NOTHING
from sparseflow.errors import InputError

NAMES = ("cat", "dog", "four", "one", "three", "two")
EVEN: dict[Kind, float] = dict.fromkeys(KINDS, 1.0)


def world(grid: int = 3, question_names: tuple[str, ...] = NAMES) -> QuestionDomain:
    return QuestionDomain(names=NAMES, question_names=question_names, grid=grid)


def texts(domain: QuestionDomain, batch: QuestionBatch, index: int) -> tuple[str, str]:
    """Question and answer in words, with all special tokens where they belong."""
    row, prompt, length = batch.text[index], batch.prompts[index], batch.lengths[index]
    assert row[prompt - 1] == domain.vocabulary.answer and row[length - 1] == domain.vocabulary.eos
    assert (row[length:] == domain.vocabulary.pad).all() and (row[:length] != domain.vocabulary.pad).all()
    return domain.vocabulary.text(row[:prompt]), domain.vocabulary.text(row[prompt:length])


def truth(kind: Kind, question: str, cells: list[str | None], small: list[bool], grid: int) -> str:
    """The answer, by someone who reads the question and looks at the scene."""
    pattern = next(
        match for template in TEMPLATES[kind]
        if (match := re.fullmatch(re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\w+)", re.escape(template)), question))
    )  # fmt: skip
    slots = pattern.groupdict()
    items = {index: name for index, name in enumerate(cells) if name is not None}
    if kind == "at":
        return items[(int(slots["row"]) - 1) * grid + int(slots["column"]) - 1]
    if kind == "count":
        return str(sum(name == slots["x"] for name in items.values()))
    if kind == "where":
        (x,) = (index for index, name in items.items() if name == slots["x"])
        return str(x % grid + 1)
    if kind == "left":
        (x,), (y,) = ([index for index, name in items.items() if name == slots[slot]] for slot in "xy")
        assert x % grid != y % grid
        return "yes" if x % grid < y % grid else "no"
    if kind == "small":
        (match,) = (name for index, name in items.items() if small[index])
        return match
    rows = [
        [name for name in cells[row * grid : (row + 1) * grid] if name is not None] for row in range(grid)
    ]
    return " ; ".join(" ".join(row) or "nothing" for row in rows)


@settings(max_examples=20, deadline=None)
@given(grid=st.sampled_from([2, 3]), seed=st.integers(0, 2**32), few_names=st.booleans())
def test_answers_are_correct(grid: int, seed: int, few_names: bool) -> None:
    domain = world(grid, ("dog", "cat", "three") if few_names else NAMES)
    batch = sample_questions(domain, EVEN, 60, np.random.default_rng(seed))
    for index in range(len(batch)):
        kind = KINDS[batch.kinds[index]]
        cells = [None if name == NOTHING else NAMES[name] for name in batch.scenes.names[index]]
        small = batch.scenes.small[index].tolist()
        assert any(small) == (kind == "small")
        assert set(filter(None, cells)) <= set(domain.question_names)
        question, answer = texts(domain, batch, index)
        assert truth(kind, question, cells, small, grid) == answer


def test_sample_questions_depends_on_generator_only() -> None:
    first, two = (sample_questions(world(), EVEN, 100, np.random.default_rng(3)) for _ in range(2))
    assert np.array_equal(first.text, two.text) and np.array_equal(first.scenes.names, two.scenes.names)
    other = sample_questions(world(), EVEN, 100, np.random.default_rng(4))
    assert first.text.shape != other.text.shape or not np.array_equal(first.text, other.text)


def test_answers_are_uniform_and_independent_of_question() -> None:
    domain = world()
    batch = sample_questions(
        domain, {kind: 1.0 for kind in KINDS if kind != "list"}, 50_000, np.random.default_rng(0)
    )
    assert not (batch.kinds == KINDS.index("list")).any()
    answers: dict[tuple[int, ...], Counter[int]] = {}
    for key, row, prompt in zip(
        np.concatenate([batch.kinds[:, None], batch.slots], 1).tolist(),
        batch.text,
        batch.prompts,
        strict=True,
    ):
        answers.setdefault(tuple(key), Counter())[int(row[prompt])] += 1
    for key, actual in answers.items():
        ways = domain.count_answers(KINDS[key[0]])
        assert ways is not None and ways == len(actual)
        # Chi-squared: over 40 counters, five standard deviations beyond its mean.
        total = sum(actual.values())
        difference = sum((count - total / ways) ** 2 for count in actual.values()) / (total / ways)
        assert difference < ways - 1 + 5.0 * np.sqrt(2 * (ways - 1)), (key, actual)


def test_all_templates_and_slots_occur() -> None:
    domain = world()
    batch = sample_questions(domain, EVEN, 6000, np.random.default_rng(0))
    config = {texts(domain, batch, index)[0] for index in range(len(batch))}
    assert "how many items show cat ?" in config and "name the tiny item ." in config
    wordings = {kind: len(ways) for kind, ways in TEMPLATES.items()}
    of_one_name = (wordings["count"] + wordings["where"]) * 6
    assert len(config) == wordings["at"] * 9 + of_one_name + wordings["left"] * 30 + 6
    assert batch.slots[batch.kinds == 0][:, 2:].min() == 1 and batch.slots[batch.kinds == 0][:, 2:].max() == 3


def test_small_items_are_digits_if_available() -> None:
    assert world().small_names == ("four", "one", "three", "two")
    assert QuestionDomain(
        names=(*NAMES, "pig"), question_names=("cat", "dog", "pig"), grid=2
    ).small_names == (
        "cat",
        "dog",
        "pig",
    )


def test_list_answers_have_all_lengths() -> None:
    batch = sample_questions(world(), {"list": 1.0}, 2000, np.random.default_rng(0))
    lengths = batch.lengths - batch.prompts
    # Two to five items, two signs between rows, "nothing" for each empty row, and the end.
    assert lengths.min() == 3 + 2 + 1 and lengths.max() == 5 + 1 + 2 + 1


def test_select_keeps_questions() -> None:
    domain = world()
    batch = sample_questions(domain, EVEN, 50, np.random.default_rng(0))
    part = batch.select(10, 30)
    assert len(part) == 20
    assert [texts(domain, part, index) for index in range(20)] == [
        texts(domain, batch, index) for index in range(10, 30)
    ]


def test_sample_scenes_covers_names_sizes_and_empty_cells() -> None:
    often = np.array([0.1, 0.1, 0.4, 0.1, 0.2, 0.1])
    batch = sample_scenes(
        world(question_names=("cat", "dog", "one")), often, 0.4, 2000, np.random.default_rng(0)
    )
    big = batch.names[(batch.names != NOTHING) & ~batch.small]
    assert np.allclose(np.bincount(big) / len(big), often, atol=0.02)
    assert {NAMES[name] for name in np.unique(batch.names[batch.small])} == {"one"}
    assert 0.08 < (batch.names == NOTHING).mean() < 0.12 and 0.38 < batch.small.mean() < 0.42


def test_domain_with_invalid_names_raises() -> None:
    with pytest.raises(InputError, match="'pig'"):
        QuestionDomain(names=NAMES, question_names=("cat", "dog", "pig"), grid=3)
    with pytest.raises(InputError, match=r"three.*cat, dog"):
        QuestionDomain(names=NAMES, question_names=("cat", "dog"), grid=3)
    with pytest.raises(InputError, match="cat, dog, dog, one"):
        QuestionDomain(names=NAMES, question_names=("cat", "dog", "dog", "one"), grid=3)


def test_max_count_fits_grid() -> None:
    for grid in (2, 3):
        batch = sample_questions(world(grid), {"count": 1.0}, 500, np.random.default_rng(0))
        existing = (batch.scenes.names != NOTHING).sum(1)
        assert existing.min() >= 1 and existing.max() <= grid**2
        config = batch.slots[:, :1]
        assert np.array_equal(np.unique((batch.scenes.names == config).sum(1)), np.arange(MAX_COUNT + 1))
