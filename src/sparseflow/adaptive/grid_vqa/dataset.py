"""Batches of Grid-VQA, generated on demand.

A training batch is a function of (seed, step, process), a chunk of another split of its index. Any process
can generate any of them in any order. Only small arrays are sampled on the CPU; canvases and crops are
rendered on the device that computes.
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
from sparseflow.adaptive.grid_vqa.images import ImageBank, Split, load_image_bank
from sparseflow.adaptive.grid_vqa.question_generator import (
    QuestionBatch,
    QuestionDomain,
    sample_questions,
    sample_scenes,
)
from sparseflow.adaptive.grid_vqa.scenes import (
    NOTHING,
    SceneAppearance,
    SceneBatch,
    render,
    sample_appearance,
)
from sparseflow.adaptive.plan.space import Tier
from sparseflow.errors import InputError

CHUNK = 256
"""Samples of a split that are generated together, independent of the number requested."""

MEAN = STD = (0.5, 0.5, 0.5)
"""Pixel statistics of SigLIP's image processor."""

_TRAIN, _VISION, _JUDGE = range(3)


@dataclass(frozen=True, kw_only=True, eq=False)
class VqaBatch:
    """Samples on a device.

    Attributes:
        crops: Pixels from -1 to 1, coarse to fine, [B, crops, 3, side, side] float32; 14 crops at the highest
            tier.
        cells: Content of each cell, [B, cells] int64: the name, names + name if small, or 2 names if empty.
        text: Question, `<answer>`, answer, `<eos>`, padding, [B, tokens] int64.
        prompts: Tokens up to and including `<answer>`, [B] int64.
        lengths: Tokens without padding, [B] int64.
        kinds: Index into `config.KINDS`, [B] int64.
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
    def answer_mask(self) -> Tensor:
        """Positions whose next token belongs to the answer or is its end: [B, tokens - 1] bool."""
        index = torch.arange(self.text.shape[1] - 1, device=self.text.device)
        return (index >= self.prompts[:, None] - 1) & (index < self.lengths[:, None] - 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class NamingBatch:
    """Canvases whose cells are to be named.

    Attributes:
        crops: As in `VqaBatch`.
        cells: As in `VqaBatch`.
        blended_cells: Content of the blended images; equal to `cells` without blending.
        fractions: Weight of `cells` in the blend, 0.5 to 1, [B, cells] float32.
    """

    crops: Tensor
    cells: Tensor
    blended_cells: Tensor
    fractions: Tensor


@dataclass(frozen=True, kw_only=True)
class VqaSample:
    """A question as a request.

    Attributes:
        kind: Kind of question.
        question: Text of the question.
        answer: Text of the answer.
        canvas: [side, side, 3] uint8.
        inputs: Inputs of the model at the highest tier, batch size 1: `input_ids` and `attention_mask`
            [1, tokens] int64, `pixel_values` [14, 3, crop, crop] float32.
    """

    kind: Kind
    question: str
    answer: str
    canvas: np.ndarray
    inputs: dict[str, Any]


class VqaDataset:
    """Generator of the samples of a task.

    Args:
        config: Task.
        device: Device of the rendering.
        bank: Images that replace those of the config.

    Raises:
        InputError: Images are missing, there are too few question names, or `vision_weights` has unknown
            names.
        FileFormatError: An archive is damaged.
        MissingExtraError: A package is missing.
    """

    def __init__(
        self, config: VqaConfig, device: torch.device | str = "cpu", *, bank: ImageBank | None = None
    ) -> None:
        images = config.images
        if bank is None:
            bank = load_image_bank(digits=images.digits, archives=images.archives, seed=images.seed)
        self.config, self.bank, self.device = config, bank, torch.device(device)
        self.domain = QuestionDomain(
            names=bank.names, question_names=images.question_names or bank.names, grid=config.scene.grid
        )
        self.vocabulary = self.domain.vocabulary
        self._name_frequencies = _compute_name_frequencies(bank.names, config.train.vision_weights)
        self._images = torch.from_numpy(bank.images).to(self.device)

    @property
    def num_labels(self) -> int:
        """Number of values of `VqaBatch.cells`."""
        return 2 * len(self.bank.names) + 1

    def make_train_batch(
        self, step: int, rank: int = 0, *, tier: Tier = "high", batch_size: int | None = None
    ) -> VqaBatch:
        """Make the batch of a step of a process, with the crops of a tier; by default of the training's batch
        size.
        """
        config = self.config.train
        generator = np.random.default_rng([config.seed, _TRAIN, step, rank])
        questions = sample_questions(self.domain, config.shares, batch_size or config.batch_size, generator)
        appearance = sample_appearance(
            questions.scenes, self.bank, "train", self.config.scene, generator, augment=config.augment
        )  # fmt: skip
        return self._make_batch(questions, appearance, tier)

    def make_naming_batch(self, step: int, rank: int = 0) -> NamingBatch:
        """Make the batch of a step of the first part."""
        config = self.config.train
        generator = np.random.default_rng([config.seed, _VISION, step, rank])
        scenes = sample_scenes(
            self.domain, self._name_frequencies, config.vision_small, config.batch_size, generator
        )
        blended_names = generator.choice(
            len(self._name_frequencies), scenes.names.shape, p=self._name_frequencies
        )
        is_blended = (
            (generator.random(scenes.names.shape) < config.mix) & (scenes.names != NOTHING) & ~scenes.small
        )
        appearance = sample_appearance(
            scenes, self.bank, "train", self.config.scene, generator, augment=config.augment,
            blend=np.where(is_blended, blended_names, NOTHING),
        )  # fmt: skip
        fractions = np.ones(scenes.names.size, np.float32)
        fractions[appearance.cells] = appearance.fractions
        blended_scenes = SceneBatch(
            names=np.where(is_blended, blended_names, scenes.names), small=scenes.small
        )
        return NamingBatch(
            crops=self._make_crops(appearance),
            cells=self._make_cells(scenes),
            blended_cells=self._make_cells(blended_scenes),
            fractions=torch.from_numpy(fractions.reshape(scenes.names.shape)).to(
                self.device, non_blocking=True
            ),
        )

    def iterate_batches(
        self, split: Split, count: int, *, first: int = 0, batch_size: int = CHUNK
    ) -> Iterator[VqaBatch]:
        """Iterate over `count` samples of a split from index `first`, at most `batch_size` at a time.

        Raises:
            InputError: `first` is not a multiple of `CHUNK`.
        """
        if first < 0 or first % CHUNK:
            raise InputError(f"`first` (={first}) must be a multiple of {CHUNK}")
        for questions, appearance in self._iterate_chunks(split, count, first // CHUNK):
            for start in range(0, len(questions), batch_size):
                end = min(start + batch_size, len(questions))
                yield self._make_batch(
                    questions.select(start, end), appearance.select(start, end, self.domain.cells)
                )

    def iterate_questions(self, split: Split, count: int) -> Iterator[QuestionBatch]:
        """Iterate over the questions of the same samples, without canvases."""
        for questions, _ in self._iterate_chunks(split, count):
            yield questions

    def iterate_samples(self, split: Split, count: int) -> Iterator[VqaSample]:
        """Iterate over the same samples as requests."""
        for questions, appearance in self._iterate_chunks(split, count):
            for index in range(len(questions)):
                question = questions.select(index, index + 1)
                canvas = render(
                    appearance.select(index, index + 1, self.domain.cells), self._images, self.config.scene
                )
                prompt, length = int(question.prompts[0]), int(question.lengths[0])
                yield VqaSample(
                    kind=KINDS[question.kinds[0]],
                    question=self.vocabulary.text(question.text[0, :prompt]),
                    answer=self.vocabulary.text(question.text[0, prompt:length]),
                    canvas=canvas[0].permute(1, 2, 0).cpu().numpy(),
                    inputs=self.make_inputs(canvas, question.text[0, :prompt]),
                )

    def make_inputs(self, canvas: Tensor, prompt: np.ndarray) -> dict[str, Any]:
        """Make the inputs of a request at the highest tier.

        Args:
            canvas: [1, 3, side, side] uint8.
            prompt: Question with `<answer>`, [tokens] int64.
        """
        model = self.config.model
        vision = np.full(CROPS["high"] * model.crop_tokens, self.vocabulary.image)
        ids = torch.from_numpy(np.concatenate([[self.vocabulary.bos], vision, prompt]))[None].to(self.device)
        pixels = make_nested_crops(canvas.to(self.device), model.crop_px, mean=MEAN, std=STD)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}

    def _iterate_chunks(
        self, split: Split, count: int, first_chunk: int = 0
    ) -> Iterator[tuple[QuestionBatch, SceneAppearance]]:
        split_index = {"train": 0, "val": 1, "test": 2}[split]
        for chunk in range(-(-count // CHUNK)):
            generator = np.random.default_rng(
                [self.config.images.seed, _JUDGE, split_index, first_chunk + chunk]
            )
            questions = sample_questions(self.domain, self.config.test_shares, CHUNK, generator)
            appearance = sample_appearance(questions.scenes, self.bank, split, self.config.scene, generator)
            count_in_chunk = min(CHUNK, count - chunk * CHUNK)
            yield questions.select(0, count_in_chunk), appearance.select(0, count_in_chunk, self.domain.cells)

    def _make_batch(
        self, questions: QuestionBatch, appearance: SceneAppearance, tier: Tier = "high"
    ) -> VqaBatch:
        numbers = np.concatenate(
            [
                questions.text,
                questions.prompts[:, None],
                questions.lengths[:, None],
                questions.kinds[:, None],
            ],
            axis=1,
        )
        tensor = torch.from_numpy(numbers).to(self.device, non_blocking=True)
        return VqaBatch(
            crops=self._make_crops(appearance, tier),
            cells=self._make_cells(questions.scenes),
            text=tensor[:, :-3],
            prompts=tensor[:, -3],
            lengths=tensor[:, -2],
            kinds=tensor[:, -1],
        )

    def _make_crops(self, appearance: SceneAppearance, tier: Tier = "high") -> Tensor:
        canvases = render(appearance, self._images, self.config.scene)
        crops = make_nested_crops(canvases, self.config.model.crop_px, mean=MEAN, std=STD, tier=tier)
        return crops.unflatten(0, (len(canvases), -1))

    def _make_cells(self, scenes: SceneBatch) -> Tensor:
        names = len(self.bank.names)
        cells = np.where(scenes.names == NOTHING, 2 * names, scenes.names + names * scenes.small)
        return torch.from_numpy(cells).to(self.device, non_blocking=True)


def _compute_name_frequencies(names: Sequence[str], weights: Mapping[str, float]) -> np.ndarray:
    """Frequency of each name, [names], with sum 1."""
    unknown = [name for name in weights if name not in names]
    if unknown:
        raise InputError(f"`train.vision_weights` contains {unknown[0]!r}; names are {', '.join(names)}")
    frequencies = np.array([weights.get(name, 1.0) for name in names])
    if frequencies.sum() == 0.0:
        raise InputError("`train.vision_weights` must not all be 0")
    return frequencies / frequencies.sum()
