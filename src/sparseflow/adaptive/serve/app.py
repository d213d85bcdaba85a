"""The server's face: OpenAI's addresses, and those that whoever operates it asks.

`POST /v1/chat/completions`, `GET /v1/models`, `GET /v1/models/{model}`; `/health` (the process can work),
`/ready` (send requests here), `/metrics` (for Prometheus).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from sparseflow.adaptive.prompts.messages import ApiError
from sparseflow.adaptive.serve.answer import AnswerStream
from sparseflow.adaptive.serve.protocol import DONE, chunk, completion, error_event, event, last_chunks
from sparseflow.adaptive.serve.service import Service
from sparseflow.errors import MissingExtraError

try:
    from fastapi import FastAPI, Request, Response
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from starlette.types import ASGIApp, Receive, Scope, Send
except ImportError as error:
    raise MissingExtraError("fastapi", "adaptive") from error

_LOG = logging.getLogger(__name__)
_RECEIVED = "sparseflow.received_s"
_REQUEST_ID = re.compile(r"[\w.-]{1,128}", re.ASCII)
"""Of a client or a proxy, to be found again in its logs."""


def create_app(service: Service) -> FastAPI:
    """An app that serves a model; `app.state.service` is the service.

    Args:
        service: Its gate is opened when the app starts, and it is closed when the app ends.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.open()
        yield
        # `lifecycle.Server` has drained it by now; other servers that run this app may not have.
        await service.gate.drain(0.0)
        await service.close()

    app = FastAPI(title="SparseFlow", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    app.add_middleware(_ReceiptMiddleware)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unforeseen)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _chat(service, request)

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Any:
        try:
            service.check_model(model)
        except ApiError as refusal:
            return _refused(refusal)
        return _model(service)

    @app.get("/health")
    async def health() -> Response:
        alive = service.backend.alive
        return JSONResponse({"status": "ok" if alive else "engine_stopped"}, 200 if alive else 503)

    @app.get("/ready")
    async def ready() -> Response:
        state = service.gate.state if service.backend.alive else "engine_stopped"
        return JSONResponse({"status": state, "ready": service.ready}, 200 if service.ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        text, kind = service.metrics.exposition()
        return Response(text, media_type=kind)

    return app


class _ReceiptMiddleware:
    """Notes when a request came in, before anything else is done with it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_RECEIVED] = time.perf_counter()
        await self._app(scope, receive, send)


async def _chat(service: Service, request: Request) -> Response:
    given = request.headers.get("x-request-id", "")
    names = {"X-Request-Id": given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex}
    answer: AnswerStream | None = None
    watching: asyncio.Task[None] | None = None
    try:
        answer = await service.answer(
            lambda: _body(request, service.limits.body_bytes), request.headers, request.scope[_RECEIVED]
        )
        watching = asyncio.create_task(_watch(request.receive, answer))
        await answer.begin()
        if answer.wanted.stream:
            response = _EventStreamResponse(answer, service.model, watching, names)
            # They are the response's from here on.
            answer, watching = None, None
            return response
        text = "".join([piece async for piece in answer.pieces()])
        return JSONResponse(completion(answer, service.model, text), headers=names)
    except ApiError as refusal:
        return _refused(refusal, names)
    except Exception:
        _LOG.exception("request %s went wrong", names["X-Request-Id"])
        return _refused(_failure(), names)
    finally:
        if watching is not None:
            watching.cancel()
        if answer is not None:
            answer.leave()


async def _body(request: Request, most: int) -> bytes:
    """The body of a request.

    Raises:
        Refusal: It is too large, or the client went away.
    """
    told = request.headers.get("content-length", "")
    too_large = ApiError(
        413, f"the body must be at most {most} bytes; send smaller images", code="request_too_large"
    )
    if told.isascii() and told.isdigit() and int(told[:20]) > most:
        raise too_large
    found = bytearray()
    try:
        async for part in request.stream():
            found += part
            if len(found) > most:
                raise too_large
    except ClientDisconnect as error:
        raise ApiError(499, "the client went away", code="client_gone") from error
    return bytes(found)


async def _watch(receive: Receive, answer: AnswerStream) -> None:
    """Call an answer off when its client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass
    answer.leave()


class _EventStreamResponse(Response):
    """An answer as server-sent events; whatever ends it, the answer is left and nothing of it goes on."""

    def __init__(
        self, answer: AnswerStream, model: str, watching: asyncio.Task[None], headers: Mapping[str, str]
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache", **headers})
        # Of a body that is not known yet.
        del self.headers["content-length"]
        self._answer = answer
        self._model = model
        self._watching = watching

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            async for part in self._parts():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            # Some servers say so when the client has gone.
            _LOG.debug("the client of %s went away", self._answer.id)
        finally:
            self._watching.cancel()
            self._answer.leave()

    async def _parts(self) -> AsyncIterator[bytes]:
        answer, model = self._answer, self._model
        try:
            yield event(chunk(answer, model, role="assistant", content=""))
            async for piece in answer.pieces():
                yield event(chunk(answer, model, content=piece))
            for last in last_chunks(answer, model, usage=answer.wanted.include_usage):
                yield event(last)
            yield DONE
        except ApiError as refusal:
            yield error_event(refusal)
        except Exception:
            _LOG.exception("the stream of %s went wrong", answer.id)
            yield error_event(_failure())


def _model(service: Service) -> dict[str, Any]:
    return {"id": service.model, "object": "model", "created": service.created_s, "owned_by": "sparseflow"}


def _failure() -> ApiError:
    return ApiError(500, "the server failed on this request; its log says more", code="internal_error")


def _refused(refusal: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(refusal.body, refusal.status, headers={**refusal.headers, **(headers or {})})


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {
        404: ("there is no such address", "not_found"),
        405: ("not by this method", "method_not_allowed"),
    }
    said, code = known.get(error.status_code, (str(error.detail), "http_error"))
    asked = f"{request.method} {request.url.path[:200]}"
    message = f"{said}: {asked}; there are POST /v1/chat/completions and GET /v1/models"
    return _refused(ApiError(error.status_code, message, code=code), error.headers)


async def _unforeseen(request: Request, error: Exception) -> Response:
    return _refused(_failure())
