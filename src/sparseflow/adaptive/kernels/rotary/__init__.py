"""Rotary position embedding of queries and keys; `reference` defines the operation."""

from __future__ import annotations
