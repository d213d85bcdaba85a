"""Training by several processes: each draws its own batches, and gradients are averaged.

torchrun starts the processes and tells them of each other by environment variables. Gradients are
averaged in one piece after the backward pass, not by `DistributedDataParallel` during it: a process whose
batch did not fit into memory can then try again while the others wait, and our networks are too small for
overlap to matter.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from sparseflow.errors import RunError

_PATIENCE = datetime.timedelta(hours=12)
"""That processes wait for the first one, which judges and writes alone."""


@dataclass(frozen=True, kw_only=True)
class DistributedContext:
    """This process among those that train together.

    Attributes:
        rank: Its number; the first, 0, writes files.
        world_size: How many there are.
        device: What it computes on.
    """

    rank: int
    world_size: int
    device: torch.device

    @property
    def cuda_devices(self) -> list[torch.device]:
        """Its GPU, if it computes on one."""
        return [self.device] if self.device.type == "cuda" else []

    def average_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average the gradients over all processes; without one it counts as 0."""
        if self.world_size == 1:
            return
        every = list(parameters)
        for each in every:
            if each.grad is None:
                each.grad = torch.zeros_like(each)
        gradients = [each.grad for each in every if each.grad is not None]
        flat = torch.cat([each.flatten() for each in gradients])
        distributed.all_reduce(flat)
        flat /= self.world_size
        for each, mean in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            each.copy_(mean.view_as(each))

    def all_reduce_mean(self, value: Tensor) -> Tensor:
        """The mean of a scalar over all processes."""
        if self.world_size == 1:
            return value.detach()
        total = value.detach().clone()
        distributed.all_reduce(total)
        return total / self.world_size

    def all_reduce_min(self, values: list[int]) -> list[int]:
        """Number by number, the least that any process has."""
        if self.world_size == 1 or not values:
            return values
        found = torch.tensor(values, device=self.device)
        distributed.all_reduce(found, distributed.ReduceOp.MIN)
        return found.tolist()

    def barrier(self) -> None:
        """Until all processes have come here."""
        if self.world_size > 1:
            distributed.barrier()

    def check_equal(self, what: str, value: int) -> None:
        """Raises RunError where processes differ in what they should agree on."""
        low, high = self.all_reduce_min([value, -value])
        if low != -high:
            raise RunError(
                f"processes differ in {what}: {low} to {-high}; they must share one folder and data"
            )


def round_robin_device(device: str, number: int) -> str:
    """The device of one of many trainings at the same time: `"cuda"` is every GPU in its turn."""
    several = device == "cuda" and torch.cuda.device_count() > 1
    return f"cuda:{number % torch.cuda.device_count()}" if several else device


@contextmanager
def init_distributed(device: torch.device | str) -> Iterator[DistributedContext]:
    """This process among those that torchrun started; alone where none did.

    Args:
        device: What to compute on; `"cuda"` stands for each process' own GPU.
    """
    wanted = torch.device(device)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if wanted.type == "cuda" and wanted.index is not None:
        torch.cuda.set_device(wanted)
    if size == 1:
        yield DistributedContext(rank=0, world_size=1, device=wanted)
        return
    if wanted.type == "cuda" and wanted.index is None:
        wanted = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(wanted)
    own = not distributed.is_initialized()
    if own:
        distributed.init_process_group("nccl" if wanted.type == "cuda" else "gloo", timeout=_PATIENCE)
    try:
        yield DistributedContext(
            rank=distributed.get_rank(), world_size=distributed.get_world_size(), device=wanted
        )
    finally:
        if own:
            distributed.destroy_process_group()
