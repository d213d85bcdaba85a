"""Asking a model: questions become prompts as in serving, and run in batches under a plan.

An answer is right if greedy decoding gives its text, but for blanks and case. Once all answers of a batch can
no longer become right, or are over, it ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparseflow.adaptive.api import attach
from sparseflow.adaptive.controllers.language_features import language_features
from sparseflow.adaptive.engine.batch import free_memory, is_out_of_memory
from sparseflow.adaptive.engine.decode import last_logits
from sparseflow.adaptive.engine.generate import generate
from sparseflow.adaptive.plan.space import Plan, Tier
from sparseflow.adaptive.profile.memory import fitting
from sparseflow.adaptive.prompts.chat import PromptBuilder
from sparseflow.adaptive.prompts.messages import Prompt
from sparseflow.adaptive.prompts.model_folder import ModelFolder
from sparseflow.adaptive.questions.file import Question
from sparseflow.errors import InputError

ROWS, TOKENS = 32, 16384
"""Most questions of a batch, and most tokens of their prompts, padding included."""

T = TypeVar("T")

_BROKEN = "\ufffd"
"""What the part of a character that is there so far is decoded to."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedQuestion:
    """A question that can be asked.

    Attributes:
        prompt: On the CPU, in the model's number format.
        answer: As `plain` gives it.
        max_new_tokens: Most tokens of an answer.
        new_tokens: Of the right answer, its end included.
        tiers: Those at which the model has room for it and its answer, ascending; None without image.
    """

    prompt: Prompt
    answer: str
    max_new_tokens: int
    new_tokens: int
    tiers: tuple[Tier | None, ...]


class QuestionRunner:
    """A model with knobs that is asked.

    Args:
        there: The model, as a server has it; its knobs are put on.
        most_tokens: Of a prompt and its answer together, where they are served; by default as many as the
            model's context has.

    Attributes:
        adapter: The model.
        knobs: Those on it.
        stop: Tokens that end an answer.

    Raises:
        InputError: The tokenizer has no chat template.
        ModelError: The model cannot have knobs.
    """

    def __init__(self, there: ModelFolder, most_tokens: int | None = None) -> None:
        attached = attach(there.model)
        self.adapter, self.knobs, self.stop = attached.adapter, attached.knobs, attached.stop
        self.model, self._tokenizer = there.model, there.tokenizer
        context = there.context if most_tokens is None else min(there.context, most_tokens)
        self._prompts = PromptBuilder(there.tokenizer, context=context, sight=there.sight, stop=self.stop)

    def close(self) -> None:
        """Take the knobs off."""
        self.knobs.remove()

    def identity(self, some: Sequence[PreparedQuestion]) -> dict[str, Any]:
        """What answers depend on beside weights and questions, as JSON keeps it.

        Args:
            some: Questions. By the inputs of the first with an image, and of the first without, a change of
                tokenizer or of the images' preparation shows.
        """
        inputs = hashlib.sha256()
        for each in first_of_each(some, lambda one: bool(one.prompt.vision_tokens)):
            for name, value in sorted(each.prompt.inputs.items()):
                inputs.update(f"{name} {list(value.shape)}".encode())
                inputs.update(value.float().numpy().tobytes())
        return {
            "inputs": inputs.hexdigest(), "stop": sorted(self.stop), "context": self._prompts.context,
            "template": hashlib.sha256(str(self._tokenizer.chat_template).encode()).hexdigest(),
        }  # fmt: skip

    def ready(self, question: Question) -> PreparedQuestion:
        """A question as a prompt.

        Raises:
            InputError: An image is damaged, the model takes none, or the prompt (at the lowest tier) or the
                answer is too long; the message names file and line.
        """
        answer = len(self._tokenizer.encode(question.answer.strip(), add_special_tokens=False)) + 1
        if answer > question.max_new_tokens + 1:
            raise InputError(
                f"{question.where}: the answer as it is written has {answer - 1} tokens, and "
                f"`max_new_tokens` is {question.max_new_tokens}; allow more"
            )
        try:
            prompt = self._prompts.of_user(question.prompt, question.images, question.max_new_tokens)
        except InputError as error:
            raise InputError(f"{question.where}: {error}") from error
        tiers = fitting(
            prompt.vision, text_tokens=prompt.text_tokens, new_tokens=question.max_new_tokens,
            max_tokens=self._prompts.context,
        )  # fmt: skip
        dtype = self.adapter.model.dtype
        inputs = {
            name: each.to(dtype) if each.is_floating_point() else each for name, each in prompt.inputs.items()
        }
        return PreparedQuestion(
            prompt=replace(prompt, inputs=inputs), answer=plain(question.answer),
            max_new_tokens=question.max_new_tokens, new_tokens=min(answer, question.max_new_tokens),
            tiers=tiers or (None,),
        )  # fmt: skip

    def right(self, questions: Sequence[PreparedQuestion], plan: Plan) -> list[bool]:
        """Which questions of a batch are answered right under a plan.

        Where memory is too small for all of them, they are asked by halves.

        Args:
            questions: As `batches` puts them together.
            plan: Of a tier that they have room at.

        Raises:
            PlanError: The model cannot run it.
            RunError: The model gives NaN.
        """
        return [one for part in _by_halves(lambda some: self._right(some, plan), questions) for one in part]

    def language(self, questions: Sequence[PreparedQuestion]) -> Tensor:
        """What Stage 1 looks at, of a batch: [questions, d] float32, on the CPU."""
        return torch.cat(_by_halves(self._language, questions))

    def latency_tokens(self, questions: Sequence[PreparedQuestion], tier: Tier | None) -> Tensor:
        """What Stage 2 looks at.

        Args:
            questions: As `batches` puts them together.
            tier: One that they have room at.

        Returns:
            The last prompt token as it leaves the block before each insertion position: [questions,
            positions, d] float32, on the CPU.
        """
        return torch.cat(_by_halves(lambda some: self._latency_tokens(some, tier), questions))

    def _language(self, questions: Sequence[PreparedQuestion]) -> Tensor:
        inputs = self._joined(questions)
        return language_features(self.adapter, inputs["input_ids"], inputs["attention_mask"]).cpu()

    @torch.no_grad()
    def _latency_tokens(self, questions: Sequence[PreparedQuestion], tier: Tier | None) -> Tensor:
        adapter, found = self.adapter, []
        inputs = adapter.at_tier(self._joined(questions), tier)
        places, _ = adapter.positions(inputs)
        full = replace(adapter.geometry.full(images=False), tier=tier)
        hooks = [
            adapter.blocks[position - 1].register_forward_hook(
                lambda block, given, output: found.append(adapter.hidden(output)[:, -1])
            )
            for position in adapter.geometry.positions
        ]
        try:
            with self.knobs.running(full):
                adapter.model(
                    **{**inputs, "position_ids": places}, use_cache=False, **last_logits(adapter.model)
                )
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack(found, 1).float().cpu()

    def _right(self, questions: Sequence[PreparedQuestion], plan: Plan) -> list[bool]:
        rows = [_AnswerMatcher(each, self._tokenizer, self.stop) for each in questions]

        def hear(tokens: list[int]) -> None:
            for row, token in zip(rows, tokens, strict=True):
                row.hear(token)
            if all(row.right is not None for row in rows):
                raise _AllAnswersKnown

        with suppress(_AllAnswersKnown):
            generate(
                self.adapter, self.knobs, self._joined(questions), plan,
                max_new_tokens=questions[0].max_new_tokens, stop=self.stop, on_tokens=hear,
            )  # fmt: skip
        return [bool(row.right) for row in rows]

    def _joined(self, questions: Sequence[PreparedQuestion]) -> dict[str, Tensor]:
        """Questions as one batch, padded on their left, where the model is."""
        longest = max(each.prompt.tokens for each in questions)
        found = {}
        for name, first in questions[0].prompt.inputs.items():
            values = [each.prompt.inputs[name] for each in questions]
            if _of_tokens(first, questions[0]):
                values = [torch.nn.functional.pad(each, (longest - each.shape[1], 0)) for each in values]
            found[name] = torch.cat(values).to(self.adapter.model.device)
        return found


def batches(questions: Sequence[PreparedQuestion], tier: Tier | None) -> list[list[int]]:
    """Places of questions that can run together at a tier, or of those without image where it is None.

    They have as many tokens for an answer, and images of like sizes. Those that have no room at the tier are
    left out.
    """
    alike: dict[Any, list[int]] = {}
    for at, each in enumerate(questions):
        if tier in each.tiers:
            alike.setdefault(_likeness(each), []).append(at)
    found = []
    for places in alike.values():
        batch: list[int] = []
        for at in sorted(places, key=lambda at: (questions[at].prompt.tokens, at)):
            if batch and (len(batch) == ROWS or (len(batch) + 1) * questions[at].prompt.at(tier) > TOKENS):
                found.append(batch)
                batch = []
            batch.append(at)
        found.append(batch)
    return found


def first_of_each(some: Iterable[T], sees: Callable[[T], bool]) -> list[T]:
    """The first without an image and the first with one, as far as there are any."""
    found: dict[bool, T] = {}
    for each in some:
        found.setdefault(sees(each), each)
    return [found[key] for key in sorted(found)]


def plain(text: str) -> str:
    """A text without case, and with blanks only between words, one each."""
    return " ".join(text.casefold().split())


def _by_halves(
    call: Callable[[Sequence[PreparedQuestion]], T], questions: Sequence[PreparedQuestion]
) -> list[T]:
    """What a call gives of a batch, or of its parts where memory is too small for all of it."""
    try:
        return [call(questions)]
    except (RuntimeError, MemoryError) as error:
        if len(questions) == 1 or not is_out_of_memory(error):
            raise
    free_memory()
    half = len(questions) // 2
    return [*_by_halves(call, questions[:half]), *_by_halves(call, questions[half:])]


class _AllAnswersKnown(Exception):
    """Whether each answer of a batch is right is known."""


class _AnswerMatcher:
    """An answer while its tokens come in.

    Attributes:
        right: Whether it is; None while that is open.
    """

    def __init__(self, question: PreparedQuestion, tokenizer: Any, stop: Collection[int]) -> None:
        self.right: bool | None = None
        self._question, self._tokenizer, self._stop = question, tokenizer, frozenset(stop)
        self._ids: list[int] = []

    def hear(self, token: int) -> None:
        """Take the next token."""
        if self.right is not None:
            return
        over = token in self._stop
        if not over:
            self._ids.append(token)
            over = len(self._ids) == self._question.max_new_tokens
        text, answer = self._tokenizer.decode(self._ids, skip_special_tokens=True), self._question.answer
        if over:
            self.right = plain(text) == answer
        elif not _solid(answer).startswith(_solid(text.rstrip(_BROKEN))):
            self.right = False


def _solid(text: str) -> str:
    """Without blanks: tokenizers may take some back when more tokens come."""
    return "".join(text.casefold().split())


def _of_tokens(value: Tensor, question: PreparedQuestion) -> bool:
    """Whether a value has an entry for each token."""
    return value.shape == question.prompt.inputs["input_ids"].shape


def _likeness(question: PreparedQuestion) -> tuple[Any, ...]:
    others = (
        (name, tuple(value.shape), () if value.is_floating_point() else tuple(value.flatten().tolist()))
        for name, value in question.prompt.inputs.items()
        if not _of_tokens(value, question)
    )
    return (question.max_new_tokens, question.prompt.vision_tokens, *others)
