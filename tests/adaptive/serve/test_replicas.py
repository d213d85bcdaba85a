"""Tests of replicas, with a fake of Ray Serve and (slow) with Ray Serve itself."""

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
from tests.adaptive.serve.fake import MODEL, FakeBackend, make_app, make_messages, wait_until

ROOT = Path(__file__).parents[3]


class FakeDeployment:
    """Records the options of a deployment."""

    def __init__(self, replica_class: Any, **settings: Any) -> None:
        self.replica_class, self.settings = replica_class, settings

    def options(self, **changes: Any) -> FakeDeployment:
        return FakeDeployment(self.replica_class, **{**self.settings, **changes})

    def bind(self) -> FakeDeployment:
        return self


class FakeRay:
    """Records the calls of Ray and Ray Serve."""

    def __init__(self, *, initialized: bool = False, error: Exception | None = None) -> None:
        self.initialized, self.error = initialized, error
        self.calls: list[str] = []
        self.deployments: list[FakeDeployment] = []
        self.init_options: dict[str, Any] = {}

    def is_initialized(self) -> bool:
        return self.initialized

    def init(self, **options: Any) -> None:
        self.init_options = options
        if options.get("address") == "nowhere":
            raise ConnectionError("refused")

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def start(self, http_options: dict[str, Any]) -> None:
        self.calls.append(f"start {http_options['host']}")

    def ingress(self, build: Any) -> Any:
        def decorate(cls: Any) -> Any:
            cls.build = staticmethod(build)
            return cls

        return decorate

    def get_replica_context(self) -> Any:
        return SimpleNamespace(replica_id=SimpleNamespace(unique_id="r1"))

    def deployment(self, replica_class: Any, name: str) -> FakeDeployment:
        return FakeDeployment(replica_class, name=name)

    def run(self, deployment: FakeDeployment, *, name: str, route_prefix: str) -> None:
        if self.error is not None:
            raise self.error
        self.deployments.append(deployment)
        self.calls.append(f"run {name} at {route_prefix}")

    def delete(self, name: str) -> None:
        self.calls.append(f"delete {name}")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return install(monkeypatch, FakeRay())


def install(monkeypatch: pytest.MonkeyPatch, ray: FakeRay) -> FakeRay:
    serve = SimpleNamespace(
        start=ray.start, ingress=ray.ingress, get_replica_context=ray.get_replica_context, run=ray.run,
        deployment=ray.deployment, delete=ray.delete, shutdown=lambda: ray.calls.append("serve.shutdown"),
    )  # fmt: skip
    monkeypatch.setattr(replicas, "_import_ray_serve", lambda: (ray, serve))
    return ray


def test_replicas_start_and_close_call_ray_in_order(ray: FakeRay) -> None:
    with Replicas(make_app, replicas=3, port=0, gpus_per_replica=1.0, drain_s=7.0) as running:
        assert running.url == f"http://127.0.0.1:{running.port}"
        assert running.port > 0
        settings = ray.deployments[0].settings
        assert settings["num_replicas"] == 3
        assert settings["ray_actor_options"] == {"num_cpus": 1.0, "num_gpus": 1.0}
        assert settings["graceful_shutdown_timeout_s"] > 7.0
        assert "user_config" not in settings
    # Replicas drain before the route is deleted.
    assert ray.deployments[1].settings["user_config"] == {"drain_s": 7.0}
    run = "run sparseflow at /"
    assert ray.calls == ["start 127.0.0.1", run, run, "delete sparseflow", "serve.shutdown", "shutdown"]
    running.close()
    assert len(ray.calls) == 6


def test_close_of_existing_cluster_keeps_ray_running(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = install(monkeypatch, FakeRay(initialized=True))
    Replicas(make_app, replicas=1, cluster="auto").close()
    assert ray.init_options["address"] == "auto"
    assert "shutdown" not in ray.calls


def test_replica_reconfigure_drains_its_app(ray: FakeRay) -> None:
    fake = FakeBackend()
    Replicas(lambda: make_app(fake), replicas=1).close()
    replica = ray.deployments[0].replica_class()
    replica.check_health()
    app = replica.build()
    service = app.state.service
    service.metrics.count_end("answered")
    assert 'replica="r1"' in service.metrics.export()[0].decode()
    replica.check_health()

    async def scenario() -> None:
        await service.open()
        await replica.reconfigure({"drain_s": 1.0})
        await replica.drain_task
        assert service.drain.state == "draining"
        await service.close()

    asyncio.run(scenario())
    fake.alive = False
    with pytest.raises(RunError):
        replica.check_health()


def test_replicas_failed_start_shuts_down_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = install(monkeypatch, FakeRay(error=RuntimeError("simulated")))
    with pytest.raises(RunError, match="simulated"):
        Replicas(make_app, replicas=1)
    assert ray.calls[-2:] == ["serve.shutdown", "shutdown"]


@pytest.mark.usefixtures("ray")
def test_replicas_invalid_arguments_raise() -> None:
    for name, value in (
        ("replicas", 0),
        ("cpus_per_replica", -1.0),
        ("gpus_per_replica", -1.0),
        ("drain_s", float("nan")),
    ):
        with pytest.raises(InputError, match=rf"`{name}` \(={value}\)"):
            Replicas(make_app, **{"replicas": 1, name: value})  # pyright: ignore[reportArgumentType]
    with pytest.raises(DeviceError, match="nowhere"):
        Replicas(make_app, replicas=1, cluster="nowhere")


def test_replicas_without_ray_serve_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setattr(replicas, "require", lambda *_: SimpleNamespace())
    with pytest.raises(MissingExtraError, match=r"ray\[serve\]"):
        Replicas(make_app, replicas=1)


PROGRAM = """
from sparseflow.adaptive.serve import serve_replicas
from tests.adaptive.serve.fake import FakeBackend, Script, make_app

def create_app():
    return make_app(FakeBackend(scripts={"long": Script("word " * 40, token_ms=10.0)}))

serve_replicas(create_app, replicas=2, port=0, cpus_per_replica=0.1)
print("closed", flush=True)
"""


@pytest.mark.slow
def test_serve_replicas_on_ray_serve_answers_and_drains() -> None:
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
                completion: Any = client.chat.completions.create(
                    model=MODEL, messages=make_messages("Hi"), extra_body={"latency_budget_ms": 20_000}
                )
                assert completion.choices[0].message.content == "Hello, wörld!"
                assert completion.sparseflow["budget_met"] is True
            with pytest.raises(openai.UnprocessableEntityError):
                client.chat.completions.create(
                    model=MODEL, messages=make_messages("Hi"), extra_body={"latency_budget_ms": 1}
                )
            replica_ids: set[str] = set()

            def both_replicas_answered() -> bool:
                replica_ids.update(re.findall(r'replica="(\w+)"', http.get("/metrics").text))
                return len(replica_ids) == 2

            wait_until(both_replicas_answered)
            stream = client.chat.completions.create(
                model=MODEL, messages=make_messages("long"), stream=True, max_tokens=400
            )
            chunks = [next(iter(stream))]
            process.send_signal(signal.SIGTERM)
            chunks += list(stream)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "word " * 40
        out, _ = process.communicate(timeout=60.0)
        # Ray prints its own messages first.
        assert process.returncode == 0
        assert out.endswith("closed\n")
    finally:
        process.kill()
        process.communicate()
