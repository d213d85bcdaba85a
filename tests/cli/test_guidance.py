"""The next command after a result, and the page after an error."""

from __future__ import annotations

import re

import pytest

from sparseflow.cli import root
from sparseflow.cli.guidance import HELP_PAGES, INSTALL_PAGE, NEXT_COMMANDS, find_help_page, find_next_command
from sparseflow.errors import DeviceError, InputError
from tests.cli.test_options import COMMANDS
from tests.site_pages import find_page


@pytest.mark.parametrize("path", NEXT_COMMANDS)
def test_next_commands_exist(path: str) -> None:
    assert path in COMMANDS
    words = NEXT_COMMANDS[path].split()[1:]
    command = COMMANDS.get(" ".join(words[:2])) or COMMANDS[words[0]]
    options = {option for parameter in command.params for option in parameter.opts}
    named = {word for word in words if word.startswith("--")}
    assert named <= options
    assert {p.opts[0] for p in command.params if p.required and p.opts[0].startswith("--")} <= named


def test_next_command_contains_the_output() -> None:
    assert find_next_command(["codesign", "plan", "--out", "runs/a"]) == "sparseflow codesign verify runs/a"
    assert find_next_command(["codesign", "plan"]) is None and find_next_command(["doctor"]) is None


@pytest.mark.parametrize("page", sorted({*HELP_PAGES.values(), INSTALL_PAGE}))
def test_help_pages_exist(page: str) -> None:
    assert find_page(f"{page}.html") == f"{page}.md"


def test_every_wing_has_a_help_page() -> None:
    assert set(HELP_PAGES) == set(root.COMMANDS) - {"doctor", "runs"}


def test_errors_name_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert root.run(["tune", "spmm", "absent.mtx", "--n-cols", "8"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"see https://\S+/how-to/prepare-matrices\.html", last)
    assert str(find_help_page(["demo"], DeviceError("no GPU"))).endswith("/install.html")
    assert find_help_page(["runs"], InputError("none")) is None
