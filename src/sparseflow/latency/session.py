"""onnxruntime sessions: the provider that was asked for or an error, never another in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseflow.core.extras import require
from sparseflow.errors import DeviceError, FileFormatError, InputError, ModelError, RunError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnxruntime

PROVIDERS: Mapping[str, str] = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
"""Short name -> onnxruntime's."""

LEVELS: Mapping[str, str] = {
    "disable": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
"""Level of optimisation -> onnxruntime's name of it."""

_QUIET = 3
"""Errors only: what onnxruntime warns about (a graph optimised for this machine) is meant."""


def provider_name(provider: str) -> str:
    """onnxruntime's name of a provider, given that or `cpu` or `cuda`.

    Raises:
        InputError: There is no such provider.
    """
    full = PROVIDERS.get(provider, provider)
    if full not in PROVIDERS.values():
        raise InputError(f"the provider {provider!r} is not known; choose one of: {', '.join(PROVIDERS)}")
    return full


def short_name(provider: str) -> str:
    """`cpu` or `cuda`."""
    full = provider_name(provider)
    return next(short for short, name in PROVIDERS.items() if name == full)


def place_of(provider: str, gpu: int = 0) -> tuple[str, int]:
    """Kind and number of the device in whose memory a provider works."""
    return ("cuda", gpu) if short_name(provider) == "cuda" else ("cpu", 0)


def options_of(provider: str, gpu: int = 0, **options: str) -> dict[str, str]:
    """Options that put a provider on a GPU, and others of the CUDA provider; the CPU's has none."""
    return {"device_id": str(gpu), **options} if short_name(provider) == "cuda" else {}


def open_session(
    model: bytes | str | Path,
    provider: str = "cpu",
    level: str = "all",
    *,
    threads: int | None = None,
    provider_options: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> onnxruntime.InferenceSession:
    """A session on the provider that was asked for.

    Args:
        model: The model's bytes, or its file.
        provider: `"cpu"`, `"cuda"` or onnxruntime's name.
        level: What it may optimise: `"disable"`, `"basic"`, `"extended"` or `"all"`.
        threads: Threads within an operator; None is onnxruntime's own choice.
        provider_options: Handed to the provider, such as `{"cudnn_conv_algo_search": "HEURISTIC"}`.
        settings: Attributes to set on the `SessionOptions`.

    Raises:
        DeviceError: onnxruntime has not got the provider, or fell back to another.
        ModelError: onnxruntime refuses the model.
        FileFormatError: The model cannot be read.
        InputError: The provider or level has no such name.
    """
    ort = require("onnxruntime", "latency")
    name = provider_name(provider)
    if level not in LEVELS:
        raise InputError(f"the optimisation level {level!r} is not known; choose one of: {', '.join(LEVELS)}")
    available = ort.get_available_providers()
    if name not in available:
        raise DeviceError(
            f"{name} was asked for, and the onnxruntime installed here ({ort.__version__}) has only: "
            f"{', '.join(available)}; for NVIDIA GPUs install onnxruntime-gpu in place of onnxruntime"
        )
    if name == PROVIDERS["cuda"]:
        # The first of the two to load cuDNN loads it for both, and torch refuses one older than its own.
        import torch  # noqa: F401
    # The environment is made with the first session and warns of devices that it does not know.
    ort.set_default_logger_severity(_QUIET)
    options = ort.SessionOptions()
    options.log_severity_level = _QUIET
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, LEVELS[level])
    if threads is not None:
        options.intra_op_num_threads = threads
    for attribute, value in (settings or {}).items():
        setattr(options, attribute, value)
    wanted: list[Any] = [(name, dict(provider_options or {}))]
    if name != "CPUExecutionProvider":
        # Shape arithmetic runs on the host whatever the device is.
        wanted.append(("CPUExecutionProvider", {}))
    with _told(f"the model {model}" if isinstance(model, str | Path) else "the model"):
        session = ort.InferenceSession(
            model if isinstance(model, bytes) else str(model), options, providers=wanted
        )
    got = session.get_providers()
    if not got or got[0] != name:
        raise DeviceError(
            f"{name} was asked for and onnxruntime fell back to {got[0] if got else 'nothing'}: is there a "
            f"GPU, and do the CUDA and cuDNN libraries match onnxruntime {ort.__version__}?"
        )
    return session


def run(session: onnxruntime.InferenceSession, outputs: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
    """One run of a session.

    Raises:
        RunError: onnxruntime failed, for one because memory ran out.
    """
    try:
        return list(session.run(list(outputs), dict(feeds)))
    except Exception as error:  # onnxruntime's errors share no base that it exports
        raise RunError(f"onnxruntime failed while it ran the model: {_first_line(error)}") from error


@contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        kind, text = type(error).__name__, _first_line(error)
        if kind in ("InvalidProtobuf", "NoSuchFile"):
            raise FileFormatError(f"{what} cannot be read as ONNX: {text}") from error
        if "opset" in text.lower() or "ir version" in text.lower():
            raise ModelError(
                f"{what} is newer than this onnxruntime: {text}; export it with an older opset, "
                f"or update onnxruntime"
            ) from error
        if "cuda" in text.lower() and kind in ("RuntimeException", "EPFail", "RuntimeError"):
            raise DeviceError(f"onnxruntime cannot use the GPU for {what}: {text}") from error
        raise ModelError(f"onnxruntime refuses {what}: {text}") from error


def _first_line(error: BaseException, most: int = 400) -> str:
    text = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return text if len(text) <= most else text[:most] + " …"
