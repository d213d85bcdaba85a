"""Compile the plain-Triton kernels for sm_90 without a GPU and print what ptxas reports as JSON.

Run as a module, outside Triton's interpreter: ``{kernel: {registers, spill_bytes, shared_bytes, wgmma}}``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.spiking.offline_compile import run_ptxas
from benchmarks.spiking.sparse_batchnorm import batchnorm_kernel
from benchmarks.spiking.sparse_linear import linear_kernel
from sparseflow.spiking.backends.blocks import triton as blocks


def compile_one(
    kernel: Any, constants: dict[str, Any], real: str, warps: int, ones: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Compile `kernel`; `real` is the type behind its float pointers, `ones` are strides of 1."""
    integers = {"word_ptr", "count_ptr", "chunk_ptr"}
    constants = {**constants, **dict.fromkeys(ones, 1)}
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], Any] = {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = "*i32" if name in integers else "*" + real
        else:
            signature[name] = "fp32" if name == "eps" else "i32"
        if name.endswith("_ptr") or name == "CO_PAD":
            attributes[(i,)] = [["tt.divisibility", 16]]
    positions = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        ASTSource(kernel, signature, positions, attributes),
        target=GPUTarget("cuda", 90, 32), options={"num_warps": warps},
    )  # fmt: skip
    report = run_ptxas(compiled.asm["ptx"])
    return {
        "registers": report.registers, "spill_bytes": report.spill_bytes,
        "shared_bytes": compiled.metadata.shared, "wgmma": "wgmma.mma_async" in compiled.asm["ptx"],
    }  # fmt: skip


def main() -> None:
    conv: dict[str, Any] = {
        "K": 3, "S": 1, "P": 1, "GROUP": 16, "TH": 2, "TW": 32, "TC": 64, "PIXELS": False, "XA": 8, "YA": 8,
        "FULL": True, "BIAS": True, "ACC": tl.float32, "PRECISION": "ieee", "STAGES": 4,
    }  # fmt: skip
    rows, pixels = ("xw", "yw"), ("xc", "yc")
    listing = {
        "K": 3,
        "S": 1,
        "P": 1,
        "B": 16,
        "TH": 4,
        "TW": 32,
        "REACH_H": 2,
        "REACH_W": 3,
        "TB": 128,
        "GP": 4,
    }
    words = {"A": 4, "B": 16, "GROUP": 16}
    fp32, small = {**conv, "XA": 4, "YA": 4}, {"K": 1, "P": 0, "GROUP": 32}
    wide = {**conv, "PIXELS": True, "TH": 8, "TW": 16}
    work: dict[str, tuple[Any, dict[str, Any], str, int, tuple[str, ...]]] = {
        "words of planes": (
            blocks.compute_plane_words, {**words, "COLS": 64, "FULL": True}, "fp32", 4, ("sw",),
        ),
        "words of pixels": (blocks.compute_pixel_words, {**words, "CB": 64}, "fp32", 8, ("sc",)),
        "lists": (blocks.list_chunks, listing, "fp32", 4, ()),
        "convolve fp16 planes": (blocks.convolve, conv, "fp16", 4, rows),
        "convolve bf16 pixels 1x1": (blocks.convolve, {**wide, **small}, "bf16", 4, pixels),
        "convolve fp16 pixels": (blocks.convolve, wide, "fp16", 4, pixels),
        "convolve fp32 planes": (blocks.convolve, fp32, "fp32", 4, rows),
        "convolve fp32 pixels": (blocks.convolve, {**wide, "TH": 4, "XA": 4, "YA": 4}, "fp32", 8, pixels),
        "convolve tf32 planes": (blocks.convolve, {**fp32, "PRECISION": "tf32"}, "fp32", 4, rows),
        "linear": (
            linear_kernel,
            {"TM": 16, "TN": 64, "TK": 32, "BIAS": True, "PRECISION": "ieee"}, "fp32", 4, ("xk", "wk"),
        ),
        "batchnorm": (batchnorm_kernel, {"INNER": 3136, "CHANNELS": 64, "BLOCK": 1024}, "fp16", 4, ()),
    }  # fmt: skip
    json.dump({name: compile_one(*arguments) for name, arguments in work.items()}, sys.stdout)


if __name__ == "__main__":
    main()
