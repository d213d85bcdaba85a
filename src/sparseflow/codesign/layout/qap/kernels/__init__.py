"""Kernels of permutation searches, for one CPU core and for GPUs."""

from __future__ import annotations
