"""Protocol of profile runners: run a request of a given size and return the time of each part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sparseflow.adaptive.plan.space import Plan, Tier
from sparseflow.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class RequestTimes:
    """Times of one request.

    Attributes:
        prefill_ms: Time to the first token.
        steps_ms: Time of each further token, in order.

    Raises:
        InputError: A time is not a finite number above 0.
    """

    prefill_ms: float
    steps_ms: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps_ms", tuple(self.steps_ms))
        for name, value in [("prefill_ms", self.prefill_ms), *(("steps_ms", step) for step in self.steps_ms)]:
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0.0):
                raise InputError(
                    f"`{name}` (={value!r}) must be finite and above 0 ms; fix the runner's timer"
                )


def describe_computation(model: PreTrainedModel) -> dict[str, Any]:
    """Number format and implementations of attention and experts, which latency depends on."""
    config: Any = model.config
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return {
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "attention": getattr(text_config, "_attn_implementation", None),
        "experts": getattr(text_config, "_experts_implementation", None),
    }


class ProfileRunner(Protocol):
    """Runs requests of given sizes on one device.

    `EngineRunner` serves them by an engine, `EagerRunner` calls the model's own forward.
    """

    @property
    def model_id(self) -> str:
        """Digest of the model; see `identity.compute_model_id`."""
        ...

    @property
    def device(self) -> str:
        """Device, as torch names it."""
        ...

    @property
    def vision_tokens(self) -> Mapping[Tier, int]:
        """Tokens of one image at each tier; empty if the model takes no images."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """Further settings that latency depends on, in JSON types; available before the first run."""
        ...

    def run(self, plan: Plan, text_tokens: int, *, steps: int, batch: int = 1) -> RequestTimes:
        """Run a prompt, then decode steps of a batch of such requests.

        Args:
            plan: Plan; the prompt has one image if it has a tier.
            text_tokens: Prompt tokens that do not belong to the image, at least 1.
            steps: Tokens after the first, 0 or more.
            batch: Concurrent requests when this one starts to run, including itself. They have any plans in
                an engine and are rows of each step elsewhere.

        Raises:
            RuntimeError: The request failed, for example out of memory. The profile records it and continues.
            RunError: Nothing can be measured. It ends the collection.
        """
        ...
