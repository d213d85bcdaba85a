"""What runs: one folder a kernel family, each with a plain reference beside it."""
