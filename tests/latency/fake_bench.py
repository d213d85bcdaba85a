"""Instruments with deterministic readings, and a program that collects with them."""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparseflow.latency.measure.collection import collect
from sparseflow.latency.measure.config import CollectionConfig, load_collection_config
from sparseflow.latency.measure.plan import Target


class FakeBench:
    """Instruments that measure nothing.

    A measurement takes `pause_s`; targets with `broken` in their id fail. After `max_rows` measurements it
    waits until it is killed.
    """

    def __init__(self, config: CollectionConfig, pause_s: float = 0.0, max_rows: int | None = None) -> None:
        self.config = config
        self.pause_s = pause_s
        self.max_rows = max_rows
        self.level: float | None = None
        self.visited: list[float] = []
        self.measured: list[tuple[float, str]] = []
        self.device_key = "fake-0"

    def environment(self) -> dict[str, Any]:
        return {"device_key": self.device_key, "time": time.time()}

    @contextmanager
    def block(self, level: float) -> Iterator[Mapping[str, Any]]:
        self.level = level
        self.visited.append(level)
        try:
            yield {"stress_alone": level, "before_busy": level}
        finally:
            self.level = None

    def measure(self, target: Target) -> dict[str, Any]:
        assert self.level is not None
        time.sleep(self.pause_s if len(self.measured) != self.max_rows else 3600.0)
        self.measured.append((self.level, target.id))
        if "broken" in target.id:
            return {"start_s": 1.0, "end_s": 2.0, "error": "RunError: it is broken"}
        base = 1000 + zlib.crc32(target.id.encode()) % 1000
        samples = [round(base * (1.0 + self.level)) + n for n in range(5)]
        return {
            "start_s": 1.0,
            "end_s": 2.0,
            "error": None,
            "latency_ms": sum(samples) / len(samples) / 1e6,
            "p50_ms": samples[2] / 1e6,
            "p95_ms": samples[4] / 1e6,
            "samples_ns": samples,
            "stress_achieved": self.level,
            "load_timestamp_s": 1.0,
            "load_source": "fake",
            "load_busy": self.level,
        }


def main() -> None:
    """Collect with the settings of a file: CONFIG OUT PAUSE_S MAX_ROWS."""
    config, out, pause_s, max_rows = sys.argv[1:]
    read = load_collection_config(config)
    collect(read, Path(out), instruments=FakeBench(read, float(pause_s), int(max_rows)))


if __name__ == "__main__":
    main()
