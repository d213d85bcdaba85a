"""CPU inference of the controllers, compared with the controllers."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sparseflow.adaptive.controllers.budget_encoding import encode_budget
from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.controllers.cpu_policy import CpuControllers, CpuWordEmbeddings
from sparseflow.adaptive.controllers.language_features import mean_text_embedding
from sparseflow.adaptive.plan.space import ModelGeometry, PlanSpace
from sparseflow.errors import InputError, RunError
from tests.adaptive.controllers.stages import choose_stage1, choose_stage2

WIDTH = 24
GEOMETRIES = (
    ModelGeometry(depth=16, top_k=8), ModelGeometry(depth=3, top_k=2, tiers=("low", "high")),
    ModelGeometry(depth=12, top_k=6, tiers=()),
)  # fmt: skip


def controllers(geometry: ModelGeometry = GEOMETRIES[0], seed: int = 0) -> Controllers:
    """Random controllers, fitted to features with an offset and a scale."""
    space = PlanSpace.from_importance(geometry, [1.0 / (1 + block) for block in range(geometry.depth)])
    controllers = Controllers(space, width=WIDTH, model_id="m", seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in controllers.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
        positions = len(geometry.positions)
        tokens = 5.0 + 3.0 * torch.randn(50, 3, positions, WIDTH, generator=generator)
        controllers.fit_features(2.0 + torch.randn(50, WIDTH, generator=generator), tokens)
    return controllers.eval()


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=["225 plans", "small", "text"])
@pytest.mark.parametrize("seed", range(3))
def test_cpu_controllers_match_controllers(geometry: ModelGeometry, seed: int) -> None:
    slow = controllers(geometry, seed)
    quick, random = CpuControllers(slow), np.random.default_rng(seed)
    plans: set[int] = set()
    for _ in range(150):
        fits = random.random(len(slow.space)) < random.choice([0.03, 0.3, 1.0])
        fits[random.integers(len(fits))] = True
        budget_ms = float(np.exp(random.uniform(np.log(0.5), np.log(2e6))))
        language, token = random.normal(2.0, 1.0, (2, WIDTH)).astype(np.float32)
        allowed, budgets = torch.from_numpy(fits)[None], torch.tensor([budget_ms])
        expected = choose_stage1(slow, torch.from_numpy(language)[None], budgets, allowed=allowed)
        stage1_output = quick.choose_stage1(language, budget_ms, fits)
        assert [stage1_output.tier, stage1_output.position] == expected[0].tolist()
        assert fits[stage1_output.plan]
        action = slow.space.action(slow.space.plans[stage1_output.plan])
        assert (action.tier, action.position) == (stage1_output.tier, stage1_output.position)
        plan = choose_stage2(slow, torch.from_numpy(token)[None], budgets, expected, allowed=allowed)
        assert quick.choose_stage2(token, stage1_output, fits) == int(plan)
        plans.add(int(plan))
    assert len(plans) > 5, "too few different plans for a comparison"


def test_ties_select_first_choice() -> None:
    slow = controllers()
    with torch.no_grad():
        for head in (slow.stage1.tier, slow.stage1.insertion, slow.stage2.top_k, slow.stage2.option):
            head.weight.zero_()
            assert head.bias is not None
            head.bias.fill_(1.0)
    quick, vector = CpuControllers(slow), np.ones(WIDTH, np.float32)
    fits = np.ones(len(slow.space), dtype=bool)
    stage1_output = quick.choose_stage1(vector, 50.0, fits)
    assert (stage1_output.tier, stage1_output.position) == (0, 0)
    allowed, budgets = torch.from_numpy(fits)[None], torch.tensor([50.0])
    expected = choose_stage2(slow, torch.ones(1, WIDTH), budgets, torch.tensor([[0, 0]]), allowed=allowed)
    assert quick.choose_stage2(vector, stage1_output, fits) == int(expected)


@pytest.mark.parametrize("budget_ms", [0.2, 1.0, 37.5, 180.0, 1e6, 1e9])
def test_budget_encoding_matches_encode_budget(budget_ms: float) -> None:
    slow = controllers()
    stage1_output = CpuControllers(slow).choose_stage1(
        np.ones(WIDTH, np.float32), budget_ms, np.ones(len(slow.space), bool)
    )
    expected = encode_budget(torch.tensor([budget_ms], dtype=torch.float64))[0].numpy()
    np.testing.assert_allclose(stage1_output.budget, expected, rtol=0, atol=1e-6)


def test_invalid_arguments_are_refused() -> None:
    slow = controllers()
    quick, vector = CpuControllers(slow), np.ones(WIDTH, np.float32)
    indices = np.ones(len(slow.space), dtype=bool)
    for budget_ms in (0.0, -1.0, float("nan")):
        with pytest.raises(InputError):
            quick.choose_stage1(vector, budget_ms, indices)
    with pytest.raises(InputError):
        quick.choose_stage1(vector, 10.0, ~indices)
    with pytest.raises(InputError):
        quick.choose_stage2(vector, quick.choose_stage1(vector, 10.0, indices), ~indices)
    with pytest.raises(RunError):
        quick.choose_stage1(vector * np.nan, 10.0, indices)
    stage1_output = quick.choose_stage1(vector, 10.0, indices)
    for other, fits in (
        (vector[1:], indices),
        (np.ones(WIDTH + 1, np.float32), indices),
        (vector, indices[1:]),
    ):
        for call in (
            partial(quick.choose_stage1, other, 10.0, fits),
            partial(quick.choose_stage2, other, stage1_output, fits),
        ):
            with pytest.raises(InputError, match="225"):
                call()


class Table:
    """Word embeddings that record requested rows."""

    def __init__(self) -> None:
        self.inner, self.requested_rows = torch.nn.Embedding(40, WIDTH), []
        self.adapter: Any = SimpleNamespace(
            embed=self, decoder=self.inner, model=SimpleNamespace(config=SimpleNamespace(image_token_id=39))
        )

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        self.requested_rows.append(ids.flatten().tolist())
        return self.inner(ids)


def test_small_embedding_table_is_copied_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparseflow.adaptive.controllers.cpu_policy._CHUNK", 16)
    for limit, fetched in ((40 * WIDTH * 4, [16, 16, 8]), (40 * WIDTH * 4 - 1, [])):
        monkeypatch.setattr("sparseflow.adaptive.controllers.cpu_policy._TABLE_BYTES", limit)
        table = Table()
        table.adapter.model.get_input_embeddings = lambda table=table: table.inner
        words = CpuWordEmbeddings(table.adapter)
        assert [len(requested_row) for requested_row in table.requested_rows] == fetched
        table.requested_rows.clear()
        token_ids = torch.tensor([[39, 0, 38, 3, 0]])
        with torch.no_grad():
            expected = mean_text_embedding(table.adapter, token_ids)[0].numpy()
        table.requested_rows.clear()
        np.testing.assert_allclose(words.compute_feature(token_ids), expected, rtol=1e-6, atol=1e-6)
        assert table.requested_rows == ([] if fetched else [[0, 38, 3]])
        for unknown in (-1, 40) if fetched else (-1,):
            with pytest.raises(InputError, match="`input_ids`"):
                words.compute_feature(torch.tensor([[3, unknown]]))
        # The table is still complete; ids may have any dtype and strides.
        table.requested_rows.clear()
        repeated = words.compute_feature(token_ids.repeat(2, 1).int().T.contiguous().T[:1])
        np.testing.assert_allclose(repeated, expected, rtol=1e-6, atol=1e-6)
        assert not table.requested_rows and words.width == (WIDTH if fetched else None)


def test_words_of_large_table_are_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table()
    words = CpuWordEmbeddings(table.adapter)
    for ids in ([39, 39, 3, 4, 3], [4, 3], [5, 39, 3]):
        token_ids = torch.tensor([ids])
        with torch.no_grad():
            expected = mean_text_embedding(table.adapter, token_ids)[0].numpy()
        table.requested_rows.clear()
        np.testing.assert_allclose(words.compute_feature(token_ids), expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(words.compute_feature(token_ids), expected, rtol=1e-6, atol=1e-6)
        assert table.requested_rows in ([[3, 4]], [], [[5]])
    with pytest.raises(InputError):
        words.compute_feature(torch.tensor([[39]]))
    # A full cache is cleared.
    monkeypatch.setattr("sparseflow.adaptive.controllers.cpu_policy._MAX_CACHED_WORDS", 1)
    words.compute_feature(torch.tensor([[7]]))
    assert table.requested_rows[-1] == [7]
    words.compute_feature(torch.tensor([[7, 3]]))
    assert table.requested_rows[-1] == [3]
