r"""What plans of a trained model take that no other beats (line 2): alone, and all at one rate of requests.

::

    PYTHONPATH=src:. python benchmarks/adaptive/spans.py FOLDER --study runs/study --device cuda \
        --out results/adaptive/spans.json

The study of the model says how good each plan is, and which to look at: those that no other beats by what
they are thought to take, and the one that leaves nothing out. Each is measured here in an engine, as requests
are served, with its plan given:

- alone, one request after the other, the plans in turns of random order;
- at one rate for all: requests of one plan come at random times (Poisson), as many a second as are `--load`
  of what the dearest plan can do. What a request waits for others counts, from when it was due to its last
  token. That is what a server's clients see when it changes its plan and nothing else.

Requests are as long as the study's median. Plans that another beats in what was measured and in accuracy are
kept, and do not count: by the median, alone and at that rate, and by the time that 95 of 100 requests at that
rate stay below.
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
from models import built, ends_per_s, max_total_tokens, options, settled

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

TOLD = {"alone": ("alone_ms", 0.5), "at_rate": ("at_rate_ms", 0.5), "at_rate_p95": ("at_rate_ms", 0.95)}
"""What a record tells -> of which times, and which quantile of them."""
_TURNS = 4
"""In which requests at one rate are sent, so that a slow moment does not meet one plan alone."""


def chosen(found: Mapping[str, Any], most: int) -> list[dict[str, Any]]:
    """Rows of a study's plans to measure: its front, thinned to `most`, and the plan of all blocks."""
    rows = {Plan.from_dict(row["plan"]): row for row in found["plans"]}
    front = [plan for plan, row in rows.items() if row["front"]]
    kept = select_pareto_plans(
        front, [rows[plan]["p50_ms"] for plan in front], [rows[plan]["accuracy"] for plan in front], most
    )
    full = max(
        rows, key=lambda plan: (len(plan.blocks), plan.top_k, plan.insertion_position, rows[plan]["p50_ms"])
    )
    return [rows[plan] for plan in dict.fromkeys([*kept, full])]


class Sender:
    """Sends requests of one size to an engine.

    Args:
        engine: The engine.
        prompts: Makes prompts.
        size: `text_tokens` and `new_tokens` of a request.
        seed: What arrivals are drawn from.
    """

    def __init__(self, engine: Engine, prompts: RandomPrompts, size: Mapping[str, int], seed: int) -> None:
        self._engine, self._prompts, self._size = engine, prompts, size
        self._random, self._lock = np.random.default_rng(seed), threading.Lock()

    def request(self, plan: Plan) -> dict[str, Any]:
        """What to make a request of."""
        with self._lock:
            inputs = make_full_prompt(self._prompts, plan, self._size["text_tokens"])
        return {
            "inputs": inputs,
            "decide": FixedPlanPolicy(plan=plan),
            "max_new_tokens": self._size["new_tokens"],
        }

    def alone(self, plan: Plan) -> float:
        """Milliseconds of a request that has the engine to itself."""
        return self._engine.submit(GenerationRequest(**self.request(plan))).result().total_ms

    def capacity(self, plan: Plan, count: int) -> float:
        """Requests of a plan that end in a second where every slot is taken at any time."""
        ended: list[float] = []

        def one(_: int) -> None:
            self.alone(plan)
            ended.append(time.perf_counter())

        with ThreadPoolExecutor(self._engine.max_batch) as pool:
            list(pool.map(one, range(count)))
        return ends_per_s(ended)

    def coming(self, plan: Plan, rate: float, count: int) -> Iterator[float]:
        """Milliseconds of requests of a plan that come at random, so many a second."""
        made = [self.request(plan) for _ in range(count)]
        sent: list[RequestHandle] = []
        due = time.perf_counter()
        for each in made:
            due += float(self._random.exponential(1.0 / rate))
            time.sleep(max(due - time.perf_counter(), 0.0))
            # One that is sent late has waited since it was due.
            sent.append(self._engine.submit(GenerationRequest(**each, received_s=due)))
        for handle in sent:
            yield handle.result().total_ms


def told(plans: Sequence[dict[str, Any]], name: str, share: float) -> dict[str, Any]:
    """Which plans no other beats in accuracy and a quantile of the times `name`, and what these span."""
    rows = [
        {"id": row["id"], "accuracy": row["accuracy"], "ms": float(np.quantile(row[name], share))}
        for row in plans
    ]
    times, accuracies = ([row[of] for row in rows] for of in ("ms", "accuracy"))
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


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options(parser)
    parser.add_argument("--study", type=Path, required=True, help="folder of the model's study")
    parser.add_argument("--plans", type=int, default=16, help="most plans to measure, beside the full one")
    parser.add_argument("--alone", type=int, default=60, help="requests of each plan, one after the other")
    parser.add_argument("--requests", type=int, default=400, help="of each plan, at one rate")
    parser.add_argument("--load", type=float, default=0.7, help="share of what the dearest plan can do")
    asked = parser.parse_args(given)
    if asked.model is None or min(asked.alone, asked.requests) < _TURNS or not 0.0 < asked.load < 1.0:
        parser.error(
            f"--model is needed, --alone and --requests are at least {_TURNS}, --load is above 0 and below 1"
        )
    settings = settled(asked)
    found = results.load_results(asked.study)
    rows = chosen(found, asked.plans)
    adapter, example = built(asked)
    runtime, generator = PlanRuntime(adapter), np.random.default_rng(asked.seed)
    plans = [Plan.from_dict(row["plan"]) for row in rows]
    alone: dict[Plan, list[float]] = {plan: [] for plan in plans}
    coming: dict[Plan, list[float]] = {plan: [] for plan in plans}
    with Engine(
        adapter, runtime, plans=plans, max_batch=asked.max_batch, max_tokens=max_total_tokens(asked, adapter)
    ) as engine:
        if engine.graphs.enabled:
            engine.warm_up(example)
        prompts = RandomPrompts(adapter, example, device="cpu", seed=asked.seed)
        sender = Sender(engine, prompts, found["size"], asked.seed)
        for turn in range(-2, asked.alone):
            for at in generator.permutation(len(plans)).tolist():
                took = sender.alone(plans[at])
                if turn >= 0:
                    alone[plans[at]].append(took)
        dearest = max(plans, key=lambda plan: statistics.median(alone[plan]))
        capacity = sender.capacity(dearest, max(asked.requests // 2, 2 * asked.max_batch))
        rate = asked.load * capacity
        print(f"{rate:.1f} requests a second, {asked.load:.0%} of what {dearest.id} can do", file=sys.stderr)
        for turn in range(_TURNS):
            for at in generator.permutation(len(plans)).tolist():
                count = len(range(turn, asked.requests, _TURNS))
                coming[plans[at]] += sender.coming(plans[at], rate, count)
            print(f"turn {turn + 1} of {_TURNS}", file=sys.stderr)
    kept = [
        {
            "id": row["id"], "accuracy": row["accuracy"],
            "alone_ms": [round(each, 4) for each in alone[plan]],
            "at_rate_ms": [round(each, 4) for each in coming[plan]],
        }
        for row, plan in zip(rows, plans, strict=True)
    ]  # fmt: skip
    record = {
        "environment": collect_environment(asked.device, seed=asked.seed), "settings": settings,
        "size": found["size"], "samples": found["samples"],
        "dearest": dearest.id, "capacity_per_s": capacity, "rate_per_s": rate,
        **{name: told(kept, *of) for name, of in TOLD.items()}, "plans": kept,
    }  # fmt: skip
    write_atomic(asked.out, json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n")
    record_claims(make_claims(record), record, asked.out)
    print(f"{rate:.0f} requests a second; of {len(plans)} plans")
    for name in TOLD:
        front = record[name]["pareto"]
        first, last = front[0], front[-1]
        print(
            f"{name}: {len(front)} are beaten by none, {first['ms']:.2f} ms and "
            f"{first['accuracy']:.1%} to {last['ms']:.2f} ms and {last['accuracy']:.1%}: "
            f"{record[name]['span']:.2f}x"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
