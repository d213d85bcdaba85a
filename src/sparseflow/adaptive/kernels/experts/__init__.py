"""Mixture of gated experts; `reference` defines the operation."""

from __future__ import annotations
