"""Tests of `codesign.execution.verification`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.codesign.random_plan import random_plan
from sparseflow.codesign.design.decision import HardwareDecision
from sparseflow.codesign.execution import LocalExecutor, verification
from sparseflow.codesign.execution.rewrite import apply_rewrite
from sparseflow.codesign.execution.verification import (
    TOLERANCES,
    check_model,
    compute_error,
    run_unpartitioned,
    verify,
)
from sparseflow.codesign.workload.splits import RewritePlan, compute_transfer_bytes
from sparseflow.errors import InputError, RunError
from sparseflow.pruning import compact
from sparseflow.pruning.compaction.layered_model import LayeredVideoViT
from tests.pruning.models import awake, clips

AST: dict[str, Any] = {"stages": {1: 0.5, 2: 0.3}, "selector": "ast"}


def make_layers(
    *, seed: int = 0, pruned: bool = False, dtype: torch.dtype = torch.float32, **sizes: Any
) -> LayeredVideoViT:
    model = compact(awake(AST, seed=seed)) if pruned else awake(seed=seed, **sizes)
    return LayeredVideoViT(model.to(dtype))


def planned(
    steps: LayeredVideoViT, *, seed: int = 0, slots: int = 3, share: float = 0.8, batch: int = 2
) -> HardwareDecision:
    """A plan drawn at random, a segment for each layer."""
    layers = steps.describe_layers(batch)
    assignment, plan = random_plan(layers, slots, seed=seed, share=share)
    return HardwareDecision(
        chips=("npu-m",) * slots,
        segments=tuple((layer.name,) for layer in layers),
        mapping=tuple(assignment),
        positions_mm=((0.0, 0.0),) * slots,
        rewrite_plan=plan if plan.splits else None,
    )


def weights(steps: LayeredVideoViT) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in steps.model.state_dict().items()}


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_verify_plan_of_the_model(dtype: torch.dtype, pruned: bool) -> None:
    steps = make_layers(pruned=pruned, dtype=dtype, seed=1)
    decision, samples, before = planned(steps, seed=3), clips(steps.model), weights(steps)
    assert decision.rewrite_plan is not None
    result = verify(steps, decision, samples)
    assert set(result.errors) == {"rewritten", "local"}
    assert all(0.0 <= error <= TOLERANCES[dtype] for error in result.errors.values())
    assignment = decision.assign_layers(steps.describe_layers(2))
    expected = sum(
        compute_transfer_bytes(steps.describe_layers(2), assignment, decision.rewrite_plan).values()
    )
    assert result.moved_bytes == {"planned": expected, "local": expected} and expected > 0
    assert result.splits == len(decision.rewrite_plan.splits) and result.slots == 3
    # The model is left as it was.
    torch.testing.assert_close(weights(steps), before, rtol=0.0, atol=0.0)


def test_verify_without_splits_is_bit_exact() -> None:
    steps = make_layers()
    for slots, share in ((1, 0.0), (4, 0.0)):
        decision = planned(steps, slots=slots, share=share)
        result = verify(steps, decision, clips(steps.model))
        assert result.errors == {"rewritten": 0.0, "local": 0.0} and result.splits == 0
        assert (result.moved_bytes["local"] == 0) is (slots == 1)


@pytest.mark.slow
def test_verify_with_ranks() -> None:
    steps = make_layers(pruned=True)
    result = verify(steps, planned(steps, slots=2, seed=2), clips(steps.model), ranks=True)
    assert set(result.errors) == set(result.moved_bytes) - {"planned"} | {"rewritten"} >= {"ranks"}
    assert len(set(result.moved_bytes.values())) == 1


def test_verify_plan_of_other_model_is_refused() -> None:
    steps, samples = make_layers(), clips(make_layers().model)
    with pytest.raises(InputError, match="10"):
        verify(steps, planned(make_layers(depth=3)), samples)
    other = make_layers(num_heads=2, mlp_ratio=4.0)
    plan = planned(other, seed=1, share=1.0)
    with pytest.raises(InputError):
        verify(steps, plan, samples)
    decision = planned(steps)
    renamed = replace(decision, segments=(("patches",), *decision.segments[1:]))
    with pytest.raises(InputError):
        verify(steps, renamed, samples)
    before = weights(steps)
    assert torch.equal(run_unpartitioned(steps, samples), run_unpartitioned(make_layers(), samples))
    torch.testing.assert_close(weights(steps), before, rtol=0.0, atol=0.0)


def test_verify_empty_plan_is_refused() -> None:
    steps = make_layers()
    with pytest.raises(InputError):
        verify(steps, replace(planned(steps), segments=(), mapping=()), clips(steps.model))


def test_verify_split_away_from_home_is_refused() -> None:
    steps = make_layers()
    decision = planned(steps, seed=3)
    moved = replace(decision, mapping=tuple((slot + 1) % 3 for slot in decision.mapping))
    with pytest.raises(InputError, match=r"slot 2.* slot 0"):
        verify(steps, moved, clips(steps.model))


def tampered(model: Any, plan: RewritePlan) -> Any:
    """The rewriting, and then a weight of a part that is no longer what it was."""
    rewrite = apply_rewrite(model, plan)
    with torch.no_grad():
        next(iter(rewrite.split_modules.values())).parts[0].weight.view(-1)[0] += 1.0  # pyright: ignore
    return rewrite


def test_verify_detects_changed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = make_layers()
    decision = planned(steps, share=1.0, seed=4)  # with the embedding, which is linear
    assert decision.rewrite_plan is not None and decision.rewrite_plan.splits[0].layer == 0
    monkeypatch.setattr(verification, "apply_rewrite", tampered)
    with pytest.raises(RunError, match="rewritten"):
        verify(steps, decision, clips(steps.model))


def test_verify_detects_failed_undo(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = make_layers()

    def spoils(model: LayeredVideoViT, plan: RewritePlan) -> Any:
        with torch.no_grad():
            model.model.blocks[1].attention.proj.bias[0] += 1e-3  # pyright: ignore
        return apply_rewrite(model, plan)

    monkeypatch.setattr(verification, "apply_rewrite", spoils)
    with pytest.raises(RunError):
        verify(steps, planned(steps), clips(steps.model))


class Lossy(LocalExecutor):
    """Hands on what is a little off."""

    def run(self, batches: Any) -> list[Tensor]:
        return [logits + 1e-3 for logits in super().run(batches)]


class Silent(LocalExecutor):
    """Forgets to count one transfer."""

    def run(self, batches: Any) -> list[Tensor]:
        outputs = super().run(batches)
        self.moved_bytes[next(iter(self.moved_bytes))] -= 4
        return outputs


@pytest.mark.parametrize(
    ("executor", "message"), [(Lossy, "local: logits differ by"), (Silent, "local: moved .* expected")]
)
def test_verify_detects_wrong_bytes(
    executor: type[LocalExecutor], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = make_layers()
    monkeypatch.setattr(verification, "LocalExecutor", executor)
    with pytest.raises(RunError, match=message):
        verify(steps, planned(steps), clips(steps.model))


def test_verify_refuses_nan_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = make_layers()

    class Nothing(LocalExecutor):
        def run(self, batches: Any) -> list[Tensor]:
            return [logits * float("nan") for logits in super().run(batches)]

    monkeypatch.setattr(verification, "LocalExecutor", Nothing)
    with pytest.raises(RunError):
        verify(steps, planned(steps), clips(steps.model))


def test_compute_error_is_relative() -> None:
    expected = torch.tensor([[4.0, -8.0]])
    assert compute_error(expected + torch.tensor([[0.0, 0.5]]), expected) == pytest.approx(0.5 / 8.0)
    assert compute_error(torch.tensor([0.25]), torch.tensor([0.125])) == 0.125
    assert compute_error(expected.bfloat16(), expected) == 0.0


def test_run_unpartitioned_equals_model() -> None:
    steps = make_layers(pruned=True, dtype=torch.float64)
    samples = clips(steps.model)
    with torch.no_grad():
        torch.testing.assert_close(
            run_unpartitioned(steps, samples), steps.model(samples), rtol=0.0, atol=1e-12
        )


def test_codesign_verify_is_the_function() -> None:
    script = (
        "import sparseflow.codesign.execution.verification; from sparseflow import codesign; "
        "codesign.verify.__code__"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def test_tolerances_cover_all_precisions() -> None:
    assert isinstance(TOLERANCES, Mapping) and list(TOLERANCES.values()) == sorted(TOLERANCES.values())


def test_check_model_names_different_layers() -> None:
    # Names are the same, and nothing is split: only what layers cost tells them apart.
    steps, other = make_layers(), make_layers(mlp_ratio=4.0)
    decision, samples = planned(steps, share=0.0), clips(other.model)
    verify(other, decision, samples)
    record = r"another model: blocks\.0\.mlp has `flops` .* \(planned: .*`units` 64 \(planned: 32\)"
    with pytest.raises(InputError, match=record + r".*, and 3 other layers differ; use the model"):
        verify(other, decision, samples, planned=steps.describe_layers(8))
    # Batches of another size are no other model, and neither are other weights.
    verify(make_layers(seed=5), decision, samples, planned=steps.describe_layers(8))


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (make_layers(num_heads=2), "num_heads"), (make_layers(num_classes=9), "flops"),
        (make_layers(dtype=torch.float64), "precision"), (make_layers(num_frames=8), "seq_len"),
    ],
)  # fmt: skip
def test_check_model_names_different_fields(other: LayeredVideoViT, field: str) -> None:
    with pytest.raises(InputError, match=rf"`{field}`"):
        check_model(other, make_layers().describe_layers(4))


def test_check_model_with_missing_layers_is_refused() -> None:
    with pytest.raises(InputError, match="10"):
        check_model(make_layers(depth=3), make_layers().describe_layers(1))
    with pytest.raises(InputError, match="0"):
        check_model(make_layers(), ())
    # Figures with gradients are figures.
    layers = [replace(layer, flops=torch.tensor(float(layer.flops), requires_grad=True))
              for layer in make_layers().describe_layers(2)]  # fmt: skip
    check_model(make_layers(), layers)
