"""LayerHwProxy: latency, memory and power of layers and segments on devices.

    latency = roofline * factor        memory = analytic * factor        power = analytic * factor

`LayerProxyModel` predicts the factors for measured devices; they are 1 for all others, which `get_source`
reports as "analytic". Predictions are differentiable with respect to a layer's `flops` and `bytes`.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import field_validator
from torch import Tensor

from sparseflow.codesign.hardware.chips import ChipType
from sparseflow.codesign.hardware.proxy.analytic import (
    LatencyRoofline,
    analytic_memory_mb,
    analytic_power_w,
    default_power,
    default_workspace,
)
from sparseflow.codesign.hardware.proxy.device import DeviceSpec
from sparseflow.codesign.hardware.proxy.features import FEATURES, compute_features
from sparseflow.codesign.hardware.proxy.inputs import ProxyInputs
from sparseflow.codesign.hardware.proxy.points import Mode
from sparseflow.codesign.hardware.proxy.residual_model import TARGETS, LayerProxyModel
from sparseflow.core.artifact import Artifact
from sparseflow.core.checks import check_one_of
from sparseflow.core.layers import LAYER_TYPES, PRECISIONS, LayerNode
from sparseflow.errors import FileFormatError

DeviceLike = DeviceSpec | ChipType
PredictionSource = Literal["measured", "analytic"]

_MODEL = "model."


class _ProxyArtifact(Artifact):
    FORMAT: ClassVar[str] = "sparseflow.codesign.layer-proxy"
    VERSION: ClassVar[int] = 2
    HINT: ClassVar[str] = "fit a proxy with `sparseflow codesign profile`"

    features: tuple[str, ...]
    devices: tuple[DeviceSpec, ...]
    mode: Mode | None
    model: dict[str, int] | None
    provenance: dict[str, Any]

    @field_validator("features")
    @classmethod
    def _check_features(cls, features: tuple[str, ...]) -> tuple[str, ...]:
        if features != FEATURES:
            raise ValueError("the proxy has other features than this version of SparseFlow")
        return features


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerHwProxy:
    """Predicts the cost of layers. Create it with `analytic`, `fit_proxy` or `load`.

    Attributes:
        roofline: Latency coefficients; row 1 + d belongs to device d.
        power: Power coefficients, float64 [1 + D, 3].
        workspace: Workspace memory of libraries, MB, float64 [1 + D, types, precisions].
        devices: Measured devices.
        model: Residual model; None without measurements.
        mode: Measurement mode, `"eager"` or `"graph"`; None without measurements.
        provenance: JSON types: `"measured"` and `"analytic"` (numbers of points), `"environments"` (by id)
            and `"held_out"` (summary of the cross-validation, or None).
    """

    roofline: LatencyRoofline
    power: Tensor
    workspace: Tensor
    devices: tuple[DeviceSpec, ...] = ()
    model: LayerProxyModel | None = None
    mode: Mode | None = None
    provenance: Mapping[str, Any] = field(
        default_factory=lambda: {"measured": 0, "analytic": 0, "environments": {}, "held_out": None}
    )

    @classmethod
    def analytic(cls) -> LayerHwProxy:
        """Create a proxy without measurements: devices reach their peak rates without overhead."""
        return cls(roofline=LatencyRoofline.ideal(), power=default_power(), workspace=default_workspace())

    def get_source(self, device: DeviceLike, layer: LayerNode | None = None) -> PredictionSource:
        """Return whether predictions for a device are based on measurements.

        Args:
            device: The device; it is measured if name and peak rates are those of a measured device.
            layer: If given, the layer's type and precision must have been measured, too.
        """
        spec = self._resolve_device(device)
        if spec not in self.devices:
            return "analytic"
        if layer is None:
            return "measured"
        index = (
            1 + self.devices.index(spec),
            LAYER_TYPES.index(layer.layer_type),
            PRECISIONS.index(layer.precision),
        )
        return "measured" if bool(self.roofline.fitted[index]) else "analytic"

    def predict_layer(self, layer: LayerNode, device: DeviceLike) -> dict[str, Tensor]:
        """Predict one layer on one device.

        Returns:
            `"lat_ms"` in ms, `"mem_mb"` in MB (1e6 bytes) and `"power_w"` in W while it runs; float64
            scalars.

        Raises:
            InputError: A value of the layer is out of range.
        """
        return {name: value[0] for name, value in self.predict_pairs([layer], [device]).items()}

    def predict_segment(
        self, layers: Sequence[LayerNode], device: DeviceLike, mode: Literal["serial", "max"] = "serial"
    ) -> dict[str, Tensor]:
        """Predict several layers on one device.

        Args:
            layers: At least one layer.
            device: The device that runs all of them.
            mode: `"serial"` sums the latencies, `"max"` takes the largest (a balanced pipeline).

        Returns:
            See `predict_layer`. Memory is all weights plus the largest activation memory; power is the mean
            weighted by latency.

        Raises:
            InputError: There are no layers, a value of a layer is out of range, or the mode is unknown.
        """
        check_one_of(("serial", "max"), mode=mode)
        work = ProxyInputs.from_pairs(layers, [self._resolve_device(device)] * len(layers))
        prediction = self._predict(work)
        latency, weights = prediction["lat_ms"], work.weight_bytes / 1e6
        return {
            "lat_ms": latency.sum() if mode == "serial" else latency.max(),
            "mem_mb": weights.sum() + (prediction["mem_mb"] - weights).clamp_min(0.0).max(),
            "power_w": (prediction["power_w"] * latency).sum() / latency.sum().clamp_min(1e-12),
        }

    def predict_grid(self, layers: Sequence[LayerNode], devices: Sequence[DeviceLike]) -> dict[str, Tensor]:
        """Predict every layer on every device; see `predict_layer`. float64 [L, S], differentiable.

        Raises:
            InputError: There are no layers or devices, or a value of a layer is out of range.
        """
        return self._predict(
            ProxyInputs.from_grid(layers, [self._resolve_device(device) for device in devices])
        )

    def predict_pairs(self, layers: Sequence[LayerNode], devices: Sequence[DeviceLike]) -> dict[str, Tensor]:
        """Predict each layer on the device at the same index; see `predict_layer`. float64 [N],
        differentiable.

        Raises:
            InputError: The numbers of layers and devices differ, or a value of a layer is out of range.
        """
        return self._predict(
            ProxyInputs.from_pairs(layers, [self._resolve_device(device) for device in devices])
        )

    def predict_table(
        self, layers: Sequence[LayerNode], devices: Sequence[DeviceLike]
    ) -> dict[str, np.ndarray]:
        """Predict every layer on every device without gradients, float64 [L, S]; see `predict_grid`."""
        with torch.no_grad():
            return {name: value.numpy() for name, value in self.predict_grid(layers, devices).items()}

    def save(self, path: Path | str) -> None:
        """Write the proxy to a safetensors file.

        Raises:
            OSError: The file cannot be written.
        """
        artifact, tensors = self._serialize()
        artifact.save_tensors(path, tensors)

    @property
    def digest(self) -> str:
        """SHA-256 of everything that determines predictions, in hexadecimal; excludes `provenance`."""
        artifact, tensors = self._serialize()
        config = artifact.model_dump_json(exclude={"provenance"})
        digest_hash = hashlib.sha256(config.encode())
        for name, value in sorted(tensors.items()):
            array = value.detach().cpu().contiguous().numpy()
            digest_hash.update(f"{name} {array.dtype} {array.shape}".encode())
            digest_hash.update(array.tobytes())
        return digest_hash.hexdigest()

    def _serialize(self) -> tuple[_ProxyArtifact, dict[str, Tensor]]:
        tensors = {
            "roofline": self.roofline.values, "fitted": self.roofline.fitted, "power": self.power,
            "workspace": self.workspace,
        }  # fmt: skip
        model = None
        if self.model is not None:
            model = {"members": self.model.members, "hidden": self.model.hidden}
            tensors |= {_MODEL + name: value for name, value in self.model.state_dict().items()}
        artifact = _ProxyArtifact(
            features=FEATURES, devices=self.devices, mode=self.mode, model=model,
            provenance=dict(self.provenance),
        )  # fmt: skip
        return artifact, tensors

    @classmethod
    def load(cls, path: Path | str) -> LayerHwProxy:
        """Read what `save` wrote.

        Raises:
            InputError: The file does not exist.
            FileFormatError: The file is foreign, damaged, or of another version or feature set.
        """
        artifact, tensors = _ProxyArtifact.load_tensors(path)
        try:
            ideal = LatencyRoofline.ideal()
            rows = (1 + len(artifact.devices), *ideal.values.shape[1:])
            for name, shape in (
                ("roofline", rows), ("fitted", rows[:-1]), ("power", (rows[0], 3)), ("workspace", rows[:-1]),
            ):  # fmt: skip
                if tensors[name].shape != shape:
                    raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}; expected {shape}")
            if not all(bool(torch.isfinite(value).all()) for value in tensors.values()):
                raise ValueError("a value is not finite")
            model = None
            if artifact.model is not None:
                model = LayerProxyModel(**artifact.model)
                model_state = {
                    name[len(_MODEL) :]: value for name, value in tensors.items() if name.startswith(_MODEL)
                }
                model.load_state_dict(model_state)
                model.requires_grad_(False)
            return cls(
                roofline=LatencyRoofline(values=tensors["roofline"], fitted=tensors["fitted"]),
                power=tensors["power"], workspace=tensors["workspace"], devices=artifact.devices, model=model,
                mode=artifact.mode, provenance=artifact.provenance,
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise FileFormatError(f"{path} is not a valid layer proxy: {error}") from error

    def _predict(self, work: ProxyInputs) -> dict[str, Tensor]:
        row = self._coefficient_rows(work)
        latency = self.roofline.latency_ms(work, row)
        memory = analytic_memory_mb(work, self.workspace, row)
        if self.model is None or not bool((row > 0).any()):
            return {
                "lat_ms": latency,
                "mem_mb": memory,
                "power_w": analytic_power_w(work, latency, self.power, row),
            }
        measured = (row[work.device] > 0).double()[..., None]
        factors = (self.model(compute_features(work)) * measured).exp().unbind(-1)
        factor = dict(zip(TARGETS, factors, strict=True))
        latency = latency * factor["lat_ms"]
        power = analytic_power_w(work, latency, self.power, row) * factor["power_w"]
        return {
            "lat_ms": latency,
            "mem_mb": memory * factor["mem_mb"],
            "power_w": torch.minimum(power, work.tdp_w),
        }

    def _resolve_device(self, device: DeviceLike) -> DeviceSpec:
        """Return the measured device of the same name and peak rates, if there is one."""
        spec = DeviceSpec.from_chip(device)
        identity = operator.attrgetter("name", "peak_flops", "peak_bw")
        return next((device for device in self.devices if identity(device) == identity(spec)), spec)

    def _coefficient_rows(self, work: ProxyInputs) -> Tensor:
        """Row of the coefficients for each device; 0 if it was not measured."""
        measured = self.devices
        return torch.tensor(
            [1 + measured.index(device) if device in measured else 0 for device in work.devices]
        )
