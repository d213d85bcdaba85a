"""Simulated annealing; see `layout.qap.search`."""

from __future__ import annotations
