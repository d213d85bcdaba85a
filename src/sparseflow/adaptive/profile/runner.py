"""What a profile measures with: something that runs a request of a given size and says how long each part
took."""

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
    """One request's times.

    Attributes:
        prefill_ms: From its inputs to its first token.
        steps_ms: Each further token, in order.

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
                    f"`{name}` (={value!r}) must be a finite time above 0 ms; the runner's timer is wrong"
                )


def computed(model: PreTrainedModel) -> dict[str, Any]:
    """How a model computes, as far as its times depend on it: number format, attention and experts."""
    config: Any = model.config
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    return {
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "attention": getattr(inner, "_attn_implementation", None),
        "experts": getattr(inner, "_experts_implementation", None),
    }


class ProfileRunner(Protocol):
    """Runs requests of given sizes on one device: `EngineRunner` as they are served, `EagerRunner` by the
    model's own forward."""

    @property
    def model_id(self) -> str:
        """Of the model; see `identity.model_id`."""
        ...

    @property
    def device(self) -> str:
        """Where it runs, as torch names it."""
        ...

    @property
    def vision_tokens(self) -> Mapping[Tier, int]:
        """Tokens that one image becomes at each tier; empty where the model takes none."""
        ...

    @property
    def how(self) -> Mapping[str, Any]:
        """What else times depend on, such as the implementation of attention; in JSON's types. Known before
        anything is made ready to run."""
        ...

    def run(self, plan: Plan, text_tokens: int, *, steps: int, batch: int = 1) -> RequestTimes:
        """Run a prompt, and then some steps of a batch of requests like it.

        Args:
            plan: With a tier, the prompt has one image.
            text_tokens: Those of the prompt that are not of the image; at least 1.
            steps: Tokens after the first; 0 or more.
            batch: Requests that run when this one's turn comes, itself included: in an engine of any plans,
                elsewhere rows of each step.

        Raises:
            RuntimeError: It cannot be run, as for want of memory. The profile notes it and goes on.
            RunError: Nothing can be measured as things are. It ends the profile.
        """
        ...
