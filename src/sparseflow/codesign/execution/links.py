"""Channels that exchange named tensors between two processes.

The first message of each kind is preceded by a header with names, dtypes and shapes as JSON, over the CPU
process group. Later messages have the same format, so only tensors are sent, and with NCCL no process waits
for its GPU. Messages on a channel are matched by order, see `schedule`; headers by tags.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from sparseflow.errors import RunError

Message = Mapping[str, Tensor | None]
Result = TypeVar("Result")

HEADER_BYTES = 4096
MAX_IN_FLIGHT = 2
"""Maximum number of pending messages of a kind. With fewer, slots could deadlock, see `schedule`."""


class LinkError(RunError):
    """The other process is unreachable or does not answer in time."""


class Channel:
    """One end of a channel.

    Args:
        name: Name in error messages.
        peer: Rank of the other end.
        group: Process group of both ends, for tensors.
        control: CPU process group of all processes, for headers.
        tag: First tag of the headers.
        device: Device of the tensors.
    """

    def __init__(
        self,
        *,
        name: str,
        peer: int,
        group: distributed.ProcessGroup,
        control: distributed.ProcessGroup,
        tag: int,
        device: torch.device,
    ) -> None:
        self.name, self.peer, self.group, self._control = name, peer, group, control
        self._tag, self._device = tag, device
        self._headers: dict[int, list[Any]] = {}
        self._waiting: defaultdict[int, deque[tuple[list[Any], list[Tensor]]]] = defaultdict(deque)

    def send(self, kind: int, message: Message) -> int:
        """Send a message asynchronously.

        Args:
            kind: Kind of the message.
            message: Named tensors; None is part of the header.

        Returns:
            Bytes of the tensors.

        Raises:
            LinkError: The other end is unreachable.
            RunError: The message differs in format from the first of its kind.
        """
        header = [
            [name, None, []]
            if tensor is None
            else [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for name, tensor in message.items()
        ]
        waiting = self._waiting[kind]
        while len(waiting) >= MAX_IN_FLIGHT:
            self._wait(waiting.popleft()[0])
        works: list[Any] = []
        tensors: list[Tensor] = []
        first = self._headers.setdefault(kind, header)
        if first is header:
            works, tensors = self._send_header(kind, header)
        elif first != header:
            raise RunError(
                f"{self.name}: {_format_header(header)} follows {_format_header(first)}; batches of one "
                "shape must have states of one shape"
            )
        numbers = [tensor.contiguous() for tensor in message.values() if tensor is not None]
        for tensor in numbers:
            works.append(self._call(lambda buffer=tensor: distributed.isend(buffer, self.peer, self.group)))
        waiting.append((works, tensors + numbers))
        return sum(tensor.numel() * tensor.element_size() for tensor in numbers)

    def receive(self, kind: int) -> dict[str, Tensor | None]:
        """Receive the next message of a kind.

        Raises:
            LinkError: The other end is unreachable or does not answer in time.
        """
        if kind not in self._headers:
            self._headers[kind] = self._receive_header(kind)
        message: dict[str, Tensor | None] = {
            name: None
            if dtype is None
            else torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            for name, dtype, shape in self._headers[kind]
        }
        works = [
            self._call(lambda buffer=tensor: distributed.irecv(buffer, self.peer, self.group))
            for tensor in message.values()
            if tensor is not None
        ]
        self._wait(works)
        return message

    def flush(self) -> None:
        """Wait until all messages are delivered (with NCCL: enqueue the wait on the GPU)."""
        for waiting in self._waiting.values():
            while waiting:
                self._wait(waiting.popleft()[0])

    def reset_headers(self) -> None:
        """Expect new headers, before batches of another shape."""
        self._headers.clear()

    def connect(self, *, sends: bool) -> None:
        """Exchange one number to establish the connection."""
        number = torch.zeros(1, device=self._device)
        pass_on = distributed.send if sends else distributed.recv
        self._call(lambda: pass_on(number, self.peer, self.group))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _send_header(self, kind: int, header: list[Any]) -> tuple[list[Any], list[Tensor]]:
        encoded = json.dumps(header).encode()
        if len(encoded) > HEADER_BYTES:
            raise RunError(
                f"{self.name}: a state with {len(header)} tensors exceeds the header of {HEADER_BYTES} bytes"
            )
        buffer = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        buffer[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        tag = self._tag + kind
        return [self._call(lambda: distributed.isend(buffer, self.peer, self._control, tag=tag))], [buffer]

    def _receive_header(self, kind: int) -> list[Any]:
        buffer = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._call(lambda: distributed.recv(buffer, self.peer, self._control, tag=self._tag + kind))
        return json.loads(bytes(buffer.tolist()).rstrip(b"\0"))

    def _wait(self, works: list[Any]) -> None:
        for work in works:
            self._call(work.wait)

    def _call(self, call: Callable[[], Result]) -> Result:
        return call_peer(self.name, call)


def call_peer(name: str, call: Callable[[], Result]) -> Result:
    """Call a function that communicates with another process.

    Raises:
        LinkError: The process is unreachable.
    """
    try:
        return call()
    except RuntimeError as error:
        text = " ".join(str(error).split())
        raise LinkError(
            f"{name}: the other process is unreachable or timed out; see its own error message ({text[:300]})"
        ) from error


def _format_header(header: list[Any]) -> str:
    return ", ".join(f"{name} {shape} {dtype}" for name, dtype, shape in header)
