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

from typing import TYPE_CHECKING

from sparseflow.core.lazy import attach

if TYPE_CHECKING:
    from sparseflow.adaptive.serve.app import create_app
    from sparseflow.adaptive.serve.backend import ServingBackend
    from sparseflow.adaptive.serve.engine_backend import EngineBackend, PredictorForecast, deciding
    from sparseflow.adaptive.serve.lifecycle import Server, run_server
    from sparseflow.adaptive.serve.replicas import serve_replicas
    from sparseflow.adaptive.serve.service import Service

__all__ = [
    "EngineBackend",
    "PredictorForecast",
    "Server",
    "Service",
    "ServingBackend",
    "create_app",
    "deciding",
    "run_server",
    "serve_replicas",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "app": ["create_app"],
        "backend": ["ServingBackend"],
        "engine_backend": ["EngineBackend", "PredictorForecast", "deciding"],
        "lifecycle": ["Server", "run_server"],
        "replicas": ["serve_replicas"],
        "service": ["Service"],
    },
)
