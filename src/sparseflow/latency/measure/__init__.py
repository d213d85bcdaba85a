"""Latency measurements, idle and under load.

- `runner`, `stream`: latency of one model; device and host time of a kernel in a stream.
- `overlap`: whether kernels of a graph execute concurrently.
- `plan`, `descriptions`, `instruments`, `collection`: collections of measurements.
- `peaks`, `blocks`: peak rates of a device; small networks for `calibrate`.
- `fanout`: collections over several GPUs or a Ray cluster.
- `fingerprint`: device and settings of a collection.
- `stress`, `exporter`: background load; export of the load to Prometheus.
"""
