"""Prompt embedding: word embeddings and vision encoder.

A prompt with images is run up to the decoder, which covers everything that a model does before it. If that
needs only prompt and pixels, it is captured for each padded prompt size and pixel shape: prompts are padded
with their own last token, and the padding is discarded. transformers compares the numbers of placeholders and
features there, which synchronizes; the adapter has compared them on the CPU, so captures skip the comparison.
The first capture is compared with the model's own result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparseflow.adaptive.engine.decode import select_size
from sparseflow.adaptive.engine.graphs import GraphCache
from sparseflow.adaptive.engine.kernel_patcher import compare_outputs
from sparseflow.adaptive.plan.adapter import Adapter, Inputs
from sparseflow.errors import ModelError

_LOG = logging.getLogger(__name__)


class _DecoderReached(Exception):
    """Raised when the decoder is called; carries its keyword arguments."""

    def __init__(self, named: dict[str, Any]) -> None:
        self.named = named


class _MoreThanEmbeddings(Exception):
    """Raised if the decoder receives further tensors; carries their names."""


class PromptEmbedder:
    """Embeds prompts of one row.

    Args:
        adapter: Adapter of the model.
        graphs: CUDA graphs.
        sizes: Padded sizes of prompts with images, ascending.
        output_buffer: Buffer of the embeddings, [1, largest size, d], on the model's device.

    Attributes:
        fallback_reason: Why prompts with images cannot be embedded separately; None while they can.
    """

    def __init__(
        self, adapter: Adapter, graphs: GraphCache, sizes: Sequence[int], output_buffer: Tensor
    ) -> None:
        self.adapter, self.graphs, self.sizes = adapter, graphs, tuple(sizes)
        self.fallback_reason: str | None = None
        config: Any = adapter.model.config
        names = ("image_token_id", "image_token_index")
        self._image_token = next(
            (token for name in names if (token := getattr(config, name, None)) is not None), None
        )
        # None until the first capture was compared.
        self._can_capture: bool | None = None if self._image_token is not None else False
        self._pixels: dict[tuple[int, ...], Tensor] = {}
        self._ids = torch.zeros(1, self.sizes[-1], dtype=torch.int64, device=output_buffer.device)
        self._output = output_buffer

    def embed(self, inputs: Inputs, *, images: bool) -> Tensor | None:
        """Compute the input of the first block.

        Args:
            inputs: A prompt of at most the largest size, with as many placeholders as its pixels need.
            images: Whether it has images.

        Returns:
            [1, tokens, d], overwritten by the next prompt; None if the decoder receives more than that.

        Raises:
            ModelError: The model does not call its decoder.
        """
        ids = inputs["input_ids"]
        if not images:
            return self.adapter.embed(ids.to(self._output.device, non_blocking=True))
        static = self._can_capture is not False and _is_text_and_pixels(inputs)
        try:
            if static and self._can_capture is None:
                return self._embed_checked(inputs)
            if static:
                return self._embed_captured(ids, inputs["pixel_values"])
            return self._run_to_decoder(move_to_device(inputs, self._output.device))
        except _MoreThanEmbeddings as more:
            self.fallback_reason = f"the decoder is given {more}"
            _LOG.info("prompts with images run in one piece, not captured: %s", self.fallback_reason)
            return None

    def warm_up(self, inputs: Inputs) -> list[Callable[[], None]]:
        """Tasks that embed a prompt with images at each padded size."""
        tokens = inputs["input_ids"].shape[1]

        def unpadded() -> None:
            self.embed(inputs, images=True)

        if not _is_text_and_pixels(inputs):
            return [unpadded] if "pixel_values" in inputs else []

        def once(size: int) -> None:
            ids = inputs["input_ids"]
            longer = torch.cat([ids, ids[:, -1:].expand(1, size - tokens)], dim=1)
            self.embed({"input_ids": longer, "pixel_values": inputs["pixel_values"]}, images=True)

        return [partial(once, size) for size in self.sizes if size >= tokens]

    def _embed_checked(self, inputs: Inputs) -> Tensor:
        """Compare the first capture with the model's own result."""
        expected = self._run_to_decoder(move_to_device(inputs, self._output.device))
        try:
            captured = self._embed_captured(inputs["input_ids"], inputs["pixel_values"])
            difference, self._can_capture = compare_outputs(captured, expected)
            reason = f"it would differ by {difference:.1e}"
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            self._can_capture, reason = False, f"{type(error).__name__}: {error}"
        if not self._can_capture:
            _LOG.warning("images are embedded eagerly: %s", reason)
        return expected

    def _embed_captured(self, ids: Tensor, pixels: Tensor) -> Tensor:
        tokens = ids.shape[1]
        size = select_size(self.sizes, tokens)
        shape = tuple(pixels.shape)
        if shape not in self._pixels:
            self._pixels[shape] = torch.empty_like(pixels, device=self._output.device)
        # Padded on the prompt's device, usually the CPU, so that a GPU makes one copy.
        filled = ids.new_empty(1, size)
        filled[:, :tokens] = ids
        # The last token could be a placeholder.
        filled[:, tokens:] = ids[:, -1:].masked_fill(ids[:, -1:] == self._image_token, 0)
        self._ids[:, :size].copy_(filled, non_blocking=True)
        self._pixels[shape].copy_(pixels, non_blocking=True)
        self.graphs.run(("image", size, shape), partial(self._body, size, shape))
        return self._output[:, :tokens]

    def _body(self, size: int, shape: tuple[int, ...]) -> None:
        with _skip_placeholder_count(self.adapter.model, self._image_token):
            embeddings = self._run_to_decoder(
                {"input_ids": self._ids[:, :size], "pixel_values": self._pixels[shape]}
            )
        self._output[:, :size].copy_(embeddings)

    def _run_to_decoder(self, inputs: Inputs) -> Tensor:
        def stop(named: dict[str, Any]) -> None:
            raise _DecoderReached(named)

        try:
            with on_decoder_call(self.adapter, stop):
                self.adapter.model(**inputs, use_cache=True)
        except _DecoderReached as reached:
            kwargs = reached.named
        else:
            raise ModelError("the model did not call its decoder; fix the adapter's `decoder`")
        embeddings = kwargs.pop("inputs_embeds", None)
        # Further tensors would be lost.
        extra = [
            name
            for name, value in kwargs.items()
            if isinstance(value, Tensor | list | tuple) and name != "cache_position"
        ]
        if extra or not isinstance(embeddings, Tensor):
            raise _MoreThanEmbeddings(", ".join(extra) or "no embeddings")
        return embeddings


def _is_text_and_pixels(inputs: Inputs) -> bool:
    """Whether a prompt consists of tokens and pixels only; the mask of an unpadded row is redundant."""
    return inputs.keys() - {"attention_mask"} == {"input_ids", "pixel_values"}


def move_to_device(inputs: Inputs, device: torch.device) -> dict[str, Any]:
    """Move the inputs of unpadded rows to a device, without the mask."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
        if name != "attention_mask"
    }


@contextmanager
def on_decoder_call(adapter: Adapter, callback: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Call a function with the decoder's keyword arguments when a forward reaches the decoder."""

    def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        callback(dict(kwargs))

    hook = adapter.decoder.register_forward_pre_hook(enter, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _skip_placeholder_count(model: nn.Module, image: int | None) -> Iterator[None]:
    """Make models locate image placeholders without counting them."""

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
