"""Quadratic assignment: problems and bounds, searches on one core, and batched restarts on a GPU."""
