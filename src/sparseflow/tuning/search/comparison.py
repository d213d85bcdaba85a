"""Ways to search side by side: the same problem, as many measurements, with the model and without."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparseflow.core.files import write_atomic
from sparseflow.core.progress import Progress
from sparseflow.errors import FileFormatError
from sparseflow.tuning.search.guided import GUIDED
from sparseflow.tuning.search.session import Prior, explore

METHODS = ("random", "annealing", "qlearning")
"""AutoSparse's ways to search."""

_CLOSE = 1.05
"""A search has arrived when it is within 5 % of the best that any search of its problem found."""


@dataclass(frozen=True, kw_only=True)
class Searched:
    """One search, for comparison with others of the same problem.

    Attributes:
        problem: Its matrix, operator and columns, as one name.
        method: The way to search.
        ratios: Time over the reference's of every schedule in the order measured; None where one failed.
        seconds: Part -> how long it took in all: "propose", "build", "compile", "measure", "rest".
    """

    problem: str
    method: str
    ratios: tuple[float | None, ...]
    seconds: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types; `from_dict` reads them back."""
        return {**vars(self), "ratios": list(self.ratios), "seconds": dict(self.seconds)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Searched:
        """What `to_dict` wrote. Raises KeyError, TypeError or ValueError for something else."""
        return cls(
            problem=str(record["problem"]),
            method=str(record["method"]),
            ratios=tuple(None if ratio is None else float(ratio) for ratio in record["ratios"]),
            seconds={str(part): float(took) for part, took in record["seconds"].items()},
        )

    def best(self) -> list[float]:
        """The best ratio after each measurement; infinite before one ran."""
        found, least = [], float("inf")
        for ratio in self.ratios:
            least = min(least, float("inf") if ratio is None else ratio)
            found.append(least)
        return found

    def arrived(self, goal: float) -> int | None:
        """Measurements until the best was within 5 % of `goal`; None where it never was."""
        return next((at for at, best in enumerate(self.best(), start=1) if best <= _CLOSE * goal), None)


def compare_searches(
    name: str,
    operator: str,
    matrix: Any,
    folder: Path | str,
    *,
    n_cols: int | None = None,
    methods: Sequence[str] = METHODS,
    trials: int = 100,
    prior: Prior | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> list[Searched]:
    """Search by each method with the model and without; a search that is done is a file, and not done again.

    Args:
        name: Of the matrix.
        operator: `"spmm"`, `"spmv"` or `"sddmm"`.
        matrix: As `explore` takes it.
        folder: Where a JSON file for each search goes; made when absent.
        n_cols: Columns of the dense operands; None for SpMV.
        methods: Unguided ways to search.
        trials: Schedules that each measures, baselines besides.
        prior: What the guided ones begin with; see `explore`.
        progress: Called with (what was done, fraction done).
        options: Further ones of `explore`.

    Raises:
        FileFormatError: A file of the folder is damaged.
        InputError, RunError: As `explore`.
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    problem = f"{name}, {operator}" + ("" if n_cols is None else f", {n_cols} columns")
    wanted = [each for method in methods for each in (method, GUIDED + method)]
    found = []
    for number, method in enumerate(wanted, start=1):
        path = root / f"{name} {operator} {n_cols or ''} {method} {trials}.json"
        if not path.is_file():
            tuned = explore(
                operator, matrix, n_cols=n_cols, trials=trials, budget_s=math.inf, method=method,
                prior=prior if method.startswith(GUIDED) else None, **options,
            )  # fmt: skip
            searched = Searched(
                problem=problem,
                method=method,
                ratios=tuple(None if each.error else each.ratio for each in tuned.trials),
                seconds=tuned.seconds,
            )
            write_atomic(path, json.dumps(searched.to_dict()))
        found.append(read_searched(path))
        if progress is not None:
            progress(f"{problem}: {method}", number / len(wanted))
    return found


def read_searched(path: Path) -> Searched:
    """A search from its file. Raises FileFormatError where it is damaged."""
    try:
        return Searched.from_dict(json.loads(path.read_bytes()))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileFormatError(f"{path} is no search ({error}); remove it") from error
