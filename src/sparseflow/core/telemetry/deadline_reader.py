"""Reads from a socket that end at a deadline."""

from __future__ import annotations

import io
import socket
import time
from typing import Any


class DeadlineReader(io.RawIOBase):
    """Bytes of a connection until a deadline; a timeout of the socket restarts with every byte.

    Args:
        connection: Connected socket; its own timeout applies to writes only.
        end_s: Deadline on the clock of `time.monotonic`. A later read raises TimeoutError.
    """

    def __init__(self, connection: socket.socket, end_s: float) -> None:
        self._connection, self._end_s = connection, end_s
        self._stream: Any = connection.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        remaining_s = self._end_s - time.monotonic()
        if remaining_s <= 0.0:
            raise TimeoutError("the peer did not send everything in time")
        timeout_s = self._connection.gettimeout()
        self._connection.settimeout(remaining_s)
        try:
            return self._stream.readinto(buffer)
        finally:
            self._connection.settimeout(timeout_s)

    def close(self) -> None:
        self._stream.close()
        super().close()
