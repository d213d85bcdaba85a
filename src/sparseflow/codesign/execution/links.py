"""Messages of named tensors between two processes, of which only the first says what it is.

The first message of each kind is preceded by a header: names, dtypes and shapes, as JSON, over the group that
processes talk to each other on a CPU with. All later ones are the same but for their numbers, so nothing but
numbers moves, and with NCCL no process waits for its GPU. Messages over one link are matched by their order,
see `schedule`; headers by their tags.
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
IN_FLIGHT = 2
"""Messages of a kind that may be on their way; the next waits for the first of them to be taken. With fewer,
slots could wait for each other, see `schedule`."""


class LinkError(RunError):
    """The other process cannot be reached, or does not answer in time."""


class Link:
    """One end of a link.

    Args:
        name: What it is called in errors.
        peer: Rank of the other end.
        group: Of both ends, for numbers.
        control: Of all processes, on CPUs, for headers.
        tag: First of the tags of its headers.
        device: Where tensors are.
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
        """Send without waiting for it to be taken.

        Args:
            kind: Of message.
            message: What to send; None goes in the header.

        Returns:
            Bytes of its tensors.

        Raises:
            LinkError: The other end cannot be reached.
            RunError: The message is not like the first of its kind.
        """
        header = [
            [name, None, []]
            if each is None
            else [name, str(each.dtype).removeprefix("torch."), list(each.shape)]
            for name, each in message.items()
        ]
        waiting = self._waiting[kind]
        while len(waiting) >= IN_FLIGHT:
            self._wait(waiting.popleft()[0])
        works: list[Any] = []
        tensors: list[Tensor] = []
        first = self._headers.setdefault(kind, header)
        if first is header:
            works, tensors = self._tell(kind, header)
        elif first != header:
            raise RunError(
                f"{self.name}: {_written(header)} follows {_written(first)}; batches of one shape must give "
                "states of one shape"
            )
        numbers = [each.contiguous() for each in message.values() if each is not None]
        for each in numbers:
            works.append(self._try(lambda each=each: distributed.isend(each, self.peer, self.group)))
        waiting.append((works, tensors + numbers))
        return sum(each.numel() * each.element_size() for each in numbers)

    def receive(self, kind: int) -> dict[str, Tensor | None]:
        """The next message.

        Raises:
            LinkError: The other end cannot be reached, or sends nothing in time.
        """
        if kind not in self._headers:
            self._headers[kind] = self._told(kind)
        found: dict[str, Tensor | None] = {
            name: None
            if dtype is None
            else torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            for name, dtype, shape in self._headers[kind]
        }
        works = [
            self._try(lambda each=each: distributed.irecv(each, self.peer, self.group))
            for each in found.values()
            if each is not None
        ]
        self._wait(works)
        return found

    def flush(self) -> None:
        """Wait until all that was sent is taken (with NCCL: let what follows on the GPU wait)."""
        for waiting in self._waiting.values():
            while waiting:
                self._wait(waiting.popleft()[0])

    def forget(self) -> None:
        """Expect headers again: batches of another shape follow."""
        self._headers.clear()

    def open(self, *, sends: bool) -> None:
        """Pass one number, so that both ends are connected before anything else waits for them."""
        number = torch.zeros(1, device=self._device)
        pass_on = distributed.send if sends else distributed.recv
        self._try(lambda: pass_on(number, self.peer, self.group))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _tell(self, kind: int, header: list[Any]) -> tuple[list[Any], list[Tensor]]:
        written = json.dumps(header).encode()
        if len(written) > HEADER_BYTES:
            raise RunError(f"{self.name}: a state of {len(header)} tensors is more than a header can tell")
        told = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        told[: len(written)] = torch.frombuffer(bytearray(written), dtype=torch.uint8)
        tag = self._tag + kind
        return [self._try(lambda: distributed.isend(told, self.peer, self._control, tag=tag))], [told]

    def _told(self, kind: int) -> list[Any]:
        told = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._try(lambda: distributed.recv(told, self.peer, self._control, tag=self._tag + kind))
        return json.loads(bytes(told.tolist()).rstrip(b"\0"))

    def _wait(self, works: list[Any]) -> None:
        for work in works:
            self._try(work.wait)

    def _try(self, call: Callable[[], Result]) -> Result:
        return reaching(self.name, call)


def reaching(name: str, call: Callable[[], Result]) -> Result:
    """Call what talks to another process.

    Raises:
        LinkError: It cannot be reached.
    """
    try:
        return call()
    except RuntimeError as error:
        text = " ".join(str(error).split())
        raise LinkError(
            f"{name}: another process is gone, or did not answer in time; see what it says itself "
            f"({text[:300]})"
        ) from error


def _written(header: list[Any]) -> str:
    return ", ".join(f"{name} {shape} {dtype}" for name, dtype, shape in header)
