"""Execution with one process per slot: rank r runs the r-th slot of the plan.

Each process keeps its layers, and its parts of other slots' layers, on its own device. `schedule` defines the
order of its work and why it cannot deadlock. Tensors move between pairs of processes, by NCCL between GPUs
and Gloo between CPUs; messages are received when they are needed, as a plan assumes.
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

from sparseflow.codesign.execution.links import Channel, call_peer
from sparseflow.codesign.execution.rewrite import (
    DistributedSplit,
    PartInputs,
    PartRequest,
    detach_parts,
    split_module,
)
from sparseflow.codesign.execution.schedule import ChannelKey, LayerTask, build_schedule
from sparseflow.codesign.workload.splits import RewritePlan
from sparseflow.core.checks import check_at_least
from sparseflow.core.layers import LayeredModel
from sparseflow.errors import InputError


@dataclass(frozen=True, kw_only=True)
class PipelineTiming:
    """Measured times, on the clock of the last layer's slot.

    Attributes:
        latency_ms: Latency of single batches, from the request to the first slot to the logits on the last,
            ms.
        token_ms: Time of that request, included in `latency_ms`: half of a round trip between both slots, ms;
            0 if they are the same.
        period_ms: Time between the logits of consecutive batches in a full pipeline, ms.
        moved_bytes: (source slot, target slot) -> bytes per batch.
        batch_size: Batch size.
        timer: Timer of `period_ms`, `"perf_counter"` or `"cuda_event"`; `latency_ms` always uses the former.
        warmup: Batches before the first sample of each kind.
    """

    latency_ms: tuple[float, ...]
    token_ms: float
    period_ms: tuple[float, ...]
    moved_bytes: dict[tuple[int, int], int]
    batch_size: int
    timer: str
    warmup: int


class RankExecutor:
    """Runs this process's slot; a context manager that closes its channels. All processes create one
    alike.

    Args:
        model: The full model, the same in every process. The slot's layers are copied to its device.
        assignment: Slot of each layer.
        plan: The splits.
        device: Device of this process; a GPU must not be shared.
        timeout_s: Timeout of unresponsive processes, s.

    Attributes:
        slot: Slot of this process.
        moved_bytes: (source slot, target slot) -> bytes sent by this slot so far.

    Raises:
        InputError: Processes are not joined or not one per slot, or the plan does not match the model.
        LinkError: Another process is unreachable.
    """

    def __init__(
        self,
        model: LayeredModel,
        assignment: Sequence[int],
        plan: RewritePlan | None = None,
        *,
        device: torch.device | str = "cpu",
        timeout_s: float = 120.0,
    ) -> None:
        self.schedule = build_schedule(model.describe_layers(1), assignment, plan)
        slots, tasks = self.schedule.slots, self.schedule.tasks
        if not distributed.is_initialized():
            raise InputError("processes are not joined; use `join_processes` or `launch`")
        if distributed.get_world_size() != len(slots):
            raise InputError(
                f"there are {distributed.get_world_size()} processes, but the plan uses {len(slots)} slots "
                f"({', '.join(map(str, slots))}); start one process per slot"
            )
        self.device = torch.device(device)
        self.rank = distributed.get_rank()
        self.slot, self._first, self._last = slots[self.rank], tasks[0].home, tasks[-1].home
        self.moved_bytes: Counter[tuple[int, int]] = Counter()
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: list[Any] = []
        self._shape: torch.Size | None = None
        self._channels = self._connect()
        own_layers = [task.layer for task in tasks if task.home == self.slot]
        self._model = model.select_layers(own_layers, self.device)
        self._parts: dict[int, nn.Module] = {}
        for split in () if plan is None else plan.splits:
            if self.slot not in split.slots:
                continue
            form = split_module(model.get_layer(split.layer), split)
            parts = dict(zip(split.slots[1:], detach_parts(form), strict=True))
            if self.slot == split.slots[0]:
                requests = [self._make_request(split.layer, slot) for slot in split.slots[1:]]
                self._model.replace_layer(split.layer, DistributedSplit(form.to(self.device), requests))
            else:
                self._parts[split.layer] = parts[self.slot].to(self.device)

    def _connect(self) -> dict[ChannelKey, Channel]:
        """Create all channels, in the same order in all processes."""
        slots, names = self.schedule.slots, self.schedule.list_channels()
        self._control = self._make_group(None, "gloo")
        channels, tags = {}, 2 * len(self.schedule.tasks)
        for number, name in enumerate(names):
            ends = [slots.index(name.source), slots.index(name.target)]
            group = self._make_group(sorted(ends), "nccl" if self.device.type == "cuda" else "gloo")
            if self.rank not in ends:
                continue
            peer = ends[1 - ends.index(self.rank)]
            channels[name] = Channel(
                name=f"slot {self.slot}, {name.kind} with slot {slots[peer]}", peer=peer, group=group,
                control=self._control, tag=1 + number * tags, device=self.device,
            )  # fmt: skip
            channels[name].connect(sends=name.source == self.slot)
            if name.kind == "parts":
                channels[name].connect(sends=name.source != self.slot)
        return channels

    def _make_group(self, ranks: list[int] | None, backend: str) -> Any:
        is_member = ranks is None or self.rank in ranks
        group_device = self.device if backend == "nccl" and is_member else None
        group = distributed.new_group(ranks, timeout=self._timeout, backend=backend, device_id=group_device)
        if is_member:
            self._groups.append(group)
        return group

    def close(self) -> None:
        """Close all channels; the executor cannot be used afterwards."""
        while self._groups:
            distributed.destroy_process_group(self._groups.pop())

    def __enter__(self) -> RankExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error a GPU may wait forever for a message, which would block closing.
        if error is None or self.device.type == "cpu":
            self.close()

    def run(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """Run batches, with as many in flight as there are stages.

        Args:
            batches: Batches of one shape, the same number in every process. Only the first layer's slot reads
                the values.

        Returns:
            Logits of each batch on the last layer's slot; empty elsewhere.

        Raises:
            InputError: Shapes differ.
            LinkError: Another process is unreachable.
        """
        outputs: list[Tensor] = []
        self._run(batches, outputs.append)
        return outputs

    def _run(self, batches: Sequence[Tensor], on_output: Callable[[Tensor], None]) -> None:
        shapes = {tensor.shape for tensor in batches}
        if len(shapes) > 1:
            raise InputError(f"batches have different shapes: {sorted(map(tuple, shapes))}")
        if batches and self._shape != batches[0].shape:
            self._shape = batches[0].shape
            for link in self._channels.values():
                link.reset_headers()
        states: dict[int, dict[str, Tensor]] = {}
        with torch.no_grad():
            for batch, task in self.schedule.iterate_tasks(len(batches), self.slot):
                if task.home != self.slot:
                    self._run_part(task)
                    continue
                if task.layer == 0:
                    states[batch] = self._model.initial_state(batches[batch].to(self.device))
                elif task.source is not None:
                    link = self._channels[ChannelKey("state", task.source, self.slot, task.layer - 1)]
                    received = link.receive(0)
                    states[batch] = {name: tensor for name, tensor in received.items() if tensor is not None}
                state = self._model.run_layer(task.layer, states.pop(batch))
                if task.target is not None:
                    link = self._channels[ChannelKey("state", self.slot, task.target, task.layer)]
                    self.moved_bytes[self.slot, task.target] += link.send(0, state)
                elif task is self.schedule.tasks[-1]:
                    on_output(state["logits"])
                else:
                    states[batch] = state
            for link in self._channels.values():
                link.flush()

    def _make_request(self, layer: int, slot: int) -> PartRequest:
        link = self._channels[ChannelKey.for_parts(self.slot, slot)]
        input_kind, output_kind = 2 * layer, 2 * layer + 1

        def receive() -> Tensor:
            output = link.receive(output_kind)["y"]
            assert output is not None
            return output

        def request(inputs: PartInputs) -> Callable[[], Tensor]:
            self.moved_bytes[self.slot, slot] += link.send(
                input_kind, {str(index): tensor for index, tensor in enumerate(inputs)}
            )  # fmt: skip
            return receive

        return request

    def _run_part(self, task: LayerTask) -> None:
        """Run a part of another slot's layer."""
        link = self._channels[ChannelKey.for_parts(self.slot, task.home)]
        output = self._parts[task.layer](*link.receive(2 * task.layer).values())
        self.moved_bytes[self.slot, task.home] += link.send(2 * task.layer + 1, {"y": output})

    def measure(
        self, batch: Tensor, *, repeats: int = 20, num_batches: int = 50, warmup: int = 5
    ) -> PipelineTiming:
        """Measure latency and pipeline period; returns the same in every process.

        Args:
            batch: The batch to use, of one shape in every process.
            repeats: Number of single batches.
            num_batches: Number of batches in the pipeline.
            warmup: Untimed batches before each measurement.

        Raises:
            InputError: A number is too small.
            LinkError: Another process is unreachable.
        """
        check_at_least(1, repeats=repeats)
        check_at_least(2, num_batches=num_batches)
        check_at_least(0, warmup=warmup)
        if self.slot == self._first:
            batch = batch.to(self.device)
        latency = [self._time_single_batch(batch) for _ in range(warmup + repeats)][warmup:]
        token_ms = sorted(self._time_token_round_trip() for _ in range(warmup + repeats))
        self.synchronize()
        before = Counter(self.moved_bytes)
        timer = _Timer(self.device)
        self._run([batch] * (warmup + num_batches), lambda _: timer.record())
        self.synchronize()
        period = timer.intervals_ms()[warmup:] if self.slot == self._last else []
        results: list[Any] = [latency, token_ms[len(token_ms) // 2] / 2.0, period]
        source_rank = self.schedule.slots.index(self._last)
        self._call_peers(lambda: distributed.broadcast_object_list(results, source_rank, self._control))
        return PipelineTiming(
            latency_ms=tuple(results[0]),
            token_ms=results[1],
            period_ms=tuple(results[2]),
            moved_bytes=self._sum_transfers(self.moved_bytes - before, warmup + num_batches),
            batch_size=len(batch),
            timer="cuda_event" if self.device.type == "cuda" else "perf_counter",
            warmup=warmup,
        )

    def synchronize(self) -> None:
        """Wait until all processes reach this call and their devices are idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._call_peers(lambda: distributed.barrier(self._control))

    def _call_peers(self, call: Callable[[], object]) -> None:
        call_peer(f"slot {self.slot}", call)

    def _time_single_batch(self, batch: Tensor) -> float:
        """Latency of one batch on the last slot, ms; 0 elsewhere."""
        self.synchronize()
        start_s = time.perf_counter()
        self._pass_token(self._last, self._first)
        self._run([batch], lambda _: None)
        if self.slot != self._last:
            return 0.0
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return 1e3 * (time.perf_counter() - start_s)

    def _time_token_round_trip(self) -> float:
        self.synchronize()
        start_s = time.perf_counter()
        self._pass_token(self._last, self._first)
        self._pass_token(self._first, self._last)
        return 1e3 * (time.perf_counter() - start_s)

    def _pass_token(self, source: int, target: int) -> None:
        """Send one number from slot to slot between CPUs."""
        if source == target or self.slot not in (source, target):
            return
        peer = self.schedule.slots.index(target if self.slot == source else source)
        pass_on = distributed.send if self.slot == source else distributed.recv
        self._call_peers(lambda: pass_on(torch.zeros(1), peer, self._control))

    def _sum_transfers(
        self, transfers: Counter[tuple[int, int]], num_batches: int
    ) -> dict[tuple[int, int], int]:
        slots = self.schedule.slots
        table = torch.tensor([[transfers[source, target] for target in slots] for source in slots])
        self._call_peers(lambda: distributed.all_reduce(table, group=self._control))
        return {
            (slots[row_index], slots[column_index]): int(size) // num_batches
            for row_index, row in enumerate(table.tolist())
            for column_index, size in enumerate(row)
            if size
        }


class _Timer:
    """Records times; on a GPU with events, without synchronization."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._points: list[Any] = []

    def record(self) -> None:
        if self._device.type != "cuda":
            self._points.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._points.append(event)

    def intervals_ms(self) -> list[float]:
        """Times between consecutive records, ms."""
        if self._device.type != "cuda":
            return [1e3 * (after - before) for before, after in pairwise(self._points)]
        torch.cuda.synchronize(self._device)
        return [before.elapsed_time(after) for before, after in pairwise(self._points)]
