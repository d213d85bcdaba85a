"""Two-stage block-sparse convolution on a GPU (Triton): prescan, then convolve the active chunks.

Stage 1, `prescan`, marks the input blocks that hold a non-zero and lists, for each output tile, the input
channel chunks that can reach it. Stage 2 multiplies only those. `sparse_conv2d` runs both. `geometry.py`
defines the terms, `reference.py` the results.
"""
