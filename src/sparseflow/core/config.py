"""Strict configuration files: YAML 1.2 or JSON, shipped configs by name, overrides, pydantic validation.

YAML is read with the core schema of YAML 1.2, so `off` and `1:0.5` are text and `1e-3` is a number. Duplicate
keys, application tags, recursive aliases, alias expansion beyond `MAX_NODES` and integers beyond 64 bits are
refused.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from sparseflow.core.extras import require
from sparseflow.core.files import parse_json
from sparseflow.errors import FileFormatError, InputError

MAX_CONFIG_BYTES = 2**20
MAX_NODES = 20_000
"""Largest number of YAML nodes after alias expansion."""

_MAX_DEPTH = 64
_MAX_INTEGER = 2**63 - 1
_MAX_INTEGER_DIGITS = 40
_FOLDER, _SUFFIX = "configs", ".yaml"
_TAG = "tag:yaml.org,2002:"
_PLAIN = "plain"
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_CONSTANTS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}

Model = TypeVar("Model", bound=BaseModel)


class StrictModel(BaseModel):
    """Base of all models of configs and files: immutable, no unknown fields, no NaN or infinity."""

    # With "constants" NaN in an untyped field reaches the JSON writer, which refuses it, instead of null.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants")

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy with other values of some fields, which are not validated.

        Raises:
            TypeError: There is no such field; pydantic would add it.
        """
        unknown = (update or {}).keys() - type(self).model_fields.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        return super().model_copy(update=update, deep=deep)


def load_config(
    model_type: type[Model],
    source: Path | str,
    *,
    extra: str,
    package: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Model:
    """Read a config file, apply overrides and validate it.

    Args:
        model_type: Pydantic model of the config.
        source: A YAML or JSON file, or the name of a config shipped with `package`.
        extra: SparseFlow extra that provides PyYAML.
        package: Wing whose `configs/` are available by name, such as `"sparseflow.pruning"`.
        overrides: Dotted field name -> value that replaces the file's, such as `{"train.epochs": 3}`.

    Raises:
        InputError: The file does not exist, or an override does not fit.
        FileFormatError: The file is malformed, or a field is missing, unknown or out of range.
        MissingExtraError: PyYAML is missing.
    """
    content = apply_overrides(read_config_file(source, package=package, extra=extra), overrides or {})
    try:
        return model_type.model_validate(content)
    except ValidationError as error:
        raise FileFormatError(f"{source}: {describe_validation_error(error)}") from error


def validate_config(model_type: type[Model], content: Any, source: str) -> Model:
    """Validate a config that was not read from a file.

    Args:
        model_type: Pydantic model of the config.
        content: Nested mappings and lists.
        source: Name of the config in the error message.

    Raises:
        InputError: A field is missing, unknown or out of range.
    """
    try:
        return model_type.model_validate(content)
    except ValidationError as error:
        raise InputError(f"{source}: {describe_validation_error(error)}") from error


def describe_validation_error(error: ValidationError) -> str:
    """Format the first problem of a pydantic error as `field.path: message`."""
    first = error.errors(include_url=False, include_context=False)[0]
    location = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    return f"{location}: {message}" if location else message


def list_configs(package: str) -> list[str]:
    """List the names of the configs shipped with a wing, such as `"sparseflow.pruning"`."""
    entries = (resources.files(package) / _FOLDER).iterdir()
    return sorted(entry.name.removesuffix(_SUFFIX) for entry in entries if entry.name.endswith(_SUFFIX))


def read_config_file(source: Path | str, *, extra: str, package: str | None = None) -> dict[str, Any]:
    """Read a YAML or JSON config without validating its fields.

    Args:
        source: A file, or the name of a config shipped with `package`.
        extra: SparseFlow extra that provides PyYAML.
        package: Wing whose `configs/` are available by name; None for files only.

    Raises:
        InputError: The file does not exist.
        FileFormatError: The file is malformed, too large, or its top level is not a mapping.
        MissingExtraError: PyYAML is missing.
    """
    require("yaml", extra)
    names = [] if package is None else list_configs(package)
    if package is not None and str(source) in names:
        data = (resources.files(package) / _FOLDER / f"{source}{_SUFFIX}").read_bytes()
    else:
        data = _read_bytes(Path(source), names)
    try:
        if Path(source).suffix == ".json":
            content = parse_json(data)
            _check_integers(content)
        else:
            content = parse_yaml(data.decode("utf-8"), extra=extra)
    except ValueError as error:
        raise FileFormatError(f"{source} is not a valid config: {error}") from error
    if not isinstance(content, dict):
        raise FileFormatError(f"{source} must contain a mapping, not {type(content).__name__}")
    return content


def parse_yaml(text: str, *, extra: str) -> Any:
    """Parse one YAML 1.2 document into new dicts, lists and scalars.

    Raises:
        ValueError: The text is not YAML, or exceeds a limit of this module; the message is one line.
        MissingExtraError: PyYAML is missing.
    """
    yaml = require("yaml", extra)
    try:
        root = yaml.compose(text, Loader=_make_loader(yaml))
        if root is None:
            return None
        _check_size(root)
        return _construct(root)
    except RecursionError as error:
        raise ValueError("nesting is too deep") from error
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:
        # PyYAML raises builtin errors for some malformed escapes and tags.
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error


def parse_overrides(assignments: Sequence[str], *, extra: str) -> dict[str, Any]:
    """Parse `--set` options such as `train.epochs=3`; values are YAML.

    Raises:
        InputError: An option is not of the form name=value, or its value is not YAML.
        MissingExtraError: PyYAML is missing.
    """
    overrides: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not name:
            raise InputError(f"`--set {assignment:.80}` must be name=value, such as train.epochs=3")
        try:
            overrides[name] = parse_yaml(value, extra=extra)
        except ValueError as error:
            raise InputError(f"`--set {assignment:.80}`: the value is not valid YAML: {error}") from error
    return overrides


def apply_overrides(content: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of a config with some fields replaced.

    Args:
        content: Nested mappings; left unchanged.
        overrides: Dotted field name -> value, such as `{"train.epochs": 3}`.

    Raises:
        InputError: A dotted name leads through a value that is not a mapping.
    """
    result = copy.deepcopy(dict(content))
    for name, value in overrides.items():
        node: Any = result
        *parents, last = name.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise InputError(f"cannot set `{name}`: `{parent}` is not a mapping")
        node[last] = copy.deepcopy(value)
    return result


def _read_bytes(file: Path, names: Sequence[str]) -> bytes:
    try:
        exists = file.is_file()
    except OSError:  # a name that no file can have
        exists = False
    if not exists:
        hint = f"; shipped configs: {', '.join(names)}" if names else ""
        raise InputError(f"{file} does not exist{hint}")
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    if len(data) > MAX_CONFIG_BYTES:
        raise FileFormatError(f"{file} exceeds the limit of {MAX_CONFIG_BYTES} bytes")
    return data


@cache
def _make_loader(yaml: Any) -> Any:
    """Return a loader that marks untagged plain scalars instead of resolving them by YAML 1.1.

    It stops at the limits while it reads, because PyYAML needs seconds for a megabyte of small nodes.
    """

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: ClassVar = {None: [(_PLAIN, re.compile(""))]}
        num_nodes = depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.num_nodes += 1
            self.depth += 1
            if self.num_nodes > MAX_NODES:
                raise ValueError(f"more than {MAX_NODES} nodes")
            if self.depth > _MAX_DEPTH + 1:
                raise ValueError(f"nesting is deeper than {_MAX_DEPTH} levels")
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    return Loader


def _check_size(root: Any) -> None:
    """Check depth, recursion and the number of nodes after alias expansion, without expanding aliases."""
    sizes: dict[int, tuple[int, int]] = {}
    pending: set[int] = set()

    def measure(node: Any) -> tuple[int, int]:
        if id(node) in sizes:
            return sizes[id(node)]
        if id(node) in pending:
            raise ValueError("recursive alias")
        pending.add(id(node))
        size, depth = 1, 0
        if not isinstance(node.value, str):
            for child in node.value:
                for part in child if isinstance(child, tuple) else (child,):
                    child_size, child_depth = measure(part)
                    size, depth = size + child_size, max(depth, 1 + child_depth)
        if size > MAX_NODES:
            raise ValueError(f"more than {MAX_NODES} nodes after alias expansion")
        if depth > _MAX_DEPTH:
            raise ValueError(f"nesting is deeper than {_MAX_DEPTH} levels")
        sizes[id(node)] = size, depth
        return size, depth

    measure(root)


def _construct(node: Any) -> Any:
    """Build the value of a node; aliased nodes give separate copies."""
    kind = type(node).__name__.removesuffix("Node").lower()
    if kind == "scalar":
        return _construct_scalar(node)
    if node.tag != f"{_TAG}{'map' if kind == 'mapping' else 'seq'}":
        raise ValueError(f"unsupported tag {node.tag}")
    if kind == "sequence":
        return [_construct(child) for child in node.value]
    content: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = _construct(key_node)
        if isinstance(key, dict | list):
            raise ValueError(f"line {key_node.start_mark.line + 1}: a key must be a scalar")
        if key in content:
            raise ValueError(f"line {key_node.start_mark.line + 1}: duplicate key {key!r}")
        content[key] = _construct(value_node)
    return content


def _construct_scalar(node: Any) -> Any:
    if node.tag == _PLAIN:
        return _resolve_plain(node.value)
    if node.tag == f"{_TAG}str":
        return node.value
    types = {f"{_TAG}int": int, f"{_TAG}float": float, f"{_TAG}bool": bool, f"{_TAG}null": type(None)}
    if node.tag not in types:
        raise ValueError(f"unsupported tag {node.tag}")
    value = _resolve_plain(node.value)
    if types[node.tag] is float and type(value) is int:
        return float(value)
    if type(value) is not types[node.tag]:
        raise ValueError(f"{node.value[:40]!r} is not a value of {node.tag}")
    return value


def _check_integers(content: Any) -> None:
    """Raise ValueError if nested lists and mappings contain an integer beyond 64 bits."""
    if isinstance(content, dict):
        for value in content.values():
            _check_integers(value)
    elif isinstance(content, list):
        for value in content:
            _check_integers(value)
    elif isinstance(content, int) and abs(content) > _MAX_INTEGER:
        raise ValueError(f"an integer of {content.bit_length()} bits exceeds 64 bits")


def _resolve_plain(text: str) -> Any:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INTEGER.fullmatch(text):
        # Python refuses to convert long decimals, and the time grows with the square of the length.
        if len(text) > _MAX_INTEGER_DIGITS:
            raise ValueError(f"the integer {text[:12]}… has {len(text)} digits; expected at most 64 bits")
        value = int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        _check_integers(value)
        return value
    if _FLOAT.fullmatch(text):
        return float(text)
    if _SPECIAL_FLOAT.fullmatch(text):
        return float(text.replace(".", "", 1))
    return text
