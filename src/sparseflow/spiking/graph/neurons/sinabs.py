"""sinabs' neurons by name.

The input is [N, T, ...], or [N * T, ...] for the classes named Squeeze. By default a neuron fires as often in
one step as its membrane exceeds the threshold.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparseflow.spiking.graph.neurons.entry import UNBOUNDED, NeuronEntry, OutputDescription

_ACTIVATIONS = "sinabs.activation."


def find_entry(cls: type) -> NeuronEntry | None:
    """Return the entry of one of sinabs' own classes; None for other classes."""
    return _ENTRIES.get(cls.__name__) if cls.__module__.startswith("sinabs.layers.") else None


def _describe_output(module: Any) -> OutputDescription:
    spike_fn = module.spike_fn
    if spike_fn is None:
        return "real", None, "it outputs its membrane, not spikes"
    function = spike_fn if isinstance(spike_fn, type) else type(spike_fn)
    if not function.__module__.startswith(_ACTIVATIONS):
        return "real", None, "its function of spikes (spike_fn) is user-defined"
    if function.__name__ == "SingleSpike":
        return "binary", 1, None
    limit = getattr(spike_fn, "max_num_spikes_per_bin", None)
    return "integer", UNBOUNDED if limit is None else int(limit), "it fires several spikes per step"


_LAYER = NeuronEntry(
    spec=lambda module: "its time axis is the second one",
    output="integer",
    max_value=UNBOUNDED,
    describe_output=_describe_output,
    states=("v_mem", "i_syn"),
    is_single_step=False,
    restarts=True,
)
_ADAPTIVE = replace(_LAYER, reason="its thresholds adapt", states=("v_mem", "i_syn", "b"))
_RECURRENT = replace(_LAYER, reason="its spikes are fed back into it")
_ENTRIES = {
    **{name: _LAYER for name in ("LIF", "IAF", "LIFSqueeze", "IAFSqueeze", "ExpLeak", "ExpLeakSqueeze")},
    **{name: _RECURRENT for name in ("LIFRecurrent", "IAFRecurrent")},
    **{name: _ADAPTIVE for name in ("ALIF", "ALIFSqueeze", "ALIFRecurrent")},
}
