"""Messages on the console and in a run's file."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparseflow.core import logging as ours

LOGGER = logging.getLogger("sparseflow.somewhere")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    root = logging.getLogger(ours.ROOT)
    before = (list(root.handlers), root.level, root.propagate)
    yield
    root.handlers[:], root.propagate = before[0], before[2]
    root.setLevel(before[1])


def test_the_file_gets_everything_and_is_let_go(tmp_path: Path) -> None:
    with ours.log_to_file(tmp_path / "run.log"):
        LOGGER.debug("detail %d", 7)
        LOGGER.warning("careful")
    LOGGER.warning("too late")
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert [line.split(" ", 2)[2].split() for line in lines] == [
        ["DEBUG", "sparseflow.somewhere:", "detail", "7"],
        ["WARNING", "sparseflow.somewhere:", "careful"],
    ]


def test_the_file_is_let_go_when_the_block_raises(tmp_path: Path) -> None:
    handlers = list(logging.getLogger(ours.ROOT).handlers)
    with pytest.raises(ValueError, match="x"), ours.log_to_file(tmp_path / "run.log"):
        raise ValueError("x")
    assert logging.getLogger(ours.ROOT).handlers == handlers


@pytest.mark.parametrize(
    ("options", "heard"),
    [
        ({}, ["info", "warning"]),
        ({"verbose": True}, ["debug", "info", "warning"]),
        ({"quiet": True}, ["warning"]),
        ({"quiet": True, "verbose": True}, ["warning"]),
    ],
)
def test_the_console_speaks_on_standard_error(
    capsys: pytest.CaptureFixture[str], options: dict[str, bool], heard: list[str]
) -> None:
    ours.configure_console()
    ours.configure_console(**options)
    for level in ("debug", "info", "warning"):
        getattr(LOGGER, level)(f"a-{level}-word")
    out, err = capsys.readouterr()
    assert out == ""
    assert [level for level in ("debug", "info", "warning") if f"a-{level}-word" in err] == heard
    assert err.count("a-warning-word") == 1, "a second call must replace the first"
