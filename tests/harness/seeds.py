"""Writes the seeds of `corpus/`: small files that the parsers accept, made by the package itself.

Run `python -m tests.harness.seeds` after a change of a format.
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.harness.jobs import CODESIGN_TRAINING, GRID_VQA, MATRIX, PRUNING
from tests.harness.targets import CORPUS, TARGETS

if TYPE_CHECKING:
    from sparseflow.tuning.schedule.matrices import SparsityPattern

_SOURCES: list[Callable[[Path], dict[str, bytes]]] = []
"""Functions that return target -> content of a seed, and may use an empty directory."""


def _source(function: Callable[[Path], dict[str, bytes]]) -> Callable[[Path], dict[str, bytes]]:
    _SOURCES.append(function)
    return function


def write_corpus() -> None:
    """Replace the seeds of all targets.

    Raises:
        AssertionError: A target has no seed.
    """
    written: set[str] = set()
    for source in _SOURCES:
        with tempfile.TemporaryDirectory() as directory:
            seeds = source(Path(directory))
        for name, content in seeds.items():
            shutil.rmtree(CORPUS / name, ignore_errors=True)
            (CORPUS / name).mkdir(parents=True)
            (CORPUS / name / TARGETS[name].file).write_bytes(content)
        written |= seeds.keys()
    missing = sorted(TARGETS.keys() - written)
    assert not missing, f"targets without a seed: {missing}"


@_source
def _core(folder: Path) -> dict[str, bytes]:
    from sparseflow.core.report import Page
    from sparseflow.core.run import Run
    from sparseflow.core.training import checkpoint

    page = Page("Demo", reproduce="sparseflow demo", environment={"seed": 0})
    page.headline("2×", "faster")
    page.section("Layers", "One sentence.")
    page.table("Times", [{"layer": "conv1", "ms": 1.5}])
    claim = {
        "id": "spiking/1-speedup", "claim": "Speedup.", "value": 2.0, "unit": "x", "target": ">= 1.5",
        "met": True, "git": "a1", "date": "2026-01-02", "details": {"low": 1.9, "high": 2.1},
    }  # fmt: skip
    run = Run.start(folder, "sparseflow demo", {"batch_size": 1})
    run.finish()
    checkpoint.save(folder, {"fingerprint": {"seed": 0}, "step": 3, "task": {"weights": _zeros(4)}})
    answer = {
        "status": "success",
        "data": {
            "resultType": "matrix",
            "result": [{"metric": {"__name__": "up", "gpu": "0"}, "values": [[1.5e9, "0.5"], [1.6e9, "1"]]}],
        },
    }
    return {
        "json": b'{"a": [1, 2.5, true, null], "b": {"c": "text"}}',
        "yaml": b"a: [1, 2.5, true]\nb: {c: text, d: 1e-3}\ne: &x [1]\nf: *x\n",
        "journal": b'{"a": 1, "b": "x"}\n{"a": 2, "b": null}\n',
        "run": (run.path / "run.json").read_bytes(),
        "report-page": page.render().encode(),
        "report-claims": json.dumps([claim]).encode(),
        "checkpoint": (folder / checkpoint.CHECKPOINT_FILE).read_bytes(),
        "prometheus": json.dumps(answer).encode(),
    }


@_source
def _spiking(folder: Path) -> dict[str, bytes]:
    import torch
    from safetensors.torch import save_file

    from sparseflow.spiking.autotune.decision_cache import Decision, DecisionCache

    cache = DecisionCache(folder / "decisions.json")
    cache.put(
        "key", Decision(choice="events", reason="It is faster.", latency_ms={"dense": 2.0, "events": 1.5})
    )
    cache.save()
    torch.save({"frames": torch.ones(2, 3), "mask": torch.ones(2) > 0}, folder / "x.pt")
    np.savez(folder / "x.npz", frames=np.ones((2, 3)), label=np.array(1))
    save_file({"frames": torch.ones(2, 3)}, folder / "x.safetensors")
    kinds = ("pt", "npz", "safetensors")
    inputs = {f"spiking-inputs-{kind}": (folder / f"x.{kind}").read_bytes() for kind in kinds}
    return {"spiking-decisions": (folder / "decisions.json").read_bytes(), **inputs}


@_source
def _tuning(folder: Path) -> dict[str, bytes]:
    import scipy.sparse

    from sparseflow.cli.root import run
    from sparseflow.tuning.measure.labels import write_pattern
    from sparseflow.tuning.search.winners import Winner, WinnerFile

    (folder / "a.mtx").write_text(MATRIX)
    command = ["tune", "spmv", str(folder / "a.mtx"), "--trials", "3", "--method", "random", "--threads", "1"]
    command += ["--budget-s", "inf", "--no-warm-start"]
    assert run([*command, "--out", str(folder / "tune")]) == 0
    assert run(["tuning", "collect", str(folder / "a.mtx"), "--workloads", "spmv", "--schedules", "2",
                "--threads", "1", "--out", str(folder / "collect")]) == 0  # fmt: skip
    trials = (folder / "tune" / "trials.jsonl").read_bytes()
    schedules = [json.loads(line)["schedule"] for line in trials.splitlines()[1:]]
    digest = write_pattern(folder, make_pattern())
    winner = Winner(settings="spmv", statistics={"rows": 2.0}, schedule=schedules[0])
    npz = io.BytesIO()
    scipy.sparse.save_npz(npz, scipy.sparse.eye_array(4).tocsr())
    return {
        "tuning-matrix": MATRIX.encode(),
        "tuning-matrix-gzip": gzip.compress(MATRIX.encode(), mtime=0),
        "tuning-matrix-npz": npz.getvalue(),
        "tuning-kernel": (folder / "tune" / "kernel.sfk").read_bytes(),
        "tuning-labels": (folder / "collect" / "labels.parquet").read_bytes(),
        "tuning-pattern": (folder / "patterns" / f"{digest}.safetensors").read_bytes(),
        "tuning-import": "".join(f"{line} {index + 1.5}\n" for index, line in enumerate(schedules)).encode(),
        "tuning-families": b'{"net100": "net", "Trec5": "Trec"}',
        "tuning-trials": trials,
        "tuning-winners": json.dumps(WinnerFile(winners=(winner,)).to_dict()).encode(),
        "tuning-collection": (folder / "collect" / "measured.jsonl").read_bytes(),
        "tuning-config": _read_shipped("tuning/configs/autosparse.yaml"),
    }


@_source
def _latency(folder: Path) -> dict[str, bytes]:
    from sparseflow.latency.check import LatencyBaseline
    from sparseflow.latency.measure.collection import read_rows
    from tests.latency.conftest import make

    synthetic = make(folder)
    graph = synthetic.graphs[0]
    graph.save(folder / "graph")
    synthetic.predictor.save(folder / "predictor.json")
    LatencyBaseline(predictor_sha256="0" * 64, mean_ms={"a.onnx": 1.5}).save(folder / "baseline.json")
    kernels = (file for path in synthetic.kernels for file in (path / "kernels").glob("*.onnx"))
    kernel = min(kernels, key=lambda file: file.stat().st_size)
    return {
        "latency-predictor": (folder / "predictor.json").read_bytes(),
        "latency-graph": (folder / "graph" / "graph.json").read_bytes(),
        "latency-plan": (synthetic.idle_dir / "plan.json").read_bytes(),
        "latency-rows": b"".join(
            json.dumps(row).encode() + b"\n" for row in read_rows(synthetic.idle_dir)[:3]
        ),
        "latency-zoo": _read_shipped("latency/configs/quickstart.yaml"),
        "latency-config": b"kernels: [k]\nmodels: [m]\nlevels: [0, 0.5]\ntelemetry: {source: host}\n",
        "latency-inference": b"predictor: p.json\ntelemetry: {source: prometheus, labels: {gpu: '0'}}\n",
        "latency-baseline": (folder / "baseline.json").read_bytes(),
        "latency-onnx": min(synthetic.models, key=lambda file: file.stat().st_size).read_bytes(),
        "latency-kernel": kernel.read_bytes(),
    }


@_source
def _pruning(folder: Path) -> dict[str, bytes]:
    import torch

    from sparseflow.pruning import save_model
    from sparseflow.pruning.config import parse_config
    from sparseflow.pruning.data.cache import build_cache
    from sparseflow.pruning.data.frame_counts import FrameCountsFile
    from sparseflow.pruning.evaluation.latency_model import VideoViTLatencyModel
    from tests.pruning.data.tree import write_video
    from tests.pruning.evaluation.test_latency_model import EVEN
    from tests.pruning.model.test_pretrained import vit

    model = parse_config(PRUNING).build_model(2, 1)
    save_model(model, folder / "model.safetensors")
    write_video(folder / "a.mp4", 4)
    build_cache([("a", folder / "a.mp4")], folder / "cache", size=8)
    FrameCountsFile(frames={"a": (4, 1000)}).save(folder / "frames.json")
    VideoViTLatencyModel(
        model=asdict(model.config), batch_size=1, dense_ms=10.0, error=0.0, environment={},
        coefficients={str(name): value for name, value in EVEN.items()},
    ).save(folder / "latency.json")  # fmt: skip
    vit().save_pretrained(folder / "vit")
    torch.save({"model": vit().state_dict()}, folder / "a.pth")
    shard = io.BytesIO()
    with tarfile.open(fileobj=shard, mode="w") as archive:
        for index in range(4):
            for suffix, content in (("mp4", b"video"), ("cls", str(index % 2).encode())):
                member = tarfile.TarInfo(f"{index:04d}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    templates = [
        {"id": str(index), "label": "moving cup", "template": f"{action} [something]"}
        for index, action in enumerate(("Moving a", "Pushing a") * 2)
    ]
    lists = "A/v_A_g08_c01.avi 1\nB/v_B_g09_c01.avi 2\n"
    return {
        "pruning-config": _read_shipped("pruning/configs/moving_digits.yaml"),
        "pruning-model": (folder / "model.safetensors").read_bytes(),
        "pruning-pretrained": (folder / "vit" / "model.safetensors").read_bytes(),
        "pruning-latency": (folder / "latency.json").read_bytes(),
        "pruning-frame-counts": (folder / "frames.json").read_bytes(),
        "pruning-video-cache": (folder / "cache" / "index.jsonl").read_bytes(),
        "pruning-splits": lists.encode(),
        "pruning-video-list": b"path,label\na.mp4,run\nb.mp4,jump\nc.mp4,run\nd.mp4,jump\n",
        "pruning-template-list": json.dumps(templates).encode(),
        "pruning-shard": shard.getvalue(),
        "pruning-checkpoint": (folder / "a.pth").read_bytes(),
        "pruning-video": (folder / "a.mp4").read_bytes(),
    }


@_source
def _codesign(folder: Path) -> dict[str, bytes]:
    from sparseflow.codesign.design.saved_plan import save_plan
    from sparseflow.codesign.hardware.proxy import LayerPointFile, fit_proxy
    from tests.codesign.hardware.proxy import made_up
    from tests.codesign.toys import chain, hardware

    hw, layers = hardware(), chain()
    fit_proxy(made_up.points(60), environments={"here": {"device": "made up"}}, num_folds=0).save(
        folder / "proxy.safetensors"
    )
    plan = save_plan(folder, hw, layers, hw.initial_decision(layers))
    with LayerPointFile(folder / "points.jsonl") as file:
        for point in made_up.points(3):
            file.add(point)
    return {
        "codesign-plan": plan.read_bytes(),
        "codesign-chips": _read_shipped("codesign/configs/chips.yaml"),
        "codesign-config": json.dumps(CODESIGN_TRAINING, indent=1).encode(),
        "codesign-qaplib": b"3 5 5\n0 1 2\n1 0 0\n2 0 0\n0 1 1\n1 0 2\n1 2 0\n",
        "codesign-proxy": (folder / "proxy.safetensors").read_bytes(),
        "codesign-points": (folder / "points.jsonl").read_bytes(),
    }


@_source
def _adaptive(folder: Path) -> dict[str, bytes]:
    from PIL import Image

    from sparseflow.adaptive.controllers.controllers import Controllers
    from sparseflow.adaptive.predictor.model import PlanLatencyPredictor
    from tests.adaptive.fake_runner import make_space
    from tests.adaptive.predictor.test_model import profiled

    profile = profiled(loads=(0.0,))
    profile.save(folder / "profile.parquet")
    PlanLatencyPredictor.fit(profile).save(folder / "predictor.json")
    controllers = Controllers(make_space(), width=4, model_id="a", seed=0)
    for parameter in controllers.parameters():
        parameter.data.zero_()  # 1.8 MB, which Git compresses to nothing
    controllers.save(folder / "controllers.safetensors")
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, "PNG")
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for name in ("cat", "dog"):
            for index in range(3):
                member = tarfile.TarInfo(f"train/{name}/{index}.png")
                member.size = len(png.getvalue())
                archive.addfile(member, io.BytesIO(png.getvalue()))
    request = {
        "model": "digits", "max_tokens": 4, "temperature": 1, "top_p": 0.9, "seed": 1, "stop": ["a"], "n": 1,
        "stream": True, "stream_options": {"include_usage": True}, "latency_budget_ms": 10.0,
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "hi"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        ]}],
    }  # fmt: skip
    return {
        "adaptive-request": json.dumps(request).encode(),
        "adaptive-image": png.getvalue(),
        "adaptive-questions": b'{"prompt": "2 + 2 =", "answer": "4", "max_new_tokens": 3, "split": "test"}\n'
        b'{"prompt": "a", "answer": "b", "kind": "x"}\n',
        "adaptive-archive": tar.getvalue(),
        "adaptive-importance": _read_shipped("adaptive/data/digits/importance.json"),
        "adaptive-plan-quality": _read_shipped("adaptive/data/digits/plan_quality.json"),
        "adaptive-predictor": (folder / "predictor.json").read_bytes(),
        "adaptive-profile": (folder / "profile.parquet").read_bytes(),
        "adaptive-controllers": (folder / "controllers.safetensors").read_bytes(),
        "adaptive-grid-vqa": _read_shipped("adaptive/data/digits/grid_vqa.json"),
        "adaptive-grpo-config": _read_shipped("adaptive/configs/grpo.yaml"),
        "adaptive-vqa-config": json.dumps(GRID_VQA, indent=1).encode(),
    }


def make_pattern() -> SparsityPattern:
    """Return the pattern of the seed of `tuning-pattern`, whose file is named after its digest."""
    from sparseflow.tuning.schedule.matrices import SparsityPattern

    return SparsityPattern.from_coords(np.array([0, 1, 1, 3]), np.array([0, 0, 2, 1]), (4, 3))


def _read_shipped(name: str) -> bytes:
    import sparseflow

    return (Path(sparseflow.__file__).parent / name).read_bytes()


def _zeros(size: int) -> Any:
    import torch

    return torch.zeros(size)


if __name__ == "__main__":
    write_corpus()
