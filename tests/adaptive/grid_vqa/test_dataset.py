"""Batches: a number says all of one, whoever makes it and in whatever order."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from sparseflow.adaptive.adapters.crops import CROPS
from sparseflow.adaptive.grid_vqa.config import KINDS
from sparseflow.adaptive.grid_vqa.dataset import CHUNK, VqaBatch, VqaDataset
from sparseflow.adaptive.grid_vqa.images import SPLITS
from sparseflow.adaptive.grid_vqa.scenes import NOTHING
from sparseflow.errors import InputError
from tests.adaptive.grid_vqa.little import bank, quick

DATA = VqaDataset(quick(), bank=bank())


def assert_same(first: Any, other: Any) -> None:
    for field in fields(first):
        assert torch.equal(getattr(first, field.name), getattr(other, field.name)), field.name


def test_train_batch_depends_on_step_and_rank_only() -> None:
    reloaded = VqaDataset(quick(), bank=bank())
    for created in ("make_train_batch", "make_naming_batch"):
        first = [getattr(DATA, created)(step, rank) for step in (0, 1) for rank in (0, 1)]
        second = [getattr(reloaded, created)(step, rank) for step in (1, 0) for rank in (0, 1)]
        for left_item, other in zip(first, second[2:] + second[:2], strict=True):
            assert_same(left_item, other)
        for left_item, other in pairwise(first):
            assert not torch.equal(left_item.crops, other.crops)
    other = VqaDataset(quick(**{"train.seed": 1}), bank=bank())
    assert not torch.equal(other.make_train_batch(0).crops, DATA.make_train_batch(0).crops)


def test_train_batch_of_tier_has_first_crops() -> None:
    full = DATA.make_train_batch(2)
    for tier, count in CROPS.items():
        subset = DATA.make_train_batch(2, tier=tier)
        assert torch.equal(subset.crops, full.crops[:, :count]) and torch.equal(subset.text, full.text)


def test_dataset_does_not_use_global_generators() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    np.random.seed(0)
    state: Any = np.random.get_state()
    DATA.make_train_batch(0)
    list(DATA.iterate_batches("test", 5))
    assert torch.equal(torch.rand(1), expected)
    after: Any = np.random.get_state()
    assert np.array_equal(after[1], state[1])


def test_batch_contains_questions_and_answers() -> None:
    batch = DATA.make_train_batch(3)
    assert len(batch) == 4 and batch.crops.shape == (4, 14, 3, 8, 8)
    assert batch.crops.min() >= -1.0 and batch.crops.max() <= 1.0
    assert batch.cells.shape == (4, 4) and batch.cells.max() <= DATA.num_labels - 1 == 2 * 4
    for row, mask, prompt, length in zip(
        batch.text, batch.answer_mask, batch.prompts, batch.lengths, strict=True
    ):
        assert row[prompt - 1] == DATA.vocabulary.answer
        # The tokens that follow where the mask says: the answer and its end.
        assert torch.equal(row[1:][mask], row[prompt:length])
        assert row[length - 1] == DATA.vocabulary.eos


@pytest.mark.parametrize("split", SPLITS)
def test_samples_do_not_depend_on_batch_size(split: Any) -> None:
    first = list(DATA.iterate_batches(split, CHUNK + 20, batch_size=100))
    assert [len(batch) for batch in first] == [100, 100, 56, 20]
    other = list(DATA.iterate_batches(split, CHUNK + 5))
    assert [len(batch) for batch in other] == [CHUNK, 5]
    crops = [torch.cat([batch.crops for batch in batches])[: CHUNK + 5] for batches in (first, other)]
    assert torch.equal(*crops)
    questions = list(DATA.iterate_questions(split, CHUNK + 5))
    assert [len(question) for question in questions] == [CHUNK, 5]
    lengths = [batch.lengths for batch in other]
    assert torch.equal(
        torch.cat(lengths), torch.from_numpy(np.concatenate([question.lengths for question in questions]))
    )


def test_samples_of_splits_differ() -> None:
    crops = {split: next(DATA.iterate_batches(split, 4)).crops for split in SPLITS}
    assert not torch.equal(crops["val"], crops["test"]) and not torch.equal(crops["train"], crops["test"])


def test_iterate_samples_equals_batches() -> None:
    (batch,) = DATA.iterate_batches("test", 10)
    image, words = DATA.vocabulary.image, DATA.vocabulary
    for index, sample in enumerate(DATA.iterate_samples("test", 10)):
        assert sample.kind == KINDS[batch.kinds[index]]
        assert torch.equal(sample.inputs["pixel_values"], batch.crops[index])
        ids = sample.inputs["input_ids"]
        assert ids[0, 0] == words.bos and (ids[0, 1:57] == image).all() and (ids == image).sum() == 56
        prompt, length = batch.prompts[index], batch.lengths[index]
        assert torch.equal(ids[0, 57:], batch.text[index, :prompt])
        assert sample.question == words.text(batch.text[index, :prompt].tolist())
        assert sample.answer == words.text(batch.text[index, prompt:length].tolist())
        assert sample.canvas.shape == (24, 24, 3) and sample.canvas.dtype == np.uint8


def test_naming_batch_cells_are_those_of_scene() -> None:
    (batch,) = DATA.iterate_batches("test", 200)
    questions = next(DATA.iterate_questions("test", 200))
    names, small = questions.scenes.names, questions.scenes.small
    expected = np.where(names == NOTHING, 8, np.where(small, names + 4, names))
    assert np.array_equal(batch.cells.numpy(), expected) and set(expected.ravel()) >= {0, 1, 2, 3, 5, 6, 8}


def test_naming_batch_blends_fraction_of_cells() -> None:
    named = VqaDataset(quick(**{"train.batch_size": 100, "train.mix": 0.5}), bank=bank()).make_naming_batch(0)
    mixed = named.fractions < 1.0
    assert 0.2 < mixed.float().mean() < 0.5
    assert torch.equal(named.cells[~mixed], named.blended_cells[~mixed])
    assert (named.cells[mixed] < 4).all() and (named.blended_cells[mixed] < 4).all(), (
        "only large items are blended"
    )
    plain = VqaDataset(quick(**{"train.mix": 0.0}), bank=bank()).make_naming_batch(0)
    assert torch.equal(plain.cells, plain.blended_cells) and (plain.fractions == 1.0).all()


def test_naming_batch_follows_name_weights() -> None:
    messages = {"batch_size": 500, "vision_weights": {"cat": 5.0, "two": 0.0}, "vision_small": 0.2}
    settings = quick(**{f"train.{name}": value for name, value in messages.items()})
    cells = VqaDataset(settings, bank=bank()).make_naming_batch(0).cells.flatten()
    big = torch.bincount(cells[cells < 4], minlength=4) / (cells < 4).sum()
    assert torch.allclose(big, torch.tensor([5.0, 1.0, 0.0, 1.0]) / 7.0, atol=0.04)
    assert 0.17 < ((cells >= 4) & (cells < 8)).float().mean() < 0.23


def test_dataset_with_unknown_names_raises() -> None:
    with pytest.raises(InputError, match="no images of 'pig'"):
        VqaDataset(quick(**{"images.question_names": ["cat", "one", "pig"]}), bank=bank())
    with pytest.raises(InputError, match=r"`train\.vision_weights` .*'pig'"):
        VqaDataset(quick(**{"train.vision_weights": {"pig": 1.0}}), bank=bank())
    empty = dict.fromkeys(bank().names, 0.0)
    with pytest.raises(InputError, match=r"train.vision_weights"):
        VqaDataset(quick(**{"train.vision_weights": empty}), bank=bank())


def test_train_batch_type() -> None:
    assert isinstance(DATA.make_train_batch(0), VqaBatch)
