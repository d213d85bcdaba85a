"""onnxruntime sessions on the requested execution provider; a fallback to another provider is an error."""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseflow.core.checks import check_one_of
from sparseflow.core.extras import require
from sparseflow.errors import DeviceError, FileFormatError, ModelError, RunError, SparseFlowError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnxruntime

PROVIDERS: Mapping[str, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "openvino": "OpenVINO",
}
"""Short name -> name of a provider: onnxruntime's, or OpenVINO, which runs on the CPU without onnxruntime."""

CPU_PROVIDERS = (PROVIDERS["cpu"], PROVIDERS["openvino"])
"""Providers whose device is the CPU."""

LEVELS: Mapping[str, str] = {
    "disable": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
"""Graph optimization level -> onnxruntime's name of it."""

RUN_TIMEOUT_S = 120.0
"""Maximum time of a run for shapes, for the check of kernels or to warm up, seconds."""


class RunTimeoutError(RunError):
    """A run took longer than `RUN_TIMEOUT_S`."""


_LOG_FATAL = 4
"""Log level: fatal errors only. Other errors are raised, and the warnings of onnxruntime, such as of a graph
optimized for this machine, are expected.
"""


def resolve_provider(provider: str) -> str:
    """Return the name of a provider, given that or its short name.

    Raises:
        InputError: The provider is unknown.
    """
    name = PROVIDERS.get(provider, provider)
    check_one_of((*PROVIDERS, *PROVIDERS.values()), provider=name)
    return name


def get_device_type(provider: str) -> str:
    """Return the device type of a provider: `cpu` or `cuda`."""
    return "cpu" if resolve_provider(provider) in CPU_PROVIDERS else "cuda"


def select_graph(provider: str, level: str) -> tuple[str, str]:
    """Return the provider and the level of onnxruntime that determine the graph of a provider.

    For OpenVINO it is the graph of the CPU at most at the extended level, whose operators OpenVINO supports.
    """
    name = resolve_provider(provider)
    if name != PROVIDERS["openvino"]:
        return name, level
    return PROVIDERS["cpu"], "extended" if level == "all" else level


def get_runtime_version(provider: str) -> str:
    """Return the version of onnxruntime, followed by that of OpenVINO if the provider needs it."""
    version = require("onnxruntime", "latency").__version__
    if resolve_provider(provider) != PROVIDERS["openvino"]:
        return version
    return f"{version}, OpenVINO {require('openvino', 'openvino').__version__.partition('-')[0]}"


def get_memory_device(provider: str, gpu: int = 0) -> tuple[str, int]:
    """Return type and index of the device whose memory a provider uses."""
    return ("cuda", gpu) if get_device_type(provider) == "cuda" else ("cpu", 0)


def make_provider_options(provider: str, gpu: int = 0, **options: str) -> dict[str, str]:
    """Build provider options for a GPU, with more options of the CUDA provider; empty for the CPU."""
    return {"device_id": str(gpu), **options} if get_device_type(provider) == "cuda" else {}


def open_session(
    model: bytes | str | Path,
    provider: str = "cpu",
    level: str = "all",
    *,
    threads: int | None = None,
    provider_options: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> onnxruntime.InferenceSession:
    """Open a session on the requested provider.

    Args:
        model: Serialized model, or its file.
        provider: `"cpu"`, `"cuda"` or onnxruntime's name.
        level: Graph optimization level: `"disable"`, `"basic"`, `"extended"` or `"all"`.
        threads: Threads within an operator; None leaves the choice to onnxruntime.
        provider_options: Options of the provider, such as `{"cudnn_conv_algo_search": "HEURISTIC"}`.
        settings: Attributes to set on the `SessionOptions`.

    Raises:
        DeviceError: The provider is not installed, or onnxruntime fell back to another one.
        ModelError: onnxruntime refuses the model.
        FileFormatError: The model cannot be read.
        InputError: The provider or level is unknown.
    """
    ort = require("onnxruntime", "latency")
    name = resolve_provider(provider)
    check_one_of(LEVELS, level=level)
    available = ort.get_available_providers()
    if name not in available:
        raise DeviceError(
            f"{name} is not available in the installed onnxruntime {ort.__version__}, which has: "
            f"{', '.join(available)}; for NVIDIA GPUs install onnxruntime-gpu instead of onnxruntime"
        )
    if name == PROVIDERS["cuda"]:
        # onnxruntime and torch share the cuDNN that is loaded first; torch rejects a version below its own.
        import torch  # noqa: F401
    # The environment is created with the first session and warns about unknown devices.
    ort.set_default_logger_severity(_LOG_FATAL)
    options = ort.SessionOptions()
    options.log_severity_level = _LOG_FATAL
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, LEVELS[level])
    if threads is not None:
        options.intra_op_num_threads = threads
    for attribute, value in (settings or {}).items():
        setattr(options, attribute, value)
    providers: list[Any] = [(name, dict(provider_options or {}))]
    if name != "CPUExecutionProvider":
        # Shape arithmetic always runs on the host.
        providers.append(("CPUExecutionProvider", {}))
    description = f"the model {model}" if isinstance(model, str | Path) else "the model"
    # onnxruntime prints before it retries on the CPU, which is an error below.
    with _translate_errors(description), redirect_stdout(io.StringIO()):
        session = ort.InferenceSession(
            model if isinstance(model, bytes) else str(model), options, providers=providers
        )
    active_providers = session.get_providers()
    if not active_providers or active_providers[0] != name:
        raise DeviceError(
            f"onnxruntime fell back from {name} to "
            f"{active_providers[0] if active_providers else 'no provider'}: check that a GPU is present "
            f"and that the CUDA and cuDNN libraries match onnxruntime {ort.__version__}"
        )
    return session


def run(session: onnxruntime.InferenceSession, outputs: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
    """Run a session once and return the outputs.

    Raises:
        RunError: onnxruntime failed, for example for lack of memory.
        RunTimeoutError: The run took `RUN_TIMEOUT_S`, for example in an endless loop.
    """
    with limit_run_time() as options, translate_run_errors("the model on random inputs"):
        return list(session.run(list(outputs), dict(feeds), options))


@contextmanager
def limit_run_time() -> Iterator[Any]:
    """Yield `RunOptions` that end a run after `RUN_TIMEOUT_S`; it cannot be interrupted otherwise.

    Raises:
        RunTimeoutError: The run was ended.
    """
    options = require("onnxruntime", "latency").RunOptions()
    timer = threading.Timer(RUN_TIMEOUT_S, setattr, (options, "terminate", True))
    timer.daemon = True
    timer.start()
    try:
        yield options
    except RunError as error:
        if not options.terminate:
            raise
        raise RunTimeoutError(
            f"one run of the model on random inputs took more than {RUN_TIMEOUT_S:g} s; check its loops, or "
            "use smaller shapes"
        ) from error
    finally:
        timer.cancel()


@contextmanager
def translate_run_errors(description: str) -> Iterator[None]:
    """Convert errors of onnxruntime, which share no exported base class, to RunError."""
    try:
        yield
    except (SparseFlowError, MemoryError):
        raise
    except Exception as error:
        raise RunError(f"onnxruntime failed to run {description}: {format_first_line(error)}") from error


@contextmanager
def _translate_errors(description: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        error_type, text = type(error).__name__, format_first_line(error)
        if error_type in ("InvalidProtobuf", "NoSuchFile"):
            raise FileFormatError(f"{description} is not readable as ONNX: {text}") from error
        if "opset" in text.lower() or "ir version" in text.lower():
            raise ModelError(
                f"{description} is newer than this onnxruntime: {text}; export it with an older opset, "
                f"or update onnxruntime"
            ) from error
        if "cuda" in text.lower() and error_type in ("RuntimeException", "EPFail", "RuntimeError"):
            raise DeviceError(f"onnxruntime cannot use the GPU for {description}: {text}") from error
        raise ModelError(f"onnxruntime rejects {description}: {text}") from error


def format_first_line(error: BaseException, max_chars: int = 400) -> str:
    """Return the first line of an error's message, or its class name without a message."""
    text = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return text if len(text) <= max_chars else text[:max_chars] + " …"
