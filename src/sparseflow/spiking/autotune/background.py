"""`BackgroundTuner`: measures inputs of new shapes on a copy of a network, in a thread."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sparseflow.spiking.autotune.decision_cache import ShapeDecisions

Tune = Callable[[nn.Module, tuple[torch.Tensor, ...]], "ShapeDecisions | None"]


class BackgroundTuner:
    """Measures one shape at a time.

    The copy exists while a shape is measured, so that memory holds the weights twice.

    Args:
        tune: Tunes an optimized network for inputs and returns the decisions; called in a thread.
    """

    def __init__(self, tune: Tune) -> None:
        self._tune = tune
        self._thread: threading.Thread | None = None
        self._finished: dict[Any, ShapeDecisions] = {}

    def start(self, key: Any, model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        """Start to measure inputs, unless others are being measured."""
        if self._thread is not None and self._thread.is_alive():
            return
        duplicate, samples = copy.deepcopy(model), tuple(x.detach().clone() for x in inputs)
        num_threads = torch.get_num_threads()

        def run() -> None:
            torch.set_num_threads(num_threads)
            if samples[0].is_cuda:
                torch.cuda.set_device(samples[0].device)
            try:
                decisions = self._tune(duplicate, samples)
            except Exception:
                logging.getLogger(__name__).exception("inputs of a new shape cannot be measured")
                return
            if decisions is not None:
                self._finished[key] = decisions

        self._thread = threading.Thread(target=run, name="sparseflow-tuning", daemon=True)
        self._thread.start()

    def take_finished(self) -> dict[Any, ShapeDecisions]:
        """Return the decisions of what was measured since the last call, by key."""
        finished = dict(self._finished)
        for key in finished:
            del self._finished[key]
        return finished

    def wait(self) -> None:
        """Wait until nothing is being measured."""
        if self._thread is not None:
            self._thread.join()
