"""Hooks that connect a `TokenPruner` with the modules of its encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from sparseflow.errors import InputError
from sparseflow.pruning.patching.arguments import gather_mask, list_arguments
from sparseflow.pruning.patching.pruner import TokenPruner

PRUNER = "token_pruner"
"""Name of the pruner in the encoder."""


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
        self.names = list_arguments(block)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = self.names[: len(args)]
        arguments = dict(zip(names, args, strict=True)) | kwargs
        arguments = self.pruner.prepare_block(self.index, module, arguments, self.names)
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
