r"""Latency range of plans: sequential requests and requests at one rate (line 2).

::

    PYTHONPATH=src:. python benchmarks/adaptive/spans.py --model FOLDER --study runs/study --device cuda \
        --out results/adaptive/spans.json

The study of the model contains the accuracy of each plan and the Pareto front by predicted latency. The plans
of the front and the full plan are measured in an engine, with a fixed plan per request:

- sequentially, one request after the other, with the plans in random order;
- at one rate: Poisson requests of one plan, with `--load` times the capacity of the slowest plan as the rate
  for all plans. Latency counts from the scheduled send time to the last token, including queueing. This is
  what clients of a server see when only the plan changes.

Requests have the median size of the study. The record contains all plans; its fronts contain the
Pareto-optimal ones by measured latency: the median, sequentially and at the rate, and the 95th percentile at
the rate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from models import add_options, build_model, compute_throughput, max_total_tokens, resolve_settings

from benchmarks.claims import Claim, device_suffix, record_claims
from sparseflow.adaptive.engine.engine import Engine
from sparseflow.adaptive.engine.requests.handle import RequestHandle
from sparseflow.adaptive.engine.requests.request import GenerationRequest
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan
from sparseflow.adaptive.profile.background_traffic import FixedPlanPolicy, make_full_prompt
from sparseflow.adaptive.profile.plan_quality import select_pareto_plans
from sparseflow.adaptive.profile.random_prompts import RandomPrompts
from sparseflow.adaptive.study import results
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic

QUANTILES = {"alone": ("alone_ms", 0.5), "at_rate": ("at_rate_ms", 0.5), "at_rate_p95": ("at_rate_ms", 0.95)}
"""Key of the record -> latency samples and quantile."""
_TURNS = 4
"""Number of interleaved turns of the requests at one rate, so that noise affects all plans alike."""


def select_plans(results: Mapping[str, Any], max_plans: int) -> list[dict[str, Any]]:
    """Select plans of a study to measure: at most `max_plans` of its front, and the full plan."""
    rows = {Plan.from_dict(row["plan"]): row for row in results["plans"]}
    front = [plan for plan, row in rows.items() if row["front"]]
    selected = select_pareto_plans(
        front, [rows[plan]["p50_ms"] for plan in front], [rows[plan]["accuracy"] for plan in front], max_plans
    )
    full = max(
        rows, key=lambda plan: (len(plan.blocks), plan.top_k, plan.insertion_position, rows[plan]["p50_ms"])
    )
    return [rows[plan] for plan in dict.fromkeys([*selected, full])]


class Sender:
    """Sends requests of one size to an engine.

    Args:
        engine: Engine.
        prompts: Random prompts.
        size: `text_tokens` and `new_tokens` of a request.
        seed: Seed of arrival times.
    """

    def __init__(self, engine: Engine, prompts: RandomPrompts, size: Mapping[str, int], seed: int) -> None:
        self._engine, self._prompts, self._size = engine, prompts, size
        self._random, self._lock = np.random.default_rng(seed), threading.Lock()

    def request(self, plan: Plan) -> dict[str, Any]:
        """Return the arguments of a request."""
        with self._lock:
            inputs = make_full_prompt(self._prompts, plan, self._size["text_tokens"])
        return {
            "inputs": inputs,
            "decide": FixedPlanPolicy(plan=plan),
            "max_new_tokens": self._size["new_tokens"],
        }

    def run_sequential(self, plan: Plan) -> float:
        """Return the latency of a request on an idle engine, ms."""
        return self._engine.submit(GenerationRequest(**self.request(plan))).result().total_ms

    def measure_capacity(self, plan: Plan, count: int) -> float:
        """Return requests per second with all slots in use."""
        end_times_s: list[float] = []

        def send(_: int) -> None:
            self.run_sequential(plan)
            end_times_s.append(time.perf_counter())

        with ThreadPoolExecutor(self._engine.max_batch) as pool:
            list(pool.map(send, range(count)))
        return compute_throughput(end_times_s)

    def run_at_rate(self, plan: Plan, rate: float, count: int) -> Iterator[float]:
        """Yield the latencies of Poisson requests at a rate per second, ms."""
        requests = [self.request(plan) for _ in range(count)]
        handles: list[RequestHandle] = []
        due = time.perf_counter()
        for request in requests:
            due += float(self._random.exponential(1.0 / rate))
            time.sleep(max(due - time.perf_counter(), 0.0))
            # A request that is sent late counts from its scheduled time.
            handles.append(self._engine.submit(GenerationRequest(**request, received_s=due)))
        for handle in handles:
            yield handle.result().total_ms


def summarize_span(plans: Sequence[dict[str, Any]], name: str, share: float) -> dict[str, Any]:
    """Return the Pareto-optimal plans in accuracy and a latency quantile, and their latency ratio."""
    rows = [
        {"id": row["id"], "accuracy": row["accuracy"], "ms": float(np.quantile(row[name], share))}
        for row in plans
    ]
    times, accuracies = ([row[key] for row in rows] for key in ("ms", "accuracy"))
    front = select_pareto_plans(rows, times, accuracies, max_plans=max(2, len(rows)))
    return {"quantile": share, "pareto": front, "span": front[-1]["ms"] / front[0]["ms"]}


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: latency span of Pareto plans."""
    suffix = device_suffix(record)
    command = "make -C benchmarks/adaptive figures, which makes spans.json"
    for slug, key, load in (
        ("span", "alone", "sequential requests"),
        ("span-at-rate", "at_rate_p95", "Poisson requests at one rate (p95)"),
    ):
        front = record[key]["pareto"]
        fastest, slowest = front[0], front[-1]
        yield Claim(
            id=f"adaptive/2-{slug}{suffix}",
            claim=f"Latency of the slowest over the fastest of {len(front)} Pareto plans, {load}.",
            value=round(record[key]["span"], 3),
            unit="x",
            target=">= 2",
            command=command,
            details={
                "fastest_ms": round(fastest["ms"], 3),
                "fastest_accuracy": round(fastest["accuracy"], 4),
                "slowest_ms": round(slowest["ms"], 3),
                "slowest_accuracy": round(slowest["accuracy"], 4),
                **(
                    {
                        "rate_per_s": round(record["rate_per_s"], 1),
                        "load": record["settings"]["load"],
                        "median_span": round(record["at_rate"]["span"], 3),
                    }
                    if key == "at_rate_p95"
                    else {}
                ),
            },
        )
    yield Claim(
        id=f"adaptive/2-plans{suffix}",
        claim=f"Pareto-optimal plans in accuracy and latency, of {len(record['plans'])} measured plans.",
        value=len(record["alone"]["pareto"]),
        unit="plans",
        target=">= 6",
        command=command,
        details={
            "plans_at_rate": len(record["at_rate"]["pareto"]),
            "questions": record["samples"]["test"],
        },
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--study", type=Path, required=True, help="directory of the model's study")
    parser.add_argument(
        "--plans", type=int, default=16, help="maximum number of plans to measure, without the full plan"
    )
    parser.add_argument("--sequential", type=int, default=60, help="sequential requests of each plan")
    parser.add_argument("--requests", type=int, default=400, help="requests of each plan at one rate")
    parser.add_argument("--load", type=float, default=0.7, help="rate over the capacity of the slowest plan")
    args = parser.parse_args(argv)
    if args.model is None or min(args.sequential, args.requests) < _TURNS or not 0.0 < args.load < 1.0:
        parser.error(
            f"--model is required, --sequential and --requests must be at least {_TURNS}, and --load must be "
            "above 0 and below 1"
        )
    settings = resolve_settings(args)
    study_results = results.load_results(args.study)
    rows = select_plans(study_results, args.plans)
    adapter, example = build_model(args)
    runtime, generator = PlanRuntime(adapter), np.random.default_rng(args.seed)
    plans = [Plan.from_dict(row["plan"]) for row in rows]
    sequential_ms: dict[Plan, list[float]] = {plan: [] for plan in plans}
    at_rate_ms: dict[Plan, list[float]] = {plan: [] for plan in plans}
    with Engine(
        adapter, runtime, plans=plans, max_batch=args.max_batch, max_tokens=max_total_tokens(args, adapter)
    ) as engine:
        if engine.graphs.enabled:
            engine.warm_up(example)
        prompts = RandomPrompts(adapter, example, device="cpu", seed=args.seed)
        sender = Sender(engine, prompts, study_results["size"], args.seed)
        for turn in range(-2, args.sequential):
            for index in generator.permutation(len(plans)).tolist():
                latency_ms = sender.run_sequential(plans[index])
                if turn >= 0:
                    sequential_ms[plans[index]].append(latency_ms)
        slowest = max(plans, key=lambda plan: statistics.median(sequential_ms[plan]))
        capacity = sender.measure_capacity(slowest, max(args.requests // 2, 2 * args.max_batch))
        rate = args.load * capacity
        print(f"{rate:.1f} requests/s, {args.load:.0%} of the capacity of {slowest.id}", file=sys.stderr)
        for turn in range(_TURNS):
            for index in generator.permutation(len(plans)).tolist():
                count = len(range(turn, args.requests, _TURNS))
                at_rate_ms[plans[index]] += sender.run_at_rate(plans[index], rate, count)
            print(f"turn {turn + 1} of {_TURNS}", file=sys.stderr)
    plan_records = [
        {
            "id": row["id"], "accuracy": row["accuracy"],
            "alone_ms": [round(value, 4) for value in sequential_ms[plan]],
            "at_rate_ms": [round(value, 4) for value in at_rate_ms[plan]],
        }
        for row, plan in zip(rows, plans, strict=True)
    ]  # fmt: skip
    record = {
        "environment": collect_environment(args.device, seed=args.seed),
        "settings": settings,
        "size": study_results["size"],
        "samples": study_results["samples"],
        "dearest": slowest.id,
        "capacity_per_s": capacity,
        "rate_per_s": rate,
        **{name: summarize_span(plan_records, *quantile) for name, quantile in QUANTILES.items()},
        "plans": plan_records,
    }
    write_atomic(args.out, json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n")
    record_claims(make_claims(record), record, args.out)
    print(f"{rate:.0f} requests/s; {len(plans)} plans")
    for name in QUANTILES:
        front = record[name]["pareto"]
        first, last = front[0], front[-1]
        print(
            f"{name}: {len(front)} Pareto-optimal plans, {first['ms']:.2f} ms and "
            f"{first['accuracy']:.1%} to {last['ms']:.2f} ms and {last['accuracy']:.1%}: "
            f"{record[name]['span']:.2f}x"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
