"""Stages of a patched model: which tokens a block gets, and with which arguments.

Shapes are static, so that the model can be compiled as one graph and captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparseflow.errors import InputError, SampleError
from sparseflow.pruning.model.config import ATTENTION_SELECTORS, ASTConfig
from sparseflow.pruning.patching.arguments import (
    MASKS,
    ROTARY_ARGUMENTS,
    gather_arguments,
    list_arguments,
)
from sparseflow.pruning.patching.attention import AttentionReader
from sparseflow.pruning.patching.families import Grid, PatchAdapter
from sparseflow.pruning.selectors.ast import EntropyScore
from sparseflow.pruning.selectors.change import CHANGE_MEASURES, ChangeScore
from sparseflow.pruning.selectors.partial_grid import score_partial_grid
from sparseflow.pruning.selectors.tokens import (
    TokenState,
    count_kept_tokens,
    gather_tokens,
    make_uniform_order,
    rank_scores,
    score_by_order,
    select_top_tokens,
)
from sparseflow.pruning.selectors.tome import merge_similar_tokens

_ORDER_SEED = 0
"""Evaluation with the random selector drops the same tokens of every sample, so that it is reproducible."""


class TokenPruner(nn.Module):
    """Stages of a patched encoder; a child of the encoder without parameters and without saved buffers.

    Args:
        encoder: Encoder to be patched.
        adapter: Adapter of the encoder.
        config: Stages, selector and score.

    Attributes:
        grid: Grid of the last input; None before the first one.
        num_prefix: Prefix tokens of the last input.
        positions: Stage -> positions of the kept tokens in the grid, int64, [B, S], of the last input. Empty
            after a compiled call.
        sizes: Stage -> number of tokens that ToMe merged into each token, [B, S], of the last input.

    Raises:
        InputError: The selector cannot read the attention of the encoder, or has to be trained.
    """

    def __init__(self, encoder: nn.Module, adapter: PatchAdapter, config: ASTConfig) -> None:
        super().__init__()
        self.adapter, self.config = adapter, config
        self.stages = dict(sorted(config.stages.items()))
        self.grid: Grid | None = None
        self.num_prefix = 0
        self.positions: dict[int, Tensor] = {}
        self.sizes: dict[int, Tensor] = {}
        self.selectors = nn.ModuleDict()
        self._num_kept: dict[str, dict[int, int]] = {}
        self.readers: dict[int, AttentionReader] = {}
        if config.selector == "dynamic_vit":
            raise InputError(
                "`selector` (='dynamic_vit') has a score that a VideoViT learns in training; use another "
                "selector for a patched model, such as 'ast'"
            )
        if config.selector in ATTENTION_SELECTORS:
            blocks = adapter.list_blocks(encoder)
            # The reader neither rotates queries and keys nor adds the bias of a block.
            rotates = any(set(list_arguments(block)) & set(ROTARY_ARGUMENTS) for block in blocks)
            has_bias = any(adapter.get_position_bias(block) is not None for block in blocks)
            if adapter.tubes or (config.selector != "tome" and (rotates or has_bias)):
                raise InputError(f"`selector` (={config.selector!r}) does not support {adapter.name}")
            self.readers = {stage: AttentionReader(blocks[stage]) for stage in self.stages}

    def add_grid(self, grid: Grid, device: torch.device) -> None:
        """Prepare for a grid, unless it is known: count tokens, and create a score or an order.

        Raises:
            InputError: It is not known, and the call is being compiled.
        """
        name = _format_grid(grid)
        if name in self._num_kept:
            return
        if torch.compiler.is_compiling():
            raise InputError(f"call the model once without torch.compile for inputs of {name} tokens")
        # Integers of a module are constants of a compiled graph. Shares would become dynamic, and with them
        # all shapes, once a second model with other shares is compiled.
        self._num_kept[name] = {stage: self.count_tokens(grid, stage) for stage in self.stages}
        if self.readers:
            return
        frames, rows, columns = grid
        if self.config.selector in CHANGE_MEASURES:
            if frames == 1:
                raise InputError(
                    f"`selector` (={self.config.selector!r}) compares frames, and the input is an image"
                )
            selector: nn.Module = ChangeScore(frames, (rows, columns), self.config.selector)
        elif self.config.selector == "ast":
            selector = EntropyScore(frames, (rows, columns), self.config.score)
        else:
            num_units = rows * columns * (1 if self.adapter.tubes else frames)
            selector = _FixedOrder(self.config.selector, num_units)
        self.selectors[name] = selector.to(device)

    def count_tokens(self, grid: Grid, block: int) -> int:
        """Number of grid tokens of a block."""
        frames, rows, columns = grid
        shares = [share for stage, share in self.stages.items() if stage <= block]
        if not shares:
            return frames * rows * columns
        if self.adapter.tubes:
            # TimeSformer requires full rows of patches.
            return count_kept_tokens(shares[-1], rows) * columns * frames
        return count_kept_tokens(shares[-1], frames * rows * columns)

    def start(self, grid: Grid) -> None:
        """Start an input."""
        # A compiled graph is specialized for the grid, because the score is.
        self.grid = int(grid[0]), int(grid[1]), int(grid[2])
        # New dictionaries, because a compiled graph would depend on the content of the former ones.
        self.positions, self.sizes = {}, {}

    def finish(self) -> None:
        """End an input."""
        if torch.compiler.is_compiling():  # the graph would return these tensors as outputs
            self.positions, self.sizes = {}, {}

    def prepare_block(
        self, index: int, block: nn.Module, arguments: dict[str, Any], names: Sequence[str]
    ) -> dict[str, Any]:
        """Drop tokens if the block is a stage, and restrict its arguments to the present tokens.

        Args:
            index: Index of the block.
            block: The block.
            arguments: Arguments of the call.
            names: All arguments of the block; the first one is for the tokens.

        Raises:
            SampleError: The tokens are not those of the grid, because some are masked.
        """
        earlier = [stage for stage in self.stages if stage < index]
        state = self._get_state(arguments[names[0]], earlier[-1] if earlier else None)
        prepared = dict(arguments)
        if index in self.stages:
            masks = gather_arguments(arguments, state.positions, self.num_prefix) if earlier else arguments
            state = self._apply_stage(index, block, state, masks)
            self.positions[index] = state.positions
            if state.size is not None:
                self.sizes[index] = state.size
            prepared[names[0]] = state.x
        prepared = gather_arguments(prepared, state.positions, self.num_prefix)
        if state.size is not None:
            self._add_size_bias(prepared, names, state.size)
        return prepared

    def _get_state(self, x: Tensor, stage: int | None) -> TokenState:
        """Tokens after a stage; without one, all tokens."""
        if stage is not None:
            return TokenState(
                x=x, num_prefix=self.num_prefix, positions=self.positions[stage], size=self.sizes.get(stage)
            )
        assert self.grid is not None
        num_tokens = self.grid[0] * self.grid[1] * self.grid[2]
        self.num_prefix = x.shape[1] - num_tokens
        if self.num_prefix < 0:
            raise SampleError(
                f"got {x.shape[1]} tokens for a grid of {num_tokens}; a patched model cannot be called with "
                "masked tokens"
            )
        positions = torch.arange(num_tokens, device=x.device).expand(len(x), -1)
        return TokenState(x=x, num_prefix=self.num_prefix, positions=positions)

    def _apply_stage(
        self, index: int, block: nn.Module, state: TokenState, arguments: dict[str, Any]
    ) -> TokenState:
        assert self.grid is not None
        self.add_grid(self.grid, state.x.device)
        num_kept = self._num_kept[_format_grid(self.grid)][index]
        if self.config.selector == "tome":
            keys = self.readers[index].compute_mean_keys(block, state.x)[:, self.num_prefix :]
            return merge_similar_tokens(state, keys, num_kept)
        with torch.no_grad():
            if self.readers:
                mask = next((arguments[name] for name in MASKS if arguments.get(name) is not None), None)
                reader = self.readers[index]
                if self.config.selector == "vid_tldr":
                    score = -reader.compute_attention_entropy(block, state.x, mask)
                else:
                    score = reader.compute_received_attention(block, state.x, mask, first=self.num_prefix > 0)
                selected = select_top_tokens(score[:, self.num_prefix :], num_kept)
            else:
                selected = self._select(state, num_kept)
        return gather_tokens(state, selected)

    def _select(self, state: TokenState, num_kept: int) -> Tensor:
        """Indices of the grid tokens to keep by score or order, int64, [B, num_kept]."""
        assert self.grid is not None
        selector = self.selectors[_format_grid(self.grid)]
        x, positions, frames = state.grid, state.positions, 1
        if self.adapter.tubes:
            # Tokens are ordered by patch, then by frame; the score orders them by frame, then by patch.
            frames = self.grid[0]
            x = x.unflatten(1, (-1, frames)).transpose(1, 2).flatten(1, 2)
            patches = positions[:, ::frames] // frames
            offsets = torch.arange(frames, device=x.device) * (self.grid[1] * self.grid[2])
            positions = (patches[:, None] + offsets[:, None]).flatten(1)
        if isinstance(selector, EntropyScore | ChangeScore):
            score = score_partial_grid(selector, x, positions)
            score = score.unflatten(1, (frames, -1)).mean(1)
        else:
            score = selector(positions[:, : positions.shape[1] // frames], random=self.training)
        selected = select_top_tokens(score, num_kept // frames)
        if not self.adapter.tubes:
            return selected
        return (selected[..., None] * frames + torch.arange(frames, device=x.device)).flatten(1)

    def _add_size_bias(self, arguments: dict[str, Any], names: Sequence[str], size: Tensor) -> None:
        """Bias attention by the logarithm of the sizes of merged tokens, if the block accepts a mask."""
        name = next((name for name in MASKS if name in names), None)
        if name is None:
            return
        bias = nn.functional.pad(size.log(), (self.num_prefix, 0))[:, None, None]
        bias = bias.to(arguments[names[0]].dtype)
        mask = arguments.get(name)
        if mask is None:
            arguments[name] = bias
        elif mask.dtype == torch.bool:
            arguments[name] = bias.masked_fill(~mask, float("-inf"))
        else:
            arguments[name] = mask + bias


class _FixedOrder(nn.Module):
    """Scores that do not depend on the input: the rank of each position."""

    order: Tensor

    def __init__(self, selector: str, num_units: int) -> None:
        super().__init__()
        self.selector = selector
        if selector == "random":
            order = rank_scores(torch.rand(num_units, generator=torch.Generator().manual_seed(_ORDER_SEED)))
        else:
            order = make_uniform_order(num_units)
        self.register_buffer("order", order, persistent=False)

    def forward(self, positions: Tensor, *, random: bool) -> Tensor:
        """Score of each position, [B, S]; new random numbers in training with the random selector."""
        return score_by_order(self.order, positions, is_random=random and self.selector == "random")


def _format_grid(grid: Grid) -> str:
    return f"{grid[0]}x{grid[1]}x{grid[2]}"
