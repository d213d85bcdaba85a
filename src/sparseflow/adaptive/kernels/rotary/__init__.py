"""Rotary positions of queries and keys in one kernel; see `reference.py` for what they are."""

from __future__ import annotations
