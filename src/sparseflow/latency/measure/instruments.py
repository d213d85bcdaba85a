"""Instruments of a collection: background load, load readings and model runs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any, Protocol

from sparseflow.core.load.stressor import Stressor
from sparseflow.core.telemetry.readers import open_reader
from sparseflow.core.telemetry.schema import MIN_WINDOW_S
from sparseflow.errors import DeviceError, InputError, SparseFlowError
from sparseflow.latency.graph import session
from sparseflow.latency.measure import stream
from sparseflow.latency.measure.config import CollectionConfig
from sparseflow.latency.measure.plan import Target
from sparseflow.latency.measure.runner import Runner, Timing
from sparseflow.latency.measure.stream import BlockingKernel

IDLE_WINDOW_S = 0.5
"""Window of the load reading before a block, while the measured work is idle."""


class Instruments(Protocol):
    """Measurement interface of `collect`."""

    def environment(self) -> dict[str, Any]:
        """Return the environment, with a `device_key` that is constant while samples are comparable."""
        ...

    @contextmanager
    def block(self, level: float) -> Iterator[Mapping[str, Any]]:
        """Hold a load of `level`, other work included; yields columns for each row of the block."""
        ...

    def measure(self, target: Target) -> dict[str, Any]:
        """Return the columns of one measurement; failures of the target are in the column `error`."""
        ...


class LocalInstruments:
    """Instruments of this machine. The context manager restores the CPU affinity and stops the load.

    Args:
        config: Settings of the collection.

    Raises:
        InputError: `cpus` contains a CPU that this process may not use.
        DeviceError, MissingExtraError: The source of load readings is not available.
    """

    def __init__(self, config: CollectionConfig) -> None:
        self._config = config
        self._stack = ExitStack()
        self._stressor: Stressor | None = None
        self._blocker: BlockingKernel | None = None
        self._get_runner = lru_cache(maxsize=config.keep)(self._open_runner)
        allowed_cpus = os.sched_getaffinity(0)
        self._cpus = sorted(allowed_cpus if config.cpus is None else set(config.cpus))
        if not self._cpus or not allowed_cpus.issuperset(self._cpus):
            raise InputError(
                f"`cpus` (={config.cpus}) must be a non-empty subset of the usable CPUs: "
                f"{sorted(allowed_cpus)}"
            )
        # Work and load must share CPUs to contend for them.
        os.sched_setaffinity(0, self._cpus)
        self._stack.callback(os.sched_setaffinity, 0, allowed_cpus)
        try:
            self._reader = open_reader(**config.telemetry.model_dump(), device=f"cuda:{config.gpu}")
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> LocalInstruments:
        return self

    def __exit__(self, *exception: object) -> None:
        self._get_runner.cache_clear()
        self._stop_load()
        self._stack.close()

    def environment(self) -> dict[str, Any]:
        from sparseflow.core.environment import collect_environment

        on_gpu = session.get_device_type(self._config.provider) == "cuda"
        environment = collect_environment(
            f"cuda:{self._config.gpu}" if on_gpu else "cpu", seed=self._config.seed
        )
        return environment | {"onnxruntime": session.get_runtime_version(self._config.provider)}

    @contextmanager
    def block(self, level: float) -> Iterator[Mapping[str, Any]]:
        """Hold a steady load of `level`, to which other work on a CPU counts.

        Raises:
            RunError: The load ended.
            DeviceError: The device of the load or of a reading is not available.
        """
        if level == 0.0:
            self._stop_load()
            yield self._read_idle_load() | {"stress_alone": 0.0}
            return
        stressor = self._start_load()
        achieved = stressor.reach_load(level, self._config.steady_timeout_s)
        idle_load = self._read_idle_load()
        with stressor.hold_duty():
            yield idle_load | {"stress_alone": round(achieved, 4)}

    def measure(self, target: Target) -> dict[str, Any]:
        config = self._config
        row: dict[str, Any] = {"start_s": time.time(), "error": None}
        try:
            runner = self._get_runner(target)
            warmup_ms = runner.warm_up(config.warmup)
            calls = self._choose_calls_per_sample(runner)
            recording, start_s = self._reader.start(), time.monotonic()
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
        # Margin over the minimum window of a recording.
        time.sleep(max(0.0, 1.02 * MIN_WINDOW_S - (end_s - start_s)))
        load = recording.stop()
        achieved = 0.0 if self._stressor is None else self._stressor.measure_share_between(start_s, end_s)
        return (
            row
            | timing.to_columns()
            | {"warmup": config.warmup, "warmup_ms": round(warmup_ms, 4)}
            | {"stress_achieved": round(achieved, 4)}
            | load.to_row()
            | self._measure_stream(target, runner, timing, warmup_ms)
        )

    def _open_runner(self, target: Target) -> Runner:
        config = self._config
        return Runner(
            target.path,
            config.provider,
            threads=config.threads,
            conv_search=config.conv_search,
            shapes=target.shapes,
            inputs=target.select_values(config.inputs),
            gpu=config.gpu,
            seed=config.seed,
        )

    def _measure_stream(
        self, target: Target, runner: Runner, timing: Timing, warmup_ms: float
    ) -> dict[str, Any]:
        """Measure a kernel in a stream, only while idle, when the blocking kernel has the whole device.

        Failures are reported in the column `stream_error`; the isolated latency remains valid.
        """
        config = self._config
        if not config.copies or not runner.is_kernel or self._stressor is not None:
            return {}
        isolated_ms = timing.quantile_ms(0.5)
        slowest_ms = max(warmup_ms - config.warmup * isolated_ms, max(timing.latency_ms) - isolated_ms)
        try:
            if self._blocker is None:
                self._blocker = BlockingKernel(
                    config.provider, gpu=config.gpu, threads=config.threads, conv_search=config.conv_search
                )
            return stream.measure_stream(
                target.path,
                self._blocker,
                inputs=runner.inputs,
                copies=config.copies,
                isolated_ms=isolated_ms,
                setup_ms=max(slowest_ms, 0.0),
            ).to_row()
        except DeviceError:
            raise
        except (SparseFlowError, MemoryError) as error:
            return {"stream_error": f"{type(error).__name__}: {error}"}

    def _choose_calls_per_sample(self, runner: Runner) -> int:
        """Choose the runs per sample from the fastest of three runs; slower ones were interrupted."""
        if self._config.warmup == 0:
            return 1  # no runs before the first sample
        run_s = min(runner.warm_up(1) for _ in range(3)) / 1e3
        return max(1, round(self._config.min_time_s / (run_s * self._config.max_samples)))

    def _start_load(self) -> Stressor:
        if self._stressor is None:
            config = self._config
            stressor = Stressor(
                config.stressor, 0.0, device=f"cuda:{config.gpu}", cpus=self._cpus, seed=config.seed
            )
            stressor.start()
            self._stressor = stressor
        return self._stressor

    def _stop_load(self) -> None:
        # Idle means without load processes, not with paused ones.
        if self._stressor is not None:
            self._stressor.close()
            self._stressor = None

    def _read_idle_load(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in self._reader.read(IDLE_WINDOW_S).to_row("before_").items()
            if isinstance(value, float)
        }
