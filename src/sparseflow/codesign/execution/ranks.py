"""A model on several slots, one process each: rank r plays the r-th of the slots that a plan uses.

A process holds its layers, and its parts of layers that are at home elsewhere, on its own device. What it
does, in which order, and why nobody waits for ever, says `schedule`. Numbers move between two processes
alone, by NCCL between GPUs and Gloo between CPUs; what arrives is received when it is needed, not before, as
a plan has it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, distributed, nn

from sparseflow.codesign.execution.links import Link, reaching
from sparseflow.codesign.execution.rewrite import Ask, Given, Spread, at_home, split_form
from sparseflow.codesign.execution.schedule import LinkName, Task, schedule
from sparseflow.codesign.workload.splits import RewritePlan
from sparseflow.core.layers import LayeredModel
from sparseflow.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Measured:
    """How long batches took, on the clock of the last layer's slot.

    Attributes:
        latency_ms: Of one batch alone, from the call on the first slot for it to its scores on the last.
        token_ms: What that call takes, included in each of `latency_ms`: half of there and back between the
            two; 0 where they are one.
        period_ms: Between the scores of a batch and of the next, with as many in flight as there are stages.
        moved_bytes: (from slot, to slot) -> bytes, for each batch.
        samples: Of a batch.
        timer: Of `period_ms`: `"perf_counter"` or `"cuda_event"`; `latency_ms` is by the first.
        warmup: Batches before the first sample of each kind.
    """

    latency_ms: tuple[float, ...]
    token_ms: float
    period_ms: tuple[float, ...]
    moved_bytes: dict[tuple[int, int], int]
    samples: int
    timer: str
    warmup: int


class RankExecutor:
    """This process' slot; a context manager that closes its links. All processes make one, alike.

    Args:
        model: The whole model, the same in every process. What is this slot's is copied to its device, and
            the model can go.
        homes: Slot of each layer.
        plan: What is split.
        device: Of this process; on GPUs one that no other process has.
        timeout_s: Seconds after which a process that does not answer is given up.

    Attributes:
        slot: Which it plays.
        moved: (from slot, to slot) -> bytes, what this slot has sent so far.

    Raises:
        InputError: Processes have not been joined, or are not as many as slots that the plan uses, or the
            plan is not for this model.
        LinkError: Another process cannot be reached.
    """

    def __init__(
        self,
        model: LayeredModel,
        homes: Sequence[int],
        plan: RewritePlan | None = None,
        *,
        device: torch.device | str = "cpu",
        timeout_s: float = 120.0,
    ) -> None:
        self.schedule = schedule(model.describe_layers(1), homes, plan)
        slots, tasks = self.schedule.slots, self.schedule.tasks
        if not distributed.is_initialized():
            raise InputError("processes have not been joined: run this within `joined`, or by `launch`")
        if distributed.get_world_size() != len(slots):
            raise InputError(
                f"there are {distributed.get_world_size()} processes, and the plan uses {len(slots)} slots "
                f"({', '.join(map(str, slots))}): start as many"
            )
        self.device = torch.device(device)
        self.rank = distributed.get_rank()
        self.slot, self._first, self._last = slots[self.rank], tasks[0].home, tasks[-1].home
        self.moved: Counter[tuple[int, int]] = Counter()
        self._patience = timedelta(seconds=timeout_s)
        self._groups: list[Any] = []
        self._shape: torch.Size | None = None
        self._links = self._connect()
        mine = [task.layer for task in tasks if task.home == self.slot]
        self._model = model.select_layers(mine, self.device)
        self._parts: dict[int, nn.Module] = {}
        for split in () if plan is None else plan.splits:
            if self.slot not in split.slots:
                continue
            form = split_form(model.get_layer(split.layer), split)
            others = dict(zip(split.slots[1:], at_home(form), strict=True))
            if self.slot == split.slots[0]:
                asks = [self._ask(split.layer, slot) for slot in split.slots[1:]]
                self._model.replace_layer(split.layer, Spread(form.to(self.device), asks))
            else:
                self._parts[split.layer] = others[self.slot].to(self.device)

    def _connect(self) -> dict[LinkName, Link]:
        """Make all links, in one order in all processes."""
        slots, names = self.schedule.slots, self.schedule.links()
        self._control = self._group(None, "gloo")
        found, tags = {}, 2 * len(self.schedule.tasks)
        for number, name in enumerate(names):
            ends = [slots.index(name.source), slots.index(name.target)]
            group = self._group(sorted(ends), "nccl" if self.device.type == "cuda" else "gloo")
            if self.rank not in ends:
                continue
            peer = ends[1 - ends.index(self.rank)]
            found[name] = Link(
                name=f"slot {self.slot}, {name.kind} with slot {slots[peer]}", peer=peer, group=group,
                control=self._control, tag=1 + number * tags, device=self.device,
            )  # fmt: skip
            found[name].open(sends=name.source == self.slot)
            if name.kind == "parts":
                found[name].open(sends=name.source != self.slot)
        return found

    def _group(self, ranks: list[int] | None, backend: str) -> Any:
        here = ranks is None or self.rank in ranks
        bound = self.device if backend == "nccl" and here else None
        group = distributed.new_group(ranks, timeout=self._patience, backend=backend, device_id=bound)
        if here:
            self._groups.append(group)
        return group

    def close(self) -> None:
        """Close all links. Nothing can be run any more."""
        while self._groups:
            distributed.destroy_process_group(self._groups.pop())

    def __enter__(self) -> RankExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A GPU that waits for a message which will never come would hold this up.
        if error is None or self.device.type == "cpu":
            self.close()

    def run(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """Run batches, as many of them in flight as there are stages.

        Args:
            batches: Of one shape; as many in every process. Only the first layer's slot reads what they hold.

        Returns:
            Scores of each batch on the last layer's slot; nothing elsewhere.

        Raises:
            InputError: Batches differ in shape.
            LinkError: Another process is gone.
        """
        found: list[Tensor] = []
        self._run(batches, found.append)
        return found

    def _run(self, batches: Sequence[Tensor], done: Callable[[Tensor], None]) -> None:
        shapes = {each.shape for each in batches}
        if len(shapes) > 1:
            raise InputError(f"batches have the shapes {sorted(map(tuple, shapes))}; expected one")
        if batches and self._shape != batches[0].shape:
            self._shape = batches[0].shape
            for link in self._links.values():
                link.forget()
        states: dict[int, dict[str, Tensor]] = {}
        with torch.no_grad():
            for batch, task in self.schedule.order(len(batches), self.slot):
                if task.home != self.slot:
                    self._serve(task)
                    continue
                if task.layer == 0:
                    states[batch] = self._model.initial_state(batches[batch].to(self.device))
                elif task.source is not None:
                    link = self._links[LinkName("state", task.source, self.slot, task.layer - 1)]
                    came = link.receive(0)
                    states[batch] = {name: each for name, each in came.items() if each is not None}
                state = self._model.run_layer(task.layer, states.pop(batch))
                if task.target is not None:
                    link = self._links[LinkName("state", self.slot, task.target, task.layer)]
                    self.moved[self.slot, task.target] += link.send(0, state)
                elif task is self.schedule.tasks[-1]:
                    done(state["logits"])
                else:
                    states[batch] = state
            for link in self._links.values():
                link.flush()

    def _ask(self, layer: int, slot: int) -> Ask:
        link = self._links[LinkName.of_parts(self.slot, slot)]
        there, back = 2 * layer, 2 * layer + 1

        def answer() -> Tensor:
            found = link.receive(back)["y"]
            assert found is not None
            return found

        def ask(given: Given) -> Callable[[], Tensor]:
            self.moved[self.slot, slot] += link.send(
                there, {str(at): each for at, each in enumerate(given)}
            )  # fmt: skip
            return answer

        return ask

    def _serve(self, task: Task) -> None:
        """Run a part of a layer that is at home elsewhere."""
        link = self._links[LinkName.of_parts(self.slot, task.home)]
        found = self._parts[task.layer](*link.receive(2 * task.layer).values())
        self.moved[self.slot, task.home] += link.send(2 * task.layer + 1, {"y": found})

    def measure(self, batch: Tensor, *, repeats: int = 20, batches: int = 50, warmup: int = 5) -> Measured:
        """Time one batch alone and many in flight; the same is returned in every process.

        Args:
            batch: In every process, of one shape; each batch is this one.
            repeats: Batches alone.
            batches: Batches in flight, one after the other.
            warmup: Batches before the first that is timed, each time.

        Raises:
            InputError: A number is too small.
            LinkError: Another process is gone.
        """
        if repeats < 1 or batches < 2 or warmup < 0:
            raise InputError(
                f"`repeats` (={repeats}) must be at least 1, `batches` (={batches}) 2, `warmup` (={warmup}) 0"
            )
        if self.slot == self._first:
            batch = batch.to(self.device)
        latency = [self._alone(batch) for _ in range(warmup + repeats)][warmup:]
        token = sorted(self._token_there_and_back() for _ in range(warmup + repeats))
        self.wait()
        before = Counter(self.moved)
        timer = _Timer(self.device)
        self._run([batch] * (warmup + batches), lambda _: timer.now())
        self.wait()
        period = timer.between_ms()[warmup:] if self.slot == self._last else []
        told: list[Any] = [latency, token[len(token) // 2] / 2.0, period]
        teller = self.schedule.slots.index(self._last)
        self._with_all(lambda: distributed.broadcast_object_list(told, teller, self._control))
        return Measured(
            latency_ms=tuple(told[0]), token_ms=told[1], period_ms=tuple(told[2]),
            moved_bytes=self._moved_by_all(self.moved - before, warmup + batches), samples=len(batch),
            timer="cuda_event" if self.device.type == "cuda" else "perf_counter", warmup=warmup,
        )  # fmt: skip

    def wait(self) -> None:
        """Until all processes have come here, and their devices are idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._with_all(lambda: distributed.barrier(self._control))

    def _with_all(self, call: Callable[[], object]) -> None:
        reaching(f"slot {self.slot}", call)

    def _alone(self, batch: Tensor) -> float:
        """Milliseconds of one batch, on the last slot; 0 elsewhere."""
        self.wait()
        begin = time.perf_counter()
        self._token(self._last, self._first)
        self._run([batch], lambda _: None)
        if self.slot != self._last:
            return 0.0
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return 1e3 * (time.perf_counter() - begin)

    def _token_there_and_back(self) -> float:
        self.wait()
        begin = time.perf_counter()
        self._token(self._last, self._first)
        self._token(self._first, self._last)
        return 1e3 * (time.perf_counter() - begin)

    def _token(self, source: int, target: int) -> None:
        """One number from slot to slot, between CPUs."""
        if source == target or self.slot not in (source, target):
            return
        peer = self.schedule.slots.index(target if self.slot == source else source)
        pass_on = distributed.send if self.slot == source else distributed.recv
        self._with_all(lambda: pass_on(torch.zeros(1), peer, self._control))

    def _moved_by_all(self, mine: Counter[tuple[int, int]], batches: int) -> dict[tuple[int, int], int]:
        slots = self.schedule.slots
        table = torch.tensor([[mine[source, target] for target in slots] for source in slots])
        self._with_all(lambda: distributed.all_reduce(table, group=self._control))
        return {
            (slots[at], slots[to]): int(size) // batches
            for at, row in enumerate(table.tolist())
            for to, size in enumerate(row)
            if size
        }


class _Timer:
    """Points in time: on a GPU when its work so far is done, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._points: list[Any] = []

    def now(self) -> None:
        if self._device.type != "cuda":
            self._points.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._points.append(event)

    def between_ms(self) -> list[float]:
        """From each to the next."""
        if self._device.type != "cuda":
            return [1e3 * (after - before) for before, after in pairwise(self._points)]
        torch.cuda.synchronize(self._device)
        return [before.elapsed_time(after) for before, after in pairwise(self._points)]
