"""Every error that SparseFlow raises on purpose.

::

    SparseFlowError
    ├── InputError (ValueError)        what was handed in cannot be used; the CLI exits with 2
    │   ├── ModelError                 the model: not a module, no spiking neuron, NaN weights, on `meta`, …
    │   ├── SampleError                the sample input: wrong shape, dtype or device
    │   ├── PlanError                  a plan that the model cannot run, or that changed within a request
    │   └── FileFormatError            a file on disk is not what it should be
    ├── MissingExtraError (ImportError)  an optional dependency is absent; the message names the extra
    ├── DeviceError (RuntimeError)     the hardware asked for is not there or not able
    └── RunError (RuntimeError)        a job started well and failed; the CLI exits with 1

Messages say what was given, what was expected and what to do.
"""

from __future__ import annotations


class SparseFlowError(Exception):
    """Root of every error raised on purpose."""


class InputError(SparseFlowError, ValueError):
    """Something handed in cannot be used."""


class ModelError(InputError):
    """The model handed in cannot be used."""


class SampleError(InputError):
    """The sample input handed in does not fit the model."""


class PlanError(InputError):
    """A plan that the model cannot run, or another one than what was begun with."""


class FileFormatError(InputError):
    """A file does not hold what its name promises."""


class MissingExtraError(SparseFlowError, ImportError):
    """An optional dependency is absent.

    Args:
        package: The package that could not be imported.
        extra: The SparseFlow extra that brings it.
    """

    def __init__(self, package: str, extra: str) -> None:
        self.package = package
        self.extra = extra
        super().__init__(
            f"`{package}` is needed here and is not installed; "
            f"install it with: pip install 'sparseflow[{extra}]'"
        )


class DeviceError(SparseFlowError, RuntimeError):
    """The hardware asked for is absent or cannot do what was asked."""


class RunError(SparseFlowError, RuntimeError):
    """A job that had started could not finish."""
