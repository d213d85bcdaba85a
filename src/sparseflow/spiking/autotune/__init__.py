"""Measured selection among the ways to run a group, a layer or a network, with a cache on disk."""
