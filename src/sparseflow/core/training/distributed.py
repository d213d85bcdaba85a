"""Data-parallel training with torch.distributed.

torchrun starts the processes and describes them in environment variables. Gradients are averaged in one
all-reduce after the backward pass, not by `DistributedDataParallel` during it: a process whose batch does not
fit into memory can then retry while the others wait, and our networks are too small to gain from overlap.
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

# Other ranks wait for rank 0 while it evaluates and writes files.
_TIMEOUT = datetime.timedelta(hours=12)


@dataclass(frozen=True, kw_only=True)
class DistributedContext:
    """Rank and device of this process, and the collectives that trainings use.

    Attributes:
        rank: Rank of this process; rank 0 writes files.
        world_size: Number of processes.
        device: Device that this process computes on.
    """

    rank: int
    world_size: int
    device: torch.device

    @property
    def cuda_devices(self) -> list[torch.device]:
        """The GPU of this process, as the list that `torch.random.fork_rng` takes; empty on a CPU."""
        return [self.device] if self.device.type == "cuda" else []

    def average_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average gradients over all processes in place; a missing gradient counts as 0."""
        if self.world_size == 1:
            return
        parameters = list(parameters)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        distributed.all_reduce(flat)
        flat /= self.world_size
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, mean in zip(gradients, flat.split(sizes), strict=True):
            gradient.copy_(mean.view_as(gradient))

    def all_reduce_mean(self, value: Tensor) -> Tensor:
        """Mean of a scalar tensor over all processes, detached."""
        if self.world_size == 1:
            return value.detach()
        total = value.detach().clone()
        distributed.all_reduce(total)
        return total / self.world_size

    def all_reduce_min(self, values: list[int]) -> list[int]:
        """Elementwise minimum over all processes."""
        if self.world_size == 1 or not values:
            return values
        minimum = torch.tensor(values, device=self.device)
        distributed.all_reduce(minimum, distributed.ReduceOp.MIN)
        return minimum.tolist()

    def barrier(self) -> None:
        """Wait until all processes reach this call."""
        if self.world_size > 1:
            distributed.barrier()

    def check_equal(self, name: str, value: int) -> None:
        """Raise RunError if `value`, described by `name`, differs between processes."""
        low, high = self.all_reduce_min([value, -value])
        if low != -high:
            raise RunError(
                f"processes differ in {name}: {low} to {-high}; they must share one directory and data"
            )


def round_robin_device(device: str, index: int) -> str:
    """Device of the `index`-th of several concurrent trainings; `"cuda"` cycles through all GPUs."""
    if device == "cuda" and torch.cuda.device_count() > 1:
        return f"cuda:{index % torch.cuda.device_count()}"
    return device


@contextmanager
def init_distributed(device: torch.device | str) -> Iterator[DistributedContext]:
    """Join the process group that torchrun describes; without torchrun, a group of one process.

    Args:
        device: Device to compute on; `"cuda"` under torchrun is the GPU of the local rank.
    """
    target = torch.device(device)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if target.type == "cuda" and target.index is not None:
        torch.cuda.set_device(target)
    if world_size == 1:
        yield DistributedContext(rank=0, world_size=1, device=target)
        return
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(target)
    owns_group = not distributed.is_initialized()
    if owns_group:
        distributed.init_process_group("nccl" if target.type == "cuda" else "gloo", timeout=_TIMEOUT)
    try:
        yield DistributedContext(
            rank=distributed.get_rank(), world_size=distributed.get_world_size(), device=target
        )
    finally:
        if owns_group:
            distributed.destroy_process_group()
