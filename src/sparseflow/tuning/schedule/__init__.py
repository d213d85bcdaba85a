"""Operators, sparse matrices and schedules.

`operators`, `matrices`, `problem`: the computation. `parser`, `schedule`, `rules`: schedules, their text form
and their validity rules. `formats`: level-by-level storage of sparse matrices. `choices`, `space`: the search
space. `presets`: hand-written schedules.
"""
