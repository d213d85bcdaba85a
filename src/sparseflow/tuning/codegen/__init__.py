"""From a schedule to a callable kernel.

`loop_nest`: lowering to loops. `c_source`: C code. `subprocess_runner`, `compile`: compiler calls and their
cache. `program`: a schedule compiled for one matrix. `kernel`: the callable and its file.
"""
