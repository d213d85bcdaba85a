"""Settings in YAML: files that users write, and those that come with a wing in its `configs/`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseflow.core.extras import require
from sparseflow.errors import FileFormatError, InputError

if TYPE_CHECKING:
    from pydantic import ValidationError

_FOLDER, _SUFFIX = "configs", ".yaml"


def list_configs(package: str) -> list[str]:
    """Names of the configurations that come with a wing, such as `"sparseflow.pruning"`."""
    there = (resources.files(package) / _FOLDER).iterdir()
    return sorted(each.name.removesuffix(_SUFFIX) for each in there if each.name.endswith(_SUFFIX))


def read_config_file(source: Path | str, *, package: str, extra: str) -> dict[str, Any]:
    """What a file of settings holds.

    Args:
        source: A file, or the name of a configuration that comes with the wing.
        package: The wing.
        extra: The extra that brings PyYAML.

    Raises:
        InputError: There is no such file.
        FileFormatError: It is not YAML, or holds something else than settings by name.
        MissingExtraError: PyYAML is missing.
    """
    require("yaml", extra)
    names = list_configs(package)
    if str(source) in names:
        text = (resources.files(package) / _FOLDER / f"{source}{_SUFFIX}").read_text("utf-8")
    else:
        file = Path(source)
        try:
            there = file.is_file()
        except OSError:  # a name that no file can have
            there = False
        if not there:
            raise InputError(f"there is no file {file}; these come with SparseFlow: {', '.join(names)}")
        text = file.read_text("utf-8", errors="replace")
    try:
        content = parse_yaml(text, extra=extra)
    except ValueError as error:
        raise FileFormatError(f"{source} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise FileFormatError(f"{source} must hold settings by name, such as `name: value`")
    return content


def parse_yaml(text: str, *, extra: str) -> Any:
    """What a text in YAML says.

    Args:
        text: The text.
        extra: The extra that brings PyYAML.

    Raises:
        ValueError: It is not YAML, or a value in it is none of its type; in a line.
        MissingExtraError: PyYAML is missing.
    """
    yaml = require("yaml", extra)
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        # Values that look like dates, numbers or truths and are none raise what Python raises for them.
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error


def apply_overrides(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with some of them changed.

    Args:
        content: As `read_config_file` gives them; left as they are.
        changes: `"train.epochs"` -> a value that goes before.

    Raises:
        InputError: A name leads through something that has no parts.
    """
    found = _unshared(dict(content))
    for name, value in changes.items():
        at: Any = found
        *parts, last = name.split(".")
        for part in parts:
            at = at.setdefault(part, {})
            if not isinstance(at, dict):
                raise InputError(f"`{name}` is no setting: `{part}` has no parts")
        at[last] = _unshared(value)
    return found


def _unshared(value: Any) -> Any:
    """A copy in which nothing is in two places: YAML's aliases would change together."""
    if isinstance(value, dict):
        return {name: _unshared(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_unshared(each) for each in value]
    return copy.deepcopy(value)


def describe_validation_error(error: ValidationError) -> str:
    """The first thing that is wrong: where, and what."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or "the whole"
    return f"{where}: {first['msg']}"
