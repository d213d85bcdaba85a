"""The benchmark of spikingjelly's networks on a CPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("spikingjelly")
pytest.importorskip("numba")

from spikingjelly.activation_based import functional, layer, neuron

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "spiking"))
zoo_networks: Any = importlib.import_module("zoo_networks")


def test_measures_a_network_and_makes_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = zoo_networks.Network("parametric_lif_net", "MNISTNet", 4, (1, 28, 28), (("channels", 8),))
    monkeypatch.setitem(zoo_networks.NETWORKS, "vgg11", small)
    out, results = tmp_path / "zoo.json", []
    arguments = ["--out", str(out), "--device", "cpu", "--no-compile", "--case", "vgg11:1", "--rounds", "2"]
    assert zoo_networks.main(arguments) == 0
    record = json.loads(out.read_text())
    (row,) = record["rows"]
    assert (
        row["failed"] == {} and row["baseline"] in row["samples"] and len(row["samples"]["sparseflow"]) == 2
    )
    assert set(row["latency_ms"]) == {
        "eager fp32 NCHW", "folded fp32 NCHW", "folded fp32 channels_last", "sparseflow",
    }  # fmt: skip
    assert 0.05 < row["firing_rate"] < 0.3 and row["agreement"]["sparseflow"] == 1
    monkeypatch.setattr(zoo_networks, "write_samples", lambda name, content: results.append(content) or name)
    mean, worst = zoo_networks.make_claims(record)
    assert mean.value == worst.value == pytest.approx(row["speedup"]["median"], abs=1e-3)
    assert results == [{"rows": [row]}]


def test_folds_batch_norms_and_sets_thresholds() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(layer.Conv2d(2, 8, 3), layer.BatchNorm2d(8), neuron.LIFNode(), nn.Identity())
    functional.set_step_mode(net, "m")
    x = torch.rand(3, 4, 2, 9, 9)
    zoo_networks.calibrate_batch_norms(net, [x])
    zoo_networks.set_thresholds(net, x)
    assert zoo_networks.measure_firing_rate(net, x) == pytest.approx(zoo_networks.FIRING_RATE, abs=0.01)
    folded = zoo_networks.fold_batch_norms(net)
    assert isinstance(folded[1], nn.Identity) and isinstance(net[1], nn.BatchNorm2d)
    assert (zoo_networks.run(folded, x) != zoo_networks.run(net, x)).float().mean() < 0.001


def test_keeps_the_two_fastest_settings_in_memory() -> None:
    latency_ms = {"eager fp32 NCHW": 9.0, "a": 3.0, "b": 1.0, "c": 2.0, "sparseflow": 8.0}
    forms = dict.fromkeys(latency_ms)
    zoo_networks.drop_slow_forms(forms, latency_ms)
    assert set(forms) == {"eager fp32 NCHW", "b", "c", "sparseflow"}
