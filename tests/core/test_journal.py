"""Lines that survive the death of their writer."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.core import journal
from sparseflow.errors import RunError


@settings(max_examples=60)
@given(cut=st.integers(1, 200), junk=st.binary(max_size=20).filter(lambda data: b"\n" not in data))
def test_whatever_tears_the_end_whole_lines_stay(
    tmp_path_factory: pytest.TempPathFactory, cut: int, junk: bytes
) -> None:
    path = tmp_path_factory.mktemp("torn") / "samples.jsonl"
    rows = [{"i": index, "text": "é\n"} for index in range(8)]
    content = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
    torn = content[: max(0, len(content) - cut)]
    path.write_bytes(torn + junk if not torn or torn.endswith(b"\n") else torn)
    whole = torn.count(b"\n")
    assert journal.read_json_lines(path) == rows[:whole]
    writer = journal.JsonLinesWriter(path)
    writer.write({"i": "next"})
    writer.close()
    assert journal.read_json_lines(path) == [*rows[:whole], {"i": "next"}]


def test_no_file_is_no_rows(tmp_path: Path) -> None:
    assert journal.read_json_lines(tmp_path / "none.jsonl") == []


def test_a_second_writer_is_refused_until_the_first_lets_go(tmp_path: Path) -> None:
    first = journal.JsonLinesWriter(tmp_path / "a.jsonl")
    with pytest.raises(RunError, match="another process"):
        journal.JsonLinesWriter(tmp_path / "a.jsonl")
    first.close()
    journal.JsonLinesWriter(tmp_path / "a.jsonl").close()


def test_who_is_about_to_let_go_is_waited_for(tmp_path: Path) -> None:
    first = journal.JsonLinesWriter(tmp_path / "a.jsonl")
    going = threading.Timer(0.1, first.close)
    going.start()
    journal.JsonLinesWriter(tmp_path / "a.jsonl").close()
    going.join()


def test_lines_reach_the_disk_every_so_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(journal.os, "fsync", synced.append)
    writer = journal.JsonLinesWriter(tmp_path / "a.jsonl")
    for index in range(journal.SYNC_ROWS * 2 + 1):
        writer.write({"i": index})
    assert len(synced) == 2
    writer.sync()
    assert len(synced) == 3
    writer.close()
