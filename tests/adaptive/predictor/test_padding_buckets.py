"""What an engine makes of numbers of tokens, and that predictions of its profiles know it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sparseflow.adaptive.predictor import LatencyQuery, PlanLatencyPredictor
from sparseflow.adaptive.predictor.features import FeatureBuilder, PaddingBuckets
from sparseflow.adaptive.profile import RequestTimes, collect_profile, select_representative_plans
from tests.adaptive.fake_runner import VISION_TOKENS, FakeRunner, make_space

SIZES = {"prompts": [16, 32, 64], "contexts": [8, 32, 64]}


def up(sizes: list[int], tokens: int) -> int:
    return next((size for size in sizes if size >= tokens), tokens)


def test_prompts_are_filled_up() -> None:
    padding = PaddingBuckets.from_config(SIZES)
    tokens = np.arange(1.0, 90.0)
    assert padding.pad_prompts(tokens).tolist() == [up(SIZES["prompts"], int(item)) for item in tokens]


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 30])
def test_attention_is_rounded_up_step_by_step(steps: int) -> None:
    padding = PaddingBuckets.from_config(SIZES)
    tokens = np.arange(1.0, 64.0 - steps)
    expected = [
        np.mean([up(SIZES["contexts"], int(item) + index) for index in range(1, max(steps, 1) + 1)])
        for item in tokens
    ]
    np.testing.assert_allclose(padding.mean_context(tokens, np.full(len(tokens), float(steps))), expected)


def test_without_sizes_nothing_is_rounded() -> None:
    padding, tokens = PaddingBuckets.from_config({"runner": "eager"}), np.array([3.0, 7.0])
    assert padding.pad_prompts(tokens).tolist() == [3.0, 7.0]
    assert padding.mean_context(tokens, np.array([4.0, 0.0])).tolist() == [5.5, 7.5]


class Stairs(FakeRunner):
    """Prompts take what the size takes that they are filled up to."""

    sizes = (256, 512, 768, 1024)

    def run(self, plan, text_tokens, *, steps, batch=1) -> RequestTimes:  # type: ignore[no-untyped-def]
        tokens = text_tokens + (VISION_TOKENS[plan.tier] if plan.tier else 0)
        filled = next(size for size in self.sizes if size >= tokens)
        return RequestTimes(
            prefill_ms=0.01 * filled * (1.0 + 0.1 * len(plan.blocks)), steps_ms=(1.0,) * steps
        )


def test_a_share_of_an_image_has_whole_tokens() -> None:
    plans, padding = make_space(), PaddingBuckets.from_config({"prompts": [256, 512]})
    plan = plans.plans[-1]
    assert plan.tier == "high"
    # Exactly a size, whatever a division makes of it: not filled up to the next one.
    queries = [
        LatencyQuery(plan=plan, text_tokens=256 - vision, images=vision / VISION_TOKENS["high"], new_tokens=1)
        for vision in range(1, 257)
    ]
    describer = FeatureBuilder(plans.geometry, VISION_TOKENS, plans.plans, padding, num_buckets=1)
    assert set(describer.build(queries).prompt) == {256.0}


@pytest.mark.parametrize("knows_padding", [True, False])
def test_stairs_are_predicted_where_they_are_known(knows_padding: bool, tmp_path: Path) -> None:
    runner = Stairs()
    if knows_padding:
        runner.config = {"runner": "engine", "prompts": list(Stairs.sizes), "contexts": []}
    plans = make_space()
    predictor = PlanLatencyPredictor.fit(
        collect_profile(
            runner,
            plans,
            tmp_path / "p.parquet",
            text_tokens=(10, 100, 250, 400),
            plans=select_representative_plans(plans, 9),
            rounds=1,
            decode_steps=1,
            warmup_runs=0,
        )
    )
    worst = 0.0
    for plan in plans.plans[::23]:
        for text in (20, 60, 180, 240, 300):
            query = LatencyQuery(plan=plan, text_tokens=text, images=1, new_tokens=2)
            measured = runner.run(plan, text, steps=1)
            p50 = predictor.predict([query])[0].item()
            all_items = predictor.predict_all(text_tokens=text, images=1, new_tokens=2)[0]
            assert all_items[plans.plans.index(plan)] == pytest.approx(p50)
            worst = max(worst, abs(p50 / (measured.prefill_ms + 1.0) - 1.0))
    assert worst < 0.02 if knows_padding else worst > 0.1
