"""Latency models and their training.

- `dataset`: collections as training data.
- `features`, `roofline`, `kernel_regressor`: idle latency of kernels.
- `launch_overhead`, `composition`: from kernels to graphs.
- `contention`: effect of background load.
- `predictor`, `fitting`, `validation`, `training`: the predictor and its errors on held-out data.
- `evaluation`: predictions against measurements.
"""
