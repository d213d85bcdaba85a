"""What each tensor operation does to what is known about its input.

One table, read in two ways: over the nodes of a traced graph (`walk.py`) and over the calls of a live run
(`observe.py`). An operation that is not in the table yields a dense value: nothing is guessed.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sparseflow.spiking.graph import values as v
from sparseflow.spiking.graph.values import Value

Rule = Callable[["Call"], Value]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of an operation.

    Attributes:
        op: The operation's name, without underscores: `add` for `+`, `torch.add`, `Tensor.add_` and `+=`.
        args, kwargs: Its arguments, with a `Value` in place of every tensor.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def input(self) -> Value:
        """The first argument."""
        first = self.args[0] if self.args else self.kwargs.get("input")
        return first if isinstance(first, Value) else v.dense(f"`{self.op}`")

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument given by position or by name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


def _keep(call: Call) -> Value:
    return call.input.step(call.op)


def _view(call: Call) -> Value:
    if any(isinstance(argument, torch.dtype) for argument in (*call.args, *call.kwargs.values())):
        return v.dense("bits read as another dtype")
    return _keep(call)


def _repeat_interleave(call: Call) -> Value:
    # With one argument it turns counts into indices.
    return _keep(call) if len(call.args) + len(call.kwargs) > 1 else v.dense("indices")


def _clamp(call: Call) -> Value:
    low, high = call.argument(1, "min"), call.argument(2, "max")
    value, bounded = call.input, isinstance(high, (int, float)) and high >= 1 and high == int(high)
    if value.kind in ("binary", "integer") and low in (None, 0) and (high is None or bounded):
        bound = value.max_value or 0
        return v.integer(
            bound if high is None else min(bound, int(high)), value.sources, (*value.path, call.op)
        )
    return v.dense(value.cause or f"`{call.op}`")


def _first_of_pair(call: Call) -> Value:
    """max/min: elementwise with a second tensor, else a selection of elements (whose indices are dropped)."""
    other = call.argument(1, "other")
    if isinstance(other, Value):
        return v.join((call.input, other), call.op)
    return _keep(call)


def _add(call: Call) -> Value:
    return _sum(call, 1)


def _sub(call: Call) -> Value:
    return _sum(call, -1)


def _sum(call: Call, sign: int) -> Value:
    left, right = call.argument(0, "input"), call.argument(1, "other")
    alpha = call.argument(2, "alpha", 1)
    if not isinstance(alpha, (int, float)):
        return v.dense(f"`{call.op}`")
    if isinstance(right, Value) and alpha != 1:
        right = v.scale_by(right, alpha, call.op)
    if isinstance(left, Value) and isinstance(right, Value):
        return (v.add if sign > 0 else v.subtract)(left, right, call.op)
    tensor, number = (left, right) if isinstance(left, Value) else (right, left)
    if not isinstance(tensor, Value) or not isinstance(number, (int, float)):
        return v.dense(f"`{call.op}`")
    if sign < 0 and tensor is right:
        return v.one_minus(tensor, call.op) if number == 1 else v.dense(f"{number} - spikes")
    if number * alpha == 0:
        return tensor.step(call.op)
    return v.dense(tensor.cause or f"a constant added by `{call.op}`")


def _reverse_sub(call: Call) -> Value:
    return _sub(Call(op="sub", args=(call.args[1], call.args[0]), kwargs=call.kwargs))


def _mul(call: Call) -> Value:
    left, right = call.argument(0, "input"), call.argument(1, "other")
    if isinstance(left, Value) and isinstance(right, Value):
        return v.multiply(left, right, call.op)
    tensor, number = (left, right) if isinstance(left, Value) else (right, left)
    if isinstance(tensor, Value) and isinstance(number, (int, float)):
        return v.scale_by(tensor, float(number), call.op)
    return v.dense(f"`{call.op}`")


def _div(call: Call) -> Value:
    left, right = call.argument(0, "input"), call.argument(1, "other")
    number = isinstance(right, (int, float)) and right != 0 and math.isfinite(right)
    if not isinstance(left, Value) or not number or call.kwargs.get("rounding_mode") is not None:
        return v.dense(f"`{call.op}`")
    if math.frexp(right)[0] in (0.5, -0.5):
        return v.scale_by(left, 1.0 / right, call.op)
    # x / d rounds differently from x * (1 / d), so the result has no known scale.
    return v.multiply(left, v.dense("a quotient"), call.op)


def _neg(call: Call) -> Value:
    return v.scale_by(call.input, -1.0, call.op)


def _relu(call: Call) -> Value:
    return v.floor_at_zero(call.input, call.op)


def _abs(call: Call) -> Value:
    if call.input.kind == "sparse_real":
        return Value(kind="sparse_real", sources=call.input.sources, path=(*call.input.path, call.op))
    return _relu(call)


def _join(call: Call) -> Value:
    tensors = call.argument(0, "tensors")
    if isinstance(tensors, Value):  # what chunk or split gave, as a whole
        return tensors.step(call.op)
    if isinstance(tensors, (list, tuple)) and all(isinstance(item, Value) for item in tensors):
        return v.join(tensors, call.op)
    return v.dense(f"`{call.op}`")


def _zeros(call: Call) -> Value:
    return v.ZERO


def _cast(call: Call) -> Value:
    value = call.input
    if value.kind == "sparse_real":
        return v.multiply(value, v.dense("a cast"), call.op)
    # Up to 127 every dtype holds every integer.
    return _keep(call) if (value.max_value or 0) <= 127 else v.dense(f"`{call.op}`")


def _copy(call: Call) -> Value:
    source = call.argument(1, "src")
    return source.step(call.op) if isinstance(source, Value) else v.dense(f"`{call.op}`")


def _dropout(call: Call) -> Value:
    # The functional form is active unless told otherwise; then kept elements grow by 1 / (1 - p).
    active = call.argument(2, "training", True) is not False
    return v.multiply(call.input, v.dense("an active dropout"), call.op) if active else _keep(call)


def _adaptive_max_pool(call: Call) -> Value:
    return v.dense(f"`{call.op}` with indices") if call.argument(2, "return_indices", False) else _keep(call)


def _max_pool(call: Call) -> Value:
    # max_pool(input, kernel_size, stride, padding, dilation, …): with a dilation a window may miss the input.
    dilation = call.argument(4, "dilation", 1)
    indices = call.argument(6, "return_indices", False)
    if indices or (dilation if isinstance(dilation, int) else max(dilation)) != 1:
        return v.dense(f"`{call.op}` with a dilation or with indices")
    return _keep(call)


def _interpolate(call: Call) -> Value:
    mode = call.argument(3, "mode", "nearest")
    return _keep(call) if mode in ("nearest", "nearest-exact") else v.dense(f"{mode} interpolation")


def _pad(call: Call) -> Value:
    mode, fill = call.argument(2, "mode", "constant"), call.argument(3, "value", None)
    if mode == "constant" and fill not in (None, 0):
        return v.dense(f"padding with {fill}")
    return _keep(call)


def _assign(call: Call) -> Value:
    """target[index] = value: each element is the target's or the value's."""
    target, new = call.input, call.argument(2, "value")
    if isinstance(new, Value):
        return v.join((target, new), "setitem")
    return v.join((target, v.ZERO), "setitem") if new == 0 else v.dense("a constant assigned to elements")


_MOVES = (
    *(
        "flatten",
        "unflatten",
        "reshape",
        "view_as",
        "reshape_as",
        "permute",
        "transpose",
        "swapaxes",
        "swapdims",
    ),
    *(
        "movedim",
        "moveaxis",
        "t",
        "contiguous",
        "squeeze",
        "unsqueeze",
        "expand",
        "expand_as",
        "broadcast_to",
    ),
    *("repeat", "tile", "clone", "detach", "alias", "select", "narrow", "index_select", "getitem", "chunk"),
    *("split", "split_with_sizes", "tensor_split", "hsplit", "vsplit", "dsplit", "unbind", "roll", "flip"),
    *("fliplr", "flipud", "rot90", "gather", "take", "take_along_dim", "masked_select", "diagonal", "unfold"),
    *("requires_grad", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle"),
    *("amax", "amin"),
)
_CASTS = (
    "float",
    "half",
    "double",
    "bfloat16",
    "int",
    "long",
    "short",
    "bool",
    "to",
    "type",
    "type_as",
    "cpu",
    "cuda",
)
PAIRS = ("max", "min")  # with a dimension these yield (values, indices)
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_MOVES, _keep),
    **dict.fromkeys(_CASTS, _cast),
    **dict.fromkeys(("clamp", "clip"), _clamp),
    **dict.fromkeys(("max", "min", "maximum", "minimum"), _first_of_pair),
    **dict.fromkeys(("stack", "cat", "concat", "concatenate", "hstack", "vstack", "dstack"), _join),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero"), _zeros),
    **dict.fromkeys(("max_pool1d", "max_pool2d", "max_pool3d"), _max_pool),
    **dict.fromkeys(
        ("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"), _adaptive_max_pool
    ),
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"), _dropout),
    **dict.fromkeys(("add", "radd"), _add),
    **dict.fromkeys(("sub", "subtract"), _sub),
    **dict.fromkeys(("rsub",), _reverse_sub),
    **dict.fromkeys(("mul", "multiply", "rmul"), _mul),
    **dict.fromkeys(("div", "divide", "truediv", "true_divide"), _div),
    "view": _view,
    "repeat_interleave": _repeat_interleave,
    "neg": _neg,
    "negative": _neg,
    "relu": _relu,
    "abs": _abs,
    "interpolate": _interpolate,
    "upsample": _interpolate,
    "pad": _pad,
    "setitem": _assign,
    "copy": _copy,
}
# Operations whose result may share memory with their first argument.
_VIEWS = {
    *(set(_MOVES) - {"clone", "repeat", "tile", "roll", "gather", "take", "amax", "amin"}),
    *_CASTS,
    *("view", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "alpha_dropout"),
    *("as_strided", "view_as_real", "view_as_complex", "ravel", "atleast_1d", "atleast_2d", "atleast_3d"),
    *("broadcast_tensors", "meshgrid", "conj", "resolve_conj", "resolve_neg", "positive", "real", "imag"),
    *("adjoint", "numpy", "values", "rename", "refine_names", "align_to", "set", "slice"),
}
_WORDS = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), "a convolution"),
    **dict.fromkeys(("avg_pool1d", "avg_pool2d", "avg_pool3d"), "average pooling"),
    **{f"adaptive_avg_pool{rank}d": "average pooling" for rank in (1, 2, 3)},
    **dict.fromkeys(("matmul", "bmm", "mm", "einsum", "baddbmm"), "a matrix product"),
    **{f"{kind}_norm": f"{kind} normalisation" for kind in ("batch", "group", "layer", "instance")},
    "linear": "a linear layer",
    "mean": "a mean",
    "sum": "a sum",
}


def operation_name(target: Any) -> str | None:
    """The table's name for a function or method; None for one that is neither torch's nor Python's."""
    if isinstance(target, str):
        name, owner = target, "torch"
    else:
        name = getattr(target, "__name__", "")
        owner = getattr(target, "__module__", None) or ""
        builtin = getattr(target, "__objclass__", None) is not None or owner in ("", "builtins")
        if not (builtin or owner.split(".")[0] in ("torch", "_operator", "operator")):
            return None
    stripped = name.strip("_")
    inplace = {f"i{op}": op for op in ("add", "sub", "mul", "truediv")}
    return (
        inplace.get(stripped, stripped)
        if owner in ("_operator", "operator") or name.startswith("__")
        else stripped
    )


def mutates_first(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a function or method writes into its first argument."""
    if target in (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem):
        return True
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__"):
        return True
    if name.endswith("_") and not name.endswith("__"):
        return name not in ("requires_grad_", "detach_", "retain_grad_")
    position = _INPLACE_POSITION.get(name, len(args))
    return kwargs.get("inplace") is True or (position < len(args) and args[position] is True)


def _inplace_positions() -> dict[str, int]:
    """Where torch.nn.functional's functions take their `inplace` flag."""
    found: dict[str, int] = {}
    for name, function in vars(nn.functional).items():
        if inspect.isfunction(function) and "inplace" in (
            names := list(inspect.signature(function).parameters)
        ):
            found[name] = names.index("inplace")
    return found


_INPLACE_POSITION = _inplace_positions()


def may_alias(op: str | None) -> bool:
    """Whether the result of `op` may share memory with an argument; unknown functions may."""
    return op is None or op in _VIEWS


def apply(call: Call) -> Value:
    """What is known about the result of one operation."""
    rule = _RULES.get(call.op)
    if rule is None:
        return v.dense(_WORDS.get(call.op, f"`{call.op}`"))
    return rule(call)
