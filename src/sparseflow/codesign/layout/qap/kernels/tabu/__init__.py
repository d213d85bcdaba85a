"""Robust tabu search; see `reference.py` for which move is made when."""

from __future__ import annotations
