"""`sparseflow pruning`: text output, JSON output and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("av")

from sparseflow.cli.root import run
from sparseflow.pruning import save_model
from sparseflow.pruning.config import read_config
from tests.pruning.data.tree import make_tree
from tests.pruning.small import QUICK


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick.yaml").write_text(json.dumps(QUICK))  # JSON is YAML
    return "quick.yaml"


def read_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_train_eval_compact_profile_agree(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["pruning", "train", "--config", config, "--out", "run", "--set", "train.epochs=1"]
    assert run([*command, "--json"]) == 0
    result = read_json(capsys)
    assert Path(result["report"]).is_file() and result["sparsity_token"] == 0.5
    assert run(command) == 0
    assert "over videos" in capsys.readouterr().out
    assert run([*command, "--set", "train.rate=0.1"]) == 2
    assert "train.rate" in capsys.readouterr().err
    assert run(["pruning", "eval", result["model"], "--config", config, "--json"]) == 0
    accuracy = read_json(capsys)
    assert accuracy["video_top1"] == result["video_top1"] and accuracy["videos"] == 20
    assert run(["pruning", "compact", result["model"], "--out", "small.safetensors", "--json"]) == 0
    cut = read_json(capsys)
    assert cut["gflops"] < cut["dense_gflops"] and len(cut["units"]) == 2
    assert run(["pruning", "eval", "small.safetensors", "--config", config, "--json"]) == 0
    assert read_json(capsys)["video_top1"] == result["video_top1"]
    settings = read_config(config, {"model.depth": 1, "mode": "dense"})
    save_model(settings.build_model(5, 1), "other.safetensors")
    assert run(["pruning", "eval", "other.safetensors", "--config", config]) == 2
    assert "other.safetensors has 5 classes" in capsys.readouterr().err
    profile = ["pruning", "profile", "--config", config, "--rounds", "2", "--batch-size", "2"]
    assert run([*profile, "--fit", "cost.json", "--json"]) == 0
    measured = read_json(capsys)
    assert [row["model"] for row in measured["profile"]] == ["dense", "soft masks", "hard masks", "compact"]
    assert Path("cost.json").is_file() and measured["error"] < 1e-4
    assert run(profile) == 0
    assert "clips/s" in capsys.readouterr().out


def test_compare_two_models_resumes(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "pruning", "compare", "--config", config, "--out", "cmp", "--seeds", "1", "--models", "dense,ast",
        "--set", "train.epochs=1", "--rounds", "2", "--batch-size", "2",
    ]  # fmt: skip
    assert run([*command, "--json"]) == 0
    result = read_json(capsys)
    assert [line["model"] for line in result["models"]] == ["dense", "ast"] and Path(result["page"]).is_file()
    assert run(command) == 0
    assert "over dense" in capsys.readouterr().out
    assert run([*command, "--models", "best"]) == 2
    assert "best" in capsys.readouterr().err


def test_train_on_video_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tree = make_tree(tmp_path / "tree")
    settings = QUICK | {
        "model": QUICK["model"] | {"num_frames": 8},
        "data": {
            "kind": "ucf101", "lists": str(tree.lists), "videos": str(tree.videos), "counts": "counts.json",
            "split": 2,
        },
        "train": {"epochs": 1, "batch_size": 4, "amp": "bf16"},
    }  # fmt: skip
    (tmp_path / "real.yaml").write_text(json.dumps(settings))
    assert run(["pruning", "train", "--config", "real.yaml", "--out", "run", "--json"]) == 0
    result = read_json(capsys)
    assert 0.0 <= result["video_top1"] <= result["video_top5"] <= 1.0
    assert (tmp_path / "counts.json").is_file()


def test_file_in_place_of_the_output_directory_exits_with_1(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["pruning", "train", "--config", config, "--out", config]) == 1
    assert f"{config} is a file; give the name of a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["train", "--config", "none.yaml", "--out", "x"], "none.yaml"),
        (["train", "--config", "quick.yaml", "--out", "x", "--set", "epochs"], "`--set epochs`"),
        (["train", "--config", "quick.yaml", "--out", "x", "--device", "tpu"], "`--device tpu`"),
        (["eval", "none.safetensors", "--config", "quick.yaml"], "none.safetensors"),
        (["compact", "quick.yaml", "--out", "x"], "quick.yaml"),
        (["profile"], "`--config`"),
        (["profile", "none.safetensors", "--set", "a=1"], "`--set a=1`"),
        (["profile", "--config", "quick.yaml", "--dtype", "int8"], "'int8'"),
    ],
)
def test_invalid_arguments_exit_with_2_and_show_the_value(
    arguments: list[str], value: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["pruning", *arguments]) == 2
    assert value in capsys.readouterr().err


def test_patch_prints_tokens_and_latency_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=4, num_attention_heads=2, intermediate_size=40, image_size=32,
        patch_size=8,
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    command = ["pruning", "patch", f"hf:{tmp_path}", "--rounds", "2"]
    assert run([*command, "--json", "--stage", "1=0.5", "--stage", "3=0.25", "--selector", "tome"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["tokens"] == [16, 8, 8, 4] and record["stages"] == {"1": 0.5, "3": 0.25}
    assert record["gflops"]["patched"] < record["gflops"]["dense"] and record["speedup"]["median"] > 0
    assert run([*command, "--keep", "0.25"]) == 0
    assert "ViT: 16 from block 0, 4 from block 1" in capsys.readouterr().out
    assert run([*command, "--stage", "1:0.5"]) == 2
    assert "BLOCK=SHARE" in capsys.readouterr().err
    assert run(["pruning", "patch", str(tmp_path)]) == 2
    assert "hf:FOLDER" in capsys.readouterr().err
