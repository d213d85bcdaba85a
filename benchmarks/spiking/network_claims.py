"""Claims of the records that `networks.py` writes: single networks, the grid, and errors against float64.

::

    python -m benchmarks.claims record benchmarks/spiking/network_claims.py networks.json
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.claims import Claim, slugify, write_samples
from sparseflow.errors import InputError

MIN_SPEEDUP = 0.98
EAGER = "eager fp32 NCHW"

Row = dict[str, Any]


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record.

    Raises:
        InputError: The record was measured on a CPU, which only tests the script.
    """
    if record["device"] == "CPU":
        raise InputError("the rows were measured with --cpu, which only tests the script")
    for row in record["rows"]:
        if "errors" in row:
            yield make_error_claim(row)
        elif not row["grid"] and "error" not in row:
            yield from make_network_claims(row)
    grid = [row for row in record["rows"] if row["grid"]]
    if grid:
        yield from make_grid_claims(grid)


def compute_targets(row: Row) -> tuple[float, float | None]:
    """Return the target speedups over the fastest dense form and over eager (None: no target)."""
    settings = row["settings"]
    if row["dtype"] != "torch.float16" or settings["firing"] is not None or row["batch"] != 32:
        return MIN_SPEEDUP, None
    if row["silent_target"] >= 0.5:
        return 2.0, None
    steps, is_resnet50 = settings["steps"], row["model"] == "spiking_resnet50"
    if steps == 16 and (row["trained"] or row["model"] == "spiking_resnet18"):
        return 1.2, None
    if steps == 4 and (row["trained"] or is_resnet50):
        return (1.5 if is_resnet50 else 1.4), 4.0
    return MIN_SPEEDUP, None


def make_network_claims(row: Row) -> Iterator[Claim]:
    """Yield the speedup and memory claims of one network."""
    precision = "fp16" if row["dtype"] == "torch.float16" else "fp32"
    name = slugify(row["case"] if precision == "fp16" else f"{row['case']} {precision}")
    dense_target, eager_target = compute_targets(row)
    samples = write_samples(f"spiking/3-{name}.json", row)
    common: dict[str, Any] = {"command": row["command"], "samples": samples}
    yield Claim(
        id=f"spiking/3-{name}-dense",
        claim=f"Speedup of the optimized {row['case']} ({precision}) over its fastest dense form.",
        value=round(row["speedup"]["median"], 3),
        unit="x",
        target=f">= {dense_target}",
        baseline=row["baseline"] + ("" if row["compiled"] else "; torch.compile was not tried"),
        details={
            **describe_interval(row["speedup"]),
            "baseline_ms": round(row["latency_ms"][row["baseline"]], 4),
            "optimized_ms": round(row["latency_ms"]["optimised"], 4),
            "firing_rate": round(row["firing_rate"], 4),
            "silent_channels": round(row["silent_channels"], 4),
        },
        **common,
    )
    yield Claim(
        id=f"spiking/3-{name}-eager",
        claim=f"Speedup of the optimized {row['case']} ({precision}) over eager execution.",
        value=round(row["speedup_eager"]["median"], 3),
        unit="x",
        target=None if eager_target is None else f">= {eager_target}",
        baseline=f"{EAGER}, torch's default flags",
        details=describe_interval(row["speedup_eager"]),
        **common,
    )
    if row["memory_eager_bytes"]:
        yield Claim(
            id=f"spiking/3-{name}-memory",
            claim=f"Peak memory of eager {row['case']} over that of the optimized network.",
            value=round(compute_memory_ratio(row), 3),
            unit="x",
            target=">= 1.0",
            baseline=EAGER,
            **common,
        )


def describe_interval(speedup: dict[str, float]) -> dict[str, float]:
    """Return the details `low` and `high` of a claim."""
    return {name: round(speedup[name], 3) for name in ("low", "high")}


def make_grid_claims(grid: list[Row]) -> Iterator[Claim]:
    """Yield the claims about the slowest and the most memory-hungry network of the grid."""
    rows = [row for row in grid if "error" not in row]
    failed = [row["case"] for row in grid if "error" in row]
    command = rows[0]["command"] if rows else "python benchmarks/spiking/networks.py --grid"
    content = {"rows": [select_columns(row) for row in rows], "failed": failed}
    samples = write_samples("spiking/3-grid.json", content)
    common: dict[str, Any] = {"command": command, "samples": samples}
    compiled = all(row["compiled"] for row in rows)
    missing = "" if compiled else " but torch.compile, which the single networks above were held against"
    speedups: tuple[tuple[str, Callable[[Row], float], str, str], ...] = (
        (
            "dense",
            lambda row: row["speedup"]["median"],
            "the fastest dense form",
            f"the fastest dense form{missing}",
        ),
        (
            "own-dense",
            lambda row: row["speedup_our_dense"]["median"],
            "the plan with all groups dense",
            "our own plan with every group dense: cuDNN and one fused neuron",
        ),
    )
    for slug, compute_speedup, title, baseline in speedups:
        measured = [row for row in rows if slug == "dense" or row["speedup_our_dense"]]
        slowest = min(measured, key=compute_speedup, default=None)
        yield Claim(
            id=f"spiking/3-grid-{slug}",
            claim=f"Speedup of fp16 networks over {title}, slowest of {len(grid)} depths, time steps, "
            "batches and firing rates.",
            # A failed network counts as a speedup of 0.
            value=0.0 if failed or slowest is None else round(compute_speedup(slowest), 3),
            unit="x",
            target=f">= {MIN_SPEEDUP}",
            baseline=baseline,
            details={"slowest": slowest["case"] if slowest else "none", "failed": len(failed)},
            **common,
        )
    measured = [row for row in rows if row["memory_eager_bytes"]]
    if measured:
        worst = min(measured, key=compute_memory_ratio)
        yield Claim(
            id="spiking/3-grid-memory",
            claim=f"Peak memory of eager execution over that of the optimized network, smallest of "
            f"{len(measured)}.",
            value=round(compute_memory_ratio(worst), 3),
            unit="x",
            target=">= 1.0",
            baseline=EAGER,
            details={"network": worst["case"]},
            **common,
        )


def make_error_claim(row: Row) -> Claim:
    """Make the claim about the error against float64 relative to the dense network of the same precision."""
    precision = "fp16" if row["dtype"] == "torch.float16" else "fp32"
    errors, agreement = row["errors"], row["agreement"]
    prefix = "fp16 channels_last, folded, CUDA"
    forms = [form for form in errors if form == "eager" or form.startswith(prefix)]
    dense = forms[-1] if precision == "fp16" else "eager"
    name = f"{precision}-error-{slugify(row['case'])}"
    return Claim(
        id=f"spiking/5-{name}",
        claim=f"Error of the optimized {row['case']} logits against float64 over that of the dense network, "
        f"{row['images_for_errors']} images.",
        value=round(errors["optimised"] / errors[dense], 3),
        unit="x",
        target="<= 1.1",
        baseline=dense,
        command=row["command"],
        samples=write_samples(f"spiking/5-{name}.json", row),
        details={
            "error": errors["optimised"],
            "error_dense": errors[dense],
            "error_without_tf32": errors["eager, without TF32"],
            "class_agreement": agreement["optimised"],
            "class_agreement_dense": agreement[dense],
        },
    )


def select_columns(row: Row) -> Row:
    """Keep the columns of a grid row that fit into the samples, with the samples of the compared forms."""
    dropped = ("samples", "screening", "decisions", "layer_ms", "command", "nearly_silent")
    names = [name for name in row["samples"] if name in (row["baseline"], "optimised") or "our " in name]
    columns = {key: value for key, value in row.items() if key not in dropped}
    return columns | {"samples": {name: row["samples"][name] for name in names}}


def compute_memory_ratio(row: Row) -> float:
    """Compute the peak memory of eager execution over that of the optimized network."""
    return row["memory_eager_bytes"] / row["memory_optimised_bytes"]
