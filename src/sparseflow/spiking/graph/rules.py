"""Effect of each tensor operation on what is known about its input.

One table is used in two ways: over the nodes of a traced graph (`propagation.py`) and over the calls of a
live run (`observation.py`). An operation that is not in the table yields a dense value.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from sparseflow.spiking.graph import values as v
from sparseflow.spiking.graph.values import SpikeValue

Rule = Callable[["OperationCall"], SpikeValue]


@dataclass(frozen=True, kw_only=True)
class OperationCall:
    """One call of an operation.

    Attributes:
        op: Name of the operation, without underscores: `add` for `+`, `torch.add`, `Tensor.add_` and `+=`.
        args, kwargs: Its arguments, with a `SpikeValue` instead of each tensor.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def input(self) -> SpikeValue:
        """The first argument."""
        first = self.args[0] if self.args else self.kwargs.get("input")
        return first if isinstance(first, SpikeValue) else v.make_dense(f"`{self.op}`")

    def get_argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument passed by position or by name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


def _keep_value(call: OperationCall) -> SpikeValue:
    return call.input.append_op(call.op)


def _view(call: OperationCall) -> SpikeValue:
    if any(isinstance(argument, torch.dtype) for argument in (*call.args, *call.kwargs.values())):
        return v.make_dense("bits viewed as another dtype")
    return _keep_value(call)


def _repeat_interleave(call: OperationCall) -> SpikeValue:
    # With one argument it converts counts to indices.
    return _keep_value(call) if len(call.args) + len(call.kwargs) > 1 else v.make_dense("indices")


def _clamp(call: OperationCall) -> SpikeValue:
    low, high = call.get_argument(1, "min"), call.get_argument(2, "max")
    value, bounded = call.input, isinstance(high, (int, float)) and high >= 1 and high == int(high)
    if value.kind in ("binary", "integer") and low in (None, 0) and (high is None or bounded):
        bound = value.max_value or 0
        return v.make_integer(
            bound if high is None else min(bound, int(high)), value.sources, (*value.path, call.op)
        )
    return v.make_dense(value.cause or f"`{call.op}`")


def _first_of_pair(call: OperationCall) -> SpikeValue:
    """max/min: elementwise with a second tensor, else a selection of elements (whose indices are dropped)."""
    other = call.get_argument(1, "other")
    if isinstance(other, SpikeValue):
        return v.join((call.input, other), call.op)
    return _keep_value(call)


def _sum(call: OperationCall, sign: int) -> SpikeValue:
    first, second = call.get_argument(0, "input"), call.get_argument(1, "other")
    alpha = call.get_argument(2, "alpha", 1)
    if not isinstance(alpha, (int, float)):
        return v.make_dense(f"`{call.op}`")
    if isinstance(second, SpikeValue) and alpha != 1:
        second = v.scale_by(second, alpha, call.op)
    if isinstance(first, SpikeValue) and isinstance(second, SpikeValue):
        return (v.add if sign > 0 else v.subtract)(first, second, call.op)
    tensor, number = (first, second) if isinstance(first, SpikeValue) else (second, first)
    if not isinstance(tensor, SpikeValue) or not isinstance(number, (int, float)):
        return v.make_dense(f"`{call.op}`")
    if sign < 0 and tensor is second:
        return v.subtract_from_one(tensor, call.op) if number == 1 else v.make_dense(f"{number} - spikes")
    if number * alpha == 0:
        return tensor.append_op(call.op)
    return v.make_dense(tensor.cause or f"a constant added by `{call.op}`")


def _reverse_sub(call: OperationCall) -> SpikeValue:
    return _sum(OperationCall(op="sub", args=(call.args[1], call.args[0]), kwargs=call.kwargs), -1)


def _mul(call: OperationCall) -> SpikeValue:
    first, second = call.get_argument(0, "input"), call.get_argument(1, "other")
    if isinstance(first, SpikeValue) and isinstance(second, SpikeValue):
        return v.multiply(first, second, call.op)
    tensor, number = (first, second) if isinstance(first, SpikeValue) else (second, first)
    if isinstance(tensor, SpikeValue) and isinstance(number, (int, float)):
        return v.scale_by(tensor, float(number), call.op)
    return v.make_dense(f"`{call.op}`")


def _div(call: OperationCall) -> SpikeValue:
    dividend, divisor = call.get_argument(0, "input"), call.get_argument(1, "other")
    is_finite_number = isinstance(divisor, (int, float)) and divisor != 0 and math.isfinite(divisor)
    rounds = call.kwargs.get("rounding_mode") is not None
    if not isinstance(dividend, SpikeValue) or not is_finite_number or rounds:
        return v.make_dense(f"`{call.op}`")
    return v.scale_by(dividend, 1.0 / divisor, call.op)


def _join(call: OperationCall) -> SpikeValue:
    tensors = call.get_argument(0, "tensors")
    if isinstance(tensors, SpikeValue):  # the result of chunk or split
        return tensors.append_op(call.op)
    if isinstance(tensors, (list, tuple)) and all(isinstance(item, SpikeValue) for item in tensors):
        return v.join(tensors, call.op)
    return v.make_dense(f"`{call.op}`")


def _cast(call: OperationCall) -> SpikeValue:
    # All dtypes represent the integers up to 127 exactly.
    return _keep_value(call) if (call.input.max_value or 0) <= 127 else v.make_dense(f"`{call.op}`")


def _copy(call: OperationCall) -> SpikeValue:
    source = call.get_argument(1, "src")
    return source.append_op(call.op) if isinstance(source, SpikeValue) else v.make_dense(f"`{call.op}`")


def _dropout(call: OperationCall) -> SpikeValue:
    # The functional form is active by default and scales by 1 / (1 - p).
    active = call.get_argument(2, "training", True) is not False
    return v.multiply(call.input, v.make_dense("an active dropout"), call.op) if active else _keep_value(call)


def _adaptive_max_pool(call: OperationCall) -> SpikeValue:
    if call.get_argument(2, "return_indices", False):
        return v.make_dense(f"`{call.op}` with indices")
    return _keep_value(call)


def _max_pool(call: OperationCall) -> SpikeValue:
    # max_pool(input, kernel_size, stride, padding, dilation, …): with a dilation a window may miss the input.
    dilation = call.get_argument(4, "dilation", 1)
    indices = call.get_argument(6, "return_indices", False)
    if indices or (dilation if isinstance(dilation, int) else max(dilation)) != 1:
        return v.make_dense(f"`{call.op}` with a dilation or with indices")
    return _keep_value(call)


def _interpolate(call: OperationCall) -> SpikeValue:
    mode = call.get_argument(3, "mode", "nearest")
    if mode in ("nearest", "nearest-exact"):
        return _keep_value(call)
    return v.make_dense(f"{mode} interpolation")


def _pad(call: OperationCall) -> SpikeValue:
    mode, fill = call.get_argument(2, "mode", "constant"), call.get_argument(3, "value", None)
    if mode == "constant" and fill not in (None, 0):
        return v.make_dense(f"padding with {fill}")
    return _keep_value(call)


def _assign(call: OperationCall) -> SpikeValue:
    """target[index] = value: each element is the target's or the value's."""
    target, assigned = call.input, call.get_argument(2, "value")
    if isinstance(assigned, SpikeValue):
        return v.join((target, assigned), "setitem")
    if assigned == 0:
        return v.join((target, v.ZERO), "setitem")
    return v.make_dense("a constant assigned to elements")


_ELEMENT_MOVES = (
    "flatten", "unflatten", "reshape", "view_as", "reshape_as", "permute", "transpose", "swapaxes",
    "swapdims", "movedim", "moveaxis", "t", "contiguous", "squeeze", "unsqueeze", "expand", "expand_as",
    "broadcast_to", "repeat", "tile", "clone", "detach", "alias", "select", "narrow", "index_select",
    "getitem", "chunk", "split", "split_with_sizes", "tensor_split", "hsplit", "vsplit", "dsplit", "unbind",
    "roll", "flip", "fliplr", "flipud", "rot90", "gather", "take", "take_along_dim", "masked_select",
    "diagonal", "unfold", "requires_grad", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
    "native_channel_shuffle", "amax", "amin",
)  # fmt: skip
_CASTS = (
    "float", "half", "double", "bfloat16", "int", "long", "short", "bool", "to", "type", "type_as", "cpu",
    "cuda",
)  # fmt: skip
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout")
VALUE_INDEX_OPS = ("max", "min")  # with `dim` these yield (values, indices)
_RULES: dict[str, Rule] = {
    op: rule
    for ops, rule in (
        (_ELEMENT_MOVES, _keep_value),
        (_CASTS, _cast),
        (_DROPOUTS, _dropout),
        (("clamp", "clip"), _clamp),
        (("max", "min", "maximum", "minimum"), _first_of_pair),
        (("stack", "cat", "concat", "concatenate", "hstack", "vstack", "dstack"), _join),
        (("zeros", "zeros_like", "new_zeros", "zero"), lambda call: v.ZERO),
        (("max_pool1d", "max_pool2d", "max_pool3d"), _max_pool),
        (("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"), _adaptive_max_pool),
        (("add", "radd"), partial(_sum, sign=1)),
        (("sub", "subtract"), partial(_sum, sign=-1)),
        (("rsub",), _reverse_sub),
        (("mul", "multiply", "rmul"), _mul),
        (("div", "divide", "truediv", "true_divide"), _div),
        (("neg", "negative"), lambda call: v.scale_by(call.input, -1.0, call.op)),
        (("relu", "abs"), lambda call: v.clamp_at_zero(call.input, call.op)),
        (("view",), _view),
        (("repeat_interleave",), _repeat_interleave),
        (("interpolate", "upsample"), _interpolate),
        (("pad",), _pad),
        (("setitem",), _assign),
        (("copy",), _copy),
    )
    for op in ops
}
# Operations whose result may share memory with their first argument.
_VIEWS = {
    *(set(_ELEMENT_MOVES) - {"clone", "repeat", "tile", "roll", "gather", "take", "amax", "amin"}),
    *_CASTS,
    *_DROPOUTS,
    *("view", "alpha_dropout"),
    *("as_strided", "view_as_real", "view_as_complex", "ravel", "atleast_1d", "atleast_2d", "atleast_3d"),
    *("broadcast_tensors", "meshgrid", "conj", "resolve_conj", "resolve_neg", "positive", "real", "imag"),
    *("adjoint", "numpy", "values", "rename", "refine_names", "align_to", "set", "slice"),
}
_DESCRIPTIONS = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), "a convolution"),
    **dict.fromkeys(("avg_pool1d", "avg_pool2d", "avg_pool3d"), "average pooling"),
    **{f"adaptive_avg_pool{rank}d": "average pooling" for rank in (1, 2, 3)},
    **dict.fromkeys(("matmul", "bmm", "mm", "einsum", "baddbmm"), "a matrix product"),
    **{f"{kind}_norm": f"{kind} normalisation" for kind in ("batch", "group", "layer", "instance")},
    "linear": "a linear layer",
    "mean": "a mean",
    "sum": "a sum",
}


def get_operation_name(target: Any) -> str | None:
    """Return the table's name of a function or method; None if it is neither torch's nor Python's."""
    if isinstance(target, str):
        name, owner = target, "torch"
    else:
        name = getattr(target, "__name__", "")
        owner = getattr(target, "__module__", None) or ""
        builtin = getattr(target, "__objclass__", None) is not None or owner in ("", "builtins")
        if not (builtin or owner.split(".")[0] in ("torch", "_operator", "operator")):
            return None
    stripped = name.strip("_")
    is_operator = owner in ("_operator", "operator") or name.startswith("__")
    if is_operator and stripped in ("iadd", "isub", "imul", "itruediv"):
        return stripped[1:]
    return stripped


def mutates_first_argument(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of a function or method writes into its first argument."""
    if target in (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem):
        return True
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__"):
        return True
    if name.endswith("_") and not name.endswith("__"):
        return name not in ("requires_grad_", "detach_", "retain_grad_")
    position = _INPLACE_POSITION.get(name, len(args))
    return kwargs.get("inplace") is True or (position < len(args) and args[position] is True)


_INPLACE_POSITION = {
    name: list(inspect.signature(function).parameters).index("inplace")
    for name, function in vars(nn.functional).items()
    if inspect.isfunction(function) and "inplace" in inspect.signature(function).parameters
}
"""Position of the `inplace` flag of torch.nn.functional's functions."""


def may_alias(op: str | None) -> bool:
    """Return whether the result of `op` may share memory with an argument; True for unknown functions."""
    return op is None or op in _VIEWS


def apply_rule(call: OperationCall) -> SpikeValue:
    """Compute what is known about the result of one operation."""
    rule = _RULES.get(call.op)
    if rule is None:
        return v.make_dense(_DESCRIPTIONS.get(call.op, f"`{call.op}`"))
    return rule(call)
