"""Readings of the machine while something runs: from /proc, from NVML, or from a Prometheus server.

`schema.py` says what they have in common, `readers.py` opens one by name.
"""
