"""The hardware proxy: what layers take on devices, predicted by a roofline and what was learned on top of it.

::

    from sparseflow.codesign.hardware.proxy import DeviceSpec, LayerHwProxy, read_points
    from sparseflow.codesign.hardware.proxy import fit
    proxy = LayerHwProxy.analytic()                       # or fit(read_points("points.parquet").points)
    proxy.table(layers, [DeviceSpec.of(chip) for chip in chips])["lat_ms"]     # [L, S]
"""

from __future__ import annotations

from sparseflow.codesign.hardware.proxy.analytic import Roofline
from sparseflow.codesign.hardware.proxy.device import DeviceSpec, device_here
from sparseflow.codesign.hardware.proxy.features import FEATURES, build_layer_features
from sparseflow.codesign.hardware.proxy.fitting import Judged, Training, fit, judge
from sparseflow.codesign.hardware.proxy.layer_proxy import LayerHwProxy
from sparseflow.codesign.hardware.proxy.points import Point, PointFile, Points, read_points, write_points
from sparseflow.codesign.hardware.proxy.residual_model import LayerProxyModel
from sparseflow.codesign.hardware.proxy.synthetic_layers import Grid, LayerConfig

__all__ = [
    "FEATURES",
    "DeviceSpec",
    "Grid",
    "Judged",
    "LayerConfig",
    "LayerHwProxy",
    "LayerProxyModel",
    "Point",
    "PointFile",
    "Points",
    "Roofline",
    "Training",
    "build_layer_features",
    "device_here",
    "fit",
    "judge",
    "read_points",
    "write_points",
]
