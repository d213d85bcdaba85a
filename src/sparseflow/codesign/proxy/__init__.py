"""The hardware proxy: what layers take on devices, predicted by a roofline and what was learned on top of it.

::

    from sparseflow.codesign.proxy import DeviceSpec, LayerHwProxy, fit, read_points
    proxy = LayerHwProxy.analytic()                       # or fit(read_points("points.parquet").points)
    proxy.table(layers, [DeviceSpec.of(chip) for chip in chips])["lat_ms"]     # [L, S]
"""

from __future__ import annotations

from sparseflow.codesign.proxy.device import DeviceSpec
from sparseflow.codesign.proxy.features import FEATURES, build_layer_features
from sparseflow.codesign.proxy.fit import Judged, Training, fit, judge
from sparseflow.codesign.proxy.here import device_here
from sparseflow.codesign.proxy.model import LayerProxyModel
from sparseflow.codesign.proxy.points import Point, PointFile, Points, read_points, write_points
from sparseflow.codesign.proxy.proxy import LayerHwProxy
from sparseflow.codesign.proxy.roofline import Roofline
from sparseflow.codesign.proxy.synthetic import Grid, LayerConfig

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
