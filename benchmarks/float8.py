r"""Store the matrices of a safetensors file in float8 (e4m3), as the models of the package are stored.

::

    python benchmarks/float8.py runs/seed-0/model/model.safetensors --out runs/packed/model.safetensors \
        --step 0.015625 --step experts=0.03125

A step rounds the matrices to its multiples first, so that few values are frequent and a wheel, which is
compressed, gets smaller. float8 represents multiples of a power of two exactly up to 16 steps. Vectors and
small matrices keep their number format. torch and transformers convert float8 when they load it.
Measure accuracy, block importance and plan quality of the stored model, not of its source.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

MIN_VALUES = 2000
"""Smaller tensors keep their number format."""


def round_tensors(
    tensors: Mapping[str, Tensor], steps: Mapping[str, float] | None = None
) -> dict[str, Tensor]:
    """Round matrices and convolutions to float8.

    Args:
        tensors: Tensors by name.
        steps: Step by a part of the name; the last that matches counts, and the part "" matches all.
    """
    rounded = {}
    for name, tensor in tensors.items():
        step = next((step for part, step in reversed([*(steps or {}).items()]) if part in name), None)
        if tensor.dim() > 1 and tensor.numel() > MIN_VALUES:
            values = tensor.float()
            if step is not None:
                values = torch.round(values / step) * step + 0.0  # no negative zero
            tensor = values.to(torch.float8_e4m3fn)
        rounded[name] = tensor
    return rounded


def convert(source: Path, out: Path, steps: Mapping[str, float] | None = None) -> None:
    """Write the tensors of `source`, rounded, and its metadata to `out`."""
    with safe_open(source, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    save_file(round_tensors(tensors, steps), out, metadata=metadata)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="safetensors file")
    parser.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--step", action="append", default=[], help="STEP, or PART=STEP for names with PART")
    args = parser.parse_args(argv)
    steps = {part: float(step) for part, _, step in (text.rpartition("=") for text in args.step)}
    convert(args.source, args.out, steps)
    print(f"{args.out}: {args.source.stat().st_size} -> {args.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
