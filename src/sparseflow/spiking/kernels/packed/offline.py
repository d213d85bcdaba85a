"""Compile the Hopper kernel where there is no GPU, and read what ptxas says about it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class CompileReport:
    """What ptxas reports of one kernel.

    Attributes:
        registers: Registers a thread.
        spill_bytes: Bytes of spill stores a thread.
        shared_bytes: Shared memory a CTA.
        serialised: ptxas gave up on asynchronous wgmmas (its warnings C7510 to C7519).
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    serialised: bool


def compile_offline(
    constants: dict[str, Any], *, dense: str = "fp16", max_registers: int | None = None
) -> CompileReport:
    """Compile `group_kernel` for sm_90a with `constants` (see `group.kernel_constants`); needs triton only.

    Args:
        constants: Every constexpr of the kernel.
        dense: Triton's name of the dense addend's type.
        max_registers: See `Variant.max_registers`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from sparseflow.spiking.kernels.packed.gluon import group_kernel

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    bits = {"x_ptr", "x2_ptr", "out_ptr", "skip_ptr"}
    words = {"v_columns_ptr", "count_ptr", "act_ptr", "out_act_ptr"}
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
            kind = (
                "i16"
                if name in bits
                else ("i32" if name in words else dense if name == "dense_ptr" else "fp32")
            )
            signature[name] = "*" + kind
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
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(compiled.asm["ptx"])
        said = subprocess.run(
            [str(ptxas), "-v", "--gpu-name=sm_90a", str(ptx), "-o", str(Path(folder) / "kernel.cubin")],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    registers, spills = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    assert registers and spills, said
    return CompileReport(
        registers=int(registers[1]), spill_bytes=int(spills[1]), shared_bytes=compiled.metadata.shared,
        serialised="C751" in said,
    )  # fmt: skip
