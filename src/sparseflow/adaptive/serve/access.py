"""Access to the server: API key and request log."""

from __future__ import annotations

import hmac
import logging
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparseflow.errors import InputError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_LOG = logging.getLogger("sparseflow.adaptive.serve.requests")
"""One line per request: method, path, status, time and plan."""
RECEIVED_KEY = "sparseflow.received_s"
PLAN_KEY = "sparseflow.plan"
_OPEN_PATHS = ("/health", "/ready")
"""Paths that need no key, for the probes of a load balancer."""
_MAX_PATH = 200


def check_api_keys(api_keys: Sequence[str]) -> None:
    """Check API keys.

    Raises:
        InputError: A key is empty or contains other than visible ASCII characters.
    """
    for key in api_keys:
        if not key or not all("!" <= character <= "~" for character in key):
            raise InputError("an API key must consist of visible ASCII characters, at least one")


class ApiKeyMiddleware:
    """Refuses requests without the API key with 401.

    Args:
        app: Next app.
        api_keys: Accepted keys, sent as `Authorization: Bearer KEY`.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._expected = [b"Bearer " + key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        from starlette.responses import JSONResponse

        message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
        error = {
            "message": message, "type": "invalid_request_error", "param": None, "code": "invalid_api_key",
        }  # fmt: skip
        response = JSONResponse({"error": error}, 401, {"WWW-Authenticate": "Bearer"})
        await response(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        received = b"".join(value for name, value in scope["headers"] if name == b"authorization")
        # Every key is compared, in constant time.
        return sum(hmac.compare_digest(received, expected) for expected in self._expected) > 0


class ReceiptMiddleware:
    """Records the receipt time of a request before any other processing, and logs its end.

    Args:
        app: Next app.
        log: Whether requests are logged.
    """

    def __init__(self, app: ASGIApp, *, log: bool) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[RECEIVED_KEY] = start_s = time.perf_counter()
        if scope["type"] != "http" or not self._log:
            await self._app(scope, receive, send)
            return
        status = 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            duration_ms = (time.perf_counter() - start_s) * 1e3
            path = scope["path"][:_MAX_PATH].encode("unicode_escape").decode()
            plan = scope.get(PLAN_KEY)
            REQUEST_LOG.info(
                "%s %s %d %.1f ms%s", scope["method"], path, status, duration_ms,
                "" if plan is None else f" {plan}",
            )  # fmt: skip


def write_request_log() -> None:
    """Write the request log to standard error, one unwrapped line per request."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    REQUEST_LOG.handlers[:] = [handler]
    REQUEST_LOG.setLevel(logging.INFO)
    REQUEST_LOG.propagate = False
