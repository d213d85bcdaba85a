"""Decisions of the autotuner and their cache on disk."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from sparseflow.core.artifact import Artifact
from sparseflow.core.config import StrictModel
from sparseflow.core.files import get_cache_dir
from sparseflow.errors import SparseFlowError


class Decision(StrictModel):
    """How one group, layer or network runs.

    Attributes:
        choice: The selected candidate.
        reason: A sentence for users.
        latency_ms: Median latency of each candidate that was timed.
        from_cache: The decision was read from disk.
    """

    choice: str
    reason: str
    latency_ms: dict[str, float] = Field(default_factory=dict)
    from_cache: bool = False


class ShapeDecisions(StrictModel):
    """All decisions about inputs of one shape.

    Attributes:
        network: What runs the network.
        groups: How each group or layer runs, by name.
    """

    network: Decision
    groups: dict[str, Decision]


class _CacheFile(Artifact):
    FORMAT: ClassVar[str] = "sparseflow.spiking.decision-cache"
    VERSION: ClassVar[int] = 3
    HINT: ClassVar[str] = "delete the file to rebuild it"

    decisions: dict[str, Decision] = Field(default_factory=dict)


class DecisionCache:
    """Decisions on disk, one JSON file; rebuilt with a warning if it cannot be read.

    Args:
        path: The file; by default `decisions.json` under `$SPARSEFLOW_CACHE`, else under
            `$XDG_CACHE_HOME/sparseflow`, else under `~/.cache/sparseflow`.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or get_cache_dir() / "decisions.json"
        self._added: dict[str, Decision] = {}
        self._decisions, problem = self._read()
        self._is_damaged = problem is not None
        if problem is not None:
            warnings.warn(f"rebuilding the decision cache: {problem}", stacklevel=3)

    def _read(self) -> tuple[dict[str, Decision], str | None]:
        """Read the file; return its decisions and what is wrong with it."""
        try:
            if not self.path.exists():
                return {}, None
            return _CacheFile.load(self.path).decisions, None
        except (OSError, SparseFlowError) as error:
            return {}, str(error).splitlines()[0]

    def get(self, key: str) -> Decision | None:
        decision = self._decisions.get(key)
        return None if decision is None else decision.model_copy(update={"from_cache": True})

    def put(self, key: str, decision: Decision) -> None:
        self._decisions[key] = self._added[key] = decision

    def discard_added(self) -> None:
        """Forget the decisions since the last `save`, because other programs disturbed their measurement."""
        for key in self._added:
            self._decisions.pop(key, None)
        self._added.clear()

    def save(self) -> None:
        """Write the decisions, merged with those that other processes have written since.

        Warns if the file cannot be written.
        """
        if not self._added and not self._is_damaged:
            return
        merged = {**self._read()[0], **self._added}
        try:
            _CacheFile(decisions=dict(sorted(merged.items()))).save(self.path, indent=1, rescue=False)
        except OSError as error:
            warnings.warn(
                f"the decision cache is not saved: {error}; set SPARSEFLOW_CACHE to a writable directory",
                stacklevel=2,
            )
