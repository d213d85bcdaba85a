"""Device and settings of a measurement or predictor, which do not transfer to others."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from sparseflow.core.checks import check_one_of
from sparseflow.core.device import describe_device
from sparseflow.errors import FileFormatError, InputError
from sparseflow.latency.graph import session
from sparseflow.latency.measure.config import CollectionConfig
from sparseflow.latency.measure.plan import CollectionPlan


@dataclass(frozen=True, kw_only=True)
class DeviceFingerprint:
    """Device and settings that determine latencies.

    Attributes:
        kind: `"cpu"` or `"cuda"`.
        name: Model name of the device.
        cores: Usable CPUs, or streaming multiprocessors.
        flags: Instruction sets of a CPU.
        compute_capability: Compute capability of a GPU.
        provider: Name of the provider, see `session.PROVIDERS`.
        ort_version: Version of onnxruntime, followed by that of OpenVINO if it runs the models.
        threads: Threads within an operator; None is onnxruntime's choice.
        conv_search: `cudnn_conv_algo_search` of the CUDA provider, None on other providers.
        telemetry: Source of the load readings.
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
    def from_plan(cls, plan: CollectionPlan) -> DeviceFingerprint:
        """Build the fingerprint of a collection.

        Raises:
            FileFormatError: The plan lacks the device.
        """
        config, environment = plan.config, plan.environment
        try:
            device = environment["device"]
            on_gpu = session.get_device_type(config["provider"]) == "cuda"
            check_one_of(session.PROVIDERS, kind=device["kind"])
            return cls(
                kind=device["kind"],
                name=device["name"],
                cores=len(config["cpus"]) if config["cpus"] and not on_gpu else device["cores"],
                flags=tuple(device["flags"]),
                compute_capability=device["compute_capability"],
                provider=session.resolve_provider(config["provider"]),
                ort_version=environment["onnxruntime"],
                threads=config["threads"],
                conv_search=config["conv_search"] if on_gpu else None,
                telemetry=config["telemetry"]["source"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FileFormatError(
                f"the plan of the collection lacks a valid device: {error!r}; collect into another directory"
            ) from error

    @classmethod
    def from_local_device(cls, provider: str = "cpu", *, gpu: int = 0) -> DeviceFingerprint:
        """Build the fingerprint of this machine, with the default settings of a collection.

        Raises:
            DeviceError: This machine has no such device.
        """
        kind = session.get_device_type(provider)
        device = describe_device("cpu" if kind == "cpu" else f"cuda:{gpu}")
        defaults = CollectionConfig.model_fields
        return cls(
            kind=device.kind,
            name=device.name,
            cores=device.cores,
            flags=device.flags,
            compute_capability=device.compute_capability,
            provider=session.resolve_provider(provider),
            ort_version=session.get_runtime_version(provider),
            threads=defaults["threads"].default,
            conv_search=defaults["conv_search"].default if kind == "cuda" else None,
            telemetry="gpm" if kind == "cuda" else "host",
        )

    def is_same_kind(self, other: DeviceFingerprint) -> bool:
        """Return whether latencies of `other` are those of this device, apart from versions and size.

        The number of CPUs hardly matters for one thread.
        """
        names = ("kind", "name", "flags", "compute_capability", "provider", "threads", "conv_search")
        return all(getattr(self, name) == getattr(other, name) for name in names) and (
            self.kind != "cpu" or self.threads == 1 or self.cores == other.cores
        )

    def check_equal(self, other: DeviceFingerprint, description: str) -> None:
        """Check that `other` has the same device and settings; `telemetry` may differ.

        Raises:
            InputError: A field differs; the message lists all that do.
        """
        differing = [
            f"{f.name} is {getattr(other, f.name)!r}, expected {getattr(self, f.name)!r}"
            for f in fields(self)
            if f.name != "telemetry" and getattr(self, f.name) != getattr(other, f.name)
        ]
        if differing:
            raise InputError(
                f"{description} has another device or other settings: {'; '.join(differing)}; latencies "
                "are not transferable: train one predictor for each device, provider and number of threads"
            )

    def check_local_device(self, gpu: int = 0) -> None:
        """Check that this machine is the device.

        Raises:
            InputError: A field differs; the message lists all that do.
            DeviceError: This machine has no such device.
        """
        device = describe_device("cpu" if self.kind == "cpu" else f"cuda:{gpu}")
        local = replace(
            self,
            kind=device.kind,
            name=device.name,
            cores=device.cores,
            flags=device.flags,
            compute_capability=device.compute_capability,
            ort_version=session.get_runtime_version(self.provider),
        )
        self.check_equal(local, "this machine")

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {**asdict(self), "flags": list(self.flags)}


def describe_threads(threads: int | None) -> str:
    """Return a number of threads within an operator in words; None is onnxruntime's choice."""
    if threads is None:
        return "onnxruntime's number of threads"
    return f"{threads} thread{'' if threads == 1 else 's'}"
