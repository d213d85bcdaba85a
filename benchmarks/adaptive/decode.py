"""Speed of captured decode steps and prompts against transformers (line 6).

::

    export PYTHONPATH=src:.
    python benchmarks/adaptive/decode.py --out results/adaptive/decode-cpu.json
    python benchmarks/adaptive/decode.py --device cuda --out results/adaptive/decode-cuda.json

The model is an OLMoE with random weights, on a GPU of the size of OLMoE-1B-7B and in bfloat16. Two checks
precede the timing:

- greedy tokens of a model of the same width with two blocks, in float32, must be equal;
- logits of the model, step by step with random tokens, must be close; the record contains how often the most
  probable token agrees.

A step is timed from tokens on the host to next tokens on the host, in interleaved order: transformers'
forward with a growing cache and the fastest of its expert implementations ("own"), captured steps from cache
slots with our kernels ("recorded"), and captured steps without them. All use the same random tokens. Prompts
are timed with the model's forward and in captured parts, then the experts of one block. On a CPU nothing is
captured and the same code runs.

The floor of a step is the time to read its data once at the bandwidth of a large copy: weights of attention,
routers, the expected experts and the head, and keys and values.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.claims import Claim, record_claims
from sparseflow.adaptive.adapters import Adapter, get_adapter
from sparseflow.adaptive.engine.cache import SlotCache
from sparseflow.adaptive.engine.decode import DecodeRunner, get_decode_plan
from sparseflow.adaptive.engine.graphs import GraphCache
from sparseflow.adaptive.engine.kernel_patcher import TOLERANCE, KernelPatcher
from sparseflow.adaptive.engine.prefill.prefill import PrefillRunner
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan
from sparseflow.core.device.ceilings import measure_ceilings
from sparseflow.core.environment import collect_environment
from sparseflow.core.extras import get_version
from sparseflow.core.files import write_atomic
from sparseflow.core.timing import Comparison, bootstrap_median, compare

GEOMETRY: dict[str, dict[str, int]] = {
    "cuda": {
        "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
    },
    "cpu": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_experts": 8, "num_experts_per_tok": 4,
    },
}  # fmt: skip
"""OLMoE-1B-7B, and a small model for CPUs."""

EXPERTS = {"cuda": ("grouped_mm", "batched_mm", "eager"), "cpu": ("eager", "batched_mm")}
"""Expert implementations of transformers; the first one runs prompts, because the others need much memory."""
DTYPE = {"cuda": "bfloat16", "cpu": "float32"}
CHECKED_STEPS = 32
WARMUP = 10


def build_model(args: argparse.Namespace, dtype: torch.dtype, **changed: int) -> tuple[Adapter, PlanRuntime]:
    """Build a random model with a plan runtime."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    sizes: dict[str, Any] = {name: getattr(args, name) for name in GEOMETRY["cuda"]} | changed
    # The pad token is never sampled, and without a stop token no request ends early.
    config = OlmoeConfig(**sizes, pad_token_id=0, eos_token_id=None, max_position_embeddings=8192)
    with torch.device(args.device), torch.random.fork_rng():
        torch.manual_seed(args.seed)
        model: Any = OlmoeForCausalLM._from_config(config, dtype=dtype)
    model = model.eval()
    adapter = get_adapter(model)
    set_experts(adapter)
    return adapter, PlanRuntime(adapter)


def set_experts(adapter: Adapter, kind: str | None = None) -> None:
    """Select the expert implementation; by default that of prompts."""
    weights = next(adapter.decoder.parameters())
    # The grouped implementation of other types is a loop on the host.
    usual = EXPERTS["cuda" if weights.dtype == torch.bfloat16 and weights.is_cuda else "cpu"][0]
    adapter.model.set_experts_implementation(usual if kind is None else kind)


def random_tokens(args: argparse.Namespace, *shape: int, seed: int = 0) -> Tensor:
    """Return random token IDs."""
    generator = torch.Generator().manual_seed(args.seed + seed)
    return torch.randint(1, args.vocab_size, shape, generator=generator)


class TransformersDecoder:
    """Decodes with the model's forward and a growing cache."""

    def __init__(self, adapter: Adapter, runtime: PlanRuntime, plan: Plan, cache: Any) -> None:
        self._adapter, self._runtime, self._plan, self._cache = adapter, runtime, plan, cache
        self._device = next(adapter.decoder.parameters()).device

    def __call__(self, tokens: Sequence[int]) -> tuple[Tensor, list[int]]:
        with self._runtime.use_plan(self._plan):
            output: Any = self._adapter.model(
                input_ids=torch.tensor(tokens, device=self._device)[:, None], past_key_values=self._cache,
                use_cache=True, logits_to_keep=1,
            )  # fmt: skip
        logits = output.logits[:, -1]
        return logits, logits.argmax(-1).tolist()


def run_prompt(
    args: argparse.Namespace, patched_model: tuple[Adapter, PlanRuntime], plan: Plan, batch: int, context: int
) -> Any:
    """Run random prompts; returns the logits of the last tokens and the cache."""
    adapter, runtime = patched_model
    set_experts(adapter)
    with runtime.use_plan(plan):
        return adapter.model(
            input_ids=random_tokens(args, batch, context, seed=1).to(args.device),
            use_cache=True,
            logits_to_keep=1,
        )


class Setup:
    """Requests of one plan after their prompts, for each decode implementation.

    Args:
        args: Options.
        patched_model: Adapter and runtime of the model.
        plan: Plan.
        batch: Number of requests.
        context: Number of tokens of each request.
        steps: Number of decode steps.
        experts: Expert implementation of the "own" steps.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        patched_model: tuple[Adapter, PlanRuntime],
        plan: Plan,
        batch: int,
        context: int,
        steps: int,
        *,
        experts: str | None = None,
    ) -> None:
        adapter, runtime = patched_model
        output = run_prompt(args, patched_model, plan, batch, context)
        set_experts(adapter, experts)
        self.first: list[int] = output.logits[:, -1].argmax(-1).tolist()
        self.graphs: list[GraphCache] = []
        self.runners: dict[str, Callable[[Sequence[int]], tuple[Tensor, list[int]]]] = {}
        tokens = context + steps + 1
        for name, kernels in (("recorded", None), ("recorded, no kernels", False)):
            cache = SlotCache(
                get_decode_plan(plan, adapter.geometry), adapter.geometry.depth, slots=batch, tokens=tokens
            )
            for row in range(batch):
                cache.copy_from(cache.allocate(), output.past_key_values, row=row)
            graphs = GraphCache(args.device)
            kernel_patcher = KernelPatcher(adapter, kernels=kernels)
            decode_runner = DecodeRunner(
                adapter, runtime, graphs, kernel_patcher=kernel_patcher, rows=batch, tokens=tokens
            )
            self.graphs.append(graphs)
            self.runners[name] = partial(decode_runner.run, cache)
        self.runners = {
            "own": TransformersDecoder(adapter, runtime, plan, output.past_key_values)
        } | self.runners

    @property
    def reasons(self) -> list[str]:
        """Reasons for steps that were not captured."""
        return sorted({reason for graphs in self.graphs for reason in graphs.failures.values()})


def check_greedy_tokens(args: argparse.Namespace) -> dict[str, Any]:
    """Compare greedy tokens of a two-block model in float32 between implementations."""
    patched_model = build_model(args, torch.float32, num_hidden_layers=2)
    plan = patched_model[0].geometry.full_plan(images=False)
    rows, wrong = [], 0
    for batch in args.batches:
        setup = Setup(args, patched_model, plan, batch, 32, CHECKED_STEPS)
        answers = {}
        for name, runner in setup.runners.items():
            tokens = [setup.first]
            for _ in range(CHECKED_STEPS):
                tokens.append(runner(tokens[-1])[1])
            answers[name] = tokens
        equal = {name: tokens == answers["own"] for name, tokens in answers.items()}
        wrong += sum(not is_equal for is_equal in equal.values())
        rows.append({"batch": batch, "steps": CHECKED_STEPS, "equal": equal, "unrecorded": setup.reasons})
    return {"blocks": 2, "dtype": "float32", "cases": rows, "wrong": wrong}


def check_logits(
    args: argparse.Namespace, patched_model: tuple[Adapter, PlanRuntime], plan: Plan, batch: int
) -> dict[str, Any]:
    """Compare logits step by step, with random tokens, between implementations."""
    setup = Setup(args, patched_model, plan, batch, 32, CHECKED_STEPS)
    worst, agreed = dict.fromkeys(setup.runners, 0.0), dict.fromkeys(setup.runners, 0)
    for step in range(CHECKED_STEPS):
        tokens = random_tokens(args, batch, seed=2 + step).tolist()
        logits_by_name = {name: runner(tokens)[0].double().clone() for name, runner in setup.runners.items()}
        expected = logits_by_name["own"]
        for name, logits in logits_by_name.items():
            worst[name] = max(worst[name], float((logits - expected).abs().max() / expected.abs().max()))
            agreed[name] += int((logits.argmax(1) == expected.argmax(1)).sum())
    limit = 2 * TOLERANCE[getattr(torch, args.dtype)]
    return {
        "plan": plan.id, "batch": batch, "tokens": CHECKED_STEPS * batch, "agreed": agreed,
        "difference": worst, "limit": limit,
        "wrong": sum(not difference <= limit for difference in worst.values()),
    }  # fmt: skip


def time_transformers_steps(
    args: argparse.Namespace, patched_model: tuple[Adapter, PlanRuntime], plan: Plan, batch: int
) -> dict[str, float]:
    """Return the median step time of transformers for each expert implementation, ms.

    A warm-up pass uses every cache length that is timed: the first use of a length on a GPU may take three
    times as long, which a running server never sees.
    """
    adapter, runtime = patched_model
    tokens = random_tokens(args, WARMUP + args.rounds // 3, batch, seed=99).tolist()
    warmup_decoder = TransformersDecoder(
        adapter, runtime, plan, run_prompt(args, patched_model, plan, batch, args.context).past_key_values
    )
    for step_tokens in random_tokens(args, WARMUP + args.rounds, batch, seed=99).tolist():
        warmup_decoder(step_tokens)
    del warmup_decoder
    medians_ms: dict[str, float] = {}
    for kind in EXPERTS["cpu" if args.device == "cpu" else "cuda"]:
        cache = run_prompt(args, patched_model, plan, batch, args.context).past_key_values
        set_experts(adapter, kind)
        decoder, times = TransformersDecoder(adapter, runtime, plan, cache), []
        for step_tokens in tokens:
            start_s = time.perf_counter()
            decoder(step_tokens)
            times.append(1e3 * (time.perf_counter() - start_s))
        medians_ms[kind] = round(statistics.median(times[WARMUP:]), 5)
    return medians_ms


def compare_steps(
    args: argparse.Namespace, patched_model: tuple[Adapter, PlanRuntime], plan: Plan, batch: int
) -> dict[str, Any]:
    """Time a step with each implementation, in interleaved order."""
    own_ms = time_transformers_steps(args, patched_model, plan, batch)
    quickest = min(own_ms, key=lambda kind: own_ms[kind])
    setup = Setup(args, patched_model, plan, batch, args.context, WARMUP + args.rounds, experts=quickest)

    def work(runner: Callable[[Sequence[int]], Any]) -> Callable[[], object]:
        tokens = iter(random_tokens(args, WARMUP + args.rounds, batch, seed=99).tolist())
        return lambda: runner(next(tokens))

    comparison = compare(
        {name: work(runner) for name, runner in setup.runners.items()}, rounds=args.rounds, baseline="own",
        warmup=WARMUP, device=args.device, seed=args.seed,
    )  # fmt: skip
    record = summarize_comparison(comparison) | {
        "plan": plan.id,
        "batch": batch,
        "unrecorded": setup.reasons,
        "own_ms": own_ms,
        "experts": quickest,
    }
    print(f"own    {plan.id[:24]:24s} batch {batch}: {own_ms}", flush=True)
    for name in setup.runners:
        speed, median_ms = comparison.speedup(name), comparison.samples(name).median_ms
        print(
            f"step   {plan.id[:24]:24s} batch {batch}: {name:20s} {median_ms:8.3f} ms, "
            f"{speed.median:.2f}x ({speed.low:.2f} to {speed.high:.2f})",
            flush=True,
        )
    return record


def compare_prompts(
    args: argparse.Namespace, patched_model: tuple[Adapter, PlanRuntime], plan: Plan, tokens: int
) -> dict[str, Any]:
    """Time a prompt with the model's forward and in captured parts, up to the first token on the host."""
    adapter, runtime = patched_model
    ids = random_tokens(args, 1, tokens, seed=3).to(args.device)
    cache = SlotCache(get_decode_plan(plan, adapter.geometry), adapter.geometry.depth, slots=1, tokens=tokens)
    graphs = GraphCache(args.device)
    options: dict[str, Any] = {"kernel_patcher": KernelPatcher(adapter), "tokens": tokens}
    runners = {
        "own": PrefillRunner(adapter, runtime, GraphCache(args.device, enabled=False), **options),
        "recorded": PrefillRunner(adapter, runtime, graphs, sizes=[tokens], **options),
    }

    def work(runner: PrefillRunner) -> Tensor:
        output = runner.run(
            {"input_ids": ids}, None, plan.insertion_position, images=False,
            decide=lambda token: plan, allocate=lambda plan: (cache, [cache.allocate()]),
        )  # fmt: skip
        int(output.logits.argmax())
        cache.release(0)
        return output.logits

    expected, output = (work(runner).double().clone() for runner in runners.values())
    difference = float((output - expected).abs().max() / expected.abs().max())
    limit = 2 * TOLERANCE[getattr(torch, args.dtype)]
    times = compare(
        {name: partial(work, runner) for name, runner in runners.items()}, rounds=max(5, args.rounds // 2),
        baseline="own", warmup=3, device=args.device, seed=args.seed,
    )  # fmt: skip
    speed = times.speedup("recorded")
    print(
        f"prompt {plan.id[:24]:24s} {tokens} tokens: own {times.samples('own').median_ms:.3f} ms, recorded "
        f"{times.samples('recorded').median_ms:.3f} ms, {speed.median:.2f}x, difference {difference:.1e}",
        flush=True,
    )
    return summarize_comparison(times) | {
        "plan": plan.id,
        "tokens": tokens,
        "difference": difference,
        "limit": limit,
        "wrong": int(not difference <= limit),
        "unrecorded": sorted(graphs.failures.values()),
    }


def compare_experts(
    args: argparse.Namespace, patched_model: tuple[Adapter, PlanRuntime], batch: int
) -> dict[str, Any]:
    """Time the experts of one block: our kernels and those of transformers, captured on a GPU."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from sparseflow.adaptive.kernels.experts.triton import experts

    adapter, _ = patched_model
    module: Any = next(
        submodule for submodule in adapter.blocks[0].modules() if hasattr(submodule, "gate_up_proj")
    )
    generator = torch.Generator().manual_seed(args.seed)
    dtype = module.gate_up_proj.dtype
    x = torch.randn(batch, args.hidden_size, generator=generator).to(args.device, dtype)
    picks = [torch.randperm(args.num_experts, generator=generator) for _ in range(batch)]
    expert_ids = torch.stack(picks)[:, : args.num_experts_per_tok].to(args.device)
    weights = torch.rand(expert_ids.shape, generator=generator).to(args.device, dtype)
    kinds = ["batched_mm"] + (["grouped_mm"] if dtype == torch.bfloat16 else [])
    bodies: dict[str, Callable[[], Tensor]] = {
        kind: partial(ALL_EXPERTS_FUNCTIONS[kind], module, x, expert_ids, weights) for kind in kinds
    }
    if args.device != "cpu":
        bodies["ours"] = partial(experts, x, expert_ids, weights, module.gate_up_proj, module.down_proj)
    graphs, outputs = GraphCache(args.device), {name: torch.empty_like(x) for name in bodies}

    def body(name: str) -> None:
        outputs[name].copy_(bodies[name]())

    times = compare(
        {name: partial(graphs.run, name, partial(body, name)) for name in bodies}, rounds=args.rounds,
        baseline=kinds[-1], warmup=WARMUP, device=args.device, seed=args.seed,
    )  # fmt: skip
    distinct = len(expert_ids.unique())
    bytes_read = distinct * 3 * args.hidden_size * args.intermediate_size * x.element_size()
    for name in bodies:
        print(f"experts batch {batch}: {name:12s} {1e3 * times.samples(name).median_ms:8.1f} us", flush=True)
    return summarize_comparison(times) | {"batch": batch, "distinct": distinct, "bytes_read": bytes_read}


def summarize_comparison(comparison: Comparison) -> dict[str, Any]:
    """Return samples, medians and speedups of a comparison."""
    return {
        "samples_ms": {
            name: [round(value, 5) for value in times] for name, times in comparison.times_ms.items()
        },
        "median_ms": {
            name: round(statistics.median(times), 5) for name, times in comparison.times_ms.items()
        },
        "speedup": {
            name: [round(value, 4) for value in (speed.median, speed.low, speed.high)]
            for name in comparison.times_ms
            for speed in [comparison.speedup(name)]
        },
        "timer": comparison.timer,
    }


def compute_floor_bytes(args: argparse.Namespace, plan: Plan, batch: int) -> int:
    """Return the number of bytes that a step must read."""
    d, f, width = args.hidden_size, args.intermediate_size, getattr(torch, args.dtype).itemsize
    total = args.vocab_size * d
    for block in plan.blocks:
        top_k = args.num_experts_per_tok if block < plan.insertion_position else plan.top_k
        hit = args.num_experts * (1 - (1 - top_k / args.num_experts) ** batch)
        total += 4 * d * d + args.num_experts * d + int(hit * 3 * d * f)
        total += 2 * d * batch * (args.context + args.rounds // 2)
    return total * width


def select_plans(adapter: Adapter) -> tuple[Plan, Plan]:
    """Return the full plan, and a plan with 3/4 of the blocks and 1/2 of the experts."""
    geometry = adapter.geometry
    depth, top_k = geometry.depth, max(1, geometry.top_k // 2)
    blocks = tuple(range(depth))[: depth - depth // 4]
    return geometry.full_plan(images=False), Plan(tier=None, insertion_position=1, top_k=top_k, blocks=blocks)


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: recorded decode steps against transformers."""
    for step in record["steps"]:
        baseline_ms, captured_ms = (step["samples_ms"][name] for name in ("own", "recorded"))
        blocks = step["plan"].count(".") + 1
        ratios = [a / b for a, b in zip(baseline_ms, captured_ms, strict=True)]
        speedup = bootstrap_median(ratios)
        top_k = next(part for part in step["plan"].split("-") if part.startswith("k"))[1:]
        yield Claim(
            id=f"adaptive/6-step-{blocks}-k{top_k}-b{step['batch']}",
            claim=f"Decode step of OLMoE-1B-7B's geometry in CUDA graphs: {blocks} blocks, {top_k} experts, "
            f"batch {step['batch']}, against transformers.",
            value=round(speedup.median, 2),
            unit="x",
            target=">= 4" if step["batch"] == 1 else None,
            baseline="transformers, eager",
            command="python benchmarks/adaptive/decode.py --device cuda",
            details={
                "low": round(speedup.low, 2),
                "high": round(speedup.high, 2),
                "dtype": record["settings"]["dtype"],
                "recorded_ms": round(statistics.median(captured_ms), 3),
                "transformers_ms": round(statistics.median(baseline_ms), 3),
                "floor_ms": round(step["floor_ms"], 3),
                "transformers_experts": step["experts"],
            },
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="by default float32 on a CPU and bfloat16 on a GPU",
    )
    for name in GEOMETRY["cuda"]:
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, help="of the model; the default depends on the device"
        )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument(
        "--context", type=int, help="tokens before the first step; by default 512, on a CPU 48"
    )
    parser.add_argument(
        "--prompts", type=int, nargs="+", help="tokens of prompts; by default 432 and 1872, on a CPU 64"
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    kind = "cpu" if args.device == "cpu" else "cuda"
    for name, size in GEOMETRY[kind].items():
        setattr(args, name, size if getattr(args, name) is None else getattr(args, name))
    args.dtype = args.dtype or DTYPE[kind]
    args.context = args.context or (48 if kind == "cpu" else 512)
    args.prompts = args.prompts or ([64] if kind == "cpu" else [432, 1872])
    torch.set_grad_enabled(False)
    record: dict[str, Any] = {
        "environment": collect_environment(args.device, seed=args.seed)
        | {
            "torch": torch.__version__,
            "transformers": get_version("transformers"),
            "triton": get_version("triton"),
        },
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "same_tokens": check_greedy_tokens(args),
    }
    patched_model = build_model(args, getattr(torch, args.dtype))
    plans = select_plans(patched_model[0])
    record["near_logits"] = [
        check_logits(args, patched_model, plan, batch) for plan in plans for batch in args.batches
    ]
    wrong = record["same_tokens"]["wrong"] + sum(check["wrong"] for check in record["near_logits"])
    print(
        f"failed checks: {wrong}",
        *record["same_tokens"]["cases"],
        *record["near_logits"],
        sep="\n",
        flush=True,
    )
    if not wrong:
        rate = measure_ceilings(args.device).bytes_per_s
        record["bytes_per_s"] = rate
        record["steps"] = []
        for plan in plans:
            for batch in args.batches:
                num_bytes = compute_floor_bytes(args, plan, batch)
                step_record = compare_steps(args, patched_model, plan, batch)
                record["steps"].append(
                    step_record | {"floor_bytes": num_bytes, "floor_ms": 1e3 * num_bytes / rate}
                )
                print(
                    f"floor  {1e3 * num_bytes / rate:.3f} ms; not captured: {step_record['unrecorded']}",
                    flush=True,
                )
        set_experts(patched_model[0])
        record["prompts"] = [
            compare_prompts(args, patched_model, plan, size) for plan in plans for size in args.prompts
        ]
        record["experts"] = [compare_experts(args, patched_model, batch) for batch in args.batches]
        wrong += sum(check["wrong"] for check in record["prompts"])
    if wrong:
        record["failed"] = f"{wrong} checks failed"
    if args.out is not None:
        write_atomic(args.out, json.dumps(record, separators=(",", ":")) + "\n")
        if not wrong:
            record_claims(make_claims(record), record, args.out)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
