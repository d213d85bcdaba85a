"""LayerHwProxy: latency, memory and power of layers and segments on devices.

    latency = roofline * factor        memory = analytic * factor        power = analytic * factor

Factors are what `LayerProxyModel` learned on devices that were measured. On any other device they are 1, and
`known` says so: what it tells there is analytic. All of it is differentiable: gradients go to a layer's
`flops` and `bytes` where those are tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sparseflow.codesign.hardware.chips import ChipType
from sparseflow.codesign.hardware.proxy.analytic import (
    Roofline,
    analytic_memory_mb,
    analytic_power_w,
    default_power,
    default_workspace,
)
from sparseflow.codesign.hardware.proxy.device import DeviceSpec
from sparseflow.codesign.hardware.proxy.features import FEATURES, features
from sparseflow.codesign.hardware.proxy.inputs import Work
from sparseflow.codesign.hardware.proxy.residual_model import TARGETS, LayerProxyModel
from sparseflow.core.artifact import load_tensors, save_tensors
from sparseflow.core.layers import LAYER_TYPES, PRECISIONS, LayerNode
from sparseflow.errors import FileFormatError, InputError

Device = DeviceSpec | ChipType
Known = Literal["measured", "analytic"]

_MARK = {"format": "sparseflow-layer-proxy", "version": "1"}
_MODEL = "model."


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerHwProxy:
    """Predicts what layers cost. Make one with `analytic`, `fit.fit` or `load`.

    Attributes:
        roofline: Coefficients of latency; row 1 + d is of the d-th device.
        power: Coefficients of power, float64 [1 + D, 3].
        workspace: What libraries hold beside layers, MB, float64 [1 + D, types, precisions].
        devices: That were measured.
        model: What was learned on them; None where nothing was.
        mode: How they were measured, `"eager"` or `"graph"`; None where none was.
        provenance: Plain JSON: `"measured"` and `"analytic"` (numbers of points), `"environments"` (of the
            measured ones, by id) and `"held_out"` (how good predictions were, None where that was not asked).
    """

    roofline: Roofline
    power: Tensor
    workspace: Tensor
    devices: tuple[DeviceSpec, ...] = ()
    model: LayerProxyModel | None = None
    mode: str | None = None
    provenance: Mapping[str, Any] = field(
        default_factory=lambda: {"measured": 0, "analytic": 0, "environments": {}, "held_out": None}
    )

    @classmethod
    def analytic(cls) -> LayerHwProxy:
        """Without any measurement, for every device: peak rates are reached, nothing is added."""
        return cls(roofline=Roofline.ideal(), power=default_power(), workspace=default_workspace())

    def known(self, device: Device, layer: LayerNode | None = None) -> Known:
        """Whether predictions for a device are from measurements there, or analytic.

        Args:
            device: Of the same name and peak rates as the one that was measured; one that shares the name
                only is another one.
            layer: Whether for its type and precision, too; a device is `"measured"` where any was.
        """
        spec = self._spec(device)
        if spec not in self.devices:
            return "analytic"
        if layer is None:
            return "measured"
        place = (
            1 + self.devices.index(spec),
            LAYER_TYPES.index(layer.layer_type),
            PRECISIONS.index(layer.precision),
        )
        return "measured" if bool(self.roofline.fitted[place]) else "analytic"

    def predict_layer(self, layer: LayerNode, device: Device) -> dict[str, Tensor]:
        """One layer on one device.

        Returns:
            `"lat_ms"` milliseconds, `"mem_mb"` MB of 1e6 bytes, `"power_w"` watts while it runs; float64
            scalars.

        Raises:
            InputError: The layer's figures make no sense.
        """
        return {name: value[0] for name, value in self.predict_pairs([layer], [device]).items()}

    def predict_segment(
        self, layers: Sequence[LayerNode], device: Device, mode: Literal["serial", "max"] = "serial"
    ) -> dict[str, Tensor]:
        """Layers on one device.

        Args:
            layers: At least one.
            device: That runs all of them.
            mode: Latency is the sum over layers, or their largest (a balanced pipeline).

        Returns:
            As `predict_layer`: memory is all weights and the most activations that a layer holds, power is
            the mean over layers weighted with their latencies.

        Raises:
            InputError: There is no layer, one makes no sense, or the mode is unknown.
        """
        if mode not in ("serial", "max"):
            raise InputError(f"`mode` (={mode!r}) must be serial or max")
        work = Work.pairs(layers, [self._spec(device)] * len(layers))
        found = self._predict(work)
        latency, weights = found["lat_ms"], work.weight_bytes / 1e6
        return {
            "lat_ms": latency.sum() if mode == "serial" else latency.max(),
            "mem_mb": weights.sum() + (found["mem_mb"] - weights).clamp_min(0.0).max(),
            "power_w": (found["power_w"] * latency).sum() / latency.sum().clamp_min(1e-12),
        }

    def predict_grid(self, layers: Sequence[LayerNode], devices: Sequence[Device]) -> dict[str, Tensor]:
        """Every layer on every device, as `predict_layer`: float64 [L, S], differentiable.

        Raises:
            InputError: There is no layer or no device, or a layer's figures make no sense.
        """
        return self._predict(Work.grid(layers, [self._spec(device) for device in devices]))

    def predict_pairs(self, layers: Sequence[LayerNode], devices: Sequence[Device]) -> dict[str, Tensor]:
        """The first layer on the first device, and so on, as `predict_layer`: float64 [N], differentiable.

        Raises:
            InputError: There are not as many devices as layers, or a layer's figures make no sense.
        """
        return self._predict(Work.pairs(layers, [self._spec(device) for device in devices]))

    def table(self, layers: Sequence[LayerNode], devices: Sequence[Device]) -> dict[str, np.ndarray]:
        """Every layer on every device, without gradients: float64 [L, S]; see `predict_grid`."""
        with torch.no_grad():
            return {name: value.numpy() for name, value in self.predict_grid(layers, devices).items()}

    def save(self, path: Path | str) -> None:
        """Write it as safetensors, in place of what is there; what it is of stands in the metadata as JSON.

        Raises:
            OSError: The file cannot be written.
        """
        told, tensors = self._parts()
        proxy = json.dumps(told | {"provenance": dict(self.provenance)}, allow_nan=False)
        save_tensors(path, tensors, _MARK | {"features": json.dumps(FEATURES), "proxy": proxy})

    @property
    def digest(self) -> str:
        """SHA-256 of all that predictions follow from, in hexadecimal; `provenance` does not count."""
        told, tensors = self._parts()
        found = hashlib.sha256(json.dumps([FEATURES, told], sort_keys=True).encode())
        for name, value in sorted(tensors.items()):
            array = value.detach().cpu().contiguous().numpy()
            found.update(f"{name} {array.dtype} {array.shape}".encode())
            found.update(array.tobytes())
        return found.hexdigest()

    def _parts(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What predictions follow from: JSON's types, and tensors by name."""
        tensors = {
            "roofline": self.roofline.values, "fitted": self.roofline.fitted, "power": self.power,
            "workspace": self.workspace,
        }  # fmt: skip
        told: dict[str, Any] = {
            "devices": [device.to_dict() for device in self.devices], "mode": self.mode, "model": None,
        }  # fmt: skip
        if self.model is not None:
            told["model"] = {"members": self.model.members, "hidden": self.model.hidden}
            tensors |= {_MODEL + name: value for name, value in self.model.state_dict().items()}
        return told, tensors

    @classmethod
    def load(cls, path: Path | str) -> LayerHwProxy:
        """Read what `save` wrote.

        Raises:
            InputError: There is no such file.
            FileFormatError: It is something else, damaged, or of other features than this version's.
        """
        mark = _MARK | {"features": json.dumps(FEATURES)}
        metadata, tensors = load_tensors(path, mark, "layer proxy")
        try:
            told = json.loads(metadata["proxy"])
            devices = tuple(DeviceSpec.from_dict(each) for each in told["devices"])
            ideal = Roofline.ideal()
            rows = (1 + len(devices), *ideal.values.shape[1:])
            for name, shape in (
                ("roofline", rows), ("fitted", rows[:-1]), ("power", (rows[0], 3)), ("workspace", rows[:-1]),
            ):  # fmt: skip
                if tensors[name].shape != shape:
                    raise ValueError(f"{name} has the shape {tuple(tensors[name].shape)}, not {shape}")
            if not all(bool(torch.isfinite(value).all()) for value in tensors.values()):
                raise ValueError("some of its numbers are not finite")
            model = None
            if told["model"] is not None:
                model = LayerProxyModel(**told["model"])
                own = {
                    name[len(_MODEL) :]: value for name, value in tensors.items() if name.startswith(_MODEL)
                }
                model.load_state_dict(own)
                model.requires_grad_(False)
            return cls(
                roofline=Roofline(values=tensors["roofline"], fitted=tensors["fitted"]),
                power=tensors["power"], workspace=tensors["workspace"], devices=devices, model=model,
                mode=told["mode"], provenance=dict(told["provenance"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise FileFormatError(f"{path} is not a layer proxy that can be read: {error}") from error

    def _predict(self, work: Work) -> dict[str, Tensor]:
        row = self._rows(work)
        latency = self.roofline.latency_ms(work, row)
        memory = analytic_memory_mb(work, self.workspace, row)
        if self.model is None or not bool((row > 0).any()):
            return {
                "lat_ms": latency,
                "mem_mb": memory,
                "power_w": analytic_power_w(work, latency, self.power, row),
            }
        measured = (row[work.device] > 0).double()[..., None]
        found = (self.model(features(work)) * measured).exp().unbind(-1)
        factor = dict(zip(TARGETS, found, strict=True))
        latency = latency * factor["lat_ms"]
        power = analytic_power_w(work, latency, self.power, row) * factor["power_w"]
        return {
            "lat_ms": latency,
            "mem_mb": memory * factor["mem_mb"],
            "power_w": torch.minimum(power, work.tdp_w),
        }

    def _spec(self, device: Device) -> DeviceSpec:
        """A device that was measured as it was told then: its cores and rates, too."""
        asked = DeviceSpec.of(device)
        for own in self.devices:
            if (own.name, own.peak_flops, own.peak_bw) == (asked.name, asked.peak_flops, asked.peak_bw):
                return own
        return asked

    def _rows(self, work: Work) -> Tensor:
        """Of coefficients, for each device; 0 for one that was not measured."""
        own = self.devices
        return torch.tensor([1 + own.index(each) if each in own else 0 for each in work.devices])
