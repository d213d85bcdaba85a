"""Networks by name: built the same each time, firing, and bad names say what there is."""

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
from sparseflow.spiking.models.model_zoo import Case, Settings, build, follow, make_it_fire, sample
from tests.spiking.nets import Small, from_rest, images, same

TINY = Settings(width=8, image=16, steps=2, classes=3)


def rates(net: nn.Module, x: torch.Tensor) -> list[float]:
    found: list[float] = []
    handles = [
        m.register_forward_hook(lambda m, i, o: found.append(o.mean().item()))
        for m in net.modules()
        if isinstance(m, neuron.BaseNode)
    ]
    from_rest(net, x)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("name", ["spiking_resnet18", "sew_resnet18", "spiking_resnet50"])
def test_a_random_network_fires_and_is_always_the_same(name: str) -> None:
    rng = torch.random.get_rng_state()
    net, twin = build(name, TINY), build(name, TINY)
    assert torch.equal(torch.random.get_rng_state(), rng), "the global generator is left alone"
    assert not any(m.training for m in net.modules())
    assert same(net.state_dict(), twin.state_dict())
    assert not same(net.state_dict(), build(name, Settings(**{**vars(TINY), "seed": 1})).state_dict())
    x = sample(TINY, 2)
    found = rates(net, x)
    assert len(found) > 10 and all(0.005 < rate < 0.9 for rate in found), found
    assert from_rest(net, x).shape == (2, 3)
    assert all(not isinstance(m.v, torch.Tensor) for m in build(name, TINY).modules() if hasattr(m, "v"))


@pytest.mark.parametrize(("image", "downsampled"), [(32, False), (64, False), (65, True)])
def test_the_stem_goes_by_the_image(image: int, downsampled: bool) -> None:
    net = build("spiking_resnet18", Settings(width=8, image=image, steps=1))
    first = next(m for m in net.modules() if isinstance(m, nn.Conv2d))
    assert (first.kernel_size == (7, 7)) == downsampled


def test_the_shipped_network_by_its_name() -> None:
    name = pretrained.DEFAULT
    if name not in pretrained.names():
        pytest.skip("no network is shipped in this tree")
    net = build(name)
    assert same(net.state_dict(), pretrained.load(name).state_dict()) and not net.training


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("my_networks")
    module.small = lambda: Small().eval()  # type: ignore[attr-defined]
    module.number = lambda: 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_networks", module)
    return module


def test_a_factory_of_the_users(mine: ModuleType) -> None:
    assert isinstance(build("my_networks:small"), Small)
    with pytest.raises(ModelError, match="my_networks:number returned a int"):
        build("my_networks:number")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nonsense", r"no network is called 'nonsense'; there are .*spiking_resnet18"),
        ("spiking_resnet20", r"`depth` \(=20\)"),
        ("resnet18", "no network is called"),
        ("sew_resnet18x", "no network is called"),
        ("no_such_module:make", "'no_such_module:make' cannot be imported"),
        ("my_networks:absent", "'my_networks:absent' cannot be imported"),
        (":", "':' cannot be imported"),
        ("json:__name__", "'json:__name__' is a str, not a function"),
        ("json:", "cannot be imported"),
    ],
)
def test_bad_names_say_what_there_is(name: str, words: str, mine: ModuleType) -> None:
    with pytest.raises(InputError, match=words):
        build(name, TINY)


def test_weights_from_a_file(tmp_path: Path) -> None:
    other = build("spiking_resnet18", Settings(**{**vars(TINY), "seed": 1}))
    file = tmp_path / "weights.safetensors"
    save_file({key: value.contiguous() for key, value in other.state_dict().items()}, file)
    net = build("spiking_resnet18", TINY, weights=file)
    assert same(net.state_dict(), other.state_dict())


@pytest.mark.parametrize("content", [b"", b"not safetensors", None])
def test_bad_weights_are_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "weights.safetensors"
    if content is None:
        save_file({"conv1.weight": torch.zeros(1)}, file)
    else:
        file.write_bytes(content)
    with pytest.raises(FileFormatError, match=r"weights\.safetensors does not fit"):
        build("spiking_resnet18", TINY, weights=file)
    with pytest.raises(InputError, match=r"there is no file .*absent"):
        build("spiking_resnet18", TINY, weights=tmp_path / "absent")


@pytest.mark.parametrize("size", [8, 16, 33])
def test_samples_are_smooth_and_always_the_same(size: int) -> None:
    settings = Settings(image=size)
    x = sample(settings, 3)
    assert x.shape == (3, 3, size, size) and x.dtype == torch.float32
    assert same(x, sample(settings, 3)) and not same(x, sample(Settings(image=size, seed=1), 3))
    assert (x[..., 1:] - x[..., :-1]).abs().mean() < (x.flatten(1)[:, torch.randperm(3 * size * size)]
        .diff().abs().mean())  # fmt: skip


def test_make_it_fire_leaves_a_network_at_rest_in_eval_mode() -> None:
    # How often the last of so few neurons fire is a matter of their weights.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Small()
    make_it_fire(net, images(3, 4))
    assert not any(m.training for m in net.modules())
    assert all(not isinstance(m.v, torch.Tensor) for m in net.modules() if hasattr(m, "v"))
    assert all(0.01 < rate < 0.9 for rate in rates(net, images(3, 2)))


@pytest.mark.parametrize("name", ["spiking_resnet18", "sew_resnet18"])
@pytest.mark.parametrize("firing", [0.05, 0.3, 0.6])
def test_a_network_fires_as_much_as_was_asked_for(name: str, firing: float) -> None:
    settings = Settings(**{**vars(TINY), "firing": firing})
    net, twin = build(name, settings), build(name, settings)
    assert all(not isinstance(m.v, torch.Tensor) for m in net.modules() if hasattr(m, "v"))
    assert not any(m.training for m in net.modules()) and same(net.state_dict(), twin.state_dict())
    found = rates(net, sample(settings, 4))
    assert sum(found) / len(found) == pytest.approx(firing, abs=0.02)
    assert all(rate > 0.2 * firing for rate in found), "every layer takes part"


@pytest.mark.parametrize("firing", [0.0, 1.0, -1.0, float("nan")])
def test_a_firing_rate_out_of_range(firing: float) -> None:
    with pytest.raises(InputError, match="`firing`"):
        make_it_fire(Small(), images(3, 2), firing=firing)


def test_follow_changes_nothing_but_statistics() -> None:
    net = build("spiking_resnet18", TINY)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    follow(net, sample(TINY, 8) * 3)
    changed = {key for key, value in net.state_dict().items() if not torch.equal(value, before[key])}
    assert changed and all("running_" in key for key in changed)


@pytest.mark.parametrize("batch", [1, 5])
def test_a_case_of_a_grid(batch: int) -> None:
    case = Case(model="sew_resnet18", settings=TINY, batch=batch)
    assert case.name == f"sew_resnet18, width 8, 16x16, 3 classes, T 2, batch {batch}"
    model, x, labels = case.build()
    assert x.shape == (batch, 3, 16, 16) and labels is None and from_rest(model, x).shape == (batch, 3)


def test_a_case_of_the_shipped_network_has_real_images_and_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    if pretrained.DEFAULT not in pretrained.names():
        pytest.skip("no network is shipped in this tree")
    pixels, labels = pretrained.images()
    few = pixels[:3], labels[:3]
    monkeypatch.setattr(pretrained, "images", lambda: few)
    case = Case(model=pretrained.DEFAULT, settings=Settings(), batch=7)
    _, x, found = case.build()
    assert x.shape[0] == 7 and found is not None and found.tolist() == [*labels[:3]] * 2 + [labels[0]]
    assert same(x[3], x[0]) and case.name == f"{pretrained.DEFAULT}, batch 7"


def test_names_of_cases_tell_them_apart() -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"steps": 16},
        {"classes": 100},
        {"image": 64},
        {"width": 32},
        {"firing": 0.3},
    ]
    names = {
        Case(model=m, settings=Settings(**s), batch=b).name
        for m in ("spiking_resnet18", "sew_resnet18")
        for s in settings
        for b in (1, 8)
    }
    assert len(names) == 24
