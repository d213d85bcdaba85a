"""Questions with their right answers, in a file of JSON lines.

::

    {"prompt": "What is in the picture?", "answer": "a cat", "images": ["pictures/1.png"]}
    {"prompt": "2 + 2 =", "answer": "4", "max_new_tokens": 4, "split": "test", "kind": "sum"}

Images are named relative to the file. A line without `split` falls into one by what its first image holds, or
without any by its content: questions about one image stay together, and stay there when others come or go.
60 % fall into train, 20 % into val, 20 % into test. Where there are more than are asked for, the first are
taken, so kinds of questions should be mixed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from sparseflow.adaptive.prompts.messages import RequestLimits
from sparseflow.adaptive.questions.task import Split
from sparseflow.core.config import describe_validation_error
from sparseflow.errors import FileFormatError, InputError

LIMITS = RequestLimits()
"""Those of a server's requests: what is asked here is to be asked there."""

_TRAIN, _VAL = 0.6, 0.2
"""Shares of the questions that do not say where they belong; the rest is for the test."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question with its answer.

    Attributes:
        prompt: What a user says.
        answer: What is right.
        images: Files, which stand before the text.
        max_new_tokens: Most tokens of an answer.
        split: What it serves for.
        kind: A name for questions of its kind; empty for none.
        digest: Of all of it, what the images hold included.
        where: File and line, for errors.
    """

    prompt: str
    answer: str
    images: tuple[Path, ...]
    max_new_tokens: int
    split: Split
    kind: str
    digest: str
    where: str


class _QuestionRecord(BaseModel):
    """A line, as it is written."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    prompt: str
    answer: str
    images: Annotated[list[str], Field(max_length=LIMITS.images)] = []
    max_new_tokens: Annotated[int, Field(ge=1, le=LIMITS.most_new_tokens)] = LIMITS.new_tokens
    split: Split | None = None
    kind: Annotated[str, Field(max_length=40)] = ""

    @field_validator("prompt", "answer")
    @classmethod
    def _says_something(cls, text: str) -> str:
        if not text.strip():
            raise ValueError("must not be empty")
        return text


def read(path: Path | str) -> tuple[Question, ...]:
    """Read a file of questions; empty lines are let pass.

    Raises:
        InputError: There is no such file.
        FileFormatError: A line is no question, or an image is missing or too large; the message names file
            and line.
    """
    file = Path(path)
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}; give a file of questions") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{file}, line {number}"
            found.append(_question(_line(line, where), file.parent, where))
    if not found:
        raise FileFormatError(
            f'{file} holds no questions; write one a line, as {{"prompt": "2 + 2 =", "answer": "4"}}'
        )
    return tuple(found)


def _line(line: bytes, where: str) -> _QuestionRecord:
    try:
        content: Any = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise FileFormatError(
            f"{where} is not JSON: {error}; write one object a line, as from `json.dumps`"
        ) from error
    if not isinstance(content, dict):
        raise FileFormatError(
            f"{where} must be an object with `prompt` and `answer`, not {type(content).__name__}"
        )
    try:
        return _QuestionRecord.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise FileFormatError(
            f"{where} is no question: {describe_validation_error(error)}; "
            f"it may have {', '.join(_QuestionRecord.model_fields)}"
        ) from error


def _question(line: _QuestionRecord, folder: Path, where: str) -> Question:
    images = tuple(folder / name for name in line.images)
    text = json.dumps([line.prompt, line.answer, line.images, line.max_new_tokens, line.kind])
    seen = [hashlib.sha256(_content_of(image, where)).digest() for image in images]
    digest = hashlib.sha256(text.encode() + b"".join(seen))
    split = line.split or _split(seen[0] if seen else digest.digest())
    return Question(
        prompt=line.prompt, answer=line.answer, images=images, max_new_tokens=line.max_new_tokens,
        split=split, kind=line.kind, digest=digest.hexdigest(), where=where,
    )  # fmt: skip


def _content_of(image: Path, where: str) -> bytes:
    """The bytes of an image's file.

    Raises:
        FileFormatError: It is missing or too large; the message begins with `where`.
    """
    most = LIMITS.image_bytes
    try:
        with image.open("rb") as opened:
            content = opened.read(most + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileFormatError(
            f"{where}: the image {image} cannot be read: {reason}; name it relative to the questions' file"
        ) from error
    if len(content) > most:
        raise FileFormatError(f"{where}: the image {image} has more than {most} bytes; make it smaller")
    return content


def _split(digest: bytes) -> Split:
    at = int.from_bytes(digest[:8], "big") / 2**64
    return "train" if at < _TRAIN else "val" if at < _TRAIN + _VAL else "test"
