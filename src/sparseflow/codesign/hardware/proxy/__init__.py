"""Hardware proxy: latency, memory and power of layers on devices, from a roofline and a learned residual.

::

    from sparseflow.codesign.hardware.proxy import DeviceSpec, LayerHwProxy, fit_proxy, read_points
    proxy = LayerHwProxy.analytic()                       # or fit_proxy(read_points("points.jsonl").points)
    proxy.predict_table(layers, [DeviceSpec.from_chip(chip) for chip in chips])["lat_ms"]     # [L, S]

`profiling` measures layers, `points` stores the measurements, `fitting` fits a proxy to them.
"""

from __future__ import annotations

from sparseflow.codesign.hardware.proxy.analytic import LatencyRoofline
from sparseflow.codesign.hardware.proxy.device import DeviceSpec, measure_device
from sparseflow.codesign.hardware.proxy.features import FEATURES, build_layer_features
from sparseflow.codesign.hardware.proxy.fitting import (
    ProxyEvaluation,
    ProxyTrainingConfig,
    cross_validate,
    fit_proxy,
)
from sparseflow.codesign.hardware.proxy.layer_proxy import LayerHwProxy
from sparseflow.codesign.hardware.proxy.points import (
    LayerPoint,
    LayerPointFile,
    LayerPoints,
    read_points,
)
from sparseflow.codesign.hardware.proxy.residual_model import LayerProxyModel
from sparseflow.codesign.hardware.proxy.synthetic_layers import LayerConfig, LayerGrid

__all__ = [
    "FEATURES",
    "DeviceSpec",
    "LatencyRoofline",
    "LayerConfig",
    "LayerGrid",
    "LayerHwProxy",
    "LayerPoint",
    "LayerPointFile",
    "LayerPoints",
    "LayerProxyModel",
    "ProxyEvaluation",
    "ProxyTrainingConfig",
    "build_layer_features",
    "cross_validate",
    "fit_proxy",
    "measure_device",
    "read_points",
]
