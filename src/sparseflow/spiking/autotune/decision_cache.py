"""Decisions of the autotuner and their cache on disk."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from sparseflow.core.files import get_cache_dir, write_atomic

CACHE_VERSION = 1


class Decision(BaseModel):
    """How one group (or layer) runs, and why.

    Attributes:
        way: The chosen candidate.
        why: A sentence for people.
        ms: Median milliseconds of every candidate that was timed.
        remembered: The decision came from the disk.
    """

    model_config = ConfigDict(extra="forbid")

    way: str
    why: str
    ms: dict[str, float] = {}
    remembered: bool = False


class _CacheFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = CACHE_VERSION
    decisions: dict[str, Decision] = {}


class DecisionCache:
    """Decisions on disk, one JSON file; rebuilt with a warning when it cannot be read.

    Args:
        path: The file; by default `decisions.json` under `$SPARSEFLOW_CACHE`, else under
            `$XDG_CACHE_HOME/sparseflow`, else under `~/.cache/sparseflow`.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or default_cache_path()
        self._learned: dict[str, Decision] = {}
        self._content, problem = self._read()
        if problem is not None:
            warnings.warn(
                f"the decision cache {self.path} cannot be used ({problem}); it is rebuilt", stacklevel=3
            )

    def _read(self) -> tuple[_CacheFile, str | None]:
        """What the file holds, and what is wrong with it."""
        try:
            return _CacheFile.model_validate_json(self.path.read_bytes()), None
        except FileNotFoundError:
            return _CacheFile(), None
        except (OSError, ValidationError, ValueError) as error:
            return _CacheFile(), str(error).splitlines()[0]

    def get(self, key: str) -> Decision | None:
        found = self._content.decisions.get(key)
        return None if found is None else found.model_copy(update={"remembered": True})

    def put(self, key: str, decision: Decision) -> None:
        self._content.decisions[key] = self._learned[key] = decision

    def save(self) -> None:
        """Write what was learned, merged with what other processes have written since.

        A place that cannot be written to costs the memory, not the work: it is a warning.
        """
        merged = {**self._read()[0].decisions, **self._learned}
        content = _CacheFile(decisions=merged).model_dump(mode="json")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, json.dumps(content, indent=1, sort_keys=True).encode())
        except OSError as error:
            warnings.warn(
                f"decisions cannot be remembered in {self.path} ({error}); set SPARSEFLOW_CACHE to a folder "
                "that can be written",
                stacklevel=2,
            )


def default_cache_path() -> Path:
    """Where decisions are remembered unless the caller says otherwise."""
    return get_cache_dir() / "decisions.json"
