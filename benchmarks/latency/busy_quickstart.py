"""Quick starts on a machine whose CPUs other work uses.

::

    export PYTHONPATH=src:.
    python benchmarks/latency/busy_quickstart.py --work runs/busy --out results/latency/busy-cpu.json

Each run is `sparseflow latency quickstart` beside `--busy` endless loops for each usable CPU, in the order of
the arguments, `--repeats` times. The first run exports the networks and extracts their kernels; the next ones
start from its files, and only their measurements and predictors are new. A run counts if it ends with a
predictor and a report. Errors are those of idle latencies: `mape` of the four networks against CPU times that
are measured after the training, `held_out_mape` of networks that the predictor did not learn.

Rows are saved after each run; complete ones are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.claims import Claim, record_claims
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import parse_json, write_atomic
from sparseflow.core.telemetry.host_reader import HostReader

MAX_MAPE = 0.08
SHARED_FOLDERS = ("models", "graphs")
TIMEOUT_S = 3600.0


@contextmanager
def use_cpus(busy: float) -> Iterator[float]:
    """Run endless loops, `busy` per usable CPU; yields the measured share of the CPUs that is in use."""
    count = round(busy * len(os.sched_getaffinity(0)))
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield HostReader(metrics=("others",)).read(2.0)["others"]
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run_once(out_dir: Path, busy: float) -> dict[str, Any]:
    """Run the quick start beside other work and return a row."""
    command = [sys.executable, "-m", "sparseflow", "latency", "quickstart", "--out", str(out_dir), "--json"]
    with use_cpus(busy) as measured_busy:
        start_s = time.monotonic()
        process = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        row: dict[str, Any] = {
            "busy": busy,
            "others_before": round(measured_busy, 3),
            "wall_s": round(time.monotonic() - start_s, 1),
            "exit_code": process.returncode,
        }
    if process.returncode:
        return row | {"error": process.stdout[-500:]}
    result = json.loads(process.stdout)
    idle = [entry for entry in result["evaluation"]["rows"] if entry["level"] == 0.0]
    errors = [abs(entry["error"]) for entry in idle]
    predictor = parse_json(Path(result["predictor"]).read_bytes())
    return row | {
        "report": Path(result["report"]).is_file(),
        "mape": sum(errors) / len(errors),
        "held_out_mape": result["quality"]["models"]["rest"]["mape"],
        "summary": result["evaluation"]["summary"],
        "idle": [{key: entry[key] for key in ("model", "predicted_ms", "measured_ms")} for entry in idle],
        "others": predictor["other_load"],
        "costs_ms": {key: value for key, value in predictor["composition"].items() if key.endswith("_ms")},
        "problems": result["problems"],
    }


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: quick starts that ended, and their largest idle error."""
    rows = record["rows"]
    complete = [row for row in rows if row.get("report")]
    busy = ", ".join(f"{100 * busy:.0f} %" for busy in dict.fromkeys(row["busy"] for row in rows))
    common: dict[str, Any] = {
        "command": "python benchmarks/latency/busy_quickstart.py",
        "details": {"runs": len(rows), "busy": busy, "largest_wall_s": max(row["wall_s"] for row in rows)},
    }
    yield Claim(
        id="latency/7-cpu-busy-quickstart",
        claim="Quick starts that end with a predictor and a report on CPUs that other work uses.",
        value=100.0 * len(complete) / len(rows),
        unit="%",
        target=">= 100",
        **common,
    )
    yield Claim(
        id="latency/7-cpu-busy-idle",
        claim="Largest mean error of idle latency, against CPU time, of quick starts on CPUs that other work "
        "uses.",
        value=round(100.0 * max(row["mape"] for row in complete), 2),
        unit="%",
        target=f"<= {100 * MAX_MAPE:g}",
        **common,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--busy", type=float, nargs="+", default=[0.0, 1.0, 2.0], help="loops per CPU")
    parser.add_argument("--repeats", type=int, default=1, help="runs at each share of --busy")
    args = parser.parse_args()
    rows_path = args.work / "rows.json"
    rows: list[dict[str, Any]] = parse_json(rows_path.read_bytes()) if rows_path.is_file() else []
    shares = args.busy * args.repeats
    for index in range(len(rows), len(shares)):
        out_dir = args.work / f"{index:02d}"
        for name in SHARED_FOLDERS if index else ():
            shutil.copytree(args.work / "00" / name, out_dir / name, dirs_exist_ok=True)
        rows.append(run_once(out_dir, shares[index]))
        write_atomic(rows_path, json.dumps(rows))
        print({key: value for key, value in rows[-1].items() if key not in ("idle", "summary")}, flush=True)
    record = {"environment": collect_environment("cpu"), "rows": rows}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(args.out, json.dumps(record, sort_keys=True) + "\n")
    record_claims(make_claims(record), record, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
