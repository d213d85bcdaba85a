"""Selection of each token's experts; `reference` defines the operation."""

from __future__ import annotations
