"""Execution on several slots within one process; each slot keeps its layers and parts on its own device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparseflow.codesign.execution.rewrite import (
    DistributedSplit,
    PartInputs,
    PartRequest,
    detach_parts,
    split_module,
)
from sparseflow.codesign.execution.schedule import build_schedule
from sparseflow.codesign.workload.splits import RewritePlan
from sparseflow.core.layers import LayeredModel
from sparseflow.errors import InputError

SlotDevices = torch.device | str | Mapping[int, torch.device | str] | Sequence[torch.device | str]


class LocalExecutor:
    """Runs batches layer by layer and transfers states, part inputs and part outputs between slots.

    Args:
        model: The model, which is not modified; slots use copies.
        assignment: Slot of each layer.
        plan: The splits.
        devices: Device of each slot, or one for all.

    Attributes:
        moved_bytes: (source slot, target slot) -> bytes so far, also between slots on the same device.
        num_batches: Number of batches so far.

    Raises:
        InputError: Plan or slots do not match the model, or a slot has no device.
    """

    def __init__(
        self,
        model: LayeredModel,
        assignment: Sequence[int],
        plan: RewritePlan | None = None,
        *,
        devices: SlotDevices = "cpu",
    ) -> None:
        self.schedule = build_schedule(model.describe_layers(1), assignment, plan)
        self.moved_bytes: Counter[tuple[int, int]] = Counter()
        self.num_batches = 0
        device = self._device = _resolve_devices(devices, self.schedule.slots)
        self._models = {
            home: model.select_layers(
                [layer for layer, slot in enumerate(assignment) if slot == home], device[home]
            )
            for home in sorted(set(assignment))
        }
        for split in () if plan is None else plan.splits:
            home = split.slots[0]
            form = split_module(model.get_layer(split.layer), split)
            parts = detach_parts(form)
            requests = [
                self._make_request(home, slot, part.to(device[slot]))
                for slot, part in zip(split.slots[1:], parts, strict=True)
            ]
            self._models[home].replace_layer(split.layer, DistributedSplit(form.to(device[home]), requests))

    def _make_request(self, home: int, slot: int, part: nn.Module) -> PartRequest:
        def request(inputs: PartInputs) -> Callable[[], Tensor]:
            output = part(*(None if value is None else self._transfer(value, home, slot) for value in inputs))
            return lambda: self._transfer(output, slot, home)

        return request

    def _transfer(self, value: Tensor, source: int, target: int) -> Tensor:
        self.moved_bytes[source, target] += value.numel() * value.element_size()
        return value.to(self._device[target])

    def run(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """Logits of each batch, on the device of the last layer."""
        outputs = []
        with torch.no_grad():
            for samples in batches:
                state: dict[str, Tensor] = {}
                for task in self.schedule.tasks:
                    home = task.home
                    if task.layer == 0:
                        state = self._models[home].initial_state(samples.to(self._device[home]))
                    if task.source is not None:
                        source = task.source
                        state = {name: self._transfer(tensor, source, home) for name, tensor in state.items()}
                    state = self._models[home].run_layer(task.layer, state)
                outputs.append(state["logits"])
                self.num_batches += 1
        return outputs


def _resolve_devices(devices: SlotDevices, slots: Sequence[int]) -> dict[int, torch.device]:
    by_slot: Any = devices
    if isinstance(devices, (str, torch.device)):
        by_slot = dict.fromkeys(slots, devices)
    elif not isinstance(devices, Mapping):
        by_slot = dict(enumerate(devices))
    missing = [slot for slot in slots if slot not in by_slot]
    if missing:
        raise InputError(f"slot {missing[0]} has no device; devices are given for slots {sorted(by_slot)}")
    return {slot: torch.device(by_slot[slot]) for slot in slots}
