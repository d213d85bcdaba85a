"""Adapter protocol: the interface that an architecture implements so that plans can run on it.

To support another architecture, such as remote code from a hub, subclass `Adapter`:

1. `geometry`, `decoder`, `blocks` and `router` locate the parts that plans control;
2. `with_top_k` and `measure_top_k`, if a router does not store its top-k as `top_k` or does not return the
   selected experts;
3. `get_hidden_states` and `skip_block`, if a block returns more than hidden states;
4. `reduce_to_tier`, `check_tier` and `count_vision_tokens`, if the model takes images;
5. `get_cache` and `get_kv_lengths`, if the cache is not a transformers cache; the cache object must accept
   attributes. `state`, if the model stores per-request state on itself.

Then `register` it under the model's `config.model_type`. For the command line, declare it as an entry point
of an installed package, which may also register the model's classes with transformers on import::

    [project.entry-points."sparseflow.adaptive.adapters"]
    molmoe = "mypackage.adapter:MolmoEAdapter"

`PlanRuntime` checks every router on installation, and compares the blocks and routers that ran with the plan
in every forward.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparseflow.adaptive.plan.space import ModelGeometry, Tier
from sparseflow.errors import ModelError, PlanError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Inputs = Mapping[str, Any]
"""Inputs of a model's forward by name: `input_ids` [batch, tokens] int64 and, with images, their pixels."""


class Adapter(ABC):
    """Locates the parts of one model that plans control; does not change the model.

    Attributes:
        model: The transformers model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @property
    @abstractmethod
    def geometry(self) -> ModelGeometry:
        """Choices that plans for the model have."""

    @property
    @abstractmethod
    def decoder(self) -> nn.Module:
        """The stack of blocks. Each forward calls it once, with `past_key_values` as a keyword argument."""

    @property
    @abstractmethod
    def blocks(self) -> Sequence[nn.Module]:
        """The decoder's blocks in order. The first argument of each is hidden states [batch, tokens, d]."""

    @property
    def context(self) -> int | None:
        """Maximum number of tokens of prompt and answer together; None if the model does not say."""
        return getattr(getattr(self.decoder, "config", None), "max_position_embeddings", None)

    @property
    def state(self) -> Sequence[tuple[nn.Module, str]]:
        """Modules and attributes that hold per-request state; each cache keeps its own copy."""
        return ()

    @abstractmethod
    def router(self, block: nn.Module) -> nn.Module | None:
        """Router of a block; None for a block without experts."""

    def with_top_k(self, router: nn.Module, top_k: int) -> nn.Module:
        """Return a router with the same parameters that selects `top_k` experts.

        Raises:
            ModelError: The router has no `top_k`.
        """
        if not hasattr(router, "top_k"):
            raise ModelError(f"{type(router).__name__} has no `top_k`; override `with_top_k` in the adapter")
        # A shallow copy shares parameters, even after they are moved or reloaded.
        view = copy.copy(router)
        view.top_k = top_k  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        return view

    def measure_top_k(self, router: nn.Module) -> int:
        """Number of experts that a router selects, measured by running it on one zero token.

        Raises:
            ModelError: The weights are on `meta`.
        """
        weight = next(router.parameters())
        if weight.device.type == "meta":
            raise ModelError("the model's weights are on `meta`; load them and do not offload them")
        token = torch.zeros(1, weight.shape[-1], dtype=weight.dtype, device=weight.device)
        with torch.no_grad():
            # `forward` instead of a call, so that other hooks do not see the test token.
            return self.get_selected_experts(router.forward(token)).shape[-1]

    def get_selected_experts(self, routed: Any) -> Tensor:
        """Expert indices in a router's output, [tokens, top-k] int64; in transformers the last entry."""
        return routed[-1]

    def get_hidden_states(self, output: Any) -> Tensor:
        """Hidden states in a block's output, [batch, tokens, d]."""
        return output

    def skip_block(self, hidden: Tensor) -> Any:
        """Output of a block that is skipped, for the given hidden states."""
        return hidden

    def get_cache(self, output: Any) -> Any:
        """Cache in the output of the decoder or the model; None if there is none."""
        if isinstance(output, tuple):
            return next((entry for entry in output if hasattr(entry, "get_seq_length")), None)
        return getattr(output, "past_key_values", None)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Word embeddings: [batch, tokens] int64 -> [batch, tokens, d]."""
        return self.model.get_input_embeddings()(input_ids)

    def compute_positions(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Compute the position ids of a prompt.

        Args:
            inputs: Inputs of the model's forward.

        Returns:
            The decoder's `position_ids`, [batch, tokens] int64 (with several axes [axes, batch, tokens]), and
            the position after each row's last token, [batch], the same on all axes.
        """
        input_ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask.long()
        return (mask.cumsum(-1) - 1).clamp(min=0), mask.sum(-1)

    def count_vision_tokens(self, inputs: Inputs) -> int:
        """Number of vision tokens in all rows of an input."""
        return 0

    def reduce_to_tier(self, inputs: Inputs, tier: Tier | None) -> dict[str, Any]:
        """Reduce inputs of the highest tier to fewer vision tokens.

        Args:
            inputs: Inputs as the model's processor makes them for the highest tier.
            tier: Target tier; None without images.

        Returns:
            New inputs; the given ones are unchanged.

        Raises:
            PlanError: Tier and inputs do not match, or an image cannot be reduced.
        """
        self.check_tier(inputs, tier)
        return dict(inputs)

    def check_tier(self, inputs: Inputs, tier: Tier | None) -> None:
        """Check that inputs have the vision tokens of a tier; called for each prefill.

        Args:
            inputs: Inputs that the model is about to run, with `input_ids`.
            tier: Tier of the plan.

        Raises:
            PlanError: The inputs belong to another tier.
        """
        if tier is not None:
            raise PlanError(f"{type(self.model).__name__} takes no images: `tier` (={tier!r}) must be None")

    def get_kv_lengths(self, cache: Any) -> dict[int, int]:
        """Cached tokens of each block that has any.

        Raises:
            ModelError: The cache does not report its lengths.
        """
        layers = getattr(cache, "layers", None)
        if layers is None or not all(hasattr(layer, "get_seq_length") for layer in layers):
            raise ModelError(f"{type(cache).__name__} does not report its tokens per block")
        lengths = [layer.get_seq_length() for layer in layers]
        on_device = {block: length for block, length in enumerate(lengths) if isinstance(length, Tensor)}
        if on_device:
            # Synchronize once, not once per block.
            for block, length in zip(on_device, torch.stack(list(on_device.values())).tolist(), strict=True):
                lengths[block] = length
        return {block: int(length) for block, length in enumerate(lengths) if length}


ENTRY_POINT_GROUP = "sparseflow.adaptive.adapters"
"""Entry point group: `model_type` -> adapter."""

_ADAPTERS: dict[str, Callable[[Any], Adapter]] = {}


def register(model_type: str, adapter: Callable[[Any], Adapter]) -> None:
    """Register an adapter for a `config.model_type`; replaces an earlier registration."""
    _ADAPTERS[model_type] = adapter


def load_plugin(model_type: str) -> bool:
    """Register the adapter of a `model_type` from an entry point, if none is registered.

    Returns:
        Whether an adapter is registered.

    Raises:
        ModelError: The entry point cannot be loaded.
    """
    if model_type not in _ADAPTERS:
        for point in entry_points(group=ENTRY_POINT_GROUP, name=model_type):
            try:
                register(model_type, point.load())
            except Exception as error:  # packages may raise any error
                raise ModelError(
                    f"the adapter for `model_type` {model_type!r}, {point.value}, cannot be loaded: "
                    f"{type(error).__name__}: {error}"
                ) from error
    return model_type in _ADAPTERS


def get_adapter(model: nn.Module) -> Adapter:
    """Create the adapter of a model.

    Raises:
        ModelError: No adapter is registered for the architecture, an entry point cannot be loaded, or the
            model has no `config.model_type`.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type is None:
        raise ModelError(
            f"{type(model).__name__} has no `config.model_type`; pass a transformers model, or an adapter"
        )
    if not load_plugin(model_type):
        raise ModelError(
            f"no adapter for `model_type` {model_type!r} (known: {', '.join(sorted(_ADAPTERS))}); "
            "see sparseflow.adaptive.plan.adapter for how to add one"
        )
    return _ADAPTERS[model_type](model)
