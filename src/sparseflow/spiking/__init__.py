"""Spiking networks: find the convolutions that read spikes, and skip the zeros.

`optimize` is the way in; `graph` describes a network, `dispatch` decides, `plan` runs, `kernels` computes.
What users call stands in `sparseflow` itself.
"""
