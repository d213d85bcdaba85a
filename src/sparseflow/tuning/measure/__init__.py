"""Measurement of schedules and collection of labels.

`harness`, `runner`: timing in a separate process. `evaluator`: build, check and time a
schedule, here or on a Ray cluster. `families`, `labels`, `synthetic`: label sets and their matrices.
`collection`, `collection_log`, `label_import`: writing label sets.
"""
