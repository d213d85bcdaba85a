"""Searches for permutations, for one core and for a GPU."""

from __future__ import annotations
