"""Token dropping between the blocks of a model of another library, by hooks.

A hook on the patch convolution reads the grid of each input. A hook before each block from the first stage on
drops tokens at a stage, and restricts the other arguments of the block to the present tokens. Shapes are
static, so that the model can be compiled as one graph and captured in a CUDA graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparseflow.errors import InputError, SampleError
from sparseflow.pruning.model.config import ASTConfig
from sparseflow.pruning.patching.arguments import gather_arguments, gather_mask, gather_tokens
from sparseflow.pruning.patching.families import Grid, PatchAdapter
from sparseflow.pruning.selectors.ast import EntropyScore
from sparseflow.pruning.selectors.partial_grid import score_partial_grid
from sparseflow.pruning.selectors.tokens import (
    count_kept_tokens,
    make_uniform_order,
    rank_scores,
    select_top_tokens,
)

PRUNER = "token_pruner"
"""Name of the pruner in the encoder."""

PATCH_SELECTORS = ("ast", "random", "uniform")

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
        positions: Stage -> positions of the kept tokens in the grid, int64, [B, S], of the last input. Empty
            after a compiled call.
    """

    def __init__(self, encoder: nn.Module, adapter: PatchAdapter, config: ASTConfig) -> None:
        super().__init__()
        self.adapter, self.config = adapter, config
        self.stages = dict(sorted(config.stages.items()))
        self.depth = len(adapter.list_blocks(encoder))
        self.grid: Grid | None = None
        self.num_prefix = 0
        self.positions: dict[int, Tensor] = {}
        self.selectors = nn.ModuleDict()

    def add_selector(self, grid: Grid, device: torch.device) -> None:
        """Create what the selector needs for a grid, a score or an order, unless it exists.

        Raises:
            InputError: It does not exist, and the call is being compiled.
        """
        name = _format_grid(grid)
        if name in self.selectors:
            return
        if torch.compiler.is_compiling():
            raise InputError(f"call the model once without torch.compile for inputs of {name} tokens")
        frames, rows, columns = grid
        if self.config.selector == "ast":
            selector: nn.Module = EntropyScore(frames, (rows, columns), self.config.score)
        else:
            selector = _FixedOrder(self.config.selector, self.count_units(grid))
        self.selectors[name] = selector.to(device)

    def count_units(self, grid: Grid) -> int:
        """Number of parts of a grid that a stage keeps or drops as a whole: tokens, or tubes."""
        frames, rows, columns = grid
        return rows * columns * (1 if self.adapter.tubes else frames)

    def count_tokens(self, grid: Grid, block: int) -> int:
        """Number of grid tokens of a block."""
        frames, rows, columns = grid
        shares = [share for stage, share in self.stages.items() if stage <= block]
        if not shares:
            return frames * rows * columns
        if not self.adapter.tubes:
            return count_kept_tokens(shares[-1], self.count_units(grid))
        # TimeSformer requires full rows of patches.
        return count_kept_tokens(shares[-1], rows) * columns * frames

    def start(self, grid: Grid) -> None:
        """Start an input."""
        # A compiled graph is specialized for the grid, because the score is.
        self.grid = int(grid[0]), int(grid[1]), int(grid[2])
        self.positions.clear()

    def finish(self) -> None:
        """End an input: a compiled graph would return the positions as outputs."""
        if torch.compiler.is_compiling():
            self.positions.clear()

    def prepare_block(self, index: int, arguments: dict[str, Any], name: str) -> dict[str, Any]:
        """Drop tokens if the block is a stage, and restrict its arguments to the present tokens.

        Args:
            index: Block.
            arguments: Arguments of the block.
            name: Name of the argument with the tokens.

        Raises:
            SampleError: The tokens are not those of the grid, because some are masked.
        """
        assert self.grid is not None
        earlier = [stage for stage in self.stages if stage < index]
        positions = self.positions[earlier[-1]] if earlier else None
        if index in self.stages:
            x = arguments[name]
            if positions is None:
                num_tokens = self.grid[0] * self.grid[1] * self.grid[2]
                self.num_prefix = x.shape[1] - num_tokens
                if self.num_prefix < 0:
                    raise SampleError(
                        f"block {index} has {x.shape[1]} tokens and the grid {num_tokens}; a patched model "
                        "cannot be called with masked tokens"
                    )
                positions = torch.arange(num_tokens, device=x.device).expand(len(x), -1)
            selected = self._select(x[:, self.num_prefix :], positions, self.count_tokens(self.grid, index))
            arguments = arguments | {name: gather_tokens(x, selected, self.num_prefix)}
            positions = self.positions[index] = positions.gather(1, selected)
        assert positions is not None
        return gather_arguments(arguments, positions, self.num_prefix)

    @torch.no_grad()
    def _select(self, x: Tensor, positions: Tensor, num_kept: int) -> Tensor:
        """Indices of the grid tokens to keep, int64, [B, num_kept]."""
        assert self.grid is not None
        self.add_selector(self.grid, x.device)
        selector = self.selectors[_format_grid(self.grid)]
        frames = self.grid[0] if self.adapter.tubes else 1
        if isinstance(selector, EntropyScore):
            score = self._score_by_entropy(selector, x, positions)
            if frames > 1:
                score = score.unflatten(1, (-1, frames)).mean(2)
        else:
            score = selector(positions[:, ::frames] // frames, random=self.training)
        selected = select_top_tokens(score, num_kept // frames)
        if frames > 1:
            selected = (selected[..., None] * frames + torch.arange(frames, device=x.device)).flatten(1)
        return selected

    def _score_by_entropy(self, score: EntropyScore, x: Tensor, positions: Tensor) -> Tensor:
        assert self.grid is not None
        if self.adapter.tubes:
            # Tokens are ordered by patch, then by frame; the score orders them by frame, then by patch.
            frames, rows, columns = self.grid
            positions = positions % frames * (rows * columns) + positions // frames
        return score_partial_grid(score, x, positions)


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
        if random and self.selector == "random":
            return torch.rand(positions.shape, device=positions.device)
        return self.order[positions].float()


class _Hook:
    """Base of the hooks, by which they are found again; copied together with the model."""

    def __init__(self, pruner: TokenPruner) -> None:
        self.pruner = pruner


class _GridHook(_Hook):
    """Reads the grid of an input after the patch convolution."""

    def __init__(self, pruner: TokenPruner, encoder: nn.Module) -> None:
        super().__init__(pruner)
        self.encoder = encoder

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self.pruner.start(self.pruner.adapter.measure_grid(self.encoder, output.shape))


class _BlockHook(_Hook):
    """Prepares the arguments of a block."""

    def __init__(self, pruner: TokenPruner, index: int, block: nn.Module) -> None:
        super().__init__(pruner)
        self.index = index
        self.names = list(inspect.signature(block.forward).parameters)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = self.names[: len(args)]
        arguments = dict(zip(names, args, strict=True)) | kwargs
        arguments = self.pruner.prepare_block(self.index, arguments, self.names[0])
        return tuple(arguments.pop(name) for name in names), arguments


class _EndHook(_Hook):
    """Ends an input after the last block."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.pruner.finish()


class _BiasInputHook(_Hook):
    """Lets a block compute the position bias of all tokens."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        frames, rows, columns = self.pruner.grid or (0, 0, 0)
        if kwargs.get("dim_size") is not None:
            kwargs = kwargs | {"dim_size": self.pruner.num_prefix + frames * rows * columns}
        return args, kwargs


class _BiasOutputHook(_Hook):
    """Restricts the position bias of a block to the present tokens."""

    def __init__(self, pruner: TokenPruner, index: int) -> None:
        super().__init__(pruner)
        self.index = index

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        stage = max(stage for stage in self.pruner.stages if stage <= self.index)
        return gather_mask(output, self.pruner.positions[stage], self.pruner.num_prefix)


class _RefusalHook(_Hook):
    """Refuses a module that needs the features of all patches."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        raise InputError(
            f"{type(module).__name__} needs the features of all patches, and the model is patched; call it "
            "without this module (`skip_predictor=True` for V-JEPA 2), or `unpatch` it"
        )


def install_pruner(encoder: nn.Module, pruner: TokenPruner, refused: Sequence[nn.Module]) -> None:
    """Add a pruner and its hooks to an encoder; without stages nothing is added."""
    if not pruner.stages:
        return
    adapter, blocks = pruner.adapter, pruner.adapter.list_blocks(encoder)
    encoder.add_module(PRUNER, pruner)
    adapter.get_projection(encoder).register_forward_hook(_GridHook(pruner, encoder))
    for index in range(min(pruner.stages), len(blocks)):
        hook = _BlockHook(pruner, index, blocks[index])
        blocks[index].register_forward_pre_hook(hook, with_kwargs=True)
        bias = adapter.get_position_bias(blocks[index])
        if bias is not None:
            bias.register_forward_pre_hook(_BiasInputHook(pruner), with_kwargs=True)
            bias.register_forward_hook(_BiasOutputHook(pruner, index))
    blocks[-1].register_forward_hook(_EndHook(pruner))
    for module in refused:
        module.register_forward_pre_hook(_RefusalHook(pruner))


def remove_pruners(model: nn.Module) -> None:
    """Remove all pruners and their hooks from a model."""
    for module in list(model.modules()):
        for hooks, flags in (
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
            (module._forward_hooks, module._forward_hooks_with_kwargs),
        ):
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Hook)]:
                del hooks[key]
                flags.pop(key, None)
        if isinstance(module._modules.get(PRUNER), TokenPruner):
            del module._modules[PRUNER]


def list_pruners(model: nn.Module) -> Iterator[TokenPruner]:
    """Yield the pruners of a model."""
    return (module for module in model.modules() if isinstance(module, TokenPruner))


def _format_grid(grid: Grid) -> str:
    return f"{grid[0]}x{grid[1]}x{grid[2]}"
