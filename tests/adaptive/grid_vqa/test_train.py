"""Training of a Grid-VQA model: directory, resume, several processes, and the report."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file

from sparseflow.adaptive.grid_vqa.config import KINDS, VqaConfig
from sparseflow.adaptive.grid_vqa.dataset import VqaDataset
from sparseflow.adaptive.grid_vqa.model import build_vqa_model, load_vqa_model
from sparseflow.adaptive.grid_vqa.train import (
    MODEL_DIR,
    REPORT_FILE,
    count_multiply_adds,
    load_report,
    make_report,
    train,
)
from sparseflow.adaptive.plan.space import Plan
from sparseflow.core.training.checkpoint import CHECKPOINT_FILE
from sparseflow.core.training.history import read_history
from sparseflow.core.training.loop import SETTINGS_FILE
from sparseflow.errors import FileFormatError, InputError
from tests.adaptive.grid_vqa.little import bank, quick
from tests.killed import ROOT, environment, run_script


def config(**changes: Any) -> VqaConfig:
    return quick(plan_samples=2, **changes)


def assert_same(first: Path, other: Path) -> None:
    files = [load_file(folder / MODEL_DIR / "model.safetensors") for folder in (first, other)]
    torch.testing.assert_close(*files, rtol=0.0, atol=0.0)


@pytest.fixture(scope="module")
def complete_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("complete_run")
    messages: list[tuple[str, float]] = []
    trained = train(config(), root, bank=bank(), progress=lambda *message: messages.append(message))
    assert trained.folder == root / MODEL_DIR and trained.report == json.loads(
        (root / REPORT_FILE).read_text()
    )
    fractions = [fraction for _, fraction in messages]
    assert fractions == sorted(fractions)
    assert fractions[7] == pytest.approx(0.95) and fractions[-1] == 1.0
    assert messages[0][0].endswith("cells named correctly") and "step 8 of 8" in messages[7][0]
    return root


def test_train_writes_history_settings_model_and_report(complete_run: Path) -> None:
    rows = list(read_history(complete_run))
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, 9))
    assert [row["step"] for row in rows if row["kind"] == "val"] == [4, 6, 8]
    assert {"full", "smallest_low", "smallest_medium", "smallest_high"} < set(rows[-1])
    assert json.loads((complete_run / SETTINGS_FILE).read_text()) == config().model_dump(mode="json")
    model, _, settings = load_vqa_model(complete_run / MODEL_DIR)
    assert settings == config() and model.config.text_config.num_hidden_layers == 4
    report = json.loads((complete_run / REPORT_FILE).read_text())
    assert report["samples"] == 12 and report["environment"]["device"]["kind"] == "cpu"


def test_train_in_finished_directory_loads_report_or_raises(complete_run: Path) -> None:
    second = train(config(), complete_run, bank=bank(), progress=lambda *_: pytest.fail("it trained"))
    assert second.report == json.loads((complete_run / REPORT_FILE).read_text())
    with pytest.raises(InputError, match=r"train\.rate"):
        train(config(**{"train.rate": 0.1}), complete_run, bank=bank())
    with pytest.raises(InputError, match="count"):
        train(config(), complete_run, bank=bank(5))
    with pytest.raises(InputError, match=r"settings.json"):
        train(config(), complete_run / SETTINGS_FILE, bank=bank())


def test_train_with_other_test_settings_evaluates_again(complete_run: Path, tmp_path: Path) -> None:
    for name in (CHECKPOINT_FILE, REPORT_FILE, SETTINGS_FILE):
        (tmp_path / name).write_bytes((complete_run / name).read_bytes())
    trained = train(config(test_samples=7, test_shares={"left": 1.0}), tmp_path, bank=bank())
    assert trained.report is not None
    assert trained.report["samples"] == 7 and set(trained.report["by_kind"]) == {"left"}


def test_train_with_damaged_checkpoint_raises(tmp_path: Path) -> None:
    (tmp_path / CHECKPOINT_FILE).write_bytes(b"torn")
    with pytest.raises(FileFormatError, match="remove it"):
        train(config(), tmp_path, bank=bank())


KILLED = """
import sys
import torch._dynamo, transformers.models.olmoe.modeling_olmoe  # for all forks; trainings import them late
from sparseflow.adaptive.grid_vqa.train import train
from tests.adaptive.grid_vqa.little import bank, quick
from tests.killed import killed_when

for step in sys.argv[2:]:
    killed_when(
        lambda progress: train(
            quick(plan_samples=2), f"{sys.argv[1]}/{step}", bank=bank(), progress=progress
        ),
        lambda what, share: what.startswith(f"step {step} "),
    )
"""
KILLS = (3, 7)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of killed trainings, named by the step; one process imports the modules for all."""
    root = tmp_path_factory.mktemp("killed")
    run_script(KILLED, str(root), *map(str, KILLS))
    return root


@pytest.mark.parametrize("step", KILLS)
def test_train_after_sigkill_gives_same_weights(step: int, complete_run: Path, killed: Path) -> None:
    folder = killed / str(step)
    completed: list[str] = []
    train(config(), folder, bank=bank(), progress=lambda message, _: completed.append(message))
    # Checkpoints are those of steps 2, 4 and 6.
    assert completed[0].startswith(f"step {step // 2 * 2 + 1} of 8")
    assert_same(folder, complete_run)
    assert list(read_history(folder)) == list(read_history(complete_run))


RANK = """
import sys
from sparseflow.adaptive.grid_vqa.train import train
from tests.adaptive.grid_vqa.little import bank, quick

trained = train(quick(plan_samples=2), sys.argv[1], bank=bank())
print("first" if trained.report else "other")
"""


@pytest.mark.slow
def test_train_with_two_processes_shares_directory(complete_run: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment() | {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_PORT": port}
            | {"MASTER_ADDR": "127.0.0.1"},
        )
        for rank in range(2)
    ]  # fmt: skip
    messages = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], messages
    assert [out.strip() for out, _ in messages] == ["first", "other"]
    first, other = (load_file(root / MODEL_DIR / "model.safetensors") for root in (tmp_path, complete_run))
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_train_in_bfloat16_is_finite(tmp_path: Path) -> None:
    trained = train(config(**{"train.amp": "bf16"}), tmp_path, bank=bank())
    model, _, _ = load_vqa_model(trained.folder)
    assert all(bool(value.isfinite().all()) for value in model.parameters())


def test_train_does_not_use_global_generator(tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    train(config(**{"train.steps": 1, "train.vision_steps": 1}), tmp_path, bank=bank())
    assert torch.equal(torch.rand(1), expected)


DATA = VqaDataset(quick(), bank=bank())
PLAN = Plan(tier="high", insertion_position=1, top_k=3, blocks=(0, 1, 2, 3))


def test_multiply_adds_equal_matrix_products() -> None:
    config = DATA.config.model
    torch.manual_seed(0)
    model = build_vqa_model(DATA.config, DATA.vocabulary)
    num_products = [0]

    def count(module: torch.nn.Module, _: object, output: torch.Tensor) -> None:
        if isinstance(module, torch.nn.Linear):
            num_products[0] += output.numel() * module.in_features
        elif isinstance(module, torch.nn.Conv2d):
            num_products[0] += output.numel() * module.weight[0].numel()

    for module in model.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d):
            module.register_forward_hook(count)
    sample = next(DATA.iterate_samples("test", 1))
    with torch.no_grad():
        model(**sample.inputs, logits_to_keep=1)
    length, text = sample.inputs["input_ids"].shape[1], sample.inputs["input_ids"].shape[1] - 57
    linear = num_products[0] - 16 * len(DATA.vocabulary)
    # Without hooks: experts, routers and the products of attention.
    experts = 4 * length * (3 * 3 * 16 * 8 + 4 * 16)
    attention = 4 * length * length * 16 + 14 * 4 * 2 * 4 * 16
    assert count_multiply_adds(config, PLAN, text) == linear + experts + attention


def test_multiply_adds_decrease_with_each_setting() -> None:
    config = DATA.config.model
    full = count_multiply_adds(config, PLAN, 10)
    for smaller in (
        Plan(tier="medium", insertion_position=1, top_k=3, blocks=(0, 1, 2, 3)),
        Plan(tier="high", insertion_position=1, top_k=2, blocks=(0, 1, 2, 3)),
        Plan(tier="high", insertion_position=1, top_k=3, blocks=(0, 1, 3)),
    ):
        assert count_multiply_adds(config, smaller, 10) < full
    later = Plan(tier="high", insertion_position=2, top_k=2, blocks=(0, 1, 2, 3))
    assert (
        count_multiply_adds(config, Plan(tier="high", insertion_position=1, top_k=2, blocks=(0, 1, 2, 3)), 10)
        < count_multiply_adds(config, later, 10)
        < full
    )


def test_make_report_summarizes_evaluation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    report = make_report(build_vqa_model(DATA.config, DATA.vocabulary), DATA)
    assert (report["samples"], report["plan_samples"]) == (12, 12) and set(report["by_kind"]) <= set(KINDS)
    assert report["names"] == ["cat", "one", "two", "dog"]
    rows = {row["plan"]: row for row in report["plans"]}
    assert rows[PLAN.id]["accuracy"] == report["accuracy"]
    assert report["pareto_plans"] == sum(row["pareto"] for row in rows.values()) >= 1
    assert report["blind"]["chance"] > 0.0 and len(report["importance"]) == 4
    small_data = VqaDataset(quick(plan_samples=5), bank=bank())
    other = make_report(build_vqa_model(small_data.config, small_data.vocabulary), small_data)
    assert (other["samples"], other["plan_samples"]) == (12, 5)
    assert all(5 * row["accuracy"] == round(5 * row["accuracy"]) for row in other["plans"])
    assert load_report(tmp_path) is None
    for content in ("{", "[]", "{}"):
        (tmp_path / REPORT_FILE).write_text(content)
        with pytest.raises(FileFormatError, match="report"):
            load_report(tmp_path)
