"""Backends: spike formats and fused group kernels of a device.

`spec` and `reference` define what a group computes, `base` what a backend provides, `selection` picks one.
`events` runs on CPUs, `packed` on GPUs, `blocks` is the two-stage block-sparse convolution of single layers.
"""
