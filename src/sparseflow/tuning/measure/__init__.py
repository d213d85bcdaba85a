"""Measurement of schedules and collection of labels.

`harness`, `cpu_contention`, `runner`: timing in a separate process. `evaluator`: build, check and time a
schedule. `cluster`: the same on a Ray cluster. `trial_log`: measured trials on disk. `families`, `labels`,
`synthetic`: label sets and their matrices. `collection`, `label_import`: writing label sets.
"""
