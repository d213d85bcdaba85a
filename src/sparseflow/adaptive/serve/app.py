"""HTTP routes: the OpenAI API, health and metrics.

`POST /v1/chat/completions`, `GET /v1/models`, `GET /v1/models/{model}`; `/health` (the process works),
`/ready` (requests are accepted), `/metrics` (Prometheus).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from sparseflow.adaptive.prompts.messages import ApiError
from sparseflow.adaptive.serve.access import (
    PLAN_KEY,
    RECEIVED_KEY,
    ApiKeyMiddleware,
    ReceiptMiddleware,
    check_api_keys,
)
from sparseflow.adaptive.serve.answer import AnswerStream
from sparseflow.adaptive.serve.protocol import (
    DONE,
    encode_event,
    make_chunk,
    make_completion,
    make_last_chunks,
)
from sparseflow.adaptive.serve.service import Service
from sparseflow.errors import MissingExtraError

try:
    from fastapi import FastAPI, Request, Response
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException
    from starlette.middleware.cors import CORSMiddleware
    from starlette.requests import ClientDisconnect
    from starlette.types import Receive, Scope, Send
except ImportError as error:
    raise MissingExtraError("fastapi", "adaptive") from error

_LOG = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[\w.-]{1,128}", re.ASCII)
"""Accepted form of a request ID set by a client or proxy."""


def create_app(
    service: Service,
    *,
    api_keys: Sequence[str] = (),
    cors_origins: Sequence[str] = (),
    request_log: bool = True,
) -> FastAPI:
    """Create the HTTP app of a service; `app.state.service` is the service.

    Args:
        service: Service; the app opens it at startup and closes it at shutdown.
        api_keys: Accepted API keys; without one, everybody has access. `/health` and `/ready` need no key.
        cors_origins: Origins of web pages that may send requests; `*` allows all.
        request_log: Whether `access.REQUEST_LOG` gets a line per request.

    Raises:
        InputError: A key is empty or contains other than visible ASCII characters.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.open()
        yield
        # `lifecycle.Server` has drained already; other ASGI servers have not.
        await service.drain.drain(0.0)
        await service.close()

    app = FastAPI(title="SparseFlow", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    # The middleware that is added last runs first: preflight requests of browsers carry no key.
    if api_keys:
        check_api_keys(api_keys)
        app.add_middleware(ApiKeyMiddleware, api_keys=tuple(api_keys))
    if cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(cors_origins), allow_methods=["GET", "POST"],
            allow_headers=["*"], expose_headers=["X-Request-Id", "Retry-After", "Retry-After-Ms"],
        )  # fmt: skip
    app.add_middleware(ReceiptMiddleware, log=request_log)
    app.add_exception_handler(HTTPException, _handle_http_error)
    app.add_exception_handler(Exception, _handle_unexpected_error)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _handle_chat(service, request)

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [_describe_model(service)]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Any:
        try:
            service.check_model(model)
        except ApiError as refusal:
            return _make_error_response(refusal)
        return _describe_model(service)

    @app.get("/health")
    async def health() -> Response:
        alive = service.backend.alive
        return JSONResponse({"status": "ok" if alive else "engine_stopped"}, 200 if alive else 503)

    @app.get("/ready")
    async def ready() -> Response:
        state = service.drain.state if service.backend.alive else "engine_stopped"
        return JSONResponse({"status": state, "ready": service.ready}, 200 if service.ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        text, content_type = service.metrics.export()
        return Response(text, media_type=content_type)

    return app


async def _handle_chat(service: Service, request: Request) -> Response:
    client_request_id = request.headers.get("x-request-id", "")
    response_headers = {
        "X-Request-Id": client_request_id if _REQUEST_ID.fullmatch(client_request_id) else uuid.uuid4().hex
    }
    answer: AnswerStream | None = None
    watcher: asyncio.Task[None] | None = None
    num_held = 0

    def hold(num_bytes: int) -> None:
        nonlocal num_held
        num_held += num_bytes
        service.hold_body(num_bytes)

    async def read_body() -> bytes | bytearray:
        nonlocal watcher
        body = await _read_body(request, service.max_body_bytes, hold)
        watcher = asyncio.create_task(_watch_disconnect(request.receive, submission))
        return body

    submission = asyncio.ensure_future(
        service.submit(read_body, request.headers, request.scope[RECEIVED_KEY])
    )
    try:
        try:
            answer = await submission
        except asyncio.CancelledError:
            if not submission.cancelled():
                raise
            raise _make_gone_error() from None
        finally:
            service.release_body(num_held)
        await answer.wait_first_token()
        request.scope[PLAN_KEY] = answer.plan_id
        if answer.stream:
            response = _EventStreamResponse(answer, service.model, watcher, response_headers)
            # The response owns both now.
            answer, watcher = None, None
            return response
        text = "".join([piece async for piece in answer.iter_text()])
        return JSONResponse(make_completion(answer, service.model, text), headers=response_headers)
    except ApiError as refusal:
        return _make_error_response(refusal, response_headers)
    except Exception:
        _LOG.exception("request %s failed", response_headers["X-Request-Id"])
        return _make_error_response(_make_internal_error(), response_headers)
    finally:
        submission.cancel()
        if watcher is not None:
            watcher.cancel()
        if answer is not None:
            answer.disconnect()


async def _read_body(request: Request, max_bytes: int, hold: Callable[[int], None]) -> bytearray:
    """Read the body of a request.

    Args:
        request: Request.
        max_bytes: Maximum size.
        hold: Called with the size of each chunk; raises if the server holds too many bytes.

    Raises:
        ApiError: The body exceeds `max_bytes`, or the client disconnected.
    """
    content_length = request.headers.get("content-length", "")
    too_large = ApiError(
        413, f"the body must be at most {max_bytes} bytes; send smaller images or less text",
        code="request_too_large",
    )  # fmt: skip
    if content_length.isascii() and content_length.isdigit() and int(content_length[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async for chunk in request.stream():
            hold(len(chunk))
            body += chunk
            if len(body) > max_bytes:
                raise too_large
    except ClientDisconnect as error:
        raise _make_gone_error() from error
    return body


async def _watch_disconnect(receive: Receive, submission: asyncio.Future[AnswerStream]) -> None:
    """Cancel a request when its client disconnects, whether it is prepared, queued or answered."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if not submission.done():
        submission.cancel()
    elif not submission.cancelled() and submission.exception() is None:
        submission.result().disconnect()


class _EventStreamResponse(Response):
    """An answer as server-sent events. The answer is released however the response ends."""

    def __init__(
        self,
        answer: AnswerStream,
        model: str,
        watcher: asyncio.Task[None] | None,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache", **headers})
        # The length of a stream is unknown.
        del self.headers["content-length"]
        self._answer = answer
        self._model = model
        self._watcher = watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            async for part in self._iter_events():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            # Some servers raise this when the client disconnects.
            _LOG.debug("the client of %s disconnected", self._answer.id)
        finally:
            if self._watcher is not None:
                self._watcher.cancel()
            self._answer.disconnect()

    async def _iter_events(self) -> AsyncIterator[bytes]:
        answer, model = self._answer, self._model
        try:
            yield encode_event(make_chunk(answer, model, role="assistant", content=""))
            async for piece in answer.iter_text():
                yield encode_event(make_chunk(answer, model, content=piece))
            for chunk in make_last_chunks(answer, model, usage=answer.include_usage):
                yield encode_event(chunk)
            yield DONE
        except ApiError as refusal:
            yield encode_event(refusal.body)
        except Exception:
            _LOG.exception("the stream of %s failed", answer.id)
            yield encode_event(_make_internal_error().body)


def _describe_model(service: Service) -> dict[str, Any]:
    return {"id": service.model, "object": "model", "created": service.created_s, "owned_by": "sparseflow"}


def _make_gone_error() -> ApiError:
    return ApiError(499, "the client disconnected", code="client_gone")


def _make_internal_error() -> ApiError:
    return ApiError(500, "internal error; see the log of the server", code="internal_error")


def _make_error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(error.body, error.status, headers={**error.headers, **(headers or {})})


async def _handle_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {
        404: ("unknown path", "not_found"),
        405: ("method not allowed", "method_not_allowed"),
    }
    summary, code = messages.get(error.status_code, (str(error.detail), "http_error"))
    route = f"{request.method} {request.url.path[:200]}"
    message = f"{summary}: {route}; available: POST /v1/chat/completions and GET /v1/models"
    return _make_error_response(ApiError(error.status_code, message, code=code), error.headers)


async def _handle_unexpected_error(request: Request, error: Exception) -> Response:
    return _make_error_response(_make_internal_error())
