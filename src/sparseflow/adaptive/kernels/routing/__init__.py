"""Choosing each token's experts in one kernel; see `reference.py` for what it is."""

from __future__ import annotations
