"""CUDA graphs by key, with a fallback to eager execution.

A body is a function without arguments and results that always reads and writes the same tensors. Its first
run is eager with synchronizing operations forbidden, which detects bodies that cannot be captured; then it is
captured, and replayed from then on. On a CPU, and if the capture fails, the body itself runs each time.

All graphs share one memory pool and are replayed one after another, so nothing allocated within a body
outlives its replay: results are copied into tensors outside.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch

_LOG = logging.getLogger(__name__)


class GraphCache:
    """CUDA graphs of one device, by key.

    Args:
        device: The device.
        enabled: Whether to capture; never on a CPU.

    Attributes:
        enabled: Whether bodies are captured.
    """

    def __init__(self, device: torch.device | str, *, enabled: bool = True) -> None:
        self.device = torch.device(device)
        self.enabled = enabled and self.device.type == "cuda"
        self._graphs: dict[Hashable, Any] = {}
        self._reasons: dict[Hashable, str] = {}
        self._pool: Any = None
        self._stream: Any = None

    @property
    def captured(self) -> tuple[Hashable, ...]:
        """Keys with a captured graph."""
        return tuple(self._graphs)

    @property
    def failures(self) -> Mapping[Hashable, str]:
        """Keys whose capture failed, with the reason."""
        return MappingProxyType(self._reasons)

    def run(self, key: Hashable, body: Callable[[], None]) -> None:
        """Run a body or replay its graph.

        Args:
            key: Identifies the tensors and the work.
            body: The work; must have the same effect when run twice.
        """
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
        elif not self.enabled or key in self._reasons:
            body()
        else:
            self._run_and_capture(key, body)

    def _run_and_capture(self, key: Hashable, body: Callable[[], None]) -> None:
        try:
            with _forbid_sync():
                body()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # If the work itself fails, it fails again.
            body()
            self._mark_failed(key, error)
            return
        try:
            self._capture(key, body)
        except torch.OutOfMemoryError as error:
            # The work succeeded; only the capture ran out of memory.
            self._mark_failed(key, error)
        except RuntimeError as error:
            self._mark_failed(key, error)

    def _capture(self, key: Hashable, body: Callable[[], None]) -> None:
        # Libraries require a warm-up on a side stream before a capture.
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            body()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            body()
        self._graphs[key] = graph

    def _mark_failed(self, key: Hashable, error: Exception) -> None:
        self._reasons[key] = f"{type(error).__name__}: {error}".splitlines()[0]
        _LOG.warning("%s is not captured and runs eagerly: %s", key, self._reasons[key])


@contextmanager
def _forbid_sync() -> Iterator[None]:
    """Context in which synchronizing operations raise."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning that this is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
