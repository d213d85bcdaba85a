"""The server beside hostile clients, and thousands of mixed requests.

::

    PYTHONPATH=src:. python benchmarks/adaptive/soak.py --effort 1 --out results/adaptive/soak.json
    PYTHONPATH=src:. python benchmarks/adaptive/soak.py --url http://127.0.0.1:8000 --pid 4711 --model digits

A client measures the latency of its requests on a quiet server and then beside each kind of hostile client:
two messages of 4 MB, two of 30 MB, bodies of many small values, abandoned requests, 100 bodies that never
end, and 900 connections without a request. Because a machine is never equally quiet, the quiet server is
measured before each of them. Then mixed requests follow: with images, streams, errors and disconnects. Memory
and descriptors of the server are recorded after every part.

Without `--url`, the shipped model `digits` is served by another process with its full plan, because budgets
need a profile of the machine. The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import math
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from PIL import Image

from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_json

MAX_P99_RATIO, MAX_MEMORY_RATIO, MAX_MORE_FILES = 2.0, 1.1, 8
"""Targets: p99 beside a hostile client against that before, memory against that after the warm-up, and
descriptors."""
_CHAT = "/v1/chat/completions"
_TIMEOUT_S = 60.0
_SETTLE_S = 1.0
_PARALLEL = 4


class Target:
    """A server under test.

    Args:
        url: Address of the server.
        pid: Process of the server.
        model: Name of its model.
    """

    def __init__(self, url: str, pid: int, model: str) -> None:
        address = urlsplit(url)
        self.host, self.port = str(address.hostname), int(address.port or 80)
        self.pid, self.model = pid, model

    def make_body(self, content: Any = "how many three are there", **fields: Any) -> bytes:
        """Encode a request with one user message."""
        body = {"model": self.model, "max_tokens": 2, "temperature": 0, **fields}
        return json.dumps({**body, "messages": [{"role": "user", "content": content}]}).encode()

    def post(self, body: bytes) -> int:
        """Send a request and read the response; return the status, 0 without a response."""
        connection = HTTPConnection(self.host, self.port, timeout=_TIMEOUT_S)
        try:
            connection.request("POST", _CHAT, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
            return response.status
        except (OSError, HTTPException):
            return 0
        finally:
            connection.close()

    def connect(self, data: bytes = b"") -> socket.socket:
        """Open a connection and send data."""
        connection = socket.create_connection((self.host, self.port), _TIMEOUT_S)
        connection.sendall(data)
        return connection

    def start_request(self, body: bytes, length: int) -> socket.socket:
        """Send the head of a request and the start of its body."""
        head = f"POST {_CHAT} HTTP/1.1\r\nHost: soak\r\nContent-Length: {length}\r\n\r\n"
        return self.connect(head.encode() + body)

    def measure_latencies(self, count: int) -> np.ndarray:
        """Return the latencies of sequential requests, milliseconds [count].

        Raises:
            RuntimeError: A request failed.
        """
        latencies_ms = []
        body = self.make_body()
        for _ in range(count):
            start_s = time.perf_counter()
            status = self.post(body)
            latencies_ms.append(1e3 * (time.perf_counter() - start_s))
            if status != 200:
                raise RuntimeError(f"a request of the measuring client got the status {status}")
        return np.array(latencies_ms)

    def read_usage(self) -> dict[str, float]:
        """Read resident memory (MiB), open descriptors and threads of the server."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        values = dict(line.split(":", 1) for line in status.splitlines())
        return {
            "memory_mib": round(int(values["VmRSS"].split()[0]) / 1024, 1),
            "files": len(os.listdir(f"/proc/{self.pid}/fd")),
            "threads": int(values["Threads"]),
        }


@contextmanager
def send_texts(target: Target, num_bytes: int) -> Iterator[Counter[str]]:
    """Send two messages of a size at the same time."""
    body, statuses = target.make_body("three " * (num_bytes // 6)), Counter[str]()
    with run_threads([lambda: statuses.update([str(target.post(body))])] * 2):
        yield statuses


@contextmanager
def send_values(target: Target) -> Iterator[Counter[str]]:
    """Send millions of small values, and hundreds of thousands of messages."""
    bodies = [
        b"[" + b"[]," * 9_000_000 + b"0]",
        target.make_body()[:-1] + b',"x":[' + b"0," * 9_000_000 + b"0]}",
    ]
    message = b'{"role":"user","content":"a"},'
    bodies.append(b'{"model":"m","messages":[' + message * 400_000 + message[:-1] + b"]}")
    statuses = Counter[str]()
    with run_threads([lambda body=body: statuses.update([str(target.post(body))]) for body in bodies]):
        yield statuses


@contextmanager
def send_abandoned(target: Target) -> Iterator[Counter[str]]:
    """Send requests and disconnect at once."""
    body = target.make_body("three " * 600_000)
    for _ in range(8):
        target.start_request(body, len(body)).close()
        target.start_request(target.make_body(stream=True), len(target.make_body(stream=True))).close()
    yield Counter()


@contextmanager
def hold_bodies(target: Target, count: int) -> Iterator[Counter[str]]:
    """Hold connections whose body never ends."""
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(target.start_request(b"{", 1000))
        yield Counter()


@contextmanager
def hold_connections(target: Target, count: int) -> Iterator[Counter[str]]:
    """Hold connections without a request, a third of them with the start of a head."""
    outcomes = Counter[str]()
    with ExitStack() as stack:
        connections = []
        for index in range(count):
            connection = target.connect(b"GET /health HTTP/1.1\r\nX: " if index % 3 == 0 else b"")
            connections.append(stack.enter_context(connection))
        yield outcomes
        outcomes["closed by the server"] = sum(map(is_closed, connections))


def is_closed(connection: socket.socket) -> bool:
    """Return whether the server has closed a connection."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextmanager
def run_threads(functions: Sequence[Callable[[], object]]) -> Iterator[None]:
    """Run functions in threads, and wait for them at the end."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()


def measure_beside(
    target: Target, name: str, count: int, hostile: Callable[[], Any], *, min_time_s: float = 0.0
) -> dict[str, Any]:
    """Measure requests on the quiet server and beside a hostile client."""
    quiet_ms = target.measure_latencies(count)
    start_s = time.perf_counter()
    with hostile() as outcomes:
        latencies_ms = target.measure_latencies(count)
        while time.perf_counter() - start_s < min_time_s:
            latencies_ms = np.concatenate([latencies_ms, target.measure_latencies(10)])
    time.sleep(_SETTLE_S)
    quiet_p99_ms, p99_ms = (float(np.quantile(values, 0.99)) for values in (quiet_ms, latencies_ms))
    return {
        "name": name, "requests": len(latencies_ms), "quiet_p50_ms": round(float(np.median(quiet_ms)), 2),
        "quiet_p99_ms": round(quiet_p99_ms, 2), "p50_ms": round(float(np.median(latencies_ms)), 2),
        "p99_ms": round(p99_ms, 2), "max_ms": round(float(latencies_ms.max()), 2),
        "p99_ratio": round(p99_ms / quiet_p99_ms, 3), "outcomes": dict(outcomes), **target.read_usage(),
    }  # fmt: skip


def send_mixed(target: Target, count: int, seed: int) -> dict[str, int]:
    """Send mixed requests from several threads; return the number of each status."""
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    image = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it"}]
    bodies = [
        target.make_body(), target.make_body(stream=True), target.make_body(image),
        target.make_body(image, stream=True), target.make_body(top_k=5), target.make_body(max_tokens=0),
        target.make_body("three " * 20_000), b"{", target.make_body(model="unknown"),
    ]  # fmt: skip
    rng = random.Random(seed)
    choices = [rng.randrange(len(bodies) + 1) for _ in range(count)]

    def send(choice: int) -> str:
        if choice < len(bodies):
            return str(target.post(bodies[choice]))
        connection = target.start_request(bodies[1], len(bodies[1]))
        if rng.random() < 0.5:
            connection.recv(50)
        connection.close()
        return "disconnected"

    with ThreadPoolExecutor(_PARALLEL) as threads:
        return dict(Counter(threads.map(send, choices)))


def run_soak(target: Target, effort: float, seed: int = 0) -> dict[str, Any]:
    """Run all parts.

    Args:
        target: Server.
        effort: Fraction of the full amount, above 0; 1 is 200 measured requests per part and 10,000 mixed.
            Below 0.01 there are fewer hostile connections as well.
        seed: Seed of the mixed requests.

    Returns:
        Usage after the warm-up, results of each part and of the mixed requests, and missed targets.
    """
    count, num_mixed = max(int(200 * effort), 5), max(int(10_000 * effort), 20)
    scale = min(1.0, 100.0 * effort)
    target.measure_latencies(20)
    send_mixed(target, max(num_mixed // 20, 20), seed + 1)
    time.sleep(_SETTLE_S)
    start = target.read_usage()
    parts = [
        measure_beside(target, "two messages of 4 MB", count, lambda: send_texts(target, 4_000_000)),
        measure_beside(target, "two messages of 30 MB", count, lambda: send_texts(target, 30_000_000)),
        measure_beside(target, "millions of values", count, lambda: send_values(target)),
        measure_beside(target, "abandoned requests", count, lambda: send_abandoned(target)),
        measure_beside(
            target, "bodies that never end", count, lambda: hold_bodies(target, math.ceil(100 * scale))
        ),
        measure_beside(
            target, "connections without a request", count,
            lambda: hold_connections(target, math.ceil(900 * scale)),
            min_time_s=12.0 if effort >= 0.1 else 0.0,
        ),
    ]  # fmt: skip
    mixed: list[dict[str, Any]] = []
    for index in range(5):
        statuses = send_mixed(target, num_mixed // 5, seed + 2 + index)
        time.sleep(_SETTLE_S)
        mixed.append({"statuses": statuses, **target.read_usage()})
    missed = [part["name"] for part in parts if part["p99_ratio"] > MAX_P99_RATIO]
    usages = [*parts, *mixed]
    if usages[-1]["memory_mib"] > MAX_MEMORY_RATIO * start["memory_mib"]:
        missed.append("memory")
    if usages[-1]["files"] > start["files"] + MAX_MORE_FILES:
        missed.append("descriptors")
    return {"effort": effort, "start": start, "parts": parts, "mixed": mixed, "missed": missed}


def serve_digits() -> None:
    """Serve the shipped model with its full plan on a free port."""
    from sparseflow.adaptive.data import get_pretrained_dir
    from sparseflow.adaptive.engine.engine import Engine
    from sparseflow.adaptive.engine.requests.request import FixedPlan
    from sparseflow.adaptive.plan.adapter import get_adapter
    from sparseflow.adaptive.plan.runtime import PlanRuntime
    from sparseflow.adaptive.prompts.chat import PromptBuilder
    from sparseflow.adaptive.prompts.model_folder import open_folder
    from sparseflow.adaptive.serve import EngineBackend, Service, create_app, run_server
    from sparseflow.adaptive.serve.backend import BackendJob, ServiceTime

    class ConstantForecast:
        def min_service_ms(self, *args: Any, **options: Any) -> ServiceTime:
            return ServiceTime(1.0, 1.0)

        def predict(self, *args: Any, **options: Any) -> tuple[float, float]:
            return 1.0, 1.0

        def observe(self, *args: Any, **options: Any) -> None:
            pass

    # Threads of a small operator wait for each other, which takes long on a busy machine.
    torch.set_num_threads(1)
    folder = open_folder(get_pretrained_dir("digits"))
    adapter = get_adapter(folder.model)
    runtime = PlanRuntime(adapter)
    engine = Engine(
        adapter, runtime, plans=[runtime.geometry.full_plan()], max_batch=4, max_tokens=folder.context
    )
    engine.warm_up()

    def decide(job: BackendJob) -> FixedPlan:
        return FixedPlan(plan=runtime.geometry.full_plan(images=job.prompt.images > 0))

    stop = folder.model.generation_config.eos_token_id
    backend = EngineBackend(
        engine, decider=decide, forecast=ConstantForecast(), stop=stop if isinstance(stop, list) else [stop]
    )
    prompts = PromptBuilder(folder.tokenizer, context=folder.context, image_processor=folder.image_processor)
    run_server(create_app(Service("digits", backend, prompts)), port=0)


@contextmanager
def start_digits() -> Iterator[Target]:
    """Serve the shipped model in another process."""
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = json.loads(process.stdout.readline())
            yield Target(line["url"], line["pid"], "digits")
        finally:
            process.terminate()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak and write its record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--url", help="server to test; default: the shipped model digits")
    parser.add_argument("--pid", type=int, help="process of the server at --url")
    parser.add_argument("--model", default="digits", help="name of the model at --url")
    parser.add_argument("--effort", type=float, default=0.1, help="fraction of the full amount")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        serve_digits()
        return 0
    if not args.effort > 0.0 or (args.url is None) != (args.pid is None):
        parser.error("--effort must be positive, and --url and --pid belong together")
    with ExitStack() as stack:
        if args.url is None:
            target = stack.enter_context(start_digits())
        else:
            target = Target(args.url, args.pid, args.model)
        results = run_soak(target, args.effort, args.seed)
    record = {
        "environment": collect_environment("cpu", seed=args.seed),
        "targets": {
            "p99_ratio": MAX_P99_RATIO, "memory_ratio": MAX_MEMORY_RATIO, "more_files": MAX_MORE_FILES,
        },
        **results,
    }  # fmt: skip
    if args.out is not None:
        write_json(args.out, record, indent=1)
    for part in results["parts"]:
        print(json.dumps(part))
    print(json.dumps({"start": results["start"], "mixed": results["mixed"], "missed": results["missed"]}))
    return 1 if results["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
