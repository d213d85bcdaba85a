"""Layer splits of the planner: accepted only where they pay off, and the time of a coarse plan.

::

    export PYTHONPATH=src:.
    python benchmarks/codesign/planner.py --instances 200 --threads 1 --out results/codesign/planner.json

The instances are descriptions of transformers on chips of the shipped library. Two instances have a known
answer: equal blocks over a slow link must not be split, and a very large MLP over a fast link must be split.
The others are random: models, chips, empty slots, links from slow to fast, and both modes. The objective of
each plan is recomputed from its slots and splits alone and must not exceed that of the coarse plan. The
record contains all decisions with their gains, and for the first two instances all evaluated splits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from frame import finish_record, make_parser, start_record

from benchmarks.claims import Claim
from sparseflow.codesign.hardware.chips import ChipType, LinkType, read_library
from sparseflow.codesign.hardware.network import Network
from sparseflow.codesign.hardware.proxy import LayerConfig, LayerHwProxy
from sparseflow.codesign.mapping import MappingSolver, Mode
from sparseflow.codesign.partition.objective import evaluate_plan, is_feasible
from sparseflow.codesign.partition.planner import PartitionPlan, PartitionPlanner
from sparseflow.codesign.partition.split_search import PartitionConfig
from sparseflow.codesign.workload.splits import compute_transfer_bytes
from sparseflow.core.layers import LayerNode
from sparseflow.core.timing import Samples, measure

PROXY = LayerHwProxy.analytic()
LIBRARY = read_library()
CHIPS = ("npu-s", "npu-m", "npu-l", "memory-m")
HEAD_DIM, BYTES = 64, 2
LEAST = 1e-12
"""Relative difference of sums that counts as rounding."""

COLUMNS = (
    "seed", "mode", "chips", "slots", "layers", "giant", "GB/s", "us", "coarse objective", "objective",
    "gap", "split", "coarse ms", "plan ms", "considered", "tried",
)  # fmt: skip
"""Of instances: `coarse objective` and `objective` are of plans without and with splits, `gap` is that of the
coarse plan's latency from its bound, `coarse ms` and `plan ms` are what the planner took; `considered` holds
the best split of each layer in each round, see `CONSIDERED`, and `tried` is how many were evaluated."""

TRIED = ("round", "layer", "sizes", "slots", "segments_moved", "objective_after", "gain_ratio")
"""Columns of the evaluated splits."""

CONSIDERED = ("layer", "sizes", "slots", "objective before", "objective after", "gain", "accepted")


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A planning problem.

    Attributes:
        layers: Of the model.
        chips: What each slot holds; None where it is empty.
        link: Between every two slots.
        mode: Whether latency is a pipeline's period or one batch's way.
    """

    layers: list[LayerNode]
    chips: list[ChipType | None]
    link: LinkType
    mode: Mode = "balanced"

    @property
    def network(self) -> Network:
        return Network.all_to_all(self.link, np.zeros((len(self.chips), len(self.chips))))

    @property
    def planner(self) -> PartitionPlanner:
        return PartitionPlanner(MappingSolver(mode=self.mode), PROXY, PartitionConfig())

    def plan(self, *, use_fine_split: bool = True) -> PartitionPlan:
        return self.planner.plan(self.layers, self.chips, self.network, use_fine_split=use_fine_split)


def transformer(
    blocks: int, dim: int, *, tokens: int, batch: int, giant: int | None = None, times: int = 1
) -> list[LayerNode]:
    """Layers of a transformer in bfloat16.

    Args:
        blocks: Pairs of an attention and a perceptron.
        dim: Width of a token.
        tokens: Of a sample.
        batch: Samples.
        giant: Block whose perceptron has so many `times` the hidden channels of the others.
        times: See `giant`.
    """
    rows = []
    for id, kind in enumerate(["embed", *["attention", "mlp"] * blocks, "head"]):
        block = (id - 1) // 2
        inner = {"embed": 16, "attention": dim // HEAD_DIM, "mlp": 4 * dim, "head": 400}[kind]
        inner *= times if kind == "mlp" and block == giant else 1
        node = LayerConfig(
            layer_type=kind, precision="bfloat16", batch=batch, seq_len=tokens, embed_dim=dim, inner=inner,
            head_dim=HEAD_DIM if kind == "attention" else 0,
        ).to_node(id)  # fmt: skip
        inside = kind in ("attention", "mlp")
        rows.append(
            replace(
                node, name=f"blocks.{block}.{kind}" if inside else kind, splittable=True,
                units=dim if kind == "embed" else inner, split_joins=not inside,
                split_in_bytes=batch * dim * BYTES if kind == "head" else node.traffic_in_bytes,
                split_out_bytes=node.traffic_out_bytes,
            )
        )  # fmt: skip
    return rows


def plain(*, slow: bool) -> Instance:
    """Create a model of equal blocks over the slowest link, or with a very large MLP over the fastest one."""
    figures = {} if slow else {"giant": 1, "times": 12}
    return Instance(
        layers=transformer(4, 512, tokens=196, batch=8, **figures), chips=[LIBRARY.get_chip("npu-m")] * 4,
        link=LIBRARY.get_link("ethernet" if slow else "ucie"),
    )  # fmt: skip


def draw_instance(seed: int) -> Instance:
    """Create a random instance."""
    rng = np.random.default_rng(seed)
    blocks = int(rng.integers(1, 7))
    giant = int(rng.integers(blocks)) if rng.random() < 0.5 else None
    layers = transformer(
        blocks, HEAD_DIM * int(rng.integers(2, 13)), tokens=int(rng.integers(32, 800)),
        batch=int(2 ** rng.integers(0, 6)), giant=giant, times=int(rng.integers(2, 13)),
    )  # fmt: skip
    chips: list[ChipType | None] = [
        LIBRARY.get_chip(str(rng.choice(CHIPS))) for _ in range(int(rng.integers(2, 9)))
    ]
    for slot in range(1, len(chips)):
        chips[slot] = None if rng.random() < 0.15 else chips[slot]
    link = LinkType(
        name="drawn", bandwidth=float(10 ** rng.uniform(8.5, 12.0)),
        latency_us=float(10 ** rng.uniform(-2.0, 1.5)), pj_per_bit=1.0,
    )  # fmt: skip
    return Instance(
        layers=layers, chips=chips, link=link, mode="serial" if rng.random() < 0.5 else "balanced"
    )


def wrong_with(arguments: Instance, result: PartitionPlan) -> list[str]:
    """List the contradictions between a plan and its recomputed cost."""
    planner, rewrite = arguments.planner, result.rewrite_plan
    costs = planner.compute_costs(arguments.layers, arguments.chips, arguments.network)
    splits = {
        split.layer: (
            split,
            planner.compute_part_costs(
                arguments.layers[split.layer], split.sizes, [arguments.chips[slot] for slot in split.slots]
            ),
        )
        for split in (() if rewrite is None else rewrite.splits)
    }
    stats = evaluate_plan(costs, result.assignment, splits, planner.weights)
    full = evaluate_plan(costs, coarse_homes(arguments, result), {}, planner.weights)
    accepted = [split for split in result.split_decisions if split.accepted]
    record = {
        "is worth less than the coarse plan": stats.objective > full.objective * (1 + LEAST),
        "is not worth what it says": stats != result.hw_stats or full != result.coarse_stats,
        "does not fit": not is_feasible(costs, result.assignment, splits),
        "moves other bytes": stats.comm_bytes
        != sum(compute_transfer_bytes(arguments.layers, result.assignment, rewrite).values()),
        "has splits that were not accepted": {split.layer for split in accepted} != set(splits),
        "accepted what gains too little": any(
            split.gain_ratio < planner.config.min_split_gain_ratio for split in accepted
        ),
        "has a bound above it": result.lower_bound_ms > full.total_latency_ms * (1 + LEAST),
    }
    return [kind for kind, wrong in record.items() if wrong]


def coarse_homes(arguments: Instance, result: PartitionPlan) -> Sequence[int]:
    """Return the slots of the layers in the coarse plan; splits may have moved segments."""
    return (
        result.assignment if result.rewrite_plan is None else arguments.plan(use_fine_split=False).assignment
    )


def short(value: float) -> float:
    return float(f"{value:.6g}")


def rounded(table: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Round all numbers to six digits."""
    rows = [[short(item) if isinstance(item, float) else item for item in row] for row in table["rows"]]
    return table | {"rows": rows}


def considered(result: PartitionPlan) -> list[list[Any]]:
    """Convert a decision to a row of `CONSIDERED`."""
    return [
        [
            decision.layer,
            decision.sizes,
            decision.slots,
            short(decision.objective_before),
            short(decision.objective_after),
            short(decision.gain_ratio),
            int(decision.accepted),
        ]
        for decision in result.split_decisions
    ]


def row(
    seed: int, arguments: Instance, result: PartitionPlan, coarse: Samples, use_fine_split: Samples
) -> list[Any]:
    """Convert an instance to a row of `COLUMNS`."""
    names = ["" if chip is None else chip.name for chip in arguments.chips]
    widest = max(layer.mlp_ratio for layer in arguments.layers) / 4
    return [
        seed,
        arguments.mode,
        " ".join(name or "-" for name in names),
        len(names),
        len(arguments.layers),
        round(widest),
        short(arguments.link.bandwidth / 1e9),
        short(arguments.link.latency_us),
        short(result.coarse_stats.objective),
        short(result.hw_stats.objective),
        short(result.gap),
        0 if result.rewrite_plan is None else len(result.rewrite_plan.splits),
        [round(times_m, 3) for times_m in coarse.times_ms],
        round(use_fine_split.times_ms[0], 3),
        considered(result),
        len(result.split_evaluations),
    ]


def ran(seed: int, arguments: Instance, repeats: int) -> tuple[PartitionPlan, list[Any], list[str]]:
    """Return the plan of an instance, its row and its problems. Timed calls have been run before."""
    plans: list[PartitionPlan] = []
    coarse = measure(lambda: arguments.plan(use_fine_split=False), warmup=1, repeats=repeats)
    timing = measure(lambda: plans.append(arguments.plan()), warmup=0, repeats=1)
    return plans[0], row(seed, arguments, plans[0], coarse, timing), wrong_with(arguments, plans[0])


def report(rows: list[list[Any]]) -> None:
    """Print a summary of the random instances."""
    index = {name: [item[position] for item in rows] for position, name in enumerate(COLUMNS)}
    pairs = list(zip(index["coarse objective"], index["objective"], strict=True))
    gains = [
        1.0 - after / before for (before, after), split in zip(pairs, index["split"], strict=True) if split
    ]
    print(
        f"{len(rows)} random instances: {len(gains)} with splits, which gain "
        f"{median(gains) if gains else 0.0:.1%} (median); {sum(index['tried'])} splits "
        f"tried; worse than the coarse plan: {sum(after > before for before, after in pairs)}"
    )
    times = [sample for samples in index["coarse ms"] for sample in samples]
    for kind, values in (("a coarse plan", times), ("one with splits", index["plan ms"])):
        print(f"{kind} takes {median(values):.1f} ms (median of {len(values)}), {max(values):.1f} at most")


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: split plans against coarse plans."""
    rows = [dict(zip(record["columns"], row, strict=True)) for row in record["instances"]]
    command = f"python benchmarks/codesign/planner.py --instances {len(rows)}"
    baseline = "the coarse plan"
    yield Claim(
        id="codesign/2-never-worse",
        claim=f"Random instances of {len(rows)} whose plan has a worse objective than the coarse plan.",
        value=sum(row["objective"] > row["coarse objective"] for row in rows),
        unit="instances",
        target="<= 0",
        baseline=baseline,
        command=command,
        details={
            "instances_with_splits": sum(bool(row["split"]) for row in rows),
            "evaluated_splits": sum(row["tried"] for row in rows),
        },
    )
    for slug, name, title, target in (
        ("slow", "slow link", "a slow link", "<= 0"),
        ("fast", "fast link, giant perceptron", "a fast link and a very large MLP", ">= 1"),
    ):
        row = dict(zip(record["columns"], record["plain"][name], strict=True))
        yield Claim(
            id=f"codesign/2-{slug}",
            claim=f"Layers that the planner splits with {title}.",
            value=int(row["split"]),
            unit="layers",
            target=target,
            baseline=baseline,
            command=command,
            details={
                "coarse_objective": row["coarse objective"],
                "objective": row["objective"],
                "evaluated_splits": row["tried"],
            },
        )


def main() -> int:
    parser = make_parser(__doc__, seed="the first random instance")
    parser.add_argument("--instances", type=int, default=200, help="random instances")
    parser.add_argument("--repeats", type=int, default=3, help="timed coarse plans per instance")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    record = start_record(args) | {
        "partition": vars(PartitionConfig()), "columns": COLUMNS, "considered": CONSIDERED, "plain": {},
        "tried": {},
    }  # fmt: skip
    wrong: list[str] = []
    for name, slow in (("slow link", True), ("fast link, giant perceptron", False)):
        arguments = plain(slow=slow)
        result, record["plain"][name], problems = ran(0, arguments, 20)
        if (result.rewrite_plan is None) is not slow:
            problems.append("splits" if slow else "splits nothing")
        wrong += [f"{name}: {problem}" for problem in problems]
        rows = [[getattr(item, column) for column in TRIED] for item in result.split_evaluations]
        record["tried"][name] = rounded({"columns": list(TRIED), "rows": rows})
        before, after = result.coarse_stats.objective, result.hw_stats.objective
        print(f"{name}: objective {before:.4g} -> {after:.4g}, {'no splits' if slow else 'split'} expected")
        for decision in result.split_decisions:
            saved = "accepted" if decision.accepted else "not accepted"
            print(f"  {decision.name} into {len(decision.sizes)}: gains {decision.gain_ratio:.2%}, {saved}")
    rows = []
    for seed in range(args.seed, args.seed + args.instances):
        _, decision, problems = ran(seed, draw_instance(seed), args.repeats)
        wrong += [f"instance {seed} {problem}" for problem in problems]
        rows.append(decision)
        print(f"instance {seed} of {args.instances}", file=sys.stderr)
    record["instances"] = rows
    if rows:
        report(rows)
    return finish_record(args, record, wrong, make_claims)


if __name__ == "__main__":
    sys.exit(main())
