"""One collection spread over several devices of one kind: the GPUs of this machine, or a Ray cluster.

::

    out/part-00, out/part-01, …    a collection each; `latency train out/part-*` learns from all of them

Every part has its share of the items and the same reference, so that all are set right for drift alike. On
a cluster `out` must be a folder that all machines share. Each part is resumable as any collection is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from sparseflow.core.parallel import map_unordered
from sparseflow.errors import InputError, SparseFlowError
from sparseflow.latency.campaign import MODEL_OP, Config, Item, find_items, pick_reference
from sparseflow.latency.collect import Collected, collect, rows_of

Progress = Callable[[str, float], None]

_CPUS_OF_A_PART = 1.0
"""What a part asks of its machine; give the machines of a cluster no more CPUs than devices to measure on."""

_EVERY_S = 5.0


def fan_out(
    config: Config,
    out: Path | str,
    *,
    gpus: Sequence[int] = (),
    cluster: str | None = None,
    parts: int | None = None,
    progress: Progress | None = None,
) -> list[Collected]:
    """Measure everything that the settings name, in parts at the same time.

    Args:
        config: The settings.
        out: Folder that gets a folder a part.
        gpus: Numbers of GPUs of this machine that get a part each.
        cluster: Address of a Ray cluster, `"auto"` for the one that this machine belongs to.
        parts: Parts on the cluster.
        progress: Called with (what is done, fraction done), from a thread of its own.

    Raises:
        InputError: Neither GPUs nor a cluster with parts are named, or there are fewer items than parts.
        DeviceError: The cluster or a device is not there.
        Exception: What `collect` raises; the other parts stay as far as they are.
    """
    if bool(gpus) == (cluster is not None) or (cluster is not None) != (parts is not None):
        raise InputError("name either `gpus`, or a `cluster` and how many `parts` it gets")
    if gpus and config.provider != "cuda":
        raise InputError("`gpus` needs `provider: cuda`; CPUs of one machine would disturb each other")
    count = len(gpus) if gpus else (parts or 0)
    tasks = [
        (part.model_copy(update={"gpu": gpus[place]}) if gpus else part, Path(out) / f"part-{place:02d}")
        for place, part in enumerate(split(config, count))
    ]
    with _watched([folder for _, folder in tasks], progress):
        found = dict(
            map_unordered(
                _collect_part,
                tasks,
                workers=max(len(gpus), 1),
                cluster=cluster,
                cpus_per_task=_CPUS_OF_A_PART,
                gpus_per_task=1.0 if config.provider == "cuda" else 0.0,
            )
        )
    return [found[place] for place in sorted(found)]


def split(config: Config, parts: int) -> list[Config]:
    """The settings of each part.

    Raises:
        InputError: There are fewer items than parts.
    """
    items = tuple(find_items(config))
    if not 1 <= parts <= len(items):
        raise InputError(f"{len(items)} items cannot be split into {parts} parts")
    reference = items[pick_reference(items, config.reference)]
    return [_part(config, [*items[place::parts], reference], reference) for place in range(parts)]


@contextmanager
def _watched(folders: list[Path], progress: Progress | None) -> Iterator[None]:
    """Tell how many rows the parts have, while they are measured by others."""
    if progress is None:
        yield
        return

    def tell() -> None:
        rows = [rows_of(folder) for folder in folders]
        # A part that has no plan yet is thought to be as long as the others.
        planned = [count for _, count in rows if count]
        if planned:
            whole = sum(planned) * len(folders) / len(planned)
            done = sum(count for count, _ in rows)
            progress(f"{done} rows in {len(folders)} parts", min(done / whole, 1.0))

    def watch() -> None:
        while not over.wait(_EVERY_S):
            # What cannot be read now, the part itself will say.
            with suppress(OSError, SparseFlowError):
                tell()

    over = threading.Event()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    tell()


def _part(config: Config, items: list[Item], reference: Item) -> Config:
    return config.model_copy(
        update={
            "kernels": sorted({Path(item.path) for item in items if item.op != MODEL_OP}),
            "models": sorted({Path(item.path) for item in items if item.op == MODEL_OP}),
            "reference": reference.id,
        }
    )


def _collect_part(task: tuple[Config, Path]) -> Collected:
    config, folder = task
    return collect(config, folder)
