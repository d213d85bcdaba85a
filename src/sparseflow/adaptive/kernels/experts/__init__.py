"""Experts of a few tokens, reading only those that were chosen; see `reference.py` for what they are."""

from __future__ import annotations
