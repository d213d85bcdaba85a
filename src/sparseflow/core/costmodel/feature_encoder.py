"""From named features to the matrix that a regressor reads, the same one every time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparseflow.errors import FileFormatError, InputError

if TYPE_CHECKING:
    import numpy as np

Features = Mapping[str, float | str]


@dataclass(frozen=True, kw_only=True)
class FeatureEncoder:
    """Columns of a matrix of features.

    Attributes:
        numbers: Names of numeric features, a column each.
        categories: Name of a text feature -> its values, a column of 0 and 1 each. A value that was not seen
            leaves all of them 0.
    """

    numbers: tuple[str, ...]
    categories: Mapping[str, tuple[str, ...]]

    @classmethod
    def fit(cls, rows: Sequence[Features]) -> FeatureEncoder:
        """The space that holds `rows`.

        Raises:
            InputError: There are none, or a feature is a number in one and a text in another.
        """
        if not rows:
            raise InputError("a space of features needs at least one row")
        numbers: set[str] = set()
        categories: dict[str, set[str]] = {}
        for row in rows:
            for name, value in row.items():
                if isinstance(value, str):
                    categories.setdefault(name, set()).add(value)
                else:
                    numbers.add(name)
        mixed = numbers & categories.keys()
        if mixed:
            raise InputError(f"the features {sorted(mixed)} are numbers in some rows and texts in others")
        return cls(
            numbers=tuple(sorted(numbers)),
            categories={name: tuple(sorted(categories[name])) for name in sorted(categories)},
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns, `name=value` for those of a text."""
        told = (f"{name}={value}" for name, values in self.categories.items() for value in values)
        return (*self.numbers, *told)

    def transform(self, rows: Sequence[Features]) -> np.ndarray:
        """`rows` as float32, (rows, columns).

        Raises:
            InputError: A row lacks a number, or one of them is not finite.
        """
        import numpy as np

        found = np.zeros((len(rows), len(self.columns)), dtype=np.float32)
        largest = float(np.finfo(np.float32).max)
        places = {name: place for place, name in enumerate(self.columns)}
        for index, row in enumerate(rows):
            for name in self.numbers:
                value = row.get(name)
                if not isinstance(value, float | int) or not abs(value) <= largest:
                    raise InputError(f"the feature `{name}` must be a finite number, and is {value!r}")
                found[index, places[name]] = value
            for name in self.categories:
                value = row.get(name)
                if isinstance(value, str) and value in self.categories[name]:
                    found[index, places[f"{name}={value}"]] = 1.0
        return found

    def to_dict(self) -> dict[str, Any]:
        """The space in JSON's types."""
        return {
            "numbers": list(self.numbers),
            "categories": {name: list(values) for name, values in self.categories.items()},
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> FeatureEncoder:
        """Read back what `to_dict` gave. Raises FileFormatError where it is something else."""
        try:
            numbers, categories = record["numbers"], record["categories"]
            if not all(isinstance(names, list) for names in (numbers, *categories.values())):
                raise TypeError("names must stand in lists")
            return cls(
                numbers=tuple(map(str, numbers)),
                categories={str(k): tuple(map(str, v)) for k, v in categories.items()},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise FileFormatError(f"a space of features cannot be read: {error!r}") from error
