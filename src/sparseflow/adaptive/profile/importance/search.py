"""Beam search for the blocks that a model can skip.

The loss without two blocks is not the sum of the losses without each: often the second of two neighbors
matters only once the first is removed. Sets are therefore evaluated as sets. Level s of the search holds the
`beam` best sets of s blocks after an insertion position. Each is extended by every further block, in order of
the score of the set minus the loss without the block alone.

Block 0 is never removed, because caches derive their length from it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from sparseflow.adaptive.plan.space import ModelGeometry
from sparseflow.adaptive.profile.importance.result import AccuracyDrop, BlockImportance, SkippedBlocks
from sparseflow.core.artifact import Artifact, DictField
from sparseflow.core.checks import check_at_least
from sparseflow.core.config import StrictModel
from sparseflow.core.journal import Journal
from sparseflow.core.progress import Progress
from sparseflow.errors import FileFormatError, InputError

ScoreFunction = Callable[[tuple[int, ...]], Any]
"""Maps the blocks that run, ascending, to the score of each sample: a sequence or tensor of n finite
numbers."""
BlockSet = tuple[int, ...]
"""Removed blocks, ascending."""

_SCORE_DIGITS = 9


class _JournalHeader(Artifact):
    FORMAT: ClassVar[str] = "sparseflow.adaptive.block-scores"
    VERSION: ClassVar[int] = 2
    HINT: ClassVar[str] = "delete the file to evaluate all blocks again"

    geometry: Annotated[ModelGeometry, DictField()]
    model_id: str


class _ScoreRow(StrictModel):
    removed: BlockSet
    scores: tuple[float, ...]


class ScoreCache:
    """Scores of sets of removed blocks, computed on first use. A context manager.

    Args:
        score: Evaluates the model.
        geometry: Geometry of the model.
        model_id: Digest of the model.
        journal_path: File that stores the scores, in an existing directory; it is locked until the exit.

    Raises:
        InputError: The journal is of another model.
        FileFormatError: The journal is foreign, damaged, or of another version.
        RunError: Another process writes into the directory.
    """

    def __init__(
        self, score: ScoreFunction, geometry: ModelGeometry, model_id: str, journal_path: Path | None
    ) -> None:
        self._score, self._depth = score, geometry.depth
        self._scores: dict[BlockSet, np.ndarray] = {}
        self._journal: Journal[_ScoreRow] | None = None
        if journal_path is None:
            return
        journal_path.parent.mkdir(parents=True, exist_ok=True)
        header = _JournalHeader(geometry=geometry, model_id=model_id)
        self._journal = Journal(journal_path, _ScoreRow, header=header, key=lambda row: row.removed)
        try:
            for index, row in enumerate(self._journal.rows):
                self._add_row(index, row)
        except BaseException:
            self._journal.close()
            raise

    def __len__(self) -> int:
        return len(self._scores)

    def __getitem__(self, removed: BlockSet) -> np.ndarray:
        """Scores without some blocks: [samples] float64.

        Raises:
            InputError: The score function does not return one finite number per sample.
        """
        if removed not in self._scores:
            blocks = tuple(block for block in range(self._depth) if block not in removed)
            scores = self._check_scores(self._score(blocks), blocks)
            if self._journal is not None:
                # Rounded as stored, so that a resumed search does not differ in the last digit.
                scores = np.array([round(score, _SCORE_DIGITS) for score in scores.tolist()])
                self._journal.append(_ScoreRow(removed=removed, scores=tuple(scores.tolist())))
            self._scores[removed] = scores
        return self._scores[removed]

    def mean(self, removed: BlockSet) -> float:
        """Mean score without some blocks."""
        return float(self[removed].mean())

    def __enter__(self) -> ScoreCache:
        return self

    def __exit__(self, *error: object) -> None:
        if self._journal is not None:
            self._journal.close()

    def _add_row(self, index: int, row: _ScoreRow) -> None:
        assert self._journal is not None
        try:
            self._scores[row.removed] = self._check_scores(row.scores, row.removed)
        except InputError as error:
            raise FileFormatError(f"{self._journal.locate(index)}: {error}; remove the line") from error

    def _check_scores(self, scores: Any, blocks: tuple[int, ...]) -> np.ndarray:
        if hasattr(scores, "detach"):
            scores = scores.detach().cpu()
        try:
            array = np.asarray(scores, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"`score` of blocks {blocks} must return one number per sample: {error}"
            ) from error
        if array.ndim != 1 or not len(array) or not np.isfinite(array).all():
            raise InputError(
                f"`score` of blocks {blocks} must return one finite number per sample, got shape "
                f"{list(array.shape)} with {int((~np.isfinite(array)).sum())} non-finite numbers"
            )
        num_samples = len(next(iter(self._scores.values()), array))
        if num_samples != len(array):
            raise InputError(f"`score` of blocks {blocks} returned {len(array)} samples, not {num_samples}")
        return array


_NUM_RESAMPLES = 4000
_CONFIDENCE = 0.95
_MAX_DRAWS_IN_MEMORY = 4_000_000


def measure_importance(
    score: ScoreFunction,
    geometry: ModelGeometry,
    *,
    beam: int = 4,
    journal_path: Path | str | None = None,
    model_id: str = "",
    seed: int = 0,
    progress: Progress | None = None,
) -> BlockImportance:
    """Evaluate sets of blocks and select which blocks to skip.

    Args:
        score: Maps the blocks that run to the score of each sample, always of the same samples. It is called
            once per set.
        geometry: Geometry of the model.
        beam: Sets of each size that are extended.
        journal_path: JSON-lines file that stores the scores; an interrupted call resumes from it.
        model_id: Digest of the model, stored with the result; a journal of another model is refused.
        seed: Seed of the bootstrap.
        progress: Called with (evaluated set, fraction done).

    Raises:
        InputError: An argument is out of range, `score` does not return the same number of finite scores each
            time, or the journal is of another model.
        FileFormatError: The journal is foreign, damaged, or of another version.
        RunError: Another process writes into the journal's directory, or the disk is full.
    """
    check_at_least(1, beam=beam)
    path = None if journal_path is None else Path(journal_path)
    with ScoreCache(score, geometry, model_id, path) as scores:
        search = _BeamSearch(scores, geometry, beam, progress)
        search.run()
        targets = [
            (position, geometry.depth - total)
            for position in geometry.positions
            for total in geometry.block_counts(position)
        ]
        sets = [search.select_best(position, size) for position, size in targets]
        num_singles = geometry.depth - 1
        drops = _compute_drops(scores, [*((block,) for block in range(1, geometry.depth)), *sets], seed)
        skips = tuple(
            SkippedBlocks(position=position, drop=drop)
            for (position, _), drop in zip(targets, drops[num_singles:], strict=True)
        )
        return BlockImportance(
            geometry=geometry, model_id=model_id, samples=len(scores[()]), full_score=scores.mean(()),
            single_drops=tuple(drops[:num_singles]), skips=skips, evaluations=len(scores),
        )  # fmt: skip


def _list_steps(geometry: ModelGeometry) -> list[tuple[int, int]]:
    """Steps of the search as (size of the set, insertion position), small sets first."""
    max_size = {
        position: geometry.depth - geometry.block_counts(position)[0] for position in geometry.positions
    }
    return [
        (size, position)
        for size in range(2, max(max_size.values()) + 1)
        for position in geometry.positions
        if max_size[position] >= size
    ]


class _BeamSearch:
    """Beam search over sets of removed blocks."""

    def __init__(
        self,
        scores: ScoreCache,
        geometry: ModelGeometry,
        beam: int,
        progress: Progress | None,
    ) -> None:
        self._scores, self._geometry, self._beam, self._progress = scores, geometry, beam, progress
        self._steps = _list_steps(geometry)
        # An estimate for the progress: the evaluations of full beams.
        widths = (beam * max(geometry.depth - position - size + 1, 1) for size, position in self._steps)
        self._expected = geometry.depth + sum(widths)
        # Sets of the journal count only once the search reaches them, so that a resumed search is the same.
        self._evaluated: set[BlockSet] = set()

    def run(self) -> None:
        self._evaluate(())
        for block in range(1, self._geometry.depth):
            self._evaluate((block,))
        for size, position in self._steps:
            for removed in self._make_candidates(size, position):
                self._evaluate(removed)

    def select_best(self, position: int, size: int) -> BlockSet:
        """The set of `size` blocks after a position whose removal leaves the highest score."""
        return self._rank(position, size)[0]

    def _evaluate(self, removed: BlockSet) -> None:
        self._scores.mean(removed)
        self._evaluated.add(removed)
        if self._progress is not None:
            message = f"without {', '.join(map(str, removed)) or 'none'}"
            self._progress(message, min(len(self._evaluated) / self._expected, 1.0))

    def _make_candidates(self, size: int, position: int) -> list[BlockSet]:
        """Sets to evaluate: those with one more block than the best sets, most promising first."""
        full = self._scores.mean(())
        drop = {block: full - self._scores.mean((block,)) for block in range(1, self._geometry.depth)}
        promise: dict[BlockSet, float] = {}
        for parent in self._rank(position, size - 1)[: self._beam]:
            for block in range(position, self._geometry.depth):
                if block not in parent:
                    child = tuple(sorted((*parent, block)))
                    value = self._scores.mean(parent) - drop[block]
                    promise[child] = max(value, promise.get(child, value))
        candidates = [child for child in promise if child not in self._evaluated]
        return sorted(candidates, key=lambda child: (-promise[child], child))

    def _rank(self, position: int, size: int) -> list[BlockSet]:
        """Evaluated sets, best first; ties prefer blocks with a small loss as single blocks."""
        candidates = [
            removed
            for removed in self._evaluated
            if len(removed) == size and all(block >= position for block in removed)
        ]
        return sorted(
            candidates,
            key=lambda removed: (
                -self._scores.mean(removed), -sum(self._scores.mean((block,)) for block in removed), removed,
            ),
        )  # fmt: skip


def _compute_drops(scores: ScoreCache, sets: list[BlockSet], seed: int) -> list[AccuracyDrop]:
    """Losses without each set, with paired bootstrap intervals: all sets share the resamples."""
    full = scores[()]
    losses = np.stack([full - scores[removed] for removed in sets], axis=1)
    num_samples = len(full)
    generator = np.random.default_rng(seed)
    uniform = np.full(num_samples, 1.0 / num_samples)
    means, step = [], max(_MAX_DRAWS_IN_MEMORY // num_samples, 1)
    for start in range(0, _NUM_RESAMPLES, step):
        counts = generator.multinomial(num_samples, uniform, size=min(step, _NUM_RESAMPLES - start))
        means.append(counts @ losses / num_samples)
    tail = (1.0 - _CONFIDENCE) / 2.0
    low, high = np.quantile(np.concatenate(means), [tail, 1.0 - tail], axis=0)
    return [
        AccuracyDrop(
            blocks=removed,
            drop=float(losses[:, index].mean()),
            low=float(low[index]),
            high=float(high[index]),
        )
        for index, removed in enumerate(sets)
    ]
