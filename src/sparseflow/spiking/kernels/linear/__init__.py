"""A linear layer that skips zero chunks of its input (Triton). For the benchmark only.

Linear layers are not replaced: `benchmarks/spiking/not_replaced.py` sets this kernel beside cuBLAS.
"""

from __future__ import annotations
