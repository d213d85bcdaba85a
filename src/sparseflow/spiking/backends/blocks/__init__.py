"""Two-stage block-sparse convolution on a GPU: prescan, then a convolution of what is not zero (Triton).

Stage 1, `prescan`, marks the blocks of the input that hold a non-zero and gives every tile of the output the
list of input channel chunks that can reach it; stage 2 multiplies only those. `sparse_conv2d` is both. What
lies where, and the words used for it, is in `geometry.py`; what is computed is in `reference.py`.
"""

from __future__ import annotations

from sparseflow.spiking.backends.blocks.conv import ActiveChunks, prescan, sparse_conv2d
from sparseflow.spiking.backends.blocks.geometry import Tiling

__all__ = ["ActiveChunks", "Tiling", "prescan", "sparse_conv2d"]
