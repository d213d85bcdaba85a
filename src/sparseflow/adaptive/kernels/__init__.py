"""Kernels of the adaptive wing: for each operation a reference in plain torch, and one for a GPU."""
