"""`python -m sparseflow` is the command `sparseflow`."""

from sparseflow.cli import main

if __name__ == "__main__":
    main()
