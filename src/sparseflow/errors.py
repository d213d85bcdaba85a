"""Errors that SparseFlow raises.

::

    SparseFlowError
    ├── InputError (ValueError)          an argument or a file is invalid; the CLI exits with 2
    │   ├── ModelError                   invalid model: no module, no spiking neuron, NaN weights
    │   ├── SampleError                  invalid sample input: wrong shape, dtype or device
    │   ├── PlanError                    the model cannot run a plan, or a plan changed within a request
    │   └── FileFormatError              a file is damaged or has another format
    ├── MissingExtraError (ImportError)  an optional package is not installed; the CLI exits with 2
    ├── DeviceError (RuntimeError)       a device does not exist or cannot run the work; the CLI exits with 1
    └── RunError (RuntimeError)          a job failed after its start; the CLI exits with 1
        └── OutputError (OSError)        a result cannot be written

A message states the given value, the expected value and what to do.
"""

from __future__ import annotations


class SparseFlowError(Exception):
    """Base of all errors of SparseFlow."""


class InputError(SparseFlowError, ValueError):
    """An argument or a file is invalid."""


class ModelError(InputError):
    """The model is invalid."""


class SampleError(InputError):
    """The sample input does not fit the model."""


class PlanError(InputError):
    """The model cannot run the plan, or the plan changed within a request."""


class FileFormatError(InputError):
    """A file is damaged or has another format."""


class MissingExtraError(SparseFlowError, ImportError):
    """An optional package is not installed.

    Args:
        package: Import name of the package.
        extra: SparseFlow extra that provides it.
        command: Command that installs it; by default that of the extra.
    """

    def __init__(self, package: str, extra: str, command: str | None = None) -> None:
        self.package = package
        self.extra = extra
        command = command or f"pip install 'sparseflow[{extra}]'"
        super().__init__(f"`{package}` is not installed; install it with: {command}")


class DeviceError(SparseFlowError, RuntimeError):
    """A device does not exist or cannot run the work."""


class RunError(SparseFlowError, RuntimeError):
    """A job failed after its start."""


class OutputError(RunError, OSError):
    """A result cannot be written: the disk is full or not writable, or a directory has the name."""
