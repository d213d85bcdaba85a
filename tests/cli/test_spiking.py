"""`sparseflow spiking`: optimize, profile and bench, for readers and for scripts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("spikingjelly")
pytest.importorskip("numba")

from safetensors.torch import save_file
from spikingjelly.activation_based import layer, neuron

from sparseflow.cli.root import run
from sparseflow.spiking.catalog import Settings, build

NETWORK = ["--model", "sew_resnet18", "--width", "8", "--image", "16", "-T", "2", "--batch", "2", "--cpu"]
CONVS = 20


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARSEFLOW_CACHE", str(tmp_path / "cache"))


def told(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    """The one object on standard output."""
    assert run([*arguments, "--json"]) == code
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def test_optimize_for_a_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = told(["spiking", "optimize", *NETWORK], capsys)
    assert set(found) == {"model", "policy", "summary", "layers"}
    assert found["policy"] == "measured" and len(found["layers"]) == CONVS
    first, second = found["layers"][:2]
    assert first["fed_by"] == [] and second["fed_by"] and 0 < second["firing_rate"] < 1
    assert (tmp_path / "cache" / "decisions.json").exists()


def test_optimize_for_a_reader(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["spiking", "optimize", *NETWORK, "--policy", "static", "--no-cache"]) == 0
    out = capsys.readouterr().out
    assert "replaced by the static rule" in out and "conv1" in out and "firing" in out
    assert not (tmp_path / "cache").exists()


def test_weights_are_loaded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With weights of zero nothing fires."""
    net = build("sew_resnet18", Settings(width=8, image=16, steps=2))
    silent = {key: value * ("running_var" in key) for key, value in net.state_dict().items()}
    file = tmp_path / "w.safetensors"
    save_file({key: value.contiguous() for key, value in silent.items()}, file)
    found = told(["spiking", "optimize", *NETWORK, "--weights", str(file)], capsys)
    assert all(row["firing_rate"] == 0 for row in found["layers"] if row["fed_by"])
    assert any("fires under 0.1 %" in str(row["flag"]) for row in found["layers"])


def test_profile_for_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(["spiking", "profile", *NETWORK], capsys)
    assert set(found) == {"model", "batch", "layers"} and found["batch"] == 2
    assert len(found["layers"]) == CONVS
    for row in found["layers"]:
        assert {"name", "fed_by", "values", "replaceable", "reason", "latency_ms", "firing_rate"} <= set(row)
        assert row["replaceable"] == (row["reason"] is None)
    assert [row["replaceable"] for row in found["layers"]] == [False] + [True] * (CONVS - 1)
    assert {row["values"] for row in found["layers"]} == {"dense", "binary", "integer"}


def test_profile_for_a_reader(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["spiking", "profile", *NETWORK]) == 0
    out = capsys.readouterr().out
    assert "16 x 16" in out
    assert " layer1.0.conv1 " in out, "names stay whole, however narrow the screen"


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network of the user's, with a name that Rich would take for markup."""

    def make() -> nn.Module:
        net = nn.Sequential(layer.Conv2d(3, 4, 3, padding=1), neuron.IFNode())
        net.add_module("[bold]conv", layer.Conv2d(4, 4, 3, padding=1))
        return net.eval()

    module = ModuleType("mine")
    module.make = make  # type: ignore[attr-defined]
    module.none = lambda: nn.Conv2d(3, 3, 3).eval()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", module)


@pytest.mark.parametrize("command", ["optimize", "profile"])
def test_a_network_of_the_users(command: str, mine: None, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["spiking", command, "--model", "mine:make", "--image", "16", "--batch", "2", "--cpu"]
    assert run(arguments) == 0
    assert "[bold]conv" in capsys.readouterr().out.replace("\n", "")
    assert [row["name"] for row in told(arguments, capsys)["layers"]] == ["0", "[bold]conv"]


BENCH = [
    "spiking",
    "bench",
    "--width",
    "8",
    "--image",
    "16",
    "-T",
    "1",
    "--cpu",
    "--rounds",
    "4",
    "--no-compiled",
]


def test_bench(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = [
        *BENCH,
        "--model",
        "spiking_resnet18",
        "--batch",
        "1",
        "--batch",
        "2",
        "--out",
        str(tmp_path / "runs"),
    ]
    found = told(arguments, capsys)
    assert set(found) == {"run", "cases"} and len(found["cases"]) == 2
    for name, row in found["cases"].items():
        assert "spiking_resnet18, width 8, 16x16, 10 classes, T 1, batch " in name
        assert set(row["latency_ms"]) == {
            "eager",
            "channels_last",
            "folded",
            "folded, channels_last",
            "optimised",
        }
        assert row["baseline"] != "optimised" and row["top1_agreement"] == 1.0
        assert row["speedup"]["low"] <= row["speedup"]["median"] <= row["speedup"]["high"]
        assert 0 < row["firing_rate"] < 1 and len(row["layers"]) == CONVS
    info = json.loads((Path(found["run"]) / "run.json").read_text())
    assert info["status"] == "finished" and set(info["results"]) == set(found["cases"])


def test_bench_goes_on_where_it_stopped(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparseflow.spiking import bench

    original, calls = bench.bench, []

    def stopping(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(bench, "bench", stopping)
    grid = [*BENCH, "--model", "spiking_resnet18", "--batch", "1", "--batch", "2"]
    assert run([*grid, "--out", str(tmp_path)]) == 130
    (folder,) = tmp_path.glob("*/run.json")
    capsys.readouterr()
    found = told([*grid, "--resume", str(folder.parent)], capsys)
    assert len(calls) == 3 and len(found["cases"]) == 2
    assert not any("error" in row for row in found["cases"].values())


def test_a_case_that_fails_is_told_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, mine: None
) -> None:
    arguments = [
        *BENCH,
        "--model",
        "mine:none",
        "--model",
        "spiking_resnet18",
        "--batch",
        "1",
        "--out",
        str(tmp_path),
    ]
    found = told(arguments, capsys)
    errors = ["error" in row for row in found["cases"].values()]
    assert errors == [True, False]
    assert "no spiking neuron" in next(iter(found["cases"].values()))["error"]
    assert run([*arguments[:-2], "--out", str(tmp_path)]) == 0
    assert "failed: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["optimize", "--model", "nonsense"], "no network is called 'nonsense'"),
        (["optimize", *NETWORK, "--policy", "fast"], "--policy"),
        (["optimize", *NETWORK, "--weights", "/nowhere/w.safetensors"], "there is no file"),
        (["optimize", "--batch", "0"], "batch"),
        (["profile", "--image", "4"], "image"),
        (["bench", "--dataset", "imagenet"], "--dataset"),
        (["nonsense"], "nonsense"),
        (["profile", "--model", "mine:none", "--cpu"], "no spiking neuron"),
    ],
)
def test_bad_input_is_two(
    arguments: list[str], words: str, mine: None, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(["spiking", *arguments], capsys, code=2)
    assert words in found["error"]["message"]


def test_a_gpu_that_is_not_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    found = told(["spiking", "profile", "--gpu", "7"], capsys, code=1)
    assert found["error"]["type"] == "DeviceError"


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["spiking", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f" {name} " in out for name in ("optimize", "profile", "bench"))
