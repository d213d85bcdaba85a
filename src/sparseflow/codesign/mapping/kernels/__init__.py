"""Compiled loops, imported only when a strategy runs.

Each file stands alone: the machine code that Numba keeps on disk is made anew when its own file changes, and
not when another does.
"""
