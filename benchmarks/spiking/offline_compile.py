"""Compile the GPU kernels without a GPU and read the resource usage that ptxas reports.

Needs a process in which Triton does not interpret its kernels (no TRITON_INTERPRET).
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

from sparseflow.spiking.backends.packed import words


@dataclass(frozen=True, kw_only=True)
class PtxasReport:
    """Resource usage of one kernel.

    Attributes:
        registers: Registers per thread.
        spill_bytes: Bytes of spill stores per thread.
        serialized: ptxas gave up on asynchronous wgmmas (its warnings C7510 to C7519).
    """

    registers: int
    spill_bytes: int
    serialized: bool


@dataclass(frozen=True, kw_only=True)
class CompiledLaunch:
    """One kernel launch that was compiled instead of run.

    Attributes:
        kernel: Name of the kernel.
        grid: Launch grid.
        ptxas: Resource usage.
        shared_bytes: Shared memory per program.
        asm: Triton's stages by name ('ttgir', 'ptx', 'cubin' and others).
    """

    kernel: str
    grid: tuple[int, ...]
    ptxas: PtxasReport
    shared_bytes: int
    asm: dict[str, Any]


def run_ptxas(ptx: str, arch: int = 90) -> PtxasReport:
    """Assemble `ptx` for compute capability `arch` (90 is Hopper)."""
    import triton

    tools = Path(str(triton.__file__)).parent / "backends/nvidia/bin"
    tool = tools / ("ptxas-blackwell" if arch >= 100 else "ptxas")
    name = f"sm_{arch}a" if arch >= 90 and f"sm_{arch}a" in ptx else f"sm_{arch}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        log = subprocess.run(
            [str(tool), "-v", "--gpu-name", name, str(source), "-o", str(Path(folder) / "kernel.cubin")],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    registers, spills = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    assert registers and spills, log
    return PtxasReport(registers=int(registers[1]), spill_bytes=int(spills[1]), serialized="C751" in log)


def compile_hopper_group(
    constants: dict[str, Any], *, dense: str = "fp16", max_registers: int | None = None
) -> tuple[PtxasReport, int]:
    """Compile the Hopper `group_kernel` for sm_90a.

    Args:
        constants: All constexprs of the kernel, see `hopper.group.make_kernel_constants`.
        dense: Triton's name of the dense addend's type.
        max_registers: See `HopperVariant.max_registers`.

    Returns:
        The resource usage, and the shared memory per CTA in bytes.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from sparseflow.spiking.backends.packed.hopper.kernel import group_kernel

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    bits = {"x_ptr", "x2_ptr", "out_ptr", "skip_ptr"}
    integers = {"v_columns_ptr", "count_ptr", "act_ptr", "out_act_ptr"}
    reals = {"scale", "alpha", "skip_value", "threshold", "v_reset"}
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], Any] = {}
    names = list(group_kernel.arg_names)
    for i, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
        elif name == "w_desc":
            signature[name] = f"tensordesc<fp16[{constants['BN']}, 64],{layout!r}>"
        elif name.endswith("_ptr"):
            types = {**dict.fromkeys(bits, "i16"), **dict.fromkeys(integers, "i32"), "dense_ptr": dense}
            signature[name] = "*" + types.get(name, "fp32")
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in reals else "i32"
    source = GluonASTSource(
        group_kernel, signature, {(names.index(k),): v for k, v in constants.items()}, attributes
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": constants["NUM_WARPS"], "maxnreg": max_registers},
    )
    return run_ptxas(compiled.asm["ptx"]), compiled.metadata.shared


class CompileOnlyDriver:
    """The parts of a GPU driver that compiling needs."""

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
def compile_launches(arch: int = 90) -> Iterator[list[CompiledLaunch]]:
    """Compile all launches of the packed Triton kernels for `arch` instead of running them.

    The calling code prepares its arguments as usual and Triton's own front end specializes on them. Yields
    the list that the compiled launches are appended to.
    """
    from triton.runtime import driver as triton_driver

    driver: Any = triton_driver
    launches: list[CompiledLaunch] = []

    def compile_only(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: Any) -> None:
        compiled = kernel.warmup(*args, grid=grid, **options)
        launches.append(
            CompiledLaunch(
                kernel=kernel.__name__,
                grid=grid,
                ptxas=run_ptxas(compiled.asm["ptx"], arch),
                shared_bytes=compiled.metadata.shared,
                asm=compiled.asm,
            )
        )

    active = driver._active
    driver.set_active(CompileOnlyDriver(arch))
    words.launcher = compile_only
    try:
        yield launches
    finally:
        words.launcher = None
        driver._active = active
