"""Controllers on the host choose what the controllers choose."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sparseflow.adaptive.controllers.budget_encoding import encode
from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.controllers.cpu_policy import CpuControllers, CpuWordEmbeddings
from sparseflow.adaptive.controllers.language_features import language_features
from sparseflow.adaptive.plan.space import ModelGeometry, PlanSpace
from sparseflow.errors import InputError, RunError

WIDTH = 24
GEOMETRIES = (
    ModelGeometry(depth=16, top_k=8), ModelGeometry(depth=3, top_k=2, tiers=("low", "high")),
    ModelGeometry(depth=12, top_k=6, tiers=()),
)  # fmt: skip


def controllers(geometry: ModelGeometry = GEOMETRIES[0], seed: int = 0) -> Controllers:
    """Some that have opinions, and features that are not on one scale."""
    space = PlanSpace.of(geometry, [1.0 / (1 + block) for block in range(geometry.depth)])
    found = Controllers(space, width=WIDTH, model_id="m", seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in found.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
        positions = len(geometry.positions)
        tokens = 5.0 + 3.0 * torch.randn(50, 3, positions, WIDTH, generator=generator)
        found.fit_features(2.0 + torch.randn(50, WIDTH, generator=generator), tokens)
    return found.eval()


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=["225 plans", "small", "text"])
@pytest.mark.parametrize("seed", range(3))
def test_they_choose_the_same(geometry: ModelGeometry, seed: int) -> None:
    slow = controllers(geometry, seed)
    quick, random = CpuControllers(slow), np.random.default_rng(seed)
    plans: set[int] = set()
    for _ in range(150):
        fits = random.random(len(slow.space)) < random.choice([0.03, 0.3, 1.0])
        fits[random.integers(len(fits))] = True
        budget_ms = float(np.exp(random.uniform(np.log(0.5), np.log(2e6))))
        language, token = random.normal(2.0, 1.0, (2, WIDTH)).astype(np.float32)
        allowed, told = torch.from_numpy(fits)[None], torch.tensor([budget_ms])
        expected = slow.begin(torch.from_numpy(language)[None], told, allowed=allowed)
        begun = quick.begin(language, budget_ms, fits)
        assert [begun.tier, begun.position] == expected[0].tolist()
        assert fits[begun.plan]
        action = slow.space.action(slow.space.plans[begun.plan])
        assert (action.tier, action.position) == (begun.tier, begun.position)
        plan = slow.finish(torch.from_numpy(token)[None], told, expected, allowed=allowed)
        assert quick.finish(token, begun, fits) == int(plan)
        plans.add(int(plan))
    assert len(plans) > 5, "a policy that always chooses the same would prove nothing"


def test_of_equal_choices_the_first_is_taken() -> None:
    slow = controllers()
    with torch.no_grad():
        for head in (slow.stage1.tier, slow.stage1.insertion, slow.stage2.top_k, slow.stage2.option):
            head.weight.zero_()
            assert head.bias is not None
            head.bias.fill_(1.0)
    quick, vector = CpuControllers(slow), np.ones(WIDTH, np.float32)
    fits = np.ones(len(slow.space), dtype=bool)
    begun = quick.begin(vector, 50.0, fits)
    assert (begun.tier, begun.position) == (0, 0)
    allowed, told = torch.from_numpy(fits)[None], torch.tensor([50.0])
    expected = slow.finish(torch.ones(1, WIDTH), told, torch.tensor([[0, 0]]), allowed=allowed)
    assert quick.finish(vector, begun, fits) == int(expected)


@pytest.mark.parametrize("budget_ms", [0.2, 1.0, 37.5, 180.0, 1e6, 1e9])
def test_budgets_are_told_alike(budget_ms: float) -> None:
    slow = controllers()
    begun = CpuControllers(slow).begin(np.ones(WIDTH, np.float32), budget_ms, np.ones(len(slow.space), bool))
    expected = encode(torch.tensor([budget_ms], dtype=torch.float64))[0].numpy()
    np.testing.assert_allclose(begun.budget, expected, rtol=0, atol=1e-6)


def test_what_cannot_be_decided_is_told() -> None:
    slow = controllers()
    quick, vector = CpuControllers(slow), np.ones(WIDTH, np.float32)
    every = np.ones(len(slow.space), dtype=bool)
    for budget_ms in (0.0, -1.0, float("nan")):
        with pytest.raises(InputError, match="must be above 0 ms"):
            quick.begin(vector, budget_ms, every)
    with pytest.raises(InputError, match="allows no plan"):
        quick.begin(vector, 10.0, ~every)
    with pytest.raises(InputError, match="no plan that fits begins"):
        quick.finish(vector, quick.begin(vector, 10.0, every), ~every)
    with pytest.raises(RunError, match="logits are not finite"):
        quick.begin(vector * np.nan, 10.0, every)
    begun = quick.begin(vector, 10.0, every)
    for other, fits in ((vector[1:], every), (np.ones(WIDTH + 1, np.float32), every), (vector, every[1:])):
        for call in (partial(quick.begin, other, 10.0, fits), partial(quick.finish, other, begun, fits)):
            with pytest.raises(InputError, match=f"a model of width {WIDTH} and of 225 plans"):
                call()


class Table:
    """Word embeddings that note what is fetched."""

    def __init__(self) -> None:
        self.inner, self.asked = torch.nn.Embedding(40, WIDTH), []
        self.adapter: Any = SimpleNamespace(
            embed=self, decoder=self.inner, model=SimpleNamespace(config=SimpleNamespace(image_token_id=39))
        )

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        self.asked.append(ids.flatten().tolist())
        return self.inner(ids)


def test_small_tables_are_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparseflow.adaptive.controllers.cpu_policy._CHUNK", 16)
    for limit, fetched in ((40 * WIDTH * 4, [16, 16, 8]), (40 * WIDTH * 4 - 1, [])):
        monkeypatch.setattr("sparseflow.adaptive.controllers.cpu_policy._TABLE_BYTES", limit)
        table = Table()
        table.adapter.model.get_input_embeddings = lambda table=table: table.inner
        words = CpuWordEmbeddings(table.adapter)
        assert [len(each) for each in table.asked] == fetched
        table.asked.clear()
        given = torch.tensor([[39, 0, 38, 3, 0]])
        with torch.no_grad():
            expected = language_features(table.adapter, given)[0].numpy()
        table.asked.clear()
        np.testing.assert_allclose(words.feature(given), expected, rtol=1e-6, atol=1e-6)
        assert table.asked == ([] if fetched else [[0, 38, 3]])
        for unknown in (-1, 40) if fetched else (-1,):
            with pytest.raises(InputError, match=f"the model knows 0 {'to 39' if fetched else 'or more'}"):
                words.feature(torch.tensor([[3, unknown]]))
        # Nothing is lost by it, and ids of any kind will do.
        table.asked.clear()
        again = words.feature(given.repeat(2, 1).int().T.contiguous().T[:1])
        np.testing.assert_allclose(again, expected, rtol=1e-6, atol=1e-6)
        assert not table.asked and words.width == (WIDTH if fetched else None)


def test_words_are_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table()
    words = CpuWordEmbeddings(table.adapter)
    for ids in ([39, 39, 3, 4, 3], [4, 3], [5, 39, 3]):
        given = torch.tensor([ids])
        with torch.no_grad():
            expected = language_features(table.adapter, given)[0].numpy()
        table.asked.clear()
        np.testing.assert_allclose(words.feature(given), expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(words.feature(given), expected, rtol=1e-6, atol=1e-6)
        assert table.asked in ([[3, 4]], [], [[5]])
    with pytest.raises(InputError, match="no text tokens"):
        words.feature(torch.tensor([[39]]))
    # Where there are too many, it begins anew.
    monkeypatch.setattr("sparseflow.adaptive.controllers.cpu_policy._WORDS", 1)
    words.feature(torch.tensor([[7]]))
    assert table.asked[-1] == [7]
    words.feature(torch.tensor([[7, 3]]))
    assert table.asked[-1] == [3]
