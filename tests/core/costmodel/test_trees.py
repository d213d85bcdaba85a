"""Ensembles of trees: they learn, alike every time, and only what they wrote themselves is read back."""

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


def samples(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Features, and a result with a step, a slope and a column that says nothing."""
    x = np.random.default_rng(seed).uniform(0.0, 1.0, (count, 3)).astype(np.float32)
    return x, np.where(x[:, 0] > 0.5, 3.0, 1.0) + x[:, 1]


@pytest.fixture(autouse=True)
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "_ROUNDS", {BOOSTED: 60, FOREST: 1})


@pytest.fixture(scope="module")
def fitted() -> dict[str, TreeEnsemble]:
    x, y = samples(150, seed=0)
    return {kind: TreeEnsemble.fit(x, y, kind) for kind in KINDS}


def packed(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode()


@pytest.mark.parametrize("kind", KINDS)
def test_an_ensemble_knows_more_than_the_mean(kind: str) -> None:
    ensemble = TreeEnsemble.fit(*samples(300, seed=1), kind)
    x, y = samples(200, seed=2)
    predicted = ensemble.predict(x)
    assert predicted.dtype == np.float32 and predicted.shape == (200,)
    assert ((predicted - y) ** 2).mean() < 0.1 * y.var()


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_arguments_give_the_same_ensemble_and_another_seed_another(kind: str) -> None:
    x, y = samples(150, seed=0)
    first = TreeEnsemble.fit(x, y, kind, seed=3).to_dict()
    np.random.seed(99)
    assert TreeEnsemble.fit(x, y, kind, seed=3).to_dict() == first
    assert TreeEnsemble.fit(x, y, kind, seed=4).to_dict() != first


@pytest.mark.parametrize("kind", KINDS)
def test_an_ensemble_read_back_from_json_predicts_the_same(
    kind: str, fitted: dict[str, TreeEnsemble]
) -> None:
    record = json.loads(json.dumps(fitted[kind].to_dict()))
    again = TreeEnsemble.from_dict(record)
    x, _ = samples(50, seed=5)
    assert (again.kind, again.columns) == (kind, 3)
    assert np.array_equal(again.predict(x), fitted[kind].predict(x))
    assert np.array_equal(TreeEnsemble.from_dict(again.to_dict()).predict(x), again.predict(x))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_predicted_alike_alone_and_among_others(kind: str, fitted: dict[str, TreeEnsemble]) -> None:
    x, _ = samples(8, seed=6)
    together = fitted[kind].predict(x)
    assert [fitted[kind].predict(row[None])[0] for row in x] == together.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_one_sample_is_enough_and_gives_its_result_everywhere(kind: str) -> None:
    ensemble = TreeEnsemble.fit(np.zeros((1, 2), np.float32), np.array([7.0]), kind)
    assert ensemble.predict(np.ones((2, 2), np.float32)).tolist() == pytest.approx([7.0, 7.0])


def test_no_rows_give_no_predictions(fitted: dict[str, TreeEnsemble]) -> None:
    found = fitted[BOOSTED].predict(np.zeros((0, 3), np.float32))
    assert found.shape == (0,) and found.dtype == np.float32


def test_an_unknown_kind_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InputError, match=r"`kind` \(='linear'\) must be one of: xgboost, random_forest"):
        TreeEnsemble.fit(*samples(5, seed=0), "linear")


@pytest.mark.parametrize(("rows", "results"), [(5, 4), (4, 5), (0, 0), (0, 3)])
def test_as_many_results_as_rows_are_needed(rows: int, results: int) -> None:
    with pytest.raises(InputError, match=f"{rows} rows of features and {results} of results"):
        TreeEnsemble.fit(np.zeros((rows, 2), np.float32), np.zeros(results))


class Hostile:
    """Its pickle calls `raised` when it is loaded."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return raised, ()


def raised() -> None:
    raise AssertionError("a pickle was loaded")


@pytest.mark.parametrize(
    "model",
    [
        None,
        7,
        "",
        "not base64!",
        base64.b64encode(b"not compressed").decode(),
        packed(b""),
        packed(b"{"),
        packed(b"{}"),
        packed(b"[1, 2]"),
        packed(b'{"learner": {"gradient_booster": {}}}'),
        packed(b"binf\x00\x00\x00\x00"),
        packed(pickle.dumps(Hostile())),
        base64.b64encode(pickle.dumps(Hostile())).decode(),
    ],
)
def test_content_that_is_not_xgboosts_json_is_refused(model: Any) -> None:
    with pytest.raises(FileFormatError, match=r"an ensemble of trees cannot be read: \S"):
        TreeEnsemble.from_dict({"kind": BOOSTED, "columns": 3, "model": model})


def test_xgboosts_binary_form_is_refused(fitted: dict[str, TreeEnsemble]) -> None:
    binary = bytes(fitted[BOOSTED]._booster.save_raw("ubj"))
    with pytest.raises(FileFormatError, match="not XGBoost's JSON"):
        TreeEnsemble.from_dict({"kind": BOOSTED, "columns": 3, "model": packed(binary)})


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_content_that_was_cut_off_is_refused(share: float, fitted: dict[str, TreeEnsemble]) -> None:
    record = fitted[BOOSTED].to_dict()
    content = zlib.decompress(base64.b64decode(record["model"]))
    cut_outside = record["model"][: int(share * len(record["model"])) // 4 * 4]
    for model in (cut_outside, packed(content[: int(share * len(content))])):
        with pytest.raises(FileFormatError, match="an ensemble of trees cannot be read"):
            TreeEnsemble.from_dict({**record, "model": model})


@pytest.mark.parametrize(
    "change", [{"kind": "linear"}, {"columns": "many"}, {"columns": None}, {"columns": 4}]
)
def test_a_record_that_does_not_fit_its_content_is_refused(
    change: dict[str, Any], fitted: dict[str, TreeEnsemble]
) -> None:
    with pytest.raises(FileFormatError, match="an ensemble of trees cannot be read"):
        TreeEnsemble.from_dict({**fitted[BOOSTED].to_dict(), **change})


@pytest.mark.parametrize("lost", ["kind", "columns", "model"])
def test_a_record_that_lacks_a_part_is_refused(lost: str, fitted: dict[str, TreeEnsemble]) -> None:
    record = {name: value for name, value in fitted[FOREST].to_dict().items() if name != lost}
    with pytest.raises(FileFormatError, match=lost):
        TreeEnsemble.from_dict(record)
