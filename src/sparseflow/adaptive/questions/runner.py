"""Runs questions on a model: prompts are built as in serving and run in batches under a plan.

An answer is correct if greedy decoding gives its text, except for whitespace and case. A batch ends as soon
as the correctness of all its answers is known.
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
from sparseflow.adaptive.controllers.language_features import mean_text_embedding
from sparseflow.adaptive.engine.batch import free_memory, is_out_of_memory
from sparseflow.adaptive.engine.decode import last_logits_args
from sparseflow.adaptive.engine.generate import generate
from sparseflow.adaptive.plan.space import Plan, Tier
from sparseflow.adaptive.profile.memory import select_fitting_tiers
from sparseflow.adaptive.prompts.chat import PromptBuilder
from sparseflow.adaptive.prompts.messages import Prompt
from sparseflow.adaptive.prompts.model_folder import ModelFolder
from sparseflow.adaptive.questions.file import Question
from sparseflow.errors import InputError

MAX_BATCH_SIZE, MAX_BATCH_TOKENS = 32, 16384
"""Maximum questions of a batch, and maximum tokens of their prompts including padding."""

T = TypeVar("T")

_INCOMPLETE_CHARACTER = "\ufffd"
"""Decoded text of the first bytes of a character."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedQuestion:
    """A question that is ready to run.

    Attributes:
        prompt: Prompt on the CPU, in the model's number format.
        answer: Answer, as returned by `normalize_text`.
        max_new_tokens: Maximum tokens of an answer.
        new_tokens: Tokens of the correct answer, including its end.
        tiers: Tiers at which it and its answer fit, ascending; (None,) without images.
    """

    prompt: Prompt
    answer: str
    max_new_tokens: int
    new_tokens: int
    tiers: tuple[Tier | None, ...]


class QuestionRunner:
    """Runs questions on a model.

    Args:
        folder: Model; a `PlanRuntime` is attached to it.
        max_total_tokens: Maximum tokens of a prompt and its answer; by default the model's context.

    Attributes:
        adapter: Adapter of the model.
        runtime: Attached runtime.
        stop: Tokens that end an answer.

    Raises:
        InputError: The tokenizer has no chat template.
        ModelError: The model is not supported.
    """

    def __init__(self, folder: ModelFolder, max_total_tokens: int | None = None) -> None:
        attached = attach(folder.model)
        self.adapter, self.runtime, self.stop = attached.adapter, attached.runtime, attached.stop
        self.model, self._tokenizer = folder.model, folder.tokenizer
        context = folder.context if max_total_tokens is None else min(folder.context, max_total_tokens)
        self._prompts = PromptBuilder(
            folder.tokenizer, context=context, image_processor=folder.image_processor
        )

    def close(self) -> None:
        """Detach the runtime."""
        self.runtime.remove()

    def identity(self, questions: Sequence[PreparedQuestion]) -> dict[str, Any]:
        """Everything that answers depend on besides weights and questions, in JSON types.

        Args:
            questions: Questions. The inputs of the first one with and without images reveal changes of the
                tokenizer or of the image processor.
        """
        inputs = hashlib.sha256()
        for question in first_with_and_without_image(questions, lambda q: bool(q.prompt.vision_tokens)):
            for name, value in sorted(question.prompt.inputs.items()):
                inputs.update(f"{name} {list(value.shape)}".encode())
                inputs.update(value.float().numpy().tobytes())
        return {
            "inputs": inputs.hexdigest(), "stop": sorted(self.stop), "context": self._prompts.context,
            "template": hashlib.sha256(str(self._tokenizer.chat_template).encode()).hexdigest(),
        }  # fmt: skip

    def prepare(self, question: Question) -> PreparedQuestion:
        """Build the prompt of a question.

        Raises:
            InputError: An image is damaged, the model takes no images, or the prompt (at the lowest tier) or
                the answer is too long; the message names the line.
        """
        answer = len(self._tokenizer.encode(question.answer.strip(), add_special_tokens=False)) + 1
        if answer > question.max_new_tokens + 1:
            raise InputError(
                f"{question.location}: the answer has {answer - 1} tokens, more than `max_new_tokens` "
                f"(={question.max_new_tokens}); raise it"
            )
        try:
            prompt = self._prompts.build_user_prompt(
                question.prompt, question.images, question.max_new_tokens
            )
        except InputError as error:
            raise InputError(f"{question.location}: {error}") from error
        tiers = select_fitting_tiers(
            prompt.vision, text_tokens=prompt.text_tokens, new_tokens=question.max_new_tokens,
            max_tokens=self._prompts.context,
        )  # fmt: skip
        dtype = self.adapter.model.dtype
        inputs = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in prompt.inputs.items()
        }
        return PreparedQuestion(
            prompt=replace(prompt, inputs=inputs), answer=normalize_text(question.answer),
            max_new_tokens=question.max_new_tokens, new_tokens=min(answer, question.max_new_tokens),
            tiers=tiers or (None,),
        )  # fmt: skip

    def check_answers(self, questions: Sequence[PreparedQuestion], plan: Plan) -> list[bool]:
        """Check which questions of a batch are answered correctly under a plan.

        The batch is halved if memory is too small for it.

        Args:
            questions: A batch of `group_into_batches`.
            plan: Plan of a tier at which they fit.

        Raises:
            PlanError: The model cannot run the plan.
            RunError: The model returns NaN.
        """
        parts = _run_with_halving(lambda batch: self._check_answers(batch, plan), questions)
        return [is_correct for part in parts for is_correct in part]

    def compute_language(self, questions: Sequence[PreparedQuestion]) -> Tensor:
        """Inputs of the first controller: [questions, d] float32, on the CPU."""
        return torch.cat(_run_with_halving(self._compute_language, questions))

    def compute_latency_tokens(self, questions: Sequence[PreparedQuestion], tier: Tier | None) -> Tensor:
        """Inputs of the second controller.

        Args:
            questions: A batch of `group_into_batches`.
            tier: Tier at which they fit.

        Returns:
            Hidden state of the last prompt token after the block before each insertion position, shape
            [questions, positions, d], float32, on the CPU.
        """
        return torch.cat(
            _run_with_halving(lambda batch: self._compute_latency_tokens(batch, tier), questions)
        )

    def _compute_language(self, questions: Sequence[PreparedQuestion]) -> Tensor:
        inputs = self._collate(questions)
        return mean_text_embedding(self.adapter, inputs["input_ids"], inputs["attention_mask"]).cpu()

    @torch.no_grad()
    def _compute_latency_tokens(self, questions: Sequence[PreparedQuestion], tier: Tier | None) -> Tensor:
        adapter, hidden_states = self.adapter, []
        inputs = adapter.reduce_to_tier(self._collate(questions), tier)
        position_ids, _ = adapter.compute_positions(inputs)
        full = replace(adapter.geometry.full_plan(images=False), tier=tier)
        hooks = [
            adapter.blocks[position - 1].register_forward_hook(
                lambda block, args, output: hidden_states.append(adapter.get_hidden_states(output)[:, -1])
            )
            for position in adapter.geometry.positions
        ]
        try:
            with self.runtime.use_plan(full):
                adapter.model(
                    **{**inputs, "position_ids": position_ids}, use_cache=False,
                    **last_logits_args(adapter.model),
                )  # fmt: skip
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack(hidden_states, 1).float().cpu()

    def _check_answers(self, questions: Sequence[PreparedQuestion], plan: Plan) -> list[bool]:
        matchers = [_AnswerMatcher(question, self._tokenizer, self.stop) for question in questions]

        def append_tokens(tokens: list[int]) -> None:
            for matcher, token in zip(matchers, tokens, strict=True):
                matcher.append(token)
            if all(matcher.is_correct is not None for matcher in matchers):
                raise _AllAnswersKnown

        with suppress(_AllAnswersKnown):
            generate(
                self.adapter, self.runtime, self._collate(questions), plan,
                max_new_tokens=questions[0].max_new_tokens, stop=self.stop, on_tokens=append_tokens,
            )  # fmt: skip
        return [bool(matcher.is_correct) for matcher in matchers]

    def _collate(self, questions: Sequence[PreparedQuestion]) -> dict[str, Tensor]:
        """Batch of questions, padded on the left, on the model's device."""
        longest = max(question.prompt.tokens for question in questions)
        inputs = {}
        for name, first in questions[0].prompt.inputs.items():
            values = [question.prompt.inputs[name] for question in questions]
            if _has_token_axis(first, questions[0]):
                values = [torch.nn.functional.pad(value, (longest - value.shape[1], 0)) for value in values]
            inputs[name] = torch.cat(values).to(self.adapter.model.device)
        return inputs


def group_into_batches(questions: Sequence[PreparedQuestion], tier: Tier | None) -> list[list[int]]:
    """Indices of questions that can run together at a tier; None selects those without images.

    A batch has one `max_new_tokens` and equal image sizes. Questions that do not fit at the tier are left
    out.
    """
    groups: dict[Any, list[int]] = {}
    for index, question in enumerate(questions):
        if tier in question.tiers:
            groups.setdefault(_get_batch_key(question), []).append(index)
    batches = []
    for indices in groups.values():
        batch: list[int] = []
        for index in sorted(indices, key=lambda index: (questions[index].prompt.tokens, index)):
            padded_tokens = (len(batch) + 1) * questions[index].prompt.count_tokens(tier)
            if batch and (len(batch) == MAX_BATCH_SIZE or padded_tokens > MAX_BATCH_TOKENS):
                batches.append(batch)
                batch = []
            batch.append(index)
        batches.append(batch)
    return batches


def first_with_and_without_image(items: Iterable[T], has_image: Callable[[T], bool]) -> list[T]:
    """The first item without an image and the first one with an image, as far as they exist."""
    first: dict[bool, T] = {}
    for item in items:
        first.setdefault(has_image(item), item)
    return [first[key] for key in sorted(first)]


def normalize_text(text: str) -> str:
    """Fold case and reduce whitespace to single spaces between words."""
    return " ".join(text.casefold().split())


def _run_with_halving(
    call: Callable[[Sequence[PreparedQuestion]], T], questions: Sequence[PreparedQuestion]
) -> list[T]:
    """Results of a batch, or of its halves if memory is too small for the full batch."""
    try:
        return [call(questions)]
    except (RuntimeError, MemoryError) as error:
        if len(questions) == 1 or not is_out_of_memory(error):
            raise
    free_memory()
    half = len(questions) // 2
    return [*_run_with_halving(call, questions[:half]), *_run_with_halving(call, questions[half:])]


class _AllAnswersKnown(Exception):
    """Raised to stop the generation of a batch."""


class _AnswerMatcher:
    """Compares an answer with the correct one while it is generated.

    Attributes:
        is_correct: Whether the answer is correct; None while unknown.
    """

    def __init__(self, question: PreparedQuestion, tokenizer: Any, stop: Collection[int]) -> None:
        self.is_correct: bool | None = None
        self._question, self._tokenizer, self._stop = question, tokenizer, frozenset(stop)
        self._ids: list[int] = []

    def append(self, token: int) -> None:
        """Append the next token."""
        if self.is_correct is not None:
            return
        is_finished = token in self._stop
        if not is_finished:
            self._ids.append(token)
            is_finished = len(self._ids) == self._question.max_new_tokens
        text, answer = self._tokenizer.decode(self._ids, skip_special_tokens=True), self._question.answer
        if is_finished:
            self.is_correct = normalize_text(text) == answer
        elif not _remove_whitespace(answer).startswith(
            _remove_whitespace(text.rstrip(_INCOMPLETE_CHARACTER))
        ):
            self.is_correct = False


def _remove_whitespace(text: str) -> str:
    """Fold case and remove whitespace, which tokenizers may change when more tokens follow."""
    return "".join(text.casefold().split())


def _has_token_axis(value: Tensor, question: PreparedQuestion) -> bool:
    """Whether a value has one entry per token."""
    return value.shape == question.prompt.inputs["input_ids"].shape


def _get_batch_key(question: PreparedQuestion) -> tuple[Any, ...]:
    image_inputs = (
        (name, tuple(value.shape), () if value.is_floating_point() else tuple(value.flatten().tolist()))
        for name, value in question.prompt.inputs.items()
        if not _has_token_axis(value, question)
    )
    return (question.max_new_tokens, question.prompt.vision_tokens, *image_inputs)
