"""What enters the first block: words, and images where there are any.

A prompt with images is run as far as the decoder and no further, so whatever a model does before it is done.
Where that needs a prompt and pixels only, it is recorded for each size of prompt and each shape of pixels:
prompts are filled up with their own last token, and what becomes of that is thrown away. transformers
compares the counts of placeholders and features there, which waits for the device; the adapter has compared
them on the host, so a recording leaves it out. The first one is compared with the model's own way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparseflow.adaptive.engine.decode import bucket
from sparseflow.adaptive.engine.graphs import GraphCache
from sparseflow.adaptive.engine.kernel_patcher import compared
from sparseflow.adaptive.plan.adapter import Adapter, Inputs
from sparseflow.errors import ModelError

_LOG = logging.getLogger(__name__)


class _DecoderReached(Exception):
    """The decoder is called; carries what it is called with."""

    def __init__(self, named: dict[str, Any]) -> None:
        self.named = named


class _MoreThanEmbeddings(Exception):
    """The decoder is given tensors besides; carries their names."""


class PromptEmbedder:
    """Embeddings of prompts of one row.

    Args:
        adapter: The model.
        graphs: Where work is recorded.
        sizes: Sizes that prompts with images are filled up to, ascending.
        found: Where embeddings are to lie, [1, largest size, d], where the model is.

    Attributes:
        refused: Why prompts with images cannot be embedded apart from the rest; None as long as they can.
    """

    def __init__(self, adapter: Adapter, graphs: GraphCache, sizes: Sequence[int], found: Tensor) -> None:
        self.adapter, self.graphs, self.sizes = adapter, graphs, tuple(sizes)
        self.refused: str | None = None
        config: Any = adapter.model.config
        names = ("image_token_id", "image_token_index")
        self._image = next(
            (token for name in names if (token := getattr(config, name, None)) is not None), None
        )
        # Whether recordings may be used; None before the first was compared.
        self._static: bool | None = None if self._image is not None else False
        self._pixels: dict[tuple[int, ...], Tensor] = {}
        self._ids = torch.zeros(1, self.sizes[-1], dtype=torch.int64, device=found.device)
        self._found = found

    def embed(self, inputs: Inputs, *, images: bool) -> Tensor | None:
        """What enters the first block.

        Args:
            inputs: A prompt that fits into a size, with as many placeholders as its pixels ask for.
            images: Whether it has any.

        Returns:
            [1, tokens, d], which the next prompt overwrites. None where the decoder is given more than that.

        Raises:
            ModelError: The model does not call its decoder.
        """
        ids = inputs["input_ids"]
        if not images:
            return self.adapter.embed(ids.to(self._found.device, non_blocking=True))
        static = self._static is not False and _is_plain(inputs)
        try:
            if static and self._static is None:
                return self._compared(inputs)
            if static:
                return self._recorded(ids, inputs["pixel_values"])
            return self._embedded(placed(inputs, self._found.device))
        except _MoreThanEmbeddings as more:
            self.refused = f"the decoder is given {more}"
            _LOG.info("prompts with images run whole, unrecorded: %s", self.refused)
            return None

    def warm(self, inputs: Inputs) -> list[Callable[[], None]]:
        """Work that embeds a prompt with images, filled up to each size that it fits into where it can be."""
        tokens = inputs["input_ids"].shape[1]

        def as_it_is() -> None:
            self.embed(inputs, images=True)

        if not _is_plain(inputs):
            return [as_it_is] if "pixel_values" in inputs else []

        def once(size: int) -> None:
            ids = inputs["input_ids"]
            longer = torch.cat([ids, ids[:, -1:].expand(1, size - tokens)], dim=1)
            self.embed({"input_ids": longer, "pixel_values": inputs["pixel_values"]}, images=True)

        return [partial(once, size) for size in self.sizes if size >= tokens]

    def _compared(self, given: Inputs) -> Tensor:
        """The first recording against the model's own way."""
        expected = self._embedded(placed(given, self._found.device))
        try:
            found = self._recorded(given["input_ids"], given["pixel_values"])
            difference, self._static = compared(found, expected)
            why = f"it would differ by {difference:.1e}"
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            self._static, why = False, f"{type(error).__name__}: {error}"
        if not self._static:
            _LOG.warning("images are embedded unrecorded: %s", why)
        return expected

    def _recorded(self, ids: Tensor, pixels: Tensor) -> Tensor:
        tokens = ids.shape[1]
        size = bucket(self.sizes, tokens)
        shape = tuple(pixels.shape)
        if shape not in self._pixels:
            self._pixels[shape] = torch.empty_like(pixels, device=self._found.device)
        # Filled up where the prompt lies, on the host as a rule, so that a GPU has one copy to make.
        filled = ids.new_empty(1, size)
        filled[:, :tokens] = ids
        # Masked, as a prompt could end with a placeholder.
        filled[:, tokens:] = ids[:, -1:].masked_fill(ids[:, -1:] == self._image, 0)
        self._ids[:, :size].copy_(filled, non_blocking=True)
        self._pixels[shape].copy_(pixels, non_blocking=True)
        self.graphs.run(("image", size, shape), partial(self._body, size, shape))
        return self._found[:, :tokens]

    def _body(self, size: int, shape: tuple[int, ...]) -> None:
        with _placeholders_as_they_are(self.adapter.model, self._image):
            found = self._embedded({"input_ids": self._ids[:, :size], "pixel_values": self._pixels[shape]})
        self._found[:, :size].copy_(found)

    def _embedded(self, given: Inputs) -> Tensor:
        def stop(named: dict[str, Any]) -> None:
            raise _DecoderReached(named)

        try:
            with at_decoder(self.adapter, stop):
                self.adapter.model(**given, use_cache=True)
        except _DecoderReached as reached:
            named = reached.named
        else:
            raise ModelError("the model did not call its decoder; its adapter names another module")
        found = named.pop("inputs_embeds", None)
        # Numbers and flags may be anything; tensors would be lost on the way to the blocks.
        more = [
            name
            for name, value in named.items()
            if isinstance(value, Tensor | list | tuple) and name != "cache_position"
        ]
        if more or not isinstance(found, Tensor):
            raise _MoreThanEmbeddings(", ".join(more) or "no embeddings")
        return found


def _is_plain(inputs: Inputs) -> bool:
    """Whether a prompt is words and pixels and nothing else; a mask of a row without padding says nothing."""
    return inputs.keys() - {"attention_mask"} == {"input_ids", "pixel_values"}


def placed(inputs: Inputs, device: torch.device) -> dict[str, Any]:
    """Inputs of rows without padding, so without a mask, on a device."""
    return {
        name: each.to(device, non_blocking=True) if isinstance(each, Tensor) else each
        for name, each in inputs.items()
        if name != "attention_mask"
    }


@contextmanager
def at_decoder(adapter: Adapter, seen: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Call something when a forward within comes to the decoder, with what the decoder is given by name."""

    def enter(module: nn.Module, given: Any, named: dict[str, Any]) -> None:
        seen(dict(named))

    hook = adapter.decoder.register_forward_pre_hook(enter, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _placeholders_as_they_are(model: nn.Module, image: int | None) -> Iterator[None]:
    """Models within find the placeholders of images without counting them."""

    def mask(input_ids: Tensor, inputs_embeds: Tensor, **counted: Any) -> Tensor:
        return (input_ids == image)[..., None].expand_as(inputs_embeds)

    name = "get_placeholder_mask"
    modules = [module for module in model.modules() if hasattr(module, name) and name not in vars(module)]
    try:
        for module in modules:
            vars(module)[name] = mask
        yield
    finally:
        for module in modules:
            vars(module).pop(name, None)
