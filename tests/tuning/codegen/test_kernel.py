"""Kernels: calls, saving and loading."""

from __future__ import annotations

import copy
import ctypes
import io
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg
import torch

from sparseflow.errors import DeviceError, FileFormatError, InputError, RunError
from sparseflow.tuning.codegen import kernel as module
from sparseflow.tuning.codegen.kernel import CompiledKernel, Kernel, KernelFile, LibraryKernel, load
from sparseflow.tuning.codegen.program import build_program
from sparseflow.tuning.schedule.matrices import CooMatrix, as_coo
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.presets import build_presets
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule
from tests.conformance import check_artifact_file
from tests.killed import wait_for_child

TOLERANCE = {np.dtype(np.float32): 1e-4, np.dtype(np.float64): 1e-10}
ROWS, COLS, WIDTH = 19, 23, 10

LINES = {
    "spmm": "1 i 2 i0 9 i1 4 1 A 3 i0 k i1 A 3 i0 0 k 1 i1 0 0 4 i0 k i1 j i0 j None 0 2 2",
    "spmv": "1 i 2 i0 9 i1 4 1 A 3 i0 j i1 A 3 i0 0 j 1 i1 0 0 3 i0 j i1 i0 i1 None 0 2 2",
    "sddmm": "0 2 A 2 j i D 2 j i A 2 j 0 i 1 D 2 j 0 i 1 0 3 j i k j k None 0 2 16",
}
"""Schedules with padded rows, and with elements in another order than the matrix."""

Make = Callable[..., Kernel]


@pytest.fixture
def make(cache: Path) -> Make:
    """Create a kernel by the name of its operator."""

    def created(
        name: str,
        dtype: type = np.float32,
        *,
        library: bool = False,
        density: float = 0.3,
        speedup: float | None = None,
    ) -> Kernel:
        generator = np.random.default_rng(1)
        full = generator.standard_normal((ROWS, COLS)) * (generator.random((ROWS, COLS)) < density)
        problem = SparseProblem(
            operator=OPERATORS[name],
            matrix=as_coo(full, dtype=dtype),
            n_cols=WIDTH if OPERATORS[name].dense_axes else None,
        )
        if library:
            return LibraryKernel(problem, speedup=speedup)
        return CompiledKernel(
            build_program(problem, Schedule.parse(LINES[name])), speedup=speedup, cache_dir=cache
        )

    return created


def compute_expected(kernel: Kernel, inputs: tuple[Any, ...]) -> np.ndarray:
    """Compute C, y or D as a dense array with numpy."""
    a = kernel.problem.matrix.to_scipy().toarray().astype(np.float64)
    first, *remainder = (np.asarray(value, np.float64) for value in inputs)
    return a * (first @ remainder[0].T) if remainder else a @ first


def check(kernel: Kernel, inputs: tuple[Any, ...], result: Any) -> None:
    expected = compute_expected(kernel, inputs)
    assert result.shape == expected.shape
    limit = TOLERANCE[kernel.problem.dtype] * np.abs(expected).max(initial=1e-30)
    assert np.abs(np.asarray(result, np.float64) - expected).max() <= limit


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("density", [0.3, 0.0, 1.0])
@pytest.mark.parametrize("name", OPERATORS)
def test_call_numpy_matches_reference(
    name: str, dtype: type, density: float, library: bool, make: Make
) -> None:
    kernel = make(name, dtype, library=library, density=density)
    inputs = kernel.problem.generate_inputs()
    result = kernel(*inputs)
    if name == "sddmm":
        assert isinstance(result, scipy.sparse.csr_array)
        assert result.nnz == kernel.problem.matrix.nnz
        result = result.toarray()
    assert isinstance(result, np.ndarray) and result.dtype == dtype
    check(kernel, inputs, result)


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["spmm", "spmv"])
def test_call_torch_matches_reference(name: str, dtype: type, library: bool, make: Make) -> None:
    kernel = make(name, dtype, library=library)
    inputs = tuple(torch.from_numpy(value) for value in kernel.problem.generate_inputs())
    result = kernel(*inputs)
    assert isinstance(result, torch.Tensor) and result.layout == torch.strided
    assert result.dtype == inputs[0].dtype
    check(kernel, tuple(value.numpy() for value in inputs), result.numpy())


def test_call_negated_view_matches(make: Make) -> None:
    kernel = make("spmm")
    tensor = torch.from_numpy(kernel.problem.generate_inputs()[0])
    negated = torch.complex(tensor, tensor).conj().imag
    assert negated.is_neg() and torch.equal(kernel(negated), -kernel(tensor))


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # a warning of torch about sparse tensors
@pytest.mark.parametrize("density", [0.3, 0.0])
def test_call_sddmm_torch_returns_sparse(density: float, make: Make) -> None:
    kernel = make("sddmm", density=density)
    inputs = kernel.problem.generate_inputs()
    for arguments in (
        tuple(torch.from_numpy(value) for value in inputs),
        (inputs[0], torch.from_numpy(inputs[1])),
    ):
        result = kernel(*arguments)
        assert isinstance(result, torch.Tensor) and result.layout == torch.sparse_csr
        assert result.dtype == torch.float32
        check(kernel, inputs, result.to_dense().numpy())


def test_call_sddmm_keeps_explicit_zeros(cache: Path) -> None:
    matrix = scipy.sparse.coo_array((np.array([0.0, 2.0]), ([0, 1], [1, 0])), shape=(2, 2))
    problem = SparseProblem(operator=OPERATORS["sddmm"], matrix=as_coo(matrix), n_cols=3)
    kernel = CompiledKernel(build_program(problem, Schedule.parse(LINES["sddmm"])), cache_dir=cache)
    assert kernel(*problem.generate_inputs()).nnz == 2


@pytest.mark.parametrize("name", OPERATORS)
def test_call_strided_arrays_match(name: str, make: Make) -> None:
    kernel = make(name)
    inputs = kernel.problem.generate_inputs()
    expected = kernel.compute(*inputs)
    spread = [np.repeat(value, 2, axis=0)[::2] for value in inputs]
    turned = [np.asfortranarray(value) for value in inputs]
    backwards = [np.ascontiguousarray(value[::-1])[::-1] for value in inputs]
    raw = [np.zeros(value.nbytes + 1, np.uint8) for value in inputs]
    unaligned = [
        limits[1:].view(np.float32).reshape(value.shape) for limits, value in zip(raw, inputs, strict=True)
    ]
    for limits, value in zip(unaligned, inputs, strict=True):
        limits[...] = value
    frozen = [value.copy() for value in inputs]
    for value in frozen:
        value.flags.writeable = False
    for arguments in (spread, turned, backwards, unaligned, frozen):
        result = kernel(*arguments)
        assert np.array_equal(result.data if name == "sddmm" else result, expected)


def test_call_strided_tensors_match(make: Make) -> None:
    kernel = make("spmm")
    (value,) = kernel.problem.generate_inputs()
    tensor = torch.from_numpy(value)
    for arguments in (tensor.T.contiguous().T, torch.repeat_interleave(tensor, 2, dim=0)[::2]):
        assert not arguments.is_contiguous()
        assert np.array_equal(kernel(arguments).numpy(), kernel(value))


def test_call_result_is_owned_by_caller(make: Make) -> None:
    kernel = make("spmm")
    inputs = kernel.problem.generate_inputs()
    original = inputs[0].copy()
    first = kernel(*inputs)
    first[:] = 7.0
    second = kernel(*inputs)
    check(kernel, inputs, second)
    assert np.array_equal(inputs[0], original)


@pytest.mark.parametrize("keep", [lambda result: result, lambda result: result[1:2], torch.from_numpy])
def test_call_buffer_is_reused_without_views(keep: Callable[..., Any], make: Make) -> None:
    kernel = make("spmm")
    a, b = kernel.problem.generate_inputs(1), kernel.problem.generate_inputs(2)
    view = keep(kernel(*a))
    before = np.asarray(view).copy()
    other = kernel(*b)
    assert np.array_equal(view, before), "a viewed result is not overwritten"
    address = other.ctypes.data
    del other
    assert kernel(*a).ctypes.data == address, "a dropped buffer is reused"


def test_call_from_threads_is_safe(make: Make) -> None:
    kernel = make("spmm")
    inputs = [kernel.problem.generate_inputs(seed) for seed in range(4)]
    failures: list[BaseException] = []

    def work(arguments: tuple[np.ndarray, ...]) -> None:
        try:
            for _ in range(20):
                check(kernel, arguments, kernel(*arguments))
        except BaseException as error:  # passed to the test
            failures.append(error)

    workers = [threading.Thread(target=work, args=(input,)) for input in inputs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_call_wrong_input_count_raises(name: str, library: bool, make: Make) -> None:
    kernel = make(name, library=library)
    inputs = kernel.problem.generate_inputs()
    for arguments in ((), (*inputs, inputs[0])):
        with pytest.raises(InputError, match=rf"{name} .*{len(inputs)} .*{len(arguments)}"):
            kernel(*arguments)


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_call_wrong_shape_raises(name: str, library: bool, make: Make) -> None:
    kernel = make(name, library=library)
    inputs = kernel.problem.generate_inputs()
    first = next(iter(kernel.problem.input_shapes))
    wrong = [inputs[0][:-1], np.concatenate([inputs[0]] * 2), np.float32(1.0), [], inputs[0][..., None].T]
    if inputs[0].ndim == 2:
        wrong += [inputs[0].T, inputs[0][:, :0]]
    if name == "sddmm":
        wrong += [inputs[0][:, 0], inputs[0][:, :-1], inputs[0][None]]
    for value in wrong:
        with pytest.raises(InputError, match=f"`{first}`"):
            kernel(value, *inputs[1:])


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(
    "dtype",
    [np.float64, np.float16, np.int8, np.int32, np.bool_, np.dtype(">f4"), np.complex64, np.complex128],
)
def test_call_promotes_dtypes_as_numpy(dtype: Any, name: str, library: bool, make: Make) -> None:
    kernel = make(name, library=library)
    inputs = [(3 * value).astype(dtype) for value in kernel.problem.generate_inputs()]
    if name == "sddmm" and np.dtype(dtype).kind == "c":
        with pytest.raises(InputError, match="does not take complex"):
            kernel(*inputs)
        return
    matrix = kernel.problem.matrix.to_scipy().toarray()
    result = kernel(*inputs)
    result = result.toarray() if name == "sddmm" else result
    wide = [value.astype(np.complex128) for value in inputs]
    expected = matrix * (wide[0] @ wide[1].T) if name == "sddmm" else matrix @ wide[0]
    assert result.dtype == np.result_type(np.float32, dtype)
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [object, np.longdouble, "U3", "M8[s]"])
def test_call_with_other_dtypes_raises(dtype: Any, make: Make) -> None:
    kernel = make("spmm")
    with pytest.raises(InputError, match=r"`B` is a ndarray of dtype|does not take float128"):
        kernel(np.ones((COLS, WIDTH)).astype(dtype))


@pytest.mark.parametrize("mask", [False, True])
def test_call_masked_array_raises(mask: bool, make: Make) -> None:
    kernel = make("spmm")
    (value,) = kernel.problem.generate_inputs()
    with pytest.raises(InputError, match="masked"):
        kernel(np.ma.masked_array(value, mask=np.full(value.shape, mask)))


def test_call_ragged_list_raises(make: Make) -> None:
    with pytest.raises(InputError, match="`B` is a list"):
        make("spmm")([[1.0], [1.0, 2.0]])


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.complex64]
)
def test_call_promotes_dtypes_as_torch(dtype: torch.dtype, make: Make) -> None:
    kernel = make("spmm")
    dense = (3 * torch.from_numpy(kernel.problem.generate_inputs()[0])).to(dtype)
    result = kernel(dense)
    assert result.dtype == torch.promote_types(torch.float32, dtype)
    expected = torch.from_numpy(kernel.problem.matrix.to_scipy().toarray()).to(result.dtype) @ dense.to(
        result.dtype
    )
    torch.testing.assert_close(result, expected)


def test_call_with_names_factors_and_an_output(make: Make) -> None:
    kernel, sampled = make("spmm"), make("sddmm")
    (dense,) = kernel.problem.generate_inputs()
    expected = kernel(dense)
    assert np.array_equal(kernel(B=dense), expected)
    x, y = sampled.problem.generate_inputs()
    assert np.array_equal(sampled(x, Y=y).data, sampled(Y=y, X=x).data)
    mistakes: list[tuple[Any, Any]] = [((dense,), {"B": dense}), ((), {"C": dense})]
    for arguments, names in mistakes:
        with pytest.raises(InputError, match="spmm expects 1 inputs"):
            kernel(*arguments, **names)
    out = np.ones_like(expected)
    assert kernel(dense, out=out) is out and np.array_equal(out, expected)
    kernel(dense, out=out, alpha=2.0, beta=3.0)
    np.testing.assert_allclose(out, 5 * expected, rtol=1e-6)
    np.testing.assert_allclose(kernel(dense, alpha=2.0), 2 * expected)
    tensor = torch.ones(ROWS, WIDTH)
    kernel(torch.from_numpy(dense), out=tensor, beta=1.0)
    np.testing.assert_allclose(tensor.numpy(), expected + 1, rtol=1e-6, atol=1e-6)
    for other in (out[:-1], out.astype(np.float64), tensor, out.tolist()):
        with pytest.raises(InputError, match="`out`"):
            kernel(dense, out=other)
    with pytest.raises(InputError, match="pass `out`, too"):
        kernel(dense, beta=2.0)
    with pytest.raises(InputError, match="`out` is for dense results"):
        sampled(x, y, out=sampled(x, y))


def test_call_with_bias_and_activation(make: Make) -> None:
    kernel = make("spmm", np.float64)
    (dense,), bias = kernel.problem.generate_inputs(1), np.linspace(-1, 1, WIDTH)
    expected, out = compute_expected(kernel, (dense,)), np.ones((ROWS, WIDTH))
    activated = np.maximum(expected + bias, 0)
    np.testing.assert_allclose(kernel(dense, bias=bias, activation="relu"), activated)
    np.testing.assert_allclose(kernel(dense, bias=bias), expected + bias)
    result = kernel(torch.from_numpy(dense), bias=torch.from_numpy(bias), activation="relu")
    np.testing.assert_allclose(result, activated)
    kernel(dense, out=out, alpha=2.0, beta=3.0, bias=bias, activation="relu")
    np.testing.assert_allclose(out, np.maximum(2 * expected + 3 + bias, 0))
    vector = make("spmv", np.float64)
    (x,) = vector.problem.generate_inputs(1)
    np.testing.assert_allclose(vector(x, activation="relu"), np.maximum(vector(x), 0))
    for wrong in (bias[:-1], bias[0], torch.from_numpy(bias)):
        with pytest.raises(InputError, match="`bias`"):
            kernel(dense, bias=wrong)
    with pytest.raises(InputError, match="`bias`"):
        vector(x, bias=bias)
    with pytest.raises(InputError, match="'tanh'"):
        kernel(dense, activation="tanh")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="complex"):
        kernel(1j * dense, activation="relu")
    with pytest.raises(InputError, match="sddmm"):
        make("sddmm")(*make("sddmm").problem.generate_inputs(1), activation="relu")


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("name", ["spmm", "spmv"])
def test_other_columns_vectors_and_batches(name: str, library: bool, make: Make) -> None:
    kernel = make(name, np.float64, library=library)
    matrix, generator = kernel.problem.matrix.to_scipy().toarray(), np.random.default_rng(0)
    for shape in ((COLS,), (COLS, 1), (COLS, 3), (COLS, 130), (2, COLS, 4), (2, 3, COLS, WIDTH)):
        dense = generator.standard_normal(shape)
        np.testing.assert_allclose(kernel(dense), matrix @ dense, rtol=1e-10, atol=1e-10)
        result = kernel(torch.from_numpy(dense))
        np.testing.assert_allclose(result.numpy(), matrix @ dense, rtol=1e-10, atol=1e-10)
    text = kernel.explain()
    assert "n_cols=130" in text and ("library" if library else "not tuned") in text


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_transposed(name: str, library: bool, make: Make) -> None:
    kernel = make(name, np.float64, library=library)
    assert kernel.T.T is kernel and kernel.T.shape == (COLS, ROWS) and "transposed" in kernel.explain()
    if name == "sddmm":
        x, y = kernel.problem.generate_inputs()
        np.testing.assert_allclose(kernel.T(y, x).toarray(), kernel(x, y).toarray().T)
        assert not isinstance(kernel, np.ndarray) and kernel.__matmul__(x) is NotImplemented
        return
    matrix, generator = kernel.problem.matrix.to_scipy().toarray(), np.random.default_rng(0)
    columns, rows = generator.standard_normal((COLS, 4)), generator.standard_normal((4, ROWS))
    np.testing.assert_allclose(kernel @ columns, matrix @ columns)
    np.testing.assert_allclose(rows @ kernel, rows @ matrix)
    np.testing.assert_allclose(rows[0] @ kernel, rows[0] @ matrix)
    np.testing.assert_allclose(torch.from_numpy(rows) @ kernel, rows @ matrix)


def test_solvers_of_scipy_take_kernels(cache: Path) -> None:
    matrix = scipy.sparse.csr_array(4 * np.eye(30) - np.eye(30, k=1) - np.eye(30, k=-1))
    problem = SparseProblem(operator=OPERATORS["spmv"], matrix=as_coo(matrix))
    schedule = build_presets(problem.operator, problem.extents, 1)["csr"]
    kernel = CompiledKernel(build_program(problem, schedule), cache_dir=cache)
    solution, status = scipy.sparse.linalg.cg(kernel, np.ones(30), rtol=1e-10)
    assert status == 0
    np.testing.assert_allclose(matrix @ solution, 1, rtol=1e-8)
    operator = scipy.sparse.linalg.aslinearoperator(kernel)
    norm: Any = scipy.sparse.linalg.svds(operator, k=1, return_singular_vectors=False)
    np.testing.assert_allclose(norm, np.linalg.norm(matrix.toarray(), 2))


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_other_values(name: str, library: bool, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = make(name, library=library)
    inputs, matrix = kernel.problem.generate_inputs(), kernel.problem.matrix
    values = np.random.default_rng(5).standard_normal(matrix.nnz).astype(np.float32)
    kernel.T  # noqa: B018 - compiled now
    monkeypatch.setattr(module, "build_program", None)
    other = kernel.with_values(values)
    check(other, inputs, other(*inputs) if name != "sddmm" else other(*inputs).toarray())
    assert np.array_equal(other.problem.matrix.values, values)
    for transposed in (other.T, kernel.T.with_values(kernel.T.problem.matrix.values)):
        mirrored = inputs[::-1] if name == "sddmm" else transposed.problem.generate_inputs()
        result = transposed(*mirrored)
        check(transposed, mirrored, result.toarray() if name == "sddmm" else result)
    for wrong, message in ((values[:-1], "shape"), (values * np.nan, "finite"), (values * 1j, "real")):
        with pytest.raises(InputError, match=message):
            kernel.with_values(wrong)


def test_call_second_input_is_checked(make: Make) -> None:
    kernel = make("sddmm")
    x, y = kernel.problem.generate_inputs()
    with pytest.raises(InputError, match="`Y`"):
        kernel(x, y[:-1])
    with pytest.raises(InputError, match="`X`"):
        kernel(y, x)


def test_call_other_device_raises(make: Make) -> None:
    kernel = make("spmm")
    with pytest.raises(InputError, match="`B`"):
        kernel(torch.empty(COLS, WIDTH, device="meta"))


# Copies and processes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(
    "duplicate",
    [
        copy.copy,
        copy.deepcopy,
        lambda kernel: pickle.loads(pickle.dumps(kernel)),
        lambda kernel: load_module(kernel),
    ],
    ids=["copy", "deepcopy", "pickle", "torch.save"],
)
def test_copy_computes_the_same(
    duplicate: Callable[[Kernel], Kernel], name: str, library: bool, make: Make
) -> None:
    kernel = make(name, library=library, speedup=1.5)
    result = duplicate(kernel)
    assert type(result) is type(kernel) and result is not kernel
    assert (result.speedup, result.schedule) == (1.5, kernel.schedule)
    inputs = kernel.problem.generate_inputs()
    assert np.array_equal(result.compute(*inputs), kernel.compute(*inputs))
    for array in ("rows", "cols", "values"):
        assert not getattr(result.problem.matrix, array).flags.writeable


def load_module(kernel: Kernel) -> Any:
    """Return the kernel of a module that was written by `torch.save`."""
    module, stream = torch.nn.Module(), io.BytesIO()
    module.kernel = kernel  # pyright: ignore[reportArgumentType]
    torch.save(module, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False).kernel


def test_repr_describes_the_problem(make: Make) -> None:
    assert repr(make("spmm")) == "<CompiledKernel spmm: 19 x 23, 130 elements, float32, n_cols=10>"
    assert (
        repr(make("spmv", np.float64, library=True)) == "<LibraryKernel spmv: 19 x 23, 130 elements, float64>"
    )


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("name", ["spmm", "spmv"])
def test_call_in_forked_process_matches(name: str, make: Make) -> None:
    kernel = make(name)
    assert " 2 2" in str(kernel.schedule), "the schedule has two threads"
    inputs = kernel.problem.generate_inputs()
    expected = kernel(*inputs)  # creates the threads of OpenMP
    child = os.fork()
    if not child:
        os._exit(0 if np.array_equal(kernel(*inputs), expected) else 1)
    code = wait_for_child(child, timeout_s=30.0)
    assert code == 0, "the child computes the same" if code else "the child hangs"
    assert np.array_equal(kernel(*inputs), expected)


class KernelDataset(torch.utils.data.Dataset[np.ndarray]):
    """Items that a kernel computes."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> np.ndarray:
        return self.kernel(*self.kernel.problem.generate_inputs(index))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_data_loader_worker_computes_the_same(make: Make) -> None:
    data = KernelDataset(make("spmm"))
    expected = [data[index] for index in range(2)]
    loader = torch.utils.data.DataLoader(
        data, batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=30
    )
    for result, value in zip(loader, expected, strict=True):
        assert np.array_equal(np.asarray(result), value)


# Files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", OPERATORS)
def test_save_load_round_trip(
    name: str, dtype: type, library: bool, make: Make, cache: Path, tmp_path: Path
) -> None:
    kernel = make(name, dtype, library=library, speedup=1.25)
    file = tmp_path / "kernel"
    kernel.save(file)
    result = load(file, cache_dir=cache)
    assert type(result) is type(kernel)
    assert result.speedup == 1.25 and result.schedule == kernel.schedule
    assert (result.problem.operator, result.problem.n_cols) == (
        kernel.problem.operator,
        kernel.problem.n_cols,
    )
    assert result.problem.matrix.shape == (ROWS, COLS) and result.problem.dtype == dtype
    inputs = kernel.problem.generate_inputs()
    assert np.array_equal(result.compute(*inputs), kernel.compute(*inputs))
    assert [item.name for item in tmp_path.iterdir()] == ["kernel"]


def test_save_load_empty_matrix(make: Make, cache: Path, tmp_path: Path) -> None:
    kernel = make("spmm", density=0.0)
    kernel.save(str(tmp_path / "kernel"))
    result = load(str(tmp_path / "kernel"), cache_dir=cache)
    assert result.speedup is None
    assert not result(*result.problem.generate_inputs()).any()


def test_save_replaces_file(make: Make, cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "kernel"
    make("spmm").save(file)
    make("spmv").save(file)
    assert load(file, cache_dir=cache).problem.operator.name == "spmv"


def test_load_without_cache_recompiles(make: Make, tmp_path: Path) -> None:
    kernel = make("spmv")
    kernel.save(tmp_path / "kernel")
    result = load(tmp_path / "kernel", cache_dir=tmp_path / "elsewhere")
    inputs = kernel.problem.generate_inputs()
    assert np.array_equal(result(*inputs), kernel(*inputs))


def test_load_without_right_to_execute_raises(
    make: Make, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("spmv").save(tmp_path / "kernel")

    def refuse(path: str) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(RunError, match="SPARSEFLOW_CACHE"):
        load(tmp_path / "kernel", cache_dir=cache)


def test_load_missing_file_raises(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(InputError, match="tune again"):
            load(path)


def test_load_other_cpu_raises(
    make: Make, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = make("spmm", speedup=2.0)
    kernel.save(tmp_path / "kernel")
    current = module.describe_cpu()
    monkeypatch.setattr(module, "describe_cpu", lambda: "another, 4 CPUs, sve")
    with pytest.raises(DeviceError) as error:
        load(tmp_path / "kernel", cache_dir=cache)
    assert current in str(error.value) and "another, 4 CPUs, sve" in str(error.value)
    assert "any_cpu=True" in str(error.value)
    result = load(tmp_path / "kernel", any_cpu=True, cache_dir=cache)
    inputs = kernel.problem.generate_inputs()
    assert np.array_equal(result(*inputs), kernel(*inputs))


def test_load_without_compiler_raises(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("spmm").save(tmp_path / "compiled")
    make("spmm", library=True).save(tmp_path / "library")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(DeviceError):
        load(tmp_path / "compiled", cache_dir=tmp_path / "cache")
    assert load(tmp_path / "library").schedule is None


@pytest.fixture
def rewritten(make: Make, tmp_path: Path) -> Callable[..., Path]:
    """A saved kernel with some fields or tensors changed."""

    def change(**changes: Any) -> Path:
        path = tmp_path / "kernel"
        make("spmm").save(path)
        file, tensors = KernelFile.load_tensors(path)
        fields = {name: value for name, value in changes.items() if name not in tensors}
        for name in changes.keys() & tensors.keys():
            tensors[name] = tensors[name][:-1]
        if fields.get("sha256") == "matching":
            arrays = {name: value.numpy() for name, value in tensors.items()}
            fields["sha256"] = CooMatrix(**arrays, shape=fields["shape"]).digest()
        file.model_copy(update=fields).save_tensors(path, tensors)
        return path

    return change


@pytest.mark.parametrize(
    "changes",
    [
        {"operator": "spmspm"},
        {"operator": "spmv"},
        {"n_cols": None},
        {"n_cols": 0},
        {"shape": (ROWS, 1)},
        {"schedule": Schedule.parse(LINES["spmv"])},
        {"sha256": "0"},
        {"rows": "cut"},
        {"cols": "cut"},
        {"schedule": Schedule.parse(LINES["spmm"].replace("None 0 2 2", "None 0 1000 2"))},
        {"n_cols": 10**12},
        {"operator": "spmv", "n_cols": None, "schedule": None, "shape": (10**9, COLS), "sha256": "matching"},
    ],
    ids=str,
)
def test_load_inconsistent_file_raises(
    changes: dict[str, Any], rewritten: Callable[..., Path], cache: Path
) -> None:
    with pytest.raises(FileFormatError, match="tune again"):
        load(rewritten(**changes), cache_dir=cache)


def test_load_float_coordinates_raises(make: Make, cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "kernel"
    make("spmm").save(path)
    file, tensors = KernelFile.load_tensors(path)
    for dtype in (torch.float64, torch.bfloat16):
        arrays = {**tensors, "rows": tensors["rows"].to(dtype)}
        digest = "0"
        if dtype == torch.float64:
            digest = CooMatrix(
                **{name: value.numpy() for name, value in arrays.items()}, shape=file.shape
            ).digest()
        file.model_copy(update={"sha256": digest}).save_tensors(path, arrays)
        with pytest.raises(FileFormatError, match="tune again"):
            load(path, cache_dir=cache)


def test_save_and_kernel_hold_the_same_values(make: Make, cache: Path, tmp_path: Path) -> None:
    kernel = make("spmm")
    assert isinstance(kernel, CompiledKernel)
    matrix = kernel.problem.matrix
    for array in (matrix.rows, matrix.cols, matrix.values, *kernel.program.leading_arrays):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0
    kernel.save(tmp_path / "kernel")
    inputs = kernel.problem.generate_inputs()
    assert np.array_equal(load(tmp_path / "kernel", cache_dir=cache)(*inputs), kernel(*inputs))


def test_load_without_schedule_is_library_kernel(rewritten: Callable[..., Path]) -> None:
    assert isinstance(load(rewritten(schedule=None)), LibraryKernel)


def test_kernel_file_conforms(make: Make, cache: Path, tmp_path: Path) -> None:
    make("spmm").save(tmp_path / "kernel")

    def load_any(path: Path) -> object:
        return load(path, any_cpu=True, cache_dir=cache)

    check_artifact_file(load_any, tmp_path / "kernel", hint="tune again")
