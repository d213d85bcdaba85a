"""Regression by ensembles of trees, boosted or a random forest, both by XGBoost and saved as its JSON."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparseflow.core.extras import require
from sparseflow.errors import FileFormatError, InputError

if TYPE_CHECKING:
    import numpy as np

BOOSTED, FOREST = "xgboost", "random_forest"
KINDS = (BOOSTED, FOREST)

_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    BOOSTED: {
        "eta": 0.05, "max_depth": 6, "min_child_weight": 2.0, "subsample": 0.8, "colsample_bytree": 0.7,
        "lambda": 1.0,
    },
    FOREST: {
        "eta": 1.0, "max_depth": 16, "min_child_weight": 2.0, "subsample": 0.8, "colsample_bynode": 0.5,
        "lambda": 0.0, "num_parallel_tree": 100,
    },
}  # fmt: skip
_ROUNDS = {BOOSTED: 500, FOREST: 1}


@dataclass(frozen=True)
class TreeEnsemble:
    """A fitted ensemble. Make one with `TreeEnsemble.fit`.

    Attributes:
        kind: `"xgboost"` or `"random_forest"`.
        columns: Columns that it reads.
    """

    kind: str
    columns: int
    _booster: Any

    @classmethod
    def fit(
        cls, x: np.ndarray, y: np.ndarray, kind: str = BOOSTED, *, seed: int = 0, threads: int = 1
    ) -> TreeEnsemble:
        """Fit by least squares; the same ensemble for the same arguments.

        Args:
            x: Features, float32, (rows, columns).
            y: What to predict, (rows,).
            kind: One of `KINDS`.
            seed: What rows and columns are drawn from.
            threads: Threads to fit with.

        Raises:
            InputError: There is no row, the lengths differ, or the kind is unknown.
            MissingExtraError: XGBoost is missing.
        """
        if kind not in KINDS:
            raise InputError(f"`kind` (={kind!r}) must be one of: {', '.join(KINDS)}")
        if len(x) != len(y) or not len(x):
            raise InputError(f"{len(x)} rows of features and {len(y)} of results: equal and some are needed")
        xgboost = require("xgboost", "latency")
        settings = {
            "objective": "reg:squarederror", "tree_method": "hist", "max_bin": 512, "seed": seed,
            "nthread": threads, "verbosity": 0, **_SETTINGS[kind],
        }  # fmt: skip
        booster = xgboost.train(settings, xgboost.DMatrix(x, label=y), num_boost_round=_ROUNDS[kind])
        return cls(kind, x.shape[1], booster)

    def predict(self, x: np.ndarray) -> np.ndarray:
        """What is expected for each row, float32, (rows,)."""
        if not len(x):
            return x[:, 0]
        # Onto nothing but its rows: XGBoost keeps no names of columns, the space of features does.
        return self._booster.inplace_predict(x)

    def to_dict(self) -> dict[str, Any]:
        """The ensemble in JSON's types: XGBoost's own JSON, compressed."""
        packed = zlib.compress(bytes(self._booster.save_raw("json")), 9)
        return {"kind": self.kind, "columns": self.columns, "model": base64.b64encode(packed).decode()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> TreeEnsemble:
        """Read back what `to_dict` gave.

        Raises:
            FileFormatError: It is something else.
            MissingExtraError: XGBoost is missing.
        """
        xgboost = require("xgboost", "latency")
        try:
            content = zlib.decompress(base64.b64decode(record["model"], validate=True))
            # Only its JSON, which holds numbers; never its binary forms, of which UBJSON begins with { too.
            if not content.startswith(b'{"'):
                raise ValueError("not XGBoost's JSON")
            kind, columns = record["kind"], int(record["columns"])
            if kind not in KINDS:
                raise ValueError(f"the kind {kind!r} is none of: {', '.join(KINDS)}")
            booster = xgboost.Booster({"nthread": 1})
            booster.load_model(bytearray(content))
            if booster.num_features() != columns:
                raise ValueError(f"it reads {booster.num_features()} columns, and {columns} are told")
            return cls(kind, columns, booster)
        except (KeyError, TypeError, ValueError, zlib.error, xgboost.core.XGBoostError) as error:
            text = next(iter(str(error).splitlines()), repr(error))
            raise FileFormatError(f"an ensemble of trees cannot be read: {text}") from error
