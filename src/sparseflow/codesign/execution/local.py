"""A model on several slots, all in this process: each slot holds its layers and parts on its own device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparseflow.codesign.execution.rewrite import Ask, Given, Spread, at_home, split_form
from sparseflow.codesign.execution.schedule import schedule
from sparseflow.codesign.workload.splits import RewritePlan
from sparseflow.core.layers import LayeredModel
from sparseflow.errors import InputError

Devices = torch.device | str | Mapping[int, torch.device | str] | Sequence[torch.device | str]


class LocalExecutor:
    """Runs batches layer by layer, and hands states and parts' inputs and outputs over between slots.

    Args:
        model: Left as it is; slots hold copies.
        homes: Slot of each layer.
        plan: What is split.
        devices: Of each slot; one for all by default.

    Attributes:
        moved: (from slot, to slot) -> bytes, so far; counted also where both are on one device.
        batches: Batches so far.

    Raises:
        InputError: The plan or the slots are not for this model, or a slot has no device.
    """

    def __init__(
        self,
        model: LayeredModel,
        homes: Sequence[int],
        plan: RewritePlan | None = None,
        *,
        devices: Devices = "cpu",
    ) -> None:
        self.schedule = schedule(model.describe_layers(1), homes, plan)
        self.moved: Counter[tuple[int, int]] = Counter()
        self.batches = 0
        device = self._device = _each(devices, self.schedule.slots)
        self._models = {
            home: model.select_layers(
                [layer for layer, slot in enumerate(homes) if slot == home], device[home]
            )
            for home in sorted(set(homes))
        }
        for split in () if plan is None else plan.splits:
            home = split.slots[0]
            form = split_form(model.get_layer(split.layer), split)
            others = at_home(form)
            asks = [
                self._ask(home, slot, part.to(device[slot]))
                for slot, part in zip(split.slots[1:], others, strict=True)
            ]
            self._models[home].replace_layer(split.layer, Spread(form.to(device[home]), asks))

    def _ask(self, home: int, slot: int, part: nn.Module) -> Ask:
        def ask(given: Given) -> Callable[[], Tensor]:
            found = part(*(None if each is None else self._move(each, home, slot) for each in given))
            return lambda: self._move(found, slot, home)

        return ask

    def _move(self, value: Tensor, source: int, target: int) -> Tensor:
        self.moved[source, target] += value.numel() * value.element_size()
        return value.to(self._device[target])

    def run(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """Scores of each batch, on the last layer's device."""
        found = []
        with torch.no_grad():
            for samples in batches:
                state: dict[str, Tensor] = {}
                for task in self.schedule.tasks:
                    home = task.home
                    if task.layer == 0:
                        state = self._models[home].initial_state(samples.to(self._device[home]))
                    if task.source is not None:
                        source = task.source
                        state = {name: self._move(each, source, home) for name, each in state.items()}
                    state = self._models[home].run_layer(task.layer, state)
                found.append(state["logits"])
                self.batches += 1
        return found


def _each(devices: Devices, slots: Sequence[int]) -> dict[int, torch.device]:
    given: Any = devices
    if isinstance(devices, (str, torch.device)):
        given = dict.fromkeys(slots, devices)
    elif not isinstance(devices, Mapping):
        given = dict(enumerate(devices))
    missing = [slot for slot in slots if slot not in given]
    if missing:
        raise InputError(f"slot {missing[0]} has no device; there are devices for {sorted(given)}")
    return {slot: torch.device(given[slot]) for slot in slots}
