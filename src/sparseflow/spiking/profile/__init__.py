"""Measurements: firing statistics of layers, dense baselines, and benchmarks of whole networks."""
