"""Batches of Grid-VQA, made when asked for: nothing is stored, and a number says all of a batch.

Training batches are drawn from (seed, step, process), samples of the other splits from (their chunk's
number), so any process may make any of them, in any order, again and again the same. Only small arrays are
drawn on the CPU; canvases and crops are painted on the device that computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseflow.adaptive.adapters.crops import CROPS, make_nested_crops
from sparseflow.adaptive.grid_vqa.config import KINDS, Kind, VqaConfig
from sparseflow.adaptive.grid_vqa.images import ImageBank, Split, bank_of
from sparseflow.adaptive.grid_vqa.question_generator import QuestionBatch, QuestionDomain, draw, draw_names
from sparseflow.adaptive.grid_vqa.scenes import NOTHING, SceneAppearance, SceneBatch, looks_of, paint
from sparseflow.adaptive.plan.space import Tier
from sparseflow.errors import InputError

CHUNK = 256
"""Samples of a split that are drawn at once; which they are does not depend on how many are asked for."""

MEAN = STD = (0.5, 0.5, 0.5)
"""Of pixels: those of SigLIP's processor."""

_TRAIN, _VISION, _JUDGE = range(3)


@dataclass(frozen=True, kw_only=True, eq=False)
class VqaBatch:
    """Samples on a device.

    Attributes:
        crops: Pixels from -1 to 1, coarse to fine: [B, crops, 3, side, side] float32; 14 at the highest tier.
        cells: What lies in each cell: the name, or names + name where it is small, or 2 · names where nothing
            is: [B, cells] int64.
        text: Question, `<answer>`, answer, `<eos>`, padding: [B, tokens] int64.
        prompts: Tokens up to and with `<answer>`, [B] int64.
        lengths: Tokens without padding, [B] int64.
        kinds: Index into `settings.KINDS`, [B] int64.
    """

    crops: Tensor
    cells: Tensor
    text: Tensor
    prompts: Tensor
    lengths: Tensor
    kinds: Tensor

    def __len__(self) -> int:
        return len(self.crops)

    @property
    def answered(self) -> Tensor:
        """Where the next token is one of the answer's, or its end: [B, tokens - 1] bool."""
        at = torch.arange(self.text.shape[1] - 1, device=self.text.device)
        return (at >= self.prompts[:, None] - 1) & (at < self.lengths[:, None] - 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class NamingBatch:
    """Canvases of which every cell is to be named.

    Attributes:
        crops: As in `Batch`.
        cells: As in `Batch`.
        blends: The same of what is blended in; equal to `cells` where nothing is.
        shares: Of `cells` in what a cell shows, 0.5 to 1: [B, cells] float32.
    """

    crops: Tensor
    cells: Tensor
    blends: Tensor
    shares: Tensor


@dataclass(frozen=True, kw_only=True)
class VqaSample:
    """One question as a server gets it.

    Attributes:
        kind: Of the question.
        question: In words.
        answer: In words.
        canvas: [side, side, 3] uint8.
        inputs: What the model's forward takes at the highest tier, batch 1: `input_ids` and `attention_mask`
            [1, tokens] int64, `pixel_values` [14, 3, crop, crop] float32.
    """

    kind: Kind
    question: str
    answer: str
    canvas: np.ndarray
    inputs: dict[str, Any]


class VqaDataset:
    """Everything that is drawn for a task.

    Args:
        settings: The task.
        device: Where to paint.
        bank: Images in place of those that the settings name.

    Raises:
        InputError: Images are missing, too few names are asked about, or `vision_weights` names others.
        FileFormatError: An archive is damaged.
        MissingExtraError: A package is missing.
    """

    def __init__(
        self, settings: VqaConfig, device: torch.device | str = "cpu", *, bank: ImageBank | None = None
    ) -> None:
        told = settings.images
        if bank is None:
            bank = bank_of(digits=told.digits, archives=told.archives, seed=told.seed)
        self.settings, self.bank, self.device = settings, bank, torch.device(device)
        self.world = QuestionDomain(
            names=bank.names, asked=told.asked or bank.names, grid=settings.scene.grid
        )
        self.vocabulary = self.world.vocabulary
        self._often = _often(bank.names, settings.train.vision_weights)
        self._images = torch.from_numpy(bank.images).to(self.device)

    @property
    def labels(self) -> int:
        """What `Batch.cells` can be."""
        return 2 * len(self.bank.names) + 1

    def train(
        self, step: int, rank: int = 0, *, tier: Tier = "high", batch_size: int | None = None
    ) -> VqaBatch:
        """The batch of a step of a process, with the crops of a tier; by default of the training's size."""
        told = self.settings.train
        random = np.random.default_rng([told.seed, _TRAIN, step, rank])
        questions = draw(self.world, told.shares, batch_size or told.batch_size, random)
        looks = looks_of(
            questions.scenes, self.bank, "train", self.settings.scene, random, augment=told.augment
        )  # fmt: skip
        return self._batch(questions, looks, tier)

    def named(self, step: int, rank: int = 0) -> NamingBatch:
        """The batch of a step in which the vision tower learns alone."""
        told = self.settings.train
        random = np.random.default_rng([told.seed, _VISION, step, rank])
        scenes = draw_names(self.world, self._often, told.vision_small, told.batch_size, random)
        others = random.choice(len(self._often), scenes.names.shape, p=self._often)
        mixed = (random.random(scenes.names.shape) < told.mix) & (scenes.names != NOTHING) & ~scenes.small
        looks = looks_of(
            scenes, self.bank, "train", self.settings.scene, random, augment=told.augment,
            blend=np.where(mixed, others, NOTHING),
        )  # fmt: skip
        shares = np.ones(scenes.names.size, np.float32)
        shares[looks.cells] = looks.share
        blends = SceneBatch(names=np.where(mixed, others, scenes.names), small=scenes.small)
        return NamingBatch(
            crops=self._crops(looks), cells=self._cells(scenes), blends=self._cells(blends),
            shares=torch.from_numpy(shares.reshape(scenes.names.shape)).to(self.device, non_blocking=True),
        )  # fmt: skip

    def judged(self, split: Split, count: int, *, first: int = 0, size: int = CHUNK) -> Iterator[VqaBatch]:
        """`count` samples of a split from the `first` on, `size` at a time or fewer.

        Raises:
            InputError: `first` is no multiple of `CHUNK`.
        """
        if first < 0 or first % CHUNK:
            raise InputError(f"`first` (={first}) must be a multiple of {CHUNK}")
        for questions, looks in self._chunks(split, count, first // CHUNK):
            for begin in range(0, len(questions), size):
                end = min(begin + size, len(questions))
                yield self._batch(questions.part(begin, end), looks.part(begin, end, self.world.cells))

    def questions(self, split: Split, count: int) -> Iterator[QuestionBatch]:
        """The questions of the same samples, without their canvases."""
        for questions, _ in self._chunks(split, count):
            yield questions

    def samples(self, split: Split, count: int) -> Iterator[VqaSample]:
        """The same samples one by one, as requests."""
        for questions, looks in self._chunks(split, count):
            for at in range(len(questions)):
                one = questions.part(at, at + 1)
                canvas = paint(looks.part(at, at + 1, self.world.cells), self._images, self.settings.scene)
                prompt, length = int(one.prompts[0]), int(one.lengths[0])
                yield VqaSample(
                    kind=KINDS[one.kinds[0]],
                    question=self.vocabulary.text(one.text[0, :prompt]),
                    answer=self.vocabulary.text(one.text[0, prompt:length]),
                    canvas=canvas[0].permute(1, 2, 0).cpu().numpy(),
                    inputs=self.inputs(canvas, one.text[0, :prompt]),
                )

    def inputs(self, canvas: Tensor, prompt: np.ndarray) -> dict[str, Any]:
        """A request at the highest tier.

        Args:
            canvas: [1, 3, side, side] uint8.
            prompt: The question with `<answer>`, [tokens] int64.
        """
        model = self.settings.model
        vision = np.full(CROPS["high"] * model.crop_tokens, self.vocabulary.image)
        ids = torch.from_numpy(np.concatenate([[self.vocabulary.bos], vision, prompt]))[None].to(self.device)
        pixels = make_nested_crops(canvas.to(self.device), model.crop_px, mean=MEAN, std=STD)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}

    def _chunks(
        self, split: Split, count: int, before: int = 0
    ) -> Iterator[tuple[QuestionBatch, SceneAppearance]]:
        code = {"train": 0, "val": 1, "test": 2}[split]
        for chunk in range(-(-count // CHUNK)):
            random = np.random.default_rng([self.settings.images.seed, _JUDGE, code, before + chunk])
            questions = draw(self.world, self.settings.test_shares, CHUNK, random)
            looks = looks_of(questions.scenes, self.bank, split, self.settings.scene, random)
            last = min(CHUNK, count - chunk * CHUNK)
            yield questions.part(0, last), looks.part(0, last, self.world.cells)

    def _batch(self, questions: QuestionBatch, looks: SceneAppearance, tier: Tier = "high") -> VqaBatch:
        numbers = np.concatenate(
            [
                questions.text,
                questions.prompts[:, None],
                questions.lengths[:, None],
                questions.kinds[:, None],
            ],
            axis=1,
        )
        told = torch.from_numpy(numbers).to(self.device, non_blocking=True)
        return VqaBatch(
            crops=self._crops(looks, tier), cells=self._cells(questions.scenes), text=told[:, :-3],
            prompts=told[:, -3], lengths=told[:, -2], kinds=told[:, -1],
        )  # fmt: skip

    def _crops(self, looks: SceneAppearance, tier: Tier = "high") -> Tensor:
        canvases = paint(looks, self._images, self.settings.scene)
        crops = make_nested_crops(canvases, self.settings.model.crop_px, mean=MEAN, std=STD, tier=tier)
        return crops.unflatten(0, (len(canvases), -1))

    def _cells(self, scenes: SceneBatch) -> Tensor:
        names = len(self.bank.names)
        found = np.where(scenes.names == NOTHING, 2 * names, scenes.names + names * scenes.small)
        return torch.from_numpy(found).to(self.device, non_blocking=True)


def _often(names: Sequence[str], weights: Mapping[str, float]) -> np.ndarray:
    """How often each name is to be named, [names], summing up to 1.

    Raises:
        InputError: A weight is of no name, or all are 0.
    """
    unknown = [name for name in weights if name not in names]
    if unknown:
        raise InputError(
            f"`train.vision_weights` names {unknown[0]!r}; there are images of {', '.join(names)}"
        )
    found = np.array([weights.get(name, 1.0) for name in names])
    if found.sum() == 0.0:
        raise InputError("`train.vision_weights` are all 0: the vision tower would be shown nothing")
    return found / found.sum()
