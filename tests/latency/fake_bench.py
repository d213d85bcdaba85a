"""Instruments whose readings follow from what is measured, and a program that collects with them."""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparseflow.latency.campaign import Config, Item, read_config
from sparseflow.latency.collect import collect


class FakeBench:
    """Measures nothing. Takes `pause_s` a measurement; items whose id holds `broken` fail.

    After `most` measurements it only waits to be killed.
    """

    def __init__(self, config: Config, pause_s: float = 0.0, most: int | None = None) -> None:
        self.config = config
        self.pause_s = pause_s
        self.most = most
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

    def measure(self, item: Item) -> dict[str, Any]:
        assert self.level is not None
        time.sleep(self.pause_s if len(self.measured) != self.most else 3600.0)
        self.measured.append((self.level, item.id))
        if "broken" in item.id:
            return {"start_s": 1.0, "end_s": 2.0, "error": "RunError: it is broken"}
        base = 1000 + zlib.crc32(item.id.encode()) % 1000
        samples = [round(base * (1.0 + self.level)) + n for n in range(5)]
        return {
            "start_s": 1.0,
            "end_s": 2.0,
            "error": None,
            "latency_ms": sum(samples) / len(samples) / 1e6,
            "p50_ms": samples[2] / 1e6,
            "samples_ns": samples,
            "stress_achieved": self.level,
            "load_timestamp_s": 1.0,
            "load_source": "fake",
            "load_busy": self.level,
        }


def main() -> None:
    """Collect by the settings of one file into a folder.

    With a pause of so many seconds a measurement, and so many measurements until it only waits.
    """
    config, out, pause_s, most = sys.argv[1:]
    read = read_config(config)
    collect(read, Path(out), instruments=FakeBench(read, float(pause_s), int(most)))


if __name__ == "__main__":
    main()
