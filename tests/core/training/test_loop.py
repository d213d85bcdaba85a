"""Training loop."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

from sparseflow.core.training import checkpoint
from sparseflow.core.training.checkpoint import CHECKPOINT_FILE
from sparseflow.core.training.history import read_history
from sparseflow.core.training.loop import SETTINGS_FILE, fit
from sparseflow.errors import FileFormatError, InputError, RunError
from tests.core.training.regression import Regression


def read_rows(out_dir: Path) -> list[tuple[int, str]]:
    return [(row["step"], row["kind"]) for row in read_history(out_dir)]


def test_fit_writes_history_settings_and_model(tmp_path: Path) -> None:
    messages: list[tuple[str, float]] = []
    pages: list[list[tuple[int, str]]] = []
    task = fit(
        partial(Regression, eval_every=2), tmp_path, checkpoint_every=100, eval_kind="test", eval_before=True,
        settings={"seed": 0}, write_page=lambda out_dir: pages.append(read_rows(out_dir)),
        progress=lambda message, fraction: messages.append((message, fraction)),
    )  # fmt: skip
    assert task.step == 6 and task.evaluated == [0, 2, 4, 6]
    train_rows = [(step, "train") for step in range(1, 7)]
    assert read_rows(tmp_path) == [
        (0, "test"), *train_rows[:4], (4, "test"), *train_rows[4:], (6, "test")
    ]  # fmt: skip
    assert [rows[-1] for rows in pages] == [(0, "test"), (4, "test"), (6, "test")]
    assert messages == [(f"step {step}", pytest.approx(step / 6)) for step in range(1, 7)]
    assert json.loads((tmp_path / SETTINGS_FILE).read_text()) == {"seed": 0}
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    torch.testing.assert_close(saved, dict(task.model.state_dict()), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("stop_after", range(6))
@pytest.mark.parametrize("eval_every", [None, 3])
def test_fit_after_a_stop_gives_the_same_weights(
    stop_after: int, eval_every: int | None, tmp_path: Path
) -> None:
    make_task = partial(Regression, eval_every=eval_every)
    unbroken = fit(make_task, tmp_path / "unbroken", checkpoint_every=2)
    with pytest.raises(KeyboardInterrupt):
        fit(partial(make_task, stop_after=stop_after), tmp_path / "stopped", checkpoint_every=2)
    steps: list[int] = []
    resumed = fit(
        make_task,
        tmp_path / "stopped",
        checkpoint_every=2,
        progress=lambda _, fraction: steps.append(round(6 * fraction)),
    )
    saved = max(step for step in range(stop_after + 1) if step % 2 == 0 or (eval_every and step % 3 == 0))
    assert steps == list(range(saved + 1, 7))
    torch.testing.assert_close(
        dict(resumed.model.state_dict()), dict(unbroken.model.state_dict()), rtol=0.0, atol=0.0
    )
    assert list(read_history(tmp_path / "stopped")) == list(read_history(tmp_path / "unbroken"))


def test_fit_of_a_finished_training_trains_no_step(tmp_path: Path) -> None:
    fit(Regression, tmp_path, checkpoint_every=4)
    (tmp_path / "model.pt").unlink()
    fit(Regression, tmp_path, checkpoint_every=4, progress=lambda *_: pytest.fail("it trained"))
    assert (tmp_path / "model.pt").is_file()


def test_fit_refuses_a_directory_of_other_settings(tmp_path: Path) -> None:
    fit(Regression, tmp_path, checkpoint_every=4, settings={"seed": 0})
    with pytest.raises(InputError, match=r"data\.seed"):
        fit(partial(Regression, seed=1), tmp_path, checkpoint_every=4, settings={"seed": 1})
    assert json.loads((tmp_path / SETTINGS_FILE).read_text()) == {"seed": 0}
    with pytest.raises(InputError, match=str(tmp_path / "model.pt")):
        fit(Regression, tmp_path / "model.pt", checkpoint_every=4)
    (tmp_path / CHECKPOINT_FILE).write_bytes(b"torn")
    with pytest.raises(FileFormatError):
        fit(Regression, tmp_path, checkpoint_every=4)


def test_fit_keeps_the_random_state(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    fit(Regression, tmp_path, checkpoint_every=4)
    assert torch.equal(torch.rand(2), expected)


def test_fit_with_a_loss_that_is_not_finite_keeps_the_checkpoint(tmp_path: Path) -> None:
    class Diverging(Regression):
        def train_step(self) -> Mapping[str, float]:
            if self.step == 3:
                self.model.weight.data.fill_(math.nan)
            return super().train_step()

    with pytest.raises(RunError, match=r"step 4.*nan"):
        fit(Diverging, tmp_path, checkpoint_every=2)
    state = checkpoint.load(tmp_path, {"num_steps": 6, "data": {"seed": 0}})
    assert state is not None and state["step"] == 2
