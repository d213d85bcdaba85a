"""Put what the benchmarks of the adaptive wing measured into ``results/adaptive``: one claim a figure.

::

    PYTHONPATH=src python benchmarks/adaptive/record.py exact results/adaptive/exact.json
    PYTHONPATH=src python benchmarks/adaptive/record.py decode results/adaptive/decode-cuda.json
    PYTHONPATH=src python benchmarks/adaptive/record.py server results/adaptive/server.json
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparseflow.core.claims import record_command

RESULTS = Path(__file__).resolve().parents[2] / "results"

Fields = dict[str, Any]


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
            f"{step['floor_ms']:.2f}) over transformers' own, experts by its grouped product "
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


KINDS = {"exact": exact, "decode": decode, "server": server}


if __name__ == "__main__":
    sys.exit(record_command(__doc__, RESULTS, KINDS))
