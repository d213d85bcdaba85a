"""Simulated annealing; see `sparseflow.codesign.layout.qap.search` for what it does."""

from __future__ import annotations
