"""Joint training of model and hardware, its baselines, and the trace of its decisions."""
