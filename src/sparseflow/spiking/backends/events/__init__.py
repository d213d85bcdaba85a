"""CPU backend: event-driven convolutions that do work for spikes, not for zeros.

`EventGroup` runs a fused group (`GroupSpec`) on `Events`. Needs numba (extra `spiking`). The first run on a
machine compiles the kernels; later processes load them from Numba's disk cache.
"""
