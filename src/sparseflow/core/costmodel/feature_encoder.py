"""Encoding of named features as a matrix with fixed columns."""

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
    """Columns of a feature matrix: numbers as they are, strings one-hot.

    Attributes:
        numbers: Names of the numeric features, one column each.
        categories: Name of a string feature -> its values, one column each. An unknown value is encoded as
            zeros.
    """

    numbers: tuple[str, ...]
    categories: Mapping[str, tuple[str, ...]]

    @classmethod
    def fit(cls, rows: Sequence[Features]) -> FeatureEncoder:
        """Collect the features and categories of `rows`.

        Raises:
            InputError: There are no rows, or a feature is a number in one row and a string in another.
        """
        if not rows:
            raise InputError("a feature encoder needs at least one row")
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
            raise InputError(f"features are numbers in some rows and strings in others: {sorted(mixed)}")
        return cls(
            numbers=tuple(sorted(numbers)),
            categories={name: tuple(sorted(categories[name])) for name in sorted(categories)},
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns; `name=value` for the columns of a string feature."""
        one_hot = (f"{name}={value}" for name, values in self.categories.items() for value in values)
        return (*self.numbers, *one_hot)

    def transform(self, rows: Sequence[Features]) -> np.ndarray:
        """Encode `rows` as float32, shape [rows, columns]; unknown features are ignored.

        Raises:
            InputError: A numeric feature is missing from a row, or is not finite in float32.
        """
        import numpy as np

        matrix = np.zeros((len(rows), len(self.columns)), dtype=np.float32)
        max_value = float(np.finfo(np.float32).max)
        column_of = {name: column for column, name in enumerate(self.columns)}
        for index, row in enumerate(rows):
            for name in self.numbers:
                value = row.get(name)
                if not isinstance(value, float | int) or not abs(value) <= max_value:
                    raise InputError(f"feature `{name}` must be a finite number, got {value!r}")
                matrix[index, column_of[name]] = value
            for name in self.categories:
                value = row.get(name)
                if isinstance(value, str) and value in self.categories[name]:
                    matrix[index, column_of[f"{name}={value}"]] = 1.0
        return matrix

    def to_dict(self) -> dict[str, Any]:
        """Encoder in JSON's types."""
        return {
            "numbers": list(self.numbers),
            "categories": {name: list(values) for name, values in self.categories.items()},
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> FeatureEncoder:
        """Inverse of `to_dict`. Raises FileFormatError if the record is malformed."""
        try:
            numbers, categories = record["numbers"], record["categories"]
            if not all(isinstance(names, list) for names in (numbers, *categories.values())):
                raise TypeError("names must be lists")
            return cls(
                numbers=tuple(map(str, numbers)),
                categories={str(k): tuple(map(str, v)) for k, v in categories.items()},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise FileFormatError(f"malformed feature encoder: {error!r}") from error
