"""Rewritten models against the original for random plans: logits, weights and bytes.

::

    export PYTHONPATH=src:.
    python benchmarks/codesign/rewrite.py --threads 1 --out results/codesign/rewrite.json

Plans place the layers of a VideoViT with twelve blocks, dense and compact, on two to four slots, and split
about half of them (heads, channels, columns) into uneven groups in any order. Each plan is executed as a
rewritten model, which is then undone, and by an executor in one process; some plans are also executed by one
process per slot.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from frame import finish_record, make_parser, start_record
from torch import Tensor

from benchmarks.claims import Claim
from benchmarks.codesign.random_plan import random_plan
from sparseflow.codesign.execution import LocalExecutor, RankExecutor, launch
from sparseflow.codesign.execution.rewrite import apply_rewrite
from sparseflow.codesign.workload.splits import RewritePlan, compute_transfer_bytes
from sparseflow.pruning import VideoViT, compact
from sparseflow.pruning.compaction.layered_model import LayeredVideoViT

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
"""Largest difference of logits relative to max(1, largest logit)."""

KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "compact": {"stages": {2: 0.75, 5: 0.5, 8: 0.3}, "merge": True, "keep": {"head": 0.7, "channel": 0.7}},
}

COLUMNS = ("seed", "slots", "back", "splits", "parts", "difference", "local difference", "undone", "bytes")
"""Columns of the samples; the last two state whether undoing restored the model and bytes were as planned."""

RANK_COLUMNS = ("seed", "difference", "bytes")


def make_model(kind: str, dtype: str, seed: int) -> LayeredVideoViT:
    """Create a model whose weights are large enough for every layer to affect the logits."""
    ast = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = VideoViT(
            16, 4, 10, 48, 12, 6, 4, 4, use_ast_prune=bool(ast), ast_cfg=ast or None
        ).eval()  # fmt: skip
        with torch.no_grad():
            for name, item in model.named_parameters():
                wide = 0.3
                if item.ndim == 2:
                    wide = 2.0 if name.startswith("gates") else item.shape[1] ** -0.5
                middle = 1.0 if "norm" in name and name.endswith("weight") else 0.0
                item.copy_(middle + wide * torch.randn_like(item))
    return LayeredVideoViT(compact(model).to(getattr(torch, dtype)))


def clips(steps: LayeredVideoViT, seed: int, batch: int = 2) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 4, 3, 16, 16, generator=g).to(steps.model.head.weight)


def scores(steps: LayeredVideoViT, samples: Tensor) -> Tensor:
    state = steps.initial_state(samples)
    for layer in range(len(steps.describe_layers(1))):
        state = steps.run_layer(layer, state)
    return state["logits"]


def compute_difference(first: Tensor, other: Tensor) -> float:
    return float((first - other).abs().max() / max(1.0, float(other.abs().max())))


def planned(
    steps: LayeredVideoViT, seed: int, slots: int, batch: int = 2
) -> tuple[list[int], RewritePlan, bool]:
    back = seed % 4 == 3
    assignment, plan = random_plan(steps.describe_layers(batch), slots, seed=seed, back=back)
    return assignment, plan, back


def row(steps: LayeredVideoViT, seed: int) -> list[Any]:
    """Measure one sample; see `COLUMNS`."""
    slots = 2 + seed % 3
    assignment, plan, back = planned(steps, seed, slots)
    x = clips(steps, seed)
    before = {name: value.clone() for name, value in steps.model.state_dict().items()}
    with torch.no_grad():
        expected = scores(steps, x)
        with apply_rewrite(steps, plan):
            result = scores(steps, x)
        after = steps.model.state_dict()
        undone = list(after) == list(before) and all(
            torch.equal(after[name], before[name]) for name in before
        )
        undone = undone and torch.equal(scores(steps, x), expected)
    local = LocalExecutor(steps, assignment, plan)
    apart_local = compute_difference(local.run([x])[0], expected)
    same = dict(local.moved_bytes) == compute_transfer_bytes(steps.describe_layers(2), assignment, plan)
    parts = sum(len(split.sizes) for split in plan.splits)
    record = [float(f"{item:.3g}") for item in (compute_difference(result, expected), apart_local)]
    return [seed, slots, back, len(plan.splits), parts, *record, undone, same]


def ranks_job(device: torch.device, *, slots: int, seeds: Sequence[int], dtype: str, seed: int) -> list[Any]:
    """Run the slot of one process for each plan, four batches each; return logits and sent bytes."""
    steps, record = make_model("compact", dtype, seed), []
    for item in seeds:
        assignment, plan, _ = planned(steps, item, slots)
        with RankExecutor(steps, assignment, plan, device=device) as executor:
            logits = executor.run([clips(steps, item + batch) for batch in range(4)])
            record.append((logits, dict(executor.moved_bytes)))
    return record


def by_ranks(slots: int, seeds: Sequence[int], dtype: str, seed: int) -> list[list[Any]]:
    """Measure plans with several processes; see `RANK_COLUMNS`."""
    ran = launch(partial(ranks_job, slots=slots, seeds=seeds, dtype=dtype, seed=seed), slots)
    steps, rows = make_model("compact", dtype, seed), []
    for index, item in enumerate(seeds):
        assignment, plan, _ = planned(steps, item, slots)
        logits = next(record[index][0] for record in ran if record[index][0])
        with torch.no_grad():
            expected = [scores(steps, clips(steps, item + batch)) for batch in range(4)]
        difference = max(
            compute_difference(value, other) for value, other in zip(logits, expected, strict=True)
        )
        moved = sum((Counter(record[index][1]) for record in ran), Counter())
        planned_bytes = compute_transfer_bytes(steps.describe_layers(2), assignment, plan)
        same = dict(moved) == {pair: 4 * size for pair, size in planned_bytes.items()}
        rows.append([item, float(f"{difference:.3g}"), same])
    return rows


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: exactness of rewritten models."""
    command = "python benchmarks/codesign/rewrite.py --out results/codesign/rewrite.json"

    def read_rows(part: str, columns: str, dtype: str | None = None) -> list[dict[str, Any]]:
        return [
            dict(zip(record[columns], row, strict=True))
            for case in record[part]
            if dtype in (None, case["dtype"])
            for row in case["samples"]
        ]

    for dtype, tolerance in record["tolerance"].items():
        local, ranks = read_rows("cases", "columns", dtype), read_rows("ranks", "rank_columns", dtype)
        yield Claim(
            id=f"codesign/1-exact-{dtype}",
            claim=f"Largest relative difference of logits between {len(local)} random {dtype} plans and the "
            "unpartitioned model.",
            value=max(
                *(max(row["difference"], row["local difference"]) for row in local),
                *(row["difference"] for row in ranks),
            ),
            unit="relative",
            target=f"<= {tolerance:g}",
            command=command,
            details={
                "split_layers": sum(row["splits"] for row in local),
                "parts": sum(row["parts"] for row in local),
                "plans_with_one_process_per_chip": len(ranks),
            },
        )
    local, ranks = read_rows("cases", "columns"), read_rows("ranks", "rank_columns")
    yield Claim(
        id="codesign/1-undo",
        claim=f"Plans of {len(local)} whose undo restores weights and logits bit-identically.",
        value=sum(row["undone"] for row in local),
        unit="plans",
        target=f">= {len(local)}",
        command=command,
    )
    rows = [*local, *ranks]
    yield Claim(
        id="codesign/1-bytes",
        claim=f"Plans of {len(rows)} whose executors move exactly the planned bytes between all slots.",
        value=sum(row["bytes"] for row in rows),
        unit="plans",
        target=f">= {len(rows)}",
        command=command,
    )


def main() -> int:
    parser = make_parser(__doc__, seed="weights")
    parser.add_argument("--plans", type=int, default=200, help="plans per model and dtype")
    parser.add_argument("--rank-plans", type=int, default=8, help="plans per number of processes and dtype")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 3], help="numbers of processes")
    parser.add_argument("--threads", type=int, help="CPU threads")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    record = start_record(args) | {
        "tolerance": TOLERANCE, "columns": COLUMNS, "rank_columns": RANK_COLUMNS, "cases": [], "ranks": [],
    }  # fmt: skip
    wrong = []
    for kind in KINDS:
        for dtype, limit in TOLERANCE.items():
            steps = make_model(kind, dtype, args.seed)
            rows = [row(steps, seed) for seed in range(args.plans)]
            worst, worst_local = max(item[5] for item in rows), max(item[6] for item in rows)
            undone, same = sum(item[7] for item in rows), sum(item[8] for item in rows)
            print(
                f"{kind:8s} {dtype}  {len(rows)} plans, {sum(item[3] for item in rows)} splits into "
                f"{sum(item[4] for item in rows)} parts: differ by {worst:.1e}, executed by "
                f"{worst_local:.1e} (limit {limit:.0e}); {undone} undone, bytes as planned in {same}"
            )
            record["cases"].append({"model": kind, "dtype": dtype, "samples": rows})
            if max(worst, worst_local) > limit or min(undone, same) < len(rows):
                wrong.append(f"{kind}, {dtype}")
    for slots in args.ranks:
        for dtype, limit in TOLERANCE.items():
            rows = by_ranks(slots, range(args.rank_plans), dtype, args.seed)
            worst, same = max(item[1] for item in rows), sum(item[2] for item in rows)
            print(
                f"{slots} processes, {dtype}  {len(rows)} plans: differ by {worst:.1e} (limit {limit:.0e}); "
                f"bytes as planned in {same}"
            )
            record["ranks"].append({"processes": slots, "dtype": dtype, "samples": rows})
            if worst > limit or same < len(rows):
                wrong.append(f"{slots} processes, {dtype}")
    return finish_record(args, record, [f"{item}: out of limits" for item in wrong], make_claims)


if __name__ == "__main__":
    sys.exit(main())
