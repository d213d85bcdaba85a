"""Data-parallel training."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparseflow.core.training.distributed import init_distributed

ROOT = Path(__file__).parents[3]


def test_one_process_averages_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with init_distributed("cpu") as context:
        assert (context.rank, context.world_size, context.device) == (0, 1, torch.device("cpu"))
        weight = torch.nn.Parameter(torch.ones(2))
        context.average_gradients([weight])
        assert weight.grad is None
        assert context.all_reduce_mean(torch.tensor(3.0, requires_grad=True)).item() == 3.0
        assert context.all_reduce_min([4, 2]) == [4, 2]
        context.check_equal("anything", 1)


TWO_PROCESSES = """
import sys
from functools import partial
from pathlib import Path
import torch
from sparseflow.core.training.distributed import init_distributed
from sparseflow.core.training.loop import fit
from sparseflow.errors import RunError
from tests.core.training.regression import Regression

with init_distributed("cpu") as context:
    weights = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))]
    weights[0].grad = torch.full((2,), 2.0 + context.rank)
    if context.rank:
        weights[1].grad = torch.ones(3)
    context.average_gradients(weights)
    assert weights[0].grad.tolist() == [2.5, 2.5] and weights[1].grad.tolist() == [0.5, 0.5, 0.5]
    assert context.all_reduce_mean(torch.tensor(float(context.rank))) == 0.5
    assert context.all_reduce_min([context.rank, -context.rank]) == [0, -1]
    try:
        context.check_equal("the rank", context.rank)
    except RunError as error:
        assert "the rank: 0 to 1" in str(error)
    else:
        raise AssertionError("no error although the ranks differ")
    out_dir = Path(sys.argv[1])
    trained = fit(partial(Regression, eval_every=3), out_dir / "run", checkpoint_every=2)
    assert trained.evaluated == ([] if context.rank else [3, 6])
    torch.save(trained.model.state_dict(), out_dir / f"{context.rank}.pt")
    finished = fit(partial(Regression, eval_every=3), out_dir / "run", checkpoint_every=2)
    assert torch.equal(finished.model.weight, trained.model.weight)
"""


@pytest.mark.slow
def test_two_processes_train_one_model(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(tmp_path)], cwd=ROOT,
            env=environment | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        for process in processes:
            _, stderr = process.communicate(timeout=120)
            assert process.returncode == 0, stderr
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    torch.testing.assert_close(first, second, rtol=0.0, atol=0.0)
