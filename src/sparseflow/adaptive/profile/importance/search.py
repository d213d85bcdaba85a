"""Finding the blocks that a model can do without: one by one, then sets of them by beam search.

What is lost without two blocks is not the sum of what is lost without each: often the second of two
neighbours matters only once the first is gone. So sets are scored as sets. Level s of the search holds the
`beam` best sets of s blocks after an insertion position; each is tried with every further block, the most
promising first: the one whose parent scored high and whose new block is worth little by itself.

Block 0 is never left out, since caches tell their length by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from sparseflow.adaptive.plan.space import ModelGeometry
from sparseflow.adaptive.profile.importance.result import AccuracyDrop, BlockImportance, SkippedBlocks
from sparseflow.core.journal import JsonLinesWriter, read_json_lines
from sparseflow.errors import FileFormatError, InputError

Score = Callable[[tuple[int, ...]], Any]
"""The blocks that run, ascending -> the score of each sample, a sequence or tensor of n finite numbers."""
Removed = tuple[int, ...]

_FORMAT = "sparseflow-adaptive-evaluations-1"
_DIGITS = 9


class EvaluationCache:
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

    def __init__(self, score: Score, geometry: ModelGeometry, model_id: str, journal: Path | None) -> None:
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

    def __enter__(self) -> EvaluationCache:
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


Progress = Callable[[str, float], None]
"""Called with (what was scored, fraction done)."""

_DRAWS = 4000
_CONFIDENCE = 0.95
_CHUNK = 4_000_000
"""Numbers of a bootstrap that are held at a time."""


def measure_importance(
    score: Score,
    geometry: ModelGeometry,
    *,
    beam: int = 4,
    budget: int | None = None,
    journal: Path | str | None = None,
    model_id: str = "",
    seed: int = 0,
    progress: Progress | None = None,
) -> BlockImportance:
    """Score sets of blocks and choose which to skip.

    Args:
        score: The blocks that run -> the score of each sample, the same samples each time. It is called once
            for each set.
        geometry: The model's.
        beam: Sets of each size that larger ones are made of.
        budget: Sets to score at most, those of the journal included; by default all that the search looks at.
            Every set that is chosen has been scored.
        journal: File of JSON lines to keep scores in; a call that was stopped goes on with it.
        model_id: Of the model, kept with the result; a journal of another one is refused.
        seed: What bootstrap samples are drawn from.
        progress: Called with (what was scored, fraction done).

    Raises:
        InputError: An argument is out of range, `score` does not give the same number of finite scores each
            time, or the journal is of another model.
        FileFormatError: The journal holds something else.
        RunError: Another process writes into the journal's folder, or the disk is full.
    """
    least = fewest_evaluations(geometry)
    if beam < 1:
        raise InputError(f"`beam` (={beam}) must be at least 1")
    if budget is not None and budget < least:
        raise InputError(
            f"`budget` (={budget}) must be at least {least}: every set that is chosen must be scored"
        )
    with EvaluationCache(score, geometry, model_id, None if journal is None else Path(journal)) as scored:
        search = _BlockSearch(scored, geometry, beam, budget, progress)
        search.run()
        wanted = [
            (position, geometry.depth - total)
            for position in geometry.positions
            for total in geometry.totals(position)
        ]
        sets = [search.best(position, size) for position, size in wanted]
        drops = _drops(scored, [*((block,) for block in range(1, geometry.depth)), *sets], seed)
        cut = geometry.depth - 1
        chosen = tuple(
            SkippedBlocks(position=position, drop=drop)
            for (position, _), drop in zip(wanted, drops[cut:], strict=True)
        )
        return BlockImportance(
            geometry=geometry, model_id=model_id, samples=len(scored[()]), full=scored.mean(()),
            singles=tuple(drops[:cut]), chosen=chosen, evaluations=len(scored),
        )  # fmt: skip


def fewest_evaluations(geometry: ModelGeometry) -> int:
    """The least budget: the whole model, each block but block 0, and one set a step of the search."""
    return geometry.depth + len(_steps(geometry))


def _steps(geometry: ModelGeometry) -> list[tuple[int, int]]:
    """(Size of set, insertion position), small sets first."""
    most = {position: geometry.depth - geometry.totals(position)[0] for position in geometry.positions}
    return [
        (size, position)
        for size in range(2, max(most.values()) + 1)
        for position in geometry.positions
        if most[position] >= size
    ]


class _BlockSearch:
    """A beam search over what to leave out."""

    def __init__(
        self,
        scored: EvaluationCache,
        geometry: ModelGeometry,
        beam: int,
        budget: int | None,
        progress: Progress | None,
    ) -> None:
        self._scored, self._geometry, self._beam = scored, geometry, beam
        self._budget, self._progress = budget, progress
        self._steps = _steps(geometry)
        # Without a budget about what full beams look at.
        wide = (beam * max(geometry.depth - position - size + 1, 1) for size, position in self._steps)
        self._expected = budget or geometry.depth + sum(wide)
        # Sets of the journal count when the search comes to them, so that it goes on as it would have gone.
        self._looked_at: set[Removed] = set()

    def run(self) -> None:
        self._look(())
        for block in range(1, self._geometry.depth):
            self._look((block,))
        for number, (size, position) in enumerate(self._steps):
            candidates = self._candidates(size, position)
            for removed in candidates[: self._share(len(self._steps) - number)]:
                self._look(removed)

    def best(self, position: int, size: int) -> Removed:
        """The set of so many blocks after a position without which the score is highest."""
        return self._ranked(position, size)[0]

    def _look(self, removed: Removed) -> None:
        self._scored.mean(removed)
        self._looked_at.add(removed)
        if self._progress is not None:
            told = f"without {', '.join(map(str, removed)) or 'none'}"
            self._progress(told, min(len(self._looked_at) / self._expected, 1.0))

    def _share(self, steps: int) -> int | None:
        """Sets to score in this step, so that what is left lasts for all that follow."""
        return None if self._budget is None else max((self._budget - len(self._looked_at)) // steps, 1)

    def _candidates(self, size: int, position: int) -> list[Removed]:
        """Sets to score, the most promising first."""
        whole = self._scored.mean(())
        worth = {block: whole - self._scored.mean((block,)) for block in range(1, self._geometry.depth)}
        found: dict[Removed, float] = {}
        for parent in self._ranked(position, size - 1)[: self._beam]:
            for block in range(position, self._geometry.depth):
                if block not in parent:
                    child = tuple(sorted((*parent, block)))
                    promise = self._scored.mean(parent) - worth[block]
                    found[child] = max(promise, found.get(child, promise))
        fresh = [child for child in found if child not in self._looked_at]
        return sorted(fresh, key=lambda child: (-found[child], child))

    def _ranked(self, position: int, size: int) -> list[Removed]:
        """Sets that were scored, the best first; of equal ones the one whose blocks are worth least one by
        one."""
        here = [
            removed
            for removed in self._looked_at
            if len(removed) == size and all(block >= position for block in removed)
        ]
        return sorted(
            here,
            key=lambda removed: (
                -self._scored.mean(removed), -sum(self._scored.mean((block,)) for block in removed), removed,
            ),
        )  # fmt: skip


def _drops(scored: EvaluationCache, sets: list[Removed], seed: int) -> list[AccuracyDrop]:
    """What is lost without each set, with paired bootstrap intervals: all by the same draws of samples."""
    whole = scored[()]
    lost = np.stack([whole - scored[removed] for removed in sets], axis=1)
    count = len(whole)
    generator = np.random.default_rng(seed)
    even = np.full(count, 1.0 / count)
    means, size = [], max(_CHUNK // count, 1)
    for begin in range(0, _DRAWS, size):
        times = generator.multinomial(count, even, size=min(size, _DRAWS - begin))
        means.append(times @ lost / count)
    tail = (1.0 - _CONFIDENCE) / 2.0
    low, high = np.quantile(np.concatenate(means), [tail, 1.0 - tail], axis=0)
    return [
        AccuracyDrop(
            without=removed, drop=float(lost[:, at].mean()), low=float(low[at]), high=float(high[at])
        )
        for at, removed in enumerate(sets)
    ]
