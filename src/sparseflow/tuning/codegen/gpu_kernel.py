"""Tuned operators on a GPU."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from sparseflow.core.device import describe_device
from sparseflow.errors import DeviceError, InputError
from sparseflow.tuning.codegen.extrema import Extremum
from sparseflow.tuning.codegen.gpu_program import (
    GpuLibraryProgram,
    GpuProgram,
    find_tensor_extrema,
)
from sparseflow.tuning.codegen.kernel import Kernel, KernelFile
from sparseflow.tuning.codegen.program import compute_storage_limit
from sparseflow.tuning.codegen.variants import KernelFamily
from sparseflow.tuning.schedule.gpu import build_gpu_presets
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule


class GpuKernel(Kernel):
    """SpMM or SDDMM with a matrix on a GPU; see `Kernel`.

    Inputs are tensors on the GPU; half precision, with float32 sums, is possible. The schedule does not
    depend on the number of columns, which can be any.

    Args:
        program: Schedule or library implementation with the matrix on the device.
        dtype: Dtype of torch that the values of A stand for.
        speedup: Time of the best baseline over the time of this kernel.
    """

    def __init__(
        self,
        program: GpuProgram | GpuLibraryProgram,
        dtype: torch.dtype = torch.float32,
        *,
        speedup: float | None = None,
    ) -> None:
        self.program, self._torch_dtype = program, dtype
        super().__init__(program.problem, speedup)
        self.device = str(program.device)

    @property
    def schedule(self) -> Schedule | None:
        return self.program.schedule

    @property
    def torch_dtype(self) -> torch.dtype:
        return self._torch_dtype

    def __reduce__(self) -> NoReturn:
        raise InputError("a kernel on a GPU cannot be pickled; save it to a file")

    def save(self, path: Path | str) -> None:
        if self._value_tensor is not None:
            raise InputError("the kernel has values of `with_values`; save the kernel that was tuned")
        super().save(path)

    def _describe_gpu(self) -> dict[str, Any]:
        program = self.program
        return {
            "gpu": describe_device(self.device).name,
            "dtype": str(self.torch_dtype).removeprefix("torch."),
            "algorithm": program.algorithm if isinstance(program, GpuLibraryProgram) else None,
        }

    def compute(self, *inputs: np.ndarray, values: np.ndarray | None = None) -> np.ndarray:
        tensors = [torch.tensor(value, device=self.device) for value in inputs]
        packed = None if values is None else self.program.pack_values(torch.tensor(values))
        return self.program.run(*tensors, values=packed).cpu().numpy()

    def replace_values(self, values: np.ndarray) -> GpuKernel:
        return GpuKernel(self.program.replace_values(torch.tensor(values)), self._torch_dtype)

    def with_values(self, values: Any) -> GpuKernel:
        """Create a kernel for the same pattern with other values; see `Kernel.with_values`.

        Values are not checked, because that would wait for the GPU.
        """
        values = torch.as_tensor(values, device=self.device)
        if tuple(values.shape) != self.problem.matrix.values.shape or values.dtype.is_complex:
            raise InputError(
                f"`values` has shape {tuple(values.shape)} and dtype {values.dtype}; expected "
                f"{self.problem.matrix.nnz} real numbers"
            )
        kernel = GpuKernel(self.program, self._torch_dtype, speedup=self.speedup)
        kernel.origin, kernel._family = self.origin, KernelFamily(self)
        kernel._value_tensor, kernel._value_version = values, values._version
        return kernel

    def _get_variant(self, **changes: Any) -> Kernel:
        # The schedule does not depend on the number of columns, and values are converted at the first call.
        changes = {name: value for name, value in changes.items() if name not in ("n_cols", "dtype")}
        return self._family.get(self.base, replace(self._key, **changes))

    def build_variant(self, problem: SparseProblem) -> GpuKernel:
        if isinstance(self.program, GpuLibraryProgram):
            program = self.program
            is_same = problem.operator == program.problem.operator
            algorithm = program.algorithm if is_same else None
            return GpuKernel(GpuLibraryProgram(problem, program.device, algorithm), self._torch_dtype)
        program, origin = _adapt_program(self.program, problem)
        kernel = GpuKernel(program, self._torch_dtype)
        kernel.origin = origin
        return kernel

    def multiply_tensor(self, dense: Tensor, values: Tensor | None) -> Tensor:
        self.check_shapes((tuple(dense.shape[-2:]),))
        if values is not None:
            values = values[self.transposition_tensor] if self._key.transposed else values
            values = self.program.pack_values(values.to(dense.dtype))
        matrices = dense.unsqueeze(-1) if dense.dim() == 1 else dense
        batch = matrices.shape[:-2]
        products = [
            self.program.run(matrix, values=values)
            for matrix in matrices.reshape(-1, *matrices.shape[-2:]).contiguous()
        ]
        result = products[0] if not batch else torch.stack(products).unflatten(0, batch)
        return result[:, 0] if dense.dim() == 1 else result

    def sample_tensors(self, x: Tensor, y: Tensor) -> Tensor:
        self.check_shapes((tuple(x.shape), tuple(y.shape)))
        return self.program.run(x.contiguous(), y.contiguous())

    def sample_products(self, x: Tensor, y: Tensor) -> Tensor:
        ones = self._get_variant(operator="sddmm", values="ones")
        return ones.sample_tensors(x, y)

    def find_tensor_extrema(
        self, dense: Tensor, values: Tensor | None, reduce: Extremum
    ) -> tuple[Tensor, Tensor]:
        if values is None:
            values = torch.tensor(self.problem.matrix.values, dtype=dense.dtype, device=dense.device)
        return find_tensor_extrema(*self.csr_tensors, values.contiguous(), dense.contiguous(), reduce)

    @cached_property
    def csr_tensors(self) -> tuple[Tensor, Tensor]:
        template = self._family.template
        if template is not None:
            return self._family.get_similar(template, self._key).csr_tensors
        pos, crd = (torch.from_numpy(part.astype(np.int32)).to(self.device) for part in self._csr_indices)
        return pos, crd


def build_saved_kernel(
    file: KernelFile, problem: SparseProblem, device: str | torch.device, *, any_gpu: bool, max_bytes: int
) -> GpuKernel:
    """Build a kernel from its file; see `load`."""
    target = find_gpu(device)
    name = describe_device(str(target)).name
    if name != file.gpu and not any_gpu:
        raise DeviceError(
            f"the kernel was tuned on another GPU: {file.gpu}; this one is {name}. Tune again, or load with "
            "any_cpu=True"
        )
    if file.schedule is None:
        program = GpuLibraryProgram(problem, target, file.algorithm)
    else:
        program = GpuProgram(problem, file.schedule, target, max_bytes=max_bytes)
    return GpuKernel(program, getattr(torch, file.dtype), speedup=file.speedup)


def find_gpu(device: str | torch.device) -> torch.device:
    """Return a GPU with its index, or the CPU if Triton interprets its kernels.

    Raises:
        DeviceError: There is no GPU.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise DeviceError(f"torch sees no GPU, so `device` (={device}) is not possible; use the CPU")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def _adapt_program(base: GpuProgram, problem: SparseProblem) -> tuple[GpuProgram, str]:
    """Build a program with the base's schedule, or with a preset if that does not fit; say which."""
    operator, extents, limit = problem.operator, problem.extents, compute_storage_limit(problem)
    if operator == base.problem.operator or base.mapping.template == "segments":
        schedule = base.mapping.to_schedule(operator, extents)
        with suppress(InputError):  # its blocks hold too many zeros of this matrix
            program = GpuProgram(problem, schedule, base.device, max_bytes=limit)
            return program, f"the schedule {base.schedule}, not tuned"
    name, schedule = next(iter(build_gpu_presets(operator, extents).items()))
    return GpuProgram(problem, schedule, base.device, max_bytes=limit), f"the preset {name}, not tuned"
