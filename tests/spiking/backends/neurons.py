"""Neuron dynamics with exact constants, for the tests of kernels."""

from __future__ import annotations

from dataclasses import replace

from sparseflow.spiking.backends.spec import NeuronSpec

IF = NeuronSpec(alpha=1.0, beta=1.0, delta=0.0, v_threshold=1.0, v_reset=0.0)
SOFT = replace(IF, v_reset=None)
LIF = NeuronSpec(alpha=0.5, beta=0.5, delta=0.0, v_threshold=1.0, v_reset=0.0)
SHIFTED = NeuronSpec(alpha=0.5, beta=1.0, delta=-0.125, v_threshold=0.75, v_reset=-0.25)
NEURONS = {
    "if": IF,
    "soft": SOFT,
    "lif": LIF,
    "shifted": SHIFTED,
    "no reset": replace(LIF, v_reset=None, v_subtract=0.0),
    "delayed soft": replace(LIF, v_reset=None, v_subtract=0.5, delays_reset=True),
    "delayed hard": replace(SHIFTED, delays_reset=True),
}
