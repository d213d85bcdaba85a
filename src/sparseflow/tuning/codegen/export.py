"""Export of a kernel as C code and data, for programs without Python.

The folder of a kernel has these files:

=========================  ============================================================
file                       content
=========================  ============================================================
`<prefix>_kernel.h`, `.c`  interface for C and C++; generated code and loader
`<prefix>_kernel.bin`      packed matrix; its layout is described in the C file
`<prefix>_kernel_test.c`   test program
`<prefix>_kernel_test.bin` expected results of the test program
`CMakeLists.txt`           library, test and installation
`README.md`                how to build and call the kernel
=========================  ============================================================

The matrix is not part of the source, because gcc takes seconds for each million elements of an array.
"""

from __future__ import annotations

import hashlib
import math
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import sparseflow
from sparseflow.core.files import check_output, replace_file
from sparseflow.errors import InputError, OutputError
from sparseflow.tuning.codegen.c_source import SYMBOL
from sparseflow.tuning.codegen.compile import OPTIMIZE_FLAGS
from sparseflow.tuning.codegen.program import ALIGNMENT, KernelProgram, build_program
from sparseflow.tuning.schedule.presets import REFERENCE_PRESETS, build_presets
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule

DEFAULT_PREFIX = "sparseflow"

_FORMULAS = {"spmm": "C = A B", "spmv": "y = A x", "sddmm": "D = A * (X Y^T), elementwise"}

_TOLERANCE = {np.dtype(np.float32): 1e-4, np.dtype(np.float64): 1e-10}
"""Allowed error relative to the sum of the absolute values of the products."""

_CHUNK_WORDS = 2**20

_MAX_EXPECTED = 2**19
"""Results that the test program compares; 16 MiB of expected results."""


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """Files of an exported kernel.

    Attributes:
        folder: Directory of the files.
        files: Names of the files.
        schedule: Schedule of the C code.
        preset: Name of the schedule if the kernel has none, because scipy computes it.
    """

    folder: Path
    files: tuple[str, ...]
    schedule: Schedule
    preset: str | None

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return asdict(self) | {"folder": str(self.folder), "schedule": str(self.schedule)}


def export_schedule(
    problem: SparseProblem, schedule: Schedule | None, folder: Path, *, prefix: str = DEFAULT_PREFIX
) -> ExportResult:
    """Write the C code of a schedule and the packed matrix to a folder.

    Args:
        problem: Problem.
        schedule: Schedule; None for the reference preset on one thread.
        folder: Directory to create; it may exist if it is empty.
        prefix: Start of the names of files and symbols.

    Raises:
        InputError: `prefix` is no C identifier, `folder` is not empty, or the schedule cannot run.
        OutputError: The folder cannot be written.
    """
    if not re.fullmatch("[A-Za-z][A-Za-z0-9_]*", prefix):
        raise InputError(
            f"`prefix` (={prefix!r}) must be a C identifier that starts with a letter, such as my_matrix"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is not an empty directory; name a new or an empty directory")
    check_output(folder, directory=True)
    preset = None
    if schedule is None:
        preset = REFERENCE_PRESETS[problem.operator.name]
        presets = build_presets(problem.operator, problem.extents, threads=1)
        schedule = presets[preset].canonicalize(problem.operator, problem.extents)
    program = build_program(problem, schedule)
    files = _Exporter(program, prefix, preset).list_files()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.absolute().parent, prefix=".sparseflow-") as temporary:
            draft = Path(temporary) / "export"
            draft.mkdir()
            names = []
            for file, content in files:
                with replace_file(draft / file) as stream:
                    for part in content:
                        stream.write(part)
                names.append(file)
            if folder.exists():  # it may be the current directory
                for file in names:
                    (draft / file).rename(folder / file)
            else:
                draft.rename(folder)
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror}; give another directory") from error
    return ExportResult(folder=folder, files=tuple(names), schedule=schedule, preset=preset)


class _Exporter:
    def __init__(self, program: KernelProgram, prefix: str, preset: str | None) -> None:
        self.program, self.prefix, self.preset = program, prefix, preset
        digest = hashlib.sha256(f"{program.source}{program.problem.extents}".encode()).digest()
        self.fingerprint = int.from_bytes(digest[:8], "little")
        problem = program.problem
        rows, columns = problem.matrix.shape[0], program.output_shape[1:]
        self.result_shape = (problem.matrix.nnz,) if problem.operator.sparse_output else (rows, *columns)
        size = math.prod(self.result_shape)
        step = max(1, -(-size // _MAX_EXPECTED))
        while math.gcd(step, problem.n_cols or 1) > 1:  # so that all columns are compared
            step += 1
        self.step = step

    def list_files(self) -> Iterator[tuple[str, Iterable[bytes | memoryview]]]:
        """Yield the name and the content of each file."""
        stem = f"{self.prefix}_kernel"
        texts = {
            f"{stem}.h": "kernel.h",
            f"{stem}.c": "kernel.c",
            f"{stem}_test.c": "test.c",
            "CMakeLists.txt": "CMakeLists.txt",
            "README.md": "README.md",
        }
        variables = self.make_variables()
        for file, template in texts.items():
            yield file, [_render(template, variables).encode()]
        yield f"{stem}.bin", self.pack_arrays()
        yield f"{stem}_test.bin", self.compute_expected()

    def make_variables(self) -> dict[str, Any]:
        """Return the variables of the templates."""
        program, prefix = self.program, self.prefix
        problem = program.problem
        operator, (rows, cols) = problem.operator, problem.matrix.shape
        real = "float" if problem.dtype == np.float32 else "double"
        output = "D" if operator.sparse_output else "C" if problem.n_cols else "y"
        inputs = [f"const {real} *{value}" for value in problem.input_shapes]
        arguments = [f"{prefix}_kernel *kernel", *inputs, f"{real} *{output}"]
        names = re.findall(r"restrict const (\w+) = in\[", program.source)
        return {
            "prefix": prefix,
            "macro": prefix.upper(),
            "version": sparseflow.__version__,
            "operator": operator.name,
            "formula": _FORMULAS[operator.name],
            "rows": rows,
            "cols": cols,
            "nnz": problem.matrix.nnz,
            "n_cols": problem.n_cols,
            "real": real,
            "inputs": problem.input_shapes,
            "output": output,
            "output_shape": self.result_shape,
            "sparse_output": operator.sparse_output,
            "signature": f"{prefix}_{operator.name}({', '.join(arguments)})",
            "output_size": math.prod(self.result_shape),
            "padded_size": math.prod(program.output_shape),
            "source": program.source.replace(f"void {SYMBOL}(", "static void compute("),
            "array_names": names[: len(program.leading_arrays)],
            "fingerprint": self.fingerprint,
            "schedule": program.schedule,
            "preset": self.preset,
            "threads": program.nest.threads,
            "step": self.step,
            "flags": [flag for flag in OPTIMIZE_FLAGS if flag != "-march=native"],
        }

    def pack_arrays(self) -> Iterator[bytes | memoryview]:
        """Yield the parts of the data file."""
        packed = self.program.packed
        positions, nnz = packed.element_positions, len(packed.element_positions)
        if len(packed.values) == nnz and np.array_equal(positions, np.arange(nnz)):
            positions = positions[:0]
        arrays = (*self.program.leading_arrays, positions)
        header = np.array([self.fingerprint, nnz, *(array.nbytes for array in arrays)], np.uint64)
        parts = [header, *map(_pad_array, arrays)]
        yield b"SFKDATA1" + np.array(_sum_words(parts), np.uint64).tobytes()
        for part in parts:
            yield part.data

    def compute_expected(self) -> Iterator[bytes]:
        """Yield the expected results with the values of the matrix, and with other values.

        The test program creates the same inputs; see `fill` in its source.
        """
        problem = self.program.problem
        inputs, start = [], 0
        for shape in problem.input_shapes.values():
            inputs.append(_fill(shape, start))
            start += inputs[-1].size
        packed, positions = np.zeros(len(self.program.packed.values)), self.program.packed.element_positions
        packed[positions] = _fill(problem.matrix.values.shape, start)
        # With symmetric storage, elements below the diagonal replace those above it.
        for values in (problem.matrix.values, packed[positions]):
            matrix = replace(problem.matrix, values=values.astype(problem.dtype))
            results = replace(problem, matrix=matrix).compute_reference(tuple(inputs))
            matrix = replace(matrix, values=np.abs(matrix.values))
            scales = replace(problem, matrix=matrix).compute_reference(tuple(map(np.abs, inputs)))
            pairs = np.stack([array.reshape(-1)[:: self.step] for array in (results, scales)], axis=1)
            pairs[:, 1] = _TOLERANCE[problem.dtype] * pairs[:, 1] + np.finfo(problem.dtype).tiny
            yield pairs.tobytes()


def _pad_array(array: np.ndarray) -> np.ndarray:
    """Return the bytes of an array as words of 64 bits, padded with zeros to a multiple of `ALIGNMENT`."""
    padded = np.zeros(-(-array.nbytes // ALIGNMENT) * (ALIGNMENT // 8), np.uint64)
    padded.view(np.uint8)[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return padded


def _sum_words(parts: Iterable[np.ndarray]) -> tuple[int, int]:
    """Return the sum of all words and the sum of its intermediate values, both modulo 2^64."""
    first = second = 0
    for part in parts:
        for start in range(0, len(part), _CHUNK_WORDS):
            words = part[start : start + _CHUNK_WORDS]
            weights = np.arange(len(words), 0, -1, dtype=np.uint64)
            second += len(words) * first + int(np.sum(words * weights))
            first += int(np.sum(words))
    return first % 2**64, second % 2**64


def _fill(shape: tuple[int, ...], start: int) -> np.ndarray:
    """Return numbers in [-1, 1) that depend on their index only and that float32 represents exactly."""
    index = np.arange(start, start + math.prod(shape), dtype=np.uint64)
    bits = (index * np.uint64(2654435761) & np.uint64(0xFFFFFFFF)) >> np.uint64(8)
    return (bits / 2.0**23 - 1.0).reshape(shape)


def _render(template: str, variables: dict[str, Any]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    jinja = Environment(
        loader=PackageLoader("sparseflow.tuning", "data/export"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    jinja.filters["product"] = math.prod
    return jinja.get_template(f"{template}.jinja").render(variables)
