"""Tests of `benchmarks/codesign/layer_times.py`."""

from __future__ import annotations

import pytest
import torch

from benchmarks.codesign.layer_times import layer_times
from sparseflow.core.layers import LayeredModel
from sparseflow.errors import InputError
from tests.codesign.hardware.proxy.test_profiling import Tiny


@pytest.mark.parametrize("behind", [False, True])
def test_all_layers_are_timed_in_all_passes(behind: bool) -> None:
    model: LayeredModel = Tiny()
    times = layer_times(model, torch.zeros(2, 12), passes=3, warmup=2, behind=behind)
    assert [len(row) for row in times] == [4, 4, 4] and min(map(min, times)) >= 0.0
    assert isinstance(model, Tiny) and model.ran == [0, 1, 2, 3] * 5


def test_invalid_counts_are_refused() -> None:
    for passes, warmup in ((0, 1), (1, -1)):
        with pytest.raises(InputError, match="`passes`"):
            layer_times(Tiny(), torch.zeros(2, 12), passes=passes, warmup=warmup)


@pytest.mark.gpu
def test_consecutive_passes_are_timed_on_gpu() -> None:
    model = Tiny()
    for part in model.parts:
        part.to("cuda")
    times = layer_times(model, torch.zeros(2, 12, device="cuda"), device="cuda", passes=4, behind=True)
    assert len(times) == 4 and all(item > 0.0 for row in times for item in row)
