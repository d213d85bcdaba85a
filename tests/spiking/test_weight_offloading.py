"""`optimize(offload_weights=True)`: parameters leave the device's memory and stay usable."""

from __future__ import annotations

import copy
import io
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

pytest.importorskip("spikingjelly")
pytest.importorskip("numba")

from spikingjelly.activation_based import functional, layer, neuron
from spikingjelly.activation_based.model import parametric_lif_net

import sparseflow
from sparseflow.errors import InputError
from sparseflow.spiking import accelerated, load_plan, save_plan
from sparseflow.spiking.accelerated import get_accelerated_forward
from sparseflow.spiking.profile.memory import measure_memory_mb
from sparseflow.spiking.runtime import weight_offloading
from sparseflow.spiking.runtime.compiled_network import CompiledNetwork
from tests.spiking.conftest import FakeTimes
from tests.spiking.nets import Small, from_rest, images, numbers, ready, same, small
from tests.spiking.test_accelerated_changes import CHANGES, gradients

X = images(3, 2)
GROUPED = ("conv1.weight", "conv2.weight", "conv3.weight")
"""Parameters of `Small` of which a plan has copies; `fc` runs outside of groups."""


@pytest.fixture(autouse=True)
def _offload_small_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_offloading, "MIN_OFFLOADED_BYTES", 128)


@pytest.fixture
def offloaded(prefer: Callable[..., FakeTimes]) -> Callable[..., Any]:
    """Returns a network whose weights are offloaded."""

    def make(net: Any = None, x: torch.Tensor = X, **options: Any) -> Any:
        prefer("sparse", "dense")
        net = sparseflow.optimize(small() if net is None else net, x, offload_weights=True, **options)
        assert list_offloaded(net)
        return net

    return make


def list_offloaded(net: nn.Module) -> list[str]:
    """List the names of the offloaded parameters."""
    offloaded = get_accelerated_forward(net)._offloaded
    addresses = set() if offloaded is None else {address for _, address in offloaded._addresses}
    return [name for name, parameter in net.named_parameters() if parameter.data_ptr() in addresses]


def test_parameters_keep_everything_but_their_memory(prefer: Callable[..., FakeTimes]) -> None:
    net = small()
    net.conv2.weight.data = net.conv2.weight.data.contiguous(memory_format=torch.channels_last)
    net.conv3.weight.requires_grad_(False)
    before, values, expected = dict(net.named_parameters()), numbers(net), from_rest(net, X)
    properties = {n: (p._version, p.stride(), p.requires_grad, p.dtype, p.device) for n, p in before.items()}
    memory = {name: StorageWeakRef(parameter.untyped_storage()) for name, parameter in before.items()}
    prefer("sparse", "dense")
    sparseflow.optimize(net, X, offload_weights=True)
    assert list_offloaded(net) == list(GROUPED)
    assert [name for name in before if memory[name].expired()] == list(GROUPED)
    forward = get_accelerated_forward(net)
    assert forward.offloaded_bytes == sum(before[name].nbytes for name in GROUPED)
    assert same(from_rest(net, X), expected) and same(numbers(net), values)
    sparseflow.restore(net)
    assert forward.offloaded_bytes == 0 and same(numbers(net), values) and same(from_rest(net, X), expected)
    for name, parameter in net.named_parameters():
        assert parameter is before[name]
        assert properties[name] == (
            parameter._version, parameter.stride(), parameter.requires_grad, parameter.dtype, parameter.device
        )  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_detected_and_offloaded_again(change: str, offloaded: Callable[..., Any]) -> None:
    net = offloaded()
    before = from_rest(net, X)
    CHANGES[change](net)
    duplicate = copy.deepcopy(net)
    actual, second = from_rest(net, X), from_rest(net, X)
    expected = from_rest(sparseflow.restore(duplicate), X)
    torch.testing.assert_close(actual, expected)
    assert same(second, actual) or change == "a BatchNorm to training"
    assert change == "sequences recorded" or not same(actual, before)
    assert list_offloaded(net) or change == "a BatchNorm to training", "which its own code reads"


def test_offloading_is_no_change(offloaded: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    net = offloaded()
    prepared: list[int] = []
    forward = get_accelerated_forward(net)
    invalidate = accelerated.Plan.invalidate
    monkeypatch.setattr(accelerated.Plan, "invalidate", lambda self: prepared.append(1) or invalidate(self))
    for _ in range(3):
        from_rest(net, X)
    assert not prepared
    net.load_state_dict({name: -value if "conv" in name else value for name, value in numbers(net).items()})
    for _ in range(3):
        from_rest(net, X)
    assert len(prepared) == 1 and forward.offloaded_bytes


def test_training_and_gradients(offloaded: Callable[..., Any]) -> None:
    net, plain = offloaded(), small()
    for module in (net, plain):
        module.train()
        for part in module.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.eps = 1e-5
    optimizers = [torch.optim.SGD(module.parameters(), 0.1, momentum=0.9) for module in (net, plain)]
    for _ in range(2):
        assert same(gradients(net, X), gradients(plain, X))
        for optimizer in optimizers:
            optimizer.step()
    assert same(numbers(net), numbers(plain)) and list_offloaded(net)
    actual = from_rest(net.eval(), X)
    torch.testing.assert_close(actual, from_rest(plain.eval(), X), rtol=1e-4, atol=1e-4)
    assert list_offloaded(net)


def test_backward_after_weights_are_offloaded_again(offloaded: Callable[..., Any]) -> None:
    net, plain = offloaded(), small()
    for module in (net, plain):
        functional.reset_net(module)
        with torch.no_grad():
            module.conv2.weight.neg_()
        with warnings.catch_warnings(action="ignore"):
            loss = module(X).square().sum()
        from_rest(module, X)
        loss.backward()
    assert list_offloaded(net)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(net.parameters(), plain.parameters(), strict=True))


def test_hooks_and_modules_called_alone(offloaded: Callable[..., Any]) -> None:
    net, plain = offloaded(), small()
    expected = from_rest(plain, X)
    sums: list[torch.Tensor] = []
    handle = net.conv2.register_forward_hook(lambda module, args, output: sums.append(module.weight.sum()))
    assert same(from_rest(net, X), expected) and len(sums) == 1
    handle.remove()
    assert same(net.conv1(X), plain.conv1(X)) and list_offloaded(net)


def test_copies_and_files(offloaded: Callable[..., Any]) -> None:
    net = offloaded()
    expected, values = from_rest(net, X), numbers(net)
    duplicate = copy.deepcopy(net)
    assert same(from_rest(duplicate, X), expected) and list_offloaded(duplicate) == list(GROUPED)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    assert len(file.getvalue()) < 40_000
    file.seek(0)
    assert same(torch.load(file, weights_only=True), values)
    loaded = pickle.loads(pickle.dumps(net))
    assert same(from_rest(loaded, X), expected) and list_offloaded(loaded) == list(GROUPED)
    net.share_memory()
    assert same(from_rest(net, X), expected) and same(numbers(net), values)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_forked_process_writes_to_its_own_weights(offloaded: Callable[..., Any]) -> None:
    net = offloaded()
    values = numbers(net)
    with warnings.catch_warnings(action="ignore"):  # of Python 3.12, about threads
        child = os.fork()
    if child == 0:
        try:
            net.conv2.weight.data.zero_()
        finally:
            os._exit(0 if not net.conv2.weight.any() else 1)
    assert os.waitpid(child, 0)[1] == 0 and same(numbers(net), values)


def test_another_dtype(offloaded: Callable[..., Any]) -> None:
    net, plain = offloaded(), small()
    expected = from_rest(plain, X)
    assert same(from_rest(net.double(), X.double()), expected.double())
    assert same(from_rest(net.float(), X), expected)


def test_shapes_share_what_is_offloaded(
    offloaded: Callable[..., Any], prefer: Callable[..., FakeTimes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """New shapes are measured with the weights in memory; one that runs the network's own code keeps them."""
    net, plain = offloaded(), small()
    num_offloaded: list[int] = []
    times = prefer("sparse", "dense")

    def compare(*args: Any, **options: Any) -> Any:
        num_offloaded.append(len(list_offloaded(net)))
        return times(*args, **options)

    monkeypatch.setattr(accelerated.timing, "compare", compare)
    for x in (images(3, 1), images(2, 2, size=12)):
        assert same(from_rest(net, x), from_rest(plain, x)) and list_offloaded(net) == list(GROUPED)
    prefer("module", plan=9.0)
    x = images(3, 3)
    assert same(from_rest(net, x), from_rest(plain, x)) and not list_offloaded(net)
    assert same(from_rest(net, X), from_rest(plain, X))
    assert num_offloaded and not any(num_offloaded)


def test_group_that_runs_as_modules_keeps_its_weights(prefer: Callable[..., FakeTimes]) -> None:
    prefer("module")
    net = sparseflow.optimize(small(), X, offload_weights=True)
    assert list_offloaded(net) == []


def test_compiled_network_keeps_the_layers_that_it_shares(
    prefer: Callable[..., FakeTimes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    monkeypatch.setattr(accelerated, "MIN_COMPILED_LATENCY", 0.0)
    prefer("dense", compiled=0.5)
    net = small()
    expected = from_rest(net, X)
    sparseflow.optimize(net, X, compile=True, offload_weights=True)
    (tuned,) = get_accelerated_forward(net)._list_tuned()
    assert isinstance(tuned.fast_path, CompiledNetwork)
    names = list_offloaded(net)
    shared = tuned.fast_path.list_used_parameters()
    assert set(GROUPED) <= set(names) and not any(net.get_parameter(name) in shared for name in names)
    for sign in (1, -1):
        net.load_state_dict(
            {name: sign * v if "fc" in name else v for name, v in small().state_dict().items()}
        )
        actual = from_rest(net, X)
        torch.testing.assert_close(actual, sign * expected, rtol=1e-4, atol=1e-4)
        assert list_offloaded(net) == names


class Tied(Small):
    """Two convolutions read one memory, and a third reads a part of another parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv3 = layer.Conv2d(6, 8, 1, bias=False, stride=2, step_mode="m")
        self.conv1_copy = layer.Conv2d(3, 6, 3, padding=1, bias=False, step_mode="m")
        self.flat = nn.Parameter(torch.zeros(100))
        self.conv1_copy.weight.data = self.conv1.weight.data
        self.conv3.weight.data = self.flat.data[-48:].view(8, 6, 1, 1)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        s = self.sn1(self.bn1(self.conv1(x) + self.conv1_copy(x)))
        return self.sn3(self.conv3(self.sn2(self.bn2(self.conv2(s)))))


def test_memory_that_parameters_share_stays(prefer: Callable[..., FakeTimes]) -> None:
    prefer("sparse", "dense")
    net = ready(Tied())
    sparseflow.optimize(net, X, offload_weights=True)
    assert list_offloaded(net) == ["conv2.weight"]
    before = from_rest(net, X)
    with torch.no_grad():
        net.flat.fill_(0.5)
        net.conv1.weight.mul_(2)
    actual = from_rest(net, X)
    assert not same(actual, before) and same(actual, from_rest(sparseflow.restore(net), X))
    assert torch.equal(net.conv1_copy.weight, net.conv1.weight) and bool((net.conv3.weight == 0.5).all())


def test_full_disk(offloaded: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    net = offloaded()
    expected = from_rest(net, X)

    def fail(**_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weight_offloading.tempfile, "TemporaryFile", fail)
    with torch.no_grad():
        net.conv1.weight.mul_(1)
    with pytest.warns(UserWarning, match=r"not offloaded: .*No space left"):
        assert same(from_rest(net, X), expected)
    assert not list_offloaded(net) and same(from_rest(net, X), expected)


def test_file_is_in_tmpdir(
    offloaded: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directories: list[Any] = []
    create = weight_offloading.tempfile.TemporaryFile
    monkeypatch.setattr(
        weight_offloading.tempfile,
        "TemporaryFile",
        lambda dir: directories.append(dir) or create(dir=tmp_path),
    )
    for directory in (None, tmp_path):
        monkeypatch.delenv("TMPDIR", raising=False)
        if directory is not None:
            monkeypatch.setenv("TMPDIR", str(directory))
        offloaded()
    assert directories == ["/var/tmp" if Path("/var/tmp").is_dir() else None, None]
    assert not list(tmp_path.glob("tmp*")), "the file has no name"


def test_static_policy_has_nothing_to_offload() -> None:
    with pytest.raises(InputError, match=r"offload_weights.*measured"):
        sparseflow.optimize(small(), X, policy="static", offload_weights=True)


def test_without_a_sample_and_under_inference_mode(prefer: Callable[..., FakeTimes]) -> None:
    prefer("sparse", "dense")
    net, plain = small(), small()
    sparseflow.optimize(net, offload_weights=True)
    functional.reset_net(net)
    with torch.inference_mode():
        actual = net(X)
    assert same(actual, from_rest(plain, X)) and list_offloaded(net) == list(GROUPED)
    net.train()
    assert gradients(net, X).keys() == gradients(plain.train(), X).keys()


def test_saved_plan(offloaded: Callable[..., Any], tmp_path: Path) -> None:
    net = offloaded()
    save_plan(net, tmp_path / "plan.json")
    net = load_plan(small(), tmp_path / "plan.json", X, offload_weights=True)
    assert list_offloaded(net) == list(GROUPED) and same(from_rest(net, X), from_rest(small(), X))


def test_network_of_spikingjelly_takes_less_memory(prefer: Callable[..., FakeTimes]) -> None:
    """Its linear layer of 4096 inputs has 33 MB of weights; prepared ones take as much."""
    torch.manual_seed(0)
    net: Any = parametric_lif_net.MNISTNet(channels=64, spiking_neuron=neuron.LIFNode, v_threshold=0.1).eval()
    functional.set_step_mode(net, "m")
    plain, x = copy.deepcopy(net), torch.rand(2, 1, 1, 28, 28)
    prefer("sparse", "dense")
    sparseflow.optimize(net, x, offload_weights=True, reset=True)
    torch.testing.assert_close(from_rest(net, x), from_rest(plain, x))
    forward = get_accelerated_forward(net)
    weights = sum(parameter.nbytes for parameter in net.parameters())
    assert forward.offloaded_bytes > 0.9 * weights
    memory_mb = measure_memory_mb(plain, net, (x,))
    if memory_mb is not None:  # where the system counts memory
        assert memory_mb[1] < 1.1 * memory_mb[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_on_a_gpu(dtype: torch.dtype | None, prefer: Callable[..., FakeTimes]) -> None:
    pytest.importorskip("triton", reason="the packed kernels need triton")
    prefer("dense", "sparse")
    net, x = small(channels=64).cuda(), X.cuda()
    plain = copy.deepcopy(net)
    rtol, atol = (0.05, 0.5) if dtype else (1e-4, 1e-4)
    expected = from_rest(net, x)
    sparseflow.optimize(net, x, dtype=dtype, compile=False, offload_weights=True)
    assert {"conv2.weight", "conv3.weight"} <= set(list_offloaded(net))
    torch.testing.assert_close(from_rest(net, x), expected, rtol=rtol, atol=atol)
    for name, parameter in net.named_parameters():
        assert parameter.is_cuda and torch.equal(parameter, plain.get_parameter(name)), name
    torch.testing.assert_close(net.conv1(x), plain.conv1(x), rtol=1e-4, atol=1e-4)
    for device in ("cuda", "cpu"):  # new weights reach the prepared ones
        values = {n: (-v if "fc" in n else v).to(device) for n, v in numbers(plain).items()}
        for module in (net, plain):
            module.load_state_dict(values)
        torch.testing.assert_close(from_rest(net, x), from_rest(plain, x), rtol=rtol, atol=atol)
        assert list_offloaded(net)
    forward = get_accelerated_forward(net)
    offloaded_bytes, before = forward.offloaded_bytes, torch.cuda.memory_allocated()
    sparseflow.restore(net)
    assert torch.cuda.memory_allocated() - before >= offloaded_bytes > 0
    assert same(numbers(net), numbers(plain))


@pytest.mark.gpu
def test_training_on_a_gpu(prefer: Callable[..., FakeTimes]) -> None:
    pytest.importorskip("triton", reason="the packed kernels need triton")
    prefer("dense", "sparse")
    net, x = small(channels=64).cuda(), X.cuda()
    plain = copy.deepcopy(net)
    sparseflow.optimize(net, x, compile=False, offload_weights=True)
    for module in (net, plain):
        module.train()
        for part in module.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.eps = 1e-5
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        gradients(module, x)
        optimizer.step()
        module.eval()
    torch.testing.assert_close(numbers(net), numbers(plain), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(from_rest(net, x), from_rest(plain, x), rtol=1e-3, atol=1e-3)
    assert list_offloaded(net) and copy.deepcopy(net).conv2.weight.is_cuda
