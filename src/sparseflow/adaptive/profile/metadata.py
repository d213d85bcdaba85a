"""Model, device and settings that a profile belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from sparseflow.adaptive.plan.space import TIERS, PlanSpace, Tier
from sparseflow.core.artifact import DictField
from sparseflow.core.device import describe_device
from sparseflow.errors import InputError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ProfileMetadata:
    """Model, device and settings of a profile.

    Attributes:
        model_id: Digest of the model; see `identity.compute_model_id`.
        device: `kind`, `name`, `cores` and `threads` of the device.
        space: Plans of the model.
        vision_tokens: Tokens of one image at each tier.
        config: Further settings that latency depends on, such as the number format and the padding.
    """

    model_id: str
    device: Mapping[str, Any]
    space: Annotated[PlanSpace, DictField()]
    vision_tokens: Mapping[Tier, int] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing = [tier for tier in self.space.geometry.tiers if tier not in self.vision_tokens]
        counts = [self.vision_tokens[tier] for tier in TIERS if tier in self.vision_tokens]
        if (missing and self.vision_tokens) or counts != sorted(counts) or any(count < 1 for count in counts):
            raise InputError(
                f"`vision_tokens` (={dict(self.vision_tokens)}) must ascend with the tiers "
                f"{', '.join(self.space.geometry.tiers)} and be at least 1"
            )

    def count_images(self, vision_tokens: int) -> float:
        """Convert the vision tokens of a prompt to a number of images: `LatencyQuery.images`.

        A profile has images of one size. Two images of half that size are 1.0; no image is 0.0.

        Args:
            vision_tokens: Tokens of all images of the prompt at the highest tier.

        Raises:
            InputError: The prompt has images, and the profile has none.
        """
        if vision_tokens == 0:
            return 0.0
        if not self.vision_tokens:
            raise InputError(
                "the profile contains no images, so requests with images cannot be predicted: profile the "
                "model with images, or send text only"
            )
        return vision_tokens / max(self.vision_tokens.values())

    def check(self, model_id: str, device: torch.device | str) -> None:
        """Check that the profile is of this model on this device.

        Raises:
            InputError: It is of another model or device; the message names the differences.
        """
        if model_id != self.model_id:
            raise InputError(
                f"the profile is of another model (id {self.model_id}, current: {model_id}); profile this "
                "one with `sparseflow adaptive profile`"
            )
        current = get_device_facts(device)
        if current != dict(self.device):
            differences = [
                f"{name} {self.device.get(name)!r}, current: {current[name]!r}"
                for name in current
                if current[name] != self.device.get(name)
            ]
            raise InputError(
                f"the profile is of another device ({'; '.join(differences)}), and latency does not "
                "transfer; profile the model on this one with `sparseflow adaptive profile`"
            )


def get_device_facts(device: torch.device | str) -> dict[str, Any]:
    """Facts about a device that latency depends on.

    Library versions are not among them, because predictors adapt to them.
    """
    info = describe_device(device)
    return {"kind": info.kind, "name": info.name, "cores": info.cores, "threads": info.threads}
