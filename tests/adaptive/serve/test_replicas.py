"""Replicas on Ray Serve: by a stand-in for it, and – slowly – by itself."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest

from sparseflow.adaptive.serve import replicas
from sparseflow.adaptive.serve.replicas import Replicas
from sparseflow.errors import DeviceError, InputError, MissingExtraError, RunError
from tests.adaptive.serve.fake import MODEL, Fake, eventually, make_app, user

ROOT = Path(__file__).parents[3]


class Deployment:
    """As Ray's: what it was made of."""

    def __init__(self, of: Any, **options: Any) -> None:
        self.of, self.given = of, options

    def options(self, **more: Any) -> Deployment:
        return Deployment(self.of, **{**self.given, **more})

    def bind(self) -> Deployment:
        return self


class Ray:
    """Ray and Ray Serve, as far as they are asked for here."""

    def __init__(self, *, initialized: bool = False, error: Exception | None = None) -> None:
        self.initialized, self.error = initialized, error
        self.did: list[str] = []
        self.ran: list[Deployment] = []
        self.how: dict[str, Any] = {}

    def is_initialized(self) -> bool:
        return self.initialized

    def init(self, **how: Any) -> None:
        self.how = how
        if how.get("address") == "nowhere":
            raise ConnectionError("refused")

    def shutdown(self) -> None:
        self.did.append("shutdown")

    def start(self, http_options: dict[str, Any]) -> None:
        self.did.append(f"start {http_options['host']}")

    def ingress(self, build: Any) -> Any:
        def decorate(cls: Any) -> Any:
            cls.build = staticmethod(build)
            return cls

        return decorate

    def get_replica_context(self) -> Any:
        return SimpleNamespace(replica_id=SimpleNamespace(unique_id="r1"))

    def deployment(self, of: Any, name: str) -> Deployment:
        return Deployment(of, name=name)

    def run(self, deployment: Deployment, *, name: str, route_prefix: str) -> None:
        if self.error is not None:
            raise self.error
        self.ran.append(deployment)
        self.did.append(f"run {name} at {route_prefix}")

    def delete(self, name: str) -> None:
        self.did.append(f"delete {name}")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    return standing(monkeypatch, Ray())


def standing(monkeypatch: pytest.MonkeyPatch, one: Ray) -> Ray:
    serve = SimpleNamespace(
        start=one.start, ingress=one.ingress, get_replica_context=one.get_replica_context, run=one.run,
        deployment=one.deployment, delete=one.delete, shutdown=lambda: one.did.append("serve.shutdown"),
    )  # fmt: skip
    monkeypatch.setattr(replicas, "_ray_serve", lambda: (one, serve))
    return one


def test_from_start_to_end(ray: Ray) -> None:
    with Replicas(make_app, replicas=3, port=0, gpus_each=1.0, drain_s=7.0) as running:
        assert running.url == f"http://127.0.0.1:{running.port}"
        assert running.port > 0
        given = ray.ran[0].given
        assert given["num_replicas"] == 3
        assert given["ray_actor_options"] == {"num_cpus": 1.0, "num_gpus": 1.0}
        assert given["graceful_shutdown_timeout_s"] > 7.0
        assert "user_config" not in given
    # They are told to shut their gates before their address is forgotten.
    assert ray.ran[1].given["user_config"] == {"drain_s": 7.0}
    run = "run sparseflow at /"
    assert ray.did == ["start 127.0.0.1", run, run, "delete sparseflow", "serve.shutdown", "shutdown"]
    running.close()
    assert len(ray.did) == 6


def test_a_cluster_that_was_there_before_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = standing(monkeypatch, Ray(initialized=True))
    Replicas(make_app, replicas=1, cluster="auto").close()
    assert ray.how["address"] == "auto"
    assert "shutdown" not in ray.did


def test_a_replica_has_an_app_and_a_gate_of_its_own(ray: Ray) -> None:
    fake = Fake()
    Replicas(lambda: make_app(fake), replicas=1).close()
    replica = ray.ran[0].of()
    replica.check_health()
    app = replica.build()
    service = app.state.service
    service.metrics.ended("answered")
    assert 'replica="r1"' in service.metrics.exposition()[0].decode()
    replica.check_health()

    async def story() -> None:
        await service.open()
        await replica.reconfigure({"drain_s": 1.0})
        await replica.draining
        assert service.gate.state == "draining"
        await service.close()

    asyncio.run(story())
    fake.alive = False
    with pytest.raises(RunError, match="engine has stopped"):
        replica.check_health()


def test_replicas_that_do_not_start_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = standing(monkeypatch, Ray(error=RuntimeError("no room")))
    with pytest.raises(RunError, match="did not start: no room"):
        Replicas(make_app, replicas=1)
    assert ray.did[-2:] == ["serve.shutdown", "shutdown"]


@pytest.mark.usefixtures("ray")
def test_wrong_arguments() -> None:
    for wrong in ({"replicas": 0}, {"cpus_each": -1.0}, {"gpus_each": -1.0}, {"drain_s": float("nan")}):
        with pytest.raises(InputError, match="must be at least 1"):
            Replicas(make_app, **{"replicas": 1, **wrong})  # pyright: ignore[reportArgumentType]
    with pytest.raises(DeviceError, match="no Ray cluster at 'nowhere'"):
        Replicas(make_app, replicas=1, cluster="nowhere")


def test_ray_without_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setattr(replicas, "require", lambda *_: SimpleNamespace())
    with pytest.raises(MissingExtraError, match=r"ray\[serve\].*sparseflow\[distributed\]"):
        Replicas(make_app, replicas=1)


PROGRAM = """
from sparseflow.adaptive.serve import serve_replicas
from tests.adaptive.serve.fake import Fake, Script, make_app

def make():
    return make_app(Fake(scripts={"long": Script("word " * 40, token_ms=10.0)}))

serve_replicas(make, replicas=2, port=0, cpus_each=0.1)
print("closed", flush=True)
"""


@pytest.mark.slow
def test_two_replicas_on_ray_serve() -> None:
    for package in ("ray", "grpc_reflection", "aiohttp"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"Ray Serve needs {package}")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        lines = iter(process.stdout.readline, "")
        line = json.loads(next(line for line in lines if line.startswith("{")))
        assert (line["event"], line["replicas"]) == ("listening", 2)
        with (
            httpx2.Client(base_url=line["url"]) as http,
            openai.OpenAI(base_url=f"{line['url']}/v1", api_key="any", max_retries=0) as client,
        ):
            for _ in range(8):
                found: Any = client.chat.completions.create(
                    model=MODEL, messages=user("Hi"), extra_body={"latency_budget_ms": 20_000}
                )
                assert found.choices[0].message.content == "Hello, wörld!"
                assert found.sparseflow["budget_met"] is True
            with pytest.raises(openai.UnprocessableEntityError):
                client.chat.completions.create(
                    model=MODEL, messages=user("Hi"), extra_body={"latency_budget_ms": 1}
                )
            seen: set[str] = set()

            def both() -> bool:
                seen.update(re.findall(r'replica="(\w+)"', http.get("/metrics").text))
                return len(seen) == 2

            eventually(both)
            stream = client.chat.completions.create(
                model=MODEL, messages=user("long"), stream=True, max_tokens=400
            )
            chunks = [next(iter(stream))]
            process.send_signal(signal.SIGTERM)
            chunks += list(stream)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "word " * 40
        out, _ = process.communicate(timeout=60.0)
        # Ray says things of its own before.
        assert process.returncode == 0
        assert out.endswith("closed\n")
    finally:
        process.kill()
        process.communicate()
