"""Tuning on a GPU, or with kernels that Triton interprets on a CPU."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import sparse

from sparseflow.errors import InputError
from sparseflow.tuning.measure import gpu_evaluator
from sparseflow.tuning.model.gpu_features import GpuScheduleFeatures
from sparseflow.tuning.schedule.gpu import GpuMapping, GpuScheduleSpace
from sparseflow.tuning.schedule.matrices import as_coo
from sparseflow.tuning.schedule.operators import get_operator
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.search.gpu_session import tune_on_gpu

pytest.importorskip("triton", reason="kernels for GPUs need triton")
pytestmark = [
    *([pytest.mark.gpu] if torch.cuda.is_available() else []),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MATRIX = sparse.random_array((9, 12), density=0.3, rng=np.random.default_rng(0), format="csr")


@pytest.mark.parametrize("operator", ["spmm", "sddmm"])
def test_session_selects_a_right_kernel(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":  # interpreted kernels are slow
        monkeypatch.setattr(gpu_evaluator, "_CALLS", 1)
        monkeypatch.setattr(gpu_evaluator, "_ROUNDS", 2)
        monkeypatch.setattr(gpu_evaluator, "_THOROUGH_ROUNDS", 2)
    messages: list[str] = []
    result = tune_on_gpu(
        operator, MATRIX, DEVICE, n_cols=5, budget_s=60, max_trials=3,
        progress=lambda message, _: messages.append(message),
    )  # fmt: skip
    assert len(result.trials) == len(messages) == (8 if operator == "spmm" else 6)
    assert all(trial.error is None for trial in result.trials)
    assert {"csr", "library"} <= set(result.baselines)
    assert result.kernel.speedup is not None and result.best_ratio is not None
    assert result.kernel.speedup * result.best_ratio == pytest.approx(min(result.baselines.values()))
    full = torch.from_numpy(MATRIX.toarray()).float().to(DEVICE)
    if operator == "spmm":
        dense = torch.randn(12, 5, device=DEVICE)
        torch.testing.assert_close(result.kernel(dense), full @ dense)
    else:
        x, y = torch.randn(9, 5, device=DEVICE), torch.randn(12, 5, device=DEVICE)
        torch.testing.assert_close(result.kernel(x, y).to_dense(), full * (x @ y.mT))


def test_session_without_budget_measures_nothing() -> None:
    result = tune_on_gpu("spmm", MATRIX, DEVICE, n_cols=5, budget_s=0, dtype=torch.float16)
    assert not result.trials and "not measured" in result.kernel.explain()
    assert result.kernel(torch.ones(12, 2, dtype=torch.float16, device=DEVICE)).dtype == torch.float16


def test_session_refuses_spmv() -> None:
    with pytest.raises(InputError, match="n_cols=1"):
        tune_on_gpu("spmv", MATRIX, DEVICE)
    with pytest.raises(InputError, match="dtype"):
        tune_on_gpu("spmm", MATRIX, DEVICE, n_cols=5, dtype=torch.int32)


@pytest.mark.parametrize("operator", ["spmm", "sddmm"])
def test_space_has_schedules_that_are_read_back(operator: str) -> None:
    problem = SparseProblem(operator=get_operator(operator), matrix=as_coo(MATRIX), n_cols=70)
    space, rng = GpuScheduleSpace(problem.operator, problem.extents), np.random.default_rng(0)
    samples = [space.sample(rng) for _ in range(60)]
    samples += [space.mutate(sample, rng) for sample in samples]
    samples += [space.crossover(a, b, rng) for a, b in itertools.pairwise(samples)]
    mappings = {GpuMapping.from_schedule(sample, problem.operator, problem.extents) for sample in samples}
    assert {mapping.template for mapping in mappings} == (
        {"segments", "elements"} if operator == "sddmm" else {"segments", "rows", "panels", "blocks"}
    )
    assert all(mapping.tile <= 128 for mapping in mappings), "a tile is not wider than the matrix"
    features = GpuScheduleFeatures(problem)
    assert features.compute(samples).shape == (len(samples), len(features.names))
    assert np.isfinite(features.score(samples)).all()
