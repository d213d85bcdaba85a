"""Compiled kernels, imported only when a strategy runs.

Each file is self-contained, because Numba's disk cache only tracks changes of the file itself.
"""
