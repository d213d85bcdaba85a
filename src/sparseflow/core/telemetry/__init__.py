"""Readings of the machine while something runs: the host's from /proc, a GPU's from NVML."""
