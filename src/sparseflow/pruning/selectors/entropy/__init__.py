"""Entropies of temporal windows and spatial cells: reference and Triton kernels."""
