"""A network as a `torch.fx` graph whose nodes are its neurons, layers and tensor operations.

Leaves are registered neurons, torch's own layers and spikingjelly's layers. Containers (Sequential,
SeqToANNContainer, MultiStepContainer, …) are inlined, so each convolution in them is a node under its full
module name.

Tracing is symbolic where possible. Given a sample, proxies also carry the tensors of one run: where a
network branches on a shape or loops over time steps, the sample's answer is taken and an assertion is added
to the graph, so that the traced network refuses inputs for which the answer differs.
"""

from __future__ import annotations

import dis
import inspect
import operator
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate
from torch.fx.proxy import Attribute, TraceError
from torch.utils._pytree import tree_leaves

from sparseflow.errors import ModelError, SampleError
from sparseflow.spiking.graph.forward_reads import AccessRecorder, ForwardReads, format_statement
from sparseflow.spiking.graph.module_state import preserve_state
from sparseflow.spiking.graph.registry import is_spiking_neuron, list_reset_methods
from sparseflow.spiking.graph.sites import SpikeLayer

Sample = torch.Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
_UNKNOWN = object()

TRACE_LOCK = threading.RLock()
"""Held while a network is traced or timed: fx patches `nn.Module` for the whole process."""


class UntraceableError(ModelError):
    """The network's forward pass cannot be expressed as an fx graph; the message says where it failed."""


def trace(model: nn.Module, sample: Sample | None = None) -> fx.GraphModule:
    """Trace `model` into an fx graph that computes what `model` computes.

    The result shares the model's modules, parameters and state: resetting the model resets it too. The
    model is restored bit for bit (membranes, buffers, attributes, mode, random state).

    Args:
        model: The network.
        sample: Its input: a tensor, a tuple or list of positional arguments, or a mapping of keyword
            arguments. Only needed by networks that branch on shapes or loop over an input's time steps.

    Returns:
        The traced network; `call_module` targets are `model`'s own module names. `get_forward_reads` gives
        what it depends on.

    Raises:
        ModelError: `model` is not a module.
        SampleError: The model cannot run `sample`.
        UntraceableError: Tracing failed; a sample may help, or the model does something that no graph can
            express.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"expected a torch.nn.Module, got {type(model).__name__}")
    opaque: set[nn.Module] = set()
    while True:
        try:
            module = trace_once(model, sample, opaque, run=False)
        except UntraceableError:
            if sample is None:
                raise
            module = trace_once(model, sample, opaque, run=True)
        # A module that the forward creates is another one in each trace.
        stateful = get_forward_reads(module).stateful & set(model.modules())
        stateful = {inner for inner in stateful if _can_be_opaque(inner, model)}
        if stateful <= opaque:
            return module
        opaque |= stateful


def _can_be_opaque(module: nn.Module, model: nn.Module) -> bool:
    """Return whether a module with state of its own may run as it is, as one node of the graph."""
    if module is model or any(True for _ in module.buffers()):  # a new buffer looks like a new weight
        return False
    inner = list(module.modules())
    return not any(map(is_spiking_neuron, inner)) and sum(isinstance(m, SpikeLayer) for m in inner) <= 1


def trace_once(
    model: nn.Module, sample: Sample | None, opaque: Set[nn.Module] = frozenset(), *, run: bool
) -> fx.GraphModule:
    """`trace` that either runs the sample or only reads from it which arguments are passed.

    Args:
        model, sample: See `trace`.
        opaque: Modules that become one node each.
        run: Whether to run the sample.
    """
    tracer = SpikingTracer(sample, opaque, run=run)
    recorder = AccessRecorder(model, tracer.is_in_traced_code)
    with TRACE_LOCK, preserve_state(model), torch.no_grad():
        try:
            concrete_args = tracer.bind_concrete_args(model)
            tracer.record_resets(model)
            with recorder.record(), tracer.record_constructors():
                graph = tracer.trace(model, concrete_args)
        except (SampleError, UntraceableError):
            raise
        except Exception as error:
            module_names = [name for name, _ in tracer.module_stack.values() if name]
            location = f" in `{module_names[-1]}`" if module_names else ""
            location += format_statement(traceback.extract_tb(error.__traceback__))
            raise UntraceableError(
                f"`{type(model).__name__}` cannot be traced{location}: {_format_error(error)}"
            ) from error
        _erase_unused_queries(graph)
        stored = _find_stored_proxies(model)
        if stored and not run:
            raise UntraceableError(
                f"`{type(model).__name__}` stores activations in {', '.join(stored)}; "
                "give a sample to check that they are not used by later calls"
            )
        # fx stores constants on the root: the graph module copies them before the model's state is restored.
        module = fx.GraphModule(model, graph, class_name=type(model).__name__)
    reads = module.meta[_READS_KEY] = recorder.watch_reads()
    reads.opaque = frozenset(name for name, inner in model.named_modules() if inner in opaque)
    return module


_READS_KEY = "sparseflow_forward_reads"


def get_forward_reads(module: fx.GraphModule) -> ForwardReads:
    """Return the values that the forward of a network traced by `trace` depends on."""
    reads = module.meta[_READS_KEY]
    assert isinstance(reads, ForwardReads)
    return reads


def _erase_unused_queries(graph: fx.Graph) -> None:
    """Erase unused queries of shapes, so that they do not count as readers."""
    for node in reversed(graph.nodes):
        is_query = node.op == "call_function" and node.target in _QUERY_FUNCTIONS
        is_query = is_query or (
            node.op == "call_method" and node.target in ("size", "dim", "ndimension", "numel")
        )
        if is_query and not node.users:
            graph.erase_node(node)


def split_arguments(sample: Sample) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split a sample in any accepted form into positional and keyword arguments."""
    if isinstance(sample, Mapping):
        return (), dict(sample)
    if isinstance(sample, (tuple, list)):
        return tuple(sample), {}
    return (sample,), {}


def _format_error(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else '(no message)'}"


def _find_stored_proxies(model: nn.Module) -> list[str]:
    """List attributes of `model`'s modules that hold a proxy after tracing, as `module.attribute`."""
    attributes = []
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            items = [value, *value] if isinstance(value, (list, tuple)) else [value]
            if isinstance(value, dict) and key not in ("_modules", "_parameters"):
                items = list(value.values())
            if any(isinstance(item, fx.Proxy) for item in items):
                attributes.append(f"`{name}.{key}`" if name else f"`{key}`")
    return attributes


class SpikingTracer(fx.Tracer):
    """An fx tracer that knows neurons and, given a sample, the tensor behind each proxy.

    Args:
        sample: The model's input, or None.
        opaque: Modules that become one node each.
        run: Whether to run the sample; otherwise it only determines which arguments are passed.
    """

    def __init__(
        self, sample: Sample | None = None, opaque: Set[nn.Module] = frozenset(), *, run: bool = False
    ) -> None:
        super().__init__()
        self._sample, self._opaque, self._run_sample = sample, opaque, run
        self._inputs: dict[str, Any] = {}
        self._placeholders: list[fx.Proxy] = []
        self._ranks_asserted = False
        self._running = False
        self._thread = threading.get_ident()

    def is_in_traced_code(self) -> bool:
        """Return whether the caller is the code that is traced, not an operation's run or another thread."""
        return not self._running and threading.get_ident() == self._thread

    def bind_concrete_args(self, model: nn.Module) -> dict[str, Any] | None:
        """Bind the sample to the model's signature; parameters without a tensor become constants."""
        signature = inspect.signature(model.forward)
        arguments: dict[str, Any] = {}
        if self._sample is not None:
            args, kwargs = split_arguments(self._sample)
            try:
                arguments = dict(signature.bind(*args, **kwargs).arguments)
            except TypeError as error:
                raise SampleError(
                    f"the sample does not fit {type(model).__name__}.forward: {error}"
                ) from error
        constants: dict[str, Any] = {}
        for name, parameter in signature.parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            value = arguments.get(name, parameter.default)
            if isinstance(value, torch.Tensor):
                self._inputs[name] = value
            elif value is None or isinstance(value, (bool, int, float, str)):
                constants[name] = value
            elif value is not inspect.Parameter.empty:
                raise UntraceableError(f"its argument `{name}` is a {type(value).__name__}, not a tensor")
        return constants or None

    def record_resets(self, model: nn.Module) -> None:
        """Let the methods of neurons that reset them become nodes; the caller restores the neurons."""
        for module in model.modules():
            for name in list_reset_methods(module):
                vars(module)[name] = partial(self._record_reset, getattr(module, name))

    def _record_reset(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not self.is_in_traced_code():
            return method(*args, **kwargs)
        return self.create_proxy("call_function", method, (), {})

    @contextmanager
    def record_constructors(self) -> Iterator[None]:
        """Let `torch.zeros` and the like take sizes that the network asked its input for."""
        originals = {name: getattr(torch, name) for name in ("zeros", "ones", "empty", "full")}

        def construct(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self.is_in_traced_code() and any(isinstance(size, fx.Proxy) for size in tree_leaves(args)):
                return self.create_proxy("call_function", original, args, kwargs)
            return original(*args, **kwargs)

        for name, original in originals.items():
            setattr(torch, name, partial(construct, original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(torch, name, original)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is a neuron, a convolution, a library layer or has state."""
        if m in self._opaque or is_spiking_neuron(m) or isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
            return True
        if isinstance(m.__dict__.get("_memories"), dict):
            return True  # its state would become a constant if traced into
        author = inspect.unwrap(type(m).forward).__module__ or ""
        if author.startswith("spikingjelly.activation_based.layer"):
            return not any(m.children())
        return author.startswith(("torch.nn.", "torch.ao.nn.")) and not isinstance(m, nn.Sequential)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self.is_in_traced_code() or m not in (self.submodule_paths or {}):
            # A module created during the call has no name: trace its operations instead.
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if not self.is_in_traced_code():
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _ValueProxy(node, self)

    def create_proxy(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *positional: Any,
        **keywords: Any,
    ) -> Any:
        proxy = super().create_proxy(kind, target, args, kwargs, *positional, **keywords)
        if kind == "placeholder":
            self._placeholders.append(proxy)
        # The value lives as long as its proxy, like a tensor in an ordinary run.
        proxy.__dict__["value"] = (
            _UNKNOWN if not self._run_sample else self._run_operation(kind, target, args, kwargs, proxy)
        )
        return proxy

    def assert_value(self, proxy: fx.Proxy, value: Any) -> None:
        """Make the graph refuse inputs for which `proxy` is not `value`."""
        if not _depends_only_on_ranks(proxy.node):
            self._assert_equal(proxy, value)
        elif not self._ranks_asserted:
            # The inputs' ranks determine all others: one check per input instead of one per query.
            self._ranks_asserted = True
            for placeholder in self._placeholders:
                tensor = placeholder.__dict__["value"]
                if isinstance(tensor, torch.Tensor):
                    self._assert_equal(placeholder.ndim, tensor.ndim)

    def _assert_equal(self, proxy: fx.Proxy, value: Any) -> None:
        message = f"traced for an input in which `{proxy.node.name}` is {value}; trace again for this one"
        condition = self.create_proxy("call_function", operator.eq, (proxy, value), {})
        self.create_proxy("call_function", torch._assert, (condition, message), {})

    def _run_operation(self, kind: str, target: Any, args: Any, kwargs: Any, proxy: fx.Proxy) -> Any:
        """Run one node; the caller of the tracer undoes state changes."""
        if kind == "placeholder":
            return self._inputs.get(str(target), _UNKNOWN)
        args, kwargs = map_aggregate(
            (args, kwargs), lambda item: item.get_value() if isinstance(item, _ValueProxy) else item
        )
        if any(leaf is _UNKNOWN for leaf in tree_leaves((args, kwargs))):
            return _UNKNOWN
        self._running = True
        try:
            if kind == "get_attr":
                return operator.attrgetter(str(target))(self.root)
            if kind == "call_module":
                return self.root.get_submodule(str(target))(*args, **kwargs)
            if kind == "call_method":
                return getattr(args[0], str(target))(*args[1:], **kwargs)
            return target(*args, **kwargs)
        except Exception as error:
            name = proxy.node.name
            raise SampleError(
                f"the model cannot run the sample, at `{name}`: {_format_error(error)}"
            ) from error
        finally:
            self._running = False


_QUERY_FUNCTIONS = {
    getattr, operator.getitem, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
    operator.add, operator.sub, operator.mul, operator.floordiv,
}  # fmt: skip


def _depends_only_on_ranks(node: fx.Node) -> bool:
    """Return whether `node` is a number of dimensions, or a comparison of such with constants."""
    if node.op == "call_method":
        return node.target in ("dim", "ndimension")
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] == "ndim"
    compares = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
    return node.target in compares and all(_depends_only_on_ranks(inner) for inner in node.all_input_nodes)


class _ValueProxy(fx.Proxy):
    """A proxy that knows its value in the sample's run."""

    tracer: SpikingTracer

    def __getattr__(self, k: str) -> Any:
        return _ValueAttribute(self, k)

    def get_value(self) -> Any:
        """Return the value in the sample's run; `_UNKNOWN` without one."""
        return self.__dict__.get("value", _UNKNOWN)

    def __getitem__(self, index: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.getitem, (self, index), {})

    def _require_value(self, property_name: str) -> Any:
        value = self.get_value()
        if value is _UNKNOWN:
            raise TraceError(f"{property_name} of `{self.node.name}` depends on the input; give a sample")
        return value

    def _require_constant(self, property_name: str) -> Any:
        """Return the value as a number, which the graph asserts from then on."""
        value = self._require_value(property_name)
        if isinstance(value, torch.Tensor):
            raise TraceError(f"{property_name} of `{self.node.name}` depends on the values of a tensor")
        self.tracer.assert_value(self, value)
        return value

    def __bool__(self) -> bool:
        return bool(self._require_constant("the truth"))

    def __int__(self) -> int:
        return int(self._require_constant("the size"))

    def __float__(self) -> float:
        return float(self._require_constant("the size"))

    def __index__(self) -> int:
        return operator.index(self._require_constant("the size"))

    def __len__(self) -> int:
        value = self._require_value("the length")
        if isinstance(value, torch.Tensor):
            return int(self.shape[0])
        return len(value)

    def __iter__(self) -> Iterator[Any]:
        frame = inspect.currentframe()
        caller = None if frame is None else frame.f_back
        if self.get_value() is _UNKNOWN:
            assert caller is not None
            return _unpack_by_bytecode(self, caller)
        return iter([self[index] for index in range(len(self))])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    # Without these, Python falls back to the out-of-place operator, which does not change aliases.
    def __iadd__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})

    def __isub__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.isub, (self, other), {})

    def __imul__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.imul, (self, other), {})

    def __itruediv__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.itruediv, (self, other), {})


class _ValueAttribute(_ValueProxy, Attribute):
    """`proxy.name`: a method call if it is called, else a getattr node created on first use."""

    def __init__(self, root: fx.Proxy, attr: str) -> None:
        Attribute.__init__(self, root, attr)

    def get_value(self) -> Any:
        root = self.root.get_value()  # type: ignore[attr-defined]
        return _UNKNOWN if root is _UNKNOWN else getattr(root, self.attr)

    @property
    def node(self) -> fx.Node:
        return Attribute.node.fget(self)  # type: ignore[union-attr]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_method", self.attr, (self.root, *args), kwargs)


def _unpack_by_bytecode(proxy: _ValueProxy, caller: Any) -> Iterator[Any]:
    """`a, b = proxy` without a sample: the bytecode gives the number of names."""
    for instruction in dis.get_instructions(caller.f_code):
        if instruction.offset == caller.f_lasti and instruction.opname == "UNPACK_SEQUENCE":
            return iter([proxy[index] for index in range(instruction.argval)])
    raise TraceError(f"a loop over `{proxy.node.name}` depends on the input; give a sample")
