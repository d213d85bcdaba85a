"""Networks by name are reproducible and fire; unknown names list the known ones."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("spikingjelly")

from safetensors.torch import save_file
from spikingjelly.activation_based import neuron

from sparseflow.errors import FileFormatError, InputError, ModelError
from sparseflow.spiking.models import pretrained
from sparseflow.spiking.models.model_zoo import (
    BenchCase,
    NetworkConfig,
    build_network,
    calibrate_batchnorm,
    calibrate_firing,
    sample_images,
)
from tests.spiking.nets import Small, from_rest, images, same

TINY = NetworkConfig(width=8, image_size=16, time_steps=2, num_classes=3)


def rates(net: nn.Module, x: torch.Tensor) -> list[float]:
    actual: list[float] = []
    handles = [
        m.register_forward_hook(lambda m, i, o: actual.append(o.mean().item()))
        for m in net.modules()
        if isinstance(m, neuron.BaseNode)
    ]
    from_rest(net, x)
    for handle in handles:
        handle.remove()
    return actual


@pytest.mark.parametrize("name", ["spiking_resnet18", "sew_resnet18", "spiking_resnet50"])
def test_random_network_fires_and_is_reproducible(name: str) -> None:
    rng = torch.random.get_rng_state()
    net, duplicate = build_network(name, TINY), build_network(name, TINY)
    assert torch.equal(torch.random.get_rng_state(), rng), "the global generator is left alone"
    assert not any(m.training for m in net.modules())
    assert same(net.state_dict(), duplicate.state_dict())
    assert not same(
        net.state_dict(), build_network(name, NetworkConfig(**{**vars(TINY), "seed": 1})).state_dict()
    )
    x = sample_images(TINY, 2)
    actual = rates(net, x)
    assert len(actual) > 10 and all(0.005 < rate < 0.9 for rate in actual), actual
    assert from_rest(net, x).shape == (2, 3)
    assert all(not isinstance(m.v, torch.Tensor) for m in duplicate.modules() if hasattr(m, "v"))


@pytest.mark.parametrize(("image", "downsampled"), [(32, False), (64, False), (65, True)])
def test_stem_depends_on_the_image_size(image: int, downsampled: bool) -> None:
    net = build_network("spiking_resnet18", NetworkConfig(width=8, image_size=image, time_steps=1))
    first = next(m for m in net.modules() if isinstance(m, nn.Conv2d))
    assert (first.kernel_size == (7, 7)) == downsampled


def test_pretrained_network_by_name() -> None:
    name = pretrained.DEFAULT_NETWORK
    if name not in pretrained.list_names():
        pytest.skip("no network is shipped in this tree")
    net = build_network(name)
    assert same(net.state_dict(), pretrained.load_network(name).state_dict()) and not net.training


@pytest.fixture
def user_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("my_networks")
    module.small = lambda: Small().eval()  # type: ignore[attr-defined]
    module.number = lambda: 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_networks", module)
    return module


def test_build_network_from_user_factory(user_module: ModuleType) -> None:
    assert isinstance(build_network("my_networks:small"), Small)
    with pytest.raises(ModelError, match="my_networks:number"):
        build_network("my_networks:number")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nonsense", r"'nonsense'.*spiking_resnet18"),
        ("spiking_resnet20", "'spiking_resnet20'"),
        ("resnet20", "'resnet20'"),
        ("sew_resnet18x", "'sew_resnet18x'"),
        ("no_such_module:make", "no_such_module:make"),
        ("my_networks:absent", "my_networks:absent"),
        (":", "':'"),
        ("json:__name__", "json:__name__"),
        ("json:", "json:"),
    ],
)
def test_bad_names_say_what_there_is(name: str, words: str, user_module: ModuleType) -> None:
    with pytest.raises(InputError, match=words):
        build_network(name, TINY)


def test_weights_from_a_file(tmp_path: Path) -> None:
    other = build_network("spiking_resnet18", NetworkConfig(**{**vars(TINY), "seed": 1}))
    file = tmp_path / "weights.safetensors"
    save_file({key: value.contiguous() for key, value in other.state_dict().items()}, file)
    net = build_network("spiking_resnet18", TINY, weights=file)
    assert same(net.state_dict(), other.state_dict())


@pytest.mark.parametrize("content", [b"", b"not safetensors", None])
def test_bad_weights_are_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "weights.safetensors"
    if content is None:
        save_file({"conv1.weight": torch.zeros(1)}, file)
    else:
        file.write_bytes(content)
    with pytest.raises(FileFormatError, match=r"weights\.safetensors"):
        build_network("spiking_resnet18", TINY, weights=file)
    with pytest.raises(InputError, match="absent"):
        build_network("spiking_resnet18", TINY, weights=tmp_path / "absent")


@pytest.mark.parametrize("size", [8, 16, 33])
def test_samples_are_smooth_and_always_the_same(size: int) -> None:
    settings = NetworkConfig(image_size=size)
    x = sample_images(settings, 3)
    assert x.shape == (3, 3, size, size) and x.dtype == torch.float32
    assert same(x, sample_images(settings, 3)) and not same(
        x, sample_images(NetworkConfig(image_size=size, seed=1), 3)
    )
    assert (x[..., 1:] - x[..., :-1]).abs().mean() < (x.flatten(1)[:, torch.randperm(3 * size * size)]
        .diff().abs().mean())  # fmt: skip


def test_calibrate_firing_leaves_the_network_at_rest() -> None:
    # How often the last of so few neurons fire is a matter of their weights.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Small()
    calibrate_firing(net, images(3, 4))
    assert not any(m.training for m in net.modules())
    assert all(not isinstance(m.v, torch.Tensor) for m in net.modules() if hasattr(m, "v"))
    assert all(0.01 < rate < 0.9 for rate in rates(net, images(3, 2)))


@pytest.mark.parametrize(
    ("name", "firing"), [("spiking_resnet18", 0.05), ("sew_resnet18", 0.3), ("spiking_resnet18", 0.6)]
)
def test_network_fires_at_the_requested_rate(name: str, firing: float) -> None:
    settings = NetworkConfig(**{**vars(TINY), "firing_rate": firing})
    net, duplicate = build_network(name, settings), build_network(name, settings)
    assert all(not isinstance(m.v, torch.Tensor) for m in net.modules() if hasattr(m, "v"))
    assert not any(m.training for m in net.modules()) and same(net.state_dict(), duplicate.state_dict())
    actual = rates(net, sample_images(settings, 4))
    assert sum(actual) / len(actual) == pytest.approx(firing, abs=0.02)
    assert all(rate > 0.2 * firing for rate in actual), "every layer takes part"


@pytest.mark.parametrize("firing", [0.0, 1.0, -1.0, float("nan")])
def test_calibrate_firing_rate_out_of_range_raises(firing: float) -> None:
    with pytest.raises(InputError, match="`firing_rate`"):
        calibrate_firing(Small(), images(3, 2), firing_rate=firing)


def test_calibrate_batchnorm_changes_statistics_only() -> None:
    net = build_network("spiking_resnet18", TINY)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    calibrate_batchnorm(net, sample_images(TINY, 8) * 3)
    changed = {key for key, value in net.state_dict().items() if not torch.equal(value, before[key])}
    assert changed and all("running_" in key for key in changed)


@pytest.mark.parametrize("batch", [1, 5])
def test_grid_case_fields(batch: int) -> None:
    case = BenchCase(model="sew_resnet18", config=TINY, batch_size=batch)
    assert case.name == f"sew_resnet18, width 8, 16x16, 3 classes, T 2, batch {batch}"
    model, (x,), labels = case.build()
    assert x.shape == (batch, 3, 16, 16) and labels is None and from_rest(model, x).shape == (batch, 3)


def test_pretrained_case_has_real_images_and_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    if pretrained.DEFAULT_NETWORK not in pretrained.list_names():
        pytest.skip("no network is shipped in this tree")
    pixels, labels = pretrained.load_images()
    subset = pixels[:3], labels[:3]
    monkeypatch.setattr(pretrained, "load_images", lambda: subset)
    case = BenchCase(model=pretrained.DEFAULT_NETWORK, config=NetworkConfig(), batch_size=7)
    _, (x,), actual = case.build()
    assert x.shape[0] == 7 and actual is not None and actual.tolist() == [*labels[:3]] * 2 + [labels[0]]
    assert same(x[3], x[0]) and case.name == f"{pretrained.DEFAULT_NETWORK}, batch 7"


def test_names_of_cases_tell_them_apart() -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"time_steps": 16},
        {"num_classes": 100},
        {"image_size": 64},
        {"width": 32},
        {"firing_rate": 0.3},
    ]
    names = {
        BenchCase(model=m, config=NetworkConfig(**s), batch_size=b).name
        for m in ("spiking_resnet18", "sew_resnet18")
        for s in settings
        for b in (1, 8)
    }
    assert len(names) == 24


def test_short_names_build_spiking_networks() -> None:
    assert same(
        build_network("resnet18", TINY).state_dict(), build_network("spiking_resnet18", TINY).state_dict()
    )


def test_factory_takes_arguments_and_step_mode(user_module: ModuleType) -> None:
    class Configured(Small):
        def __init__(self, channels: int = 6) -> None:
            super().__init__("s", channels=channels)

    user_module.configured = Configured  # type: ignore[attr-defined]
    net = build_network("my_networks:configured", arguments={"channels": 4}, step_mode="m")
    assert isinstance(net, Configured) and net.conv1.out_channels == 4
    assert net.sn1.step_mode == "m" and not net.training
    with pytest.raises(InputError, match="'width'"):
        build_network("spiking_resnet18", TINY, arguments={"width": 4})


@pytest.mark.parametrize("kind", ["plain", "checkpoint", "data_parallel"])
def test_weights_from_a_checkpoint_of_torch(kind: str, tmp_path: Path) -> None:
    expected = build_network("spiking_resnet18", NetworkConfig(**{**vars(TINY), "seed": 1})).state_dict()
    prefix = "module." if kind == "data_parallel" else ""
    weights: dict[str, Any] = {prefix + key: value for key, value in expected.items()}
    file = tmp_path / "weights.pth"
    torch.save({"epoch": 3, "net": weights} if kind == "checkpoint" else weights, file)
    assert same(build_network("spiking_resnet18", TINY, weights=file).state_dict(), expected)


def test_weights_file_with_other_objects_is_refused(tmp_path: Path) -> None:
    torch.save(Small(), tmp_path / "model.pt")
    with pytest.raises(FileFormatError, match=r"model\.pt.*other objects"):
        build_network("spiking_resnet18", TINY, weights=tmp_path / "model.pt")
