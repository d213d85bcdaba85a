"""Compile the plain-Triton kernels where there is no GPU, through the very calls that launch them.

`compiling(arch)` makes every launch of this package compile for that architecture instead of running: the
calling code prepares its arguments as ever, Triton's own front end specialises on them, and ptxas reports.
Needs a process in which Triton does not interpret (no TRITON_INTERPRET).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparseflow.spiking.kernels.packed import words


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What ptxas reports of one launch.

    Attributes:
        kernel: The kernel's name.
        grid: The grid it would have been launched with.
        registers: Registers a thread.
        spill_bytes: Bytes of spill stores a thread.
        shared_bytes: Shared memory a program.
        asm: Triton's stages by name ('ttgir', 'ptx', 'cubin' and others).
    """

    kernel: str
    grid: tuple[int, ...]
    registers: int
    spill_bytes: int
    shared_bytes: int
    asm: dict[str, Any]


class _Driver:
    """As much of a GPU driver as compiling needs."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiling(arch: int = 90) -> Iterator[list[Compiled]]:
    """Compile for `arch` (90 is Hopper) instead of launching; yields the list of what was compiled."""
    from triton.runtime import driver as drivers

    driver: Any = drivers

    found: list[Compiled] = []

    def compile_only(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: Any) -> None:
        compiled = kernel.warmup(*args, grid=grid, **options)
        registers, spills = _ptxas(compiled.asm["ptx"], arch)
        found.append(
            Compiled(
                kernel=kernel.__name__,
                grid=grid,
                registers=registers,
                spill_bytes=spills,
                shared_bytes=compiled.metadata.shared,
                asm=compiled.asm,
            )
        )

    before = driver._active
    driver.set_active(_Driver(arch))
    words.launcher = compile_only
    try:
        yield found
    finally:
        words.launcher = None
        driver._active = before


def _ptxas(ptx: str, arch: int) -> tuple[int, int]:
    import triton

    tools = Path(str(triton.__file__)).parent / "backends/nvidia/bin"
    tool = tools / ("ptxas-blackwell" if arch >= 100 else "ptxas")
    name = f"sm_{arch}a" if arch >= 90 and f"sm_{arch}a" in ptx else f"sm_{arch}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        said = subprocess.run(
            [str(tool), "-v", "--gpu-name", name, str(source), "-o", str(Path(folder) / "kernel.cubin")],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    registers, spills = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    assert registers and spills, said
    return int(registers[1]), int(spills[1])
