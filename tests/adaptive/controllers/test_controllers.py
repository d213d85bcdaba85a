"""The two-stage controllers: shapes, masks, feature scaling, choices and their file."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sparseflow.adaptive.controllers.budget_encoding import encode_budget
from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.controllers.networks import Stage1, Stage2
from sparseflow.adaptive.plan.space import PlanAction, PlanSpace
from sparseflow.errors import FileFormatError, InputError, RunError
from tests.adaptive.controllers.stages import choose_stage1, choose_stage2
from tests.adaptive.synthetic import WIDTH, make_outcomes, make_space

SPACES = [
    make_space(),
    make_space(depth=4, top_k=3, tiers=1),
    make_space(depth=2, top_k=1, tiers=0),
    make_space(depth=12, top_k=2),
]


def make_decisive_controllers(plans: PlanSpace | None = None, seed: int = 0) -> Controllers:
    """Controllers whose initial logits differ clearly."""
    controllers = Controllers(plans or make_space(), width=WIDTH, model_id="m", seed=seed)
    with torch.no_grad():
        for head in (
            controllers.stage1.tier,
            controllers.stage1.insertion,
            controllers.stage2.top_k,
            controllers.stage2.option,
        ):
            head.weight.mul_(300.0)
    return controllers.eval()


def make_random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_stages_return_masked_logits_of_all_choices() -> None:
    stage1, stage2 = Stage1(2048), Stage2(2048, make_space().option_mask())
    budget = encode_budget(torch.tensor([100.0, 200.0, 300.0, 400.0, 500.0]))
    tier, insertion = stage1(make_random(0, 5, 2048), budget)
    assert tier.shape == (5, 3) and insertion.shape == (5, 5)
    top_k, option = stage2(make_random(1, 5, 2048), budget, torch.arange(1, 6))
    assert top_k.shape == option.shape == (5, 5) and bool(top_k.isfinite().all())
    # Position p has 6 - p block counts.
    assert option.isfinite().sum(1).tolist() == [5, 4, 3, 2, 1]
    assert bool((option[~option.isfinite()] == -math.inf).all())


@pytest.mark.parametrize("position", [0, 6, -1])
def test_stage2_invalid_position_is_refused(position: int) -> None:
    stage2 = Stage2(8, make_space().option_mask())
    with pytest.raises(InputError):
        stage2(make_random(0, 1, 8), encode_budget(torch.ones(1)), torch.tensor([position]))


def test_logits_of_fitted_stages_ignore_scale_and_offset() -> None:
    table = make_outcomes(64)
    logits = []
    for scale, offset in ((1.0, 0.0), (1000.0, 0.0), (0.001, 5.0)):
        controllers = make_decisive_controllers()
        language, tokens = scale * table.language + offset, scale * table.tokens + offset
        controllers.fit_features(language, tokens)
        budget = encode_budget(torch.full((64,), 150.0))
        first = controllers.stage1(language, budget)[0]
        second = controllers.stage2(tokens[:, 1, 2], budget, torch.full((64,), 3))[0]
        logits.append(torch.cat([first, second], 1))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[2], logits[0], rtol=0.02, atol=0.02)


def test_logits_of_unfitted_stage_ignore_scale() -> None:
    stage1, budget = Stage1(64), encode_budget(torch.full((4,), 150.0))
    first, other = (stage1(scale * make_random(0, 4, 64), budget)[0] for scale in (1.0, 1000.0))
    torch.testing.assert_close(first, other, rtol=1e-3, atol=1e-5)


def test_fit_features_accepts_half_precision_and_constants() -> None:
    controllers = make_decisive_controllers()
    table = make_outcomes(32)
    table.language[:, 3] = 7.0
    controllers.fit_features(table.language, table.tokens.bfloat16())
    assert float(controllers.stage1.language.scale[0, 3]) == 1.0
    logits = controllers.stage1(table.language.bfloat16(), encode_budget(torch.ones(32)))[0]
    assert logits.dtype == torch.float32 and bool(logits.isfinite().all())
    with pytest.raises(InputError):
        controllers.fit_features(table.language, table.tokens[:, :, :3])


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(range(len(SPACES))), st.sampled_from([1, 3, 16]))
def test_choose_in_groups_matches_single_rows(seed: int, which: int, group: int) -> None:
    plans = SPACES[which]
    table = make_outcomes(6, seed=seed % 100, plans=plans)
    controllers = make_decisive_controllers(plans)
    controllers.fit_features(table.language, table.tokens)
    budgets = torch.linspace(80.0, 200.0, 6)
    uniform = torch.rand(6 * group, 4, generator=torch.Generator().manual_seed(seed))
    allowed = torch.rand(6, len(plans), generator=torch.Generator().manual_seed(seed)) < 0.5
    allowed[:, 0] = True
    queries: list[tuple[int, int, int]] = []

    def tokens(rows: torch.Tensor, tiers: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows = rows // group
        queries.extend(zip(rows.tolist(), tiers.tolist(), positions.tolist(), strict=True))
        return table.get_latency_tokens(rows, tiers, positions)

    with torch.no_grad():
        batched = controllers.choose(
            table.language, budgets, tokens, allowed=allowed, uniform=uniform, group=group
        )
    assert len(set(queries)) == len(queries), "a token was computed twice"
    assert bool(allowed[torch.arange(6).repeat_interleave(group), batched.plan].all())
    assert batched.plan.tolist() == [
        plans.plans.index(plans.plan(PlanAction(*row))) for row in batched.action.tolist()
    ]
    for index in range(6 * group):
        row = index // group
        with torch.no_grad():
            single = controllers.choose(
                table.language[row : row + 1],
                budgets[row : row + 1],
                lambda _, tiers, positions, row=row: table.tokens[row, tiers, positions],
                allowed=allowed[row : row + 1],
                action=batched.action[index : index + 1],
            )
        torch.testing.assert_close(single.log_prob[0], batched.log_prob[index], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(single.entropy[0], batched.entropy[index], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(single.token[0], batched.token[index])


def test_separate_stages_match_joint_choice() -> None:
    table, controllers = make_outcomes(40), make_decisive_controllers(seed=3)
    controllers.fit_features(table.language, table.tokens)
    budgets = torch.linspace(70.0, 300.0, 40)
    indices = torch.arange(40)
    allowed = torch.rand(40, 225, generator=torch.Generator().manual_seed(0)) < 0.3
    for mask in (None, allowed):
        with torch.no_grad():
            joint_choice = controllers.choose(table.language, budgets, table.get_latency_tokens, allowed=mask)
        stage1_output = choose_stage1(controllers, table.language, budgets, allowed=mask)
        token = table.get_latency_tokens(indices, *stage1_output.T)
        assert (
            choose_stage2(controllers, token, budgets, stage1_output, allowed=mask).tolist()
            == joint_choice.plan.tolist()
        )
        assert len(joint_choice.plan.unique()) > 5


def test_choice_without_allowed_plan_is_refused() -> None:
    controllers = make_decisive_controllers()
    allowed = torch.zeros(1, 225, dtype=torch.bool)
    allowed[0, 0] = True  # the lowest tier
    with pytest.raises(InputError):
        choose_stage2(
            controllers,
            make_random(0, 1, WIDTH),
            torch.tensor([100.0]),
            torch.tensor([[2, 0]]),
            allowed=allowed,
        )
    with pytest.raises(InputError):
        choose_stage1(controllers, make_random(0, 2, WIDTH), torch.tensor([100.0, 100.0]), allowed=allowed)


def test_choice_with_nan_budget_or_feature_is_refused() -> None:
    controllers = make_decisive_controllers()
    with pytest.raises(InputError):
        choose_stage1(controllers, make_random(0, 1, WIDTH), torch.tensor([math.nan]))
    with pytest.raises(RunError):
        choose_stage1(controllers, torch.full((1, WIDTH), math.nan), torch.tensor([100.0]))


def test_new_controllers_are_nearly_uniform() -> None:
    table, controllers = make_outcomes(32), Controllers(make_space(), width=WIDTH, model_id="m")
    with torch.no_grad():
        choice = controllers.choose(table.language, torch.full((32,), 200.0), table.get_latency_tokens)
    # The last choice has one to five options.
    assert float(choice.log_prob.exp().max()) < 1.2 / (3 * 5 * 5)


def test_initial_weights_depend_on_seed_only() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, same, other = (Controllers(make_space(), width=4, model_id="m", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    torch.testing.assert_close(dict(first.state_dict()), dict(same.state_dict()), rtol=0.0, atol=0.0)
    assert not torch.equal(first.stage1.fuse.weight, other.stage1.fuse.weight)
    with pytest.raises(InputError):
        Controllers(make_space(), width=0, model_id="m")


@pytest.mark.parametrize("plans", SPACES, ids=len)
def test_save_and_load_round_trip(plans: PlanSpace, tmp_path: Path) -> None:
    table, controllers = make_outcomes(20, plans=plans), make_decisive_controllers(plans)
    controllers.fit_features(table.language, table.tokens)
    file = tmp_path / "c.safetensors"
    controllers.save(file)
    reloaded = Controllers.load(file, model_id="m")
    assert reloaded.space == plans and reloaded.width == WIDTH and not reloaded.training
    torch.testing.assert_close(
        dict(reloaded.state_dict()), dict(controllers.state_dict()), rtol=0.0, atol=0.0
    )
    budgets = torch.linspace(30.0, 300.0, 20)
    assert torch.equal(
        choose_stage1(reloaded, table.language, budgets), choose_stage1(controllers, table.language, budgets)
    )


def test_load_of_other_model_is_refused(tmp_path: Path) -> None:
    make_decisive_controllers().save(tmp_path / "c.safetensors")
    with pytest.raises(InputError):
        Controllers.load(tmp_path / "c.safetensors", model_id="other")
    assert Controllers.load(tmp_path / "c.safetensors").model_id == "m"


def test_load_damaged_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.safetensors"
    with pytest.raises(InputError):
        Controllers.load(file)
    file.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(FileFormatError):
        Controllers.load(file)
    controllers = make_decisive_controllers()
    controllers.save(file)
    content = file.read_bytes()
    for cut in (10, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:cut])
        with pytest.raises(FileFormatError):
            Controllers.load(file)

    file.write_bytes(content)
    with safe_open(file, framework="pt") as stream:
        record = json.loads(stream.metadata()["sparseflow"])
    weights = load_file(file)

    def written(change: Mapping[str, object], **tensors: torch.Tensor) -> Path:
        save_file(weights | tensors, file, {"sparseflow": json.dumps(record | dict(change))})
        return file

    for change in ({"width": 10**12}, {"width": 17}, {"space": {}}, {"width": "x"}):
        with pytest.raises(FileFormatError):
            Controllers.load(written(change))
    other = make_space(depth=4).to_dict()
    with pytest.raises(FileFormatError):
        Controllers.load(written({}, **{"stage1.fuse.bias": torch.zeros(3)}))
    with pytest.raises(FileFormatError):
        Controllers.load(written({"space": other}))
    with pytest.raises(FileFormatError):
        Controllers.load(written({}, **{"stage1.fuse.bias": torch.full((256,), math.nan)}))
