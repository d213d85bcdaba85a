r"""Accuracy of predicted latencies for plans and lengths that were not profiled (line 3).

::

    export PYTHONPATH=src:.
    python benchmarks/adaptive/predictor.py --out results/adaptive/predictor-cpu.json --threads 1
    python benchmarks/adaptive/predictor.py --device cuda --geometry olmoe-1b-7b --plans 45 --steps 12 \
        --buckets 32 128 512 --lengths 64 200 400 --out results/adaptive/predictor-cuda.json \
        --keep results/adaptive/profile-cuda.parquet
    python benchmarks/adaptive/predictor.py --model FOLDER --device cuda --profile profile.parquet \
        --out results/adaptive/predictor.json

Requests run in engines, as in a server. Some plans are profiled at some lengths, sequentially and in batches,
idle and under load, and a predictor is fitted; or it is fitted to an existing profile. Then random requests
of other plans, lengths and numbers of new tokens run several times in random order, idle and under load. The
number of concurrent requests is geometric, as in a queue of that load. The predictor is evaluated as fitted,
and with online correction after each request. The error of medians compares each request's predicted median
with that of its runs; the difference between both halves of the runs shows the repeatability.

`--runner eager` measures the model's own forward instead, under a load of matrix products in other processes.

The baseline is gradient boosting with monotone constraints on the same profile (`reg:quantileerror`), one
model per phase and quantile; its p99 of a request is the sum of the p99 of the phases.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import (
    add_options,
    build_model,
    fit_lengths,
    max_text_tokens,
    max_total_tokens,
    resolve_settings,
    write_table,
)

from benchmarks.claims import Claim, device_suffix, record_claims
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan, PlanSpace
from sparseflow.adaptive.predictor import LatencyQuery, PlanLatencyPredictor
from sparseflow.adaptive.profile import (
    BackgroundLoad,
    EagerRunner,
    EngineRunner,
    PlanProfile,
    RequestMix,
    collect_profile,
    collect_profile_by_group,
    compute_model_id,
    make_background_load,
    select_representative_plans,
)
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic
from sparseflow.core.timing import measure

TARGETS = {"mape": 0.05, "coverage": (0.985, 0.995)}
COLUMNS = ("request", "measured_ms", "p50_ms", "p99_ms", "learning_p50_ms", "learning_p99_ms")


def sample_requests(
    args: argparse.Namespace, space: PlanSpace, known: Sequence[Plan]
) -> list[dict[str, Any]]:
    """Sample requests whose plans and lengths are not in the profile."""
    generator = np.random.default_rng(args.seed + 1)
    candidates = [plan for plan in space.plans if plan not in set(known)] or list(space.plans)
    requests = []
    for index in generator.choice(
        len(candidates), size=args.requests, replace=len(candidates) < args.requests
    ):
        requests.append(
            {
                "plan": candidates[index],
                "text_tokens": int(generator.choice(args.lengths)),
                "new_tokens": int(generator.integers(1, 2 * args.steps)),
                "batch": 1 + min(int(generator.geometric(1.0 - max(args.loads))) - 1, args.max_batch - 1),
            }
        )
    return requests


def make_query(args: argparse.Namespace, request: dict[str, Any], level: float) -> LatencyQuery:
    """Return the query of a request at a load; sequential if idle."""
    batch = request["batch"] if level and args.runner == "engine" else 1
    size: dict[str, Any] = request | {"batch": batch}
    return LatencyQuery(**size, images=int(size["plan"].tier is not None), load=level)


def evaluate(
    args: argparse.Namespace,
    runner: EagerRunner | EngineRunner,
    load: BackgroundLoad,
    predictor: PlanLatencyPredictor,
    requests: Sequence[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Run every request several times at each load; yields a row per load."""
    online_predictor = PlanLatencyPredictor.from_dict(predictor.to_dict())
    for level in args.loads:
        queries = [make_query(args, request, level) for request in requests]
        predictions = np.stack(predictor.predict(queries), axis=1)
        generator = np.random.default_rng(args.seed + 2)
        # An engine serves a group of plans at a time.
        groups = (
            runner.groups if isinstance(runner, EngineRunner) else (tuple(query.plan for query in queries),)
        )
        samples = []
        for group in groups:
            indices = [index for index, query in enumerate(queries) if query.plan in group]
            for index in indices:
                runner.run(queries[index].plan, queries[index].text_tokens, steps=1)
            with load(level):
                for round_index in range(args.runs):
                    for index in generator.permutation(indices).tolist():
                        query = queries[index]
                        times = runner.run(
                            query.plan, query.text_tokens, steps=query.new_tokens - 1, batch=query.batch
                        )
                        measured_ms = times.prefill_ms + sum(times.steps_ms)
                        online_prediction = [value.item() for value in online_predictor.predict([query])]
                        online_predictor.observe(query, measured_ms, prefill_ms=times.prefill_ms)
                        samples.append([index, measured_ms, *predictions[index].tolist(), *online_prediction])
                    print(f"load {level:g}: {round_index + 1} of {args.runs} rounds", file=sys.stderr)
        yield {"load": level, **summarize(np.array(samples)), "samples": samples}


def summarize(samples: np.ndarray) -> dict[str, float]:
    """Return errors of medians and coverages of rows of `COLUMNS`."""
    request_index, measured_ms, p50, p99, online_p50, online_p99 = samples.T
    rows_by_request = [request_index == index for index in np.unique(request_index)]
    medians = np.array([np.median(measured_ms[rows]) for rows in rows_by_request])

    def mean_error(predicted: np.ndarray) -> float:
        return float(
            np.mean(
                [
                    abs(np.median(predicted[rows]) / median - 1.0)
                    for rows, median in zip(rows_by_request, medians, strict=True)
                ]
            )
        )

    halves = [
        abs(np.median(measured_ms[rows][::2]) / np.median(measured_ms[rows][1::2]) - 1.0)
        for rows in rows_by_request
    ]
    return {
        "mape": mean_error(p50),
        "coverage": float(np.mean(measured_ms <= p99)),
        "learning_mape": mean_error(online_p50),
        "learning_coverage": float(np.mean(measured_ms <= online_p99)),
        "halves_differ": float(np.mean(halves)),
        "p50_ms": float(np.median(measured_ms)),
        "margin": float(np.median(p99 / p50)),
        "learning_margin": float(np.median(online_p99 / online_p50)),
        "requests": len(measured_ms),
    }


def evaluate_boosting(
    args: argparse.Namespace,
    profile: PlanProfile,
    requests: Sequence[dict[str, Any]],
    rows: Sequence[dict[str, Any]],
) -> list[dict[str, float]]:
    """Evaluate gradient boosting on the same profile: error and coverage at each load."""
    import xgboost

    vision = profile.metadata.vision_tokens

    def features(plan: Plan, text: float, context: float, batch: int, load: float) -> list[float]:
        vision_tokens, num_blocks = vision[plan.tier] if plan.tier else 0, len(plan.blocks)
        return [
            vision_tokens,
            text + vision_tokens + context,
            num_blocks,
            plan.insertion_position,
            plan.top_k,
            batch,
            load,
        ]

    prefill = [
        (
            features(measurement.plan, measurement.text_tokens, 0.0, measurement.batch, measurement.load),
            measurement.prefill_ms,
        )
        for measurement in profile.successful
    ]
    step = [
        (
            features(
                measurement.plan, measurement.text_tokens, index + 1.0, measurement.batch, measurement.load
            ),
            ms,
        )
        for measurement in profile.successful
        for index, ms in enumerate(measurement.steps_ms)
    ]

    def fit_model(rows: list[Any], quantile: float) -> Any:
        settings = {
            "objective": "reg:quantileerror", "quantile_alpha": quantile, "tree_method": "hist",
            "monotone_constraints": "(1,1,1,1,1,1,1)", "eta": 0.1, "max_depth": 5, "seed": args.seed,
            "nthread": torch.get_num_threads(),
        }  # fmt: skip
        x, y = np.array([row[0] for row in rows]), np.log([row[1] for row in rows])
        model = xgboost.train(settings, xgboost.DMatrix(x, label=y), num_boost_round=200)
        return lambda x: np.exp(model.inplace_predict(np.array(x)))

    results = []
    models = {
        (name, quantile): fit_model(data, quantile)
        for name, data in (("prefill", prefill), ("step", step))
        for quantile in (0.5, 0.99)
    }
    for row in rows:
        predicted, queries = {}, [make_query(args, request, row["load"]) for request in requests]
        for quantile in (0.5, 0.99):
            first, later = (
                models[name, quantile](
                    [
                        features(query.plan, query.text_tokens, context(query), query.batch, row["load"])
                        for query in queries
                    ]
                )
                for name, context in (
                    ("prefill", lambda query: 0.0),
                    ("step", lambda query: query.new_tokens / 2.0),
                )
            )
            predicted[quantile] = first + (np.array([r["new_tokens"] for r in requests]) - 1.0) * later
        samples = np.array(row["samples"])
        index, measured_ms = samples[:, 0].astype(int), samples[:, 1]
        medians = {request: np.median(measured_ms[index == request]) for request in set(index.tolist())}
        results.append(
            {
                "load": row["load"],
                "mape": float(
                    np.mean(
                        [abs(predicted[0.5][request] / median - 1.0) for request, median in medians.items()]
                    )
                ),
                "coverage": float(np.mean(measured_ms <= predicted[0.99][index])),
                "margin": float(np.median(predicted[0.99] / predicted[0.5])),
            }
        )
    return results


def load_profile(args: argparse.Namespace) -> PlanProfile:
    """Load a profile and set the options to what it contains."""
    profile = PlanProfile.load(args.profile)
    config, measurements = profile.metadata.config, profile.successful
    lengths = sorted({measurement.text_tokens for measurement in measurements})
    args.runner, args.buckets, args.loads = (
        config["runner"],
        lengths,
        sorted({measurement.load for measurement in measurements}),
    )
    args.steps = max(len(measurement.steps_ms) for measurement in measurements)
    if args.runner == "engine":
        args.max_batch, args.max_tokens = config["max_batch"], config["max_tokens"]
    midpoints = [(shorter + longer) // 2 for shorter, longer in pairwise(lengths)] or lengths
    args.lengths = args.lengths or midpoints
    return profile


def write_samples(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write a row per request and load."""
    columns = np.concatenate(
        [np.column_stack([[row["load"]] * len(row["samples"]), row["samples"]]) for row in rows]
    )
    write_table(path, dict(zip(("load", *COLUMNS), columns.T.astype(np.float32), strict=True)))


def time_predictor(predictor: PlanLatencyPredictor, query: LatencyQuery) -> dict[str, float]:
    """Return median times of predictor calls, ms."""
    size = {
        "text_tokens": query.text_tokens,
        "images": query.images,
        "new_tokens": query.new_tokens,
        "load": 0.3,
    }
    scratch = PlanLatencyPredictor.from_dict(predictor.to_dict())
    work = {
        "all_plans_ms": lambda: predictor.predict_all(**size),
        "observe_ms": lambda: scratch.observe(query, 100.0),
    }
    return {name: measure(call, repeats=200).median_ms for name, call in work.items()}


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: predictions of requests that were not profiled."""
    command = "make -C benchmarks/adaptive figures, which makes predictor.json"
    for row, boosting in zip(record["loads"], record["boosting"], strict=True):
        load = "idle" if not row["load"] else f"load-{round(100 * row['load'])}"
        condition = "idle" if not row["load"] else f"at {100.0 * row['load']:.0f} % load"
        yield Claim(
            id=f"adaptive/3-p50-{load}{device_suffix(record)}",
            claim=f"Mean error of predicted median latencies, {condition}, for plans and lengths that were "
            "not profiled.",
            value=round(100.0 * row["mape"], 2),
            unit="%",
            target="< 5",
            baseline=f"gradient boosting: {100.0 * boosting['mape']:.1f} %",
            command=command,
            details={
                "requests": row["requests"],
                "online_mape": round(row["learning_mape"], 4),
                "repeatability": round(row["halves_differ"], 4),
            },
        )
        coverage = round(100.0 * row["learning_coverage"], 2)
        yield Claim(
            id=f"adaptive/3-p99-{load}{device_suffix(record)}",
            claim=f"Requests below their predicted p99 with online correction, {condition}.",
            value=coverage,
            unit="%",
            target="98.5 to 99.5",
            met=98.5 <= coverage <= 99.5,
            baseline=f"gradient boosting: {100.0 * boosting['coverage']:.1f} %",
            command=command,
            details={
                "requests": row["requests"],
                "offline_coverage": round(row["coverage"], 4),
                "p99_over_p50": round(row["learning_margin"], 3),
            },
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--runner", choices=("engine", "eager"), default="engine")
    parser.add_argument("--plans", type=int, default=18, help="plans to profile")
    parser.add_argument(
        "--buckets", type=int, nargs="+", help="text tokens to profile; by default 16, 96 and 256"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", help="text tokens of evaluated requests; by default 40, 150 and 220"
    )
    parser.add_argument("--batches", type=int, nargs="+", help="batch sizes to profile")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--repeats", type=int, default=3, help="rounds of the profile")
    parser.add_argument("--steps", type=int, default=6, help="decode steps of the profile")
    parser.add_argument("--requests", type=int, default=20, help="number of evaluated requests")
    parser.add_argument("--runs", type=int, default=8, help="runs of each request at each load")
    parser.add_argument(
        "--settle-s", type=float, default=8.0, help="time until a load counts as steady, seconds"
    )
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument(
        "--profile",
        type=Path,
        help="existing profile of the model on this device; sets plans, loads, sizes and steps, and by "
        "default --lengths between its text tokens",
    )
    parser.add_argument("--keep", type=Path, help="Parquet file of the profile; an existing one is continued")
    args = parser.parse_args(argv)
    existing_profile = None if args.profile is None else load_profile(args)
    settings = resolve_settings(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    adapter, example = build_model(args)
    limit = max_text_tokens(args, adapter, 2 * args.steps)
    args.buckets = fit_lengths(args.buckets, [16, 96, 256], limit, "--buckets")
    args.lengths = fit_lengths(args.lengths, [40, 150, 220], limit, "--lengths")
    settings |= {"buckets": args.buckets, "lengths": args.lengths}
    runtime = PlanRuntime(adapter)
    if existing_profile is None:
        space = PlanSpace.from_importance(adapter.geometry)
        known = select_representative_plans(space, args.plans, seed=args.seed)
    else:
        if existing_profile.metadata.model_id != compute_model_id(adapter.model):
            parser.error(f"{args.profile} belongs to another model than {args.model}")
        space, known = (
            existing_profile.metadata.space,
            list({measurement.plan: None for measurement in existing_profile.measurements}),
        )
    requests = sample_requests(args, space, known)
    engine = args.runner == "engine"
    batches = args.batches or (sorted({1, args.max_batch // 2 or 1, args.max_batch}) if engine else [1])

    def progress(message: str, fraction: float) -> None:
        if int(1e3 * fraction) % 100 == 0:
            print(f"{fraction:.0%}: {message}", file=sys.stderr)

    profile_options: dict[str, Any] = {
        "text_tokens": args.buckets, "loads": args.loads, "rounds": args.repeats, "decode_steps": args.steps,
        "seed": args.seed, "progress": progress, "batch_sizes": batches,
    }  # fmt: skip
    runner_options: dict[str, Any] = {
        "example": example, "max_batch": args.max_batch, "max_tokens": max_total_tokens(args, adapter),
        "mix": RequestMix(lengths=args.buckets, new_tokens=args.steps + 1), "settle_s": args.settle_s,
        "seed": args.seed,
    }  # fmt: skip
    durations_s, start_s = {}, time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        file = args.keep or Path(scratch) / "profile.parquet"
        if existing_profile is not None:
            profile = existing_profile
        elif engine:
            with EngineRunner(runtime, known, **runner_options) as first:
                profile = collect_profile_by_group(first, space, file, **profile_options)
        else:
            eager = EagerRunner(runtime, device=args.device, example=example, seed=args.seed)
            profile = collect_profile(eager, space, file, plans=known, **profile_options)
    durations_s["profile_s"], start_s = round(time.monotonic() - start_s, 2), time.monotonic()
    predictor = PlanLatencyPredictor.fit(profile, seed=args.seed)
    durations_s["fit_s"], start_s = round(time.monotonic() - start_s, 2), time.monotonic()
    if engine:
        with EngineRunner(runtime, [request["plan"] for request in requests], **runner_options) as runner:
            rows = list(evaluate(args, runner, runner.apply_load, predictor, requests))
    else:
        eager = EagerRunner(runtime, device=args.device, example=example, seed=args.seed)
        rows = list(evaluate(args, eager, make_background_load(eager.device), predictor, requests))
    durations_s["judge_s"] = round(time.monotonic() - start_s, 2)
    boosting = evaluate_boosting(args, profile, requests, rows)
    first = make_query(args, requests[0], 0.0)
    low, high = TARGETS["coverage"]
    met = all(row["mape"] < TARGETS["mape"] and low <= row["learning_coverage"] <= high for row in rows)
    record = {
        "environment": collect_environment(args.device, seed=args.seed),
        "settings": settings,
        "took": durations_s,
        "profile": {
            "plans": len(known),
            "visits": len(profile.successful),
            "vision_tokens": profile.metadata.vision_tokens,
        },
        "cross_validated_error": predictor.held_out_error,
        "speed": {"plans": len(space), **time_predictor(predictor, first)},
        "met": met,
        "requests": [request | {"plan": request["plan"].id} for request in requests],
        "samples": args.out.with_suffix(".parquet").name,
        "loads": [{name: value for name, value in row.items() if name != "samples"} for row in rows],
        "boosting": boosting,
    }
    write_samples(args.out.with_suffix(".parquet"), rows)
    write_atomic(args.out, json.dumps(record) + "\n")
    record_claims(make_claims(record), record, args.out)
    print(f"{len(profile.successful)} measurements of {len(known)} plans; {durations_s}")
    for row, baseline in zip(rows, boosting, strict=True):
        print(
            f"load {row['load']:g}, {row['requests']} requests of {row['p50_ms']:.1f} ms: median error "
            f"{row['mape']:.2%} ({row['learning_mape']:.2%} online; repeatability "
            f"{row['halves_differ']:.2%}), below p99 {row['coverage']:.2%} ({row['learning_coverage']:.2%}), "
            f"p99 {row['margin']:.2f}x p50 ({row['learning_margin']:.2f}x)"
        )
        print(f"  boosting: {baseline['mape']:.2%}, {baseline['coverage']:.2%}, {baseline['margin']:.2f}x")
    speed = record["speed"]
    print(f"all {len(space)} plans: {speed['all_plans_ms']:.3f} ms; {speed['observe_ms']:.3f} ms to observe")
    return 0


if __name__ == "__main__":
    sys.exit(main())
