"""Conformance checks of the artifact files and journals of all wings."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sized
from pathlib import Path

import pytest

from sparseflow.errors import FileFormatError, InputError, RunError


def check_artifact_file(load: Callable[[Path], object], path: Path, hint: str = "sparseflow") -> None:
    """Check how a loader treats missing, foreign, older, newer and damaged files.

    Args:
        load: Loads the file; raises InputError or FileFormatError.
        path: A valid file. It is changed and finally restored.
        hint: Text that errors about missing and foreign files must contain.
    """
    content = path.read_bytes()
    load(path)
    try:
        path.unlink()
        _expect(load, path, InputError, hint)
        for damaged in (b"", b"\x00", b"{}", b"[]", b"null", b"[" * 5000, content[:-1][: len(content) // 2]):
            path.write_bytes(damaged)
            _expect(load, path, FileFormatError, hint)
        if content.startswith(b"{"):
            record = json.loads(content)
            version = record["version"]
            for tag in (
                {"format": "sparseflow.other.kind"},
                {"version": version + 1},
                {"version": version - 1},
            ):
                path.write_text(json.dumps(record | tag))
                _expect(load, path, FileFormatError, str(*tag.values()))
            for name in record:
                path.write_text(json.dumps({key: value for key, value in record.items() if key != name}))
                _expect(load, path, (FileFormatError, None), "")
            path.write_text(json.dumps(record | {"unknown_field": 1}))
            _expect(load, path, FileFormatError, "unknown_field")
        generator = random.Random(0)
        for _ in range(30):
            changed = bytearray(content)
            changed[generator.randrange(len(changed))] = generator.randrange(256)
            path.write_bytes(changed)
            _expect(load, path, (FileFormatError, None), "")
    finally:
        path.write_bytes(content)
    load(path)


def check_journal_file(open_rows: Callable[[], Sized], path: Path) -> None:
    """Check how a writer resumes torn, damaged, foreign and locked journals.

    Args:
        open_rows: Opens the journal for appending, closes it and returns its rows.
        path: A valid journal with a header and at least two rows, closed. It is changed and finally restored.
    """
    from sparseflow.core.journal import Journal

    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    num_rows = len(open_rows())
    try:
        for torn in (content + b'{"torn', content + b"\xff"):
            path.write_bytes(torn)
            assert len(open_rows()) == num_rows
            assert path.read_bytes() == content, "the torn line must be cut off"
        path.write_bytes(content[:-3])
        assert len(open_rows()) < num_rows or len(lines) > num_rows + 1
        for damaged in (b"{\n", b"[]\n", b"3\n", b'{"unknown_field": 1}\n', b'{"a": NaN}\n'):
            path.write_bytes(content + damaged)
            with pytest.raises(FileFormatError, match=f"line {len(lines) + 1}"):
                open_rows()
            assert path.read_bytes() == content + damaged, "a refused journal must stay unchanged"
        header = json.loads(lines[0])
        for tag in ({"format": "sparseflow.other.kind"}, {"version": header["version"] + 1}):
            path.write_bytes(json.dumps(header | tag).encode() + b"\n" + b"".join(lines[1:]))
            with pytest.raises(FileFormatError, match=str(*tag.values())):
                open_rows()
        path.write_bytes(content)
        with Journal(path.with_name("other.jsonl"), dict), pytest.raises(RunError):
            open_rows()
    finally:
        path.write_bytes(content)
    assert len(open_rows()) == num_rows


def _expect(
    load: Callable[[Path], object],
    path: Path,
    expected: type[InputError] | tuple[type[InputError], None],
    text: str,
) -> None:
    """Check that loading raises the expected error, with the path and `text`; None allows success."""
    error_type = expected[0] if isinstance(expected, tuple) else expected
    try:
        load(path)
    except error_type as error:
        assert path.name in str(error) and text in str(error), str(error)
    else:
        assert isinstance(expected, tuple), f"{path.name} was accepted: {path.read_bytes()[:80]!r}"
