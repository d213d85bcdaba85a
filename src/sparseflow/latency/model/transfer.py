"""Transfer of a predictor to another device by the peaks of both.

A regressor of the kind `ratio` learns how far above the roofline a kernel is. This efficiency depends on the
operator and its shapes more than on the device, so that the same ratios over the roofline of another device
are a first answer for it.
"""

from __future__ import annotations

import time
from dataclasses import replace

from sparseflow.core.costmodel.intervals import ConformalInterval
from sparseflow.errors import InputError
from sparseflow.latency.measure.fingerprint import DeviceFingerprint
from sparseflow.latency.measure.idle import LOAD_METRICS
from sparseflow.latency.measure.peaks import Peaks
from sparseflow.latency.model.contention import ContentionModel
from sparseflow.latency.model.kernel_estimates import KernelIntervals
from sparseflow.latency.model.kernel_regressor import RATIO
from sparseflow.latency.model.predictor import PEAKS, Predictor

TRANSFER_INTERVAL = ConformalInterval(low=0.5, high=2.0, coverage=0.9, samples=0)
"""Interval of a transferred predictor, and of its kernels."""


def transfer(predictor: Predictor, fingerprint: DeviceFingerprint, peaks: Peaks) -> Predictor:
    """Transfer a predictor to another device.

    The roofline and the costs of kernels inside a graph are scaled by the ratio of the peaks. Latencies of
    measured kernels and the effect of load do not transfer.

    Args:
        predictor: Predictor of another device, with its peaks.
        fingerprint: Device to predict.
        peaks: Its peaks.

    Raises:
        InputError: The predictor has no peaks, or its regressor does not learn ratios to a roofline.
    """
    source, regressor, composition = predictor.peaks, predictor.regressor, predictor.composition
    if source is None or regressor.kind != RATIO:
        raise InputError(
            f"a predictor with the regressor `{regressor.kind}` and "
            f"{'no peaks' if source is None else 'peaks'} cannot be transferred; expected the regressor "
            f"`{RATIO}` and peaks"
        )
    launch = peaks.launch_ms / source.launch_ms
    memory = source.bytes_per_s / peaks.bytes_per_s
    arithmetic = source.flops_per_s / peaks.flops_per_s
    roofline = replace(
        regressor.roofline,
        launch_ms=regressor.roofline.launch_ms * launch,
        flops_per_s=regressor.roofline.flops_per_s / arithmetic,
        bytes_per_s=regressor.roofline.bytes_per_s / memory,
    )
    return predictor.model_copy(
        update={
            "origin": PEAKS,
            "measured_s": time.time(),
            "fingerprint": fingerprint,
            "peaks": peaks,
            "regressor": replace(regressor, roofline=roofline),
            "measured_ms": {},
            "composition": replace(
                composition,
                call_ms=composition.call_ms * launch,
                per_kernel_ms=composition.per_kernel_ms * launch,
                per_view_ms=composition.per_view_ms * launch,
                per_weight_ms=composition.per_weight_ms * memory,
                per_activation_ms=composition.per_activation_ms * memory,
            ),
            "contention": ContentionModel.fit([], LOAD_METRICS[fingerprint.kind], 0.0, []),
            "kernel_intervals": KernelIntervals(frequent=TRANSFER_INTERVAL, rare=TRANSFER_INTERVAL),
            "idle_interval": TRANSFER_INTERVAL,
            "loaded_interval": TRANSFER_INTERVAL,
        }
    )
