"""Kernels for GPUs, on a GPU or interpreted by Triton on a CPU."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from scipy import sparse
from torch import Tensor

from sparseflow.core.device import describe_device
from sparseflow.errors import DeviceError, InputError, RunError
from sparseflow.tuning.codegen import gpu_kernel
from sparseflow.tuning.codegen.cusparse import ALGORITHMS
from sparseflow.tuning.codegen.gpu_kernel import GpuKernel
from sparseflow.tuning.codegen.gpu_program import GpuLibraryProgram, GpuProgram
from sparseflow.tuning.codegen.kernel import load
from sparseflow.tuning.schedule.gpu import GpuMapping, build_gpu_presets
from sparseflow.tuning.schedule.matrices import as_coo
from sparseflow.tuning.schedule.operators import get_operator
from sparseflow.tuning.schedule.problem import SparseProblem

pytest.importorskip("triton", reason="kernels for GPUs need triton")
pytestmark = [
    *([pytest.mark.gpu] if torch.cuda.is_available() else []),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
]

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
MAPPINGS = {
    "segments": GpuMapping(template="segments", tile=16, warps=1, step=4),
    "one element": GpuMapping(template="segments", tile=32, warps=2),
    "split rows": GpuMapping(template="segments", tile=16, warps=1, step=2, chunk=32),
    "rows": GpuMapping(template="rows", tile=16, warps=4, rows=8),
    "panels": GpuMapping(template="panels", tile=32, warps=2, rows=4, step=2),
    "even columns": GpuMapping(template="panels", tile=16, warps=1, rows=8),
    "blocks": GpuMapping(template="blocks", tile=32, warps=2, rows=16, inner=16),
    "tall blocks": GpuMapping(template="blocks", tile=16, warps=4, rows=32, inner=16),
}


def make_matrix(rows: int, cols: int) -> Any:
    """Make a matrix with an empty row and a full one."""
    rng = np.random.default_rng(0)
    dense = rng.standard_normal((rows, cols)) * (rng.random((rows, cols)) < 0.2)
    dense[rows // 2], dense[rows // 3] = 0, 1
    return sparse.csr_array(dense)


def make_kernel(
    operator: str, mapping: GpuMapping | None, matrix: Any, n_cols: int, dtype: torch.dtype = torch.float32
) -> GpuKernel:
    values = np.float64 if dtype == torch.float64 else np.float32
    problem = SparseProblem(
        operator=get_operator(operator), matrix=as_coo(matrix, dtype=values), n_cols=n_cols
    )
    if mapping is None:
        return GpuKernel(GpuLibraryProgram(problem, DEVICE), dtype)
    schedule = mapping.to_schedule(problem.operator, problem.extents)
    return GpuKernel(GpuProgram(problem, schedule, DEVICE, max_bytes=1 << 28), dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        # The fast tests use other types than float32 for one mapping of each template.
        pytest.param(
            name,
            dtype,
            marks=[]
            if dtype == torch.float32 or name in ("segments", "rows", "panels", "blocks")
            else pytest.mark.slow,
        )
        for name in MAPPINGS
        for dtype in (torch.float32, torch.float16, torch.float64)
    ],
)
def test_spmm_matches_dense(name: str, dtype: torch.dtype) -> None:
    mapping = MAPPINGS[name]
    if mapping.template == "blocks" and dtype == torch.float64:
        pytest.skip("tensor cores take no float64 here")
    matrix = make_matrix(37, 50)
    kernel = make_kernel("spmm", mapping, matrix, 20, dtype)
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.float64: 1e-12}[dtype]
    for n_cols in (1, 40):
        dense = torch.randn(50, n_cols, dtype=dtype, device=DEVICE)
        expected = torch.from_numpy(matrix.toarray()).to(DEVICE) @ dense.double()
        result = kernel(dense)
        assert result.dtype == dtype and result.shape == expected.shape
        assert (result - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize(
    "mapping",
    [
        GpuMapping(template="segments", tile=16, warps=1, step=4),
        GpuMapping(template="segments", tile=16, warps=1, step=4, chunk=32),
        GpuMapping(template="segments", tile=32, warps=1, step=2),
        GpuMapping(template="elements", tile=16, warps=2, step=8),
    ],
    ids=lambda mapping: f"{mapping.template} {mapping.tile} {mapping.chunk}",
)
def test_sddmm_matches_dense(mapping: GpuMapping) -> None:
    matrix = make_matrix(37, 50)
    kernel = make_kernel("sddmm", mapping, matrix, 20)
    x, y = torch.randn(37, 20, device=DEVICE), torch.randn(50, 20, device=DEVICE)
    expected = torch.from_numpy(matrix.toarray()).to(DEVICE) * (x.double() @ y.double().mT)
    torch.testing.assert_close(kernel(x, y).to_dense().double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kernel.T(y, x).to_dense().double(), expected.mT, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mapping", [MAPPINGS["segments"], MAPPINGS["rows"], None])
def test_gradients_match_dense(mapping: GpuMapping | None) -> None:
    matrix = make_matrix(9, 12)
    kernel = make_kernel("spmm", mapping, matrix, 5, torch.float64)
    rows, cols = (torch.from_numpy(np.asarray(part)).long().to(DEVICE) for part in matrix.tocoo().coords)
    dense = torch.randn(12, 5, dtype=torch.float64, device=DEVICE, requires_grad=True)
    values = torch.randn(matrix.nnz, dtype=torch.float64, device=DEVICE, requires_grad=True)

    def expand(values: Tensor) -> Tensor:
        zeros = torch.zeros(9, 12, dtype=torch.float64, device=DEVICE)
        return zeros.index_put((rows, cols), values)

    def differentiate(result: Tensor) -> tuple[Tensor, ...]:
        weights = torch.arange(result.numel(), dtype=result.dtype, device=DEVICE).reshape(result.shape)
        return torch.autograd.grad((result * weights).sum(), (dense, values))

    changed = kernel.with_values(values)
    for result, expected in (
        (changed(dense), expand(values) @ dense),
        (changed.T(changed(dense)), expand(values).mT @ (expand(values) @ dense)),
    ):
        torch.testing.assert_close(result, expected)
        for gradient, expected_gradient in zip(differentiate(result), differentiate(expected), strict=True):
            torch.testing.assert_close(gradient, expected_gradient)


def test_kernel_takes_vectors_batches_and_reductions() -> None:
    matrix = make_matrix(9, 12)
    kernel = make_kernel("spmm", MAPPINGS["segments"], matrix, 5)
    full = torch.from_numpy(matrix.toarray()).float().to(DEVICE)
    dense = torch.randn(2, 12, 3, device=DEVICE)
    torch.testing.assert_close(kernel(dense), full @ dense)
    torch.testing.assert_close(kernel(dense[0, :, 0]), full @ dense[0, :, 0])
    counts = (full != 0).sum(1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(kernel(dense[0], reduce="mean"), full @ dense[0] / counts)
    compiled = torch.compile(lambda x: kernel(x).relu(), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(dense[0]), (full @ dense[0]).relu())


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_extrema_match_dense(reduce: Literal["max", "min"]) -> None:
    matrix = make_matrix(9, 12)
    kernel = make_kernel("spmm", MAPPINGS["blocks"], matrix, 5)
    full = torch.from_numpy(matrix.toarray()).float().to(DEVICE)
    dense = torch.randn(12, 20, device=DEVICE, requires_grad=True)
    products = full.unsqueeze(-1) * dense
    absent = -torch.inf if reduce == "max" else torch.inf
    expected = getattr(torch, f"a{reduce}")(products.masked_fill(full.unsqueeze(-1) == 0, absent), 1)
    expected = expected.masked_fill((full == 0).all(1, keepdim=True), 0)
    result = kernel(dense, reduce=reduce)
    torch.testing.assert_close(result, expected)
    (gradient,), (expected_gradient,) = (
        torch.autograd.grad(item.sum(), dense) for item in (result, expected)
    )
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("name", ["panels", "cuSPARSE"])
def test_saved_kernel_computes_the_same(name: str, tmp_path: Path) -> None:
    kernel = make_kernel("spmm", MAPPINGS.get(name), make_matrix(9, 12), 5, torch.float16)
    kernel.save(tmp_path / "kernel.sfk")
    loaded = load(tmp_path / "kernel.sfk", device=DEVICE)
    dense = torch.randn(12, 5, dtype=torch.float16, device=DEVICE)
    if name == "cuSPARSE" and DEVICE.type == "cpu":
        dense = dense.float()  # torch multiplies no half precision on a CPU
    torch.testing.assert_close(loaded(dense), kernel(dense))
    assert str(loaded.schedule) == str(kernel.schedule) and loaded.torch_dtype == torch.float16
    with pytest.raises(InputError, match="with_values"):
        kernel.with_values(torch.ones(kernel.problem.matrix.nnz, device=DEVICE)).save(tmp_path / "other.sfk")


def test_kernel_of_another_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = make_kernel("spmm", MAPPINGS["segments"], make_matrix(9, 12), 5)
    kernel.save(tmp_path / "kernel.sfk")
    other = replace(describe_device(DEVICE), name="another GPU")
    monkeypatch.setattr(gpu_kernel, "describe_device", lambda _: other)
    with pytest.raises(DeviceError, match="another GPU"):
        load(tmp_path / "kernel.sfk", device=DEVICE)
    load(tmp_path / "kernel.sfk", device=DEVICE, any_cpu=True)


def test_kernel_refuses_what_it_cannot_do() -> None:
    kernel = make_kernel("spmm", MAPPINGS["segments"], make_matrix(9, 12), 5)
    with pytest.raises(InputError, match="shape"):
        kernel(torch.zeros(11, 5, device=DEVICE))
    with pytest.raises(InputError, match="expected 3"):
        kernel.with_values(torch.zeros(2, device=DEVICE))
    with pytest.raises(InputError, match="pickled"):
        pickle.dumps(kernel)


def test_presets_are_read_back() -> None:
    for operator, axes in (("spmm", "ikj"), ("sddmm", "ijk")):
        extents = dict(zip(axes, (30, 40, 50), strict=True))
        for schedule in build_gpu_presets(get_operator(operator), extents).values():
            mapping = GpuMapping.from_schedule(schedule, get_operator(operator), extents)
            assert mapping.to_schedule(get_operator(operator), extents) == schedule


@pytest.mark.skipif(DEVICE.type == "cpu", reason="torch sees no CUDA device here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize(
    ("operator", "algorithm"), [(name, item) for name in ALGORITHMS for item in ALGORITHMS[name]]
)
def test_algorithms_of_cusparse_match_torch(operator: str, algorithm: str, dtype: torch.dtype) -> None:
    matrix = make_matrix(40, 30)
    values = np.float64 if dtype == torch.float64 else np.float32
    problem = SparseProblem(operator=get_operator(operator), matrix=as_coo(matrix, dtype=values), n_cols=16)
    kernel = GpuKernel(GpuLibraryProgram(problem, DEVICE, algorithm), dtype)
    full = torch.from_numpy(matrix.toarray()).to(DEVICE, dtype)
    tolerance = {torch.float16: 1e-2, torch.float32: 1e-4, torch.float64: 1e-10}[dtype]
    for _ in range(2):  # the second call has other inputs and the buffer of the first
        x, y = (torch.randn(size, 16, device=DEVICE, dtype=dtype) for size in matrix.shape)
        try:
            result = kernel(y) if operator == "spmm" else kernel(x, y).to_dense()
        except RunError as error:
            pytest.skip(f"cuSPARSE lacks {algorithm} for {dtype}: {error}")
        expected = full @ y if operator == "spmm" else full * (x @ y.mT)
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=10 * tolerance)
