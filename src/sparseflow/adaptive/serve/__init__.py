"""Serving a model to OpenAI's clients, each request under its own latency budget.

::

    from sparseflow.adaptive import serve

    service = serve.Service("grid-vqa", backend, prompts)
    serve.serve(serve.create_app(service), host="0.0.0.0", port=8000)

    client.chat.completions.create(..., extra_body={"latency_budget_ms": 180, "on_infeasible": "best_effort"})

A budget counts from receipt of the request to the last token. The names below are loaded when they are first
used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from sparseflow.core.extras import require

if TYPE_CHECKING:
    from sparseflow.adaptive.serve.app import create_app
    from sparseflow.adaptive.serve.backend import Backend
    from sparseflow.adaptive.serve.bridge import EngineBackend, Predicted, deciding
    from sparseflow.adaptive.serve.chat import Crops, Patches, Prompts
    from sparseflow.adaptive.serve.lifecycle import Server, serve
    from sparseflow.adaptive.serve.limits import Limits
    from sparseflow.adaptive.serve.replicas import serve_replicas
    from sparseflow.adaptive.serve.service import Service

__all__ = [
    "Backend",
    "Crops",
    "EngineBackend",
    "Limits",
    "Patches",
    "Predicted",
    "Prompts",
    "Server",
    "Service",
    "create_app",
    "deciding",
    "serve",
    "serve_replicas",
]

_HOME = {
    "Backend": "backend",
    "Crops": "chat",
    "EngineBackend": "bridge",
    "Limits": "limits",
    "Patches": "chat",
    "Predicted": "bridge",
    "Prompts": "chat",
    "Server": "lifecycle",
    "Service": "service",
    "create_app": "app",
    "deciding": "bridge",
    "serve": "lifecycle",
    "serve_replicas": "replicas",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'sparseflow.adaptive.serve' has no attribute {name!r}")
    if name == "create_app":
        require("fastapi", "adaptive")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
