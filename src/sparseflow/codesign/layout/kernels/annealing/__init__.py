"""Simulated annealing; see `sparseflow.codesign.layout.annealing` for what it does."""

from __future__ import annotations
