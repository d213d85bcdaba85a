"""Tree ensembles."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from typing import Any

import numpy as np
import pytest

pytest.importorskip("xgboost")

from sparseflow.core.costmodel import trees
from sparseflow.core.costmodel.trees import BOOSTED, FOREST, KINDS, TreeEnsemble
from sparseflow.errors import FileFormatError, InputError


def make_samples(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Features and targets: one step, one slope, one irrelevant column."""
    x = np.random.default_rng(seed).uniform(0.0, 1.0, (count, 3)).astype(np.float32)
    return x, np.where(x[:, 0] > 0.5, 3.0, 1.0) + x[:, 1]


@pytest.fixture(autouse=True)
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "_NUM_ROUNDS", {BOOSTED: 60, FOREST: 1})


@pytest.fixture(scope="module")
def fitted() -> dict[str, TreeEnsemble]:
    x, y = make_samples(150, seed=0)
    return {kind: TreeEnsemble.fit(x, y, kind) for kind in KINDS}


def compress(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode()


@pytest.mark.parametrize("kind", KINDS)
def test_fit_predicts_better_than_the_mean(kind: str) -> None:
    ensemble = TreeEnsemble.fit(*make_samples(300, seed=1), kind)
    x, y = make_samples(200, seed=2)
    predicted = ensemble.predict(x)
    assert predicted.dtype == np.float32 and predicted.shape == (200,)
    assert ((predicted - y) ** 2).mean() < 0.1 * y.var()


@pytest.mark.parametrize("kind", KINDS)
def test_fit_depends_on_the_seed_only(kind: str) -> None:
    x, y = make_samples(150, seed=0)
    first = TreeEnsemble.fit(x, y, kind, seed=3).to_dict()
    np.random.seed(99)
    assert TreeEnsemble.fit(x, y, kind, seed=3).to_dict() == first
    assert TreeEnsemble.fit(x, y, kind, seed=4).to_dict() != first


@pytest.mark.parametrize("kind", KINDS)
def test_from_dict_restores_the_ensemble(kind: str, fitted: dict[str, TreeEnsemble]) -> None:
    record = json.loads(json.dumps(fitted[kind].to_dict()))
    restored = TreeEnsemble.from_dict(record)
    x, _ = make_samples(50, seed=5)
    assert (restored.kind, restored.columns) == (kind, 3)
    assert np.array_equal(restored.predict(x), fitted[kind].predict(x))
    assert np.array_equal(TreeEnsemble.from_dict(restored.to_dict()).predict(x), restored.predict(x))


@pytest.mark.parametrize("kind", KINDS)
def test_predict_of_a_row_does_not_depend_on_other_rows(kind: str, fitted: dict[str, TreeEnsemble]) -> None:
    x, _ = make_samples(8, seed=6)
    batched = fitted[kind].predict(x)
    assert [fitted[kind].predict(row[None])[0] for row in x] == batched.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_fit_to_one_sample_predicts_its_target(kind: str) -> None:
    ensemble = TreeEnsemble.fit(np.zeros((1, 2), np.float32), np.array([7.0]), kind)
    assert ensemble.predict(np.ones((2, 2), np.float32)).tolist() == pytest.approx([7.0, 7.0])


def test_predict_without_rows_is_empty(fitted: dict[str, TreeEnsemble]) -> None:
    predicted = fitted[BOOSTED].predict(np.zeros((0, 3), np.float32))
    assert predicted.shape == (0,) and predicted.dtype == np.float32


def test_fit_with_an_unknown_kind_raises() -> None:
    with pytest.raises(InputError, match=r"'linear'.*xgboost, random_forest"):
        TreeEnsemble.fit(*make_samples(5, seed=0), "linear")


@pytest.mark.parametrize(("rows", "targets"), [(5, 4), (4, 5), (0, 0), (0, 3)])
def test_fit_with_different_lengths_raises(rows: int, targets: int) -> None:
    with pytest.raises(InputError, match=f"{rows} and {targets}"):
        TreeEnsemble.fit(np.zeros((rows, 2), np.float32), np.zeros(targets))


class Hostile:
    """Its pickle calls `fail_on_load` when it is loaded."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return fail_on_load, ()


def fail_on_load() -> None:
    raise AssertionError("a pickle was loaded")


@pytest.mark.parametrize(
    "model",
    [
        None,
        7,
        "",
        "not base64!",
        base64.b64encode(b"not compressed").decode(),
        compress(b""),
        compress(b"{"),
        compress(b"{}"),
        compress(b"[1, 2]"),
        compress(b'{"learner": {"gradient_booster": {}}}'),
        compress(b"binf\x00\x00\x00\x00"),
        compress(pickle.dumps(Hostile())),
        base64.b64encode(pickle.dumps(Hostile())).decode(),
    ],
)
def test_from_dict_with_another_format_raises(model: Any) -> None:
    with pytest.raises(FileFormatError, match=r": \S"):
        TreeEnsemble.from_dict({"kind": BOOSTED, "columns": 3, "model": model})


def test_from_dict_with_ubjson_raises(fitted: dict[str, TreeEnsemble]) -> None:
    binary = bytes(fitted[BOOSTED]._booster.save_raw("ubj"))
    with pytest.raises(FileFormatError, match="JSON"):
        TreeEnsemble.from_dict({"kind": BOOSTED, "columns": 3, "model": compress(binary)})


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.9, 0.999])
def test_from_dict_with_truncated_content_raises(fraction: float, fitted: dict[str, TreeEnsemble]) -> None:
    record = fitted[BOOSTED].to_dict()
    content = zlib.decompress(base64.b64decode(record["model"]))
    cut_outside = record["model"][: int(fraction * len(record["model"])) // 4 * 4]
    for model in (cut_outside, compress(content[: int(fraction * len(content))])):
        with pytest.raises(FileFormatError):
            TreeEnsemble.from_dict({**record, "model": model})


@pytest.mark.parametrize(
    "change", [{"kind": "linear"}, {"columns": "many"}, {"columns": None}, {"columns": 4}]
)
def test_from_dict_with_inconsistent_fields_raises(
    change: dict[str, Any], fitted: dict[str, TreeEnsemble]
) -> None:
    with pytest.raises(FileFormatError):
        TreeEnsemble.from_dict({**fitted[BOOSTED].to_dict(), **change})


@pytest.mark.parametrize("missing", ["kind", "columns", "model"])
def test_from_dict_without_a_key_raises(missing: str, fitted: dict[str, TreeEnsemble]) -> None:
    record = {name: value for name, value in fitted[FOREST].to_dict().items() if name != missing}
    with pytest.raises(FileFormatError, match=missing):
        TreeEnsemble.from_dict(record)
