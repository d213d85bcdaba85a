r"""Latency budgets under load: Poisson requests to the server, then a load step (line 4).

::

    export PYTHONPATH=src:.
    python benchmarks/adaptive/load.py FOLDER --profile predictor.json --device cuda --requests 5000 \
        --out results/adaptive/load.json
    python benchmarks/adaptive/load.py FOLDER --profile predictor.json --http --requests 500 --out http.json

A request is the JSON of a client, with an image as a data URL, a question and a budget. It is parsed,
prepared, admitted, queued and run as in the server, without HTTP. With `--http`, uvicorn and a local client
are included. Latency counts from the scheduled send time, so a late event loop counts, to the last token
(with `--http`, to the end of the response).

Questions are those of the Grid-VQA test split for a Grid-VQA model, with the maximum answer length of their
kind as the number of tokens; for other models random images and words. Budgets are log-uniform from the
minimum of an idle server to `--max-budget-ratio` times the p99 of the slowest plan. Capacity is the
throughput of such requests with all slots in use; the load is a fraction of it, and arrivals are Poisson. The
record also contains the fraction of time in which the engine works.

The record contains the attainment of guaranteed requests and of all requests, the fractions of overloaded
(429) and infeasible (422) refusals, the accuracy, and, after the load step, the time until the attainment of
a sliding window recovers. All requests are saved to a Parquet file next to the JSON file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from models import compute_throughput, make_content, resolve_settings, run_server, write_table

from benchmarks.claims import Claim, device_suffix, record_claims
from sparseflow.adaptive.engine.engine import Engine
from sparseflow.adaptive.predictor import PlanLatencyPredictor
from sparseflow.adaptive.prompts.messages import ApiError, Prompt
from sparseflow.adaptive.serve.engine_backend import EngineBackend, PredictorForecast
from sparseflow.adaptive.serve.model_app import create_model_app
from sparseflow.adaptive.serve.service import Service
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic

TARGET, RECOVERY_S = 0.99, 5.0
WINDOW_S = 1.0
SHED = ("overloaded", "engine_stopped", "out_of_memory", "shutting_down")
PHASES = ("steady", "step")
_CONNECTIONS = 256
"""Maximum number of client connections; more than a server admits."""


@dataclass(kw_only=True)
class Question:
    """A question that is sent repeatedly.

    Attributes:
        content: Content of the user message.
        answer: Correct answer; None if unknown.
        new_tokens: Maximum number of tokens that the client requests.
        prompt: Prompt that the server builds.
        budgets_ms: Range of budgets.
    """

    content: list[dict[str, Any]]
    answer: str | None
    new_tokens: int
    prompt: Prompt | None = None
    budgets_ms: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """A request and its outcome.

    Attributes:
        phase: Index into `PHASES`.
        due_s: Scheduled send time since the start of the phase.
        ended_s: End time since the start of the phase.
        budget_ms: Latency budget.
        outcome: "answered", the error code, or "error: " with the exception.
        plan: Plan ID, or "".
        p50_ms: Predicted median; NaN if refused.
        p99_ms: Predicted p99; NaN if refused.
        measured_ms: Latency from the scheduled send time to the last token; NaN if refused.
        right: 1 if the answer is correct, else 0; NaN if unknown.
        retry: Whether a refusal contains a retry time.
        least_ms: Minimum budget that a refusal contains; NaN without.
    """

    phase: int
    due_s: float
    ended_s: float
    budget_ms: float
    outcome: str
    plan: str = ""
    p50_ms: float = math.nan
    p99_ms: float = math.nan
    measured_ms: float = math.nan
    right: float = math.nan
    retry: bool = False
    least_ms: float = math.nan

    @property
    def met(self) -> bool:
        return self.measured_ms <= self.budget_ms


SendRequest = Callable[[bytes, float], Awaitable[dict[str, Any]]]
"""Sends a body that was due at a time; returns the answer with `measured_ms`, or raises `ApiError`."""


def load_questions(args: argparse.Namespace, service: Service) -> list[Question]:
    """Return questions of the test split, or random ones.

    The number of tokens is the maximum answer length of the question's kind.
    """
    from sparseflow.adaptive.grid_vqa.model import SETTINGS

    words = service.prompts.tokenizer
    if (args.model / SETTINGS).is_file():
        from sparseflow.adaptive.grid_vqa.config import VqaConfig
        from sparseflow.adaptive.grid_vqa.dataset import VqaDataset
        from sparseflow.adaptive.grid_vqa.task import locate_archives

        record = json.loads((args.model / SETTINGS).read_text("utf-8"))
        data = VqaDataset(
            locate_archives(VqaConfig.model_validate(record["settings"]), args.archives, args.model)
        )
        samples = list(data.iterate_samples("test", args.questions))
        longest: dict[str, int] = {}
        for sample in samples:
            length = 1 + len(words.encode(sample.answer, add_special_tokens=False))
            longest[sample.kind] = max(length, longest.get(sample.kind, 0))
        return [
            Question(
                content=make_content(sample.question, sample.canvas), answer=sample.answer,
                new_tokens=min(longest[sample.kind], args.new_tokens),
            )
            for sample in samples
        ]  # fmt: skip
    random = np.random.default_rng(args.seed)
    questions = []
    for _ in range(args.questions):
        text = words.decode(random.integers(3, 1000, size=12).tolist(), skip_special_tokens=True)
        canvas = random.integers(0, 256, (96, 96, 3), np.uint8) if service.prompts.takes_images else None
        content = make_content(text, canvas)
        questions.append(Question(content=content, answer=None, new_tokens=args.new_tokens))
    return questions


def make_body(service: Service, question: Question, budget_ms: float, **more: str) -> bytes:
    """Build the request body."""
    content = {
        "model": service.model, "messages": [{"role": "user", "content": question.content}],
        "max_tokens": question.new_tokens, "temperature": 0.0, "seed": 0, "latency_budget_ms": budget_ms,
        **more,
    }  # fmt: skip
    return json.dumps(content).encode()


def set_budget_range(
    args: argparse.Namespace, service: Service, question: Question, predictor: PlanLatencyPredictor
) -> None:
    """Set prompt and budget range of a question, from an idle server."""
    # In a thread of the server, because the minimum budget includes the preparation time of such threads.
    prepared = service._threads.submit(service._prepare_sync, make_body(service, question, 1.0), {}).result()
    prompt, least_ms = prepared.prompt, service._min_idle_ms(prepared, question.new_tokens)
    _, p99 = predictor.predict_all(
        text_tokens=prompt.text_tokens, images=predictor.metadata.count_images(prompt.vision_tokens),
        new_tokens=question.new_tokens,
    )  # fmt: skip
    question.prompt = prompt
    question.budgets_ms = (least_ms, max(args.max_budget_ratio * float(p99.max()), 1.01 * least_ms))


def connect_directly(service: Service) -> SendRequest:
    """Return a sender that calls the service on its event loop, without HTTP."""

    async def send_request(content: bytes, due_s: float) -> dict[str, Any]:
        async def read() -> bytes:
            return content

        answer = await service.submit(read, {}, due_s)
        try:
            await answer.wait_first_token()
            text = "".join([piece async for piece in answer.iter_text()])
            return {"text": text, **answer.report()}
        finally:
            answer.disconnect()

    return send_request


def connect_http(url: str) -> SendRequest:
    """Return a sender that opens an HTTP connection per request, in threads."""
    address, threads = urlsplit(url), ThreadPoolExecutor(_CONNECTIONS)

    def post(content: bytes) -> tuple[int, Mapping[str, str], bytes]:
        connection = HTTPConnection(str(address.hostname), address.port, timeout=120.0)
        try:
            connection.request("POST", "/v1/chat/completions", content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return (
                response.status,
                {name.lower(): value for name, value in response.getheaders()},
                response.read(),
            )
        finally:
            connection.close()

    async def send_request(content: bytes, due_s: float) -> dict[str, Any]:
        status, headers, answer = await asyncio.get_running_loop().run_in_executor(threads, post, content)
        measured_ms = 1e3 * (time.perf_counter() - due_s)
        response = json.loads(answer)
        if status != 200:
            retry = headers.get("retry-after")
            raise ApiError(
                status, response["error"]["message"], code=response["error"]["code"],
                retry_after_s=None if retry is None else float(retry), more=response["error"],
            )  # fmt: skip
        text = response["choices"][0]["message"]["content"]
        return {"text": text, **response["sparseflow"], "measured_ms": measured_ms}

    return send_request


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Requests at one rate.

    Attributes:
        phase: Index into `PHASES`; None for requests that are not recorded.
        rate: Requests per second.
        count: Minimum number of requests.
        seconds: Minimum duration.
    """

    phase: int | None
    rate: float
    count: int = 0
    seconds: float = 0.0


def get_engine(service: Service) -> Engine:
    """Return the engine of a service."""
    backend = service.backend
    assert isinstance(backend, EngineBackend)
    return backend._engine


class LoadGenerator:
    """Sends requests and records their outcomes.

    Args:
        args: Options.
        service: Service.
        send_request: Sends a request.
        questions: Questions.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        service: Service,
        send_request: SendRequest,
        questions: Sequence[Question],
    ) -> None:
        self._args, self._service, self._send_request, self._questions = (
            args,
            service,
            send_request,
            questions,
        )
        self._random = np.random.default_rng(args.seed)
        self.sent: list[RequestRecord] = []
        self._errors: set[str] = set()

    def sample_request(self) -> tuple[Question, float]:
        """Return a random question and budget."""
        question = self._questions[int(self._random.integers(len(self._questions)))]
        low, high = np.log(question.budgets_ms)
        return question, float(np.exp(self._random.uniform(low, high)))

    async def measure_capacity(self, count: int) -> float:
        """Return requests per second with as many concurrent requests as slots."""
        requests, end_times_s = [self.sample_request() for _ in range(count)], []

        async def send_sequentially() -> None:
            while requests:
                content = make_body(self._service, *requests.pop(), on_infeasible="best_effort")
                await self._send_request(content, time.perf_counter())
                end_times_s.append(time.perf_counter())

        async with asyncio.TaskGroup() as group:
            for _ in range(self._service.backend.slots):
                group.create_task(send_sequentially())
        return compute_throughput(end_times_s)

    async def send_segments(self, *segments: Segment) -> list[tuple[float, float]]:
        """Send Poisson requests, segment by segment without a pause.

        Returns:
            Duration and busy time of the engine for each segment, seconds.
        """
        engine, durations = get_engine(self._service), []
        due = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for segment in segments:
                start_s, busy_s, num_sent = due, engine.busy_s, 0
                while num_sent < segment.count or due - start_s < segment.seconds:
                    due += float(self._random.exponential(1.0 / segment.rate))
                    await asyncio.sleep(max(due - time.perf_counter(), 0.0))
                    group.create_task(self._send(segment.phase, start_s, due))
                    num_sent += 1
                durations.append((due - start_s, engine.busy_s - busy_s))
        return durations

    async def _send(self, phase: int | None, start_s: float, due_s: float) -> None:
        question, budget_ms = self.sample_request()
        base: dict[str, Any] = {"phase": phase, "due_s": due_s - start_s, "budget_ms": budget_ms}
        append = self.sent.append if phase is not None else _discard
        try:
            response = await self._send_request(make_body(self._service, question, budget_ms), due_s)
            predicted = response["predicted_ms"] or {"p50": math.nan, "p99": math.nan}
            fields = {
                "plan": response["plan"]["id"], "p50_ms": predicted["p50"], "p99_ms": predicted["p99"],
                "measured_ms": response["measured_ms"],
                "right": float(response["text"].strip() == question.answer),
            }  # fmt: skip
            if question.answer is None:
                fields["right"] = math.nan
        except ApiError as refusal:
            ended_s = time.perf_counter() - start_s
            retry = refusal.retry_after_s is not None
            least_ms = float(refusal.more.get("least_feasible_ms", math.nan))
            append(
                RequestRecord(**base, ended_s=ended_s, outcome=refusal.code, retry=retry, least_ms=least_ms)
            )
        except Exception as error:  # An error of the connection or answer fails a single request.
            ended_s, error_type = time.perf_counter() - start_s, type(error).__name__
            if error_type not in self._errors:
                self._errors.add(error_type)
                print(f"a request failed: {error!r}", file=sys.stderr, flush=True)
            append(RequestRecord(**base, ended_s=ended_s, outcome=f"error: {error_type}"))
        else:
            append(RequestRecord(**base, **fields, ended_s=time.perf_counter() - start_s, outcome="answered"))


def _discard(sent: RequestRecord) -> None:
    """Ignore a request that is not recorded."""


def estimate_share(part: int, total: int) -> dict[str, float]:
    """Return a fraction and its 95 % interval (Wilson)."""
    if not total:
        return {"share": math.nan, "low": 0.0, "high": 1.0, "of": 0}
    p, z = part / total, 1.96
    middle, scale = p + z * z / (2 * total), 1.0 + z * z / total
    half = z * math.sqrt(p * (1.0 - p) / total + z * z / (4 * total * total))
    return {"share": p, "low": (middle - half) / scale, "high": (middle + half) / scale, "of": total}


def summarize(requests: Sequence[RequestRecord], duration_s: float, busy_s: float) -> dict[str, Any]:
    """Summarize the requests of a phase."""
    answered = [request for request in requests if request.outcome == "answered"]
    refused: dict[str, int] = {}
    for request in requests:
        if request.outcome != "answered":
            refused[request.outcome] = refused.get(request.outcome, 0) + 1
    infeasible = refused.get("budget_infeasible", 0)
    failed = sum(count for code, count in refused.items() if code not in (*SHED, "budget_infeasible"))
    latencies = np.array([request.measured_ms for request in answered]) if answered else np.array([math.nan])
    predicted = [request for request in answered if math.isfinite(request.p99_ms)]
    scores = [request.right for request in answered if math.isfinite(request.right)]
    plans: dict[str, int] = {}
    for request in answered:
        plans[request.plan] = plans.get(request.plan, 0) + 1
    met = sum(request.met for request in answered)
    budgets = [request.budget_ms for request in requests] or [math.nan]
    return {
        "requests": len(requests),
        "seconds": duration_s,
        "requests_per_s": len(requests) / duration_s,
        "budget_ms": np.quantile(budgets, (0.0, 0.5, 1.0)).tolist(),
        "attainment": estimate_share(met, len(answered) + failed),
        "attainment_of_all": estimate_share(met, len(requests)),
        "attainment_of_feasible": estimate_share(met, len(requests) - infeasible),
        "refused": refused,
        "failed": failed,
        "shed_share": sum(refused.get(code, 0) for code in SHED) / max(len(requests), 1),
        "infeasible_share": infeasible / max(len(requests), 1),
        "goodput_per_s": met / duration_s,
        "p50_ms": float(np.quantile(latencies, 0.5)),
        "p99_ms": float(np.quantile(latencies, 0.99)),
        "utilisation": busy_s / duration_s,
        "below_p99": estimate_share(
            sum(request.measured_ms <= request.p99_ms for request in predicted), len(predicted)
        ),
        "accuracy": float(np.mean(scores)) if scores else None,
        "plans": plans,
    }


def replace_non_finite(value: Any) -> Any:
    """Replace NaN and infinity by None, for JSON."""
    if isinstance(value, Mapping):
        return {name: replace_non_finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def measure_recovery(requests: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the time after which the attainment of a sliding window stays above the target."""
    ended = sorted(
        (request for request in requests if request.outcome == "answered"),
        key=lambda request: request.ended_s,
    )
    times = np.array([request.ended_s for request in ended])
    met = np.array([request.met for request in ended], dtype=float)
    refusals = [request for request in requests if request.outcome not in ("answered", "budget_infeasible")]
    track, recovered_s = [], 0.0
    for end_s in np.arange(WINDOW_S, times.max(initial=0.0) + WINDOW_S, WINDOW_S / 4):
        in_window = (times > end_s - WINDOW_S) & (times <= end_s)
        if in_window.any():
            track.append(
                [round(float(end_s), 2), round(float(met[in_window].mean()), 4), int(in_window.sum())]
            )
            if met[in_window].mean() < TARGET:
                recovered_s = float(end_s)
    return {
        "window_s": WINDOW_S,
        "back_after_s": recovered_s,
        "track": track,
        "refused": len(refusals),
        "refused_rightly": estimate_share(
            sum(request.outcome in SHED and request.retry for request in refusals), len(refusals)
        ),
    }


def write_samples(path: Path, requests: Sequence[RequestRecord]) -> None:
    """Write a row per request."""
    import pyarrow as pa

    columns: dict[str, Any] = {}
    types = {"int": pa.int64(), "str": pa.string(), "bool": pa.bool_()}
    for field in fields(RequestRecord):
        values = [getattr(request, field.name) for request in requests]
        if field.type == "float":
            columns[field.name] = pa.array(np.array(values, dtype=np.float32))
        else:
            columns[field.name] = pa.array(values, types[str(field.type)]).dictionary_encode()
    write_table(path, columns)


async def measure(
    args: argparse.Namespace, service: Service, predictor: PlanLatencyPredictor, send_request: SendRequest
) -> tuple[dict[str, Any], list[RequestRecord]]:
    """Run all phases."""
    questions = load_questions(args, service)
    for question in questions:
        set_budget_range(args, service, question, predictor)
    generator = LoadGenerator(args, service, send_request, questions)
    capacity_per_s = await generator.measure_capacity(args.warmup)
    print(f"capacity: {capacity_per_s:.1f} requests/s", flush=True)
    rate = args.rate or args.load * capacity_per_s
    segments = [
        Segment(phase=None, rate=rate, count=args.warmup), Segment(phase=0, rate=rate, count=args.requests),
    ]  # fmt: skip
    if args.step > 0:
        segments.append(Segment(phase=1, rate=args.step * rate, seconds=args.step_s))
    durations = await generator.send_segments(*segments)
    results: dict[str, Any] = {"capacity_per_s": capacity_per_s, "slots": service.backend.slots}
    for phase, duration in enumerate(durations[1:]):
        phase_requests = [request for request in generator.sent if request.phase == phase]
        phase_results = results[PHASES[phase]] = summarize(phase_requests, *duration)
        if phase == 1:
            phase_results["recovery"] = measure_recovery(phase_requests)
            print(f"recovered after {phase_results['recovery']['back_after_s']:.2f} s", flush=True)
        print(
            f"{PHASES[phase]}:",
            json.dumps(replace_non_finite({name: phase_results[name] for name in SHOWN})),
            flush=True,
        )
    return results, generator.sent


SHOWN = (
    "requests", "attainment", "attainment_of_all", "shed_share", "infeasible_share", "p50_ms", "p99_ms",
    "utilisation", "below_p99", "accuracy",
)  # fmt: skip


async def measure_directly(
    args: argparse.Namespace, service: Service, predictor: PlanLatencyPredictor
) -> tuple[dict[str, Any], list[RequestRecord]]:
    await service.open()
    try:
        return await measure(args, service, predictor, connect_directly(service))
    finally:
        await service.close()


def measure_http(
    args: argparse.Namespace, app: Any, service: Service, predictor: PlanLatencyPredictor
) -> tuple[dict[str, Any], list[RequestRecord]]:
    with run_server(app) as url:
        return asyncio.run(measure(args, service, predictor, connect_http(url)))


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: budgets under load and after a load step."""
    command = "make -C benchmarks/adaptive figures, which makes load.json"
    steady = record["steady"]
    min_budget_ms, median_budget_ms, max_budget_ms = steady["budget_ms"]
    yield Claim(
        id=f"adaptive/4-attainment{device_suffix(record)}",
        claim=f"Accepted requests within their budget at {100.0 * record['settings']['load']:.0f} % of "
        f"capacity, of {steady['requests']} Poisson requests.",
        value=round(100.0 * steady["attainment"]["share"], 2),
        unit="%",
        target=">= 99",
        command=command,
        details={
            "min_budget_ms": round(min_budget_ms, 1),
            "median_budget_ms": round(median_budget_ms, 1),
            "max_budget_ms": round(max_budget_ms, 1),
            "requests_per_s": round(steady["requests_per_s"], 1),
            "utilization": round(steady["utilisation"], 4),
            "p50_ms": round(steady["p50_ms"], 2),
            "attainment_of_all": round(steady["attainment_of_all"]["share"], 4),
            "infeasible_share": round(steady["infeasible_share"], 4),
            "shed_share": round(steady["shed_share"], 4),
        },
    )
    step = record.get("step")
    if step is None:
        return
    recovery_s, refusals = step["recovery"]["back_after_s"], step["recovery"]["refused_rightly"]
    yield Claim(
        id=f"adaptive/4-step{device_suffix(record)}",
        claim=f"Time until 99 % of accepted requests keep their budget again after a "
        f"{record['settings']['step']:g}x load step.",
        value=round(recovery_s, 2),
        unit="s",
        target="<= 5, or shed with correct errors",
        met=recovery_s <= RECOVERY_S or refusals["share"] == 1.0,
        command=command,
        details={
            "shed_share": round(step["shed_share"], 4),
            "attainment_of_all": round(step["attainment_of_all"]["share"], 4),
            **({"refusals_with_retry_time": round(refusals["share"], 4)} if refusals["of"] else {}),
        },
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="directory of a model")
    parser.add_argument("--profile", type=Path, required=True, help="profile (Parquet) or predictor (JSON)")
    parser.add_argument("--controller", type=Path, help="trained controllers")
    parser.add_argument("--plan-quality", type=Path, help="accuracy of plans")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--load", type=float, default=0.7, help="fraction of capacity")
    parser.add_argument("--rate", type=float, help="requests per second, instead of the load")
    parser.add_argument("--step", type=float, default=2.0, help="factor of the load step; 0 for none")
    parser.add_argument("--step-s", type=float, default=10.0, help="duration of the load step, seconds")
    parser.add_argument(
        "--max-budget-ratio", type=float, default=1.5, help="maximum budget over the p99 of the slowest plan"
    )
    parser.add_argument("--questions", type=int, default=512)
    parser.add_argument("--archives", type=Path, action="append", help="image archive. Repeatable.")
    parser.add_argument("--new-tokens", type=int, default=16, help="maximum length of an answer")
    parser.add_argument("--warmup", type=int, default=300, help="requests of the capacity measurement")
    parser.add_argument("--plans", type=int, default=12, help="see `sparseflow adaptive serve`")
    parser.add_argument("--batch", type=int, help="see `sparseflow adaptive serve`")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--http", action="store_true", help="with uvicorn and an HTTP client")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, required=True, help="JSON file; a Parquet file next to it contains the samples"
    )
    args = parser.parse_args(argv)
    if args.requests < 1 or (args.step > 0 and not args.step_s > 0):
        parser.error("--requests must be at least 1, and --step-s positive with a load step")
    app = create_model_app(
        args.model, args.profile, controller=args.controller, plan_quality=args.plan_quality,
        model_name=args.model.name, max_plans=args.plans, max_batch_size=args.batch, device=args.device,
        progress=lambda message, fraction: None,
    )  # fmt: skip
    service: Service = app.state.service
    backend = service.backend
    assert isinstance(backend, EngineBackend) and isinstance(backend._forecast, PredictorForecast)
    predictor = backend._forecast._predictor
    if args.http:
        results, requests = measure_http(args, app, service, predictor)
    else:
        results, requests = asyncio.run(measure_directly(args, service, predictor))
    met = results["steady"]["attainment"]["share"] >= TARGET
    if "step" in results:
        recovery = results["step"]["recovery"]
        met = met and (recovery["back_after_s"] <= RECOVERY_S or recovery["refused_rightly"]["share"] == 1.0)
    record = {
        "environment": collect_environment(args.device, seed=args.seed), "settings": resolve_settings(args),
        "target": {"attainment": TARGET, "recovery_s": RECOVERY_S}, "met": met, **results,
        "samples": args.out.with_suffix(".parquet").name, "phases": PHASES,
    }  # fmt: skip
    write_samples(args.out.with_suffix(".parquet"), requests)
    write_atomic(args.out, json.dumps(replace_non_finite(record), allow_nan=False) + "\n")
    record_claims(make_claims(record), record, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
