"""Tests of `optimize`, `restore` and `layer_times`."""

from __future__ import annotations

import copy
import importlib.util
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("spikingjelly")
pytest.importorskip("numba")

from spikingjelly.activation_based import functional, layer, neuron

import sparseflow
from sparseflow.core import timing
from sparseflow.errors import InputError, MissingExtraError, ModelError, SampleError
from sparseflow.spiking.accelerated import get_accelerated_forward
from sparseflow.spiking.runtime import sparse_conv
from sparseflow.spiking.runtime.sparse_conv import SparseConv2d
from tests.spiking.graph.test_module_state import differences, state
from tests.spiking.nets import (
    KINDS,
    Opaque,
    Small,
    from_rest,
    images,
    membranes,
    numbers,
    ready,
    same,
    small,
)

X = images(3, 2)
Prefer = Callable[..., Any]


# --- a way back ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_restore_undoes_everything(kind: str, prefer: Prefer) -> None:
    prefer("sparse", "events")
    build, options = KINDS[kind]
    net = build()
    expected, saved, saved_state = from_rest(net, X), state(net), numbers(net)
    functional.reset_net(net)
    saved = state(net)
    assert sparseflow.optimize(net, X, **options) is net
    assert list(net.state_dict()) == list(saved_state) and same(numbers(net), saved_state)
    changed = [name for name, m in net.named_modules() if isinstance(m, SparseConv2d)]
    assert (
        changed == ([] if kind == "plan" else ["conv2"] if kind == "static" else ["conv2", "conv3"])
        or kind == "static"
    )
    assert same(from_rest(net, X), expected) and same(from_rest(net, X), expected)
    functional.reset_net(net)
    assert sparseflow.restore(net) is net
    assert differences(state(net), saved) == []
    assert "forward" not in vars(net) and same(from_rest(net, X), expected)


def test_restore_with_nothing_to_restore_warns(planned: Callable[..., Any]) -> None:
    net = small()
    with pytest.warns(UserWarning, match="not optimized: nothing to restore"):
        assert sparseflow.restore(net) is net
    planned(net, X)
    forward = net.forward
    net.forward = lambda x: x
    with pytest.warns(UserWarning, match="`forward` was replaced"):
        sparseflow.restore(net)
    net.forward = forward
    sparseflow.restore(net)
    assert "forward" not in vars(net)
    with pytest.raises(ModelError, match="Module"):
        sparseflow.restore(None)  # type: ignore[arg-type]


def test_restore_of_a_shallow_copy_restores_the_copy(planned: Callable[..., Any]) -> None:
    net = small()
    planned(net, X)
    duplicate = copy.copy(net)
    sparseflow.restore(duplicate)
    assert "forward" not in vars(duplicate) and "forward" in vars(net)


def test_cache_is_a_file_name(tmp_path: Path, planned: Callable[..., Any]) -> None:
    for path in (str(tmp_path / "a.json"), tmp_path / "b.json"):
        planned(small(), X, cache=path)
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()
    with pytest.raises(InputError, match=r"cache.*=1"):
        sparseflow.optimize(small(), X, cache=1)  # type: ignore[arg-type]


def test_custom_forward_is_restored(planned: Callable[..., Any]) -> None:
    net = small()
    original = net.forward
    net.forward = lambda x: original(x) * 2
    replaced, expected = net.forward, from_rest(net, X)
    runs = planned(net, X)
    assert same(from_rest(net, X), expected)
    sparseflow.restore(net)
    assert net.forward is replaced and same(from_rest(net, X), expected)
    assert runs == [] or runs  # whether such a network is planned is left open; its output is not


def test_restored_modules_have_current_weights(prefer: Prefer) -> None:
    """Weights loaded into replaced modules are kept by `restore`."""
    prefer("events")
    net = small()
    sparseflow.optimize(net, X, policy="static")
    assert isinstance(net.conv2, SparseConv2d)
    negative = {key: -value if "conv" in key else value for key, value in numbers(net).items()}
    net.load_state_dict(negative, assign=True)
    net.train()
    sparseflow.restore(net)
    assert same(numbers(net), negative) and net.conv2.training and type(net.conv2) is layer.Conv2d


def test_optimize_repeatedly(planned: Callable[..., Any]) -> None:
    net = small()
    expected, saved = from_rest(net, X), numbers(net)
    planned(net, X)
    first = get_accelerated_forward(net)
    sparseflow.optimize(net, X)
    assert get_accelerated_forward(net) is not first
    assert same(from_rest(net, X), expected)
    sparseflow.restore(net)
    assert "forward" not in vars(net)
    sparseflow.optimize(net, X)
    assert same(from_rest(net, X), expected) and same(numbers(net), saved)
    sparseflow.restore(net)
    assert "forward" not in vars(net) and same(from_rest(net, X), expected)


def test_state_dict_round_trip(planned: Callable[..., Any]) -> None:
    net = small()
    expected = from_rest(net, X)
    planned(net, X)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    other = ready(Small(), seed=5)
    assert not same(from_rest(other, X), expected)
    other.load_state_dict(torch.load(file, weights_only=True))
    functional.reset_net(other)
    # Leaks and epsilons are no part of a state_dict.
    for name, module in other.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = net.get_submodule(name).eps
    assert same(from_rest(other, X), expected)


# --- bad input ----------------------------------------------------------------------------------------------


def spoiled(name: str, value: float, dtype: torch.dtype | None = None) -> Callable[[], Any]:
    def build() -> Any:
        net = small()
        tensor = dict([*net.named_parameters(), *net.named_buffers()])[name]
        with torch.no_grad():
            tensor.view(-1)[-1] = value
        return net if dtype is None else net.to(dtype)

    return build


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyConv2d(3, 3), neuron.IFNode()).eval()


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "None": (lambda: None, "must be a torch.nn.Module, not NoneType"),
    "a class": (lambda: Small, "must be a torch.nn.Module, not type"),
    "a function": (lambda: torch.relu, "must be a torch.nn.Module"),
    "training": (lambda: small().train(), r"training mode; call model\.eval\(\)"),
    "no neuron": (lambda: nn.Sequential(nn.Conv2d(3, 3, 3)).eval(), "register_neuron"),
    "NaN": (spoiled("conv2.weight", float("nan")), r"`conv2\.weight`"),
    "Inf": (spoiled("fc.bias", float("inf")), r"`fc\.bias`"),
    "-Inf in half": (spoiled("bn1.weight", float("-inf"), torch.float16), r"`bn1\.weight`"),
    "NaN in a buffer": (spoiled("bn2.running_var", float("nan")), r"`bn2\.running_var`"),
    "meta": (lambda: small().to("meta"), r"`conv1\.weight` is on the meta device"),
    "lazy": (lazy, r"`0\.weight` has no shape yet"),
}


@pytest.mark.parametrize("sample", [None, X], ids=["without a sample", "with one"])
@pytest.mark.parametrize("model", MODELS)
def test_bad_models_are_named_and_left_alone(model: str, sample: torch.Tensor | None) -> None:
    build, words = MODELS[model]
    net = build()
    saved = state(net) if isinstance(net, nn.Module) and model not in ("meta", "lazy") else {}
    rng = torch.random.get_rng_state()
    with pytest.raises(ModelError, match=words):
        sparseflow.optimize(net, sample)
    if saved:
        assert differences(state(net), saved) == []
    assert not isinstance(net, nn.Module) or "forward" not in vars(net)
    assert torch.equal(torch.random.get_rng_state(), rng)


SAMPLES: dict[str, tuple[Any, str]] = {
    "rank": (images(2), r"shape \(2, 3, 8, 8\)"),
    "channels": (images(3, 2, channels=4), r"shape \(3, 2, 4, 8, 8\)"),
    "too small": (torch.zeros(3), r"shape \(3,\)"),
    "dtype": (X.double(), r"shape \(3, 2, 3, 8, 8\), torch\.float64"),
    "integers": (X.long(), r"torch\.int64"),
    "device": (X.to("meta"), "the sample is on meta, the model on cpu"),
    "a list of numbers": ([1.0, 2.0], "must be a tensor or a tuple of tensors, not float"),
    "numpy": (X.numpy(), "not ndarray"),
    "a mapping": ({"x": X}, "not dict"),
    "a word": ("x", "not str"),
    "two inputs": ((X, X), r"shape \(3, 2, 3, 8, 8\), \(3, 2, 3, 8, 8\)"),
    "none": ((), "sample"),
}


@pytest.mark.parametrize(
    ("before", "policy"),
    [("fresh", "measured"), ("fresh", "static"), ("optimised", "measured"), ("replaced", "static")],
)
@pytest.mark.parametrize("sample", SAMPLES)
def test_bad_samples_are_named_and_the_model_is_left_alone(
    sample: str, before: str, policy: Any, prefer: Prefer
) -> None:
    prefer("sparse", "events")
    value, words = SAMPLES[sample]
    net = small()
    from_rest(net, X)
    if before != "fresh":
        sparseflow.optimize(net, X, policy="measured" if before == "optimised" else "static")
    saved, rng = state(net), torch.random.get_rng_state()
    expected = from_rest(copy.deepcopy(net), X)
    with pytest.raises(SampleError, match=words):
        sparseflow.optimize(net, value, policy=policy)
    assert differences(state(net), saved) == []
    assert torch.equal(torch.random.get_rng_state(), rng)
    assert same(from_rest(net, X), expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": "fast"}, r"`policy` \(='fast'\) must be 'measured' or 'static'"),
        ({"dtype": torch.int8}, r"`dtype` \(=torch\.int8\)"),
        ({"dtype": "fp16"}, r"`dtype` \(='fp16'\)"),
        ({"policy": "static"}, "needs a `sample`"),
    ],
)
def test_bad_options_are_named_and_the_model_is_left_alone(options: dict[str, Any], words: str) -> None:
    net = small()
    saved = state(net)
    with pytest.raises(InputError, match=words):
        sparseflow.optimize(net, **options)
    assert differences(state(net), saved) == []


def test_optimize_failed_measurement_restores_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(timing, "compare", stop)
    for build in (small, lambda: ready(Opaque())):
        net = build()
        from_rest(net, X)
        saved = state(net)
        with pytest.raises(KeyboardInterrupt):
            sparseflow.optimize(net, X)
        assert differences(state(net), saved) == []


def test_optimize_changes_only_the_forward(planned: Callable[..., Any]) -> None:
    net = small()
    from_rest(net, X)
    saved, rng = state(net), torch.random.get_rng_state()
    planned(net, X)
    assert differences(state(net), saved) == [("", "forward", "")]
    assert torch.equal(torch.random.get_rng_state(), rng)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


@pytest.mark.parametrize("sample", [None, X], ids=["without a sample", "with one"])
def test_missing_numba_names_the_extra(sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "numba" else find(name, *a)
    )
    net = small()
    saved = state(net)
    with pytest.raises(MissingExtraError, match=r"`numba` .*sparseflow\[spiking\]"):
        sparseflow.optimize(net, sample)
    assert differences(state(net), saved) == []


def test_optimize_half_precision_on_cpu_keeps_the_network(prefer: Prefer) -> None:
    prefer("sparse")
    net = small()
    expected = from_rest(net, X)
    sparseflow.optimize(net, X, dtype=torch.float16)
    reason = "no backend for torch.float32 with dtype=torch.float16 on cpu"
    assert sparseflow.explain(net).summary == f"unchanged: {reason}"
    assert same(from_rest(net, X), expected)
    half = small().to(torch.bfloat16)
    sparseflow.optimize(half, X.to(torch.bfloat16))
    assert "no backend for torch.bfloat16 on cpu" in sparseflow.explain(half).summary


# --- the static policy --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "block"), [(40, 16), (32, 16), (16, 8), (8, 4), (7, None)])
def test_static_policy_selects_by_height(size: int, block: int | None) -> None:
    net, x = small(), images(1, 1, size=size)
    expected = from_rest(net, x)
    sparseflow.optimize(net, x, policy="static")
    for name in ("conv2", "conv3"):
        conv = net.get_submodule(name)
        assert isinstance(conv, SparseConv2d) == (block is not None)
        assert block is None or (conv.block_size, conv.backend) == (block, "events")
    assert not isinstance(net.conv1, SparseConv2d)
    assert same(from_rest(net, x), expected)
    rows = {row.name: row for row in sparseflow.explain(net).layers}
    assert rows["conv2"].reason == (
        f"{size} rows: blocks of {block}" if block else f"{size} rows: blocks do not pay off below 8"
    )
    assert rows["conv1"].reason == "fed by the network's input"


def test_static_policy_keeps_unsupported_modules() -> None:
    class Odd(Small):
        def __init__(self) -> None:
            super().__init__()
            self.conv3 = layer.Conv2d(6, 8, 1, padding=1)
            functional.set_step_mode(self, "m")

        def features(self, x: torch.Tensor) -> torch.Tensor:
            s = self.sn1(self.bn1(self.conv1(x)))
            s = self.sn2(self.bn2(self.conv2(self.bn2(self.conv2(s)) * 0 + s)))
            return self.sn3(self.conv3(s))

    net = ready(Odd())
    expected = from_rest(net, X)
    sparseflow.optimize(net, X, policy="static")
    assert not any(isinstance(m, SparseConv2d) for m in net.modules())
    rows = {row.name: row for row in sparseflow.explain(net).layers}
    assert "`padding` (=(1, 1))" in rows["conv3"].reason and "called 2 times" in rows["conv2"].reason
    assert same(from_rest(net, X), expected)


def test_static_policy_without_numba_stays_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_conv, "find_spec", lambda name: None)
    net = small()
    expected = from_rest(net, X)
    sparseflow.optimize(net, X, policy="static")
    assert "extra `spiking`" in sparseflow.explain(net).layers[1].reason
    assert same(from_rest(net, X), expected)


# --- layer_times --------------------------------------------------------------------------------------------


def test_layer_times(planned: Callable[..., Any]) -> None:
    net = small()
    from_rest(net, X)
    before = membranes(net)
    planned(net, X)
    times = sparseflow.layer_times(net, X)
    assert list(times) == ["conv1", "conv2", "conv3"] and all(ms > 0 for ms in times.values())
    assert same(membranes(net), before)
    assert list(sparseflow.layer_times(net, images(3, 4))) == list(times), "measured when first asked about"
    with pytest.raises(ModelError, match="optimize"):
        sparseflow.layer_times(small(), X)
    with pytest.raises(ModelError, match="optimize"):
        sparseflow.layer_times(np.zeros(3), X)  # type: ignore[arg-type]


def test_layer_times_of_a_network_left_as_it_was(prefer: Prefer) -> None:
    prefer("sparse", plan=9.0)
    net = small()
    sparseflow.optimize(net, X)
    assert sparseflow.layer_times(net, X) == {}
