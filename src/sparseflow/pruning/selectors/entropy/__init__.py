"""Entropies of windows in time and of cells in space; see `reference.py` for what they are."""

from __future__ import annotations
