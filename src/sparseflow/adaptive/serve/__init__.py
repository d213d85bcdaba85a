"""OpenAI-compatible server with a latency budget per request.

::

    from sparseflow.adaptive import serve

    service = serve.Service("grid-vqa", backend, prompts)
    serve.run_server(serve.create_app(service), host="0.0.0.0", port=8000)

    client.chat.completions.create(..., extra_body={"latency_budget_ms": 180, "on_infeasible": "best_effort"})

A budget counts from the receipt of a request to its last token.

- `protocol`: parsing of requests, format of responses
- `service`: preparation and admission of requests
- `admission`: deadline-aware admission queue
- `answer`: state of one admitted request
- `backend`, `engine_backend`: interface of backends, and the engine as a backend
- `app`, `lifecycle`, `replicas`: HTTP routes, startup and drain, several replicas
- `metrics`: Prometheus metrics
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflow.core.lazy import attach

if TYPE_CHECKING:
    from sparseflow.adaptive.serve.app import create_app
    from sparseflow.adaptive.serve.backend import ServingBackend
    from sparseflow.adaptive.serve.engine_backend import EngineBackend, PredictorForecast, make_job_decider
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
    "make_job_decider",
    "run_server",
    "serve_replicas",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "app": ["create_app"],
        "backend": ["ServingBackend"],
        "engine_backend": ["EngineBackend", "PredictorForecast", "make_job_decider"],
        "lifecycle": ["Server", "run_server"],
        "replicas": ["serve_replicas"],
        "service": ["Service"],
    },
)
