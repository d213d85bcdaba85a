r"""Budgets under load (line 4): requests at random times on what `sparseflow adaptive serve` runs, then twice
as many.

::

    export PYTHONPATH=src:.
    python benchmarks/adaptive/load.py FOLDER --profile predictor.json --device cuda --requests 5000 \
        --out results/adaptive/load.json
    python benchmarks/adaptive/load.py FOLDER --profile predictor.json --http --requests 500 --out http.json

A request is what a client sends: JSON with an image as a data URL, a question and a budget. It takes the
server's way from there on, below HTTP: read, prepared by a thread, let in or refused, waiting, running. With
`--http` there is uvicorn and a client of this machine, too. Times count from the moment that a request was
due, so that a late event loop is not forgiven, to the last token (with `--http`, to the end of the answer).

Questions are those of the Grid-VQA test split where the model is one of Grid-VQA, each asked for as many
tokens as the longest answer to its kind of question has; else noise with random words. Budgets are drawn,
evenly by their logarithms, from the least that an idle server promises to `--dearest` times what 99 of 100
requests by the dearest plan stay below. Capacity is what ends in a second where as many such requests as
there are slots are under way at any time, none refused; the load is a share of it, and arrivals are Poisson.
The share of time in which the engine works is told beside it.

Told: attainment of requests that were let in with a promise, and over all; what was shed (429) or could not
be met (422); right answers; and after the step, when attainment of a sliding second is back for good. Every
request is kept in a Parquet file beside the JSON.
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
from models import content_of, ends_per_s, listening, settled, write_table

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
"""Of the HTTP client at a time, more than a server lets in."""


@dataclass(kw_only=True)
class Question:
    """What is asked again and again.

    Attributes:
        content: Of the user's message.
        answer: The right one; None where there is none.
        new_tokens: Most of an answer, as its client asks for it.
        prompt: As the server makes it.
        budgets_ms: From the least that a plan keeps, and up to.
    """

    content: list[dict[str, Any]]
    answer: str | None
    new_tokens: int
    prompt: Prompt | None = None
    budgets_ms: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A request and what became of it.

    Attributes:
        phase: Index into `PHASES`.
        due_s: Since the beginning of the phase.
        ended_s: Likewise.
        budget_ms: What was asked for.
        outcome: "answered", the code of the refusal, or "error: " and what else was raised.
        plan: Its id, or "".
        p50_ms: Predicted; NaN where it was refused, as the following.
        p99_ms: Predicted.
        measured_ms: From when it was due to the last token.
        right: 1, 0, or NaN where nobody knows.
        retry: Whether a refusal said when to try again.
        least_ms: The least budget that a refusal named; NaN where it named none.
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


Ask = Callable[[bytes, float], Awaitable[dict[str, Any]]]
"""Sends a body that was due at a moment; gives the answer's JSON with `measured_ms`, or raises `Refusal`."""


def questions(asked: argparse.Namespace, service: Service) -> list[Question]:
    """Some of the test split, or noise. A client knows of what kind its question is, and asks for no more
    tokens than the longest answer to one of that kind has."""
    from sparseflow.adaptive.grid_vqa.model import SETTINGS

    words = service.prompts.tokenizer
    if (asked.model / SETTINGS).is_file():
        from sparseflow.adaptive.grid_vqa.config import settings_of
        from sparseflow.adaptive.grid_vqa.dataset import VqaDataset
        from sparseflow.adaptive.grid_vqa.task import placed

        kept = json.loads((asked.model / SETTINGS).read_text("utf-8"))
        data = VqaDataset(placed(settings_of(kept["settings"], SETTINGS), asked.archives, asked.model))
        samples = list(data.samples("test", asked.questions))
        longest: dict[str, int] = {}
        for each in samples:
            length = 1 + len(words.encode(each.answer, add_special_tokens=False))
            longest[each.kind] = max(length, longest.get(each.kind, 0))
        return [
            Question(
                content=content_of(each.question, each.canvas), answer=each.answer,
                new_tokens=min(longest[each.kind], asked.new_tokens),
            )
            for each in samples
        ]  # fmt: skip
    random = np.random.default_rng(asked.seed)
    found = []
    for _ in range(asked.questions):
        text = words.decode(random.integers(3, 1000, size=12).tolist(), skip_special_tokens=True)
        canvas = random.integers(0, 256, (96, 96, 3), np.uint8) if service.prompts.takes_images else None
        content = content_of(text, canvas)
        found.append(Question(content=content, answer=None, new_tokens=asked.new_tokens))
    return found


def body(service: Service, question: Question, budget_ms: float, **more: str) -> bytes:
    """As a client sends it."""
    content = {
        "model": service.model, "messages": [{"role": "user", "content": question.content}],
        "max_tokens": question.new_tokens, "temperature": 0.0, "seed": 0, "latency_budget_ms": budget_ms,
        **more,
    }  # fmt: skip
    return json.dumps(content).encode()


def bound(
    asked: argparse.Namespace, service: Service, each: Question, predictor: PlanLatencyPredictor
) -> None:
    """Find prompt and budgets of a question, on an idle server."""
    # By a thread of the server's: those compute alone, and what they take is in the least budget.
    prepared = service._threads.submit(service._prepare_sync, body(service, each, 1.0), {}).result()
    prompt, least_ms = prepared.prompt, service._min_idle_ms(prepared, each.new_tokens)
    _, dearest = predictor.predict_all(
        text_tokens=prompt.text_tokens, images=predictor.metadata.count_images(prompt.vision_tokens),
        new_tokens=each.new_tokens,
    )  # fmt: skip
    each.prompt = prompt
    each.budgets_ms = (least_ms, max(asked.dearest * float(dearest.max()), 1.01 * least_ms))


def below_http(service: Service) -> Ask:
    """The server's way without HTTP, on its event loop."""

    async def ask(content: bytes, due_s: float) -> dict[str, Any]:
        async def read() -> bytes:
            return content

        answer = await service.submit(read, {}, due_s)
        try:
            await answer.wait_first_token()
            text = "".join([piece async for piece in answer.iter_text()])
            return {"text": text, **answer.report()}
        finally:
            answer.disconnect()

    return ask


def over_http(url: str) -> Ask:
    """A client that opens a connection for each request, in a thread of its own."""
    where, threads = urlsplit(url), ThreadPoolExecutor(_CONNECTIONS)

    def post(content: bytes) -> tuple[int, Mapping[str, str], bytes]:
        connection = HTTPConnection(str(where.hostname), where.port, timeout=120.0)
        try:
            connection.request("POST", "/v1/chat/completions", content, {"Content-Type": "application/json"})
            found = connection.getresponse()
            return found.status, {name.lower(): value for name, value in found.getheaders()}, found.read()
        finally:
            connection.close()

    async def ask(content: bytes, due_s: float) -> dict[str, Any]:
        status, headers, answer = await asyncio.get_running_loop().run_in_executor(threads, post, content)
        measured_ms = 1e3 * (time.perf_counter() - due_s)
        told = json.loads(answer)
        if status != 200:
            retry = headers.get("retry-after")
            raise ApiError(
                status, told["error"]["message"], code=told["error"]["code"],
                retry_after_s=None if retry is None else float(retry), more=told["error"],
            )  # fmt: skip
        text = told["choices"][0]["message"]["content"]
        return {"text": text, **told["sparseflow"], "measured_ms": measured_ms}

    return ask


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Requests at one rate.

    Attributes:
        phase: Index into `PHASES`; None for those that are not kept.
        rate: A second.
        count: How many.
        seconds: Or for how long.
    """

    phase: int | None
    rate: float
    count: int = 0
    seconds: float = 0.0


def engine_of(service: Service) -> Engine:
    """What runs requests."""
    backend = service.backend
    assert isinstance(backend, EngineBackend)
    return backend._engine


class Run:
    """Requests, and what became of them.

    Args:
        asked: The options.
        service: What answers.
        ask: How it is asked.
        every: The questions.
    """

    def __init__(
        self, asked: argparse.Namespace, service: Service, ask: Ask, every: Sequence[Question]
    ) -> None:
        self._asked, self._service, self._ask, self._every = asked, service, ask, every
        self._random = np.random.default_rng(asked.seed)
        self.sent: list[Sent] = []
        self._errors: set[str] = set()

    def drawn(self) -> tuple[Question, float]:
        """A question and a budget."""
        one = self._every[int(self._random.integers(len(self._every)))]
        low, high = np.log(one.budgets_ms)
        return one, float(np.exp(self._random.uniform(low, high)))

    async def capacity(self, count: int) -> float:
        """Requests that end in a second where as many are under way as there are slots, none refused."""
        drawn, ended = [self.drawn() for _ in range(count)], []

        async def one_after_the_other() -> None:
            while drawn:
                content = body(self._service, *drawn.pop(), on_infeasible="best_effort")
                await self._ask(content, time.perf_counter())
                ended.append(time.perf_counter())

        async with asyncio.TaskGroup() as group:
            for _ in range(self._service.backend.slots):
                group.create_task(one_after_the_other())
        return ends_per_s(ended)

    async def arrivals(self, *segments: Segment) -> list[tuple[float, float]]:
        """Requests at random times, one segment after the other without a pause.

        Returns:
            For each segment how long it was, and how long the engine worked in it, seconds.
        """
        engine, found = engine_of(self._service), []
        due = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for each in segments:
                began, busy_s, number = due, engine.busy_s, 0
                while number < each.count or due - began < each.seconds:
                    due += float(self._random.exponential(1.0 / each.rate))
                    await asyncio.sleep(max(due - time.perf_counter(), 0.0))
                    group.create_task(self._one(each.phase, began, due))
                    number += 1
                found.append((due - began, engine.busy_s - busy_s))
        return found

    async def _one(self, phase: int | None, began_s: float, due_s: float) -> None:
        question, budget_ms = self.drawn()
        base: dict[str, Any] = {"phase": phase, "due_s": due_s - began_s, "budget_ms": budget_ms}
        keep = self.sent.append if phase is not None else _forget
        try:
            told = await self._ask(body(self._service, question, budget_ms), due_s)
            predicted = told["predicted_ms"] or {"p50": math.nan, "p99": math.nan}
            found = {
                "plan": told["plan"]["id"], "p50_ms": predicted["p50"], "p99_ms": predicted["p99"],
                "measured_ms": told["measured_ms"],
                "right": float(told["text"].strip() == question.answer),
            }  # fmt: skip
            if question.answer is None:
                found["right"] = math.nan
        except ApiError as refusal:
            ended_s = time.perf_counter() - began_s
            retry = refusal.retry_after_s is not None
            least_ms = float(refusal.more.get("least_feasible_ms", math.nan))
            keep(Sent(**base, ended_s=ended_s, outcome=refusal.code, retry=retry, least_ms=least_ms))
        except Exception as error:  # of the connection or the answer: one request's, not the measurement's
            ended_s, kind = time.perf_counter() - began_s, type(error).__name__
            if kind not in self._errors:
                self._errors.add(kind)
                print(f"a request failed: {error!r}", file=sys.stderr, flush=True)
            keep(Sent(**base, ended_s=ended_s, outcome=f"error: {kind}"))
        else:
            keep(Sent(**base, **found, ended_s=time.perf_counter() - began_s, outcome="answered"))


def _forget(sent: Sent) -> None:
    """Those that only make the server busy."""


def share(part: int, whole: int) -> dict[str, float]:
    """A share and its 95 % interval (Wilson)."""
    if not whole:
        return {"share": math.nan, "low": 0.0, "high": 1.0, "of": 0}
    p, z = part / whole, 1.96
    middle, scale = p + z * z / (2 * whole), 1.0 + z * z / whole
    half = z * math.sqrt(p * (1.0 - p) / whole + z * z / (4 * whole * whole))
    return {"share": p, "low": (middle - half) / scale, "high": (middle + half) / scale, "of": whole}


def summary(sent: Sequence[Sent], seconds: float, busy_s: float) -> dict[str, Any]:
    """What a phase came to."""
    answered = [each for each in sent if each.outcome == "answered"]
    refused: dict[str, int] = {}
    for each in sent:
        if each.outcome != "answered":
            refused[each.outcome] = refused.get(each.outcome, 0) + 1
    infeasible = refused.get("budget_infeasible", 0)
    failed = sum(count for code, count in refused.items() if code not in (*SHED, "budget_infeasible"))
    took = np.array([each.measured_ms for each in answered]) if answered else np.array([math.nan])
    told = [each for each in answered if math.isfinite(each.p99_ms)]
    judged = [each.right for each in answered if math.isfinite(each.right)]
    plans: dict[str, int] = {}
    for each in answered:
        plans[each.plan] = plans.get(each.plan, 0) + 1
    met = sum(each.met for each in answered)
    budgets = [each.budget_ms for each in sent] or [math.nan]
    return {
        "requests": len(sent), "seconds": seconds, "requests_per_s": len(sent) / seconds,
        "budget_ms": np.quantile(budgets, (0.0, 0.5, 1.0)).tolist(),
        "attainment": share(met, len(answered) + failed), "attainment_of_all": share(met, len(sent)),
        "attainment_of_feasible": share(met, len(sent) - infeasible),
        "refused": refused, "failed": failed,
        "shed_share": sum(refused.get(code, 0) for code in SHED) / max(len(sent), 1),
        "infeasible_share": infeasible / max(len(sent), 1), "goodput_per_s": met / seconds,
        "p50_ms": float(np.quantile(took, 0.5)), "p99_ms": float(np.quantile(took, 0.99)),
        "utilisation": busy_s / seconds,
        "below_p99": share(sum(each.measured_ms <= each.p99_ms for each in told), len(told)),
        "accuracy": float(np.mean(judged)) if judged else None, "plans": plans,
    }  # fmt: skip


def finite(found: Any) -> Any:
    """As JSON can keep it: null for what is NaN or infinite, such as a share of nothing."""
    if isinstance(found, Mapping):
        return {name: finite(each) for name, each in found.items()}
    if isinstance(found, list | tuple):
        return [finite(each) for each in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def recovery(sent: Sequence[Sent]) -> dict[str, Any]:
    """When attainment of a sliding window is back for good, and how it went on."""
    ended = sorted((each for each in sent if each.outcome == "answered"), key=lambda each: each.ended_s)
    times = np.array([each.ended_s for each in ended])
    met = np.array([each.met for each in ended], dtype=float)
    refusals = [each for each in sent if each.outcome not in ("answered", "budget_infeasible")]
    track, back_s = [], 0.0
    for at in np.arange(WINDOW_S, times.max(initial=0.0) + WINDOW_S, WINDOW_S / 4):
        inside = (times > at - WINDOW_S) & (times <= at)
        if inside.any():
            track.append([round(float(at), 2), round(float(met[inside].mean()), 4), int(inside.sum())])
            if met[inside].mean() < TARGET:
                back_s = float(at)
    return {
        "window_s": WINDOW_S, "back_after_s": back_s, "track": track, "refused": len(refusals),
        "refused_rightly": share(sum(e.outcome in SHED and e.retry for e in refusals), len(refusals)),
    }  # fmt: skip


def write_samples(path: Path, sent: Sequence[Sent]) -> None:
    """Every request, a row each."""
    import pyarrow as pa

    columns: dict[str, Any] = {}
    types = {"int": pa.int64(), "str": pa.string(), "bool": pa.bool_()}
    for field in fields(Sent):
        values = [getattr(each, field.name) for each in sent]
        if field.type == "float":
            columns[field.name] = pa.array(np.array(values, dtype=np.float32))
        else:
            columns[field.name] = pa.array(values, types[str(field.type)]).dictionary_encode()
    write_table(path, columns)


async def measured(
    asked: argparse.Namespace, service: Service, predictor: PlanLatencyPredictor, ask: Ask
) -> tuple[dict[str, Any], list[Sent]]:
    """All phases."""
    every = questions(asked, service)
    for each in every:
        bound(asked, service, each, predictor)
    run = Run(asked, service, ask, every)
    capacity = await run.capacity(asked.warmup)
    print(f"capacity: {capacity:.1f} requests a second", flush=True)
    rate = asked.rate or asked.load * capacity
    segments = [
        Segment(phase=None, rate=rate, count=asked.warmup), Segment(phase=0, rate=rate, count=asked.requests),
    ]  # fmt: skip
    if asked.step > 0:
        segments.append(Segment(phase=1, rate=asked.step * rate, seconds=asked.step_s))
    spans = await run.arrivals(*segments)
    found: dict[str, Any] = {"capacity_per_s": capacity, "slots": service.backend.slots}
    for phase, span in enumerate(spans[1:]):
        mine = [each for each in run.sent if each.phase == phase]
        told = found[PHASES[phase]] = summary(mine, *span)
        if phase == 1:
            told["recovery"] = recovery(mine)
            print(f"back after {told['recovery']['back_after_s']:.2f} s", flush=True)
        print(f"{PHASES[phase]}:", json.dumps(finite({name: told[name] for name in SHOWN})), flush=True)
    return found, run.sent


SHOWN = (
    "requests", "attainment", "attainment_of_all", "shed_share", "infeasible_share", "p50_ms", "p99_ms",
    "utilisation", "below_p99", "accuracy",
)  # fmt: skip


async def in_process(
    asked: argparse.Namespace, service: Service, predictor: PlanLatencyPredictor
) -> tuple[dict[str, Any], list[Sent]]:
    await service.open()
    try:
        return await measured(asked, service, predictor, below_http(service))
    finally:
        await service.close()


def by_http(
    asked: argparse.Namespace, app: Any, service: Service, predictor: PlanLatencyPredictor
) -> tuple[dict[str, Any], list[Sent]]:
    with listening(app) as url:
        return asyncio.run(measured(asked, service, predictor, over_http(url)))


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


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of a model, with its tokenizer")
    parser.add_argument("--profile", type=Path, required=True, help="a profile, or a predictor.json")
    parser.add_argument("--controller", type=Path, help="trained controllers")
    parser.add_argument("--worth", type=Path, help="how good plans are")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--load", type=float, default=0.7, help="share of capacity")
    parser.add_argument("--rate", type=float, help="requests a second, in place of the load")
    parser.add_argument("--step", type=float, default=2.0, help="times as many then; 0 for none")
    parser.add_argument("--step-s", type=float, default=10.0, help="how long")
    parser.add_argument(
        "--dearest", type=float, default=1.5, help="largest budget, times the dearest plan's p99"
    )
    parser.add_argument("--questions", type=int, default=512)
    parser.add_argument(
        "--archives", type=Path, action="append", help="of images, where they are elsewhere than in training"
    )
    parser.add_argument("--new-tokens", type=int, default=16, help="most of an answer")
    parser.add_argument("--warmup", type=int, default=300, help="requests that capacity is measured by")
    parser.add_argument("--plans", type=int, default=12, help="as of `serve`")
    parser.add_argument("--batch", type=int, help="as of `serve`")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--http", action="store_true", help="by uvicorn and a client")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON; samples go to a Parquet beside it")
    asked = parser.parse_args(given)
    if asked.requests < 1 or (asked.step > 0 and not asked.step_s > 0):
        parser.error("--requests must be at least 1, and --step-s above 0 where there is a step")
    app = create_model_app(
        asked.model, asked.profile, controller=asked.controller, plan_quality=asked.worth,
        model_name=asked.model.name, max_plans=asked.plans, max_batch_size=asked.batch, device=asked.device,
        progress=lambda message, fraction: None,
    )  # fmt: skip
    service: Service = app.state.service
    backend = service.backend
    assert isinstance(backend, EngineBackend) and isinstance(backend._forecast, PredictorForecast)
    predictor = backend._forecast._predictor
    if asked.http:
        found, sent = by_http(asked, app, service, predictor)
    else:
        found, sent = asyncio.run(in_process(asked, service, predictor))
    met = found["steady"]["attainment"]["share"] >= TARGET
    if "step" in found:
        back = found["step"]["recovery"]
        met = met and (back["back_after_s"] <= RECOVERY_S or back["refused_rightly"]["share"] == 1.0)
    record = {
        "environment": collect_environment(asked.device, seed=asked.seed), "settings": settled(asked),
        "target": {"attainment": TARGET, "recovery_s": RECOVERY_S}, "met": met, **found,
        "samples": asked.out.with_suffix(".parquet").name, "phases": PHASES,
    }  # fmt: skip
    write_samples(asked.out.with_suffix(".parquet"), sent)
    write_atomic(asked.out, json.dumps(finite(record), allow_nan=False) + "\n")
    record_claims(make_claims(record), record, asked.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
