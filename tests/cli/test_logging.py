"""Log messages of commands on standard error."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from sparseflow.cli.root import configure_logging

LOGGER = logging.getLogger("sparseflow.somewhere")


@pytest.fixture(autouse=True)
def restore_logger() -> Iterator[None]:
    root = logging.getLogger("sparseflow")
    saved = (list(root.handlers), root.level, root.propagate)
    yield
    root.handlers[:], root.propagate = saved[0], saved[2]
    root.setLevel(saved[1])


@pytest.mark.parametrize(
    ("options", "expected_lines"),
    [
        ({}, ["info", "warning"]),
        ({"verbose": True}, ["debug", "info", "warning"]),
        ({"quiet": True}, ["warning"]),
        ({"quiet": True, "verbose": True}, ["warning"]),
    ],
)
def test_configure_logging_filters_by_level(
    capsys: pytest.CaptureFixture[str], options: dict[str, bool], expected_lines: list[str]
) -> None:
    configure_logging()
    configure_logging(**options)
    for level in ("debug", "info", "warning"):
        getattr(LOGGER, level)(f"a-{level}-word")
    out, err = capsys.readouterr()
    assert out == ""
    assert [level for level in ("debug", "info", "warning") if f"a-{level}-word" in err] == expected_lines
    assert err.count("a-warning-word") == 1, "a second call must replace the first"
