"""Load of a device while other code runs: from /proc, from NVML, or from a Prometheus server.

`schema` defines readings and readers; `readers` opens a reader by the name of its source. `cpu_contention`
detects other programs that used the CPUs during a measurement.
"""
