"""Mapping of segments to slots: distance from the optimum, memory limits and time.

::

    export PYTHONPATH=src:.
    python benchmarks/codesign/mapping.py --out results/codesign/mapping-cpu.json

The benchmark has four parts, on random problems (`random_problem`):

- optimum: `auto` against all mappings, up to 12 segments on 4 slots;
- large: `auto` against CP-SAT, alone and started from that result, 24 segments on 8 slots;
- memory: whether each mapping fits and its bound is valid, by a check that shares no code with the solver;
- coarse: time of a plan for 12 to 14 segments on 4 to 8 slots, and of the first plan of a new process.

Times exclude compilation, except for the first plan of a new process.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from frame import finish_record, make_parser, start_record

from benchmarks.claims import Claim
from benchmarks.codesign.exhaustive import exhaust
from benchmarks.codesign.random_problem import random_problem
from sparseflow.codesign.mapping import (
    MappingGoal,
    MappingProblem,
    MappingResult,
    MappingSolver,
    Mode,
    compute_lower_bound,
)

MODES: tuple[Mode, ...] = ("balanced", "serial")
SAME = 1e-9
"""Relative difference of float sums that counts as rounding."""

FIRST = """
import time; begin = time.perf_counter()
from sparseflow.codesign.mapping import MappingSolver
from benchmarks.codesign.random_problem import random_problem
MappingSolver().solve_mapping(random_problem(14, 8, seed=0))
print(time.perf_counter() - begin)
"""


def naive(problem: MappingProblem, mapping: Sequence[int], mode: Mode, weight: float) -> float:
    """Compute the objective from its definition; inf if the mapping is infeasible."""
    busy, contents = [0.0] * problem.num_slots, [[] for _ in range(problem.num_slots)]
    for k, s in enumerate(mapping):
        busy[s] += float(problem.latency_ms[k, s])
        contents[s].append(float(problem.memory_mb[k, s]))
    for u, v, size in zip(problem.src, problem.dst, problem.traffic_bytes, strict=True):
        a, b = mapping[u], mapping[v]
        if a != b:
            busy[b] += float(problem.fixed_ms[a, b]) + float(size) * float(problem.ms_per_byte[a, b])
    for s in range(problem.num_slots):
        if math.fsum(contents[s]) > float(problem.limit_mb[s]):
            return math.inf
    return sum(busy) if mode == "serial" else max(busy) + weight * sum(busy)


def timed(solver: MappingSolver, problem: MappingProblem, **overrides: Any) -> tuple[MappingResult, float]:
    start = time.perf_counter()
    result = solver.solve_mapping(problem, **overrides)
    return result, time.perf_counter() - start


def optimum(args: argparse.Namespace) -> dict[str, Any]:
    """Create a random problem: half are chains, and most have little free memory."""
    samples = []
    for number in range(args.optimum):
        segments, slots = (12, 4) if number % 10 == 0 else (4 + number % 9, 2 + number % 3)
        seed, skips, slack = args.seed + number, 0.5 * (number % 2), (1.0, 1.1, 1.3, 2.0)[number % 4]
        traffic = (0.1, 0.5, 1.5)[number // 4 % 3]
        problem = random_problem(segments, slots, seed=seed, skips=skips, slack=slack, traffic=traffic)
        goals = [MappingGoal(mode=mode) for mode in MODES]
        for goal, (best, _) in zip(goals, exhaust(problem, goals), strict=True):
            result, seconds = timed(MappingSolver(mode=goal.mode), problem)
            objective = naive(problem, result.mapping, goal.mode, goal.tie_weight)
            excess = objective / best - 1.0
            right = abs(excess) <= SAME and result.optimal
            samples.append(
                [segments, slots, goal.mode, skips, slack, traffic, best, excess, seconds * 1e3, right]
            )
    right = sum(sample[-1] for sample in samples)
    largest = [sample[8] for sample in samples if sample[:2] == [12, 4]]
    print(
        f"optimum: {right} of {len(samples)} equal the best of all mappings; 12 x 4 takes "
        f"{statistics.median(largest):.1f} ms (median), {max(largest):.1f} ms (most)"
    )
    return {
        "columns": [
            "segments",
            "slots",
            "mode",
            "skips",
            "slack",
            "traffic",
            "best_ms",
            "excess",
            "ms",
            "right",
        ],
        "samples": samples,
        "right": right,
        "of": len(samples),
    }


def large(args: argparse.Namespace) -> dict[str, Any]:
    samples = []
    for number in range(args.large):
        seed, mode = args.seed + 1000 + number, MODES[number % 2]
        skips, slack = 0.4 * (number // 2 % 2), (1.1, 1.5, 3.0)[number % 3]
        problem = random_problem(24, 8, seed=seed, skips=skips, slack=slack)
        result, seconds = timed(MappingSolver(mode=mode), problem)
        solver = MappingSolver(mode=mode, time_limit_s=args.seconds, workers=args.workers)
        single, _ = timed(solver, problem, strategy="cpsat")
        after, _ = timed(solver, problem, strategy="cpsat", start=result)
        sample = {
            "mode": mode, "skips": skips, "slack": slack, "ms": seconds * 1e3, "strategy": result.strategy,
            "objective_ms": result.objective_ms, "lower_bound_ms": result.lower_bound_ms,
            "cpsat_ms": single.objective_ms, "cpsat_bound_ms": single.lower_bound_ms,
            "after_ms": after.objective_ms, "after_bound_ms": after.lower_bound_ms,
            "excess": result.objective_ms / single.objective_ms - 1.0,
            "excess_after": result.objective_ms / min(single.objective_ms, after.objective_ms) - 1.0,
        }  # fmt: skip
        samples.append(sample)
        print(
            f"large {number}: {mode:8s} {result.objective_ms:8.4f} ms in {seconds:.3f} s, gap "
            f"{result.gap:.1%}"
            f"; CP-SAT {single.objective_ms:8.4f} ({sample['excess']:+.2%}), from there "
            f"{after.objective_ms:8.4f} ({sample['excess_after']:+.2%})",
            flush=True,
        )
    worst = max(sample["excess_after"] for sample in samples)
    slowest = max(sample["ms"] for sample in samples)
    print(
        f"large: at most {worst:+.2%} above what CP-SAT has in {args.seconds:g} s; {slowest:.0f} ms at most"
    )
    return {"samples": samples, "worst_excess": worst, "slowest_ms": slowest}


def memory(args: argparse.Namespace) -> dict[str, Any]:
    violations = above = 0
    samples = []
    for number in range(args.memory):
        seed, mode = args.seed + 2000 + number, MODES[number % 2]
        segments, slots = 2 + number % 19, 1 + number % 8
        slack, skips = (1.0, 1.02, 1.1, 1.5)[number // 8 % 4], (0.0, 0.5)[number // 2 % 2]
        problem = random_problem(segments, slots, seed=seed, skips=skips, slack=slack, refused=0.1)
        strategy = ("auto", "local")[number // 4 % 2]
        result, seconds = timed(MappingSolver(mode=mode, strategy=strategy, seed=number), problem)
        goal = MappingGoal(mode=mode)
        objective = naive(problem, result.mapping, mode, goal.tie_weight)
        violations += math.isinf(objective)
        bound = compute_lower_bound(problem, goal).value_ms
        above += bound > objective * (1.0 + SAME) or result.lower_bound_ms > objective * (1.0 + SAME)
        samples.append(
            [segments, slots, round(objective, 4), round(result.lower_bound_ms, 4), round(seconds * 1e3, 1)]
        )
    print(f"memory: {violations} violations and {above} bounds too high in {len(samples)} problems")
    columns = ["segments", "slots", "objective_ms", "lower_bound_ms", "ms"]
    return {"columns": columns, "samples": samples, "violations": violations, "bounds_too_high": above}


def coarse(args: argparse.Namespace) -> dict[str, Any]:
    samples = []
    for segments in (12, 13, 14):
        for slots in (4, 6, 8):
            for mode in MODES:
                problem = random_problem(segments, slots, seed=args.seed + segments * slots, slack=1.5)
                times = [timed(MappingSolver(mode=mode), problem) for _ in range(args.repeats)]
                result = times[0][0]
                samples.append([segments, slots, mode, result.gap, [seconds * 1e3 for _, seconds in times]])
    medians = [statistics.median(sample[-1]) for sample in samples]
    all_items = sorted(value for sample in samples for value in sample[-1])
    print(
        f"coarse: medians from {min(medians):.1f} to {max(medians):.1f} ms; of all {len(all_items)} calls "
        f"{sum(value < 50.0 for value in all_items)} took less than 50 ms, the slowest {all_items[-1]:.1f} ms"
    )
    first = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("nothing_compiled_s", "compiled_before_s"):
            process = subprocess.run(
                [sys.executable, "-c", FIRST], env={**os.environ, "NUMBA_CACHE_DIR": folder},
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            first[name] = float(process.stdout)
    print(
        f"first plan of a new process, imports included: {first['nothing_compiled_s']:.1f} s with nothing "
        f"compiled, {first['compiled_before_s']:.2f} s after that"
    )
    columns = ["segments", "slots", "mode", "gap", "ms"]
    return {"columns": columns, "samples": samples, "slowest_median_ms": max(medians), "first": first}


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: mapping quality and time."""
    command = "python benchmarks/codesign/mapping.py --out results/codesign/mapping.json"
    exact, large, memory, coarse = (record[name] for name in ("optimum", "large", "memory", "coarse"))
    yield Claim(
        id="codesign/3-optimum",
        claim=f"Mappings of {exact['of']} that equal the exhaustive optimum, up to 12 segments on 4 slots.",
        value=exact["right"],
        unit="instances",
        target=f">= {exact['of']}",
        baseline="all mappings, one by one",
        command=command,
    )
    yield Claim(
        id="codesign/3-large",
        claim="Excess of the mapping of 24 segments on 8 slots over the best CP-SAT solution, worst of "
        f"{len(large['samples'])} instances.",
        value=round(100.0 * large["worst_excess"], 2),
        unit="%",
        target="<= 5",
        baseline="OR-tools CP-SAT",
        command=command,
        details={"cp_sat_seconds": record["settings"]["seconds"]},
    )
    yield Claim(
        id="codesign/3-large-time",
        claim="Time of the slowest mapping of 24 segments on 8 slots.",
        value=round(large["slowest_ms"] / 1e3, 3),
        unit="s",
        target="<= 1",
        command=command,
    )
    yield Claim(
        id="codesign/3-memory",
        claim=f"Mappings of {len(memory['samples'])} that exceed the memory of a slot.",
        value=memory["violations"],
        unit="violations",
        target="<= 0",
        command=command,
    )
    yield Claim(
        id="codesign/3-coarse",
        claim="Median time of a mapping of 12 to 14 segments on 4 to 8 slots, slowest of "
        f"{len(coarse['samples'])} problems.",
        value=round(coarse["slowest_median_ms"], 1),
        unit="ms",
        target="< 50",
        command=command,
        details={"repeats": record["settings"]["repeats"]},
    )


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--optimum", type=int, default=100, help="problems against all mappings, each in both modes"
    )
    parser.add_argument("--large", type=int, default=10, help="problems against CP-SAT")
    parser.add_argument("--memory", type=int, default=1000, help="problems of the memory check")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of each coarse plan")
    parser.add_argument("--seconds", type=float, default=20.0, help="time limit of CP-SAT, s")
    parser.add_argument("--workers", type=int, default=2, help="threads of CP-SAT")
    args = parser.parse_args()
    MappingSolver().solve_mapping(random_problem(3, 2, seed=0))
    record = start_record(args)
    for part in (coarse, optimum, memory, large):
        record[part.__name__] = part(args)
    missed = {
        "mappings that are not the optimum": record["optimum"]["of"] - record["optimum"]["right"],
        "mappings that break a slot's memory": record["memory"]["violations"],
        "bounds above a mapping": record["memory"]["bounds_too_high"],
    }
    return finish_record(
        args, record, [f"{count} {kind}" for kind, count in missed.items() if count], make_claims
    )


if __name__ == "__main__":
    sys.exit(main())
