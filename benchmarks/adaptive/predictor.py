r"""How well latencies are predicted, of plans and lengths that were not profiled, idle and beside a load.

::

    export PYTHONPATH=src:.
    python benchmarks/adaptive/predictor.py --out results/adaptive/predictor-cpu.json --threads 1
    python benchmarks/adaptive/predictor.py --device cuda --geometry olmoe-1b-7b --plans 45 --steps 12 \
        --buckets 32 128 512 --lengths 64 200 400 --out results/adaptive/predictor-cuda.json \
        --keep results/adaptive/profile-cuda.parquet
    python benchmarks/adaptive/predictor.py --model FOLDER --device cuda --profile profile.parquet \
        --out results/adaptive/predictor.json

Requests run as they are served, by engines. Some plans are profiled at some lengths, alone and beside others,
idle and with others to come, and a predictor is fitted; or it is fitted to a profile that is there already.
Then requests are drawn from other plans, other lengths and other numbers of new tokens; each is run several
times, all in random order, idle and beside the load, where it meets as many others when it comes as one does
in a line of that load (a geometric number). The predictor is judged twice: as it was fitted, and as it learns
on from each request that ends. The error of medians is of each request's median over its runs; half of the
runs against the other half says how near a median can be told at all.

`--runner eager` measures the model's own forward instead, beside products of matrices by other processes.

Beside it stands gradient boosting with monotone constraints on the same profile, `reg:quantileerror`, a model
for each phase and quantile, whose 99th percentile of a request is the sum of those of its parts.
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
from models import built, max_total_tokens, options, room, settled, within, write_table

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


def drawn(asked: argparse.Namespace, space: PlanSpace, known: Sequence[Plan]) -> list[dict[str, Any]]:
    """Requests that the profile does not have."""
    generator = np.random.default_rng(asked.seed + 1)
    others = [plan for plan in space.plans if plan not in set(known)] or list(space.plans)
    found = []
    for at in generator.choice(len(others), size=asked.requests, replace=len(others) < asked.requests):
        found.append(
            {
                "plan": others[at],
                "text_tokens": int(generator.choice(asked.lengths)),
                "new_tokens": int(generator.integers(1, 2 * asked.steps)),
                "batch": 1 + min(int(generator.geometric(1.0 - max(asked.loads))) - 1, asked.max_batch - 1),
            }
        )
    return found


def ask_of(asked: argparse.Namespace, request: dict[str, Any], level: float) -> LatencyQuery:
    """A request at a load; alone where there is none."""
    batch = request["batch"] if level and asked.runner == "engine" else 1
    size: dict[str, Any] = request | {"batch": batch}
    return LatencyQuery(**size, images=int(size["plan"].tier is not None), load=level)


def judged(
    asked: argparse.Namespace,
    runner: EagerRunner | EngineRunner,
    load: BackgroundLoad,
    predictor: PlanLatencyPredictor,
    requests: Sequence[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Every request, several times, at each load."""
    learning = PlanLatencyPredictor.from_dict(predictor.to_dict())
    for level in asked.loads:
        asks = [ask_of(asked, request, level) for request in requests]
        fixed = np.stack(predictor.predict(asks), axis=1)
        generator = np.random.default_rng(asked.seed + 2)
        # An engine holds some plans at a time, so their requests are run one group after the other.
        groups = runner.groups if isinstance(runner, EngineRunner) else (tuple(ask.plan for ask in asks),)
        samples = []
        for group in groups:
            mine = [at for at, ask in enumerate(asks) if ask.plan in group]
            for at in mine:
                runner.run(asks[at].plan, asks[at].text_tokens, steps=1)
            with load(level):
                for number in range(asked.runs):
                    for at in generator.permutation(mine).tolist():
                        ask = asks[at]
                        timed = runner.run(
                            ask.plan, ask.text_tokens, steps=ask.new_tokens - 1, batch=ask.batch
                        )
                        took = timed.prefill_ms + sum(timed.steps_ms)
                        now = [value.item() for value in learning.predict([ask])]
                        learning.observe(ask, took, prefill_ms=timed.prefill_ms)
                        samples.append([at, took, *fixed[at].tolist(), *now])
                    print(f"load {level:g}: {number + 1} of {asked.runs} rounds", file=sys.stderr)
        yield {"load": level, **summary(np.array(samples)), "samples": samples}


def summary(samples: np.ndarray) -> dict[str, float]:
    """Errors of medians and coverages, from rows of `COLUMNS`."""
    at, took, p50, p99, learnt50, learnt99 = samples.T
    each = [at == number for number in np.unique(at)]
    middle = np.array([np.median(took[rows]) for rows in each])

    def off(predicted: np.ndarray) -> float:
        return float(
            np.mean([abs(np.median(predicted[rows]) / m - 1.0) for rows, m in zip(each, middle, strict=True)])
        )

    halves = [abs(np.median(took[rows][::2]) / np.median(took[rows][1::2]) - 1.0) for rows in each]
    return {
        "mape": off(p50),
        "coverage": float(np.mean(took <= p99)),
        "learning_mape": off(learnt50),
        "learning_coverage": float(np.mean(took <= learnt99)),
        "halves_differ": float(np.mean(halves)),
        "p50_ms": float(np.median(took)),
        "margin": float(np.median(p99 / p50)),
        "learning_margin": float(np.median(learnt99 / learnt50)),
        "requests": len(took),
    }


def boosted(
    asked: argparse.Namespace,
    found: PlanProfile,
    requests: Sequence[dict[str, Any]],
    rows: Sequence[dict[str, Any]],
) -> list[dict[str, float]]:
    """Gradient boosting on the same profile: error and coverage at each load."""
    import xgboost

    vision = found.metadata.vision_tokens

    def features(plan: Plan, text: float, context: float, batch: int, load: float) -> list[float]:
        seen, many = vision[plan.tier] if plan.tier else 0, len(plan.blocks)
        return [seen, text + seen + context, many, plan.insertion_position, plan.top_k, batch, load]

    prefill = [(features(v.plan, v.text_tokens, 0.0, v.batch, v.load), v.prefill_ms) for v in found.successful]
    step = [
        (features(v.plan, v.text_tokens, at + 1.0, v.batch, v.load), ms)
        for v in found.successful
        for at, ms in enumerate(v.steps_ms)
    ]

    def fitted(rows: list[Any], quantile: float) -> Any:
        settings = {
            "objective": "reg:quantileerror", "quantile_alpha": quantile, "tree_method": "hist",
            "monotone_constraints": "(1,1,1,1,1,1,1)", "eta": 0.1, "max_depth": 5, "seed": asked.seed,
            "nthread": torch.get_num_threads(),
        }  # fmt: skip
        x, y = np.array([row[0] for row in rows]), np.log([row[1] for row in rows])
        model = xgboost.train(settings, xgboost.DMatrix(x, label=y), num_boost_round=200)
        return lambda x: np.exp(model.inplace_predict(np.array(x)))

    told = []
    models = {
        (name, q): fitted(data, q)
        for name, data in (("prefill", prefill), ("step", step))
        for q in (0.5, 0.99)
    }
    for row in rows:
        predicted, asks = {}, [ask_of(asked, request, row["load"]) for request in requests]
        for q in (0.5, 0.99):
            first, later = (
                models[name, q](
                    [features(a.plan, a.text_tokens, context(a), a.batch, row["load"]) for a in asks]
                )
                for name, context in (
                    ("prefill", lambda a: 0.0),
                    ("step", lambda a: a.new_tokens / 2.0),
                )
            )
            predicted[q] = first + (np.array([r["new_tokens"] for r in requests]) - 1.0) * later
        samples = np.array(row["samples"])
        at, took = samples[:, 0].astype(int), samples[:, 1]
        middle = {number: np.median(took[at == number]) for number in set(at.tolist())}
        told.append(
            {
                "load": row["load"],
                "mape": float(
                    np.mean([abs(predicted[0.5][number] / m - 1.0) for number, m in middle.items()])
                ),
                "coverage": float(np.mean(took <= predicted[0.99][at])),
                "margin": float(np.median(predicted[0.99] / predicted[0.5])),
            }
        )
    return told


def of_file(asked: argparse.Namespace) -> PlanProfile:
    """A profile that is there; what is asked is set to what it measured."""
    found = PlanProfile.load(asked.profile)
    how, timed = found.metadata.config, found.successful
    lengths = sorted({visit.text_tokens for visit in timed})
    asked.runner, asked.buckets, asked.loads = how["runner"], lengths, sorted({visit.load for visit in timed})
    asked.steps = max(len(visit.steps_ms) for visit in timed)
    if asked.runner == "engine":
        asked.max_batch, asked.max_tokens = how["max_batch"], how["max_tokens"]
    between = [(one + other) // 2 for one, other in pairwise(lengths)] or lengths
    asked.lengths = asked.lengths or between
    return found


def write_samples(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Every request at every load, a row each."""
    every = np.concatenate(
        [np.column_stack([[row["load"]] * len(row["samples"]), row["samples"]]) for row in rows]
    )
    write_table(path, dict(zip(("load", *COLUMNS), every.T.astype(np.float32), strict=True)))


def speed(predictor: PlanLatencyPredictor, ask: LatencyQuery) -> dict[str, float]:
    """Median times of what runs beside a request, milliseconds."""
    size = {"text_tokens": ask.text_tokens, "images": ask.images, "new_tokens": ask.new_tokens, "load": 0.3}
    scratch = PlanLatencyPredictor.from_dict(predictor.to_dict())
    work = {
        "all_plans_ms": lambda: predictor.predict_all(**size),
        "observe_ms": lambda: scratch.observe(ask, 100.0),
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


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options(parser)
    parser.add_argument("--runner", choices=("engine", "eager"), default="engine")
    parser.add_argument("--plans", type=int, default=18, help="plans to profile")
    parser.add_argument(
        "--buckets", type=int, nargs="+", help="text tokens to profile; by default 16, 96 and 256"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", help="text tokens to judge by; by default 40, 150 and 220"
    )
    parser.add_argument("--batches", type=int, nargs="+", help="requests at a time to profile")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--repeats", type=int, default=3, help="of each, in the profile")
    parser.add_argument("--steps", type=int, default=6, help="tokens after the first, in the profile")
    parser.add_argument("--requests", type=int, default=20, help="to judge by")
    parser.add_argument("--runs", type=int, default=8, help="of each of them, at each load")
    parser.add_argument("--settle-s", type=float, default=8.0, help="until a load of requests is believed")
    parser.add_argument("--threads", type=int, help="of a CPU")
    parser.add_argument(
        "--profile",
        type=Path,
        help="a profile of the model on this device, in place of measuring one: its plans, loads, sizes and "
        "steps count, and --lengths are by default those between its text tokens",
    )
    parser.add_argument("--keep", type=Path, help="Parquet file of the profile, gone on with if it is there")
    asked = parser.parse_args(given)
    measured = None if asked.profile is None else of_file(asked)
    settings = settled(asked)
    if asked.threads:
        torch.set_num_threads(asked.threads)
    adapter, example = built(asked)
    most = room(asked, adapter, 2 * asked.steps)
    asked.buckets = within(asked.buckets, [16, 96, 256], most, "--buckets")
    asked.lengths = within(asked.lengths, [40, 150, 220], most, "--lengths")
    settings |= {"buckets": asked.buckets, "lengths": asked.lengths}
    runtime = PlanRuntime(adapter)
    if measured is None:
        space = PlanSpace.from_importance(adapter.geometry)
        known = select_representative_plans(space, asked.plans, seed=asked.seed)
    else:
        if measured.metadata.model_id != compute_model_id(adapter.model):
            parser.error(f"{asked.profile} is of another model than {asked.model}")
        space, known = measured.metadata.space, list({visit.plan: None for visit in measured.measurements})
    requests = drawn(asked, space, known)
    engine = asked.runner == "engine"
    batches = asked.batches or (sorted({1, asked.max_batch // 2 or 1, asked.max_batch}) if engine else [1])

    def progress(what: str, done: float) -> None:
        if int(1e3 * done) % 100 == 0:
            print(f"{done:.0%}: {what}", file=sys.stderr)

    how: dict[str, Any] = {
        "buckets": asked.buckets, "loads": asked.loads, "repeats": asked.repeats, "steps": asked.steps,
        "seed": asked.seed, "progress": progress, "batches": batches,
    }  # fmt: skip
    given_to: dict[str, Any] = {
        "example": example, "max_batch": asked.max_batch, "max_tokens": max_total_tokens(asked, adapter),
        "mix": RequestMix(lengths=asked.buckets, new_tokens=asked.steps + 1), "settle_s": asked.settle_s,
        "seed": asked.seed,
    }  # fmt: skip
    took, begun = {}, time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        file = asked.keep or Path(scratch) / "profile.parquet"
        if measured is not None:
            found = measured
        elif engine:
            with EngineRunner(runtime, known, **given_to) as first:
                found = collect_profile_by_group(first, space, file, **how)
        else:
            eager = EagerRunner(runtime, device=asked.device, example=example, seed=asked.seed)
            found = collect_profile(eager, space, file, plans=known, **how)
    took["profile_s"], begun = round(time.monotonic() - begun, 2), time.monotonic()
    predictor = PlanLatencyPredictor.fit(found, seed=asked.seed)
    took["fit_s"], begun = round(time.monotonic() - begun, 2), time.monotonic()
    if engine:
        with EngineRunner(runtime, [request["plan"] for request in requests], **given_to) as runner:
            rows = list(judged(asked, runner, runner.apply_load, predictor, requests))
    else:
        eager = EagerRunner(runtime, device=asked.device, example=example, seed=asked.seed)
        rows = list(judged(asked, eager, make_background_load(eager.device), predictor, requests))
    took["judge_s"] = round(time.monotonic() - begun, 2)
    rivals = boosted(asked, found, requests, rows)
    first = ask_of(asked, requests[0], 0.0)
    low, high = TARGETS["coverage"]
    met = all(row["mape"] < TARGETS["mape"] and low <= row["learning_coverage"] <= high for row in rows)
    record = {
        "environment": collect_environment(asked.device, seed=asked.seed),
        "settings": settings,
        "took": took,
        "profile": {
            "plans": len(known),
            "visits": len(found.successful),
            "vision_tokens": found.metadata.vision_tokens,
        },
        "cross_validated_error": predictor.held_out_error,
        "speed": {"plans": len(space), **speed(predictor, first)},
        "met": met,
        "requests": [request | {"plan": request["plan"].id} for request in requests],
        "samples": asked.out.with_suffix(".parquet").name,
        "loads": [{name: each for name, each in row.items() if name != "samples"} for row in rows],
        "boosting": rivals,
    }
    write_samples(asked.out.with_suffix(".parquet"), rows)
    write_atomic(asked.out, json.dumps(record) + "\n")
    record_claims(make_claims(record), record, asked.out)
    print(f"{len(found.successful)} visits of {len(known)} plans; {took}")
    for row, rival in zip(rows, rivals, strict=True):
        print(
            f"load {row['load']:g}, {row['requests']} requests of {row['p50_ms']:.1f} ms: medians off by "
            f"{row['mape']:.2%} ({row['learning_mape']:.2%} learning on; halves of runs differ by "
            f"{row['halves_differ']:.2%}), below p99 {row['coverage']:.2%} ({row['learning_coverage']:.2%}), "
            f"which is {row['margin']:.2f}x p50 ({row['learning_margin']:.2f}x)"
        )
        print(f"  boosting: {rival['mape']:.2%}, {rival['coverage']:.2%}, {rival['margin']:.2f}x")
    quick = record["speed"]
    print(f"all {len(space)} plans: {quick['all_plans_ms']:.3f} ms; {quick['observe_ms']:.3f} ms to learn")
    return 0


if __name__ == "__main__":
    sys.exit(main())
