"""Partitioning: cost of a plan, search for splits that pay off, and the planner."""
