"""What is known about the tensors of one live run, for networks that cannot be traced.

The run is watched from two sides: hooks see every layer, and a function mode sees every tensor operation
between layers. Both apply the rules of `rules.py` and `layers.py`, so a verdict rests on the operations that
ran and never on the numbers that came out. A tensor whose making nobody saw is dense, and so is one that was
changed in place behind our back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from sparseflow.errors import SampleError, SparseFlowError
from sparseflow.spiking.graph import layer_rules, rules
from sparseflow.spiking.graph import values as v
from sparseflow.spiking.graph.module_state import kept_state
from sparseflow.spiking.graph.propagation import VIEW_ATTRIBUTES, check_output, constant, neuron_value
from sparseflow.spiking.graph.registry import NeuronInfo
from sparseflow.spiking.graph.tracing import Sample, SpikingTracer, call_arguments
from sparseflow.spiking.graph.values import Value


def observe(model: nn.Module, sample: Sample, neurons: Mapping[str, NeuronInfo]) -> Observer:
    """Run `model` once on `sample` and watch. The model is left as it was.

    Raises:
        SampleError: The model cannot run the sample.
        ModelError: A neuron put out what it was declared not to.
    """
    observer = Observer(model, neurons)
    args, kwargs = call_arguments(sample)
    with kept_state(model), torch.inference_mode(False), torch.no_grad(), observer.watching():
        observer.note((args, kwargs), v.dense("the network's input"))
        try:
            model(*args, **kwargs)
        except SparseFlowError:
            raise
        except Exception as error:
            raise SampleError(f"{type(model).__name__} cannot run the sample: {error}") from error
    return observer


class Observer:
    """Follows values through one run.

    Args:
        model: The network.
        neurons: Its neurons by module name.

    Attributes:
        inputs: For each convolution, what each of its calls read.
        values: What is known about each layer's output (of its first call) by module name.
        called: Names of the layers that were called.
    """

    def __init__(self, model: nn.Module, neurons: Mapping[str, NeuronInfo]) -> None:
        leaf = SpikingTracer().is_leaf_module
        self._leaves = {module: name for name, module in model.named_modules() if leaf(module, name)}
        self._neurons = neurons
        self._constants = WeakTensorKeyDictionary()
        for held in _tensors_of(model):
            self._constants[held] = True
        self._tags: Any = WeakTensorKeyDictionary()
        # What each running module reads, if it is a layer and not within one; else None.
        self._stack: list[tuple[Any, ...] | None] = []
        self.inputs: dict[str, list[Value]] = {}
        self.values: dict[str, Value] = {}
        self.called: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch everything that runs in the body."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave)
        try:
            with _Mode(self):
                yield
        finally:
            before.remove()
            after.remove()

    @property
    def inside_layer(self) -> bool:
        """Whether a layer is running, whose inner operations are its own business."""
        return any(reads is not None for reads in self._stack)

    def note(self, tree: Any, value: Value) -> None:
        """Write down what is known about the tensors in `tree`."""
        for tensor in _tensors_in(tree):
            self._tags[tensor] = (value.with_shape(tensor.shape), _version(tensor))

    def forget(self, written: torch.Tensor) -> None:
        """Give up what is known about every tensor that shares memory with `written`."""
        # A version counter is shared by views, but not by `x.data`.
        memory = _memory(written)
        for tensor in [tensor for tensor in self._tags if _memory(tensor) == memory]:
            self._tags[tensor] = (v.dense("a tensor that was changed in place"), _version(tensor))

    def known(self, tree: Any) -> Any:
        """`tree` with what is known in place of every tensor."""
        if isinstance(tree, torch.Tensor):
            return self._value(tree)
        if isinstance(tree, (list, tuple)):
            return tuple(self.known(item) for item in tree)
        if isinstance(tree, dict):
            return {key: self.known(item) for key, item in tree.items()}
        return tree

    def _value(self, tensor: torch.Tensor) -> Any:
        tag = self._tags.get(tensor)
        if tag is None:
            unseen = v.dense("a tensor of unknown making")
            return constant(tensor, unseen) if tensor in self._constants else unseen
        value, version = tag
        return value if version == _version(tensor) else v.dense("a tensor that was changed in place")

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self.inside_layer or module not in self._leaves:
            self._stack.append(None)
            return
        # Now, not on leaving: a layer may write into its input.
        reads = tuple(self._value(tensor) for tensor in _tensors_in(args))
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
            read = next((item for item in reads if isinstance(item, Value)), None)
            self.inputs.setdefault(self._leaves[module], []).append(
                read or v.dense("a tensor passed by name")
            )
        self._stack.append(reads)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        reads = self._stack.pop()
        if reads is None:
            return
        name = self._leaves[module]
        self.called.add(name)
        if name in self._neurons:
            check_output(name, self._neurons[name], output)
            value = neuron_value(name, self._neurons[name])
        else:
            value = layer_rules.apply_layer(module, name, reads)
        self.note(output, value)
        if isinstance(output, torch.Tensor):
            value = value.with_shape(output.shape)
        self.values.setdefault(name, value)


class _Mode(TorchFunctionMode):
    """Tells the observer about every tensor operation outside of layers."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._observer.inside_layer:
            return func(*args, **kwargs)
        known_args, known_kwargs = self._observer.known(args), self._observer.known(kwargs)
        result = func(*args, **kwargs)
        value = _applied(func, known_args, known_kwargs)
        written = args[0] if args and rules.mutates_first(func, args, kwargs) else None
        if isinstance(written, torch.Tensor):
            self._observer.forget(written)
        if isinstance(result, (tuple, list)) and rules.operation_name(func) in rules.PAIRS:
            self._observer.note(result[0], value)
            self._observer.note(result[1:], v.dense("indices"))
        else:
            self._observer.note(result, value)
        self._observer.note(written, value)
        return result


def _applied(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
    if getattr(func, "__name__", "") == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        known = args[0] if args and isinstance(args[0], Value) else v.dense("a constant")
        return known.step(name) if name in VIEW_ATTRIBUTES else v.dense(f"`{name}`")
    op = rules.operation_name(func)
    if op is None or "out" in kwargs:
        return v.dense(f"`{getattr(func, '__name__', func)}`")
    return rules.apply(rules.Call(op=op, args=args, kwargs=kwargs))


def _tensors_in(tree: Any) -> Iterable[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _tensors_in(item)


def _tensors_of(model: nn.Module) -> Iterable[torch.Tensor]:
    """Parameters and other one-element tensors that the model holds, but no membranes."""
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        yield from (held for held in vars(module).values() if isinstance(held, torch.Tensor))


def _memory(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors have none
        return id(tensor)


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # tensors made in inference mode are not counted
        return -1
