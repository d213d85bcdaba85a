"""Standing attack on the package: `python -m tests.harness.fuzz` and `python -m tests.harness.kill`."""
