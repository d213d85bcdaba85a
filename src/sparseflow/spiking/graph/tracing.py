"""A network as a `torch.fx` graph whose nodes are its neurons, layers and tensor operations.

Leaves are registered neurons, torch's own layers and spikingjelly's layers; containers (Sequential,
SeqToANNContainer, MultiStepContainer, …) are seen through, so every convolution in them is a node of its own
under its full module name.

Tracing is symbolic wherever possible. Given a sample, proxies also carry the tensors of one run: where a
network branches on a shape or loops over time steps, the sample's answer is taken and an assertion is added
to the graph, so that the traced network refuses inputs for which the answer would differ.
"""

from __future__ import annotations

import dis
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import Attribute, TraceError

from sparseflow.errors import ModelError, SampleError
from sparseflow.spiking.graph.module_state import kept_state
from sparseflow.spiking.graph.registry import is_spiking_neuron

Sample = torch.Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
_UNKNOWN = object()


class UntraceableError(ModelError):
    """The network's forward pass cannot be written down as an fx graph; the message says where it failed."""


def trace(model: nn.Module, sample: Sample | None = None) -> fx.GraphModule:
    """Trace `model` into an fx graph that computes what `model` computes.

    The result shares the model's modules, parameters and state: resetting the model resets it too. The model
    is left as it was, bit for bit (membranes, buffers, attributes, mode, random state).

    Args:
        model: The network.
        sample: Its input: a tensor, a tuple or list of positional arguments, or a mapping of keyword ones.
            Only needed by networks that branch on shapes or loop over an input's time steps.

    Returns:
        The traced network; `call_module` targets are `model`'s own module names.

    Raises:
        ModelError: `model` is not a module.
        SampleError: The model cannot run `sample`.
        UntraceableError: Tracing failed; a sample may help, or the model does what no graph can express.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"expected a torch.nn.Module, got {type(model).__name__}")
    try:
        return trace_once(model, sample, run=False)
    except UntraceableError:
        if sample is None:
            raise
    return trace_once(model, sample, run=True)


def trace_once(model: nn.Module, sample: Sample | None, *, run: bool) -> fx.GraphModule:
    """`trace`, either running the sample or only reading from it which arguments are given."""
    tracer = SpikingTracer(sample, run=run)
    with kept_state(model), torch.no_grad():
        try:
            graph = tracer.trace(model, tracer.concrete_args(model))
        except (SampleError, UntraceableError):
            raise
        except Exception as error:
            inside = [name for name, _ in tracer.module_stack.values() if name]
            place = f" in `{inside[-1]}`" if inside else ""
            raise UntraceableError(
                f"`{type(model).__name__}` cannot be traced{place}: {_one_line(error)}"
            ) from error
        _drop_unread(graph)
        leaks = _stored_proxies(model)
        if leaks and not run:
            raise UntraceableError(
                f"`{type(model).__name__}` keeps activations in {', '.join(leaks)}; "
                "a sample is needed to check that they do not outlive a call"
            )
        # fx hangs constants on the root: the graph module takes them over before the model loses them again.
        return fx.GraphModule(model, graph, class_name=type(model).__name__)


def _drop_unread(graph: fx.Graph) -> None:
    """Erase questions about shapes that nobody needs any more, so that they do not count as readers."""
    for node in reversed(graph.nodes):
        asks = node.op == "call_function" and node.target in _QUESTIONS
        asks = asks or (node.op == "call_method" and node.target in ("size", "dim", "ndimension", "numel"))
        if asks and not node.users:
            graph.erase_node(node)


def call_arguments(sample: Sample) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for one call of the model, from a sample in any accepted form."""
    if isinstance(sample, Mapping):
        return (), dict(sample)
    if isinstance(sample, (tuple, list)):
        return tuple(sample), {}
    return (sample,), {}


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else '(no message)'}"


def _stored_proxies(model: nn.Module) -> list[str]:
    """Attributes of `model`'s modules that hold a proxy after tracing, as `module.attribute`."""
    found = []
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            held = [value, *value] if isinstance(value, (list, tuple)) else [value]
            if isinstance(value, dict) and key not in ("_modules", "_parameters"):
                held = list(value.values())
            if any(isinstance(item, fx.Proxy) for item in held):
                found.append(f"`{name}.{key}`" if name else f"`{key}`")
    return found


class SpikingTracer(fx.Tracer):
    """An fx tracer that knows neurons and, given a sample, the tensor behind every proxy.

    Args:
        sample: The model's input, or None.
        run: Whether to run the sample; otherwise it only says which arguments are given.
    """

    def __init__(self, sample: Sample | None = None, *, run: bool = False) -> None:
        super().__init__()
        self._sample, self._run_sample = sample, run
        self._inputs: dict[str, Any] = {}
        self._placeholders: list[fx.Proxy] = []
        self._ranks_fixed = False
        self._running = False

    def concrete_args(self, model: nn.Module) -> dict[str, Any] | None:
        """Bind the sample to the model's signature; parameters that get no tensor become constants."""
        signature = inspect.signature(model.forward)
        arguments: dict[str, Any] = {}
        if self._sample is not None:
            args, kwargs = call_arguments(self._sample)
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

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Neurons, convolutions, torch's and spikingjelly's layers, and modules with a memory."""
        if is_spiking_neuron(m) or isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
            return True
        if isinstance(m.__dict__.get("_memories"), dict):
            return True  # a recurrent container, a delay: traced into, its memory would become a constant
        author = inspect.unwrap(type(m).forward).__module__ or ""
        if author.startswith("spikingjelly.activation_based.layer"):
            return not any(m.children())
        return author.startswith(("torch.nn.", "torch.ao.nn.")) and not isinstance(m, nn.Sequential)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._running or m not in (self.submodule_paths or {}):
            # A module made during the call (a resize, an activation) has no name: its operations stand in.
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self._running:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _ValueProxy(node, self)

    def create_proxy(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *rest: Any, **more: Any
    ) -> Any:
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **more)
        if kind == "placeholder":
            self._placeholders.append(proxy)
        # The value lives as long as its proxy does, as a tensor lives in an ordinary run.
        proxy.__dict__["value"] = (
            _UNKNOWN if not self._run_sample else self._run(kind, target, args, kwargs, proxy)
        )
        return proxy

    def fix(self, proxy: fx.Proxy, value: Any) -> None:
        """Make the graph refuse inputs for which `proxy` is not `value`."""
        if not _asks_only_for_ranks(proxy.node):
            self._assert_equal(proxy, value)
        elif not self._ranks_fixed:
            # The inputs' ranks settle every other: one check at the door instead of one a question.
            self._ranks_fixed = True
            for placeholder in self._placeholders:
                tensor = placeholder.__dict__["value"]
                if isinstance(tensor, torch.Tensor):
                    self._assert_equal(placeholder.ndim, tensor.ndim)

    def _assert_equal(self, proxy: fx.Proxy, value: Any) -> None:
        message = f"traced for an input in which `{proxy.node.name}` is {value}; trace again for this one"
        held = self.create_proxy("call_function", operator.eq, (proxy, value), {})
        self.create_proxy("call_function", torch._assert, (held, message), {})

    def _run(self, kind: str, target: Any, args: Any, kwargs: Any, proxy: fx.Proxy) -> Any:
        """Compute one node for real. State changes are undone by whoever traces."""
        if kind == "placeholder":
            return self._inputs.get(str(target), _UNKNOWN)
        args, kwargs = _values(args), _values(kwargs)
        if _holds_unknown((args, kwargs)):
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
            raise SampleError(f"the model cannot run the sample, at `{name}`: {_one_line(error)}") from error
        finally:
            self._running = False


_QUESTIONS = {
    getattr, operator.getitem, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
    operator.add, operator.sub, operator.mul, operator.floordiv,
}  # fmt: skip


def _values(tree: Any) -> Any:
    """`tree` with every proxy replaced by its value in the sample's run."""
    if isinstance(tree, _ValueProxy):
        return tree.known()
    if isinstance(tree, (list, tuple)):
        items = [_values(item) for item in tree]
        return items if isinstance(tree, list) else tuple(items)
    if isinstance(tree, dict):
        return {key: _values(item) for key, item in tree.items()}
    if isinstance(tree, slice):
        return slice(_values(tree.start), _values(tree.stop), _values(tree.step))
    return tree


def _holds_unknown(tree: Any) -> bool:
    if isinstance(tree, (list, tuple)):
        return any(_holds_unknown(item) for item in tree)
    if isinstance(tree, dict):
        return any(_holds_unknown(item) for item in tree.values())
    return tree is _UNKNOWN


def _asks_only_for_ranks(node: fx.Node) -> bool:
    """Whether `node` is a number of dimensions, or a comparison of such with constants."""
    if node.op == "call_method":
        return node.target in ("dim", "ndimension")
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] == "ndim"
    compares = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
    return node.target in compares and all(_asks_only_for_ranks(inner) for inner in node.all_input_nodes)


class _ValueProxy(fx.Proxy):
    """A proxy that answers questions about its value where a sample's run is known."""

    tracer: SpikingTracer

    def __getattr__(self, k: str) -> Any:
        return _ValueAttribute(self, k)

    def known(self) -> Any:
        """What this proxy stands for in the run with the sample; `_UNKNOWN` without one."""
        return self.__dict__.get("value", _UNKNOWN)

    def __getitem__(self, index: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.getitem, (self, index), {})

    def _concrete(self, what: str) -> Any:
        value = self.known()
        if value is _UNKNOWN:
            raise TraceError(f"{what} of `{self.node.name}` depends on the input; a sample is needed")
        return value

    def _fixed(self, what: str) -> Any:
        """The value as a number, which the graph insists on from now on."""
        value = self._concrete(what)
        if isinstance(value, torch.Tensor):
            raise TraceError(f"{what} of `{self.node.name}` depends on the numbers in a tensor")
        self.tracer.fix(self, value)
        return value

    def __bool__(self) -> bool:
        return bool(self._fixed("the truth"))

    def __int__(self) -> int:
        return int(self._fixed("the size"))

    def __float__(self) -> float:
        return float(self._fixed("the size"))

    def __index__(self) -> int:
        return operator.index(self._fixed("the size"))

    def __len__(self) -> int:
        value = self._concrete("the length")
        if isinstance(value, torch.Tensor):
            return int(self.shape[0])
        return len(value)

    def __iter__(self) -> Iterator[Any]:
        frame = inspect.currentframe()
        caller = None if frame is None else frame.f_back
        if self.known() is _UNKNOWN:
            assert caller is not None
            return _unpacked(self, caller)
        return iter([self[index] for index in range(len(self))])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    # Without these Python falls back on the out-of-place operator and the graph loses the change of an alias.
    def __iadd__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})

    def __isub__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.isub, (self, other), {})

    def __imul__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.imul, (self, other), {})

    def __itruediv__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.itruediv, (self, other), {})


class _ValueAttribute(_ValueProxy, Attribute):
    """`proxy.name`: a method call if it is called, else a getattr node made when it is first used."""

    def __init__(self, root: fx.Proxy, attr: str) -> None:
        Attribute.__init__(self, root, attr)

    def known(self) -> Any:
        root = self.root.known()  # type: ignore[attr-defined]
        return _UNKNOWN if root is _UNKNOWN else getattr(root, self.attr)

    @property
    def node(self) -> fx.Node:
        return Attribute.node.fget(self)  # type: ignore[union-attr]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_method", self.attr, (self.root, *args), kwargs)


def _unpacked(proxy: _ValueProxy, caller: Any) -> Iterator[Any]:
    """`a, b = proxy` without a sample: the number of names tells the length."""
    for instruction in dis.get_instructions(caller.f_code):
        if instruction.offset == caller.f_lasti and instruction.opname == "UNPACK_SEQUENCE":
            return iter([proxy[index] for index in range(instruction.argval)])
    raise TraceError(f"a loop over `{proxy.node.name}` depends on the input; a sample is needed")
