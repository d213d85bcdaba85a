"""Tests of API keys, CORS, the request log and limits on connections, with raw connections."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import pytest
from fastapi import FastAPI

from sparseflow.adaptive.prompts.chat import PromptBuilder
from sparseflow.adaptive.serve.access import REQUEST_LOG
from sparseflow.adaptive.serve.app import create_app
from sparseflow.adaptive.serve.connections import ConnectionLimits
from sparseflow.adaptive.serve.service import Service
from sparseflow.cli.root import run
from sparseflow.errors import InputError
from tests.adaptive.serve.fake import (
    MODEL,
    PLANS,
    ByteTokenizer,
    FakeBackend,
    Script,
    make_app,
    make_messages,
    run_in_thread,
    wait_until,
)

BODY = {"model": MODEL, "messages": make_messages("Hi"), "max_tokens": 5}


def make_service(scripts: dict[str, Script] | None = None) -> Service:
    return Service(MODEL, FakeBackend(scripts=scripts), PromptBuilder(ByteTokenizer(), context=4096))


@contextmanager
def open_client(app: FastAPI) -> Iterator[httpx2.Client]:
    with (
        run_in_thread(app) as server,
        httpx2.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60.0) as client,
    ):
        yield client


def test_api_key_protects_all_but_probes() -> None:
    with open_client(create_app(make_service(), api_keys=["secret", "other"])) as client:
        for path in ("/health", "/ready"):
            assert client.get(path).status_code == 200
        for path in ("/metrics", "/v1/models", "/nothing"):
            for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
                response = client.get(path, headers=header)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        assert client.post("/v1/chat/completions", json=BODY).status_code == 401
        for key in ("secret", "other"):
            headers = {"Authorization": f"Bearer {key}"}
            assert client.get("/metrics", headers=headers).status_code == 200
            assert client.post("/v1/chat/completions", json=BODY, headers=headers).status_code == 200


@pytest.mark.parametrize("key", ["", "a b", "a\n", "ü"])
def test_invalid_api_key_raises(key: str) -> None:
    with pytest.raises(InputError, match="API key"):
        create_app(make_service(), api_keys=[key])


def test_serve_empty_api_key_variable_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARSEFLOW_API_KEY", "")
    assert run(["adaptive", "serve", "model", "--profile", "p.json"]) == 2
    assert "SPARSEFLOW_API_KEY is empty" in capsys.readouterr().err.replace("\n", " ")


def test_cors_allows_listed_origins_without_key() -> None:
    app = create_app(make_service(), api_keys=["secret"], cors_origins=["https://a.example"])
    with open_client(app) as client:
        preflight = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        allowed = client.options("/v1/chat/completions", headers={"Origin": "https://a.example", **preflight})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        other = client.options("/v1/chat/completions", headers={"Origin": "https://b.example", **preflight})
        assert "access-control-allow-origin" not in other.headers


def test_request_log_has_a_line_per_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, REQUEST_LOG.name), open_client(create_app(make_service())) as client:
        client.post("/v1/chat/completions", json=BODY)
        client.post("/v1/chat/completions", json={**BODY, "stream": True})
        client.get("/a%0Ab?secret=1")
        wait_until(lambda: len(caplog.records) >= 3)
    lines = [record.getMessage() for record in caplog.records if record.name == REQUEST_LOG.name]
    assert [line.split(" ")[:3] for line in lines] == [
        ["POST", "/v1/chat/completions", "200"],
        ["POST", "/v1/chat/completions", "200"],
        ["GET", "/a\\nb", "404"],
    ]
    assert all(line.endswith(f" ms {PLANS[2].id}") for line in lines[:2])


@contextmanager
def run_limited(limits: ConnectionLimits, scripts: dict[str, Script] | None = None) -> Iterator[int]:
    """Serve with limits on connections; yields the port."""
    with run_in_thread(make_app(FakeBackend(scripts=scripts)), connection_limits=limits) as server:
        yield server.port


def connect(port: int, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), 60.0)
    connection.sendall(data)
    return connection


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def get_status(connection: socket.socket) -> bytes:
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    return connection.recv(12)


def test_connections_without_request_are_closed() -> None:
    with run_limited(ConnectionLimits(head_s=0.1, keep_alive_s=0.1)) as port:
        for data in (b"", b"GET /health HTTP/1.1\r\nX-"):
            with connect(port, data) as connection:
                assert is_closed(connection)
        # A connection with half of its second head is closed as well.
        with connect(port) as connection:
            assert get_status(connection) == b"HTTP/1.1 200"
            connection.sendall(b"GET /health HTTP/1.1\r\nX-")
            while not is_closed(connection):
                pass


def test_connection_with_running_request_stays_open() -> None:
    scripts = {"": Script("ab", token_ms=100.0)}
    with run_limited(ConnectionLimits(head_s=0.1), scripts) as port:
        response = httpx2.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=BODY, timeout=60.0)
        assert response.status_code == 200


def test_connection_above_limit_closes_longest_idle_one() -> None:
    with run_limited(ConnectionLimits(max_connections=3, head_s=60.0)) as port:
        idle = [connect(port) for _ in range(3)]
        time.sleep(0.05)
        with connect(port) as newest:
            assert get_status(newest) == b"HTTP/1.1 200"
            assert is_closed(idle[0])
            assert get_status(idle[1]) == b"HTTP/1.1 200"
        for connection in idle:
            connection.close()


def test_invalid_connection_limits_raise() -> None:
    with pytest.raises(InputError, match="max_connections"):
        ConnectionLimits(max_connections=0)
    with pytest.raises(InputError, match="head_s"):
        ConnectionLimits(head_s=0.0)
