"""BatchNorm in eval mode that takes a short cut through zero blocks (Triton). For the benchmark only.

BatchNorm is not replaced: it moves the same bytes with or without zeros. `benchmarks/spiking/not_replaced.py`
shows what this kernel reaches beside ATen's; where it pays, it is folded into a convolution instead.
"""

from __future__ import annotations
