"""Training: learning, resuming, and patterns that do not fit into memory."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparseflow.core.training.checkpoint import CHECKPOINT_FILE
from sparseflow.core.training.history import read_history
from sparseflow.errors import FileFormatError, InputError, RunError
from sparseflow.tuning.evaluation import write_page
from sparseflow.tuning.model import dataset
from sparseflow.tuning.model import training as module
from sparseflow.tuning.model.dataset import BatchSampling
from sparseflow.tuning.model.net.losses import LOSSES, LossKind
from sparseflow.tuning.model.net.network import AutoSparseNet
from sparseflow.tuning.model.net.pretrained import SHIPPED, load_network, load_shipped_network
from sparseflow.tuning.model.ranking import evaluate_ranking, make_network_scorer, summarize_scores
from sparseflow.tuning.model.training import NETWORK_FILE, TrainConfig, train
from sparseflow.tuning.model.training_log import RECORD_FILE, TrainingRecord, read_training_log
from tests.conformance import check_artifact_file
from tests.tuning.synthetic_labels import NO_PATTERN, SMALL, change, made_up

ROOT = Path(__file__).parents[3]
MIX = BatchSampling(schedules=6, matrices=2, tasks=2)
QUICK = TrainConfig(net=SMALL, sampling=MIX, steps=6, checkpoint_every=2, validate_every=3)


def assert_same(item: AutoSparseNet, other: AutoSparseNet) -> None:
    torch.testing.assert_close(dict(item.state_dict()), dict(other.state_dict()), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("loss", LOSSES)
def test_train_every_loss_learns(loss: LossKind, tmp_path: Path) -> None:
    data = made_up(schedules=40)
    config = change(
        QUICK, net=NO_PATTERN, loss=loss, steps=40, learning_rate=1e-2,
        checkpoint_every=1000, validate_every=1000,
        sampling=BatchSampling(schedules=16, matrices=2, tasks=2),
    )  # fmt: skip
    torch.manual_seed(0)
    before = summarize_scores(
        evaluate_ranking(data.groups, make_network_scorer(AutoSparseNet(NO_PATTERN), data))
    )
    trained = train(config, data, tmp_path)
    after = summarize_scores(evaluate_ranking(data.groups, make_network_scorer(trained.net, data)))
    assert after["pair_accuracy"]["mean"] > 0.85 > before["pair_accuracy"]["mean"]
    assert trained.scores == () and trained.limits == {}


@pytest.mark.parametrize("context_mode", ["input", "concat", "cross", "mlp"])
def test_train_every_context_mode_learns(context_mode: str, tmp_path: Path) -> None:
    data = made_up()
    config = change(
        QUICK, net=SMALL.model_dump() | {"context_mode": context_mode, "layers": 2, "dropout": 0.0}, steps=40,
        learning_rate=1e-2, sampling=change(MIX, hidden_fraction=0.0),
    )  # fmt: skip
    net = train(config, data, tmp_path).net
    losses = [row["loss"] for row in read_history(tmp_path)]
    assert sum(losses[-8:]) < sum(losses[:8])
    assert load_network(tmp_path / NETWORK_FILE).config == config.net
    # The pattern of a task changes the order of its schedules, not only the sum of all scores.
    group = next(group for group in data.groups if group.task.pattern is not None)
    score = make_network_scorer(net, data)
    known, unknown = score(group), score(replace(group, task=replace(group.task, pattern=None)))
    assert (known - unknown).std() > 1e-4


def test_train_writes_history(tmp_path: Path) -> None:
    train_data, held_out = made_up().hold_out(["f1"])
    messages: list[tuple[str, float]] = []
    trained = train(
        QUICK,
        train_data,
        tmp_path,
        held_out=held_out,
        progress=lambda item, share: messages.append((item, share)),
    )
    rows = list(read_history(tmp_path))
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if row["kind"] == "held_out"] == [3, 6]
    assert {"loss", "top1", "top5", "top20", "pair_accuracy"} < set(rows[-1])
    assert [share for _, share in messages] == pytest.approx([index / 6 for index in range(1, 7)])
    assert [score.matrix for score in trained.scores] == ["m1", "m1"]
    torch.testing.assert_close(
        load_network(tmp_path / NETWORK_FILE).state_dict(), trained.net.state_dict(), rtol=1e-3, atol=1e-4
    )


def test_train_writes_record_once(tmp_path: Path) -> None:
    train_data, held_out = made_up().hold_out(["f1"])
    result = train(QUICK, train_data, tmp_path / "first", held_out=held_out, remarks="a trial")
    train(QUICK, train_data, tmp_path / "first", held_out=held_out, remarks="repeated")
    train(change(QUICK, steps=1), train_data, tmp_path / "second", name="other")
    (first_dir, first), (_, second) = read_training_log(tmp_path)
    rows = [row for row in read_history(first_dir) if row["kind"] == "held_out"]
    summary = summarize_scores(result.scores)
    assert (first.model, first.remarks, first.steps) == ("first", "a trial", 6)
    assert first.validation_loss == pytest.approx(rows[-1]["loss"])
    assert (first.top1, first.top5) == (summary["top1"]["mean"], summary["top5"]["mean"])
    assert first.structure == "hdc, concat; input, 1 layers, width 16; rank loss, mix"
    assert first.dataset == "spmm, spmv: 48 labels of 4 tasks, 2 matrices; held out: f1"
    assert (second.model, second.validation_loss, second.top1, second.remarks) == ("other", None, None, "")
    page = write_page(tmp_path).read_text()
    assert all(text in page for text in ("2 trainings.", "Training log", "a trial", "Training loss"))
    check_artifact_file(TrainingRecord.load, first_dir / RECORD_FILE, hint="remove the file")


def test_train_finished_is_not_repeated(tmp_path: Path) -> None:
    data = made_up()
    first = train(QUICK, data, tmp_path)
    assert_same(train(QUICK, data, tmp_path, progress=lambda *_: pytest.fail("it trained")).net, first.net)
    with pytest.raises(InputError):
        train(change(QUICK, learning_rate=1.0), data, tmp_path)
    with pytest.raises(InputError):
        train(QUICK, data.hold_out(["f0"])[0], tmp_path)
    (tmp_path / CHECKPOINT_FILE).write_bytes(b"torn")
    with pytest.raises(FileFormatError):
        train(QUICK, data, tmp_path)
    with pytest.raises(InputError):
        train(QUICK, data, tmp_path / NETWORK_FILE)


KILLED = """
import os, signal, sys
from sparseflow.tuning.model.training import train
from tests.tuning.synthetic_labels import made_up
from tests.tuning.model.test_training import QUICK

def progress(what, share):
    if share > 4.5 / 6:
        os.kill(os.getpid(), signal.SIGKILL)

learnt, held = made_up().hold_out(["f1"])
train(QUICK, learnt, sys.argv[1], held_out=held, progress=progress)
"""


def test_train_killed_resumes_identically(tmp_path: Path) -> None:
    train_data, held_out = made_up().hold_out(["f1"])
    unbroken = train(QUICK, train_data, tmp_path / "unbroken", held_out=held_out)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    died = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "killed")],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert died.returncode == -signal.SIGKILL, died.stderr
    # It died in step 5, after the checkpoint of step 4.
    assert [row["step"] for row in read_history(tmp_path / "killed")][-1] == 5
    steps: list[float] = []
    result = train(
        QUICK,
        train_data,
        tmp_path / "killed",
        held_out=held_out,
        progress=lambda _, share: steps.append(round(6 * share)),
    )
    assert steps == [5, 6]
    assert_same(result.net, unbroken.net)
    assert result.scores == unbroken.scores
    assert list(read_history(tmp_path / "killed")) == list(read_history(tmp_path / "unbroken"))
    assert (tmp_path / "killed" / NETWORK_FILE).stat().st_size == (
        tmp_path / "unbroken" / NETWORK_FILE
    ).stat().st_size


def test_train_init_starts_from_network(tmp_path: Path) -> None:
    data = made_up()
    first = train(QUICK, data, tmp_path / "first")
    started = change(QUICK, init=str(tmp_path / "first" / NETWORK_FILE), steps=1, learning_rate=1e-9)
    # Files hold half precision.
    torch.testing.assert_close(
        train(started, data, tmp_path / "next").net.state_dict(), first.net.state_dict(), rtol=1e-3, atol=1e-4
    )
    dropout = change(started, net=change(SMALL, dropout=0.3))
    train(dropout, data, tmp_path / "dropout")
    with pytest.raises(InputError):
        train(change(started, net=NO_PATTERN), data, tmp_path / "other")
    with pytest.raises(InputError):
        train(change(started, init="absent"), data, tmp_path / "absent")


def test_train_depends_on_seed_only(tmp_path: Path) -> None:
    data = made_up()
    torch.manual_seed(5)
    result = train(QUICK, data, tmp_path / "a")
    torch.manual_seed(6)
    same = train(QUICK, made_up(), tmp_path / "b")
    assert_same(result.net, same.net)
    samples = torch.rand(1)
    torch.manual_seed(6)
    assert torch.equal(samples, torch.rand(1)), "the global generator was used"
    other = train(change(QUICK, seed=1), data, tmp_path / "c")
    assert not torch.equal(result.net.head, other.net.head)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
)
def test_train_oversized_patterns_are_coarsened(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dataset, "_MIN_CELLS", 4)
    embed = AutoSparseNet.embed_patterns

    def little_memory(self, cells):
        if any(len(cell.coords) > 20 for cell in cells):
            raise error
        return embed(self, cells)

    monkeypatch.setattr(AutoSparseNet, "embed_patterns", little_memory)
    train_data, held_out = made_up().hold_out(["f1"])
    with caplog.at_level(logging.WARNING):
        trained = train(QUICK, train_data, tmp_path, held_out=held_out)
    assert 0 < trained.limits["0"] <= 20
    assert "the pattern of m0 does not fit into memory" in caplog.text
    assert "the pattern of m1 does not fit into memory" in caplog.text  # held out
    assert len(trained.scores) == 2
    resumed = train(QUICK, train_data, tmp_path)
    assert resumed.limits == trained.limits


def test_train_oversized_step_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self, tokens, context):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(AutoSparseNet, "forward", none)
    with pytest.raises(RunError):
        train(QUICK, made_up(), tmp_path)


def test_train_divergence_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ranking_loss", lambda kind, scores, labels, weights: scores.sum() * math.nan)
    with pytest.raises(RunError):
        train(QUICK, made_up(), tmp_path)


def test_shipped_config_has_the_defaults() -> None:
    assert TrainConfig.read("autosparse") == TrainConfig()


def test_read_config_applies_overrides(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("net: {layers: 3, pattern: null}\nsteps: 5\n")
    config = TrainConfig.read(str(tmp_path / "config.yaml"), {"steps": 7, "sampling.mode": "naive"})
    expected = {"net": {"layers": 3, "pattern": None}, "steps": 7, "sampling": {"mode": "naive"}}
    assert config == TrainConfig.model_validate(expected)
    assert TrainConfig.read(None, {"init": SHIPPED}).net == load_shipped_network().config
    for invalid in (1, 0.5, True, ["net"], {"net": 1}):
        with pytest.raises(InputError, match="init"):
            TrainConfig.read(None, {"init": invalid})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", "mse"),
        ("steps", 0),
        ("learning_rate", 0.0),
        ("warmup_fraction", 2.0),
        ("epochs", 3),
        ("sampling.mode", "none"),
        ("net.heads", 3),
        ("net", 3),
    ],
)
def test_read_config_invalid_value_raises(name: str, value: object) -> None:
    with pytest.raises(InputError, match=name.partition(".")[2] or name):
        TrainConfig.read(None, {name: value})
