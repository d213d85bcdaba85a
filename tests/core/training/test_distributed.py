"""Training by several processes."""

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


def test_alone_nothing_is_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with init_distributed("cpu") as mine:
        assert (mine.rank, mine.world_size, mine.device) == (0, 1, torch.device("cpu"))
        weight = torch.nn.Parameter(torch.ones(2))
        mine.average_gradients([weight])
        assert weight.grad is None
        assert mine.all_reduce_mean(torch.tensor(3.0, requires_grad=True)).item() == 3.0
        assert mine.all_reduce_min([4, 2]) == [4, 2]
        mine.check_equal("anything", 1)


TWO = """
import sys
from pathlib import Path
import torch
from sparseflow.errors import RunError
from sparseflow.core.training.distributed import init_distributed
from sparseflow.tuning.model.training import train
from tests.tuning.synthetic_labels import made_up
from tests.tuning.net.test_train import QUICK

with init_distributed("cpu") as mine:
    weights = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))]
    weights[0].grad = torch.full((2,), 2.0 + mine.rank)
    if mine.rank:
        weights[1].grad = torch.ones(3)
    mine.average_gradients(weights)
    assert weights[0].grad.tolist() == [2.5, 2.5] and weights[1].grad.tolist() == [0.5, 0.5, 0.5]
    assert mine.all_reduce_mean(torch.tensor(float(mine.rank))) == 0.5
    assert mine.all_reduce_min([mine.rank, -mine.rank]) == [0, -1]
    try:
        mine.check_equal("the rank", mine.rank)
    except RunError as error:
        assert "differ in the rank: 0 to 1" in str(error)
    else:
        raise AssertionError("they differ")
    folder = Path(sys.argv[1])
    half = train(QUICK, made_up(), folder / "run").net
    torch.save(half.state_dict(), folder / f"{mine.rank}.pt")
    # Once more, from the checkpoint: nothing is left to be done.
    again = train(QUICK, made_up(), folder / "run").net
    assert torch.equal(again.head, half.head)
"""


@pytest.mark.slow
def test_two_processes_learn_one_network(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, "-c", TWO, str(tmp_path)], cwd=ROOT, env=shared | {"RANK": str(rank)},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        for process in started:
            _, told = process.communicate(timeout=120)
            assert process.returncode == 0, told
    finally:
        for process in started:
            process.kill()
            process.communicate()
    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)
