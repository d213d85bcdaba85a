"""Tests of `codesign.hardware.proxy.profiling`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparseflow.codesign.hardware.proxy import DeviceSpec, LayerGrid, fit_proxy, profiling, read_points
from sparseflow.codesign.hardware.proxy.points import Mode
from sparseflow.codesign.hardware.proxy.profiling import (
    ProfileConfig,
    profile_grid,
    profile_model,
    read_device,
)
from sparseflow.core.device import describe_device
from sparseflow.core.layers import LAYER_TYPES, LayeredModel, LayerNode
from sparseflow.errors import DeviceError, FileFormatError, InputError, RunError

HERE = DeviceSpec(
    name="here", peak_flops=1e11, peak_bw=1e10, mem_gb=8.0, tdp_w=50.0, cores=2, rates=(("float32", 1e11),)
)
QUICK = ProfileConfig(repeats=3, warmup=1, sample_ms=0.0)
SMALL = LayerGrid(batch=(1, 2), seq_len=(16, 64), embed_dim=(64, 128), rows=128, flops=1e8)


class Tiny:
    """A model of four layers that says which of them ran."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parts = [nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 5)]
        for part in self.parts:
            for weight in part.parameters():
                weight.data.normal_(generator=generator)
        self.ran: list[int] = []

    def describe_layers(self, batch_size: int) -> Sequence[LayerNode]:
        return [
            LayerNode(
                id=index,
                name=f"part.{index}",
                layer_type=kind,
                flops=torch.tensor(384.0 * batch_size),
                bytes=4000.0,
                weight_bytes=4 * sum(p.numel() for p in self.parts[index].parameters()),
                memory_bytes=5000,
                seq_len=1,
                embed_dim=16,
                num_heads=int(kind == "attention"),
                mlp_ratio=float(kind == "mlp"),
                precision="float32",
                batch_size=batch_size,
                traffic_in_bytes=64 * batch_size,
                traffic_out_bytes=64 * batch_size,
            )
            for index, kind in enumerate(LAYER_TYPES)
        ]

    def initial_state(self, samples: Tensor) -> dict[str, Tensor]:
        return {"x": samples}

    def run_layer(self, layer: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
        self.ran.append(layer)
        x = state.pop("x")  # a state is its layer's to take apart
        return {"logits" if layer == 3 else "x": self.parts[layer](x)}

    def get_layer(self, layer: int) -> nn.Module:
        return self.parts[layer]

    def unit_importance(self, layer: int) -> Tensor:
        raise NotImplementedError

    def replace_layer(self, layer: int, module: nn.Module) -> None:
        raise NotImplementedError

    def select_layers(self, layers: Sequence[int], device: torch.device | str) -> LayeredModel:
        raise NotImplementedError

    def modules_of(self, layer: int) -> Sequence[nn.Module]:
        return [self.parts[layer]]


def test_profile_grid_measures_points(tmp_path: Path) -> None:
    file, fractions = tmp_path / "points.jsonl", []
    points = profile_grid(
        file,
        HERE,
        num_points=10,
        grid=SMALL,
        config=QUICK,
        seed=1,
        progress=lambda _, fraction: fractions.append(fraction),
    )
    assert fractions[0] == 0.1 and fractions[-1] == 1.0 and len(points) == 10
    contents = read_points(file)
    assert list(contents.points) == points
    assert [point.layer.name for point in points] == [item.name for item in SMALL.sample(10, seed=1)]
    for point in points:
        assert point.mode == "eager" and point.provenance == "measured" and len(point.samples_ms) >= 3
        assert min(point.samples_ms) <= point.lat_ms <= max(point.samples_ms)
        # On a CPU nothing counts memory or energy.
        assert point.mem_provenance == "analytic" and point.power_w is None
        assert point.mem_mb == pytest.approx(point.layer.memory_bytes / 1e6)
        assert contents.environments[point.environment]["seed"] == 1
    assert fit_proxy(points, num_folds=0).get_source(HERE) == "measured"


def test_profile_grid_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "points.jsonl"
    first = profile_grid(file, HERE, num_points=6, grid=SMALL, config=QUICK)
    second = profile_grid(file, HERE, num_points=8, grid=SMALL, config=QUICK)
    assert second[:6] == first and len(second) == 8
    monkeypatch.setattr(profiling, "measure", lambda *_, **__: pytest.fail("measured again"))
    assert profile_grid(file, HERE, num_points=8, grid=SMALL, config=QUICK) == second
    # Nor is anything begun after the time is up.
    assert profile_grid(file, HERE, num_points=20, grid=SMALL, config=QUICK, budget_s=0.0) == second
    monkeypatch.undo()
    with pytest.raises(InputError):
        profile_grid(file, replace(HERE, tdp_w=60.0), num_points=9, grid=SMALL, config=QUICK)


def test_read_device_returns_device_of_file(tmp_path: Path) -> None:
    file = tmp_path / "points.jsonl"
    assert read_device(file) is None
    profile_grid(file, HERE, num_points=2, grid=SMALL, config=QUICK)
    assert read_device(file) is None  # points of a device of another name
    own_part = replace(HERE, name=describe_device("cpu").name)
    profile_grid(file, own_part, num_points=2, grid=SMALL, config=QUICK)
    assert read_device(file) == own_part
    file.write_bytes(b"no points\n")
    with pytest.raises(FileFormatError):
        read_device(file)


KILLED = """
import os, signal, sys
import torch
from tests.codesign.hardware.proxy.test_profiling import HERE, QUICK, SMALL
from sparseflow.codesign.hardware.proxy.profiling import profile_grid
def stop(message, fraction):
    if fraction == 0.5:
        os.kill(os.getpid(), signal.SIGKILL)
profile_grid(sys.argv[1], HERE, num_points=8, grid=SMALL, config=QUICK, progress=stop)
"""


def test_profile_grid_resumes_after_sigkill(tmp_path: Path) -> None:
    file = tmp_path / "points.jsonl"
    root = str(Path(__file__).parents[4])
    path = os.pathsep.join([root, os.path.join(root, "src"), os.environ.get("PYTHONPATH", "")])
    died = subprocess.run(
        [sys.executable, "-c", KILLED, str(file)], env=os.environ | {"PYTHONPATH": path}, capture_output=True
    )
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    points = read_points(file).points
    assert len(points) == 4
    assert tuple(profile_grid(file, HERE, num_points=8, grid=SMALL, config=QUICK)[:4]) == points
    assert len(read_points(file).points) == 8


def test_profile_model_measures_each_layer(tmp_path: Path) -> None:
    file, model = tmp_path / "points.jsonl", Tiny()
    samples = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    points = profile_model(file, model, samples, HERE, config=QUICK)
    assert [point.layer.name for point in points] == [f"part.{index}" for index in range(4)]
    assert all(point.layer.batch_size == 3 and isinstance(point.layer.flops, float) for point in points)
    model.ran.clear()
    # What is there is only run, once, for the state that it leaves.
    assert profile_model(file, model, samples, HERE, config=QUICK) == points
    assert model.ran == [0, 1, 2, 3]


def test_profile_grid_restores_float32_precision(tmp_path: Path) -> None:
    before = torch.get_float32_matmul_precision()
    visited = []
    try:
        torch.set_float32_matmul_precision("high")
        profile_grid(
            tmp_path / "points.jsonl",
            HERE,
            num_points=1,
            grid=SMALL,
            config=QUICK,
            progress=lambda *_: visited.append(
                (torch.get_float32_matmul_precision(), torch.is_grad_enabled())
            ),
        )
        assert visited == [("highest", False)] and torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_profile_model_names_failing_layer(tmp_path: Path) -> None:
    model = Tiny()
    model.parts[2] = nn.Linear(9, 9)
    file = tmp_path / "points.jsonl"
    with pytest.raises(RunError, match=r"part\.2"):
        profile_model(file, model, torch.zeros(2, 12), HERE, config=QUICK)
    assert len(read_points(file).points) == 2


def test_invalid_profile_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        profile_grid(tmp_path / "points.jsonl", HERE, num_points=1, config=ProfileConfig(mode="graph"))
    with pytest.raises(DeviceError, match="99"):
        profile_grid(tmp_path / "points.jsonl", HERE, num_points=1, device="cuda:99")
    wrongs: tuple[dict[str, Any], ...] = (
        {"mode": "fast"}, {"repeats": 0}, {"warmup": 0}, {"max_calls": 0}, {"power_every": -1},
        {"power_s": 0.0}, {"sample_ms": -1.0},
    )  # fmt: skip
    for wrong in wrongs:
        with pytest.raises(InputError, match=next(iter(wrong))):
            ProfileConfig(**wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_profile_grid_measures_gpu_memory(tmp_path: Path, mode: Mode) -> None:
    grid = LayerGrid(precisions=("float32", "bfloat16", "float16"), rows=4096, flops=1e11)
    config = ProfileConfig(mode=mode, repeats=3, power_every=8, power_s=0.3)
    file = tmp_path / "points.jsonl"
    points = profile_grid(file, HERE, num_points=24, device="cuda", grid=grid, config=config)
    assert len(points) == 24 and list(read_points(file).points) == points
    for point in points:
        assert point.mode == mode and point.mem_provenance == "measured"
        assert 0.2 < point.mem_mb / (point.layer.memory_bytes / 1e6) < 5.0
