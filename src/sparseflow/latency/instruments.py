"""What a collection measures with: background load, readings of load, and runs of a model."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Protocol

from sparseflow.core.extras import require
from sparseflow.core.load import Stressor
from sparseflow.core.telemetry.readers import open_reader
from sparseflow.core.telemetry.schema import MIN_WINDOW_S
from sparseflow.errors import DeviceError, InputError, SparseFlowError
from sparseflow.latency import session, stream
from sparseflow.latency.campaign import Config, Item
from sparseflow.latency.runner import Runner, Timing
from sparseflow.latency.stream import Plug

CALM_S = 0.5
"""What load is averaged over before a block, while the measured work rests."""


class Instruments(Protocol):
    """What `collect` measures with."""

    def environment(self) -> dict[str, Any]:
        """The circumstances, with a `device_key` that stays the same as long as samples stay comparable."""
        ...

    @contextmanager
    def block(self, level: float) -> Iterator[Mapping[str, Any]]:
        """Load at `level` while the body runs; yields columns that hold for each of its rows."""
        ...

    def measure(self, item: Item) -> dict[str, Any]:
        """Columns of one measurement. What fails because of the item is told in the column `error`."""
        ...


class Bench:
    """The instruments of this machine. As a context manager it puts back what it changed.

    Args:
        config: Settings of the collection.

    Raises:
        InputError: `cpus` names a CPU that this process may not use.
        DeviceError, MissingExtraError: The source of load readings is not there.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._stack = ExitStack()
        self._stressor: Stressor | None = None
        self._plug: Plug | None = None
        self._kept: OrderedDict[str, Runner] = OrderedDict()
        before = os.sched_getaffinity(0)
        self._cpus = sorted(before if config.cpus is None else set(config.cpus))
        if not self._cpus or not before.issuperset(self._cpus):
            raise InputError(f"`cpus` (={config.cpus}) must be among those to be used here: {sorted(before)}")
        # Measured work and load must meet: on different CPUs neither would feel the other.
        os.sched_setaffinity(0, self._cpus)
        self._stack.callback(os.sched_setaffinity, 0, before)
        try:
            self._reader = open_reader(**config.telemetry.model_dump(), device=f"cuda:{config.gpu}")
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._quiet()
        self._stack.close()

    def environment(self) -> dict[str, Any]:
        from sparseflow.core.environment import collect_environment

        on_gpu = session.short_name(self._config.provider) == "cuda"
        found = collect_environment(f"cuda:{self._config.gpu}" if on_gpu else "cpu", seed=self._config.seed)
        return found | {"onnxruntime": require("onnxruntime", "latency").__version__}

    @contextmanager
    def block(self, level: float) -> Iterator[Mapping[str, Any]]:
        """Load at `level`, steady and then held.

        Raises:
            RunError: The load does not reach the level, or ended.
            DeviceError: The device of the load or a reading is not there.
        """
        if level == 0.0:
            self._quiet()
            yield self._calm() | {"stress_alone": 0.0}
            return
        stressor = self._loaded(level)
        alone = stressor.wait_until_steady(self._config.steady_timeout_s)
        calm = self._calm()
        with stressor.hold_duty():
            yield calm | {"stress_alone": round(alone, 4)}

    def measure(self, item: Item) -> dict[str, Any]:
        config = self._config
        row: dict[str, Any] = {"start_s": time.time(), "error": None}
        try:
            runner = self._runner(item)
            warmup_ms = runner.warm_up(config.warmup)
            calls = self._calls(runner)
        except DeviceError:
            raise
        except (SparseFlowError, MemoryError) as error:
            return row | {"end_s": time.time(), "error": f"{type(error).__name__}: {error}"}
        watch, begin_s = self._reader.start(), time.monotonic()
        try:
            timing = runner.measure(
                warmup=0,
                loops=config.loops,
                min_time_s=config.min_time_s,
                max_time_s=config.max_time_s,
                calls_per_sample=calls,
            )
        except DeviceError:
            raise
        except (SparseFlowError, MemoryError) as error:
            return row | {"end_s": time.time(), "error": f"{type(error).__name__}: {error}"}
        end_s = time.monotonic()
        # A watch that ends at the limit to a hair must not fail for it.
        time.sleep(max(0.0, 1.02 * MIN_WINDOW_S - (end_s - begin_s)))
        load = watch.stop()
        stress = 0.0 if self._stressor is None else self._stressor.measure_share_between(begin_s, end_s)
        return (
            row
            | columns(timing)
            | {"warmup": config.warmup, "warmup_ms": round(warmup_ms, 4)}
            | {"stress_achieved": round(stress, 4)}
            | load.to_row()
            | self._streamed(item, runner, timing, warmup_ms)
        )

    def _runner(self, item: Item) -> Runner:
        config = self._config
        runner = self._kept.pop(item.id, None) or Runner(
            item.path,
            config.provider,
            threads=config.threads,
            conv_search=config.conv_search,
            gpu=config.gpu,
            seed=config.seed,
        )
        if config.keep:
            self._kept[item.id] = runner
            while len(self._kept) > config.keep:
                self._kept.popitem(last=False)
        return runner

    def _streamed(self, item: Item, runner: Runner, timing: Timing, warmup_ms: float) -> dict[str, Any]:
        """What a kernel costs in a stream; only at rest, where the plug has the device to itself.

        What fails in there is told in the column `stream_error`: the latency alone stays good.
        """
        config = self._config
        if not config.copies or not runner.is_kernel or self._stressor is not None:
            return {}
        alone_ms = timing.quantile_ms(0.5)
        slowest_ms = max(warmup_ms - config.warmup * alone_ms, max(timing.latency_ms) - alone_ms)
        try:
            if self._plug is None:
                self._plug = Plug(
                    config.provider, gpu=config.gpu, threads=config.threads, conv_search=config.conv_search
                )
            return stream.measure(
                item.path,
                self._plug,
                inputs=runner.inputs,
                copies=config.copies,
                alone_ms=alone_ms,
                setup_ms=max(slowest_ms, 0.0),
            ).to_row()
        except DeviceError:
            raise
        except (SparseFlowError, MemoryError) as error:
            return {"stream_error": f"{type(error).__name__}: {error}"}

    def _calls(self, runner: Runner) -> int:
        """Runs a sample, from the quickest of a few: a slow one was interrupted."""
        if self._config.warmup == 0:
            return 1  # nothing runs before the first sample
        run_s = min(runner.warm_up(1) for _ in range(3)) / 1e3
        return max(1, round(self._config.min_time_s / (run_s * self._config.max_samples)))

    def _loaded(self, level: float) -> Stressor:
        if self._stressor is None:
            config = self._config
            self._stressor = Stressor(
                config.stressor, level, device=f"cuda:{config.gpu}", cpus=self._cpus, seed=config.seed
            )
            try:
                self._stressor.start()
            except BaseException:
                self._stressor = None
                raise
        else:
            self._stressor.set_level(level)
        return self._stressor

    def _quiet(self) -> None:
        # Idle means that there is no such process, not one that rests.
        if self._stressor is not None:
            self._stressor.close()
            self._stressor = None

    def _calm(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in self._reader.read(CALM_S).to_row("before_").items()
            if isinstance(value, float)
        }


def columns(timing: Timing) -> dict[str, Any]:
    """A timing as columns of a row; every sample in `samples_ns`."""
    return {
        "latency_ms": timing.mean_ms,
        "p50_ms": timing.quantile_ms(0.5),
        "p95_ms": timing.quantile_ms(0.95),
        "p99_ms": timing.quantile_ms(0.99),
        "min_ms": min(timing.latency_ms),
        "max_ms": max(timing.latency_ms),
        "cpu_ratio": round(timing.cpu_ratio, 4),
        "loops": len(timing.latency_ms),
        "calls_per_sample": timing.calls_per_sample,
        "start_s": timing.start_s,
        "end_s": timing.end_s,
        "provider": timing.provider,
        "graph_level": timing.level,
        "threads": timing.threads,
        "conv_search": timing.conv_search,
        "ort_version": timing.ort_version,
        "samples_ns": [round(value * 1e6) for value in timing.latency_ms],
    }
