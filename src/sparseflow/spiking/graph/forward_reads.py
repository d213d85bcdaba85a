"""`ForwardReads`: the Python values that a traced forward depends on, and whether they still hold.

Tracing turns every value that is no tensor of the graph into a constant: attributes of modules, globals,
closure variables, and tensors that are not parameters. `AccessRecorder` records them during the trace, and
writes too, which a graph would not repeat. torch.compile guards the same values.
"""

from __future__ import annotations

import collections
import dis
import enum
import functools
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from operator import contains, is_, itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sparseflow.spiking.graph.neurons.builtin import LIBRARIES, get_state_names

MAX_VALUES = 4000
"""Values that are watched; a check of this many takes about 0.3 ms."""

MAX_ARRAY_BYTES = 65536
"""Size of the largest NumPy array that is compared before each call."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, range, slice)
_PLAIN += (torch.dtype, torch.device, torch.layout, torch.memory_format)
_OPAQUE_TYPES = (types.ModuleType, type, nn.Module, types.BuiltinFunctionType)
# Libraries whose own state no network depends on.
_LIBRARIES = {"torch", "numpy", "sparseflow", *LIBRARIES, *sys.stdlib_module_names} - {
    "argparse", "builtins", "collections", "types", "__main__",
}  # fmt: skip
_FX_CONSTANT = "_tensor_constant"  # where fx stores tensors on the root while it traces
_INTERNAL_NAMES = frozenset(dir(nn.Module())) - {"forward", "training"}


class MISSING:
    """In place of a value that does not exist."""


class EntryTable:
    """Entries of dictionaries, and a fast check that none changed, most of which runs in C.

    Args:
        entries: The dictionary, the key and the value of each entry; `MISSING` for an entry that is missing.
        by_identity: Whether a value must be the same object; otherwise an equal one is unchanged.
    """

    def __init__(self, entries: Iterable[tuple[dict[str, Any], str, Any]], *, by_identity: bool) -> None:
        present: dict[int, tuple[dict[str, Any], list[str], list[Any]]] = {}
        absent: list[tuple[dict[str, Any], str]] = []
        for holder, key, value in entries:
            if value is MISSING:
                absent.append((holder, key))
                continue
            _, keys, values = present.setdefault(id(holder), (holder, [], []))
            keys.append(key)
            values.append(value)
        self._holders = [holder for holder, _, _ in present.values()]
        # A getter of one key returns no tuple, so each gets its first key twice.
        self._getters = [itemgetter(*keys, keys[0]) for _, keys, _ in present.values()]
        self._values = [(*values, values[0]) for _, _, values in present.values()]
        self._members = [*chain.from_iterable(self._values)]
        self._by_identity = by_identity
        self._absent_holders = [holder for holder, _ in absent]
        self._absent_keys = [key for _, key in absent]

    def is_unchanged(self) -> bool:
        """Return whether no entry was replaced, added or deleted."""
        try:
            values = [get(holder) for get, holder in zip(self._getters, self._holders, strict=True)]
            if self._by_identity:
                if not all(map(is_, chain.from_iterable(values), self._members)):
                    return False
            elif values != self._values:
                return False
        except Exception:  # a deleted entry, or a value that cannot be compared
            return False
        return not any(map(contains, self._absent_holders, self._absent_keys))


class ForwardReads:
    """Values that a traced forward read, with their contents at the time of the trace.

    Attributes:
        side_effect: What the forward does that a graph would not repeat (a clause), or None.
        stateful: The modules whose state the forward reads or whose attributes it writes.
        opaque: Names of modules with state of their own, which run as they are.
    """

    def __init__(self) -> None:
        self.side_effect: str | None = None
        self.stateful: frozenset[nn.Module] = frozenset()
        self.opaque: frozenset[str] = frozenset()
        # Entries of dictionaries are most of all values; columns make their check fast.
        self._table: EntryTable | None = None
        self._holders: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._values: list[Any] = []
        self._snapshots: list[tuple[Callable[[], tuple[Any, ...]], tuple[Any, ...]]] = []
        self._names: list[str] = []
        self._snapshot_names: list[str] = []
        self._watched: dict[int, Any] = {}
        self._entries: set[tuple[int, str]] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardReads:
        return self  # a copy of the graph depends on the same values

    def is_unchanged(self) -> bool:
        """Return whether everything has the value that it had during the trace."""
        if self._table is None:
            self._table = EntryTable(
                zip(self._holders, self._keys, self._values, strict=True), by_identity=True
            )
        if self._table.is_unchanged() and all(_are_equal(take(), items) for take, items in self._snapshots):
            return True
        return self.find_change() is None

    def find_change(self) -> str | None:
        """Return the name of a value that changed, or None."""
        for index, (holder, key, old) in enumerate(zip(self._holders, self._keys, self._values, strict=True)):
            current = holder.get(key, MISSING)
            if not _is_equal(current, old):
                return self._names[index]
            self._values[index] = current
        self._table = None
        for index, (take, items) in enumerate(self._snapshots):
            current = take()
            if not _are_equal(current, items):
                return self._snapshot_names[index]
            self._snapshots[index] = take, current
        return None

    def watch_entry(self, holder: dict[str, Any], key: str, name: str) -> None:
        """Watch one entry of a dictionary and its contents."""
        if (id(holder), key) in self._entries:
            return
        self._entries.add((id(holder), key))
        self._check_number(name)
        self._table = None
        self._holders.append(holder)
        self._keys.append(key)
        self._values.append(holder.get(key, MISSING))
        self._names.append(name)
        self.watch_value(self._values[-1], name)

    def watch_class_attribute(self, cls: type, key: str, name: str) -> None:
        """Watch an attribute of a class, which may be inherited."""
        for parent in cls.__mro__:
            if _is_library(parent.__module__):
                return
            if (id(parent), key) not in self._entries:
                self._entries.add((id(parent), key))
                self._watch_items(lambda parent=parent: (vars(parent).get(key),), name)
                self.watch_value(vars(parent).get(key), name)
            if key in vars(parent):
                return

    def _watch_items(self, take: Callable[[], tuple[Any, ...]], name: str) -> None:
        self._check_number(name)
        self._snapshots.append((take, take()))
        self._snapshot_names.append(name)

    def _check_number(self, name: str) -> None:
        if len(self._values) + len(self._snapshots) >= MAX_VALUES:
            self.side_effect = self.side_effect or f"reads {name}, which holds too many values to watch"

    def watch_value(self, value: Any, name: str) -> None:
        """Watch the contents of a value that can be changed in place."""
        if (
            isinstance(value, (*_PLAIN, *_OPAQUE_TYPES))
            or id(value) in self._watched
            or self.side_effect is not None
        ):
            return
        self._watched[id(value)] = value
        if isinstance(value, torch.Tensor):
            if not value.is_inference() and value.layout == torch.strided:
                self._watch_items(lambda: (value._version, value.data_ptr()), name)
        elif isinstance(value, np.ndarray):
            if value.nbytes > MAX_ARRAY_BYTES:
                self.side_effect = f"reads {name}, an array of {value.nbytes} bytes"
            self._watch_items(lambda: (value.shape, value.dtype.str, value.tobytes()), name)
        elif isinstance(value, Mapping):
            self._watch_items(lambda: (*value.keys(), *value.values()), name)
            for item in list(value.values()):
                self.watch_value(item, name)
        elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            if not isinstance(value, tuple):
                self._watch_items(lambda: tuple(value), name)
            for item in list(value):
                self.watch_value(item, name)
        elif isinstance(value, types.FunctionType):
            self._watch_function(value)
        elif isinstance(value, property):
            self.watch_value(value.fget, name)
        elif isinstance(value, (types.MethodType, classmethod, staticmethod)):
            self.watch_value(value.__func__, name)
            self.watch_value(getattr(value, "__self__", None), name)
        elif isinstance(value, functools.partial):
            for item in (value.func, *value.args, *value.keywords.values()):
                self.watch_value(item, name)
        elif not _is_library(type(value).__module__):
            self._watch_object(value, name)

    def _watch_object(self, value: Any, name: str) -> None:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self.watch_value(attributes, name)
        for cls in type(value).__mro__:
            if _is_library(cls.__module__) or cls is object:
                continue
            slots = vars(cls).get("__slots__", ())
            slots = (slots,) if isinstance(slots, str) else tuple(slots)
            plain = tuple(
                key for key, item in vars(cls).items() if isinstance(item, _PLAIN) and key[:2] != "__"
            )
            if slots:
                self._watch_items(lambda slots=slots: tuple(getattr(value, s, None) for s in slots), name)
                for slot in slots:
                    self.watch_value(getattr(value, slot, None), name)
            if plain:
                self._watch_items(lambda cls=cls, plain=plain: tuple(vars(cls).get(k) for k in plain), name)

    def _watch_function(self, function: types.FunctionType) -> None:
        """Watch what a function of a user reads: its globals, closure variables and mutable defaults."""
        if _is_library(function.__module__):
            return
        for names in _list_global_reads(function.__code__):
            self._watch_global(function.__globals__, names)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                self._watch_items(lambda cell=cell: _read_cell(cell), f"`{name}`")
                self.watch_value(_read_cell(cell), f"`{name}`")
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.watch_value(default, f"a default of `{function.__qualname__}`")

    def _watch_global(self, holder: dict[str, Any], chain: tuple[str, ...]) -> None:
        """Watch `a`, or `a.b.c` as far as `a` and `a.b` are modules or classes."""
        name = f"`{'.'.join(chain)}`"
        for position, key in enumerate(chain):
            if key not in holder:
                return
            value = holder[key]
            if _is_library(getattr(value, "__module__", None) or getattr(value, "__name__", "")):
                return
            self.watch_entry(holder, key, name)
            if isinstance(value, type) and position + 1 < len(chain):
                self.watch_class_attribute(value, chain[position + 1], name)
                return
            if not isinstance(value, types.ModuleType):
                return
            holder = vars(value)


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def _are_equal(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    return len(first) == len(second) and (all(map(is_, first, second)) or all(map(_is_equal, first, second)))


def _is_equal(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, tuple):
        return _are_equal(first, second)
    return isinstance(first, _PLAIN) and bool(first == second)


def _read_cell(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not assigned yet
        return ()


@functools.lru_cache(maxsize=1024)
def _list_global_reads(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """List the globals that `code` and its inner functions read, each with the attributes read of it."""
    chains: dict[tuple[str, ...], None] = {}
    chain: list[str] = []
    for instruction in dis.get_instructions(code):
        if chain and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain.append(instruction.argval)
            continue
        if chain:
            chains[tuple(chain)] = None
        chain = [instruction.argval] if instruction.opname == "LOAD_GLOBAL" else []
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            chains.update(dict.fromkeys(_list_global_reads(constant)))
    return tuple(chains)


_LIBRARY_PATHS = str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<"
"""Code of torch and SparseFlow, and code that fx generates."""


def format_statement(frames: Iterable[traceback.FrameSummary]) -> str:
    """Format the innermost of `frames` in a network's code: ` at FILE:LINE, STATEMENT`; empty without one."""
    own_frames = [frame for frame in frames if not frame.filename.startswith(_LIBRARY_PATHS)]
    if not own_frames:
        return ""
    statement = f", `{own_frames[-1].line}`" if own_frames[-1].line else ""
    return f" at {own_frames[-1].filename}:{own_frames[-1].lineno}{statement}"


class AccessRecorder:
    """Records what the code of a network's forward reads from modules and writes to them.

    Args:
        model: The network.
        is_recording: Whether the current access belongs to the traced code.
    """

    def __init__(self, model: nn.Module, is_recording: Callable[[], bool]) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._model, self._is_recording = model, is_recording
        self._reads: dict[tuple[nn.Module, str], None] = {(model, "forward"): None}
        self._side_effect: str | None = None
        self._stateful: set[nn.Module] = set()
        self.reads = ForwardReads()

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record while the body runs; afterwards `reads` is complete."""
        get_attribute = vars(nn.Module).get("__getattribute__")
        set_attribute, delete_attribute = nn.Module.__setattr__, nn.Module.__delattr__

        def read(module: nn.Module, name: str) -> Any:
            if name == "__dict__":
                caller = sys._getframe(1).f_globals.get("__name__")
                if not _is_library(caller) and self._is_recording():
                    self._reads[module, name] = None
            elif name not in _INTERNAL_NAMES and self._is_recording() and not name.startswith(_FX_CONSTANT):
                self._record_read(module, name)
            return object.__getattribute__(module, name)

        def write(module: nn.Module, name: str, value: Any) -> None:
            if self._is_recording() and not name.startswith(_FX_CONSTANT):
                self._record_write(module, name, value)
            set_attribute(module, name, value)

        def delete(module: nn.Module, name: str) -> None:
            if self._is_recording():
                self._record_write(module, name, None)
            delete_attribute(module, name)

        nn.Module.__getattribute__ = read  # type: ignore[method-assign]
        nn.Module.__setattr__, nn.Module.__delattr__ = write, delete  # type: ignore[method-assign]
        try:
            yield
        finally:
            if get_attribute is None:
                del nn.Module.__getattribute__
            else:
                nn.Module.__getattribute__ = get_attribute
            nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign]
            nn.Module.__delattr__ = delete_attribute  # type: ignore[method-assign]

    def _record_read(self, module: nn.Module, name: str) -> None:
        self._reads[module, name] = None
        memories = vars(module).get("_memories")
        if (isinstance(memories, dict) and name in memories) or name in get_state_names(module):
            self._side_effect = f"reads the state {self._format(module, name)}"
            self._stateful.add(module)

    def _record_write(self, module: nn.Module, name: str, value: Any) -> None:
        attributes = vars(module)
        is_equal = isinstance(value, _PLAIN) and name in attributes and _is_equal(attributes[name], value)
        if is_equal:
            return
        self._stateful.add(module)
        if self._side_effect is None:
            statement = format_statement(traceback.extract_stack())
            self._side_effect = f"writes {self._format(module, name)}{statement}"

    def _format(self, module: nn.Module, name: str) -> str:
        prefix = self._names.get(module, type(module).__name__)
        return f"`{prefix}.{name}`" if prefix else f"`{name}`"

    def watch_reads(self) -> ForwardReads:
        """Watch all recorded values; the model is in the state in which the trace began."""
        self.reads.side_effect = self._side_effect
        self.reads.stateful = frozenset(self._stateful)
        for module, name in self._reads:
            self._watch_read(module, name)
        return self.reads

    def _watch_read(self, module: nn.Module, name: str) -> None:
        label, attributes = self._format(module, name), vars(module)
        if name == "__dict__":
            self.reads.watch_value(attributes, label)
            return
        if name != "forward":  # the plan checks replaced forwards
            self.reads.watch_entry(attributes, name, label)
        registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module._modules)
        registry = next((registry for registry in registries if name in registry), None)
        if registry is not None:
            # Parameters and modules of the network are inputs of the graph.
            if registry is module._buffers or module not in self._names:
                self.reads.watch_entry(registry, name, label)
        elif name not in attributes or name == "forward":  # an optimized network has its own forward
            self.reads.watch_class_attribute(type(module), name, label)
