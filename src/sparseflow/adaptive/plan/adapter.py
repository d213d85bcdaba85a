"""What a model must offer so that plans can be run on it.

Write an adapter for an architecture that none here knows, as remote code on a hub, by subclassing `Adapter`:

1. `geometry`, `decoder`, `blocks` and `router` say where the knobs are;
2. `narrowed` and `width`, where a router keeps its top-k elsewhere, or does not return what it chose;
3. `hidden` and `skipped`, where a block returns more than hidden states;
4. `at_tier`, `check_tier` and `vision_tokens`, where the model takes images;
5. `cache` and `kv_lengths`, where a cache is not one of transformers: an object that a plan can be noted on;
   `state`, where the model keeps on itself what belongs to a request;

and `register` it under the model's `config.model_type`. For the command line, make it an entry point of an
installed package, which may register the model's own classes with transformers when it is imported::

    [project.entry-points."sparseflow.adaptive.adapters"]
    molmoe = "mypackage.adapter:MolmoEAdapter"

`PlanRuntime` tries every router when it is installed, and at each call compares the blocks and routers that
ran with the plan: a knob that changes nothing is an error.
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
"""What a model's forward takes, by name: `input_ids` [batch, tokens] int64 and, with images, their pixels."""


class Adapter(ABC):
    """Where the knobs of one model are. It holds the model and changes nothing of it.

    Attributes:
        model: The model as its user calls it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @property
    @abstractmethod
    def geometry(self) -> ModelGeometry:
        """What plans for the model choose among."""

    @property
    @abstractmethod
    def decoder(self) -> nn.Module:
        """The stack of blocks. Each forward calls it once, with `past_key_values` by name."""

    @property
    @abstractmethod
    def blocks(self) -> Sequence[nn.Module]:
        """The decoder's blocks in order. Each takes hidden states first: [batch, tokens, d]."""

    @property
    def context(self) -> int | None:
        """Most tokens of a prompt and its answer that the model has positions for; None where it does not
        tell."""
        return getattr(getattr(self.decoder, "config", None), "max_position_embeddings", None)

    @property
    def state(self) -> Sequence[tuple[nn.Module, str]]:
        """Modules and attributes in which the model keeps what belongs to a request; each cache has its "
        "own."""
        return ()

    @abstractmethod
    def router(self, block: nn.Module) -> nn.Module | None:
        """What of a block decides which experts a token goes to; None in a block without experts."""

    def narrowed(self, router: nn.Module, top_k: int) -> nn.Module:
        """A router of the same parameters that chooses `top_k` experts; the one given stays as it is.

        Raises:
            ModelError: It does not say how many it chooses.
        """
        if not hasattr(router, "top_k"):
            raise ModelError(
                f"{type(router).__name__} has no `top_k`; the adapter must say how it is made to choose fewer"
            )
        # A shallow copy shares parameters, also after they are moved or loaded anew.
        view = copy.copy(router)
        view.top_k = top_k  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        return view

    def width(self, router: nn.Module) -> int:
        """How many experts a router sends a token to, found by trying it on one token of zeros.

        Raises:
            ModelError: It has no weights yet.
        """
        weight = next(router.parameters())
        if weight.device.type == "meta":
            raise ModelError("the model's weights are on `meta`: load them, and do not offload them")
        token = torch.zeros(1, weight.shape[-1], dtype=weight.dtype, device=weight.device)
        with torch.no_grad():
            # Not called as a module: hooks of others count real tokens only.
            return self.chosen(router.forward(token)).shape[-1]

    def chosen(self, routed: Any) -> Tensor:
        """The experts' indices in what a router returns, [tokens, top-k] int64; the last, in transformers."""
        return routed[-1]

    def hidden(self, found: Any) -> Tensor:
        """Hidden states in what a block returns, [batch, tokens, d]."""
        return found

    def skipped(self, hidden: Tensor) -> Any:
        """What a block that is skipped returns in place of its own result."""
        return hidden

    def cache(self, found: Any) -> Any:
        """The cache in what the decoder or the model returns; None where there is none."""
        if isinstance(found, tuple):
            return next((each for each in found if hasattr(each, "get_seq_length")), None)
        return getattr(found, "past_key_values", None)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Word embeddings of tokens: [batch, tokens] int64 -> [batch, tokens, d]."""
        return self.model.get_input_embeddings()(input_ids)

    def positions(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Where the tokens of a prompt stand, for who runs requests of several prompts together.

        Args:
            inputs: A prompt, as the model takes it.

        Returns:
            The decoder's `position_ids`, [batch, tokens] int64 (of a model with several axes [axes, batch,
            tokens]), and the position of the token after each row's last, [batch], on all axes.
        """
        input_ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask.long()
        return (mask.cumsum(-1) - 1).clamp(min=0), mask.sum(-1)

    def vision_tokens(self, inputs: Inputs) -> int:
        """How many tokens of an input are of images, in all rows."""
        return 0

    def at_tier(self, inputs: Inputs, tier: Tier | None) -> dict[str, Any]:
        """Inputs of fewer vision tokens, from those of the highest tier.

        Args:
            inputs: As the model's own processor makes them for the highest tier.
            tier: The tier to reduce them to; None where there is no image.

        Returns:
            New inputs; those given stay as they are.

        Raises:
            PlanError: The tier and the inputs do not fit, as no image, or one that cannot be reduced.
        """
        self.check_tier(inputs, tier)
        return dict(inputs)

    def check_tier(self, inputs: Inputs, tier: Tier | None) -> None:
        """That the inputs of a call are of a tier; called at each prefill.

        Args:
            inputs: What the model is about to run, with `input_ids`.
            tier: The plan's.

        Raises:
            PlanError: They are of another: the tier would change nothing.
        """
        if tier is not None:
            raise PlanError(f"{type(self.model).__name__} takes no images: `tier` (={tier!r}) must be None")

    def kv_lengths(self, cache: Any) -> dict[int, int]:
        """Tokens that a cache holds of each block that has any.

        Raises:
            ModelError: The cache does not tell.
        """
        layers = getattr(cache, "layers", None)
        if layers is None or not all(hasattr(layer, "get_seq_length") for layer in layers):
            raise ModelError(f"{type(cache).__name__} does not tell how many tokens it holds of each block")
        lengths = [layer.get_seq_length() for layer in layers]
        on_device = {at: length for at, length in enumerate(lengths) if isinstance(length, Tensor)}
        if on_device:
            # One wait for the device, not one a block.
            for at, length in zip(on_device, torch.stack(list(on_device.values())).tolist(), strict=True):
                lengths[at] = length
        return {at: int(length) for at, length in enumerate(lengths) if length}


PLUGINS = "sparseflow.adaptive.adapters"
"""Group of entry points: a `model_type` -> its adapter."""

_ADAPTERS: dict[str, Callable[[Any], Adapter]] = {}


def register(model_type: str, adapter: Callable[[Any], Adapter]) -> None:
    """Use an adapter for models whose `config.model_type` is this; a later one replaces an earlier."""
    _ADAPTERS[model_type] = adapter


def plug_in(model_type: str) -> bool:
    """Make an adapter known, from a package's entry point if none is registered.

    Returns:
        Whether there is one.

    Raises:
        ModelError: The entry point cannot be loaded.
    """
    if model_type not in _ADAPTERS:
        for point in entry_points(group=PLUGINS, name=model_type):
            try:
                register(model_type, point.load())
            except Exception as error:  # whatever the package raises
                raise ModelError(
                    f"the adapter for `model_type` {model_type!r}, {point.value}, cannot be loaded: "
                    f"{type(error).__name__}: {error}"
                ) from error
    return model_type in _ADAPTERS


def adapter_of(model: nn.Module) -> Adapter:
    """The adapter of a model.

    Raises:
        ModelError: There is none for this architecture, a package's cannot be loaded, or the model has no
            configuration that says which.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind is None:
        raise ModelError(
            f"{type(model).__name__} has no `config.model_type`; give a model of transformers, or an adapter"
        )
    if not plug_in(kind):
        raise ModelError(
            f"no adapter for `model_type` {kind!r} (known: {', '.join(sorted(_ADAPTERS))}); write one as "
            "sparseflow.adaptive.plan.adapter says, and register it or install its package"
        )
    return _ADAPTERS[kind](model)
