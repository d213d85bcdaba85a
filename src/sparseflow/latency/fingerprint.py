"""Which device, and what on it, a measurement or a predictor is of: it is worth nothing on another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from sparseflow.core.device import DeviceInfo, describe_device
from sparseflow.core.extras import require
from sparseflow.errors import FileFormatError, InputError
from sparseflow.latency import session
from sparseflow.latency.campaign import Plan


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What must be equal for latencies to be.

    Attributes:
        kind: `"cpu"` or `"cuda"`.
        name: The device's model name.
        cores: CPUs that may be used, or streaming multiprocessors.
        flags: Instruction sets of a CPU.
        compute_capability: Of a GPU.
        provider: onnxruntime's name of the provider.
        ort_version: onnxruntime's version.
        threads: Threads within an operator; None is onnxruntime's own choice.
        conv_search: `cudnn_conv_algo_search` of the CUDA provider, None elsewhere.
        telemetry: Source of load readings.
    """

    kind: str
    name: str
    cores: int
    flags: tuple[str, ...]
    compute_capability: str | None
    provider: str
    ort_version: str
    threads: int | None
    conv_search: str | None
    telemetry: str

    @classmethod
    def of_plan(cls, plan: Plan) -> Fingerprint:
        """The fingerprint of a collection. Raises FileFormatError where its plan does not tell."""
        config, environment = plan.config, plan.environment
        try:
            device = environment["device"]
            on_gpu = session.short_name(config["provider"]) == "cuda"
            return cls(
                kind=device["kind"],
                name=device["name"],
                cores=len(config["cpus"]) if config["cpus"] and not on_gpu else device["cores"],
                flags=tuple(device["flags"]),
                compute_capability=device["compute_capability"],
                provider=session.provider_name(config["provider"]),
                ort_version=environment["onnxruntime"],
                threads=config["threads"],
                conv_search=config["conv_search"] if on_gpu else None,
                telemetry=config["telemetry"]["source"],
            )
        except (KeyError, TypeError) as error:
            raise FileFormatError(
                f"the plan of the collection does not tell its device: {error!r}; collect anew"
            ) from error

    def check(self, other: Fingerprint, what: str) -> None:
        """See that `other` is of the same device and settings; telemetry may come from elsewhere.

        Raises:
            InputError: It is not; the message says in which way.
        """
        differing = [
            f"{f.name} is {getattr(other, f.name)!r} and not {getattr(self, f.name)!r}"
            for f in fields(self)
            if f.name != "telemetry" and getattr(self, f.name) != getattr(other, f.name)
        ]
        if differing:
            raise InputError(
                f"{what} is of another device or other settings: {'; '.join(differing)}; latencies of one "
                f"say nothing of the other: collect and train on the device that is asked about"
            )

    def check_here(self, gpu: int = 0) -> None:
        """See that this machine is the device.

        Raises:
            InputError: It is not; the message says in which way.
            DeviceError: It has no such device.
        """
        here = describe_device("cpu" if self.kind == "cpu" else f"cuda:{gpu}")
        self.check(self._with(here), "this machine")

    def _with(self, info: DeviceInfo) -> Fingerprint:
        return Fingerprint(
            **asdict(self)
            | {
                "kind": info.kind,
                "name": info.name,
                "cores": info.cores,
                "flags": info.flags,
                "compute_capability": info.compute_capability,
                "ort_version": require("onnxruntime", "latency").__version__,
            }
        )

    def to_dict(self) -> dict[str, Any]:
        """The fingerprint in JSON's types."""
        return {**asdict(self), "flags": list(self.flags)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Fingerprint:
        """Read back what `to_dict` gave. Raises FileFormatError where it is something else."""
        try:
            return cls(**{**record, "flags": tuple(record["flags"])})
        except (KeyError, TypeError) as error:
            raise FileFormatError(f"the fingerprint of a device cannot be read: {error!r}") from error
