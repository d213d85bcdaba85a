r"""What deciding adds to a request (line 6): the same plan, decided about or given, in turns.

::

    export PYTHONPATH=src:.
    python benchmarks/adaptive/overhead.py --out results/adaptive/overhead-cpu.json
    python benchmarks/adaptive/overhead.py --device cuda --geometry olmoe-1b-7b \
        --out results/adaptive/overhead-cuda.json
    python benchmarks/adaptive/overhead.py --model FOLDER --device cuda --profile predictor.json \
        --controller controllers.safetensors --out results/adaptive/overhead.json

Requests run alone in an engine, from receipt to the last token, in pairs of random order: one whose plan is
given, and one about which predictor and both controllers decide, among all plans of the model, though only
that one may come of it. What the second took is learnt from before the next, as a server does. The ratio is
of the medians, its interval from drawing pairs anew; beside it stands the same ratio of given requests
against given ones, which is what chance makes of it.

Deciding is also timed by itself, on the host: everything that a request waits for, with its latency token
there already.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import built, max_total_tokens, options, room, settled, within

from benchmarks.claims import Claim, device_suffix, record_claims
from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.engine.engine import Engine
from sparseflow.adaptive.engine.requests.request import GenerationRequest, PlanDecider, RequestOutput
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan, PlanSpace
from sparseflow.adaptive.policy.selector import PlanSelector
from sparseflow.adaptive.predictor import LatencyQuery, PlanLatencyPredictor
from sparseflow.adaptive.profile import (
    EngineRunner,
    RequestMix,
    collect_profile_by_group,
    select_representative_plans,
)
from sparseflow.adaptive.profile.background_traffic import FixedPlanPolicy, make_full_prompt
from sparseflow.adaptive.profile.random_prompts import RandomPrompts
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic

TARGET = 0.01
BUDGET_MS = 1e6
"""So large that every plan fits: what is timed is deciding, not refusing."""
COLUMNS = ("given_ms", "decided_ms", "given_again_ms", "decide_ms")


def profiled(
    asked: argparse.Namespace, runtime: PlanRuntime, example: Any, tokens: int
) -> PlanLatencyPredictor:
    """A predictor of a small profile; what it predicts does not matter here, only that it does."""
    geometry = runtime.geometry
    space = PlanSpace.from_importance(geometry)
    few = select_representative_plans(space, max(2 * len(space.tiers), 6), seed=asked.seed)
    sizes, steps = [asked.text_tokens, 2 * asked.text_tokens], 4
    with tempfile.TemporaryDirectory() as scratch, EngineRunner(
        runtime, few, example=example, max_batch=2, max_tokens=tokens, graphs=False, seed=asked.seed,
        mix=RequestMix(lengths=sizes, new_tokens=steps + 1),
    ) as runner:  # fmt: skip
        found = collect_profile_by_group(
            runner, space, Path(scratch) / "p.parquet", buckets=sizes, repeats=2, steps=steps, batches=(1, 2)
        )
    return PlanLatencyPredictor.fit(found, seed=asked.seed)


def cases(space: PlanSpace, count: int) -> list[Plan]:
    """Plans of the whole range, the cheapest and the dearest among them."""
    ranked = sorted(
        space.plans, key=lambda plan: (space.tiers.index(plan.tier), len(plan.blocks), plan.top_k)
    )
    return [ranked[round(at)] for at in np.linspace(0, len(ranked) - 1, count)]


def pairs(
    asked: argparse.Namespace, engine: Engine, selector: PlanSelector, plan: Plan, prompts: RandomPrompts
) -> list[list[float]]:
    """Samples of one plan: rows of `COLUMNS`."""
    generator = np.random.default_rng(asked.seed)
    images, only = int(plan.tier is not None), selector.restrict([plan])

    def one(decide: Callable[[Any], PlanDecider]) -> RequestOutput:
        inputs = make_full_prompt(prompts, plan, asked.text_tokens)
        request = GenerationRequest(
            inputs=inputs, decide=decide(inputs), max_new_tokens=asked.new_tokens, budget_ms=BUDGET_MS
        )
        found = engine.submit(request).result()
        if found.plan != plan:
            raise SystemExit(f"{found.plan.id} ran, not {plan.id}")
        return found

    def given(_: Any) -> PlanDecider:
        return FixedPlanPolicy(plan=plan)

    def decided(inputs: Any) -> PlanDecider:
        return only.make_policy(text_tokens=asked.text_tokens, images=images, input_ids=inputs["input_ids"])

    rows = []
    for number in range(-asked.warmup, asked.pairs):
        row = dict.fromkeys(COLUMNS, 0.0)
        for at in generator.permutation(3):
            found = one(decided if at == 1 else given)
            row[COLUMNS[at]] = found.total_ms
            if at == 1:
                row["decide_ms"] = found.decide_ms
                ask = LatencyQuery(
                    plan=plan, text_tokens=asked.text_tokens, images=images, new_tokens=len(found.tokens)
                )
                selector.predictor.observe(ask, found.total_ms, prefill_ms=found.total_ms - found.decode_ms)
        if number >= 0:
            rows.append([round(row[name], 5) for name in COLUMNS])
    return rows


def ratio(over: np.ndarray, under: np.ndarray, seed: int, draws: int = 2000) -> list[float]:
    """How much the median of one is above that of the other, a share, and its 95 % interval over pairs."""
    at = np.random.default_rng(seed).integers(len(over), size=(draws, len(over)))
    found = np.median(over[at], axis=1) / np.median(under[at], axis=1) - 1.0
    middle = float(np.median(over) / np.median(under) - 1.0)
    return [round(each, 6) for each in (middle, *np.quantile(found, (0.025, 0.975)).tolist())]


def alone(
    asked: argparse.Namespace, selector: PlanSelector, plan: Plan, prompts: RandomPrompts
) -> dict[str, Any]:
    """Microseconds of the parts of deciding, on the host; the median, and all samples of the whole."""
    inputs, images = make_full_prompt(prompts, plan, asked.text_tokens), int(plan.tier is not None)
    token = torch.randn(selector.controllers.width if selector.controllers else 1)
    ask = LatencyQuery(plan=plan, text_tokens=asked.text_tokens, images=images, new_tokens=asked.new_tokens)
    # On a GPU a decider gets ready while the device works; that is no time of the request's.
    ready = asked.device.startswith("cuda")
    marks: dict[str, list[float]] = {"first": [], "ready": [], "second": [], "observe": []}
    for number in range(asked.warmup + asked.pairs):
        decide = selector.make_policy(text_tokens=asked.text_tokens, images=images, input_ids=inputs["input_ids"])
        request = GenerationRequest(
            inputs=inputs, decide=decide, max_new_tokens=asked.new_tokens, budget_ms=BUDGET_MS
        )
        begin = time.perf_counter()
        decide.choose_initial(request, BUDGET_MS)
        between = time.perf_counter()
        if ready:
            decide.prepare(request)
        prepared = time.perf_counter()
        decide.choose_plan(token, request, BUDGET_MS)
        end = time.perf_counter()
        selector.predictor.observe(ask, 100.0, prefill_ms=50.0)
        learnt = time.perf_counter()
        if number >= asked.warmup:
            spent = (between - begin, prepared - between, end - prepared, learnt - end)
            for name, each in zip(marks, spent, strict=True):
                marks[name].append(round(1e6 * each, 2))
    return {"median_us": {name: float(np.median(each)) for name, each in marks.items()}, "samples_us": marks}


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: overhead of deciding."""
    worst = max(record["cases"], key=lambda case: case["overhead"][0])
    middle, low, high = (100.0 * value for value in worst["overhead"])
    settings, host_us = record["settings"], record["host"]["median_us"]
    # A run without a model folder uses random weights of a named geometry.
    geometry = None if settings["model"] else settings["geometry"]
    command = "make -C benchmarks/adaptive figures, which makes overhead.json"
    if geometry:
        command = (
            f"python benchmarks/adaptive/overhead.py --geometry {geometry} --new-tokens "
            f"{settings['new_tokens']} --plans {settings['plans']} --pairs {settings['pairs']}"
        )
    yield Claim(
        id=f"adaptive/6-deciding{f'-{geometry}' if geometry else ''}{device_suffix(record)}",
        claim=f"Median latency that predictor and controllers add to a request of {settings['new_tokens']} "
        f"tokens ({geometry or 'Grid-VQA'}), worst of {len(record['cases'])} plans.",
        value=round(middle, 2),
        unit="%",
        target="< 1",
        baseline="the same plan, given",
        command=command,
        details={
            "low": round(low, 2),
            "high": round(high, 2),
            "p50_ms": round(worst["p50_ms"], 3),
            "difference_without_deciding": round(100.0 * worst["chance"][0], 2),
            "host_us": round(host_us["first"] + host_us["second"], 1),
        },
    )


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options(parser)
    parser.add_argument("--profile", type=Path, help="predictor.json; by default of a small profile")
    parser.add_argument("--controller", type=Path, help="trained controllers; by default untrained ones")
    parser.add_argument("--plans", type=int, default=3, help="plans to compare by")
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--text-tokens", type=int, help="by default 32, or what there is room for")
    parser.add_argument("--new-tokens", type=int, default=16)
    asked = parser.parse_args(given)
    settings = settled(asked)
    adapter, example = built(asked)
    runtime, tokens = PlanRuntime(adapter), max_total_tokens(asked, adapter)
    # A profile has twice as many, too.
    most = room(asked, adapter, asked.new_tokens) // 2
    (asked.text_tokens,) = within(asked.text_tokens and [asked.text_tokens], [32], most, "--text-tokens")
    if asked.profile is None:
        predictor = profiled(asked, runtime, example, tokens)
    else:
        predictor = PlanLatencyPredictor.load(asked.profile)
    space = predictor.space
    if asked.controller is None:
        embeddings: Any = adapter.model.get_input_embeddings()
        width = embeddings.weight.shape[1]
        controllers = Controllers(space, width=width, model_id="untrained", seed=asked.seed).eval()
    else:
        controllers = Controllers.load(asked.controller)
    selector = PlanSelector(adapter=adapter, predictor=predictor, controllers=controllers)
    plans = cases(space, asked.plans)
    prompts = RandomPrompts(adapter, example, device="cpu", seed=asked.seed)
    found = []
    with Engine(adapter, runtime, plans=plans, max_batch=1, max_tokens=tokens) as engine:
        if engine.graphs.enabled:
            engine.warm_up(example)
        for plan in plans:
            rows = pairs(asked, engine, selector, plan, prompts)
            first, second, again, spent = np.array(rows).T
            told = {
                "plan": plan.id, "p50_ms": float(np.median(first)),
                "overhead": ratio(second, first, asked.seed), "chance": ratio(again, first, asked.seed),
                "decide_ms": float(np.median(spent)), "samples": rows,
            }  # fmt: skip
            found.append(told)
            low, high = told["overhead"][1:]
            print(
                f"{plan.id}: {told['p50_ms']:.3f} ms; deciding adds {told['overhead'][0]:+.2%} "
                f"({low:+.2%} to {high:+.2%}; chance {told['chance'][0]:+.2%}), "
                f"{1e3 * told['decide_ms']:.0f} us with waiting for its token"
            )
        uncaptured = list(engine.snapshot().uncaptured)
    host = alone(asked, selector, plans[-1], prompts)
    print("on the host, us:", host["median_us"])
    worst = max(each["overhead"][0] for each in found)
    record = {
        "environment": collect_environment(asked.device, seed=asked.seed), "settings": settings,
        "plans_of_the_model": len(space), "columns": COLUMNS, "target": TARGET,
        "met": math.isfinite(worst) and worst < TARGET, "cases": found, "host": host,
        "unrecorded": uncaptured,
    }  # fmt: skip
    write_atomic(asked.out, json.dumps(record, separators=(",", ":")) + "\n")
    record_claims(make_claims(record), record, asked.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
