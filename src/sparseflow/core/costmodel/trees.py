"""Regression with tree ensembles (boosted or random forest) of XGBoost, saved as JSON."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparseflow.core.checks import check_one_of
from sparseflow.core.extras import require
from sparseflow.errors import FileFormatError, InputError

if TYPE_CHECKING:
    import numpy as np

BOOSTED, FOREST = "xgboost", "random_forest"
KINDS = (BOOSTED, FOREST)

_PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    BOOSTED: {
        "eta": 0.05, "max_depth": 6, "min_child_weight": 1.0, "subsample": 0.8, "colsample_bytree": 0.7,
        "lambda": 1.0,
    },
    FOREST: {
        "eta": 1.0, "max_depth": 16, "min_child_weight": 2.0, "subsample": 0.8, "colsample_bynode": 0.5,
        "lambda": 0.0, "num_parallel_tree": 100,
    },
}  # fmt: skip
_NUM_ROUNDS = {BOOSTED: 800, FOREST: 1}


@dataclass(frozen=True)
class TreeEnsemble:
    """A fitted ensemble; created by `TreeEnsemble.fit`.

    Attributes:
        kind: `"xgboost"` or `"random_forest"`.
        columns: Number of feature columns.
    """

    kind: str
    columns: int
    _booster: Any

    @classmethod
    def fit(
        cls, x: np.ndarray, y: np.ndarray, kind: str = BOOSTED, *, seed: int = 0, threads: int = 1
    ) -> TreeEnsemble:
        """Fit by least squares; equal arguments give equal ensembles.

        Args:
            x: Features, float32, shape [rows, columns].
            y: Targets, shape [rows].
            kind: One of `KINDS`.
            seed: Seed of the row and column sampling.
            threads: Threads to fit with.

        Raises:
            InputError: There are no rows, the lengths differ, or the kind is unknown.
            MissingExtraError: XGBoost is not installed.
        """
        check_one_of(KINDS, kind=kind)
        if len(x) != len(y) or not len(x):
            raise InputError(
                f"expected equally many features and targets, at least one; got {len(x)} and {len(y)}"
            )
        xgboost = require("xgboost", "latency")
        parameters = {
            "objective": "reg:squarederror", "tree_method": "hist", "max_bin": 512, "seed": seed,
            "nthread": threads, "verbosity": 0, **_PARAMETERS[kind],
        }  # fmt: skip
        booster = xgboost.train(parameters, xgboost.DMatrix(x, label=y), num_boost_round=_NUM_ROUNDS[kind])
        return cls(kind, x.shape[1], booster)

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Predictions, float32, shape [rows]."""
        if not len(x):
            return x[:, 0]
        # Without a DMatrix: column names are kept by the feature encoder.
        return self._booster.inplace_predict(x)

    def to_dict(self) -> dict[str, Any]:
        """Ensemble in JSON's types; the model is XGBoost's JSON, compressed."""
        compressed = zlib.compress(bytes(self._booster.save_raw("json")), 9)
        return {"kind": self.kind, "columns": self.columns, "model": base64.b64encode(compressed).decode()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> TreeEnsemble:
        """Inverse of `to_dict`.

        Raises:
            FileFormatError: The record is malformed.
            MissingExtraError: XGBoost is not installed.
        """
        xgboost = require("xgboost", "latency")
        try:
            content = zlib.decompress(base64.b64decode(record["model"], validate=True))
            # Accept JSON only, which holds nothing but numbers. UBJSON starts with { too.
            if not content.startswith(b'{"'):
                raise ValueError("the model is not XGBoost's JSON")
            kind, columns = record["kind"], int(record["columns"])
            check_one_of(KINDS, kind=kind)
            booster = xgboost.Booster({"nthread": 1})
            booster.load_model(bytearray(content))
            if booster.num_features() != columns:
                raise ValueError(f"`columns` is {columns}, and the model has {booster.num_features()}")
            return cls(kind, columns, booster)
        except (KeyError, TypeError, ValueError, zlib.error, xgboost.core.XGBoostError) as error:
            reason = next(iter(str(error).splitlines()), repr(error))
            raise FileFormatError(f"malformed tree ensemble: {reason}") from error
