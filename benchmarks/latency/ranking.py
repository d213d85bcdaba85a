"""Whether predictions rank variants of a network as measurements do: int8, batch sizes and threads (line 7).

::

    export PYTHONPATH=src:.
    sparseflow latency quickstart --threads 2 --loads none --out runs/threads2
    python benchmarks/latency/ranking.py --work runs/ranking --threads-2 runs/threads2/predictor.json \\
        --out results/latency/ranking-cpu.json

The networks are those of `first_answer.py` that torch exports, each with batches of 1 and 8, in float32 and
quantized to int8 by onnxruntime (weights and activations, with random inputs for the ranges). They are
measured and predicted with one thread, by the predictor that `predict` selects, and with two threads by the
predictor of `--threads-2`. A pair is two variants of one network that differ in one of precision, batch and
threads and whose measured latencies differ by more than 10 %. It is right if the predictions have the same
order.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from first_answer import export_networks

from benchmarks.claims import Claim, record_claims
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_json
from sparseflow.errors import SparseFlowError
from sparseflow.latency import find_predictor, predict
from sparseflow.latency.graph import onnx_file
from sparseflow.latency.graph.inputs import resolve_inputs
from sparseflow.latency.measure.peaks import measure_idle_ms
from sparseflow.latency.measure.runner import Runner

BATCHES = (1, 8)
MIN_DIFFERENCE = 0.1
ROUNDS = 3


def quantize(path: Path, out: Path) -> Path:
    """Quantize the weights and activations of a model, with ranges of random inputs."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    inputs = resolve_inputs(onnx_file.load_model(path))

    class RandomReader(CalibrationDataReader):
        def __init__(self) -> None:
            self._samples = (next(inputs.iter_draws(seed)) for seed in range(4))

        def get_next(self) -> Any:
            return next(self._samples, None)

    prepared = out.with_suffix(".prepared.onnx")
    quant_pre_process(str(path), str(prepared), skip_symbolic_shape=True)
    quantize_static(str(prepared), str(out), RandomReader(), quant_format=QuantFormat.QDQ, per_channel=True)
    prepared.unlink()
    return out


def list_variants(work: Path) -> Iterator[tuple[str, str, int, Path]]:
    """Yield network, precision, batch and file of each variant that can be exported and quantized."""
    for batch in BATCHES:
        for name, path in export_networks(work / f"batch{batch}", batch=batch).items():
            yield name, "float32", batch, path
            out = work / f"batch{batch}-int8" / f"{name}.onnx"
            out.parent.mkdir(parents=True, exist_ok=True)
            try:
                yield name, "int8", batch, out if out.is_file() else quantize(path, out)
            except Exception as error:  # the quantizer raises errors of any kind
                print(f"{name}: not quantized: {str(error).splitlines()[0]}", flush=True)


def measure(work: Path, predictors: Mapping[int, Any]) -> list[dict[str, Any]]:
    """Measure and predict all variants; return a row for each."""
    rows = []
    for name, precision, batch, path in list_variants(work):
        for threads, predictor in predictors.items():
            try:
                predicted_ms = predict(path, predictor).mean_ms
                runner = Runner(path, threads=threads)
                measured = sorted(measure_idle_ms(runner, 0.2) for _ in range(ROUNDS))
            except SparseFlowError as error:
                print(f"{name} {precision} {batch}: {error}", flush=True)
                continue
            rows.append(
                {
                    "network": name, "variant": [precision, batch, threads],
                    "measured_ms": round(measured[ROUNDS // 2], 5), "predicted_ms": round(predicted_ms, 5),
                    "samples_ms": [round(ms, 5) for ms in measured],
                }
            )  # fmt: skip
    return rows


def list_pairs(rows: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], bool]]:
    """Yield what differs, both rows, and whether the predictions have the order of the measurements."""
    for first, second in itertools.combinations(rows, 2):
        differing = [
            label
            for label, a, b in zip(
                ("precision", "batch", "threads"), first["variant"], second["variant"], strict=True
            )
            if a != b
        ]
        ratio = second["measured_ms"] / first["measured_ms"]
        if first["network"] != second["network"] or len(differing) != 1:
            continue
        if max(ratio, 1.0 / ratio) > 1.0 + MIN_DIFFERENCE:
            is_right = (second["predicted_ms"] > first["predicted_ms"]) == (ratio > 1.0)
            yield differing[0], first, second, is_right


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claim of a record: the share of pairs that are ranked right."""
    pairs = list(list_pairs(record["rows"]))
    details: dict[str, Any] = {"pairs": len(pairs)}
    for label in ("precision", "batch", "threads"):
        right = [is_right for differing, _, _, is_right in pairs if differing == label]
        if right:
            details[label] = f"{sum(right)} of {len(right)}"
    threads_2 = " --threads-2 PREDICTOR" if any(row["variant"][2] == 2 for row in record["rows"]) else ""
    yield Claim(
        id="latency/9-cpu-ranking",
        claim=f"Pairs of variants, of {len({row['network'] for row in record['rows']})} networks, with "
        "measured latencies that differ by more than 10 %, ranked right.",
        value=round(100.0 * sum(is_right for *_, is_right in pairs) / len(pairs), 1),
        unit="%",
        target=">= 95",
        device=record["environment"]["device"]["name"],
        command=f"python benchmarks/latency/ranking.py --work runs/ranking{threads_2} --out "
        "results/latency/ranking-cpu.json",
        details=details,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="directory of exported networks")
    parser.add_argument("--threads-2", type=Path, help="predictor of two threads")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # of the quantizer
    start_s = time.monotonic()
    predictors: dict[int, Any] = {1: find_predictor()}
    if args.threads_2 is not None:
        predictors[2] = find_predictor(args.threads_2)
    rows = measure(args.work, predictors)
    record = {"environment": collect_environment("cpu"), "rows": rows}
    write_json(args.out, record)
    record_claims(make_claims(record), record, args.out)
    for differing, first, second, is_right in list_pairs(rows):
        if not is_right:
            print(f"wrong: {first['network']} {first['variant']} {second['variant']} ({differing})")
    print(f"{time.monotonic() - start_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
