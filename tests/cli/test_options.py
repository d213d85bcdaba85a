"""Shared options, and conformance of all commands: one name, help text and default for each concept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("yaml")

from sparseflow.cli import root
from sparseflow.cli.options import open_device, split_list
from sparseflow.core import extras
from sparseflow.core.config import parse_overrides
from sparseflow.errors import DeviceError, InputError, MissingExtraError


def test_parse_overrides_without_values_is_empty() -> None:
    assert parse_overrides([], extra="codesign") == {}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.epochs=3", {"train.epochs": 3}),
        ("rate=3.0e-3", {"rate": 0.003}),
        ("mode=dense", {"mode": "dense"}),
        ("text='3'", {"text": "3"}),
        ("enabled=true", {"enabled": True}),
        ("empty=null", {"empty": None}),
        ("empty=", {"empty": None}),
        ("list=[1, 2]", {"list": [1, 2]}),
        ("parts={a: 1}", {"parts": {"a": 1}}),
        ("text=a=b", {"text": "a=b"}),
        ("day=2026-01-02", {"day": "2026-01-02"}),
    ],
)
def test_parse_overrides_reads_values_as_yaml(override: str, expected: dict[str, Any]) -> None:
    assert parse_overrides([override], extra="codesign") == expected


def test_parse_overrides_repeated_key_keeps_order_and_last_value() -> None:
    values = parse_overrides(["a=1", "b=2", "a=3"], extra="codesign")
    assert values == {"a": 3, "b": 2} and list(values) == ["a", "b"]


@pytest.mark.parametrize("override", ["", "epochs", "=", "=3", "train.epochs:3"])
def test_parse_overrides_without_key_or_value_raises(override: str) -> None:
    with pytest.raises(InputError, match=f"`--set {override}`"):
        parse_overrides(["a=1", override], extra="codesign")


@pytest.mark.parametrize("value", ["[1", "'open", "a: b: c", "\0", "!!float many"])
def test_parse_overrides_invalid_yaml_raises(value: str) -> None:
    with pytest.raises(InputError, match="`--set a="):
        parse_overrides([f"a={value}"], extra="codesign")


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=12), max_size=3))
@example(["a=:"])
def test_parse_overrides_any_text_parses_or_raises_input_error(overrides: list[str]) -> None:
    try:
        values = parse_overrides(overrides, extra="codesign")
    except InputError as error:
        assert "--set" in str(error)
    else:
        assert set(values) == {override.partition("=")[0] for override in overrides}


def test_parse_overrides_without_yaml_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"sparseflow\[pruning\]"):
        parse_overrides(["a=1"], extra="pruning")


def test_split_list_strips_items_and_keeps_none() -> None:
    assert split_list("a, b,c") == ["a", "b", "c"] and split_list(None) is None


def test_open_device_cpu_returns_cpu() -> None:
    assert open_device("cpu") == torch.device("cpu")
    assert open_device("cpu:0").type == "cpu"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "gpus",
        "CPU",
        "cudafoo",
        " cpu",
        "mps",
        "meta",
        "0",
        "cpu:",
        "cpu:one",
        "cpu:-1",
        "cpu:0:0",
        "cuda:x",
    ],
)
def test_open_device_unknown_name_raises_input_error(name: str) -> None:
    with pytest.raises(InputError, match=f"`--device {name}`"):
        open_device(name)


@pytest.mark.parametrize(("name", "count"), [("cuda", 0), ("cuda:0", 0), ("cuda:7", 1), ("cuda:7", 2)])
def test_open_device_absent_gpu_raises_device_error(
    name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(DeviceError, match=f"`--device {name}`: torch sees {count} CUDA"):
        open_device(name)


def test_open_device_present_gpu_returns_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert open_device("cuda") == torch.device("cuda")
    assert open_device("cuda:1") == torch.device("cuda", 1)


@pytest.mark.parametrize(("free_bytes", "expected"), [([], "cpu"), ([1, 5, 2], "cuda:1")])
def test_open_device_auto_selects_gpu_with_most_free_memory(
    free_bytes: list[int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free_bytes))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free_bytes[index], 10))
    assert open_device("auto") == torch.device(expected)


def _iterate_commands(command: Any, path: list[str]) -> Iterator[tuple[str, Any]]:
    subcommands = getattr(command, "commands", None)
    if subcommands is None:
        yield " ".join(path), command
        return
    for name, subcommand in subcommands.items():
        yield from _iterate_commands(subcommand, [*path, name])


COMMANDS = {
    path: command
    for name in sorted(root.COMMANDS)
    for path, command in _iterate_commands(root._import_command(name), [name])
}

OPTIONS = [
    (path, parameter)
    for path, command in COMMANDS.items()
    for parameter in command.params
    if parameter.opts[0].startswith("-")
]

BANNED_OPTIONS = {
    "--archives", "--batch", "--begin", "--budget", "--budgets", "--classes", "--clips", "--compiled",
    "--cpu", "--folder", "--gpu", "--gpus", "--group", "--half", "--interval", "--kind", "--level",
    "--listen", "--max-age", "--max-batch", "--name", "--only", "--parts", "--plans", "--points",
    "--problems", "--provider", "--rate", "--repeats", "--resume", "--samples", "--seconds", "--steps",
    "--test", "--text-plans", "--timeout", "--tokens", "--validation", "--window", "--worth", "--zoo",
}  # fmt: skip
"""Former spellings, and names that do not show a unit or a count."""

SHARED_DEFAULTS: dict[str, tuple[Any, ...]] = {
    # None where an input file or a kind of load implies the device.
    "--device": ("cpu", None),
    # None where a configuration or a plan holds a seed.
    "--seed": (0, None),
    "--set": (None,),
    # `tune` searches for a minute; collections and searches of a layout have no limit.
    "--budget-s": (None, 60.0),
    "--json": (False,),
    "--threads": (None,),
    "--workers": (1,),
    "--cluster": (None,),
    "--dtype": ("float32",),
    "--cache": (True,),
    "--load": (None,),
    # Images, clips, and None for lists of batch sizes.
    "--batch-size": (32, 8, None),
}

NO_JSON = {"adaptive serve"}
"""Commands without a result: a server runs until it is stopped."""


def test_commands_are_all_found() -> None:
    assert len(COMMANDS) == 55


def test_tune_is_the_short_form_of_tuning_tune() -> None:
    short, full = COMMANDS["tune"], COMMANDS["tuning tune"]
    assert [p.opts for p in short.params] == [p.opts for p in full.params] and short.help == full.help


def test_options_have_no_former_spelling() -> None:
    former = [(path, option) for path, p in OPTIONS for option in p.opts if option in BANNED_OPTIONS]
    assert former == []


def test_options_with_one_name_have_one_help_text() -> None:
    texts: dict[tuple[str, str | None], set[str]] = {}
    for _, parameter in OPTIONS:
        # The placeholder tells whether `--out` is a directory or a file, `--input` a file or a value, and
        # `--loads` a range or a list.
        texts.setdefault((parameter.opts[0], parameter.metavar), set()).add(parameter.help)
    assert {name: helps for name, helps in texts.items() if len(helps) > 1} == {}
    placeholders: dict[str, set[str | None]] = {}
    for name, metavar in texts:
        placeholders.setdefault(name, set()).add(metavar)
    assert {name for name, metavars in placeholders.items() if len(metavars) > 1} == {
        "--input",
        "--loads",
        "--out",
    }
    assert placeholders["--out"] == {"DIR", "FILE"}


@pytest.mark.parametrize("name", SHARED_DEFAULTS)
def test_shared_options_have_the_shared_default(name: str) -> None:
    defaults = {path: parameter.default for path, parameter in OPTIONS if name in parameter.opts}
    assert defaults and set(defaults.values()) <= set(SHARED_DEFAULTS[name]), defaults


def test_output_directories_are_required_or_below_runs_or_optional() -> None:
    for path, parameter in OPTIONS:
        if parameter.opts == ["--out"] and parameter.metavar == "DIR":
            default = parameter.default
            assert parameter.required or default is None or Path(default).parts[0] == "runs", path


def test_config_options_are_required_optional_or_a_shipped_name() -> None:
    shipped = {None, "digits", "grpo", "quickstart", "resnet18"}
    for path, parameter in OPTIONS:
        if parameter.opts == ["--config"]:
            assert parameter.required or parameter.default in shipped, path


def test_commands_with_a_result_have_json() -> None:
    without = {
        path for path, command in COMMANDS.items() if not any("--json" in p.opts for p in command.params)
    }
    assert without == NO_JSON


def test_commands_and_parameters_have_help_in_full_sentences() -> None:
    for path, command in COMMANDS.items():
        assert command.help and command.help[0].isupper(), path
        assert command.help.splitlines()[0].endswith("."), path
        for parameter in command.params:
            text = parameter.help
            assert text and text[0].isupper() and text.endswith("."), (path, parameter.opts, text)


def test_durations_carry_their_unit() -> None:
    for path, parameter in OPTIONS:
        if "seconds" in parameter.help:
            assert parameter.opts[0].endswith("-s"), (path, parameter.opts)


@pytest.mark.parametrize("path", sorted({path for path, p in OPTIONS if p.opts == ["--out"] and p.required}))
def test_out_is_checked_before_work_starts(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/proc").is_dir():
        pytest.skip("needs /proc")
    arguments = path.split()
    for parameter in COMMANDS[path].params:
        if parameter.required:
            option = [parameter.opts[0]] if parameter.opts[0].startswith("--") else []
            arguments += [*option, "/proc/run" if option == ["--out"] else "absent"]
    assert root.run(arguments) == 1
    err = capsys.readouterr().err
    assert "/proc/run" in err and len(err.splitlines()) == 1


def test_fit_is_checked_before_work_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert root.run(["pruning", "profile", "--config", "moving_digits", "--fit", str(tmp_path)]) == 1
    assert f"{tmp_path} is a directory" in capsys.readouterr().err
