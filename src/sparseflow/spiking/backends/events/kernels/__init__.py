"""Numba kernels of the event backend and the LLVM building blocks they are made of."""
