"""From start to a clean end."""

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
from tests.adaptive.serve.fake import MODEL, Fake, Script, eventually, make_app, serving, user

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
from sparseflow.adaptive.serve import serve
from tests.adaptive.serve.fake import Fake, Script, make_app

scripts = {"slow": Script("word " * 20, wait_for=sys.argv[2]), "hang": Script("start", hang=True)}
serve(make_app(Fake(slots=2, scripts=scripts)), port=0, drain_s=float(sys.argv[1]))
print("closed", flush=True)
"""


class One:
    """Someone inside."""

    def __init__(self) -> None:
        self.refusal: ApiError | None = None

    def cut(self, refusal: ApiError) -> None:
        self.refusal = refusal


def test_a_gate_opens_once_and_shuts_for_good() -> None:
    async def story() -> None:
        gate, first, second = DrainManager(), One(), One()
        with pytest.raises(ApiError) as caught:
            gate.enter(first)
        assert (caught.value.status, caught.value.code) == (503, "starting")
        gate.open()
        gate.enter(first)
        gate.enter(second)
        draining = asyncio.ensure_future(gate.drain(60.0))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            gate.check()
        assert (caught.value.status, caught.value.code) == (503, "shutting_down")
        assert "Retry-After" in caught.value.headers
        gate.leave(first)
        gate.leave(first)
        await asyncio.sleep(0)
        assert not draining.done()
        gate.leave(second)
        assert await draining == 0
        gate.open()
        assert gate.state == "draining"

    asyncio.run(story())


@pytest.mark.parametrize("hurried", [False, True])
def test_those_left_in_the_end_are_cut(hurried: bool) -> None:
    async def story() -> None:
        gate, one = DrainManager(), One()
        gate.open()
        gate.enter(one)
        if hurried:
            asyncio.get_running_loop().call_soon(gate.hurry)
        assert await gate.drain(60.0 if hurried else 0.01) == 1
        assert one.refusal is not None
        assert one.refusal.code == "shutting_down"

    asyncio.run(story())


def test_an_empty_house_is_drained_at_once() -> None:
    assert asyncio.run(DrainManager().drain(60.0)) == 0


@contextmanager
def program(drain_s: float, wait_for: Path = ROOT) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A server in a process of its own, and the line that it begins with."""
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


def client_of(line: dict[str, Any]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{line['url']}/v1", api_key="any", max_retries=0, timeout=60.0)


def test_sigterm_lets_running_requests_end(tmp_path: Path) -> None:
    with program(60.0, tmp_path / "go") as (process, line), client_of(line) as client:
        assert line["event"] == "listening"
        assert line["port"] > 0
        assert (line["model"], line["pid"]) == (MODEL, process.pid)
        with httpx2.Client(base_url=line["url"], timeout=60.0) as http:
            assert http.get("/ready").status_code == 200
            stream = client.chat.completions.create(
                model=MODEL, messages=user("slow"), stream=True, max_tokens=200
            )
            chunks = [next(iter(stream))]
            process.send_signal(signal.SIGTERM)
            eventually(lambda: http.get("/ready").status_code == 503)
            assert http.get("/ready").json() == {"status": "draining", "ready": False}
            assert http.get("/health").status_code == 200
            with pytest.raises(openai.InternalServerError) as caught:
                client.chat.completions.create(model=MODEL, messages=user("Hi"))
            assert (caught.value.status_code, caught.value.code) == (503, "shutting_down")
            assert caught.value.response.headers["retry-after"]
            (tmp_path / "go").touch()
            chunks += list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "word " * 20
        assert chunks[-1].choices[0].finish_reason == "stop"
        out, err = process.communicate(timeout=120.0)
        assert (process.returncode, out, err) == (0, "closed\n", "")


@pytest.mark.parametrize("drain_s", [2.0, 60.0])
def test_what_does_not_end_is_cut_with_an_error(drain_s: float) -> None:
    with program(drain_s) as (process, line), client_of(line) as client:
        stream = client.chat.completions.create(model=MODEL, messages=user("hang"), stream=True)
        said = next(iter(stream)).choices[0].delta.content
        process.send_signal(signal.SIGTERM)
        if drain_s > 10.0:
            with httpx2.Client(base_url=line["url"], timeout=60.0) as http:
                eventually(lambda: http.get("/ready").status_code == 503)
            # A second signal waits no longer.
            process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="shutting down"):
            for chunk in stream:
                said = (said or "") + (chunk.choices[0].delta.content or "")
        assert said == "start"
        out, err = process.communicate(timeout=120.0)
        assert (process.returncode, out, err) == (0, "closed\n", "")


def test_a_whole_answer_that_is_cut_is_an_error() -> None:
    fake = Fake(scripts={"hang": Script("start", hang=True)})
    failed: list[openai.InternalServerError] = []
    with serving(make_app(fake), drain_s=0.0) as server:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any", max_retries=0)

        def ask() -> None:
            with client, pytest.raises(openai.InternalServerError) as caught:
                client.chat.completions.create(model=MODEL, messages=user("hang"))
            failed.append(caught.value)

        thread = threading.Thread(target=ask)
        thread.start()
        eventually(lambda: bool(fake.jobs))
        server.stop()
        thread.join(120.0)
    assert [(error.status_code, error.code) for error in failed] == [(503, "shutting_down")]
    assert fake.cancelled
    assert fake.closed


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"cannot listen at 127.0.0.1:{port}: .*name another port, or 0"):
            Server(make_app(), port=port)


def unmade() -> Any:
    pytest.fail("an app was made before its address was known to be free")


def test_an_app_is_made_when_its_address_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InputError, match="cannot listen at"):
        run_server(unmade, port=taken.getsockname()[1])
    with pytest.raises(InputError, match="must not be negative"):
        run_server(unmade, port=0, drain_s=-1.0)
    lines: list[str] = []

    def make() -> FastAPI:
        # It is bound, and does not listen yet: nobody hangs who comes early.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port)).close()
        return make_app()

    server = Server(make, port=0, announce=lines.append)
    thread = threading.Thread(target=server.run)
    thread.start()
    eventually(lambda: bool(lines) or not thread.is_alive())
    assert httpx2.get(f"{json.loads(lines[0])['url']}/ready", timeout=60.0).status_code == 200
    server.stop()
    thread.join(120.0)
    assert not thread.is_alive()


def test_an_address_that_is_lost_while_an_app_is_made() -> None:
    with ExitStack() as stack:

        def make() -> FastAPI:
            other = stack.enter_context(socket.socket())
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", server.port))
            other.listen()
            return make_app()

        server = Server(make, port=0)
        with pytest.raises(InputError, match=f"cannot listen at 127.0.0.1:{server.port}: .*name another"):
            server.run()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"port": -1}, "between 0 and 65535"),
        ({"port": 65536}, "between 0 and 65535"),
        ({"host": "no.such.host.invalid"}, "cannot listen at"),
        ({"drain_s": -1.0}, "must not be negative"),
        ({"drain_s": float("nan")}, "must not be negative"),
    ],
)
def test_where_nobody_can_listen(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Server(make_app(), **{"port": 0, **wrong})


def test_an_app_that_does_not_start(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app()

    async def fails() -> None:
        raise ZeroDivisionError("a slip")

    app.state.service.open = fails
    with pytest.raises(RunError, match="could not be started"):
        Server(app, port=0, announce=lambda _: pytest.fail("it listens")).run()
    assert "a slip" in caplog.text


def test_an_address_of_version_six() -> None:
    lines: list[str] = []
    try:
        server = Server(make_app(), host="::1", port=0, announce=lines.append)
    except InputError:
        pytest.skip("this machine has no IPv6")
    thread = threading.Thread(target=server.run)
    thread.start()
    eventually(lambda: bool(lines))
    assert httpx2.get(f"{json.loads(lines[0])['url']}/ready", timeout=60.0).status_code == 200
    server.stop()
    thread.join(120.0)
    server.stop()
