"""Latency and bandwidth of the link between two processes, from round trips of several sizes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import distributed

from sparseflow.codesign.execution.links import call_peer
from sparseflow.codesign.hardware.chips import LinkType
from sparseflow.errors import InputError

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26)


def probe(
    device: torch.device | str,
    *,
    name: str = "measured",
    sizes: Sequence[int] = SIZES,
    repeats: int = 15,
    trips: int = 4,
) -> tuple[LinkType, dict[int, list[float]]]:
    """Measure the link between the first two processes; all joined processes call it and get the same result.

    On GPUs messages follow each other on the device, as those of a pipeline do; half of a trip there and back
    is one way. Latency and bandwidth are fitted to the medians so that relative errors are small.

    Args:
        device: Of this process.
        name: Of the link.
        sizes: Bytes of messages.
        repeats: Samples of each size, after two that do not count.
        trips: There and back in a sample.

    Returns:
        The link, and size in bytes -> all samples, ms one way.

    Raises:
        InputError: Fewer than two processes were joined, there are fewer than two sizes (latency and
            bandwidth cannot be told apart by one), or a number is below 1.
        LinkError: The other one cannot be reached.
    """
    if len(set(sizes)) < 2 or min(*sizes, repeats, trips) < 1:
        raise InputError(
            f"`sizes` (={list(sizes)}) must be two or more different ones, and they, `repeats` (={repeats}) "
            f"and `trips` (={trips}) at least 1"
        )
    if not distributed.is_initialized() or distributed.get_world_size() < 2:
        raise InputError("a link needs two processes: run this within `joined`, or by `launch`")
    location, rank = torch.device(device), distributed.get_rank()
    samples: dict[int, list[float]] = {}
    backend = "nccl" if location.type == "cuda" else "gloo"
    group: Any = distributed.new_group(
        [0, 1], backend=backend, device_id=location if backend == "nccl" else None
    )
    try:
        if rank < 2:
            samples = {
                size: [_one_way_ms(location, rank, group, size, trips) for _ in range(repeats + 2)][2:]
                for size in sizes
            }
    finally:
        if rank < 2:
            distributed.destroy_process_group(group)
    record = [samples]
    call_peer("the probe", lambda: distributed.broadcast_object_list(record, 0))
    samples = record[0]
    times = np.array([statistics.median(values) for values in samples.values()])
    rows = np.stack([np.ones(len(samples)), np.array(list(samples), dtype=np.float64)], 1) / times[:, None]
    fixed, item = np.linalg.lstsq(rows, np.ones(len(samples)), rcond=None)[0]
    link = LinkType(
        name=name, bandwidth=1e3 / max(float(item), 1e-15), latency_us=max(1e3 * float(fixed), 0.0),
        source="measured",
    )  # fmt: skip
    return link, samples


def _one_way_ms(device: torch.device, rank: int, group: Any, size: int, trips: int) -> float:
    value = torch.zeros(size, dtype=torch.uint8, device=device)
    pass_on = (distributed.send, distributed.recv)

    def trip() -> None:
        pass_on[rank](value, 1 - rank, group)
        pass_on[1 - rank](value, 1 - rank, group)

    call_peer("the probe", trip)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(trips):
        call_peer("the probe", trip)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - start) / (2 * trips)
