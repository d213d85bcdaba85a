r"""How well latencies are predicted, of plans and lengths that were not profiled, idle and beside a load.

::

    export PYTHONPATH=src
    python benchmarks/adaptive/predictor.py --out results/adaptive/predictor-cpu.json --threads 1
    python benchmarks/adaptive/predictor.py --device cuda --geometry olmoe-1b-7b --plans 45 --steps 12 \
        --buckets 32 128 512 --lengths 64 200 400 --out results/adaptive/predictor-cuda.json \
        --keep results/adaptive/profile-cuda.parquet
    python benchmarks/adaptive/predictor.py --model FOLDER --device cuda --out results/adaptive/predictor.json

Some plans are profiled at some lengths, and a predictor is fitted. Then requests are drawn from other plans,
other lengths and other numbers of new tokens; each is run several times, all in random order, idle and beside
the load. The predictor is judged twice: as it was fitted, and as it learns on from each request that ends.
The error of medians is of each request's median over its runs; half of the runs against the other half says
how near a median can be told at all.

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
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparseflow.adaptive.adapters import Inputs, adapter_of
from sparseflow.adaptive.knobs import Knobs
from sparseflow.adaptive.plan import Plan, PlanSpace
from sparseflow.adaptive.predictor import Ask, Predictor
from sparseflow.adaptive.profile import EagerRunner, Profile, background, profile, spread
from sparseflow.core.environment import environment
from sparseflow.core.files import write_atomic
from sparseflow.core.timing import measure

TARGETS = {"mape": 0.05, "coverage": (0.985, 0.995)}
COLUMNS = ("request", "measured_ms", "p50_ms", "p99_ms", "learning_p50_ms", "learning_p99_ms")
GEOMETRIES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vision": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 32, "patch_size": 8,
        },
        "text": {
            "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 12,
            "num_attention_heads": 4, "num_experts": 16, "num_experts_per_tok": 8, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2,
        },
    },
    "olmoe-1b-7b": {
        "vision": {"image_size": 192, "patch_size": 16},
        "text": {"num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16},
    },
}  # fmt: skip


def built(asked: argparse.Namespace) -> tuple[Any, Inputs | None]:
    """A model, and a request of it with one image."""
    import transformers

    if asked.model is not None:
        model = transformers.AutoModelForImageTextToText.from_pretrained(asked.model, dtype=asked.dtype)
    else:
        made = GEOMETRIES[asked.geometry]
        text = transformers.OlmoeConfig(**made["text"])
        config = transformers.LlavaConfig(
            vision_config=transformers.SiglipVisionConfig(**made["vision"]), text_config=text,
            image_token_index=text.vocab_size - 1, vision_feature_select_strategy="full",
            vision_feature_layer=-1,
        )  # fmt: skip
        torch.manual_seed(asked.seed)
        torch.set_default_dtype(getattr(torch, asked.dtype))
        with torch.device(asked.device):
            model = transformers.LlavaForConditionalGeneration(config)
        torch.set_default_dtype(torch.float32)
    model = model.to(asked.device).eval()
    adapter = adapter_of(model)
    size = getattr(adapter, "tokens_per_crop", None)
    if size is None:
        return adapter, None
    vision: Any = model.config.vision_config
    ids = torch.tensor([[1, *[model.config.image_token_index] * (14 * size), 2]])
    pixels = torch.rand(
        14, 3, vision.image_size, vision.image_size, generator=torch.Generator().manual_seed(1)
    )
    return adapter, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


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
            }
        )
    return found


def judged(
    asked: argparse.Namespace, runner: EagerRunner, predictor: Predictor, requests: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Every request, several times, at each load."""
    learning = Predictor.from_dict(predictor.to_dict())
    for level in asked.loads:
        asks = [
            Ask(**request, images=int(request["plan"].tier is not None), load=level) for request in requests
        ]
        fixed = np.stack(predictor.predict(asks), axis=1)
        generator = np.random.default_rng(asked.seed + 2)
        for request in asks:
            runner.run(request.plan, request.text_tokens, steps=1)
        samples = []
        with background(runner.device)(level):
            for number in range(asked.runs):
                for at in generator.permutation(len(asks)).tolist():
                    ask = asks[at]
                    timed = runner.run(ask.plan, ask.text_tokens, steps=ask.new_tokens - 1)
                    took = timed.prefill_ms + sum(timed.steps_ms)
                    now = [value.item() for value in learning.predict([ask])]
                    learning.observe(ask, took, prefill_ms=timed.prefill_ms)
                    samples.append([at, took, *fixed[at].tolist(), *now])
                print(f"load {level:g}: {number + 1} of {asked.runs} rounds", file=sys.stderr)
        yield {"load": level, **summary(np.array(samples)), "samples": rounded(samples)}


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
    found: Profile, requests: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], seed: int
) -> list[dict[str, float]]:
    """Gradient boosting on the same profile: error and coverage at each load."""
    import xgboost

    vision = found.about.vision_tokens

    def features(plan: Plan, text: float, context: float, load: float) -> list[float]:
        seen = vision[plan.tier] if plan.tier else 0
        return [seen, text + seen + context, len(plan.blocks), plan.insertion_position, plan.top_k, load]

    prefill = [(features(v.plan, v.text_tokens, 0.0, v.load), v.prefill_ms) for v in found.timed]
    step = [
        (features(v.plan, v.text_tokens, at + 1.0, v.load), ms)
        for v in found.timed
        for at, ms in enumerate(v.steps_ms)
    ]

    def fitted(rows: list[Any], quantile: float) -> Any:
        settings = {
            "objective": "reg:quantileerror", "quantile_alpha": quantile, "tree_method": "hist",
            "monotone_constraints": "(1,1,1,1,1,1)", "eta": 0.1, "max_depth": 5, "seed": seed,
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
        predicted = {}
        for q in (0.5, 0.99):
            first = models["prefill", q](
                [features(r["plan"], r["text_tokens"], 0.0, row["load"]) for r in requests]
            )
            later = models["step", q](
                [features(r["plan"], r["text_tokens"], r["new_tokens"] / 2.0, row["load"]) for r in requests]
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


def rounded(samples: Sequence[Sequence[float]]) -> list[list[float]]:
    """Five digits are more than a timer tells."""
    return [[row[0], *(float(f"{value:.5g}") for value in row[1:])] for row in samples]


def speed(predictor: Predictor, ask: Ask) -> dict[str, float]:
    """Median times of what runs beside a request, milliseconds."""
    size = {"text_tokens": ask.text_tokens, "images": ask.images, "new_tokens": ask.new_tokens, "load": 0.3}
    scratch = Predictor.from_dict(predictor.to_dict())
    work = {
        "all_plans_ms": lambda: predictor.predict_all(**size),
        "observe_ms": lambda: scratch.observe(ask, 100.0),
    }
    return {name: measure(call, repeats=200).median_ms for name, call in work.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder of a model; by default random weights")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="tiny")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", help="float32 on a CPU, bfloat16 on a GPU by default")
    parser.add_argument("--plans", type=int, default=18, help="plans to profile")
    parser.add_argument(
        "--buckets", type=int, nargs="+", default=[16, 96, 256], help="text tokens to profile"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[40, 150, 220], help="text tokens to judge by"
    )
    parser.add_argument("--loads", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--repeats", type=int, default=3, help="of each, in the profile")
    parser.add_argument("--steps", type=int, default=6, help="tokens after the first, in the profile")
    parser.add_argument("--requests", type=int, default=20, help="to judge by")
    parser.add_argument("--runs", type=int, default=8, help="of each of them, at each load")
    parser.add_argument("--threads", type=int, help="of a CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--keep", type=Path, help="Parquet file of the profile, gone on with if it is there")
    asked = parser.parse_args()
    asked.dtype = asked.dtype or ("bfloat16" if asked.device.startswith("cuda") else "float32")
    if asked.threads:
        torch.set_num_threads(asked.threads)
    adapter, example = built(asked)
    runner = EagerRunner(Knobs(adapter), device=asked.device, example=example, seed=asked.seed)
    space = PlanSpace.of(adapter.geometry, [1.0 / (1 + at) for at in range(adapter.geometry.depth)])
    known = spread(space, asked.plans, seed=asked.seed)

    def progress(what: str, done: float) -> None:
        if int(1e3 * done) % 100 == 0:
            print(f"{done:.0%}: {what}", file=sys.stderr)

    took, begun = {}, time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        found = profile(
            runner, space, asked.keep or Path(scratch) / "profile.parquet", buckets=asked.buckets,
            plans=known, loads=asked.loads, repeats=asked.repeats, steps=asked.steps, seed=asked.seed,
            progress=progress,
        )  # fmt: skip
    took["profile_s"], begun = round(time.monotonic() - begun, 2), time.monotonic()
    predictor = Predictor.fit(found, seed=asked.seed)
    took["fit_s"], begun = round(time.monotonic() - begun, 2), time.monotonic()
    requests = drawn(asked, space, known)
    rows = list(judged(asked, runner, predictor, requests))
    took["judge_s"] = round(time.monotonic() - begun, 2)
    rivals = boosted(found, requests, rows, asked.seed)
    first = Ask(**requests[0], images=int(requests[0]["plan"].tier is not None))
    low, high = TARGETS["coverage"]
    met = all(row["mape"] < TARGETS["mape"] and low <= row["learning_coverage"] <= high for row in rows)
    settings = {name: value for name, value in vars(asked).items() if name not in ("out", "keep", "model")}
    record = {
        "environment": environment(asked.device, seed=asked.seed),
        "settings": settings | {"model": None if asked.model is None else asked.model.name},
        "took": took,
        "profile": {
            "plans": len(known),
            "visits": len(found.timed),
            "vision_tokens": found.about.vision_tokens,
        },
        "cross_validated_error": predictor.held_out,
        "speed": {"plans": len(space), **speed(predictor, first)},
        "met": met,
        "requests": [request | {"plan": request["plan"].id} for request in requests],
        "columns": COLUMNS,
        "loads": rows,
        "boosting": rivals,
    }
    write_atomic(asked.out, json.dumps(record) + "\n")
    print(f"{len(found.timed)} visits of {len(known)} plans; {took}")
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
