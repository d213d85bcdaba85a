"""Measured requests of a profile, and the model, device and settings that they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from sparseflow.adaptive.plan.space import TIERS, Plan, PlanSpace, Tier
from sparseflow.core.artifact import DictField
from sparseflow.core.checks import check_at_least, check_between, check_positive
from sparseflow.core.device import describe_device
from sparseflow.errors import InputError

if TYPE_CHECKING:
    import torch

CaseKey = tuple[str, int, int, float, int]
"""Plan id, text tokens, batch size, load and round: what is measured once."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measured request.

    Attributes:
        plan: Plan; the request had one image if the plan has a tier.
        text_tokens: Prompt tokens that do not belong to the image.
        batch: Concurrent requests when it started to run, including itself.
        load: Share of the device that others used, 0 to 1; for an engine, by requests that arrive later.
        round: Round of the collection.
        session: Index into `PlanProfile.environments`.
        prefill_ms: Time to the first token; None if the request failed.
        steps_ms: Time of each further token, in order.
        error: Why the request failed, else None.

    Raises:
        InputError: A value is out of range.
    """

    plan: Annotated[Plan, DictField()]
    text_tokens: int
    batch: int = 1
    load: float = 0.0
    round: int = 0
    session: int = 0
    prefill_ms: float | None = None
    steps_ms: tuple[float, ...] = ()
    error: str | None = None

    def __post_init__(self) -> None:
        check_at_least(1, text_tokens=self.text_tokens, batch=self.batch)
        check_at_least(0, round=self.round)
        check_between(0.0, 1.0, load=self.load)
        for time_ms in (*self.steps_ms, *(() if self.prefill_ms is None else (self.prefill_ms,))):
            check_positive(time_ms=time_ms)
        if (self.prefill_ms is None) != (self.error is not None):
            raise InputError(
                f"{self.plan.id}, {self.text_tokens} tokens: expected either a time or an error, got "
                f"`prefill_ms` (={self.prefill_ms}) and `error` (={self.error!r})"
            )

    @property
    def case(self) -> CaseKey:
        """Measured case; it is repeated if it failed, or if more steps are requested."""
        return (self.plan.id, self.text_tokens, self.batch, self.load, self.round)

    @property
    def key(self) -> tuple[str, int, int, float, int, int]:
        """Unique key in a profile: the case and the number of steps."""
        return (*self.case, len(self.steps_ms))

    def total_ms(self, new_tokens: int) -> float:
        """Time of the request up to its `new_tokens`-th token.

        Raises:
            InputError: The request has fewer tokens.
        """
        if self.prefill_ms is None or not 1 <= new_tokens <= 1 + len(self.steps_ms):
            raise InputError(
                f"`new_tokens` (={new_tokens}) must be from 1 to {1 + len(self.steps_ms)}, and the request "
                "must not have failed"
            )
        return self.prefill_ms + sum(self.steps_ms[: new_tokens - 1])


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
        sizes = [self.config[name] for name in ("max_batch", "max_tokens") if name in self.config]
        for name in ("prompts", "contexts"):
            lengths = self.config.get(name, ())
            if not isinstance(lengths, list | tuple):
                raise InputError(f"`config.{name}` must be a list of lengths, not {type(lengths).__name__}")
            sizes += lengths
        if not all(type(size) is int and 1 <= size < 2**31 for size in sizes):
            raise InputError("the sizes of the engine in `config` must be integers from 1 to 2**31 - 1")

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
