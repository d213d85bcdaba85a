r"""Latency that plan selection adds to a request (line 6).

::

    export PYTHONPATH=src:.
    python benchmarks/adaptive/overhead.py --out results/adaptive/overhead-cpu.json
    python benchmarks/adaptive/overhead.py --device cuda --geometry olmoe-1b-7b \
        --out results/adaptive/overhead-cuda.json
    python benchmarks/adaptive/overhead.py --model FOLDER --device cuda --profile predictor.json \
        --controller controllers.safetensors --out results/adaptive/overhead.json

Requests run one at a time in an engine, from receipt to the last token, in pairs of random order: one with a
fixed plan, and one for which predictor and both controllers select among all plans of the model, restricted
to the same plan. The predictor observes the latter, as in a server. The result is the ratio of medians with
a bootstrap interval over pairs. The same ratio between requests with fixed plans shows the effect of noise.

Plan selection is also timed by itself on the host, with the latency token already available.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import add_options, build_model, fit_lengths, max_text_tokens, max_total_tokens, resolve_settings

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
"""A budget that every plan meets."""
COLUMNS = ("given_ms", "decided_ms", "given_again_ms", "decide_ms")


def fit_small_profile(
    args: argparse.Namespace, runtime: PlanRuntime, example: Any, tokens: int
) -> PlanLatencyPredictor:
    """Fit a predictor to a small profile; its accuracy does not matter."""
    geometry = runtime.geometry
    space = PlanSpace.from_importance(geometry)
    plans = select_representative_plans(space, max(2 * len(space.tiers), 6), seed=args.seed)
    sizes, steps = [args.text_tokens, 2 * args.text_tokens], 4
    with tempfile.TemporaryDirectory() as scratch, EngineRunner(
        runtime, plans, example=example, max_batch=2, max_tokens=tokens, graphs=False, seed=args.seed,
        mix=RequestMix(lengths=sizes, new_tokens=steps + 1),
    ) as runner:  # fmt: skip
        profile = collect_profile_by_group(
            runner,
            space,
            Path(scratch) / "p.parquet",
            text_tokens=sizes,
            rounds=2,
            decode_steps=steps,
            batch_sizes=(1, 2),
        )
    return PlanLatencyPredictor.fit(profile, seed=args.seed)


def select_plans(space: PlanSpace, count: int) -> list[Plan]:
    """Return `count` plans from the smallest to the largest."""
    ranked = sorted(
        space.plans, key=lambda plan: (space.tiers.index(plan.tier), len(plan.blocks), plan.top_k)
    )
    return [ranked[round(index)] for index in np.linspace(0, len(ranked) - 1, count)]


def measure_pairs(
    args: argparse.Namespace, engine: Engine, selector: PlanSelector, plan: Plan, prompts: RandomPrompts
) -> list[list[float]]:
    """Measure one plan; returns rows of `COLUMNS`."""
    generator = np.random.default_rng(args.seed)
    images, single_plan_selector = int(plan.tier is not None), replace(selector, plans=[plan])

    def run_request(decide: Callable[[Any], PlanDecider]) -> RequestOutput:
        inputs = make_full_prompt(prompts, plan, args.text_tokens)
        request = GenerationRequest(
            inputs=inputs, decide=decide(inputs), max_new_tokens=args.new_tokens, budget_ms=BUDGET_MS
        )
        output = engine.submit(request).result()
        if output.plan != plan:
            raise SystemExit(f"{output.plan.id} ran, not {plan.id}")
        return output

    def use_fixed_plan(_: Any) -> PlanDecider:
        return FixedPlanPolicy(plan=plan)

    def decide_plan(inputs: Any) -> PlanDecider:
        return single_plan_selector.make_policy(
            text_tokens=args.text_tokens, images=images, input_ids=inputs["input_ids"]
        )

    rows = []
    for pair_index in range(-args.warmup, args.pairs):
        row = dict.fromkeys(COLUMNS, 0.0)
        for index in generator.permutation(3):
            output = run_request(decide_plan if index == 1 else use_fixed_plan)
            row[COLUMNS[index]] = output.total_ms
            if index == 1:
                row["decide_ms"] = output.decide_ms
                query = LatencyQuery(
                    plan=plan, text_tokens=args.text_tokens, images=images, new_tokens=len(output.tokens)
                )
                selector.predictor.observe(
                    query, output.total_ms, prefill_ms=output.total_ms - output.decode_ms
                )
        if pair_index >= 0:
            rows.append([round(row[name], 5) for name in COLUMNS])
    return rows


def estimate_ratio(over: np.ndarray, under: np.ndarray, seed: int, draws: int = 2000) -> list[float]:
    """Return the relative difference of medians and its 95 % bootstrap interval over pairs."""
    indices = np.random.default_rng(seed).integers(len(over), size=(draws, len(over)))
    ratios = np.median(over[indices], axis=1) / np.median(under[indices], axis=1) - 1.0
    estimate = float(np.median(over) / np.median(under) - 1.0)
    return [round(value, 6) for value in (estimate, *np.quantile(ratios, (0.025, 0.975)).tolist())]


def time_host(
    args: argparse.Namespace, selector: PlanSelector, plan: Plan, prompts: RandomPrompts
) -> dict[str, Any]:
    """Time the parts of plan selection on the host: medians and samples, microseconds."""
    inputs, images = make_full_prompt(prompts, plan, args.text_tokens), int(plan.tier is not None)
    token = torch.randn(selector.controllers.width if selector.controllers else 1)
    query = LatencyQuery(plan=plan, text_tokens=args.text_tokens, images=images, new_tokens=args.new_tokens)
    # On a GPU the preparation overlaps with the device and does not delay the request.
    prepares = args.device.startswith("cuda")
    samples_us: dict[str, list[float]] = {"first": [], "ready": [], "second": [], "observe": []}
    for number in range(args.warmup + args.pairs):
        decide = selector.make_policy(
            text_tokens=args.text_tokens, images=images, input_ids=inputs["input_ids"]
        )
        request = GenerationRequest(
            inputs=inputs, decide=decide, max_new_tokens=args.new_tokens, budget_ms=BUDGET_MS
        )
        start_s = time.perf_counter()
        decide.choose_initial(request, BUDGET_MS)
        initial_s = time.perf_counter()
        if prepares:
            decide.prepare(request)
        prepared_s = time.perf_counter()
        decide.choose_plan(token, request, BUDGET_MS)
        end_s = time.perf_counter()
        selector.predictor.observe(query, 100.0, prefill_ms=50.0)
        observed_s = time.perf_counter()
        if number >= args.warmup:
            elapsed = (initial_s - start_s, prepared_s - initial_s, end_s - prepared_s, observed_s - end_s)
            for name, elapsed_s in zip(samples_us, elapsed, strict=True):
                samples_us[name].append(round(1e6 * elapsed_s, 2))
    return {
        "median_us": {name: float(np.median(samples)) for name, samples in samples_us.items()},
        "samples_us": samples_us,
    }


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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--profile", type=Path, help="predictor (JSON); by default fitted to a small profile")
    parser.add_argument("--controller", type=Path, help="trained controllers; by default untrained ones")
    parser.add_argument("--plans", type=int, default=3, help="number of plans to measure")
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--text-tokens", type=int, help="by default 32, or fewer if the model has fewer")
    parser.add_argument("--new-tokens", type=int, default=16)
    args = parser.parse_args(argv)
    settings = resolve_settings(args)
    adapter, example = build_model(args)
    runtime, tokens = PlanRuntime(adapter), max_total_tokens(args, adapter)
    # The profile also measures twice this length.
    limit = max_text_tokens(args, adapter, args.new_tokens) // 2
    (args.text_tokens,) = fit_lengths(args.text_tokens and [args.text_tokens], [32], limit, "--text-tokens")
    if args.profile is None:
        predictor = fit_small_profile(args, runtime, example, tokens)
    else:
        predictor = PlanLatencyPredictor.load(args.profile)
    space = predictor.space
    if args.controller is None:
        embeddings: Any = adapter.model.get_input_embeddings()
        width = embeddings.weight.shape[1]
        controllers = Controllers(space, width=width, model_id="untrained", seed=args.seed).eval()
    else:
        controllers = Controllers.load(args.controller)
    selector = PlanSelector(adapter=adapter, predictor=predictor, controllers=controllers)
    plans = select_plans(space, args.plans)
    prompts = RandomPrompts(adapter, example, device="cpu", seed=args.seed)
    cases = []
    with Engine(adapter, runtime, plans=plans, max_batch=1, max_tokens=tokens) as engine:
        if engine.graphs.enabled:
            engine.warm_up(example)
        for plan in plans:
            rows = measure_pairs(args, engine, selector, plan, prompts)
            first, second, repeated, decide_ms = np.array(rows).T
            result = {
                "plan": plan.id,
                "p50_ms": float(np.median(first)),
                "overhead": estimate_ratio(second, first, args.seed),
                "chance": estimate_ratio(repeated, first, args.seed),
                "decide_ms": float(np.median(decide_ms)),
                "samples": rows,
            }
            cases.append(result)
            low, high = result["overhead"][1:]
            print(
                f"{plan.id}: {result['p50_ms']:.3f} ms; selection adds {result['overhead'][0]:+.2%} "
                f"({low:+.2%} to {high:+.2%}; chance {result['chance'][0]:+.2%}), "
                f"{1e3 * result['decide_ms']:.0f} us including the wait for the latency token"
            )
        uncaptured = list(engine.snapshot().uncaptured)
    host = time_host(args, selector, plans[-1], prompts)
    print("on the host, us:", host["median_us"])
    worst = max(result["overhead"][0] for result in cases)
    record = {
        "environment": collect_environment(args.device, seed=args.seed), "settings": settings,
        "plans_of_the_model": len(space), "columns": COLUMNS, "target": TARGET,
        "met": math.isfinite(worst) and worst < TARGET, "cases": cases, "host": host,
        "unrecorded": uncaptured,
    }  # fmt: skip
    write_atomic(args.out, json.dumps(record, separators=(",", ":")) + "\n")
    record_claims(make_claims(record), record, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
