"""Scores of a model without some of its blocks, each scored once, also over several runs.

A journal of JSON lines has what the scores are of first, and then a line for each set of blocks: those that
were left out, and the score of every sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from sparseflow.adaptive.plan import Geometry
from sparseflow.core.journal import JsonLinesWriter, read_json_lines
from sparseflow.errors import FileFormatError, InputError

Score = Callable[[tuple[int, ...]], Any]
"""The blocks that run, ascending -> the score of each sample, a sequence or tensor of n finite numbers."""
Removed = tuple[int, ...]

_FORMAT = "sparseflow-adaptive-evaluations-1"
_DIGITS = 9


class Evaluations:
    """Scores by what was left out. Use it as a context manager.

    Args:
        score: Scores sets.
        geometry: The model's.
        model_id: Of the model.
        journal: File to keep scores in, and to take them from; its folder is locked meanwhile.

    Raises:
        InputError: The journal is of another model.
        FileFormatError: It holds something else.
        RunError: Another process writes into its folder.
    """

    def __init__(self, score: Score, geometry: Geometry, model_id: str, journal: Path | None) -> None:
        self._score, self._depth = score, geometry.depth
        self._scores: dict[Removed, np.ndarray] = {}
        self._lines: JsonLinesWriter | None = None
        if journal is None:
            return
        journal.parent.mkdir(parents=True, exist_ok=True)
        self._lines = JsonLinesWriter(journal)
        try:
            self._resume(journal, {"format": _FORMAT, "geometry": geometry.to_dict(), "model_id": model_id})
        except BaseException:
            self._lines.close()
            raise

    def __len__(self) -> int:
        return len(self._scores)

    def __getitem__(self, removed: Removed) -> np.ndarray:
        """Scores without some blocks, made where they are not there: float64, [samples].

        Raises:
            InputError: What the scores are is no score of each sample.
        """
        if removed not in self._scores:
            kept = tuple(block for block in range(self._depth) if block not in removed)
            found = self._checked(self._score(kept), kept)
            if self._lines is not None:
                self._lines.write(
                    {"without": list(removed), "scores": [round(each, _DIGITS) for each in found.tolist()]}
                )
                # As they would be read: a search that goes on must not differ in the last digit.
                found = found.round(_DIGITS)
            self._scores[removed] = found
        return self._scores[removed]

    def mean(self, removed: Removed) -> float:
        """Mean score without some blocks."""
        return float(self[removed].mean())

    def __enter__(self) -> Evaluations:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lines is not None:
            self._lines.close()

    def _resume(self, journal: Path, about: Mapping[str, Any]) -> None:
        assert self._lines is not None
        lines = read_json_lines(journal)
        if not lines:
            self._lines.write(about)
            return
        if lines[0].get("format") != _FORMAT:
            raise FileFormatError(f"{journal} holds no scores of blocks of this version of SparseFlow")
        if lines[0] != about:
            raise InputError(
                f"{journal} holds scores of another model: {lines[0]}, not {dict(about)}; name another file"
            )
        for number, line in enumerate(lines[1:], start=2):
            try:
                removed = tuple(map(int, line["without"]))
                self._scores[removed] = self._checked(line["scores"], removed)
            except (KeyError, TypeError, InputError) as error:
                raise FileFormatError(
                    f"{journal}, line {number}, is no score of a set of blocks: {error}"
                ) from error

    def _checked(self, scores: Any, blocks: Removed) -> np.ndarray:
        if hasattr(scores, "detach"):
            scores = scores.detach().cpu()
        try:
            found = np.asarray(scores, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"`score` of blocks {blocks} must give one number for each sample: {error}"
            ) from error
        if found.ndim != 1 or not len(found) or not np.isfinite(found).all():
            raise InputError(
                f"`score` of blocks {blocks} must give one finite number for each sample; it gave "
                f"{found.shape} with {int((~np.isfinite(found)).sum())} that are not finite"
            )
        before = next(iter(self._scores.values()), found)
        if len(before) != len(found):
            raise InputError(
                f"`score` of blocks {blocks} gave {len(found)} samples, and others had {len(before)}: sets "
                "are held against each other on the same samples"
            )
        return found
