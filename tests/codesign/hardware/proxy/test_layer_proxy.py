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
from sparseflow.codesign.hardware.proxy import FEATURES, DeviceSpec, LayerGrid, LayerHwProxy, fit_proxy
from sparseflow.core.artifact import load_tensors, save_tensors
from sparseflow.errors import FileFormatError, InputError
from tests.codesign.hardware.proxy.made_up import GPU, node, points

KEYS = {"lat_ms", "mem_mb", "power_w"}
LAYERS = [node("embed", inner=16), node("attention", inner=12), node("mlp"), node("head", inner=101)]


@pytest.fixture(scope="module")
def fitted() -> LayerHwProxy:
    return fit_proxy(points(160), environments={"here": {"device": "made up"}, "elsewhere": {}}, num_folds=0)


def test_without_data_every_chip_of_the_library_can_be_asked() -> None:
    proxy, chips = LayerHwProxy.analytic(), read_library().chips
    result = proxy.predict_table(LAYERS, chips)
    assert set(result) == KEYS and all(value.shape == (4, len(chips)) for value in result.values())
    for index, layer in enumerate(LAYERS):
        for slot, chip in enumerate(chips):
            assert proxy.get_source(chip, layer) == "analytic"
            expected = 1e3 * max(float(layer.flops) / chip.peak_flops, float(layer.bytes) / chip.peak_bw)
            assert result["lat_ms"][index, slot] == pytest.approx(expected)
            assert result["mem_mb"][index, slot] == pytest.approx(layer.memory_bytes / 1e6)
            assert chip.idle_w < result["power_w"][index, slot] <= chip.tdp_w


def test_a_table_holds_what_single_layers_cost(fitted: LayerHwProxy) -> None:
    devices: list[DeviceSpec | ChipType] = [GPU, *read_library().chips]
    table = fitted.predict_table(LAYERS, devices)
    assert all(isinstance(item, np.ndarray) and item.dtype == np.float64 for item in table.values())
    for index, layer in enumerate(LAYERS):
        for slot, device in enumerate(devices):
            single = fitted.predict_layer(layer, device)
            assert set(single) == KEYS and all(item.shape == () for item in single.values())
            for name, value in single.items():
                assert table[name][index, slot] == pytest.approx(value.item(), rel=1e-9)


def test_a_segment_adds_up() -> None:
    proxy = LayerHwProxy.analytic()
    single = [proxy.predict_layer(layer, GPU) for layer in LAYERS]
    latency = torch.stack([item["lat_ms"] for item in single])
    serial = proxy.predict_segment(LAYERS, GPU)
    assert serial["lat_ms"].item() == pytest.approx(latency.sum().item())
    weights = sum(layer.weight_bytes for layer in LAYERS)
    maximum = max(layer.memory_bytes - layer.weight_bytes for layer in LAYERS)
    assert serial["mem_mb"].item() == pytest.approx((weights + maximum) / 1e6)
    power = sum((item["power_w"] * item["lat_ms"]).item() for item in single) / latency.sum().item()
    assert serial["power_w"].item() == pytest.approx(power)
    balanced = proxy.predict_segment(LAYERS, GPU, mode="max")
    assert balanced["lat_ms"].item() == pytest.approx(latency.max().item())
    assert balanced["power_w"].item() == pytest.approx(power)


def test_gradients_go_through_all_of_it(fitted: LayerHwProxy) -> None:
    layer = node("mlp")
    index = torch.tensor([float(layer.flops) / 1e10, float(layer.bytes) / 1e7], dtype=torch.float64)

    def predict(x: torch.Tensor) -> torch.Tensor:
        gated = replace(layer, flops=1e10 * x[0], bytes=1e7 * x[1])
        prediction = fitted.predict_segment([gated, LAYERS[1]], GPU)
        return torch.stack([prediction["lat_ms"], prediction["power_w"] / 100.0])

    (gradient,) = torch.autograd.grad(predict(index.requires_grad_())[0], index)
    assert bool(torch.isfinite(gradient).all()) and bool((gradient != 0.0).all())
    # What comes from counting tiles is a constant to gradients; finite differences must not see it either.
    smooth = replace(fitted, model=copy.deepcopy(fitted.model))
    assert smooth.model is not None
    smooth.model.weights[0][:, FEATURES.index("head_dim/128") :] = 0.0
    fitted = smooth
    assert torch.autograd.gradcheck(predict, index)


def test_what_gates_have_closed_takes_no_more_than_its_overhead(fitted: LayerHwProxy) -> None:
    removed = replace(node("mlp"), flops=0.0, bytes=0.0)
    ideal = LayerHwProxy.analytic().predict_segment([removed], GPU)
    assert ideal["lat_ms"].item() == 0.0 and bool(torch.isfinite(ideal["power_w"]))
    prediction = fitted.predict_layer(removed, GPU)
    assert 0.0 < prediction["lat_ms"].item() < fitted.predict_layer(node("mlp"), GPU)["lat_ms"].item()
    assert all(bool(torch.isfinite(value)) for value in prediction.values())


def test_it_says_what_it_knows(fitted: LayerHwProxy) -> None:
    assert fitted.get_source(GPU) == "measured" and fitted.mode == "graph"
    assert fitted.get_source(GPU, node("mlp")) == "measured"
    assert fitted.get_source(GPU, node("mlp", precision="float16")) == "analytic"
    # Cores and watts may be told anew; a device with other rates is another one.
    assert fitted.get_source(replace(GPU, cores=None, tdp_w=400.0)) == "measured"
    assert fitted.get_source(replace(GPU, peak_bw=1e12)) == "analytic"
    assert fitted.get_source(read_library().get_chip("h200")) == "analytic"
    provenance = fitted.provenance
    assert (provenance["measured"], provenance["analytic"]) == (160, 0)
    assert provenance["environments"] == {"here": {"device": "made up"}}


def test_other_devices_are_not_touched_by_what_was_measured(fitted: LayerHwProxy) -> None:
    chips = read_library().chips
    own_part, plain = (
        fitted.predict_table(LAYERS, chips),
        LayerHwProxy.analytic().predict_table(LAYERS, chips),
    )
    for name in KEYS:
        np.testing.assert_array_equal(own_part[name], plain[name])


def test_far_from_the_points_only_the_roofline_is_left(fitted: LayerHwProxy) -> None:
    close, far = node("mlp"), node("mlp", batch=2**20)
    bare = replace(fitted, model=None)
    for layer, same in ((close, False), (far, True)):
        ratio = fitted.predict_layer(layer, GPU)["lat_ms"] / bare.predict_layer(layer, GPU)["lat_ms"]
        assert (abs(ratio.item() - 1.0) < 1e-3) == same


def test_a_file_of_it(fitted: LayerHwProxy, tmp_path: Path) -> None:
    file = tmp_path / "proxy.safetensors"
    devices = [GPU, *read_library().chips]
    for proxy in (fitted, LayerHwProxy.analytic()):
        proxy.save(file)
        repeated = LayerHwProxy.load(file)
        assert (repeated.devices, repeated.mode, repeated.provenance) == (
            proxy.devices,
            proxy.mode,
            proxy.provenance,
        )
        own_part, same = proxy.predict_table(LAYERS, devices), repeated.predict_table(LAYERS, devices)
        for name in KEYS:
            np.testing.assert_array_equal(own_part[name], same[name])


def test_damaged_files_are_refused(fitted: LayerHwProxy, tmp_path: Path) -> None:
    file = tmp_path / "proxy.safetensors"
    with pytest.raises(InputError):
        LayerHwProxy.load(file)
    file.write_bytes(b"no proxy")
    with pytest.raises(FileFormatError):
        LayerHwProxy.load(file)
    fitted.save(file)
    metadata, tensors = load_tensors(file, {}, "layer proxy")
    record = json.loads(metadata["proxy"])
    for wrong_tensors, wrong_about in (
        ({"roofline": tensors["roofline"][:1]}, {}),
        ({"power": tensors["power"] * float("nan")}, {}),
        ({"model.mean": tensors["model.mean"][:3]}, {}),
        ({}, {"devices": [{"name": "half"}]}),
        ({}, {"model": {"members": 3, "hidden": 32}}),
    ):
        save_tensors(file, tensors | wrong_tensors, metadata | {"proxy": json.dumps(record | wrong_about)})
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
        proxy.predict_table(LAYERS, [])
    with pytest.raises(InputError):
        proxy.predict_pairs(LAYERS, [GPU])


def test_many_layers_on_many_devices_at_once(fitted: LayerHwProxy) -> None:
    layers = [value.to_node(index) for index, value in enumerate(LayerGrid().sample(30))]
    result = fitted.predict_table(layers, [GPU, *read_library().chips, GPU])
    assert all(value.shape == (30, 8) and bool(np.isfinite(value).all()) for value in result.values())
    np.testing.assert_allclose(result["lat_ms"][:, 0], result["lat_ms"][:, -1])


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
    overrides = [
        replace(fitted, model=None),
        replace(fitted, model=weights),
        replace(fitted, mode="eager"),
        replace(fitted, roofline=fitted.roofline.with_average_default()),
        replace(fitted, power=fitted.power * 2.0),
        replace(fitted, workspace=fitted.workspace + 1.0),
        replace(fitted, devices=(replace(GPU, cores=1),)),
    ]
    assert len({fitted.digest, *(override.digest for override in overrides)}) == 1 + len(overrides)


@pytest.mark.parametrize("wrong", [{"weight_bytes": -1}, {"num_heads": -1}, {"mlp_ratio": float("nan")}])
def test_a_layer_that_makes_no_sense_is_named(wrong: dict[str, float]) -> None:
    layer = replace(LAYERS[2], **wrong)
    with pytest.raises(InputError, match=rf"{layer.name}"):
        LayerHwProxy.analytic().predict_table([layer], [GPU])
