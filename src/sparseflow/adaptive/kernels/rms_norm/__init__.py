"""RMS normalization; `reference` defines the operation."""

from __future__ import annotations
