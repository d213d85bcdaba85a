"""Tables of commands show their data as it is."""

from __future__ import annotations

import pytest

from sparseflow.cli.output import emit, make_table


@pytest.mark.parametrize(
    "text", ["a[extra]b", "[/m]", "[red]x[/red]", ":x:", "\\[a]", "x\\", "[link=http://a]"]
)
def test_table_shows_markup_as_text(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    emit({}, False, make_table((text,), [(text,)], title=text))
    lines = capsys.readouterr().out.splitlines()
    assert sum(text in line for line in lines) == 3


def test_lines_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    emit({"file": "a[b].mtx"}, False)
    assert capsys.readouterr().out == "file: a[b].mtx\n"
