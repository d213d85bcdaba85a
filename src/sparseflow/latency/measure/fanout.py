"""One collection split over several devices of one kind: GPUs of this machine, or a Ray cluster.

::

    out/part-00, out/part-01, …    one collection each; `latency train out/part-*` uses all of them

Every part has a share of the targets and the same reference, so that drift is corrected equally. On a
cluster, `out_dir` must be a directory that all machines share. Each part can be resumed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from sparseflow.core.parallel import map_unordered
from sparseflow.core.progress import Progress
from sparseflow.errors import InputError, SparseFlowError
from sparseflow.latency.measure.collection import CollectionSummary, collect, count_rows
from sparseflow.latency.measure.config import CollectionConfig
from sparseflow.latency.measure.plan import MODEL_OP, find_targets, select_reference

_CPUS_PER_PART = 1.0
"""CPUs that a part requests. Give each cluster machine at most as many CPUs as devices to measure."""

_POLL_INTERVAL_S = 5.0


def fan_out(
    config: CollectionConfig,
    out_dir: Path | str,
    *,
    gpus: Sequence[int] = (),
    cluster: str | None = None,
    parts: int | None = None,
    progress: Progress | None = None,
) -> list[CollectionSummary]:
    """Collect all targets of a configuration in concurrent parts.

    Args:
        config: Settings of the collection.
        out_dir: Directory for one directory per part.
        gpus: Indices of GPUs of this machine, one part each.
        cluster: Address of a Ray cluster; `"auto"` is this machine's.
        parts: Number of parts on the cluster.
        progress: Receives a message and the fraction done, from a separate thread.

    Raises:
        InputError: Neither GPUs nor a cluster with parts are given, or there are fewer targets than parts.
        DeviceError: The cluster or a device is not available.
        Exception: As `collect`; the other parts keep their rows.
    """
    if bool(gpus) == (cluster is not None) or (cluster is not None) != (parts is not None):
        raise InputError("specify either `gpus`, or `cluster` and `parts`")
    if gpus and config.provider != "cuda":
        raise InputError("`gpus` requires `provider: cuda`; collections on one CPU would disturb each other")
    num_parts = len(gpus) if gpus else (parts or 0)
    tasks = [
        (part.model_copy(update={"gpu": gpus[index]}) if gpus else part, Path(out_dir) / f"part-{index:02d}")
        for index, part in enumerate(split_config(config, num_parts))
    ]
    with _report_progress([folder for _, folder in tasks], progress):
        results = dict(
            map_unordered(
                _collect_part,
                tasks,
                workers=max(len(gpus), 1),
                cluster=cluster,
                cpus_per_task=_CPUS_PER_PART,
                gpus_per_task=1.0 if config.provider == "cuda" else 0.0,
            )
        )
    return [results[index] for index in sorted(results)]


def split_config(config: CollectionConfig, num_parts: int) -> list[CollectionConfig]:
    """Split the settings of a collection into parts.

    Raises:
        InputError: There are fewer targets than parts.
    """
    targets = tuple(find_targets(config))
    if not 1 <= num_parts <= len(targets):
        raise InputError(f"cannot split {len(targets)} targets into {num_parts} parts")
    reference = targets[select_reference(targets, config.reference)]
    parts = []
    for index in range(num_parts):
        part = [*targets[index::num_parts], reference]
        paths = {
            name: sorted({Path(target.path) for target in part if (target.op == MODEL_OP) == are_models})
            for name, are_models in (("kernels", False), ("models", True))
        }
        known = {key for target in part for key in target.input_keys}
        named = {
            name: {key: value for key, value in getattr(config, name).items() if key in known}
            for name in ("shapes", "inputs")
        }
        parts.append(config.model_copy(update={**paths, **named, "reference": reference.id}))
    return parts


@contextmanager
def _report_progress(part_dirs: list[Path], progress: Progress | None) -> Iterator[None]:
    """Report the number of rows while other processes measure the parts."""
    if progress is None:
        yield
        return

    def report() -> None:
        counts = [count_rows(folder) for folder in part_dirs]
        # Parts without a plan are assumed to be as long as the others.
        planned = [count for _, count in counts if count]
        if planned:
            total_rows = sum(planned) * len(part_dirs) / len(planned)
            num_rows = sum(count for count, _ in counts)
            progress(f"{num_rows} rows in {len(part_dirs)} parts", min(num_rows / total_rows, 1.0))

    def poll() -> None:
        while not finished.wait(_POLL_INTERVAL_S):
            # The part itself reports errors.
            with suppress(OSError, SparseFlowError):
                report()

    finished = threading.Event()
    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
    report()


def _collect_part(task: tuple[CollectionConfig, Path]) -> CollectionSummary:
    config, folder = task
    return collect(config, folder)
