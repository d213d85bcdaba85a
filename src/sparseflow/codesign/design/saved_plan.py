"""Saved plans (`plan.json`): a decision and everything that is needed to evaluate it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field

from sparseflow.codesign.design.config import CodesignConfig
from sparseflow.codesign.design.decision import CostReference, DecisionCost, HardwareDecision
from sparseflow.codesign.design.hardware import Hardware
from sparseflow.codesign.hardware.chips import ChipLibrary
from sparseflow.codesign.hardware.proxy import LayerHwProxy
from sparseflow.codesign.workload.layers import LayersField
from sparseflow.core.artifact import Artifact
from sparseflow.core.layers import LayerNode
from sparseflow.errors import FileFormatError, InputError

PLAN_FILE = "plan.json"


class HardwareArtifact(Artifact):
    """Base of artifacts that contain the hardware of a design."""

    settings: CodesignConfig
    library: ChipLibrary
    reference: CostReference
    proxy: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None
    """SHA-256 of the proxy in the same directory; None for a plain roofline."""

    @classmethod
    def from_hardware(cls, hardware: Hardware, out_dir: Path, **content: Any) -> Self:
        """Build the artifact and copy a custom proxy to the directory.

        Raises:
            InputError: There is no reference; see `Hardware.initial_decision`.
        """
        proxy = hardware.proxy.digest if hardware.has_custom_proxy else None
        if proxy is not None:
            hardware.proxy.save(_proxy_path(out_dir, proxy))
        return cls(
            settings=hardware.config, library=hardware.library, reference=hardware.required_reference,
            proxy=proxy, **content,
        )  # fmt: skip

    def build_hardware(self, path: Path) -> Hardware:
        """Rebuild the hardware.

        Args:
            path: File that contains the artifact.

        Raises:
            FileFormatError: Its parts are inconsistent, or the proxy is missing or has changed.
        """
        try:
            proxy = None if self.proxy is None else LayerHwProxy.load(_proxy_path(path.parent, self.proxy))
            hardware = Hardware(self.settings, proxy, self.library)
        except InputError as error:
            raise FileFormatError(f"{path}: {error}; keep the plan and its proxy in one directory") from error
        if proxy is not None and proxy.digest != self.proxy:
            raise FileFormatError(f"{path}: its proxy was replaced by another one; restore the original file")
        hardware.reference = self.reference
        return hardware


def _proxy_path(directory: Path, digest: str) -> Path:
    # Named by digest, so that a refitted proxy does not replace the one of an existing plan.
    return directory / f"proxy-{digest[:12]}.safetensors"


class _PlanArtifact(HardwareArtifact):
    FORMAT: ClassVar[str] = "sparseflow.codesign.plan"
    VERSION: ClassVar[int] = 2
    HINT: ClassVar[str] = "create a plan with `sparseflow codesign plan`"

    layers: LayersField
    decision: HardwareDecision
    cost: DecisionCost
    extra: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SavedPlan:
    """Content of a plan file.

    Attributes:
        hardware: Evaluates the decision.
        layers: Layers of the model.
        decision: The decision.
        extra: Additional information.
    """

    hardware: Hardware
    layers: list[LayerNode]
    decision: HardwareDecision
    extra: Mapping[str, Any] = field(default_factory=dict)


def save_plan(
    out_dir: Path | str,
    hardware: Hardware,
    layers: Sequence[LayerNode],
    decision: HardwareDecision,
    *,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write `plan.json` and return its path.

    Args:
        out_dir: Output directory.
        hardware: Evaluates the decision.
        layers: Layers of the model, used to detect plans of other models; see `verify`.
        decision: The decision.
        extra: Additional information, as JSON types.

    Raises:
        InputError: The decision does not fit, or there is no reference.
        OSError: The file cannot be written; an existing one is unchanged.
    """
    directory = Path(out_dir)
    plan = _PlanArtifact.from_hardware(
        hardware, directory, layers=list(layers), decision=decision,
        cost=hardware.evaluate_cost(layers, decision), extra=dict(extra or {}),
    )  # fmt: skip
    return plan.save(directory / PLAN_FILE, indent=1)


def load_plan(path: Path | str) -> SavedPlan:
    """Read what `save_plan` wrote.

    Raises:
        InputError: The file does not exist.
        FileFormatError: The file is invalid, or its proxy is missing.
    """
    plan = _PlanArtifact.load(path)
    hardware = plan.build_hardware(Path(path))
    try:
        hardware.check_decision(plan.layers, plan.decision)
    except FileFormatError as error:
        raise FileFormatError(f"{path}: {error}") from error
    return SavedPlan(hardware=hardware, layers=plan.layers, decision=plan.decision, extra=plan.extra)
