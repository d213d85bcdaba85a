"""Kernels of the pruning wing: for each operation a reference in plain torch, and one for a GPU beside it."""
