"""Asking a Prometheus server over its HTTP API, and believing nothing of the answer before it is checked.

Only range selectors are asked for (`metric[5s]`): they give samples with the times at which they were
scraped. A plain query answers with the time of the question, and with values up to five minutes old.

Source: Prometheus 2.42, "HTTP API", "Querying basics: Staleness".
"""

from __future__ import annotations

import http.client
import json
import math
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparseflow.errors import DeviceError, InputError

MOST_BYTES = 16 * 2**20
LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class TimeSeries:
    """One series of an answer.

    Attributes:
        name: The metric's name.
        labels: Its labels, without the name.
        samples: (seconds since 1970 by the server's clock, value as the server wrote it), oldest first.
    """

    name: str
    labels: Mapping[str, str]
    samples: tuple[tuple[float, str], ...]


class PrometheusClient:
    """A Prometheus server, or one that speaks its API (Thanos, Mimir, VictoriaMetrics).

    Args:
        url: Where it is, such as `"http://127.0.0.1:9090"`; a path before `/api` may follow.
        timeout_s: Seconds that an answer may take, from connecting to its last byte.
        headers: Sent along, such as `{"Authorization": "Bearer …"}`. Never shown in an error.

    Raises:
        InputError: `url` is no http or https address, or `timeout_s` is not positive.
    """

    def __init__(self, url: str, *, timeout_s: float = 5.0, headers: Mapping[str, str] | None = None) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise InputError(f"`url` (={url!r}) is no address: {error}") from error
        if "@" in parts.netloc:
            raise InputError("a Prometheus url must hold no user or password; give them as `headers`")
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
            raise InputError(
                f"`url` (={url!r}) must be the address of a Prometheus server, like http://127.0.0.1:9090"
            )
        if not (math.isfinite(timeout_s) and timeout_s > 0.0):
            raise InputError(f"`timeout_s` (={timeout_s}) must be positive")
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._headers = dict(headers or {})
        # A proxy that the environment names cannot reach this machine's own loopback.
        own = host == "localhost" or host == "::1" or host.startswith("127.")
        handlers = [urllib.request.ProxyHandler({})] if own else []
        self._open = urllib.request.build_opener(*handlers).open

    def samples(self, selector: str, window_s: float) -> tuple[TimeSeries, ...]:
        """Every sample of the last `window_s` seconds in the series that `selector` picks.

        Raises:
            DeviceError: The server cannot be reached, refuses, or answers in another form.
        """
        query = f"{selector}[{max(1, math.ceil(1e3 * window_s))}ms]"
        return tuple(self._found(series, query) for series in self._result(query, "matrix"))

    def now(self) -> float:
        """The server's clock, seconds since 1970. Raises as `samples` does."""
        query = "time()"
        result = self._result(query, "scalar")
        try:
            return _number(result[1])
        except (IndexError, TypeError, ValueError) as error:
            raise self._odd(query, "a pair of two times", result) from error

    def _result(self, query: str, kind: str) -> list[Any]:
        body = self._get(query)
        try:
            answer = json.loads(body)
        except ValueError as error:
            raise self._odd(query, "JSON", body) from error
        data = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(data, dict) or answer.get("status") != "success":
            raise self._odd(query, '{"status": "success", "data": …}', answer)
        if data.get("resultType") != kind or not isinstance(data.get("result"), list):
            raise self._odd(query, f"a result of type {kind}", answer)
        return data["result"]

    def _get(self, query: str) -> bytes:
        address = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        end = time.monotonic() + self.timeout_s
        slow = DeviceError(
            f"{self.url} did not answer {query} within {self.timeout_s:g} s; is the server overloaded, or "
            "`timeout_s` too short?"
        )
        try:
            request = urllib.request.Request(address, headers=self._headers)
            with self._open(request, timeout=self.timeout_s) as answer:
                body = b""
                # The socket's timeout starts anew with every byte that arrives.
                while piece := answer.read1(2**16):
                    body += piece
                    if time.monotonic() > end:
                        raise slow
                    if len(body) > MOST_BYTES:
                        raise self._odd(query, f"at most {MOST_BYTES} bytes", body)
                return body
        except urllib.error.HTTPError as error:
            with error:
                raise DeviceError(
                    f"{self.url} refused {query} with HTTP {error.code}: {_reason(error)}; is this the "
                    "address of a Prometheus server?"
                ) from error
        except TimeoutError as error:
            raise slow from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise slow from error
            raise DeviceError(
                f"{self.url} cannot be reached ({reason or type(error).__name__}); expected a Prometheus "
                "server that answers /api/v1/query"
            ) from error
        except ValueError as error:
            raise InputError(f"`url` (={self.url!r}) or `headers` cannot be sent: {error}") from error

    def _found(self, series: Any, query: str) -> TimeSeries:
        try:
            labels = {str(key): str(value) for key, value in series["metric"].items()}
            samples = tuple(sorted((_number(at), _text(value)) for at, value in series["values"]))
            name = labels.pop("__name__")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._odd(
                query, 'series like {"metric": {…}, "values": [[time, "value"], …]}', series
            ) from error
        if not samples:
            raise self._odd(query, "at least one sample in every series", series)
        return TimeSeries(name=name, labels=labels, samples=samples)

    def _odd(self, query: str, expected: str, got: Any) -> DeviceError:
        text = got.decode(errors="replace") if isinstance(got, bytes) else json.dumps(got, ensure_ascii=False)
        shown = text if len(text) <= 200 else text[:200] + "…"
        return DeviceError(f"{self.url} answered {query} with {shown!r}; expected {expected}")


def format_selector(names: tuple[str, ...], labels: Mapping[str, str]) -> str:
    """PromQL that picks the series of any of `names` with all of `labels`.

    Raises:
        InputError: A label's name is none.
    """
    for label in labels:
        if not LABEL.fullmatch(label) or label.startswith("__"):
            raise InputError(f"{label!r} is no label's name; expected letters, digits and underscores")
    picks = [f"{label}={_quoted(value)}" for label, value in labels.items()]
    return "{" + ", ".join([f"__name__=~{_quoted('|'.join(names))}", *picks]) + "}"


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError("a truth value is no number")
    found = float(value)
    if not math.isfinite(found):
        raise ValueError("not finite")
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a value must be text")
    return value


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        body = error.read(2**12)
        told = json.loads(body)
        return f"{told['errorType']}: {told['error']}"
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return str(error.reason)
