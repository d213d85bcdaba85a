"""Running plans fast: a static cache of slots, recorded steps, and an engine that batches by plan."""
