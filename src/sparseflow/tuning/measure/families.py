"""Families of related matrices; cost models are evaluated on families that they were not trained on.

By default the family of a matrix is its name up to the first digit, without leading digits and separators:

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

Sizes, versions and permutation tags (``_16x16_9``) follow the first digit. The rule prefers to merge
unrelated matrices over separating related ones: a family that is too large costs training data, a family that
is too small gives optimistic scores. A JSON file can override it by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from sparseflow.core.files import read_json
from sparseflow.errors import FileFormatError

_SEPARATORS = "-_. "


def infer_family(name: str, known: Mapping[str, str] | None = None) -> str:
    """Return the family of a matrix.

    Args:
        name: Matrix name.
        known: Matrix name -> family, which overrides the rule.
    """
    if known and name in known:
        return known[name]
    head = re.split(r"[0-9]", name.lstrip("0123456789" + _SEPARATORS), maxsplit=1)[0]
    return head.rstrip(_SEPARATORS) or name


def read_families(path: Path | str) -> dict[str, str]:
    """Read matrix name -> family from a JSON file with one object.

    Raises:
        InputError: The file does not exist.
        FileFormatError: The file has other content.
    """
    families = read_json(path)
    if not isinstance(families, dict) or not all(
        isinstance(family, str) and family for family in families.values()
    ):
        raise FileFormatError(f'{path} must have one object with names and families, {{"net100": "net"}}')
    return families
