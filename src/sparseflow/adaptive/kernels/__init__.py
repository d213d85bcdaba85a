"""Kernels: for each operation a reference in plain torch and an implementation for a GPU or CPU."""
