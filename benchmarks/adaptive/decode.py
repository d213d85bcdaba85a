r"""Recorded steps and prompts against the model's own forward: the same tokens, and how fast (line 6).

::

    export PYTHONPATH=src:.
    python benchmarks/adaptive/decode.py --out results/adaptive/decode-cpu.json
    python benchmarks/adaptive/decode.py --device cuda --out results/adaptive/decode-cuda.json

A random OLMoE, on a GPU of the size of OLMoE-1B-7B and in bf16. Before anything is timed:

- greedy tokens of a model of the same width with two blocks, in float32, must be the same;
- logits of the model itself, step by step with drawn tokens, must be near; how often the most probable token
  is the same is told.

Then a step, from tokens on the host to next tokens on the host, is timed in turns: by transformers' forward
with a cache that grows, as `generate` does, experts by whichever of its products is quickest for this plan
and batch ("own"; what the others take is kept); from slots, recorded, with our kernels ("recorded"); and
without them. Tokens are drawn, the same for all. Prompts are timed whole, as the model runs them, and in
recorded parts. At last the experts of one block. On a CPU nothing is recorded, and the same code runs as it
is.

The floor of a step is the time to read what it needs once, at the rate of a large copy: weights of attention,
routers, experts that drawn tokens are expected to hit, head, and keys and values.
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
from sparseflow.core.timing import Comparison, compare

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
"""OLMoE-1B-7B, and one that a CPU runs in milliseconds."""

EXPERTS = {"cuda": ("grouped_mm", "batched_mm", "eager"), "cpu": ("eager", "batched_mm")}
"""Ways of transformers to multiply by experts; the first is that of prompts: others take much memory."""
DTYPE = {"cuda": "bfloat16", "cpu": "float32"}
CHECKED_STEPS = 32
WARMUP = 10


def built(asked: argparse.Namespace, dtype: torch.dtype, **changed: int) -> tuple[Adapter, PlanRuntime]:
    """A random model with knobs."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    sizes: dict[str, Any] = {name: getattr(asked, name) for name in GEOMETRY["cuda"]} | changed
    # One pad token that is never drawn; no end, so that nothing stops early.
    config = OlmoeConfig(**sizes, pad_token_id=0, eos_token_id=None, max_position_embeddings=8192)
    with torch.device(asked.device), torch.random.fork_rng():
        torch.manual_seed(asked.seed)
        model: Any = OlmoeForCausalLM._from_config(config, dtype=dtype)
    model = model.eval()
    adapter = get_adapter(model)
    set_experts(adapter)
    return adapter, PlanRuntime(adapter)


def set_experts(adapter: Adapter, kind: str | None = None) -> None:
    """Multiply by experts in some way; by default in that of prompts."""
    weights = next(adapter.decoder.parameters())
    # The grouped product of other types is a loop on the host.
    usual = EXPERTS["cuda" if weights.dtype == torch.bfloat16 and weights.is_cuda else "cpu"][0]
    adapter.model.set_experts_implementation(usual if kind is None else kind)


def drawn(asked: argparse.Namespace, *shape: int, seed: int = 0) -> Tensor:
    """Random words."""
    generator = torch.Generator().manual_seed(asked.seed + seed)
    return torch.randint(1, asked.vocab_size, shape, generator=generator)


class Own:
    """Steps by the model's own forward and a cache that grows."""

    def __init__(self, adapter: Adapter, runtime: PlanRuntime, plan: Plan, cache: Any) -> None:
        self._adapter, self._knobs, self._plan, self._cache = adapter, runtime, plan, cache
        self._device = next(adapter.decoder.parameters()).device

    def __call__(self, tokens: Sequence[int]) -> tuple[Tensor, list[int]]:
        with self._knobs.use_plan(self._plan):
            found: Any = self._adapter.model(
                input_ids=torch.tensor(tokens, device=self._device)[:, None], past_key_values=self._cache,
                use_cache=True, logits_to_keep=1,
            )  # fmt: skip
        logits = found.logits[:, -1]
        return logits, logits.argmax(-1).tolist()


def prompted(
    asked: argparse.Namespace, both: tuple[Adapter, PlanRuntime], plan: Plan, batch: int, context: int
) -> Any:
    """What the model gives for drawn prompts: logits of their last tokens, and the cache."""
    adapter, runtime = both
    set_experts(adapter)
    with runtime.use_plan(plan):
        return adapter.model(
            input_ids=drawn(asked, batch, context, seed=1).to(asked.device), use_cache=True, logits_to_keep=1
        )


class Setup:
    """Requests of one plan that are ready to decode, in each way there is.

    Args:
        asked: The options.
        both: The model and its knobs.
        plan: The plan.
        batch: How many requests.
        context: Tokens of each.
        steps: How many steps there will be.
        experts: How the model itself multiplies by experts in steps.
    """

    def __init__(
        self,
        asked: argparse.Namespace,
        both: tuple[Adapter, PlanRuntime],
        plan: Plan,
        batch: int,
        context: int,
        steps: int,
        *,
        experts: str | None = None,
    ) -> None:
        adapter, runtime = both
        found = prompted(asked, both, plan, batch, context)
        set_experts(adapter, experts)
        self.first: list[int] = found.logits[:, -1].argmax(-1).tolist()
        self.graphs: list[GraphCache] = []
        self.ways: dict[str, Callable[[Sequence[int]], tuple[Tensor, list[int]]]] = {}
        tokens = context + steps + 1
        for name, kernels in (("recorded", None), ("recorded, no kernels", False)):
            cache = SlotCache(
                get_decode_plan(plan, adapter.geometry), adapter.geometry.depth, slots=batch, tokens=tokens
            )
            for row in range(batch):
                cache.copy_from(cache.allocate(), found.past_key_values, row=row)
            graphs = GraphCache(asked.device)
            kernel_patcher = KernelPatcher(adapter, kernels=kernels)
            runs = DecodeRunner(adapter, runtime, graphs, kernel_patcher=kernel_patcher, rows=batch, tokens=tokens)
            self.graphs.append(graphs)
            self.ways[name] = partial(runs.run, cache)
        self.ways = {"own": Own(adapter, runtime, plan, found.past_key_values)} | self.ways

    @property
    def reasons(self) -> list[str]:
        """Why steps were not recorded."""
        return sorted({reason for graphs in self.graphs for reason in graphs.failures.values()})


def same_tokens(asked: argparse.Namespace) -> dict[str, Any]:
    """Greedy tokens of a narrow stack in float32, by each way."""
    both = built(asked, torch.float32, num_hidden_layers=2)
    plan = both[0].geometry.full_plan(images=False)
    rows, wrong = [], 0
    for batch in asked.batches:
        setup = Setup(asked, both, plan, batch, 32, CHECKED_STEPS)
        answers = {}
        for name, way in setup.ways.items():
            tokens = [setup.first]
            for _ in range(CHECKED_STEPS):
                tokens.append(way(tokens[-1])[1])
            answers[name] = tokens
        equal = {name: found == answers["own"] for name, found in answers.items()}
        wrong += sum(not each for each in equal.values())
        rows.append({"batch": batch, "steps": CHECKED_STEPS, "equal": equal, "unrecorded": setup.reasons})
    return {"blocks": 2, "dtype": "float32", "cases": rows, "wrong": wrong}


def near_logits(
    asked: argparse.Namespace, both: tuple[Adapter, PlanRuntime], plan: Plan, batch: int
) -> dict[str, Any]:
    """Logits step by step with drawn tokens, by each way."""
    setup = Setup(asked, both, plan, batch, 32, CHECKED_STEPS)
    worst, agreed = dict.fromkeys(setup.ways, 0.0), dict.fromkeys(setup.ways, 0)
    for step in range(CHECKED_STEPS):
        tokens = drawn(asked, batch, seed=2 + step).tolist()
        found = {name: way(tokens)[0].double().clone() for name, way in setup.ways.items()}
        own = found["own"]
        for name, logits in found.items():
            worst[name] = max(worst[name], float((logits - own).abs().max() / own.abs().max()))
            agreed[name] += int((logits.argmax(1) == own.argmax(1)).sum())
    limit = 2 * TOLERANCE[getattr(torch, asked.dtype)]
    return {
        "plan": plan.id, "batch": batch, "tokens": CHECKED_STEPS * batch, "agreed": agreed,
        "difference": worst, "limit": limit,
        "wrong": sum(not each <= limit for each in worst.values()),
    }  # fmt: skip


def own_steps(
    asked: argparse.Namespace, both: tuple[Adapter, PlanRuntime], plan: Plan, batch: int
) -> dict[str, float]:
    """Median milliseconds of a step of the model's own, by each way to multiply by experts.

    A first walk visits all lengths of the cache that will be timed: on a GPU the attention of a length that
    is new to the process may make a step three times as long, and a server has seen them all before long.
    """
    adapter, runtime = both
    tokens = drawn(asked, WARMUP + asked.rounds // 3, batch, seed=99).tolist()
    walk = Own(adapter, runtime, plan, prompted(asked, both, plan, batch, asked.context).past_key_values)
    for each in drawn(asked, WARMUP + asked.rounds, batch, seed=99).tolist():
        walk(each)
    del walk  # and its cache
    found: dict[str, float] = {}
    for kind in EXPERTS["cpu" if asked.device == "cpu" else "cuda"]:
        cache = prompted(asked, both, plan, batch, asked.context).past_key_values
        set_experts(adapter, kind)
        own, times = Own(adapter, runtime, plan, cache), []
        for each in tokens:  # which ends with its tokens on the host
            begin = time.perf_counter()
            own(each)
            times.append(1e3 * (time.perf_counter() - begin))
        found[kind] = round(statistics.median(times[WARMUP:]), 5)
    return found


def timed_steps(
    asked: argparse.Namespace, both: tuple[Adapter, PlanRuntime], plan: Plan, batch: int
) -> dict[str, Any]:
    """A step by each way, in turns."""
    own_ms = own_steps(asked, both, plan, batch)
    quickest = min(own_ms, key=lambda kind: own_ms[kind])
    setup = Setup(asked, both, plan, batch, asked.context, WARMUP + asked.rounds, experts=quickest)

    def work(way: Callable[[Sequence[int]], Any]) -> Callable[[], object]:
        tokens = iter(drawn(asked, WARMUP + asked.rounds, batch, seed=99).tolist())
        return lambda: way(next(tokens))

    found = compare(
        {name: work(way) for name, way in setup.ways.items()}, rounds=asked.rounds, baseline="own",
        warmup=WARMUP, device=asked.device, seed=asked.seed,
    )  # fmt: skip
    kept = told(found) | {
        "plan": plan.id,
        "batch": batch,
        "unrecorded": setup.reasons,
        "own_ms": own_ms,
        "experts": quickest,
    }
    print(f"own    {plan.id[:24]:24s} batch {batch}: {own_ms}", flush=True)
    for name in setup.ways:
        speed = found.speedup(name)
        print(
            f"step   {plan.id[:24]:24s} batch {batch}: {name:20s} {found.samples(name).median_ms:8.3f} ms, "
            f"{speed.median:.2f}x ({speed.low:.2f} to {speed.high:.2f})", flush=True,
        )  # fmt: skip
    return kept


def timed_prompts(
    asked: argparse.Namespace, both: tuple[Adapter, PlanRuntime], plan: Plan, tokens: int
) -> dict[str, Any]:
    """A prompt whole and in recorded parts, in turns; both end with its first token on the host."""
    adapter, runtime = both
    ids = drawn(asked, 1, tokens, seed=3).to(asked.device)
    cache = SlotCache(get_decode_plan(plan, adapter.geometry), adapter.geometry.depth, slots=1, tokens=tokens)
    graphs = GraphCache(asked.device)
    ways = {
        "own": PrefillRunner(adapter, runtime, GraphCache(asked.device, enabled=False), tokens=tokens),
        "recorded": PrefillRunner(adapter, runtime, graphs, tokens=tokens, sizes=[tokens]),
    }

    def work(way: PrefillRunner) -> Tensor:
        found = way.run(
            {"input_ids": ids}, None, plan.insertion_position, images=False, replan=lambda position: position,
            decide=lambda token: plan, allocate=lambda plan: (cache, [cache.allocate()]),
        )  # fmt: skip
        int(found.logits.argmax())
        cache.release(0)
        return found.logits

    expected, found = (work(way).double().clone() for way in ways.values())
    far = float((found - expected).abs().max() / expected.abs().max())
    limit = 2 * TOLERANCE[getattr(torch, asked.dtype)]
    times = compare(
        {name: partial(work, way) for name, way in ways.items()}, rounds=max(5, asked.rounds // 2),
        baseline="own", warmup=3, device=asked.device, seed=asked.seed,
    )  # fmt: skip
    speed = times.speedup("recorded")
    print(
        f"prompt {plan.id[:24]:24s} {tokens} tokens: own {times.samples('own').median_ms:.3f} ms, recorded "
        f"{times.samples('recorded').median_ms:.3f} ms, {speed.median:.2f}x, off by {far:.1e}", flush=True,
    )  # fmt: skip
    return told(times) | {
        "plan": plan.id, "tokens": tokens, "difference": far, "limit": limit, "wrong": int(not far <= limit),
        "unrecorded": sorted(graphs.failures.values()),
    }  # fmt: skip


def timed_experts(asked: argparse.Namespace, both: tuple[Adapter, PlanRuntime], batch: int) -> dict[str, Any]:
    """Experts of one block: our kernels and those of transformers, each recorded where there is a GPU."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from sparseflow.adaptive.kernels.experts.triton import experts

    adapter, _ = both
    module: Any = next(each for each in adapter.blocks[0].modules() if hasattr(each, "gate_up_proj"))
    generator = torch.Generator().manual_seed(asked.seed)
    dtype = module.gate_up_proj.dtype
    x = torch.randn(batch, asked.hidden_size, generator=generator).to(asked.device, dtype)
    picks = [torch.randperm(asked.num_experts, generator=generator) for _ in range(batch)]
    chosen = torch.stack(picks)[:, : asked.num_experts_per_tok].to(asked.device)
    weights = torch.rand(chosen.shape, generator=generator).to(asked.device, dtype)
    kinds = ["batched_mm"] + (["grouped_mm"] if dtype == torch.bfloat16 else [])
    bodies: dict[str, Callable[[], Tensor]] = {
        kind: partial(ALL_EXPERTS_FUNCTIONS[kind], module, x, chosen, weights) for kind in kinds
    }
    if asked.device != "cpu":
        bodies["ours"] = partial(experts, x, chosen, weights, module.gate_up_proj, module.down_proj)
    graphs, found = GraphCache(asked.device), {name: torch.empty_like(x) for name in bodies}

    def body(name: str) -> None:
        found[name].copy_(bodies[name]())

    times = compare(
        {name: partial(graphs.run, name, partial(body, name)) for name in bodies}, rounds=asked.rounds,
        baseline=kinds[-1], warmup=WARMUP, device=asked.device, seed=asked.seed,
    )  # fmt: skip
    distinct = len(chosen.unique())
    bytes_read = distinct * 3 * asked.hidden_size * asked.intermediate_size * x.element_size()
    for name in bodies:
        print(f"experts batch {batch}: {name:12s} {1e3 * times.samples(name).median_ms:8.1f} us", flush=True)
    return told(times) | {"batch": batch, "distinct": distinct, "bytes_read": bytes_read}


def told(found: Comparison) -> dict[str, Any]:
    """All samples, and what they come to."""
    return {
        "samples_ms": {name: [round(each, 5) for each in times] for name, times in found.times_ms.items()},
        "median_ms": {name: round(statistics.median(times), 5) for name, times in found.times_ms.items()},
        "speedup": {
            name: [round(each, 4) for each in (speed.median, speed.low, speed.high)]
            for name in found.times_ms
            for speed in [found.speedup(name)]
        },
        "timer": found.timer,
    }


def floor_bytes(asked: argparse.Namespace, plan: Plan, batch: int) -> int:
    """What a step must read."""
    d, f, width = asked.hidden_size, asked.intermediate_size, getattr(torch, asked.dtype).itemsize
    total = asked.vocab_size * d
    for block in plan.blocks:
        top_k = asked.num_experts_per_tok if block < plan.insertion_position else plan.top_k
        hit = asked.num_experts * (1 - (1 - top_k / asked.num_experts) ** batch)
        total += 4 * d * d + asked.num_experts * d + int(hit * 3 * d * f)
        total += 2 * d * batch * (asked.context + asked.rounds // 2)
    return total * width


def plans_of(adapter: Adapter) -> tuple[Plan, Plan]:
    """The whole model; and three quarters of its blocks with half of its experts."""
    geometry = adapter.geometry
    depth, few = geometry.depth, max(1, geometry.top_k // 2)
    kept = tuple(range(depth))[: depth - depth // 4]
    return geometry.full_plan(images=False), Plan(tier=None, insertion_position=1, top_k=few, blocks=kept)


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: recorded decode steps against transformers."""
    for step in record["steps"]:
        own, captured = (step["samples_ms"][name] for name in ("own", "recorded"))
        blocks = step["plan"].count(".") + 1
        top_k = next(part for part in step["plan"].split("-") if part.startswith("k"))[1:]
        yield Claim(
            id=f"adaptive/6-step-{blocks}-k{top_k}-b{step['batch']}",
            claim=f"Decode step of OLMoE-1B-7B's geometry in CUDA graphs: {blocks} blocks, {top_k} experts, "
            f"batch {step['batch']}, against transformers.",
            value=round(statistics.median(a / b for a, b in zip(own, captured, strict=True)), 2),
            unit="x",
            target=">= 4" if step["batch"] == 1 else None,
            baseline="transformers, eager",
            command="python benchmarks/adaptive/decode.py --device cuda",
            details={
                "dtype": record["settings"]["dtype"],
                "recorded_ms": round(statistics.median(captured), 3),
                "transformers_ms": round(statistics.median(own), 3),
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
        "--dtype", choices=("float32", "float16", "bfloat16"), help="by default as the device likes"
    )
    for name in GEOMETRY["cuda"]:
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, help="of the model; by default by device"
        )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--context", type=int, help="tokens before the first step (512, on a CPU 48)")
    parser.add_argument(
        "--prompts", type=int, nargs="+", help="tokens of prompts (432 and 1872, on a CPU 64)"
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file")
    asked = parser.parse_args()
    kind = "cpu" if asked.device == "cpu" else "cuda"
    for name, size in GEOMETRY[kind].items():
        setattr(asked, name, size if getattr(asked, name) is None else getattr(asked, name))
    asked.dtype = asked.dtype or DTYPE[kind]
    asked.context = asked.context or (48 if kind == "cpu" else 512)
    asked.prompts = asked.prompts or ([64] if kind == "cpu" else [432, 1872])
    torch.set_grad_enabled(False)
    record: dict[str, Any] = {
        "environment": collect_environment(asked.device, seed=asked.seed)
        | {
            "torch": torch.__version__,
            "transformers": get_version("transformers"),
            "triton": get_version("triton"),
        },
        "settings": {name: value for name, value in vars(asked).items() if name != "out"},
        "same_tokens": same_tokens(asked),
    }
    both = built(asked, getattr(torch, asked.dtype))
    plans = plans_of(both[0])
    record["near_logits"] = [
        near_logits(asked, both, plan, batch) for plan in plans for batch in asked.batches
    ]
    wrong = record["same_tokens"]["wrong"] + sum(each["wrong"] for each in record["near_logits"])
    print(
        f"checks: {wrong} wrong",
        *record["same_tokens"]["cases"],
        *record["near_logits"],
        sep="\n",
        flush=True,
    )
    if not wrong:
        rate = measure_ceilings(asked.device).bytes_per_s
        record["bytes_per_s"] = rate
        record["steps"] = []
        for plan in plans:
            for batch in asked.batches:
                least = floor_bytes(asked, plan, batch)
                found = timed_steps(asked, both, plan, batch)
                record["steps"].append(found | {"floor_bytes": least, "floor_ms": 1e3 * least / rate})
                print(
                    f"       floor {1e3 * least / rate:.3f} ms; not recorded: {found['unrecorded']}",
                    flush=True,
                )
        set_experts(both[0])
        record["prompts"] = [
            timed_prompts(asked, both, plan, size) for plan in plans for size in asked.prompts
        ]
        record["experts"] = [timed_experts(asked, both, batch) for batch in asked.batches]
        wrong += sum(each["wrong"] for each in record["prompts"])
    if wrong:
        record["failed"] = f"{wrong} checks went wrong"
    if asked.out is not None:
        write_atomic(asked.out, json.dumps(record, separators=(",", ":")) + "\n")
        if not wrong:
            record_claims(make_claims(record), record, asked.out)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
