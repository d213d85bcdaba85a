"""Files of questions: what is read, where questions belong, and what is said of lines that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from sparseflow.adaptive.questions import file as room
from sparseflow.adaptive.questions.file import Question, read_questions
from sparseflow.errors import FileFormatError, InputError

SUM = {"prompt": "2 + 2 =", "answer": "4"}


def written(folder: Path, *lines: dict[str, Any] | str) -> Path:
    path = folder / "questions.jsonl"
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text))
    return path


def test_read_questions_with_defaults(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    for name in ("a", "b"):
        (tmp_path / "pictures" / f"{name}.png").write_bytes(name.encode())
    line = {
        "prompt": "Wörter?", "answer": " a cat", "images": ["pictures/a.png", "pictures/b.png"],
        "max_new_tokens": 5, "split": "val", "kind": "what",
    }  # fmt: skip
    path = written(tmp_path, line, "", json.dumps(SUM), "   ")
    first, second = read_questions(path)
    images = (tmp_path / "pictures" / "a.png", tmp_path / "pictures" / "b.png")
    assert first == Question(
        prompt="Wörter?", answer=" a cat", images=images, max_new_tokens=5, split="val", kind="what",
        digest=first.digest, location=f"{path}, line 1",
    )  # fmt: skip
    assert (second.images, second.max_new_tokens, second.kind) == ((), 64, "")
    assert second.location == f"{path}, line 3"


def test_read_questions_split_does_not_depend_on_other_lines(tmp_path: Path) -> None:
    lines: list[Any] = [{"prompt": f"{index} + 1 =", "answer": str(index + 1)} for index in range(1000)]
    before = {question.prompt: question.split for question in read_questions(written(tmp_path, *lines))}
    after = {
        question.prompt: question.split
        for question in read_questions(written(tmp_path, *lines[900:], *lines[:500]))
    }
    assert all(before[prompt] == split for prompt, split in after.items())
    counts = [list(before.values()).count(split) for split in ("train", "val", "test")]
    assert counts == [611, 201, 188]  # of 600, 200 and 200, and the same everywhere


def test_read_questions_of_one_image_share_split(tmp_path: Path) -> None:
    lines: list[Any] = []
    for image in range(40):
        (tmp_path / f"{image}.png").write_bytes(str(image).encode())
        lines += [SUM | {"prompt": f"{index}?", "images": [f"{image}.png"]} for index in range(5)]
    actual = read_questions(written(tmp_path, *lines))
    of_image = [{item.split for item in actual[index : index + 5]} for index in range(0, len(actual), 5)]
    assert all(len(splits) == 1 for splits in of_image) and set().union(*of_image) == {"train", "val", "test"}


def test_question_digest_covers_all_fields(tmp_path: Path) -> None:
    image = tmp_path / "a.png"

    def digest(content: bytes = b"a", **changes: Any) -> str:
        image.write_bytes(content)
        return read_questions(written(tmp_path, SUM | {"images": ["a.png"]} | changes))[0].digest

    actual = [
        digest(), digest(b"b"), digest(prompt="3"), digest(answer="3"), digest(images=[]), digest(kind="sum"),
        digest(max_new_tokens=3),
    ]  # fmt: skip
    assert len(set(actual)) == len(actual) and digest(split="test") == actual[0]


@pytest.mark.parametrize(
    ("line", "error_text"),
    [
        ("{", r"line 2"),
        ("[" * 100_000, r"line 2 is not JSON"),
        ("[1]", r"line 2 .*list"),
        (
            {"prompt": "2"},
            r"line 2 .*answer: Field required",
        ),
        (SUM | {"prompt": " "}, r"prompt: .*must not be empty"),
        (SUM | {"answer": "\n"}, r"answer: .*must not be empty"),
        (SUM | {"answer": 4}, r"answer: Input should be a valid string"),
        (SUM | {"image": "a.png"}, r"image: Extra inputs are not permitted"),
        (SUM | {"images": "a.png"}, r"images: Input should be a valid array"),
        (SUM | {"images": ["a.png"] * 9}, r"images: List should have at most 8 items"),
        (SUM | {"max_new_tokens": 0}, r"max_new_tokens: Input should be greater than or equal to 1"),
        (SUM | {"max_new_tokens": True}, r"max_new_tokens: Input should be a valid integer"),
        (SUM | {"split": "dev"}, r"split: Input should be 'train', 'val' or 'test'"),
        (SUM | {"images": ["absent.png"]}, r"line 2: .*absent.png: No such file"),
        (SUM | {"images": ["."]}, r"line 2: .* Is a directory"),
        (SUM | {"images": ["a\0.png"]}, r"line 2: .* embedded null"),
        (SUM | {"images": ["large.png"]}, r"line 2: the image .*large.png has more than 1000 bytes"),
    ],
)
def test_read_questions_with_invalid_line_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: Any, error_text: str
) -> None:
    monkeypatch.setattr(room, "LIMITS", room.RequestLimits(image_bytes=1000))
    (tmp_path / "large.png").write_bytes(bytes(1001))
    with pytest.raises(FileFormatError, match=error_text):
        read_questions(written(tmp_path, SUM, line))


def test_read_questions_of_empty_file_raises(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent.jsonl: No such file"):
        read_questions(tmp_path / "absent.jsonl")
    with pytest.raises(FileFormatError, match=r"questions.jsonl"):
        read_questions(written(tmp_path, ""))
    (tmp_path / "questions.jsonl").write_bytes(b'{"prompt": "\xff", "answer": "4"}')
    with pytest.raises(FileFormatError, match=r"line 1 is not JSON: .*utf-8"):
        read_questions(tmp_path / "questions.jsonl")


@given(some.binary(max_size=60))
def test_read_questions_of_any_bytes_reads_or_raises(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(content)
    with pytest.raises(FileFormatError):
        read_questions(path)
