"""Which matrices are kin: a model is judged by families that it has never seen.

By default a matrix's family is its name up to the first digit, without digits and separators in front:

====================================  =================
name                                  family
====================================  =================
``net100``, ``net150``                ``net``
``Trec6_16x16_9``                     ``Trec``
``mhd4800a``, ``mhd4800b``            ``mhd``
``encoder.layer.10.output.weight``    ``encoder.layer``
``1138_bus``, ``494_bus``             ``bus``
``cca``                               ``cca``
====================================  =================

Sizes, versions and tags of permutations (``_16x16_9``) stand behind the first digit. The rule rather joins
strangers than it parts kin: a family too large costs a model some training data, one too small flatters it.
A file of families corrects it by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from sparseflow.errors import FileFormatError, InputError

_AROUND = "-_. "


def family_of(name: str, known: Mapping[str, str] | None = None) -> str:
    """The family of a matrix.

    Args:
        name: The matrix's.
        known: Name -> family, where the rule shall not decide.
    """
    if known and name in known:
        return known[name]
    head = re.split(r"[0-9]", name.lstrip("0123456789" + _AROUND), maxsplit=1)[0]
    return head.rstrip(_AROUND) or name


def read_families(path: Path | str) -> dict[str, str]:
    """Name -> family, from a JSON file that holds one object with just that.

    Raises:
        InputError: There is no such file.
        FileFormatError: It holds something else.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"there is no file {file}")
    try:
        found = json.loads(file.read_bytes())
    except ValueError as error:
        raise FileFormatError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(each, str) and each for each in found.values()):
        raise FileFormatError(f'{file} must hold one object of names and families, {{"net100": "net"}}')
    return found
