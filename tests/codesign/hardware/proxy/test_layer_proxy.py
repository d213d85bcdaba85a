"""LayerHwProxy: what it tells of layers, segments and tables, and what it says of itself."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sparseflow.codesign.hardware.chips import ChipType, read_library
from sparseflow.codesign.hardware.proxy import FEATURES, DeviceSpec, Grid, LayerHwProxy, fit
from sparseflow.core.artifact import load_tensors, save_tensors
from sparseflow.errors import FileFormatError, InputError
from tests.codesign.hardware.proxy.made_up import GPU, node, points

KEYS = {"lat_ms", "mem_mb", "power_w"}
LAYERS = [node("embed", inner=16), node("attention", inner=12), node("mlp"), node("head", inner=101)]


@pytest.fixture(scope="module")
def fitted() -> LayerHwProxy:
    return fit(points(160), environments={"here": {"device": "made up"}, "elsewhere": {}}, folds=0)


def test_without_data_every_chip_of_the_library_can_be_asked() -> None:
    proxy, chips = LayerHwProxy.analytic(), read_library().chips
    found = proxy.table(LAYERS, chips)
    assert set(found) == KEYS and all(each.shape == (4, len(chips)) for each in found.values())
    for at, layer in enumerate(LAYERS):
        for slot, chip in enumerate(chips):
            assert proxy.known(chip, layer) == "analytic"
            wanted = 1e3 * max(float(layer.flops) / chip.peak_flops, float(layer.bytes) / chip.peak_bw)
            assert found["lat_ms"][at, slot] == pytest.approx(wanted)
            assert found["mem_mb"][at, slot] == pytest.approx(layer.memory_bytes / 1e6)
            assert chip.idle_w < found["power_w"][at, slot] <= chip.tdp_w


def test_a_table_holds_what_single_layers_cost(fitted: LayerHwProxy) -> None:
    devices: list[DeviceSpec | ChipType] = [GPU, *read_library().chips]
    table = fitted.table(LAYERS, devices)
    assert all(isinstance(each, np.ndarray) and each.dtype == np.float64 for each in table.values())
    for at, layer in enumerate(LAYERS):
        for slot, device in enumerate(devices):
            single = fitted.predict_layer(layer, device)
            assert set(single) == KEYS and all(each.shape == () for each in single.values())
            for name, value in single.items():
                assert table[name][at, slot] == pytest.approx(value.item(), rel=1e-9)


def test_a_segment_adds_up() -> None:
    proxy = LayerHwProxy.analytic()
    single = [proxy.predict_layer(layer, GPU) for layer in LAYERS]
    latency = torch.stack([each["lat_ms"] for each in single])
    serial = proxy.predict_segment(LAYERS, GPU)
    assert serial["lat_ms"].item() == pytest.approx(latency.sum().item())
    weights = sum(layer.weight_bytes for layer in LAYERS)
    most = max(layer.memory_bytes - layer.weight_bytes for layer in LAYERS)
    assert serial["mem_mb"].item() == pytest.approx((weights + most) / 1e6)
    power = sum((each["power_w"] * each["lat_ms"]).item() for each in single) / latency.sum().item()
    assert serial["power_w"].item() == pytest.approx(power)
    balanced = proxy.predict_segment(LAYERS, GPU, mode="max")
    assert balanced["lat_ms"].item() == pytest.approx(latency.max().item())
    assert balanced["power_w"].item() == pytest.approx(power)


def test_gradients_go_through_all_of_it(fitted: LayerHwProxy) -> None:
    layer = node("mlp")
    at = torch.tensor([float(layer.flops) / 1e10, float(layer.bytes) / 1e7], dtype=torch.float64)

    def told(x: torch.Tensor) -> torch.Tensor:
        gated = replace(layer, flops=1e10 * x[0], bytes=1e7 * x[1])
        found = fitted.predict_segment([gated, LAYERS[1]], GPU)
        return torch.stack([found["lat_ms"], found["power_w"] / 100.0])

    (gradient,) = torch.autograd.grad(told(at.requires_grad_())[0], at)
    assert bool(torch.isfinite(gradient).all()) and bool((gradient != 0.0).all())
    # What comes from counting tiles is a constant to gradients; finite differences must not see it either.
    smooth = replace(fitted, model=copy.deepcopy(fitted.model))
    assert smooth.model is not None
    smooth.model.weights[0][:, FEATURES.index("head_dim/128") :] = 0.0
    fitted = smooth
    assert torch.autograd.gradcheck(told, at)


def test_what_gates_have_closed_takes_no_more_than_its_overhead(fitted: LayerHwProxy) -> None:
    gone = replace(node("mlp"), flops=0.0, bytes=0.0)
    ideal = LayerHwProxy.analytic().predict_segment([gone], GPU)
    assert ideal["lat_ms"].item() == 0.0 and bool(torch.isfinite(ideal["power_w"]))
    left = fitted.predict_layer(gone, GPU)
    assert 0.0 < left["lat_ms"].item() < fitted.predict_layer(node("mlp"), GPU)["lat_ms"].item()
    assert all(bool(torch.isfinite(value)) for value in left.values())


def test_it_says_what_it_knows(fitted: LayerHwProxy) -> None:
    assert fitted.known(GPU) == "measured" and fitted.mode == "graph"
    assert fitted.known(GPU, node("mlp")) == "measured"
    assert fitted.known(GPU, node("mlp", precision="float16")) == "analytic"
    # Cores and watts may be told anew; a device with other rates is another one.
    assert fitted.known(replace(GPU, cores=None, tdp_w=400.0)) == "measured"
    assert fitted.known(replace(GPU, peak_bw=1e12)) == "analytic"
    assert fitted.known(read_library().chip("h200")) == "analytic"
    told = fitted.provenance
    assert (told["measured"], told["analytic"]) == (160, 0)
    assert told["environments"] == {"here": {"device": "made up"}}


def test_other_devices_are_not_touched_by_what_was_measured(fitted: LayerHwProxy) -> None:
    chips = read_library().chips
    mine, plain = fitted.table(LAYERS, chips), LayerHwProxy.analytic().table(LAYERS, chips)
    for name in KEYS:
        np.testing.assert_array_equal(mine[name], plain[name])


def test_far_from_the_points_only_the_roofline_is_left(fitted: LayerHwProxy) -> None:
    near, far = node("mlp"), node("mlp", batch=2**20)
    bare = replace(fitted, model=None)
    for layer, same in ((near, False), (far, True)):
        ratio = fitted.predict_layer(layer, GPU)["lat_ms"] / bare.predict_layer(layer, GPU)["lat_ms"]
        assert (abs(ratio.item() - 1.0) < 1e-3) == same


def test_a_file_of_it(fitted: LayerHwProxy, tmp_path: Path) -> None:
    file = tmp_path / "proxy.safetensors"
    devices = [GPU, *read_library().chips]
    for proxy in (fitted, LayerHwProxy.analytic()):
        proxy.save(file)
        again = LayerHwProxy.load(file)
        assert (again.devices, again.mode, again.provenance) == (proxy.devices, proxy.mode, proxy.provenance)
        mine, same = proxy.table(LAYERS, devices), again.table(LAYERS, devices)
        for name in KEYS:
            np.testing.assert_array_equal(mine[name], same[name])


def test_damaged_files_are_refused(fitted: LayerHwProxy, tmp_path: Path) -> None:
    file = tmp_path / "proxy.safetensors"
    with pytest.raises(InputError):
        LayerHwProxy.load(file)
    file.write_bytes(b"no proxy")
    with pytest.raises(FileFormatError):
        LayerHwProxy.load(file)
    fitted.save(file)
    metadata, tensors = load_tensors(file, {}, "layer proxy")
    about = json.loads(metadata["proxy"])
    for wrong_tensors, wrong_about in (
        ({"roofline": tensors["roofline"][:1]}, {}),
        ({"power": tensors["power"] * float("nan")}, {}),
        ({"model.mean": tensors["model.mean"][:3]}, {}),
        ({}, {"devices": [{"name": "half"}]}),
        ({}, {"model": {"members": 3, "hidden": 32}}),
    ):
        save_tensors(file, tensors | wrong_tensors, metadata | {"proxy": json.dumps(about | wrong_about)})
        with pytest.raises(FileFormatError):
            LayerHwProxy.load(file)
    save_tensors(file, tensors, metadata | {"features": "[]"})
    with pytest.raises(FileFormatError):
        LayerHwProxy.load(file)


def test_what_cannot_be_asked_is_refused() -> None:
    proxy = LayerHwProxy.analytic()
    with pytest.raises(InputError, match="`mode`"):
        proxy.predict_segment(LAYERS, GPU, mode="parallel")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="0"):
        proxy.predict_segment([], GPU)
    with pytest.raises(InputError, match="0"):
        proxy.table(LAYERS, [])
    with pytest.raises(InputError):
        proxy.predict_pairs(LAYERS, [GPU])


def test_many_layers_on_many_devices_at_once(fitted: LayerHwProxy) -> None:
    layers = [each.node(at) for at, each in enumerate(Grid().draw(30))]
    found = fitted.table(layers, [GPU, *read_library().chips, GPU])
    assert all(each.shape == (30, 8) and bool(np.isfinite(each).all()) for each in found.values())
    np.testing.assert_allclose(found["lat_ms"][:, 0], found["lat_ms"][:, -1])


def test_a_digest_is_of_what_is_predicted(fitted: LayerHwProxy, tmp_path: Path) -> None:
    file = tmp_path / "proxy.safetensors"
    for proxy in (fitted, LayerHwProxy.analytic()):
        proxy.save(file)
        assert LayerHwProxy.load(file).digest == proxy.digest and len(proxy.digest) == 64
    # Where it came from is another matter.
    assert replace(fitted, provenance={"measured": 1}).digest == fitted.digest
    weights = copy.deepcopy(fitted.model)
    assert weights is not None
    weights.weights[0].view(-1)[0] += 1e-12
    others = [
        replace(fitted, model=None), replace(fitted, model=weights), replace(fitted, mode="eager"),
        replace(fitted, roofline=fitted.roofline.alike()), replace(fitted, power=fitted.power * 2.0),
        replace(fitted, workspace=fitted.workspace + 1.0), replace(fitted, devices=(replace(GPU, cores=1),)),
    ]  # fmt: skip
    assert len({fitted.digest, *(each.digest for each in others)}) == 1 + len(others)


@pytest.mark.parametrize("wrong", [{"weight_bytes": -1}, {"num_heads": -1}, {"mlp_ratio": float("nan")}])
def test_a_layer_that_makes_no_sense_is_named(wrong: dict[str, float]) -> None:
    layer = replace(LAYERS[2], **wrong)
    with pytest.raises(InputError, match=rf"{layer.name}"):
        LayerHwProxy.analytic().table([layer], [GPU])
