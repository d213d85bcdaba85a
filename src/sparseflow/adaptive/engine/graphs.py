"""Recorded work: a CUDA graph by key, or the same call without one.

A body is a function without arguments and without result that always reads and writes the same tensors. The
first time it simply runs, with synchronising operations forbidden, so that one which could not be recorded is
found out before the recording; then it is recorded, and from then on played. On a CPU, and where recording
fails, the body itself runs each time.

All graphs share one pool of memory and are played one after the other, so nothing that is allocated inside a
body outlives its play: results are copied into tensors made outside.
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
    """Bodies of one device, by key.

    Args:
        device: Where they work.
        enabled: Whether to record at all; never on a CPU.

    Attributes:
        enabled: Whether bodies are recorded.
    """

    def __init__(self, device: torch.device | str, *, enabled: bool = True) -> None:
        self.device = torch.device(device)
        self.enabled = enabled and self.device.type == "cuda"
        self._graphs: dict[Hashable, Any] = {}
        self._reasons: dict[Hashable, str] = {}
        self._pool: Any = None
        self._stream: Any = None

    @property
    def recorded(self) -> tuple[Hashable, ...]:
        """Keys that are played."""
        return tuple(self._graphs)

    @property
    def reasons(self) -> Mapping[Hashable, str]:
        """Keys whose recording failed, and why."""
        return MappingProxyType(self._reasons)

    def run(self, key: Hashable, body: Callable[[], None]) -> None:
        """Do a body's work.

        Args:
            key: The same for the same tensors and the same work.
            body: What to do; it must do the same when it is run twice.
        """
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
        elif not self.enabled or key in self._reasons:
            body()
        else:
            self._first(key, body)

    def _first(self, key: Hashable, body: Callable[[], None]) -> None:
        try:
            with _forbidden_to_wait():
                body()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # Where it is the work itself that fails, it fails again.
            body()
            self._refuse(key, error)
            return
        try:
            self._record(key, body)
        except torch.OutOfMemoryError as error:
            # The work itself is done; only the recording found no room.
            self._refuse(key, error)
        except RuntimeError as error:
            self._refuse(key, error)

    def _record(self, key: Hashable, body: Callable[[], None]) -> None:
        # Once more off the main stream, as libraries ask for before a capture.
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

    def _refuse(self, key: Hashable, error: Exception) -> None:
        self._reasons[key] = f"{type(error).__name__}: {error}".splitlines()[0]
        _LOG.warning("%s is not recorded and runs as it is: %s", key, self._reasons[key])


@contextmanager
def _forbidden_to_wait() -> Iterator[None]:
    """Operations that wait for the device raise."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is a prototype, which does not see all of them
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
