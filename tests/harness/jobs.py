"""Every long job of every wing, small enough to be killed many times.

A job is a command line of `sparseflow`, which runs in a workspace with its inputs, and a function that
reads what must be equal after an uninterrupted and an interrupted run. Measured times differ between any
two runs, so results of measurements are compared by their keys: each is there, and once.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.codesign.toys import QUICK as CODESIGN
from tests.harness.targets import CORPUS
from tests.pruning.small import QUICK as PRUNING

MATRIX = """%%MatrixMarket matrix coordinate real general
6 6 8
1 1 1.5
2 2 2.5
3 3 3.5
4 4 -1
5 5 2
6 6 7
1 6 0.5
6 1 0.25
"""
CODESIGN_TRAINING = CODESIGN | {
    "task": PRUNING | {"train": PRUNING["train"] | {"epochs": 3}},
    "hardware": CODESIGN["hardware"] | {"batch_size": 4},
    "schedule": {"warmup_epochs": 1, "ramp_epochs": 0, "max_weight": 0.1},
    "joint": {"alpha_steps": 1},
}
GRID_VQA = {
    "images": {"digits": True},
    "scene": {"grid": 2, "cell_px": 16},
    "model": {
        "crop_px": 16, "patch_px": 8, "vision_width": 16, "vision_depth": 1, "vision_heads": 2,
        "vision_mlp": 2, "width": 16, "depth": 2, "heads": 2, "experts": 4, "expert_width": 8, "top_k": 2,
    },
    "train": {
        "vision_steps": 20, "steps": 20, "batch_size": 8, "vision_crops": [1, 1, 1], "eval_samples": 8,
        "eval_every": 10, "checkpoint_every": 5, "ground_blocks": 1,
    },
    "test_samples": 8,
    "plan_samples": 8,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Job:
    """A long job.

    Attributes:
        command: Arguments of `sparseflow`; `OUT` is replaced by the output directory.
        read: Reads from the output directory what must not depend on interruptions.
        inputs: File name -> content, in the workspace.
        journal: File in the output directory whose rows survive a kill; None if a resumed job repeats steps.
        needs: Jobs whose output directories are in the workspace, by their names.
    """

    command: str
    read: Callable[[Path], Any]
    inputs: Mapping[str, bytes] = field(default_factory=dict)
    journal: str | None = None
    needs: tuple[str, ...] = ()


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def _sort_unique(keys: Iterable[Any]) -> list[str]:
    texts = sorted(json.dumps(key, sort_keys=True) for key in keys)
    assert len(set(texts)) == len(texts), "a row occurs twice"
    return texts


def _hash_tensors(path: Path) -> dict[str, str]:
    """Return name -> SHA-256 of each tensor; the order of the metadata in the file is not stable."""
    import torch
    from safetensors.torch import load_file

    return {
        name: hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in sorted(load_file(path).items())
    }


def _read_trials(out_dir: Path) -> list[str]:
    return _sort_unique(row["schedule"] for row in _read_lines(out_dir / "trials.jsonl")[1:])


def _read_collection(out_dir: Path) -> dict[int, int]:
    """Return task -> number of schedules, which are chosen by their measured latency."""
    rows = [row for row in _read_lines(out_dir / "measured.jsonl")[1:] if "trial" in row]
    _sort_unique((row["task"], row["trial"]["schedule"]) for row in rows)
    return dict(Counter(row["task"] for row in rows))


def _read_latency_rows(out_dir: Path) -> list[str]:
    from sparseflow.latency.measure.collection import read_rows

    return _sort_unique(row["key"] for row in read_rows(out_dir))


def _read_training(out_dir: Path) -> Any:
    (model,) = out_dir.rglob("model.safetensors")
    return _hash_tensors(model), _read_lines(out_dir / "losses.jsonl")


def _read_joint_training(out_dir: Path) -> Any:
    run_dir = out_dir / "joint-0"
    # The header has the time and the load of its first start.
    return _hash_tensors(run_dir / "model.safetensors"), _read_lines(run_dir / "trace.jsonl")[1:]


def _read_profile(out_dir: Path) -> list[str]:
    from sparseflow.adaptive.profile.storage import PlanProfile

    profile = PlanProfile.load(out_dir / "profile.parquet")
    return _sort_unique(measurement.key for measurement in profile.measurements)


def _read_controllers(out_dir: Path) -> dict[str, str]:
    return _hash_tensors(out_dir / "controllers.safetensors")


def _read_finished_run(out_dir: Path) -> list[str]:
    """Return the names of the results of the only finished run; killed runs must be told apart."""
    from sparseflow.core.run import list_runs

    states = [run.state for run in list_runs(out_dir)]
    assert states.count("finished") == 1 and set(states) <= {"finished", "interrupted"}, states
    (path,) = (run.path for run in list_runs(out_dir) if run.state == "finished")
    return sorted(json.loads((path / "run.json").read_text())["results"])


JOBS = {
    "tuning-collect": Job(
        command="tuning collect m.mtx --workloads spmv,spmm:4 --schedules 6 --threads 1 --out OUT",
        inputs={"m.mtx": MATRIX.encode()},
        read=_read_collection,
        journal="measured.jsonl",
    ),
    "tune": Job(
        command="tune spmv m.mtx --trials 8 --method random --threads 1 --budget-s inf --out OUT",
        inputs={"m.mtx": MATRIX.encode()},
        read=_read_trials,
        journal="trials.jsonl",
    ),
    "latency-collect": Job(
        command="latency collect --config collect.yaml --out OUT",
        inputs={
            "kernel.onnx": (CORPUS / "latency-kernel" / "kernel.onnx").read_bytes(),
            "model.onnx": (CORPUS / "latency-onnx" / "model.onnx").read_bytes(),
            "collect.yaml": b"kernels: [kernel.onnx]\nmodels: [model.onnx]\nlevels: [0]\nrounds: 8\n",
        },
        read=_read_latency_rows,
        journal="rows.jsonl",
    ),
    "pruning-train": Job(
        command="pruning train --config train.yaml --out OUT",
        inputs={"train.yaml": json.dumps(PRUNING).encode()},  # JSON is YAML
        read=_read_training,
    ),
    "codesign-train": Job(
        command="codesign train --config train.yaml --mode joint --out OUT",
        inputs={"train.yaml": json.dumps(CODESIGN_TRAINING).encode()},
        read=_read_joint_training,
    ),
    "adaptive-grid-vqa": Job(
        command="adaptive grid-vqa --config vqa.yaml --out OUT",
        inputs={"vqa.yaml": json.dumps(GRID_VQA).encode()},
        read=_read_training,
    ),
    "adaptive-importance": Job(
        command="adaptive importance adaptive-grid-vqa/model --max-samples 8 --beam 1 "
        "--out OUT/importance.json",
        needs=("adaptive-grid-vqa",),
        read=lambda out_dir: json.loads((out_dir / "importance.json").read_text()),
    ),
    "adaptive-profile": Job(
        command="adaptive profile adaptive-grid-vqa/model --num-plans 6 --num-text-plans 1 --rounds 2 "
        "--max-batch-size 1 --decode-steps 2 --out OUT/profile.parquet",
        needs=("adaptive-grid-vqa",),
        read=_read_profile,
        journal="profile.jsonl",
    ),
    "adaptive-train": Job(
        command="adaptive train adaptive-grid-vqa/model --profile adaptive-profile/profile.parquet --seeds 1 "
        "--max-train-samples 16 --max-validation-samples 16 --max-test-samples 16 --num-budgets 3 "
        "--set steps=6 --set prompts=4 --set validation=16 --set validate_every=3 --set checkpoint_every=2 "
        "--out OUT",
        needs=("adaptive-grid-vqa", "adaptive-profile"),
        read=_read_controllers,
    ),
    "demo": Job(
        command="demo --batch-size 1 --rounds 4 --no-compile --out OUT",
        read=_read_finished_run,
    ),
    "adaptive-demo": Job(
        command="adaptive demo --num-questions 8 --num-budgets 2 --out OUT",
        read=_read_finished_run,
    ),
}
