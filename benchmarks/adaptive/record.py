"""Put what the benchmarks of the adaptive wing measured into ``results/adaptive``: one claim a figure.

::

    PYTHONPATH=src python benchmarks/adaptive/record.py exact results/adaptive/exact.json
    PYTHONPATH=src python benchmarks/adaptive/record.py decode results/adaptive/decode-cuda.json
    PYTHONPATH=src python benchmarks/adaptive/record.py server results/adaptive/server.json

The Makefile beside this file measures what wants a trained model: `trained`, `spans`, `study`, `load`,
`overhead` and `predictor`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sparseflow.core.claims import record_command

RESULTS = Path(__file__).resolve().parents[2] / "results"

Fields = dict[str, Any]

_MAKE = "make -C benchmarks/adaptive {1}, which makes {0}.json"


def exact(record: Fields) -> Iterator[Fields]:
    """Plans on models of several families, in float64 (line 1)."""
    columns = record["columns"]
    rows = [dict(zip(columns, row, strict=True)) for case in record["cases"] for row in case["samples"]]
    families = sorted({case["family"] for case in record["cases"]})
    of = f"{len(rows)} plans of {len(families)} families ({', '.join(families)}), 6 and 16 blocks"
    common: Fields = {"command": "python benchmarks/adaptive/exact.py --out results/adaptive/exact.json"}
    worst = max(max(row["cached"], row["rebuilt"]) for row in rows)
    yield common | {
        "id": "adaptive/1-logits",
        "claim": f"largest difference of logits, float64, relative: cached and uncached, and a model that is "
        f"built as the plan says; {of}",
        "value": worst, "unit": "relative", "target": "<= 1e-10", "met": worst <= 1e-10,
        "baseline": "the model without a cache",
    }  # fmt: skip
    good = sum(row["generated"] and row["attention"] and row["experts"] for row in rows)
    yield common | {
        "id": "adaptive/1-calls",
        "claim": f"plans whose tokens, executed block calls and expert assignments are those of the plan; of "
        f"{len(rows)}",
        "value": good, "unit": "plans", "target": f">= {len(rows)}", "met": good == len(rows),
    }  # fmt: skip
    refused = sum(row["refused"] for row in rows) * all(case["block_0_refused"] for case in record["cases"])
    yield common | {
        "id": "adaptive/1-refusals",
        "claim": "plans for which a change within a request and a skipped block 0 raise typed errors; of "
        f"{len(rows)}",
        "value": refused, "unit": "plans", "target": f">= {len(rows)}", "met": refused == len(rows),
    }  # fmt: skip
    detached = sum(all(case["detached"].values()) for case in record["cases"])
    yield common | {
        "id": "adaptive/1-detached",
        "claim": f"models that are bit-identical after `detach`; of {len(record['cases'])}",
        "value": detached, "unit": "models", "target": f">= {len(record['cases'])}",
        "met": detached == len(record["cases"]),
    }  # fmt: skip


def decode(record: Fields) -> Iterator[Fields]:
    """Recorded steps against the model's own forward (line 6)."""
    common: Fields = {"command": "python benchmarks/adaptive/decode.py --device cuda"}
    for step in record["steps"]:
        own, ours = (step["samples_ms"][name] for name in ("own", "recorded"))
        ratio = statistics.median(a / b for a, b in zip(own, ours, strict=True))
        kept = step["plan"].count(".") + 1
        top_k = next(part for part in step["plan"].split("-") if part.startswith("k"))[1:]
        target = 4.0 if step["batch"] == 1 else None
        yield common | {
            "id": f"adaptive/6-step-{kept}-k{top_k}-b{step['batch']}",
            "claim": f"a decode step of OLMoE-1B-7B's geometry, bf16, {kept} blocks, {top_k} experts, batch "
            f"{step['batch']}, in CUDA graphs ({statistics.median(ours):.2f} ms; reading what it needs takes "
            f"{step['floor_ms']:.2f}) over transformers' own, experts by {step['experts']}, its quickest "
            f"({statistics.median(own):.1f} ms)",
            "value": round(ratio, 2), "unit": "x", "target": None if target is None else f">= {target:g}",
            "met": target is None or ratio >= target, "baseline": "transformers, eager",
        }  # fmt: skip


def server(record: Fields) -> Iterator[Fields]:
    """OpenAI's client against the server (line 7)."""
    count = len(record["samples"])
    yield {
        "id": "adaptive/7-openai-client",
        "claim": f"answers of the server to OpenAI's own client ({record['streamed']} streamed, "
        f"{record['with_image']} with an image; up to {record['most_at_once']} requests of "
        f"{record['most_plans']} plans at a time) that are, token by token, what their request gets alone, "
        f"float64; of {count}",
        "value": record["equal"], "unit": "answers", "target": f">= {count}", "met": record["equal"] == count,
        "baseline": "each request alone, by the model's own forward",
        "command": "python benchmarks/adaptive/server.py --out results/adaptive/server.json",
    }  # fmt: skip


def trained(record: Fields) -> Iterator[Fields]:
    """Grid-VQA models, trained from several seeds (line 2)."""
    seeds, settings = record["seeds"], record["settings"]["model"]
    worst = min(seeds, key=lambda each: each["accuracy"])
    blind = max(each["blind"]["accuracy"] for each in seeds)
    minutes = max(each["train_seconds"] for each in seeds) / 60.0
    yield {
        "id": "adaptive/2-accuracy", "command": _MAKE.format("trained", "models"),
        "claim": f"Grid-VQA, {settings['depth']} blocks, full plan, the worst of {len(seeds)} seeds "
        f"({', '.join(_percent(each['accuracy']) for each in seeds)}; {worst['samples']} questions each; by "
        f"kind {', '.join(f'{kind} {_percent(share)}' for kind, share in worst['by_kind'].items())}); at "
        f"most {minutes:.0f} minutes of training",
        "value": round(100.0 * worst["accuracy"], 1), "unit": "%", "target": ">= 90",
        "met": round(100.0 * worst["accuracy"], 1) >= 90.0,
        "baseline": f"from the question alone: {_percent(blind)}",
    }  # fmt: skip


def spans(record: Fields) -> Iterator[Fields]:
    """What plans of a trained model take that no other beats (line 2)."""
    common: Fields = {"command": _MAKE.format("spans", "figures"), "baseline": None}
    alone, rate, tail = record["alone"], record["at_rate"], record["at_rate_p95"]

    def ends(of: Fields) -> str:
        most, least = of["pareto"][-1], of["pareto"][0]
        return (
            f"{most['ms']:.2f} ms, {_percent(most['accuracy'])} right, over {least['ms']:.2f} ms, "
            f"{_percent(least['accuracy'])}"
        )

    def span(of: Fields) -> Fields:
        value = round(of["span"], 3)
        return {"value": value, "unit": "x", "target": ">= 2", "met": value >= 2.0}

    yield common | span(alone) | {
        "id": "adaptive/2-span",
        "claim": f"measured latency of the dearest over the cheapest of {len(alone['pareto'])} Pareto plans, "
        f"medians of requests one after the other ({ends(alone)})",
    }  # fmt: skip
    yield common | span(tail) | {
        "id": "adaptive/2-span-at-rate",
        "claim": f"the same of {len(tail['pareto'])} Pareto plans at one rate of requests, "
        f"{record['rate_per_s']:.0f} a second ({_percent(record['settings']['load'])} of what the dearest "
        f"can do), as 95 of 100 requests see it ({ends(tail)}); medians there span {rate['span']:.2f}x",
    }  # fmt: skip
    yield common | {
        "id": "adaptive/2-plans",
        "claim": f"Pareto plans in accuracy and measured latency, of {len(record['plans'])} that were "
        f"measured ({len(rate['pareto'])} by their medians at that rate; accuracy of "
        f"{record['samples']['test']} questions)",
        "value": len(alone["pareto"]), "unit": "plans", "target": ">= 6",
        "met": len(alone["pareto"]) >= 6,
    }  # fmt: skip


def predictor(record: Fields) -> Iterator[Fields]:
    """Requests that a predictor had not seen (line 3)."""
    common: Fields = {"command": _MAKE.format("predictor", "figures")}
    for row, rival in zip(record["loads"], record["boosting"], strict=True):
        where = "idle" if not row["load"] else f"beside a load of {_percent(row['load'])}"
        name = "idle" if not row["load"] else f"load-{round(100 * row['load'])}"
        yield common | {
            "id": f"adaptive/3-p50-{name}",
            "claim": f"error of predicted medians, {where}, plans and lengths that were not profiled "
            f"({row['requests']} requests; {_percent(row['learning_mape'])} learning on; halves of runs "
            f"differ by {_percent(row['halves_differ'])})",
            "value": round(100.0 * row["mape"], 2), "unit": "%", "target": "< 5",
            "met": round(100.0 * row["mape"], 2) < 5.0,
            "baseline": f"gradient boosting: {_percent(rival['mape'])}",
        }  # fmt: skip
        share = round(100.0 * row["learning_coverage"], 2)
        yield common | {
            "id": f"adaptive/3-p99-{name}",
            "claim": f"requests within their predicted p99, {where}, learning on ({row['requests']} "
            f"requests; {_percent(row['coverage'])} as it was fitted; p99 is {row['learning_margin']:.2f} "
            "times p50)",
            "value": share, "unit": "%", "target": "98.5 to 99.5", "met": 98.5 <= share <= 99.5,
            "baseline": f"gradient boosting: {_percent(rival['coverage'])}",
        }  # fmt: skip


def load(record: Fields) -> Iterator[Fields]:
    """Requests with budgets under load, and a step of it (line 4)."""
    common: Fields = {"command": _MAKE.format("load", "figures")}
    steady, every = record["steady"], record["steady"]["attainment_of_all"]
    kept, (low, middle, most) = round(100.0 * steady["attainment"]["share"], 2), steady["budget_ms"]
    yield common | {
        "id": "adaptive/4-attainment",
        "claim": f"accepted requests within their budget, {steady['requests']} at random times with budgets "
        f"of {low:.0f} to {most:.0f} ms, half of them below {middle:.0f}, "
        f"{steady['requests_per_s']:.0f} a second ({_percent(record['settings']['load'])} of capacity; the "
        f"engine worked {_percent(steady['utilisation'])} of the time; p50 {steady['p50_ms']:.1f} ms); of "
        f"all requests {_percent(every['share'])} were: {_percent(steady['infeasible_share'])} were told "
        f"that no plan keeps their budget, and {_percent(steady['shed_share'])} were shed",
        "value": kept, "unit": "%", "target": ">= 99", "met": kept >= 99.0, "baseline": None,
    }  # fmt: skip
    step = record.get("step")
    if step is not None:
        back, rightly = step["recovery"]["back_after_s"], step["recovery"]["refused_rightly"]
        told = f", {_percent(rightly['share'])} of them told when to try again" if rightly["of"] else ""
        yield common | {
            "id": "adaptive/4-step",
            "claim": f"seconds until 99 % of accepted requests are within their budget again for good, at "
            f"{record['settings']['step']:g} times the load; {_percent(step['shed_share'])} were shed"
            f"{told}; of all requests "
            f"{_percent(step['attainment_of_all']['share'])} were within their budget",
            "value": round(back, 2), "unit": "s", "target": "<= 5, or shed with correct errors",
            "met": back <= 5.0 or rightly["share"] == 1.0, "baseline": None,
        }  # fmt: skip


def study(record: Fields) -> Iterator[Fields]:
    """Controllers against what needs no training (line 5)."""
    common: Fields = {"command": _MAKE.format("study", "figures")}
    named = {each["name"]: each for each in record["policies"]}
    mine = named["controllers"]
    for row in record["compared"]:
        if (row["one"], row["where"]) != ("controllers", "all requests"):
            continue
        gain, other = row["goodput"], named[row["other"]]
        told = "better" if gain["low"] > 0.0 else "worse" if gain["high"] < 0.0 else "no telling"
        yield common | {
            "id": f"adaptive/5-{row['other'].replace(' ', '-')}",
            "claim": f"controllers against {row['other']}, answers that are right and in time "
            f"({_percent(mine['goodput']['mean'])} against {_percent(other['goodput']['mean'])}, an oracle "
            f"{_percent(named['oracle']['goodput']['mean'])}; in time {_percent(mine['attainment']['mean'])} "
            f"and {_percent(other['attainment']['mean'])}): {told}, 95 % interval {100 * gain['low']:+.1f} "
            f"to {100 * gain['high']:+.1f}",
            "value": round(100.0 * gain["mean"], 2), "unit": "points", "target": None,
            "met": gain["low"] > 0.0, "baseline": row["other"],
        }  # fmt: skip


def overhead(record: Fields) -> Iterator[Fields]:
    """What deciding adds to a request (line 6)."""
    worst = max(record["cases"], key=lambda each: each["overhead"][0])
    middle, low, high = (100.0 * each for each in worst["overhead"])
    told, host = record["settings"], record["host"]["median_us"]
    # Without a folder it has random weights, and a name.
    name = None if told["model"] else told["geometry"]
    of, end, command = "Grid-VQA", "", _MAKE.format("overhead", "figures")
    if name:
        of, end = f"random weights, {name}", f"-{name}"
        command = (
            f"python benchmarks/adaptive/overhead.py --geometry {name} --new-tokens {told['new_tokens']} "
            f"--plans {told['plans']} --pairs {told['pairs']}"
        )
    yield {
        "id": f"adaptive/6-deciding{end}",
        "claim": f"what predictor and controllers add to the median of a request of the same plan ({of}; "
        f"{told['new_tokens']} new tokens), the worst "
        f"of {len(record['cases'])} plans ({worst['p50_ms']:.2f} ms; 95 % interval {low:+.2f} to {high:+.2f} "
        f"%; two runs without them differ by {100 * worst['chance'][0]:+.2f} %; both stages, again and "
        f"again on a host that does nothing else, take {host['first'] + host['second']:.0f} us)",
        "value": round(middle, 2), "unit": "%", "target": "< 1", "met": round(middle, 2) < 1.0,
        "baseline": "the same plan, given", "command": command,
    }  # fmt: skip


def _percent(share: float) -> str:
    return f"{100.0 * share:.1f} %"


def _by_device(claims: Callable[[Fields], Iterator[Fields]]) -> Callable[[Fields], Iterator[Fields]]:
    """Claims whose ids tell a CPU's from a GPU's, so that both can be kept."""

    def named(record: Fields) -> Iterator[Fields]:
        end = "-cpu" if record["environment"]["device"]["kind"] == "cpu" else ""
        for each in claims(record):
            yield each | {"id": each["id"] + end}

    return named


KINDS = {
    "exact": exact, "decode": decode, "server": server,
    **{each.__name__: _by_device(each) for each in (trained, spans, predictor, load, study, overhead)},
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(record_command(__doc__, RESULTS, KINDS))
