"""`sparseflow spiking`: text output, JSON output and errors of optimize, profile and bench."""

from __future__ import annotations

import json
import sys
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("spikingjelly")
pytest.importorskip("numba")

from safetensors.torch import save_file
from spikingjelly.activation_based import layer, neuron

from sparseflow.cli import output
from sparseflow.cli.root import run
from sparseflow.core.telemetry.cpu_contention import CpuUsageMonitor
from sparseflow.spiking.models.model_zoo import NetworkConfig, build_network
from tests.spiking.conftest import prefer as prefer

NETWORK = ["--model", "sew_resnet18", "--width", "8", "--image-size", "16", "-T", "2", "--batch-size", "2"]
CONVS = 20
LAYERS = CONVS + 1  # and the classifier


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARSEFLOW_CACHE", str(tmp_path / "cache"))
    # Whether other programs run beside the tests must not decide what is cached.
    monkeypatch.setattr(CpuUsageMonitor, "measure_other_share", lambda self: 0.0)


def run_json(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    """Run a command with --json and parse its only output line."""
    assert run([*arguments, "--json"]) == code
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def test_optimize_json_lists_layers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = run_json(["spiking", "optimize", *NETWORK], capsys)
    assert set(result) == {"model", "policy", "summary", "layers"}
    assert result["policy"] == "measured" and len(result["layers"]) == LAYERS
    first, second = result["layers"][:2]
    assert first["fed_by"] == [] and second["fed_by"] and 0 < second["firing_rate"] < 1
    assert (tmp_path / "cache" / "decisions.json").exists()


def test_optimize_static_policy_shows_table_and_writes_no_cache(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["spiking", "optimize", *NETWORK, "--policy", "static", "--no-cache"]) == 0
    out = capsys.readouterr().out
    assert "conv1" in out and "firing" in out
    assert not (tmp_path / "cache").exists()


def test_optimize_zero_weights_never_fires(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    net = build_network("sew_resnet18", NetworkConfig(width=8, image_size=16, time_steps=2))
    silent = {key: value * ("running_var" in key) for key, value in net.state_dict().items()}
    file = tmp_path / "w.safetensors"
    save_file({key: value.contiguous() for key, value in silent.items()}, file)
    result = run_json(["spiking", "optimize", *NETWORK, "--weights", str(file)], capsys)
    assert all(row["firing_rate"] == 0 for row in result["layers"] if row["fed_by"])
    assert any("fires under 0.1 %" in str(row["warning"]) for row in result["layers"])


def test_profile_json_lists_layers(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(["spiking", "profile", *NETWORK], capsys)
    assert set(result) == {"model", "batch_size", "layers"} and result["batch_size"] == 2
    assert len(result["layers"]) == LAYERS
    for row in result["layers"]:
        assert {"name", "fed_by", "values", "replaceable", "reason", "latency_ms", "firing_rate"} <= set(row)
        assert row["replaceable"] == (row["reason"] is None)
    assert [row["replaceable"] for row in result["layers"]] == [False, *[True] * (CONVS - 1), False]
    assert {row["values"] for row in result["layers"]} == {"dense", "binary", "integer"}


def test_profile_text_keeps_layer_names_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["spiking", "profile", *NETWORK]) == 0
    out = capsys.readouterr().out
    assert "16 x 16" in out
    assert " layer1.0.conv1 " in out


@pytest.fixture
def user_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importable module with a network whose layer name looks like Rich markup."""

    def make() -> nn.Module:
        net = nn.Sequential(layer.Conv2d(3, 4, 3, padding=1), neuron.IFNode())
        net.add_module("[bold]conv", layer.Conv2d(4, 4, 3, padding=1))
        return net.eval()

    module = ModuleType("user_module")
    module.make = make  # type: ignore[attr-defined]
    module.none = lambda: nn.Conv2d(3, 3, 3).eval()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "user_module", module)


@pytest.mark.parametrize("command", ["optimize", "profile"])
def test_user_network_markup_is_escaped(
    command: str, user_module: None, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["spiking", command, "--model", "user_module:make", "--image-size", "16", "--batch-size", "2"]
    assert run(arguments) == 0
    assert "[bold]conv" in capsys.readouterr().out.replace("\n", "")
    assert [row["name"] for row in run_json(arguments, capsys)["layers"]] == ["0", "[bold]conv"]


BENCH = [
    "spiking", "bench", "--width", "8", "--image-size", "16", "-T", "1", "--rounds", "4", "--no-compile",
]  # fmt: skip


def test_bench_two_batch_sizes_writes_finished_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = [
        *BENCH,
        "--model",
        "spiking_resnet18",
        "--batch-size",
        "1",
        "--batch-size",
        "2",
        "--out",
        str(tmp_path / "runs"),
    ]
    result = run_json(arguments, capsys)
    assert set(result) == {"run", "cases"} and len(result["cases"]) == 2
    for name, row in result["cases"].items():
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
        assert 0 < row["firing_rate"] < 1 and len(row["layers"]) == LAYERS
    info = json.loads((Path(result["run"]) / "run.json").read_text())
    assert info["status"] == "finished" and set(info["results"]) == set(result["cases"])


def test_bench_interrupted_run_resumes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparseflow.spiking.profile import bench

    original, calls = bench.bench, []

    def stopping(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(bench, "bench", stopping)
    grid = [*BENCH, "--model", "spiking_resnet18", "--batch-size", "1", "--batch-size", "2"]
    assert run([*grid, "--out", str(tmp_path)]) == 130
    (folder,) = tmp_path.glob("*/run.json")
    capsys.readouterr()
    result = run_json([*grid, "--out", str(folder.parent)], capsys)
    assert len(calls) == 3 and len(result["cases"]) == 2
    assert not any("error" in row for row in result["cases"].values())


def test_bench_failed_case_does_not_stop_the_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, user_module: None
) -> None:
    arguments = [
        *BENCH,
        "--model",
        "user_module:none",
        "--model",
        "spiking_resnet18",
        "--batch-size",
        "1",
        "--out",
        str(tmp_path),
    ]
    result = run_json(arguments, capsys, code=1)
    errors = ["error" in row for row in result["cases"].values()]
    assert errors == [True, False]
    reason = next(iter(result["cases"].values()))["error"]
    assert "no spiking neuron" in reason
    run_dir = Path(result["run"])
    assert run([*arguments[:-2], "--out", str(run_dir)]) == 1, "a resumed run fails again"
    captured = capsys.readouterr()
    assert reason in captured.out.splitlines()[-1] and "1 of 2 cases failed" in captured.err


@pytest.mark.parametrize(
    "name", ["nosuch", "resnet20", "spiking_resnet99", "nosuch:make", "user_module:nosuch", "nosuch.py:make"]
)
def test_bench_unknown_network_exits_with_2_before_the_run(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, user_module: None
) -> None:
    arguments = [*BENCH, "--model", "spiking_resnet18", "--model", name, "--out", str(tmp_path)]
    message = run_json(arguments, capsys, code=2)["error"]["message"]
    assert repr(name) in message and list(tmp_path.iterdir()) == []


USER_FILE = """
import torch
from torch import nn
from spikingjelly.activation_based import functional, layer, neuron


class Net(nn.Module):
    def __init__(self, channels=4, classes=3):
        super().__init__()
        torch.manual_seed(0)
        self.conv = layer.Conv2d(2, channels, 3, padding=1)
        self.sn = neuron.IFNode(v_threshold=0.2)
        self.block_3_mlp_fc2_convolution = layer.Conv2d(channels, channels, 3, padding=1)
        self.sn2 = neuron.IFNode(v_threshold=0.2)
        self.fc = layer.Linear(channels, classes)
        functional.set_step_mode(self, "m")

    def forward(self, x, scale=None):
        x = x if scale is None else x * scale
        x = self.sn2(self.block_3_mlp_fc2_convolution(self.sn(self.conv(x))))
        return self.fc(x.flatten(-2).mean(-1))


def stateful():
    net = Net()
    net.calls = 0
    net.register_forward_hook(lambda module, args, out: out + int(args[0].shape[1] == 1))
    return net
"""


@pytest.fixture
def user_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory with a user's network and inputs, which is the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user_net.py").write_text(USER_FILE)
    x = (torch.rand(3, 2, 2, 8, 8, generator=torch.Generator().manual_seed(0)) < 0.2).float()
    torch.save(x, tmp_path / "x.pt")
    torch.save((x, torch.tensor(2.0)), tmp_path / "two.pt")
    np.savez(tmp_path / "x.npz", frames=x.double().numpy(), label=np.array(1))
    for name in ("user_net",):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


FAST = ["--no-compile", "--rounds", "4"]


@pytest.mark.parametrize(
    "options",
    [
        ["--input", "x.pt"],
        ["--input", "x.pt", "--offload-weights"],
        ["--input", "two.pt"],
        ["--input", "x.npz:frames", "--arg", "channels=6"],
        ["--shape", "3,2,2,8,8", "--event-rate", "0.2"],
        ["--shape", "2,2,8,8", "--step-mode", "s"],
    ],
)
def test_check_user_network_agrees(
    options: list[str], user_files: Path, prefer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    prefer("sparse", "dense", eager=2.0, optimised=1.0)
    result = run_json(["spiking", "check", "user_net.py:Net", *options, *FAST], capsys)
    assert result["agrees"] and not result["is_slower"] and len(result["calls"]) == 6
    assert all(call["problem"] is None for call in result["calls"])
    assert {call["num_predictions"] > 0 for call in result["calls"]} == {True}
    assert result["layers"][1]["backend"] == "events"
    assert set(result["memory_mb"]) == {"eager", "optimised"}


def test_check_slower_network_exits_with_1(
    user_files: Path, prefer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    prefer("sparse", eager=1.0, optimised=2.0)
    arguments = ["spiking", "check", "user_net:Net", "--input", "x.pt", *FAST]
    assert run(arguments) == 1
    captured = capsys.readouterr()
    assert "slower" in captured.err and "0.50x (0.50–0.50)" in captured.out


def test_check_different_outputs_exit_with_1(
    user_files: Path, prefer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sparseflow.spiking.runtime.plan import Plan

    prefer("dense")
    original = Plan.run
    monkeypatch.setattr(Plan, "run", lambda self, *inputs, **options: original(self, *inputs, **options) + 1)
    arguments = ["spiking", "check", "user_net:Net", "--input", "x.pt", *FAST]
    assert run(arguments) == 1
    captured = capsys.readouterr()
    assert "from rest: the outputs differ by" in captured.out and "differ" in captured.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--input", "absent.pt"], "absent.pt"),
        (["--input", "x.npz:frame"], "frames"),
        (["--input", "x.pt", "--shape", "3,2,2,8,8"], "shapes"),
        (["--shape", "3,2,2,8"], "(3, 2, 2, 8)"),
        (["--shape", "3x2"], "'3x2'"),
        (["--input", "x.pt", "--event-rate", "0.1"], "--shape"),
        (["--input", "x.pt", "--arg", "width=3"], "width"),
        (["--input", "x.pt", "--arg", "width"], "NAME=VALUE"),
        (["--input", "x.pt", "--weights", "x.pt"], "Net"),
        (["--input", "x.pt", "--tolerance", "-1"], "tolerance"),
    ],
)
def test_check_bad_input_exits_with_2(
    options: list[str], words: str, user_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_json(["spiking", "check", "user_net:Net", *options], capsys, code=2)
    assert words in result["error"]["message"]


@pytest.mark.parametrize("command", ["optimize", "profile", "bench"])
def test_commands_take_inputs_of_any_shape(
    command: str, user_files: Path, prefer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    prefer("sparse", "dense")
    arguments = ["spiking", command, "--model", "user_net:Net", "--input", "x.pt"]
    arguments += [*FAST, "--out", "runs"] if command == "bench" else []
    result = run_json(arguments, capsys)
    layers = next(iter(result["cases"].values()))["layers"] if command == "bench" else result["layers"]
    assert layers[1]["name"] == "block_3_mlp_fc2_convolution"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--input", "absent.pt"], "absent.pt"),
        (["--shape", "3,0"], "(3, 0)"),
        (["--model", "resnet18", "--arg", "a=3"], "'a'"),
    ],
)
def test_bench_bad_input_exits_with_2_before_the_run(
    options: list[str], words: str, user_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["spiking", "bench", "--model", "user_net:Net", *options, "--out", "runs"]
    assert words in run_json(arguments, capsys, code=2)["error"]["message"]
    assert not (user_files / "runs").exists()


def test_bench_batch_size_beside_an_input_exits_with_2(
    user_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*BENCH, "--model", "user_net:Net", "--input", "x.pt"]
    assert "--input" in run_json(arguments, capsys, code=2)["error"]["message"]


def join_columns(text: str) -> list[str]:
    """Text of each column of a table, with the lines of wrapped cells joined."""
    rows = [line.strip("│").split("│") for line in text.splitlines() if line.startswith("│")]
    return ["".join(cell.strip() for cell in column) for column in zip_longest(*rows, fillvalue="")]


@pytest.mark.parametrize("command", ["check", "optimize", "profile", "bench"])
def test_tables_of_80_columns_cut_nothing(
    command: str,
    user_files: Path,
    prefer: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(output, "_FILE_WIDTH", 80)
    wide = (3.0, 20.0, 0.5, 20.0)
    prefer("sparse", "dense", module=12345.678, sparse=(1.0,) * 7, eager=wide, folded=wide, optimised=1.0)
    arguments = ["spiking", command, *([] if command == "check" else ["--model"]), "user_net:Net"]
    arguments += ["--input", "x.pt", *(FAST if command in ("check", "bench") else [])]
    assert run([*arguments, *(["--out", "runs"] if command == "bench" else [])]) == 0
    out = capsys.readouterr().out
    tables = [line for line in out.splitlines() if line[:1] in "┏┃┡│└"]
    assert tables and all(len(line) <= 80 for line in tables) and "…" not in out
    columns = join_columns(out)
    if command != "bench":
        assert "block_3_mlp_fc2_convolution" in columns[0]
    if command in ("check", "optimize"):
        assert any("12345.678" in column for column in columns) and "sparse not supported" in " ".join(
            out.split()
        )
    if command in ("check", "bench"):
        text = out if command == "check" else columns[-1]
        assert "(0.50–20.00)" in text and "not significant" in text


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["optimize", "--model", "nonsense"], "'nonsense'"),
        (["optimize", *NETWORK, "--policy", "fast"], "'fast'"),
        (["optimize", *NETWORK, "--weights", "/nowhere/w.safetensors"], "/nowhere/w.safetensors"),
        (["optimize", "--batch-size", "0"], "--batch-size"),
        (["profile", "--image-size", "4"], "--image-size"),
        (["bench", "--dataset", "imagenet"], "'imagenet'"),
        (["nonsense"], "nonsense"),
        (["profile", "--model", "user_module:none"], "no spiking neuron"),
    ],
)
def test_invalid_arguments_exit_with_2_and_show_the_value(
    arguments: list[str], value: str, user_module: None, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_json(["spiking", *arguments], capsys, code=2)
    assert value in result["error"]["message"]


def test_absent_gpu_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    result = run_json(["spiking", "profile", "--device", "cuda:7"], capsys, code=1)
    assert result["error"]["type"] == "DeviceError"


def test_help_lists_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["spiking", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f" {name} " in out for name in ("optimize", "profile", "bench"))
