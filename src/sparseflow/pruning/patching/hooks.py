"""Hooks that connect a `TokenPruner` with the modules of its encoder.

A module with a hook gets a subclass of its class. torch.compile reuses the graph of a module for others of
the same class, and checks their hooks only if its configuration says so; without the subclass, a patched
model would run the graph of a dense one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

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


class _HookedModule:
    """Mixin of the subclasses of modules with hooks."""

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> tuple[Any, ...]:
        # A copy gets another subclass, because it can be patched again with other settings.
        state = super().__reduce_ex__(protocol)[2]
        return _make_hooked_module, (_get_original_class(self),), state


def _set_subclass(module: nn.Module) -> None:
    """Give a module a new subclass of its class, under the same name."""
    base = type(module)
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    module.__class__ = type(base.__name__, (_HookedModule, base), names)


def _get_original_class(module: object) -> type[nn.Module]:
    return type(module).__mro__[2]


def _make_hooked_module(original_class: type[nn.Module]) -> nn.Module:
    """Make a module without attributes; unpickling and copying then set them."""
    module = original_class.__new__(original_class)
    _set_subclass(module)
    return module


def install_pruner(encoder: nn.Module, pruner: TokenPruner, refused: Sequence[nn.Module]) -> None:
    """Add a pruner and its hooks to an encoder; without stages nothing is added."""
    if not pruner.stages:
        return
    adapter, blocks = pruner.adapter, pruner.adapter.list_blocks(encoder)
    encoder.add_module(PRUNER, pruner)
    projection = adapter.get_projection(encoder)
    projection.register_forward_hook(_GridHook(pruner, encoder))
    hooked: list[nn.Module] = [projection, *blocks[min(pruner.stages) :], *refused]
    for index in range(min(pruner.stages), len(blocks)):
        hook = _BlockHook(pruner, index, blocks[index])
        blocks[index].register_forward_pre_hook(hook, with_kwargs=True)
        bias = adapter.get_position_bias(blocks[index])
        if bias is not None:
            bias.register_forward_pre_hook(_BiasInputHook(pruner), with_kwargs=True)
            bias.register_forward_hook(_BiasOutputHook(pruner, index))
            hooked.append(bias)
    blocks[-1].register_forward_hook(_EndHook(pruner))
    for module in refused:
        module.register_forward_pre_hook(_RefusalHook(pruner))
    for module in hooked:
        _set_subclass(module)


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
        if isinstance(module, _HookedModule):
            setattr(module, "__class__", _get_original_class(module))  # noqa: B010
