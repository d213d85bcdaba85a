"""Tests of startup, drain and shutdown."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from fastapi import FastAPI

from sparseflow.adaptive.prompts.messages import ApiError
from sparseflow.adaptive.serve.lifecycle import DrainManager, Server, run_server
from sparseflow.errors import InputError, RunError
from tests.adaptive.serve.fake import (
    MODEL,
    FakeBackend,
    Script,
    make_app,
    make_messages,
    run_in_thread,
    wait_until,
)

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
from sparseflow.adaptive.serve import run_server
from tests.adaptive.serve.fake import FakeBackend, Script, make_app

scripts = {"slow": Script("word " * 20, wait_for=sys.argv[2]), "hang": Script("start", hang=True)}
run_server(make_app(FakeBackend(slots=2, scripts=scripts)), port=0, drain_s=float(sys.argv[1]))
print("closed", flush=True)
"""


class FakeRequest:
    def __init__(self) -> None:
        self.error: ApiError | None = None

    def cancel(self, error: ApiError) -> None:
        self.error = error


def test_drain_manager_opens_once_and_drains_permanently() -> None:
    async def scenario() -> None:
        manager, first, second = DrainManager(), FakeRequest(), FakeRequest()
        with pytest.raises(ApiError) as caught:
            manager.acquire(first)
        assert (caught.value.status, caught.value.code) == (503, "starting")
        manager.open()
        manager.acquire(first)
        manager.acquire(second)
        draining = asyncio.ensure_future(manager.drain(60.0))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            manager.check()
        assert (caught.value.status, caught.value.code) == (503, "shutting_down")
        assert "Retry-After" in caught.value.headers
        manager.release(first)
        manager.release(first)
        await asyncio.sleep(0)
        assert not draining.done()
        manager.release(second)
        assert await draining == 0
        manager.open()
        assert manager.state == "draining"

    asyncio.run(scenario())


@pytest.mark.parametrize("forced", [False, True])
def test_drain_after_timeout_or_force_cancels_remaining_requests(forced: bool) -> None:
    async def scenario() -> None:
        manager, request = DrainManager(), FakeRequest()
        manager.open()
        manager.acquire(request)
        if forced:
            asyncio.get_running_loop().call_soon(manager.force)
        assert await manager.drain(60.0 if forced else 0.01) == 1
        assert request.error is not None
        assert request.error.code == "shutting_down"

    asyncio.run(scenario())


def test_drain_without_requests_returns_immediately() -> None:
    assert asyncio.run(DrainManager().drain(60.0)) == 0


@contextmanager
def start_server(
    drain_s: float, wait_for: Path = ROOT
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Start a server process and yield it with its first line of output."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error::ResourceWarning", "-c", PROGRAM, str(drain_s), str(wait_for)],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.stderr.read() if process.stderr else ""
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()


def make_client(line: dict[str, Any]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{line['url']}/v1", api_key="any", max_retries=0, timeout=60.0)


def test_sigterm_with_running_request_completes_it(tmp_path: Path) -> None:
    with start_server(60.0, tmp_path / "go") as (process, line), make_client(line) as client:
        assert line["event"] == "listening"
        assert line["port"] > 0
        assert (line["model"], line["pid"]) == (MODEL, process.pid)
        with httpx2.Client(base_url=line["url"], timeout=60.0) as http:
            assert http.get("/ready").status_code == 200
            stream = client.chat.completions.create(
                model=MODEL, messages=make_messages("slow"), stream=True, max_tokens=200
            )
            chunks = [next(iter(stream))]
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: http.get("/ready").status_code == 503)
            assert http.get("/ready").json() == {"status": "draining", "ready": False}
            assert http.get("/health").status_code == 200
            with pytest.raises(openai.InternalServerError) as caught:
                client.chat.completions.create(model=MODEL, messages=make_messages("Hi"))
            assert (caught.value.status_code, caught.value.code) == (503, "shutting_down")
            assert caught.value.response.headers["retry-after"]
            (tmp_path / "go").touch()
            chunks += list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "word " * 20
        assert chunks[-1].choices[0].finish_reason == "stop"
        out, err = process.communicate(timeout=120.0)
        assert (process.returncode, out, err) == (0, "closed\n", "")


@pytest.mark.parametrize("drain_s", [2.0, 60.0])
def test_sigterm_with_hanging_request_cancels_it_with_error(drain_s: float) -> None:
    with start_server(drain_s) as (process, line), make_client(line) as client:
        stream = client.chat.completions.create(model=MODEL, messages=make_messages("hang"), stream=True)
        text = next(iter(stream)).choices[0].delta.content
        process.send_signal(signal.SIGTERM)
        if drain_s > 10.0:
            with httpx2.Client(base_url=line["url"], timeout=60.0) as http:
                wait_until(lambda: http.get("/ready").status_code == 503)
            # A second signal cancels immediately.
            process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError) as caught:
            for chunk in stream:
                text = (text or "") + (chunk.choices[0].delta.content or "")
        assert caught.value.code == "shutting_down"
        assert text == "start"
        out, err = process.communicate(timeout=120.0)
        assert (process.returncode, out, err) == (0, "closed\n", "")


def test_stop_during_non_streamed_answer_returns_503() -> None:
    fake = FakeBackend(scripts={"hang": Script("start", hang=True)})
    errors: list[openai.InternalServerError] = []
    with run_in_thread(make_app(fake), drain_s=0.0) as server:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any", max_retries=0)

        def send_request() -> None:
            with client, pytest.raises(openai.InternalServerError) as caught:
                client.chat.completions.create(model=MODEL, messages=make_messages("hang"))
            errors.append(caught.value)

        thread = threading.Thread(target=send_request)
        thread.start()
        wait_until(lambda: bool(fake.jobs))
        server.stop()
        thread.join(120.0)
    assert [(error.status_code, error.code) for error in errors] == [(503, "shutting_down")]
    assert fake.cancelled
    assert fake.closed


def test_server_port_in_use_raises() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"127.0.0.1:{port}"):
            Server(make_app(), port=port)


def fail_to_create() -> Any:
    pytest.fail("the app was created before its address was bound")


def test_run_server_binds_address_before_creating_app() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(InputError):
        run_server(fail_to_create, port=other.getsockname()[1])
    with pytest.raises(InputError, match="-1"):
        run_server(fail_to_create, port=0, drain_s=-1.0)
    lines: list[str] = []

    def create_app() -> FastAPI:
        # The socket is bound but does not listen, so early clients are refused.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port)).close()
        return make_app()

    server = Server(create_app, port=0, announce=lines.append)
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: bool(lines) or not thread.is_alive())
    assert httpx2.get(f"{json.loads(lines[0])['url']}/ready", timeout=60.0).status_code == 200
    server.stop()
    thread.join(120.0)
    assert not thread.is_alive()


def test_run_address_lost_during_app_creation_raises() -> None:
    with ExitStack() as stack:

        def create_app() -> FastAPI:
            other = stack.enter_context(socket.socket())
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", server.port))
            other.listen()
            return make_app()

        server = Server(create_app, port=0)
        with pytest.raises(InputError, match=f"127.0.0.1:{server.port}"):
            server.run()


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ({"port": -1}, "-1"),
        ({"port": 65536}, "65536"),
        ({"host": "no.such.host.invalid"}, "no.such.host.invalid"),
        ({"drain_s": -1.0}, "-1.0"),
        ({"drain_s": float("nan")}, "nan"),
    ],
)
def test_server_invalid_arguments_raise(arguments: dict[str, Any], value: str) -> None:
    with pytest.raises(InputError, match=value):
        Server(make_app(), **{"port": 0, **arguments})


def test_run_app_that_fails_to_start_raises(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app()

    async def fail() -> None:
        raise ZeroDivisionError("simulated")

    app.state.service.open = fail
    with pytest.raises(RunError):
        Server(app, port=0, announce=lambda _: pytest.fail("listening")).run()
    assert "simulated" in caplog.text


def test_server_ipv6_host_listens() -> None:
    lines: list[str] = []
    try:
        server = Server(make_app(), host="::1", port=0, announce=lines.append)
    except InputError:
        pytest.skip("this machine has no IPv6")
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: bool(lines))
    assert httpx2.get(f"{json.loads(lines[0])['url']}/ready", timeout=60.0).status_code == 200
    server.stop()
    thread.join(120.0)
    server.stop()
