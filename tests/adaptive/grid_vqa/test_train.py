"""A training by one command: its folder, going on after a stop, by several processes, and where it fails."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file

from sparseflow.adaptive.grid_vqa.model import load_vqa_model
from sparseflow.adaptive.grid_vqa.report import REPORT_FILE
from sparseflow.adaptive.grid_vqa.train import MODEL_DIR, SETTINGS_FILE, train
from sparseflow.core.training.checkpoint import CHECKPOINT_FILE
from sparseflow.core.training.history import read_history
from sparseflow.errors import FileFormatError, InputError
from tests.adaptive.grid_vqa.little import bank, quick
from tests.killed import ROOT, environment, run_script


def assert_same(first: Path, other: Path) -> None:
    files = [load_file(folder / MODEL_DIR / "model.safetensors") for folder in (first, other)]
    torch.testing.assert_close(*files, rtol=0.0, atol=0.0)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("unbroken")
    messages: list[tuple[str, float]] = []
    trained = train(quick(), root, bank=bank(), progress=lambda *first: messages.append(first))
    assert trained.folder == root / MODEL_DIR and trained.report == json.loads(
        (root / REPORT_FILE).read_text()
    )
    shares = [share for _, share in messages]
    assert shares == sorted(shares) and shares[7] == pytest.approx(0.95) and shares[-1] == 1.0
    assert messages[0][0].endswith("cells named correctly") and "step 8 of 8" in messages[7][0]
    return root


def test_the_folder_tells_what_happened(unbroken: Path) -> None:
    rows = list(read_history(unbroken))
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, 9))
    assert [row["step"] for row in rows if row["kind"] == "val"] == [4, 6, 8]
    assert {"full", "smallest_low", "smallest_medium", "smallest_high"} < set(rows[-1])
    assert json.loads((unbroken / SETTINGS_FILE).read_text()) == quick().model_dump(mode="json")
    model, _, settings = load_vqa_model(unbroken / MODEL_DIR)
    assert settings == quick() and model.config.text_config.num_hidden_layers == 4
    report = json.loads((unbroken / REPORT_FILE).read_text())
    assert report["samples"] == 12 and report["environment"]["device"]["kind"] == "cpu"


def test_a_finished_training_is_not_done_again_and_another_is_refused(unbroken: Path) -> None:
    second = train(quick(), unbroken, bank=bank(), progress=lambda *_: pytest.fail("it trained"))
    assert second.report == json.loads((unbroken / REPORT_FILE).read_text())
    with pytest.raises(InputError, match=r"train\.rate"):
        train(quick(**{"train.rate": 0.1}), unbroken, bank=bank())
    with pytest.raises(InputError, match="count"):
        train(quick(), unbroken, bank=bank(5))
    with pytest.raises(InputError, match=r"settings.json"):
        train(quick(), unbroken / SETTINGS_FILE, bank=bank())


def test_other_questions_are_judged_anew(unbroken: Path, tmp_path: Path) -> None:
    for name in (CHECKPOINT_FILE, REPORT_FILE, SETTINGS_FILE):
        (tmp_path / name).write_bytes((unbroken / name).read_bytes())
    trained = train(quick(test_samples=7, test_shares={"left": 1.0}), tmp_path, bank=bank())
    assert trained.report is not None
    assert trained.report["samples"] == 7 and set(trained.report["by_kind"]) == {"left"}


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / CHECKPOINT_FILE).write_bytes(b"torn")
    with pytest.raises(FileFormatError, match="remove it"):
        train(quick(), tmp_path, bank=bank())


KILLED = """
import sys
from sparseflow.adaptive.grid_vqa.train import train
from tests.adaptive.grid_vqa.little import bank, quick
from tests.killed import killed_when

for step in sys.argv[2:]:
    killed_when(
        lambda progress: train(quick(), f"{sys.argv[1]}/{step}", bank=bank(), progress=progress),
        lambda what, share: what.startswith(f"step {step} "),
    )
"""
KILLS = (3, 7)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of trainings that SIGKILL ended, by the step: processes forked from one that imported all."""
    root = tmp_path_factory.mktemp("killed")
    run_script(KILLED, str(root), *map(str, KILLS))
    return root


@pytest.mark.parametrize("step", KILLS)
def test_after_sigkill_it_goes_on_as_if_unbroken(step: int, unbroken: Path, killed: Path) -> None:
    folder = killed / str(step)
    completed: list[str] = []
    train(quick(), folder, bank=bank(), progress=lambda message, _: completed.append(message))
    # Checkpoints are those of steps 2, 4 and 6.
    assert completed[0].startswith(f"step {step // 2 * 2 + 1} of 8")
    assert_same(folder, unbroken)
    assert list(read_history(folder)) == list(read_history(unbroken))


TOGETHER = """
import sys
from sparseflow.adaptive.grid_vqa.train import train
from tests.adaptive.grid_vqa.little import bank, quick

trained = train(quick(), sys.argv[1], bank=bank())
print("first" if trained.report else "other")
"""


@pytest.mark.slow
def test_processes_train_together(unbroken: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    both = [
        subprocess.Popen(
            [sys.executable, "-c", TOGETHER, str(tmp_path)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment() | {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_PORT": port}
            | {"MASTER_ADDR": "127.0.0.1"},
        )
        for rank in range(2)
    ]  # fmt: skip
    messages = [item.communicate() for item in both]
    assert [item.returncode for item in both] == [0, 0], messages
    assert [out.strip() for out, _ in messages] == ["first", "other"]
    first, two = (load_file(root / MODEL_DIR / "model.safetensors") for root in (tmp_path, unbroken))
    assert any(not torch.equal(first[name], two[name]) for name in first), "two processes see twice as much"


def test_half_precision(tmp_path: Path) -> None:
    trained = train(quick(**{"train.amp": "bf16"}), tmp_path, bank=bank())
    model, _, _ = load_vqa_model(trained.folder)
    assert all(bool(value.isfinite().all()) for value in model.parameters())


def test_the_global_generator_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    train(quick(**{"train.steps": 1, "train.vision_steps": 1}), tmp_path, bank=bank())
    assert torch.equal(torch.rand(1), expected)
