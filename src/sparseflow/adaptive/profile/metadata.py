"""What a profile is of, and whether that is the model and the device here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparseflow.adaptive.plan.space import TIERS, PlanSpace, Tier
from sparseflow.core.device import describe_device
from sparseflow.errors import FileFormatError, InputError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ProfileMetadata:
    """What a profile is of.

    Attributes:
        model_id: See `identity.model_id`.
        device: `kind`, `name`, `cores`, `threads` of `core.device`.
        space: The model's plans.
        vision_tokens: Of one image, at each tier.
        how: What else times depend on.
    """

    model_id: str
    device: Mapping[str, Any]
    space: PlanSpace
    vision_tokens: Mapping[Tier, int] = field(default_factory=dict)
    how: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing = [tier for tier in self.space.geometry.tiers if tier not in self.vision_tokens]
        counts = [self.vision_tokens[tier] for tier in TIERS if tier in self.vision_tokens]
        if (missing and self.vision_tokens) or counts != sorted(counts) or any(count < 1 for count in counts):
            raise InputError(
                f"`vision_tokens` (={dict(self.vision_tokens)}) must ascend with the tiers "
                f"{', '.join(self.space.geometry.tiers)}, each at least 1"
            )

    def images(self, vision_tokens: int) -> float:
        """How many of the profile's images those of a prompt amount to: what `LatencyQuery.images` counts in.

        A profile knows images of one size. Two images of half that size are 1.0; no image is 0.0.

        Args:
            vision_tokens: Of all images of the prompt, at the highest tier.

        Raises:
            InputError: There are some, and the profile measured no images.
        """
        if vision_tokens == 0:
            return 0.0
        if not self.vision_tokens:
            raise InputError(
                "the profile measured no images, so nothing is known of images: profile the model with them, "
                "or send text only"
            )
        return vision_tokens / max(self.vision_tokens.values())

    def check(self, model_id: str, device: torch.device | str) -> None:
        """That it is of this model and this device.

        Raises:
            InputError: It is not; the message says what differs.
        """
        if model_id != self.model_id:
            raise InputError(
                f"this profile is of another model (id {self.model_id}; yours is {model_id}): profile yours "
                "with `sparseflow adaptive profile`"
            )
        here = device_facts(device)
        if here != dict(self.device):
            told = [
                f"{name} {self.device.get(name)!r}, here {here[name]!r}"
                for name in here
                if here[name] != self.device.get(name)
            ]
            raise InputError(
                f"this profile is of another device ({'; '.join(told)}): times do not carry over; "
                "profile the model here with `sparseflow adaptive profile`"
            )

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {
            "model_id": self.model_id,
            "device": dict(self.device),
            "space": self.space.to_dict(),
            "vision_tokens": dict(self.vision_tokens),
            "how": dict(self.how),
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> ProfileMetadata:
        """What `to_dict` gave.

        Raises:
            FileFormatError: It is something else.
        """
        try:
            own: dict[str, Any] = {name: record[name] for name in cls.__dataclass_fields__}
            own["space"] = PlanSpace.from_dict(record["space"])
            return cls(**own)
        except FileFormatError:
            raise
        except (KeyError, TypeError, InputError) as error:
            raise FileFormatError(
                f"it does not say what model and device a profile is of: {error!r}"
            ) from error


def device_facts(device: torch.device | str) -> dict[str, Any]:
    """What of a device times hold for. Versions of libraries are not among it: the predictor learns on."""
    found = describe_device(device)
    return {"kind": found.kind, "name": found.name, "cores": found.cores, "threads": found.threads}
