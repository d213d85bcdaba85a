"""Robust tabu search; `reference.py` defines the moves."""

from __future__ import annotations
