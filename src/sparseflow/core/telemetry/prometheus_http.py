"""Client of the Prometheus HTTP API that validates every response.

A redirect is followed only within the origin (scheme, host and port) of the URL, since the request can
contain credentials.

It sends only range selectors (`metric[5s]`), which return samples with their scrape times. An instant query
returns the time of the query instead, and values up to five minutes old.

Source: Prometheus 2.42, "HTTP API", "Querying basics: Staleness".
"""

from __future__ import annotations

import http.client
import io
import json
import math
import re
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparseflow.core.checks import check_positive
from sparseflow.core.files import parse_json
from sparseflow.core.telemetry.deadline_reader import DeadlineReader
from sparseflow.errors import DeviceError, InputError

MAX_RESPONSE_BYTES = 16 * 2**20
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?Inf|NaN")
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, kw_only=True)
class TimeSeries:
    """One time series of a response.

    Attributes:
        name: Metric name.
        labels: Labels without the metric name.
        samples: (seconds since 1970 by the server's clock, value as text), oldest first.
    """

    name: str
    labels: Mapping[str, str]
    samples: tuple[tuple[float, str], ...]


class _Request(urllib.request.Request):
    """Request whose response, after all redirects, must be complete at `end_s` of `time.monotonic`."""

    def __init__(self, url: str, headers: Mapping[str, str], end_s: float) -> None:
        super().__init__(url, headers=dict(headers))
        self.end_s = end_s


class _DeadlineHandler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Reads responses until the deadline of their request."""

    def do_open(self, http_class: Any, req: Any, **http_conn_args: Any) -> Any:
        def make_response(connection: socket.socket, *arguments: Any, **options: Any) -> Any:
            response = http.client.HTTPResponse(connection, *arguments, **options)
            response.fp.close()
            response.fp = io.BufferedReader(DeadlineReader(connection, req.end_s))
            return response

        def connect(host: str, **options: Any) -> Any:
            connection = http_class(host, **options)
            connection.response_class = make_response
            return connection

        return super().do_open(connect, req, **http_conn_args)


class _SameOriginRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses a redirect to another origin, which must not receive the headers of the request."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        fp.close()  # urllib would read the whole body first
        if _get_origin(newurl) != _get_origin(req.full_url):
            raise DeviceError(
                f"{req.full_url.partition('?')[0]} redirects to another server, {newurl[:200]!r}; if you "
                "trust that server, use its URL"
            )
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        return request and _Request(request.full_url, request.headers, req.end_s)


def _get_origin(url: str) -> tuple[str, str | None, int | None] | None:
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme, parts.hostname, parts.port or _DEFAULT_PORTS.get(parts.scheme)
    except ValueError:
        return None


class PrometheusClient:
    """Client of a Prometheus server or a compatible one (Thanos, Mimir, VictoriaMetrics).

    Args:
        url: URL such as `"http://127.0.0.1:9090"`, optionally with a path prefix before `/api`.
        timeout_s: Timeout of a request from connecting to the last byte, seconds.
        headers: Request headers such as `{"Authorization": "Bearer …"}`; never shown in an error.

    Raises:
        InputError: `url` is not an http or https URL, or `timeout_s` is not positive.
    """

    def __init__(self, url: str, *, timeout_s: float = 5.0, headers: Mapping[str, str] | None = None) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise InputError(f"`url` (={url!r}) is not a URL: {error}") from error
        if "@" in parts.netloc:
            raise InputError("`url` must not contain a user or password; pass them as `headers`")
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
            raise InputError(
                f"`url` (={url!r}) must be the URL of a Prometheus server, such as http://127.0.0.1:9090"
            )
        check_positive(timeout_s=timeout_s)
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._headers = dict(headers or {})
        # A proxy from the environment cannot reach the loopback interface of this machine.
        is_loopback = host == "localhost" or host == "::1" or host.startswith("127.")
        handlers = [urllib.request.ProxyHandler({})] if is_loopback else []
        self._open = urllib.request.build_opener(_SameOriginRedirects, _DeadlineHandler, *handlers).open

    def read_samples(self, selector: str, window_s: float) -> tuple[TimeSeries, ...]:
        """Read all samples of the last `window_s` seconds of the series that match `selector`.

        Raises:
            DeviceError: The server is unreachable, refuses the request or returns an invalid response.
        """
        query = f"{selector}[{max(1, math.ceil(1e3 * window_s))}ms]"
        return tuple(self._parse_series(series, query) for series in self._query(query, "matrix"))

    def read_time_s(self) -> float:
        """Read the clock of the server, seconds since 1970; raises like `read_samples`."""
        query = "time()"
        result = self._query(query, "scalar")
        try:
            return _parse_time_s(result[1])
        except (IndexError, TypeError, ValueError) as error:
            raise self._make_error(query, "a pair of two times", result) from error

    def _query(self, query: str, kind: str) -> list[Any]:
        body = self._get(query)
        try:
            response = parse_json(body)
        except ValueError as error:
            raise self._make_error(query, f"JSON ({error})", body) from error
        data = response.get("data") if isinstance(response, dict) else None
        if not isinstance(data, dict) or response.get("status") != "success":
            raise self._make_error(query, '{"status": "success", "data": …}', response)
        if data.get("resultType") != kind or not isinstance(data.get("result"), list):
            raise self._make_error(query, f"a result of type {kind}", response)
        return data["result"]

    def _get(self, query: str) -> bytes:
        url = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        timeout_error = DeviceError(
            f"{self.url} did not answer {query} within {self.timeout_s:g} s; check the load of the server, "
            "or increase `timeout_s`"
        )
        try:
            request = _Request(url, self._headers, time.monotonic() + self.timeout_s)
            with self._open(request, timeout=self.timeout_s) as response:
                body = b""
                while chunk := response.read1(2**16):
                    body += chunk
                    if len(body) > MAX_RESPONSE_BYTES:
                        raise self._make_error(query, f"at most {MAX_RESPONSE_BYTES} bytes", body)
                return body
        except urllib.error.HTTPError as error:
            with error:
                raise DeviceError(
                    f"{self.url} refused {query} with HTTP {error.code}: {_read_reason(error)}; check that "
                    "it is a Prometheus server"
                ) from error
        except TimeoutError as error:
            raise timeout_error from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise timeout_error from error
            text = _format_excerpt(reason) or type(error).__name__
            raise DeviceError(
                f"{self.url} is unreachable ({text}); expected a Prometheus server that answers /api/v1/query"
            ) from error
        except ValueError as error:
            raise InputError(f"`url` (={self.url!r}) or `headers` cannot be sent: {error}") from error

    def _parse_series(self, series: Any, query: str) -> TimeSeries:
        try:
            labels = {str(key): str(value) for key, value in series["metric"].items()}
            samples = tuple(
                sorted((_parse_time_s(at_s), _check_text(value)) for at_s, value in series["values"])
            )
            name = labels.pop("__name__")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._make_error(
                query, 'series like {"metric": {…}, "values": [[time, "value"], …]}', series
            ) from error
        if not samples:
            raise self._make_error(query, "at least one sample in every series", series)
        return TimeSeries(name=name, labels=labels, samples=samples)

    def _make_error(self, query: str, expected: str, response: Any) -> DeviceError:
        is_bytes = isinstance(response, bytes)
        text = response.decode(errors="replace") if is_bytes else json.dumps(response, ensure_ascii=False)
        excerpt = text if len(text) <= 200 else text[:200] + "…"
        return DeviceError(f"{self.url} answered {query} with {excerpt!r}; expected {expected}")


def format_selector(names: tuple[str, ...], labels: Mapping[str, str]) -> str:
    """Format a PromQL selector of the series of any of `names` with all of `labels`.

    Raises:
        InputError: A label name is invalid.
    """
    for label in labels:
        if not _LABEL.fullmatch(label) or label.startswith("__"):
            raise InputError(f"invalid label name {label!r}; expected letters, digits and underscores")
    matchers = [f"{label}={_quote(value)}" for label, value in labels.items()]
    return "{" + ", ".join([f"__name__=~{_quote('|'.join(names))}", *matchers]) + "}"


def _quote(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def parse_number(text: str) -> float:
    """Parse a number as Prometheus writes it, which Python's own rules would extend, such as by `1_0`.

    Raises:
        ValueError: The text is something else.
    """
    if not _NUMBER.fullmatch(text):
        raise ValueError("not a number of Prometheus")
    return float(text)


def _parse_time_s(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError("expected a number, not a boolean")
    number = parse_number(value) if isinstance(value, str) else float(value)
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number


def _check_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("expected text")
    return value


def _read_reason(error: urllib.error.HTTPError) -> str:
    try:
        response = parse_json(error.read(2**12))
        return _format_excerpt(f"{response['errorType']}: {response['error']}")
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return _format_excerpt(error.reason)


def _format_excerpt(value: object) -> str:
    """Return the start of a text of the server, without characters that control a terminal."""
    return "".join(char if char.isprintable() else "\ufffd" for char in str(value)[:200])
