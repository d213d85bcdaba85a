"""Values of the tensors of one live run, for networks that cannot be traced.

The run is observed in two ways: hooks see all layers, and a function mode sees all tensor operations
between layers. Both apply `rules.py` and `layer_rules.py`, so a verdict depends on the operations that ran
and never on the numbers. A tensor of unobserved origin is dense, and so is one that was changed in place
unobserved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from sparseflow.errors import SampleError, SparseFlowError
from sparseflow.spiking.graph import layer_rules, rules
from sparseflow.spiking.graph import values as v
from sparseflow.spiking.graph.module_state import preserve_state
from sparseflow.spiking.graph.propagation import (
    VIEW_ATTRIBUTES,
    check_neuron_output,
    extract_scalar,
    make_neuron_value,
)
from sparseflow.spiking.graph.registry import NeuronInfo
from sparseflow.spiking.graph.sites import SpikeLayer
from sparseflow.spiking.graph.tracing import Sample, SpikingTracer, split_arguments
from sparseflow.spiking.graph.values import SpikeValue


def observe_run(model: nn.Module, sample: Sample, neurons: Mapping[str, NeuronInfo]) -> RunObserver:
    """Run `model` once on `sample` and observe it. The model is not modified.

    Raises:
        SampleError: The model cannot run the sample.
        ModelError: The output of a neuron does not match its declaration.
    """
    observer = RunObserver(model, neurons)
    args, kwargs = split_arguments(sample)
    with preserve_state(model), torch.inference_mode(False), torch.no_grad(), observer.observe_calls():
        observer.set_value((args, kwargs), v.make_dense("the network's input"))
        try:
            model(*args, **kwargs)
        except SparseFlowError:
            raise
        except Exception as error:
            raise SampleError(f"{type(model).__name__} cannot run the sample: {error}") from error
    return observer


class RunObserver:
    """Propagates values through one run.

    Args:
        model: The network.
        neurons: Its neurons by module name.

    Attributes:
        inputs: For each convolution, the input value of each of its calls.
        values: Value of each layer's output (of its first call) by module name.
        called: Names of the layers that were called.
    """

    def __init__(self, model: nn.Module, neurons: Mapping[str, NeuronInfo]) -> None:
        leaf = SpikingTracer().is_leaf_module
        self._leaves = {module: name for name, module in model.named_modules() if leaf(module, name)}
        self._neurons = neurons
        self._constants = WeakTensorKeyDictionary()
        for tensor in _iterate_model_tensors(model):
            self._constants[tensor] = True
        self._tags: Any = WeakTensorKeyDictionary()
        # For each running module: its input values if it is an outermost layer, else None.
        self._stack: list[tuple[Any, ...] | None] = []
        self.inputs: dict[str, list[SpikeValue]] = {}
        self.values: dict[str, SpikeValue] = {}
        self.called: set[str] = set()

    @contextmanager
    def observe_calls(self) -> Iterator[None]:
        """Observe everything that runs in the body."""
        before = register_module_forward_pre_hook(self._on_enter)
        after = register_module_forward_hook(self._on_exit)
        try:
            with _ObserverMode(self):
                yield
        finally:
            before.remove()
            after.remove()

    @property
    def inside_layer(self) -> bool:
        """Whether a layer is running, whose inner operations are not observed."""
        return any(reads is not None for reads in self._stack)

    def set_value(self, tree: Any, value: SpikeValue) -> None:
        """Set the value of the tensors in `tree`."""
        for tensor in _list_tensors(tree):
            self._tags[tensor] = (value.with_shape(tensor.shape), _get_version(tensor))

    def invalidate(self, written: torch.Tensor) -> None:
        """Mark all tensors that share memory with `written` as dense."""
        # Views share a version counter, but `x.data` does not.
        memory = _get_storage_id(written)
        for tensor in [tensor for tensor in self._tags if _get_storage_id(tensor) == memory]:
            self._tags[tensor] = (v.make_dense("a tensor that was changed in place"), _get_version(tensor))

    def substitute_values(self, tree: Any) -> Any:
        """Return `tree` with each tensor replaced by its value."""
        return tree_map_only(torch.Tensor, self._get_value, tree)

    def _get_value(self, tensor: torch.Tensor) -> Any:
        tag = self._tags.get(tensor)
        if tag is None:
            default = v.make_dense("a tensor of unknown origin")
            return extract_scalar(tensor, default) if tensor in self._constants else default
        value, version = tag
        if version != _get_version(tensor):
            return v.make_dense("a tensor that was changed in place")
        return value

    def _on_enter(self, module: nn.Module, args: Any) -> None:
        if self.inside_layer or module not in self._leaves:
            self._stack.append(None)
            return
        # Read before the layer runs, which may write into its input.
        reads = tuple(self._get_value(tensor) for tensor in _list_tensors(args))
        if isinstance(module, SpikeLayer):
            read = next((item for item in reads if isinstance(item, SpikeValue)), None)
            self.inputs.setdefault(self._leaves[module], []).append(
                read or v.make_dense("a tensor passed by name")
            )
        self._stack.append(reads)

    def _on_exit(self, module: nn.Module, args: Any, output: Any) -> None:
        reads = self._stack.pop()
        if reads is None:
            return
        name = self._leaves[module]
        self.called.add(name)
        if name in self._neurons:
            info = self._neurons[name]
            check_neuron_output(name, info, output)
            value = make_neuron_value(name, info)
            if info.returned_states and isinstance(output, tuple):
                self.set_value(output[1:], v.make_dense("the state of a neuron"))
                output = output[0]
        else:
            value = layer_rules.apply_layer_rule(module, name, reads)
        self.set_value(output, value)
        if isinstance(output, torch.Tensor):
            value = value.with_shape(output.shape)
        self.values.setdefault(name, value)


class _ObserverMode(TorchFunctionMode):
    """Reports all tensor operations outside of layers to the observer."""

    def __init__(self, observer: RunObserver) -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._observer.inside_layer:
            return func(*args, **kwargs)
        known_args, known_kwargs = self._observer.substitute_values((args, kwargs))
        result = func(*args, **kwargs)
        value = _apply_operation(func, known_args, known_kwargs)
        written = args[0] if args and rules.mutates_first_argument(func, args, kwargs) else None
        if isinstance(written, torch.Tensor):
            self._observer.invalidate(written)
        if isinstance(result, (tuple, list)) and rules.get_operation_name(func) in rules.VALUE_INDEX_OPS:
            self._observer.set_value(result[0], value)
            self._observer.set_value(result[1:], v.make_dense("indices"))
        else:
            self._observer.set_value(result, value)
        self._observer.set_value(written, value)
        return result


def _apply_operation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SpikeValue:
    if getattr(func, "__name__", "") == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        known = args[0] if args and isinstance(args[0], SpikeValue) else v.make_dense("a constant")
        return known.append_op(name) if name in VIEW_ATTRIBUTES else v.make_dense(f"`{name}`")
    op = rules.get_operation_name(func)
    if op is None or "out" in kwargs:
        return v.make_dense(f"`{getattr(func, '__name__', func)}`")
    return rules.apply_rule(rules.OperationCall(op=op, args=args, kwargs=kwargs))


def _list_tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _iterate_model_tensors(model: nn.Module) -> Iterable[torch.Tensor]:
    """Iterate over parameters and other tensors of the model, except membranes."""
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))


def _get_storage_id(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors have no storage
        return id(tensor)


def _get_version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors have no version counter
        return -1
