"""Questions with correct answers in a file of JSON lines.

::

    {"prompt": "What is in the picture?", "answer": "a cat", "images": ["pictures/1.png"]}
    {"prompt": "2 + 2 =", "answer": "4", "max_new_tokens": 4, "split": "test", "kind": "sum"}

Image paths are relative to the file. A question without `split` is assigned by the content of its first
image, or by its own content without images: questions about one image stay together, and assignments do not
change when other questions are added or removed. 60 % are assigned to train, 20 % to val and 20 % to test. If
there are more questions than requested, the first ones are used, so kinds of questions should be mixed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator

from sparseflow.adaptive.prompts.messages import RequestLimits
from sparseflow.adaptive.questions.task import Split
from sparseflow.core.config import StrictModel, describe_validation_error
from sparseflow.core.files import parse_json
from sparseflow.errors import FileFormatError, InputError

LIMITS = RequestLimits()
"""Limits of a server, so that every question could be sent to one."""

_TRAIN_FRACTION, _VAL_FRACTION = 0.6, 0.2
"""Fractions of questions without `split`; the rest is for the test."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question with its answer.

    Attributes:
        prompt: Text of the user.
        answer: Correct answer.
        images: Image files, placed before the text.
        max_new_tokens: Maximum tokens of an answer.
        split: Split.
        kind: Kind of question; empty for none.
        digest: Digest of all of it, including the content of images.
        location: File and line, for error messages.
    """

    prompt: str
    answer: str
    images: tuple[Path, ...]
    max_new_tokens: int
    split: Split
    kind: str
    digest: str
    location: str


class _QuestionRecord(StrictModel, strict=True):
    """A line of the file."""

    prompt: str
    answer: str
    images: Annotated[list[str], Field(max_length=LIMITS.images, default_factory=list)]
    max_new_tokens: Annotated[int, Field(ge=1, le=LIMITS.max_new_tokens)] = LIMITS.new_tokens
    split: Split | None = None
    kind: Annotated[str, Field(max_length=40)] = ""

    @field_validator("prompt", "answer")
    @classmethod
    def _check_not_empty(cls, text: str) -> str:
        if not text.strip():
            raise ValueError("must not be empty")
        return text


def read_questions(path: Path | str) -> tuple[Question, ...]:
    """Read a file of questions; empty lines are ignored.

    Raises:
        InputError: The file does not exist.
        FileFormatError: A line is not a question, or an image is missing or too large; the message names the
            line.
    """
    file = Path(path)
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}; pass a file of questions") from error
    questions = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            location = f"{file}, line {number}"
            questions.append(_make_question(_parse_line(line, location), file.parent, location))
    if not questions:
        raise FileFormatError(
            f'{file} contains no questions; write one per line, as {{"prompt": "2 + 2 =", "answer": "4"}}'
        )
    return tuple(questions)


def _parse_line(line: bytes, location: str) -> _QuestionRecord:
    try:
        content: Any = parse_json(line)
    except ValueError as error:
        raise FileFormatError(f"{location} is not JSON: {error}; write one object per line") from error
    if not isinstance(content, dict):
        raise FileFormatError(
            f"{location} must be an object with `prompt` and `answer`, got {type(content).__name__}"
        )
    try:
        return _QuestionRecord.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise FileFormatError(
            f"{location} is not a question: {describe_validation_error(error)}; fields are "
            f"{', '.join(_QuestionRecord.model_fields)}"
        ) from error


def _make_question(record: _QuestionRecord, directory: Path, location: str) -> Question:
    images = tuple(directory / name for name in record.images)
    text = json.dumps([record.prompt, record.answer, record.images, record.max_new_tokens, record.kind])
    image_digests = [hashlib.sha256(_read_image(image, location)).digest() for image in images]
    digest = hashlib.sha256(text.encode() + b"".join(image_digests))
    split = record.split or _assign_split(image_digests[0] if image_digests else digest.digest())
    return Question(
        prompt=record.prompt, answer=record.answer, images=images, max_new_tokens=record.max_new_tokens,
        split=split, kind=record.kind, digest=digest.hexdigest(), location=location,
    )  # fmt: skip


def _read_image(path: Path, location: str) -> bytes:
    max_bytes = LIMITS.image_bytes
    try:
        with path.open("rb") as stream:
            content = stream.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileFormatError(
            f"{location}: cannot read the image {path}: {reason}; paths are relative to the file of questions"
        ) from error
    if len(content) > max_bytes:
        raise FileFormatError(
            f"{location}: the image {path} has more than {max_bytes} bytes; make it smaller"
        )
    return content


def _assign_split(digest: bytes) -> Split:
    position = int.from_bytes(digest[:8], "big") / 2**64
    if position < _TRAIN_FRACTION:
        return "train"
    return "val" if position < _TRAIN_FRACTION + _VAL_FRACTION else "test"
