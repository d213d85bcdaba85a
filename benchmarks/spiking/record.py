"""Put what the benchmarks measured into ``results/spiking``: compact samples, and one claim a figure.

::

    PYTHONPATH=src python benchmarks/spiking/record.py networks networks.json
    PYTHONPATH=src python benchmarks/spiking/record.py numerics exact.json
    PYTHONPATH=src python benchmarks/spiking/record.py groups groups.json
    PYTHONPATH=src python benchmarks/spiking/record.py table user_table.json
    PYTHONPATH=src python benchmarks/spiking/record.py launches launches.json
    PYTHONPATH=src python benchmarks/spiking/record.py demo demo.json
    PYTHONPATH=src python benchmarks/spiking/record.py fresh fresh.json

Each file is what the script of that name wrote. ``networks`` also takes the grid; ``numerics`` takes what
``networks.py --exact`` (or ``--reference``) wrote. ``demo`` is the output of ``sparseflow demo
--json``; ``fresh`` holds the exit codes and seconds of ``make demo`` and ``make test``. ``--git``
names the revision that was measured when that is not the present one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from sparseflow.core.claims import update
from sparseflow.core.environment import get_git_revision
from sparseflow.core.files import write_atomic

RESULTS = Path(__file__).parents[2] / "results"
NEVER_SLOWER = 0.98
Fields = dict[str, Any]


def slug(text: str) -> str:
    """``text`` as the tail of a claim's id."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def compact(content: Any) -> str:
    """JSON with floats cut to six significant digits."""
    return json.dumps(json.loads(json.dumps(content), parse_float=lambda x: float(f"{float(x):.6g}")))


def claim(value: float, at_least: float | None, *, at_most: float | None = None, **fields: Any) -> Fields:
    """A claim about a ratio, with its target where there is one."""
    value = round(value, 3)
    if at_most is not None:
        return {"value": value, "unit": "x", "target": f"<= {at_most}", "met": value <= at_most, **fields}
    target = None if at_least is None else f">= {at_least}"
    met = at_least is None or value >= at_least
    return {"value": value, "unit": "x", "target": target, "met": met, **fields}


def network_targets(row: dict[str, Any]) -> tuple[float, float | None]:
    """What a network is to reach over the strongest dense form, and over eager (None: no target)."""
    settings = row["settings"]
    steps, full = settings["steps"], row["batch"] == 32
    if row["dtype"] != "torch.float16" or settings["firing"] is not None or not full:
        return NEVER_SLOWER, None
    if row["silent_target"] >= 0.5:
        return 2.0, None
    fifty = row["model"] == "spiking_resnet50"
    if steps == 16 and (row["trained"] or row["model"] == "spiking_resnet18"):
        return 1.2, None
    if steps == 4 and (row["trained"] or fifty):
        return (1.5 if fifty else 1.4), 4.0
    return NEVER_SLOWER, None


def networks(source: dict[str, Any], save: Callable[[str, Any], str]) -> Iterator[Fields]:
    """Whole networks against the strongest dense form and against eager (line 3), and memory."""
    measured = [row for row in source["rows"] if not row["grid"] and "error" not in row]
    for row in measured:
        precision = "fp16" if row["dtype"] == "torch.float16" else "fp32"
        name = slug(row["case"] if precision == "fp16" else f"{row['case']} {precision}")
        samples = save(f"3-{name}.json", row)
        ms = row["latency_ms"]
        common = {"device": source["device"], "command": row["command"], "samples": samples}
        dense, eager = network_targets(row)
        active = f"{100 * row['firing_rate']:.0f} % firing"
        if row["silent_target"]:
            active += f", {100 * row['silent_channels']:.0f} % of the channels silent"
        yield claim(
            row["speedup"]["median"],
            dense,
            id=f"spiking/3-{name}-dense",
            claim=f"{row['case']} ({precision}, {active}): {ms[row['baseline']]:.3f} → "
            f"{ms['optimised']:.3f} ms a batch",
            baseline=row["baseline"] + ("" if row["compiled"] else "; torch.compile was not tried"),
            **common,
        )
        yield claim(
            row["speedup_eager"]["median"],
            eager,
            id=f"spiking/3-{name}-eager",
            claim=f"{row['case']} ({precision} groups) over the network as a user runs it today",
            baseline="eager fp32 NCHW, torch's default flags",
            **common,
        )
        if row["memory_eager_bytes"]:
            yield claim(
                row["memory_eager_bytes"] / row["memory_optimised_bytes"],
                1.0,
                id=f"spiking/3-{name}-memory",
                claim=f"{row['case']}: peak memory of eager over that of the optimised network",
                baseline="eager fp32 NCHW",
                **common,
            )
    yield from whole_grid(source, save)


def grid_ratio(row: dict[str, Any]) -> float:
    """Over the fastest dense form that was tried."""
    return row["speedup"]["median"]


def own_dense_ratio(row: dict[str, Any]) -> float:
    """Over our own plan with every group dense: cuDNN with our fused neuron behind it."""
    return row["speedup_our_dense"]["median"]


def whole_grid(source: dict[str, Any], save: Callable[[str, Any], str]) -> Iterator[Fields]:
    """One claim about the slowest network of the grid, one about the one that saves least memory."""
    found = [row for row in source["rows"] if row["grid"]]
    done = [row for row in found if "error" not in row]
    if not found:
        return
    slim = []
    for row in done:
        kept = [name for name in row["samples"] if name in (row["baseline"], "optimised") or "our " in name]
        left_out = ("samples", "screening", "decisions", "layer_ms", "command", "nearly_silent")
        entry = {k: v for k, v in row.items() if k not in left_out}
        slim.append(entry | {"samples": {name: row["samples"][name] for name in kept}})
    failed = [row["case"] for row in found if "error" in row]
    common = {
        "device": source["device"],
        "command": done[0]["command"] if done else "python benchmarks/spiking/networks.py --grid",
        "samples": save("3-grid.json", {"rows": slim, "failed": failed}),
    }
    compiled = all(row["compiled"] for row in done)
    missing = "" if compiled else " but torch.compile, which the single networks above were held against"
    for kind, ratio, baseline in (
        ("dense", grid_ratio, f"the fastest dense form{missing}"),
        ("own-dense", own_dense_ratio, "our own plan with every group dense: cuDNN and one fused neuron"),
    ):
        known = [row for row in done if kind == "dense" or row["speedup_our_dense"]]
        worst = min(known, key=ratio, default=None)
        what = f", {worst['case']}" if worst else ""
        what += f"; {len(failed)} failed, which counts as 0" if failed else ""
        yield claim(
            ratio(worst) if worst and not failed else 0.0,
            NEVER_SLOWER,
            id=f"spiking/3-grid-{kind}",
            claim=f"the slowest of {len(found)} networks (depths, T, batches, firing rates; fp16){what}",
            baseline=baseline,
            **common,
        )
    held = [row for row in done if row["memory_eager_bytes"]]
    if held:
        least = min(held, key=_memory_ratio)
        yield claim(
            _memory_ratio(least),
            1.0,
            id="spiking/3-grid-memory",
            claim=f"peak memory of eager over that of the optimised network, the least of {len(held)}: "
            f"{least['case']}",
            baseline="eager fp32 NCHW",
            **common,
        )


def _memory_ratio(row: dict[str, Any]) -> float:
    return row["memory_eager_bytes"] / row["memory_optimised_bytes"]


def numerics(source: dict[str, Any], save: Callable[[str, Any], str]) -> Iterator[Fields]:
    """Error against float64 beside that of the dense network in the same precision (line 5)."""
    for row in source["rows"]:
        if "errors" not in row:
            continue
        precision = "fp16" if row["dtype"] == "torch.float16" else "fp32"
        same = [k for k in row["errors"] if k == "eager" or k.startswith("fp16 channels_last, folded, CUDA")]
        dense = same[-1] if precision == "fp16" else "eager"
        name = f"{precision}-error-{slug(row['case'])}"
        agreed = row["agreement"]
        yield claim(
            row["errors"]["optimised"] / row["errors"][dense],
            None,
            at_most=1.1,
            id=f"spiking/5-{name}",
            claim=f"{row['case']}: error of the logits of {row['images_for_errors']} images against float64, "
            f"{row['errors']['optimised']:.2e} for {row['errors'][dense]:.2e} of the dense network "
            f"({row['errors']['eager, without TF32']:.2e} without TF32); the class is float64's for "
            f"{100 * agreed['optimised']:.2f} % of them ({100 * agreed[dense]:.2f} % dense)",
            baseline=dense,
            device=source["device"],
            command=row["command"],
            samples=save(f"5-{name}.json", row),
        )


def groups(source: dict[str, Any], save: Callable[[str, Any], str]) -> Iterator[Fields]:
    """Conv + BatchNorm + neuron groups against cuDNN with one fused neuron kernel behind it (line 3)."""
    for name, layer in source["layers"].items():
        if "timing" not in layer:
            continue
        times = layer["timing"]["samples_us"]
        dense = {k: v for k, v in times.items() if k.startswith("dense")}
        ours = {k: v for k, v in times.items() if k in layer["checks"]}
        if not dense or not ours:
            continue
        best_dense = min(dense, key=lambda k: median(dense[k]))
        best = min(ours, key=lambda k: median(ours[k]))
        kept = {best_dense: dense[best_dense], best: ours[best]}
        facts = {k: layer[k] for k in ("layer", "flops", "floors_us")} | {"check": layer["checks"][best]}
        ratio = median([d / o for d, o in zip(dense[best_dense], ours[best], strict=False)])
        size = layer["layer"]
        shape = f"{size['size']}² {size['c_in']}→{size['c_out']} {size['k']}x{size['k']}"
        what = f"{shape}, T {size['T']}, {size['N']} images"
        silent = f", {100 * size['silent']:.0f} % of the channel groups silent" if size["silent"] else ""
        yield claim(
            ratio,
            None,  # the target of 2.0 is for whole networks
            id=f"spiking/3-group-{slug(name)}",
            claim=f"one group, {what}{silent}: {median(dense[best_dense]):.1f} → {median(ours[best]):.1f} µs",
            baseline=f"{best_dense}: cuDNN and one fused neuron kernel",
            device=source["device"],
            command="python benchmarks/spiking/gpu_groups.py " + " ".join(source["argv"]),
            samples=save(f"3-group-{slug(name)}.json", {**facts, "samples_us": kept}),
        )


def table(source: dict[str, Any], save: Callable[[str, Any], str]) -> Iterator[Fields]:
    """The six layers of the user's table (line 4)."""
    device = source["environment"]["device"]["name"]
    for row in source["rows"]:
        if not row.get("best_ours") or not row.get("best_dense"):
            continue
        dense = {k: v for k, v in row["median_ms"].items() if k.startswith("dense")}
        strongest = min(dense, key=dense.__getitem__)
        kept = {strongest, row["best_ours"], "eager fp32 NCHW"}
        name = slug(f"{row['name']}-{row['silent']}-{row['comparison']}")
        slim = {k: v for k, v in row.items() if k not in ("samples_ms", "checks", "median_ms")}
        slim["samples_ms"] = {k: v for k, v in row["samples_ms"].items() if k in kept}
        samples = save(f"4-{name}.json", slim)
        for ratio in row["ratios"]:
            if ratio["ours"] != row["best_ours"] or ratio["other"] not in (strongest, "eager fp32 NCHW"):
                continue
            against = "eager" if ratio["other"].startswith("eager") else "dense"
            yield claim(
                ratio["speedup"],
                None,
                id=f"spiking/4-{name}-{against}",
                claim=f"{row['name']}, {100 * row['zero_blocks']:.1f} % zero blocks ({row['silent']}), "
                f"{row['comparison']}: {row['best_ours']}; floor {min(row['floor_ms'].values()):.4f} ms",
                baseline=ratio["other"],
                device=device,
                command="python benchmarks/spiking/user_table.py --quick",
                samples=samples,
            )


def launches(source: dict[str, Any], save: Callable[[str, Any], str]) -> Iterator[Fields]:
    """No wait of the host, no prescan, fewer spike bytes (line 6)."""
    common: Fields = {
        "device": source["device"],
        "baseline": None,
        "command": "python benchmarks/spiking/launches.py",
        "samples": save("6-launches.json", source),
    }
    # One is the profiler's own, when it stops.
    waits = sum(source["waits_of_the_host"].values()) - 1
    yield {
        "id": "spiking/6-host-waits",
        "claim": "waits of the host within one run of an optimised spiking ResNet-18",
        "value": waits,
        "unit": "waits",
        "target": "== 0",
        "met": waits == 0,
        **common,
    }
    yield {
        "id": "spiking/6-prescan",
        "claim": "prescan kernels within one run of an optimised spiking ResNet-18",
        "value": source["prescan_kernels"],
        "unit": "kernels",
        "target": "== 0",
        "met": source["prescan_kernels"] == 0,
        **common,
    }
    yield claim(
        source["smallest_saving_of_packed"],
        8.0,
        id="spiking/6-bytes",
        claim="fewer spike bytes on the packed layer that saves least (its border and activity words weigh "
        "most), against fp16",
        **common,
    )


def demo(source: dict[str, Any], save: Callable[[str, Any], str]) -> Iterator[Fields]:
    """The shipped network on a CPU (line 2)."""
    run = Path(source["run"])
    shutil.copyfile(run / "samples.parquet", RESULTS / "spiking" / "2-demo.parquet")
    environment = json.loads((run / "run.json").read_text())["environment"]
    save("2-demo.json", source)
    common: Fields = {
        "device": f"{environment['device']['name']}, {source['threads']} threads",
        "command": "sparseflow demo --json",
        "samples": "spiking/2-demo.parquet",
    }
    yield claim(
        source["speedup"],
        1.3,
        id="spiking/2-demo-speedup",
        claim=f"the shipped network on real images, batches of {source['batch']}, end to end on a CPU",
        baseline=source["baseline"],
        **common,
    )
    yield {
        "id": "spiking/2-demo-predictions",
        "claim": f"predictions identical on all {source['images']} shipped images",
        "value": source["predictions_identical"],
        "unit": "",
        "target": "identical",
        "met": source["predictions_identical"],
        "baseline": "the network as it is",
        **common,
    }


def fresh(source: dict[str, Any], save: Callable[[str, Any], str]) -> Iterator[Fields]:
    """Both commands on a fresh clone (line 1)."""
    samples = save("1-fresh-clone.json", source)
    for what in ("demo", "test"):
        yield {
            "id": f"spiking/1-make-{what}",
            "claim": f"exit code of `make {what}` on a fresh clone without a virtual environment",
            "value": source[f"{what}_exit"],
            "unit": "",
            "target": "== 0",
            "met": source[f"{what}_exit"] == 0,
            "baseline": None,
            "device": "2-core CPU",
            "command": f"git clone …; make {what}",
            "samples": samples,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = {f.__name__: f for f in (networks, numerics, groups, table, launches, demo, fresh)}
    parser.add_argument("kind", choices=sorted(kinds))
    parser.add_argument("file", type=Path)
    parser.add_argument("--git", default=None, help="revision that was measured")
    parser.add_argument("--date", default=datetime.datetime.now(datetime.UTC).date().isoformat())
    args = parser.parse_args()
    source = json.loads(args.file.read_text())
    if args.kind in ("networks", "numerics") and source["device"] == "CPU":
        parser.error("these rows come from --cpu, which only tries the script")
    (RESULTS / "spiking").mkdir(parents=True, exist_ok=True)

    def save(name: str, content: Any) -> str:
        write_atomic(RESULTS / "spiking" / name, compact(content))
        return f"spiking/{name}"

    revision = args.git or get_git_revision() or "unknown"
    for fields in kinds[args.kind](source, save):
        update(RESULTS, {**fields, "git": revision, "date": args.date})
        print(f"{fields['id']}: {fields['value']}{fields['unit']} (met: {fields['met']})")


if __name__ == "__main__":
    main()
