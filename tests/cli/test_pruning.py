"""`sparseflow pruning`, for readers and for scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("av")

from sparseflow.cli.root import run
from sparseflow.pruning import save
from sparseflow.pruning.settings import read_settings
from tests.pruning.data.tree import make_tree
from tests.pruning.small import QUICK


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick.yaml").write_text(json.dumps(QUICK))  # JSON is YAML
    return "quick.yaml"


def told(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_train_eval_compact_and_profile(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["pruning", "train", "--config", config, "--out", "run", "--set", "train.epochs=1"]
    assert run([*command, "--json"]) == 0
    found = told(capsys)
    assert Path(found["report"]).is_file() and found["sparsity_token"] == 0.5
    assert run(command) == 0
    assert "of videos right" in capsys.readouterr().out
    assert run([*command, "--set", "train.rate=0.1"]) == 2
    assert "another training" in capsys.readouterr().err
    assert run(["pruning", "eval", found["model"], "--config", config, "--json"]) == 0
    judged = told(capsys)
    assert judged["video_top1"] == found["video_top1"] and judged["videos"] == 20
    assert run(["pruning", "compact", found["model"], "--out", "small.safetensors", "--json"]) == 0
    cut = told(capsys)
    assert cut["gflops"] < cut["dense_gflops"] and len(cut["units"]) == 2
    assert run(["pruning", "eval", "small.safetensors", "--config", config, "--json"]) == 0
    assert told(capsys)["video_top1"] == found["video_top1"]
    settings = read_settings(config, {"model.depth": 1, "mode": "dense"})
    save(settings.make(5, 1), "other.safetensors")
    assert run(["pruning", "eval", "other.safetensors", "--config", config]) == 2
    assert "tells 5 classes apart" in capsys.readouterr().err
    profile = ["pruning", "profile", "--config", config, "--rounds", "2", "--batch", "2"]
    assert run([*profile, "--fit", "cost.json", "--json"]) == 0
    measured = told(capsys)
    assert [row["model"] for row in measured["profile"]] == ["dense", "soft masks", "hard masks", "compact"]
    assert Path("cost.json").is_file() and measured["error"] < 1e-4
    assert run(profile) == 0
    assert "clips/s" in capsys.readouterr().out


def test_compare(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "pruning", "compare", "--config", config, "--out", "cmp", "--seeds", "1", "--only", "dense,ast",
        "--set", "train.epochs=1", "--rounds", "2", "--batch", "2",
    ]  # fmt: skip
    assert run([*command, "--json"]) == 0
    found = told(capsys)
    assert [line["model"] for line in found["models"]] == ["dense", "ast"] and Path(found["page"]).is_file()
    assert run(command) == 0
    assert "x dense" in capsys.readouterr().out
    assert run([*command, "--only", "best"]) == 2
    assert "there are: dense, ast" in capsys.readouterr().err


def test_real_videos(
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
    found = told(capsys)
    assert 0.0 <= found["video_top1"] <= found["video_top5"] <= 1.0
    assert (tmp_path / "counts.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--config", "none.yaml", "--out", "x"], "these come with SparseFlow"),
        (["train", "--config", "quick.yaml", "--out", "x", "--set", "epochs"], "such as train.epochs=3"),
        (["train", "--config", "quick.yaml", "--out", "x", "--device", "tpu"], "must be cpu or cuda"),
        (["eval", "none.safetensors", "--config", "quick.yaml"], "there is no file none.safetensors"),
        (["compact", "quick.yaml", "--out", "x"], "is not a VideoViT"),
        (["profile"], "name a model, or a `--config`"),
        (["profile", "none.safetensors", "--set", "a=1"], "a model is what it is"),
        (["profile", "--config", "quick.yaml", "--dtype", "int8"], "must be one of: float32"),
    ],
)
def test_what_cannot_be_done_is_said(
    arguments: list[str], said: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["pruning", *arguments]) == 2
    assert said in capsys.readouterr().err
