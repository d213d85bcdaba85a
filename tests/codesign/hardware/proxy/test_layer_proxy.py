"""Tests of `codesign.hardware.proxy.layer_proxy`."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sparseflow.codesign.hardware.chips import ChipType, read_library
from sparseflow.codesign.hardware.proxy import FEATURES, DeviceSpec, LayerGrid, LayerHwProxy, fit_proxy
from sparseflow.errors import FileFormatError, InputError
from tests.codesign.hardware.proxy.made_up import GPU, node, points
from tests.conformance import check_artifact_file

KEYS = {"lat_ms", "mem_mb", "power_w"}
LAYERS = [node("embed", inner=16), node("attention", inner=12), node("mlp"), node("head", inner=101)]


@pytest.fixture(scope="module")
def fitted() -> LayerHwProxy:
    return fit_proxy(points(160), environments={"here": {"device": "made up"}, "elsewhere": {}}, num_folds=0)


def test_analytic_proxy_predicts_library_chips() -> None:
    proxy, chips = LayerHwProxy.analytic(), read_library().chips
    result = proxy.predict_table(LAYERS, chips)
    assert set(result) == KEYS and all(value.shape == (4, len(chips)) for value in result.values())
    for index, layer in enumerate(LAYERS):
        for slot, chip in enumerate(chips):
            assert proxy.get_source(chip, layer) == "analytic"
            peak_flops = chip.peak_flops[layer.precision]
            expected = 1e3 * max(float(layer.flops) / peak_flops, float(layer.bytes) / chip.peak_bw)
            assert result["lat_ms"][index, slot] == pytest.approx(expected)
            assert result["mem_mb"][index, slot] == pytest.approx(layer.memory_bytes / 1e6)
            assert chip.idle_w < result["power_w"][index, slot] <= chip.tdp_w


def test_predict_table_equals_predict_layer(fitted: LayerHwProxy) -> None:
    devices: list[DeviceSpec | ChipType] = [GPU, *read_library().chips]
    table = fitted.predict_table(LAYERS, devices)
    assert all(isinstance(item, np.ndarray) and item.dtype == np.float64 for item in table.values())
    for index, layer in enumerate(LAYERS):
        for slot, device in enumerate(devices):
            single = fitted.predict_layer(layer, device)
            assert set(single) == KEYS and all(item.shape == () for item in single.values())
            for name, value in single.items():
                assert table[name][index, slot] == pytest.approx(value.item(), rel=1e-9)


def test_predict_segment_combines_layers() -> None:
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


def test_prediction_gradients(fitted: LayerHwProxy) -> None:
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


def test_closed_layer_costs_overhead_only(fitted: LayerHwProxy) -> None:
    removed = replace(node("mlp"), flops=0.0, bytes=0.0)
    ideal = LayerHwProxy.analytic().predict_segment([removed], GPU)
    assert ideal["lat_ms"].item() == 0.0 and bool(torch.isfinite(ideal["power_w"]))
    prediction = fitted.predict_layer(removed, GPU)
    assert 0.0 < prediction["lat_ms"].item() < fitted.predict_layer(node("mlp"), GPU)["lat_ms"].item()
    assert all(bool(torch.isfinite(value)) for value in prediction.values())


def test_get_source_and_provenance(fitted: LayerHwProxy) -> None:
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


def test_unmeasured_devices_stay_analytic(fitted: LayerHwProxy) -> None:
    chips = read_library().chips
    own_part, plain = (
        fitted.predict_table(LAYERS, chips),
        LayerHwProxy.analytic().predict_table(LAYERS, chips),
    )
    for name in KEYS:
        np.testing.assert_array_equal(own_part[name], plain[name])


def test_prediction_far_from_points_is_roofline(fitted: LayerHwProxy) -> None:
    close, far = node("mlp"), node("mlp", batch=2**20)
    bare = replace(fitted, model=None)
    for layer, same in ((close, False), (far, True)):
        ratio = fitted.predict_layer(layer, GPU)["lat_ms"] / bare.predict_layer(layer, GPU)["lat_ms"]
        assert (abs(ratio.item() - 1.0) < 1e-3) == same


def test_proxy_file_round_trip(fitted: LayerHwProxy, tmp_path: Path) -> None:
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


def test_proxy_file_conforms(fitted: LayerHwProxy, tmp_path: Path) -> None:
    file = tmp_path / "proxy.safetensors"
    fitted.save(file)
    check_artifact_file(LayerHwProxy.load, file, "codesign profile")


@pytest.mark.parametrize(
    ("tensors", "values"),
    [
        ({"roofline": torch.ones(1, 4, 4, 3, dtype=torch.float64)}, {}),
        ({"power": torch.full((2, 3), float("nan"), dtype=torch.float64)}, {}),
        ({"model.mean": torch.zeros(3)}, {}),
        ({}, {"devices": [{"name": "half"}]}),
        ({}, {"model": {"members": 3, "hidden": 32}}),
        ({}, {"features": []}),
    ],
)
def test_load_proxy_with_inconsistent_content_is_refused(
    tensors: dict[str, torch.Tensor], values: dict[str, Any], fitted: LayerHwProxy, tmp_path: Path
) -> None:
    file = tmp_path / "proxy.safetensors"
    artifact, valid = fitted._serialize()
    record = json.dumps(artifact.to_dict() | values)
    contents = {name: tensor.contiguous() for name, tensor in (valid | tensors).items()}
    save_file(contents, file, metadata={"sparseflow": record})
    with pytest.raises(FileFormatError, match=r"proxy\.safetensors"):
        LayerHwProxy.load(file)


def test_invalid_query_is_refused() -> None:
    proxy = LayerHwProxy.analytic()
    with pytest.raises(InputError, match="`mode`"):
        proxy.predict_segment(LAYERS, GPU, mode="parallel")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="0"):
        proxy.predict_segment([], GPU)
    with pytest.raises(InputError, match="0"):
        proxy.predict_table(LAYERS, [])
    with pytest.raises(InputError):
        proxy.predict_pairs(LAYERS, [GPU])


def test_predict_table_of_many_layers_and_devices(fitted: LayerHwProxy) -> None:
    layers = [value.to_node(index) for index, value in enumerate(LayerGrid().sample(30))]
    result = fitted.predict_table(layers, [GPU, *read_library().chips, GPU])
    assert all(value.shape == (30, 8) and bool(np.isfinite(value).all()) for value in result.values())
    np.testing.assert_allclose(result["lat_ms"][:, 0], result["lat_ms"][:, -1])


def test_digest_covers_predictions_only(fitted: LayerHwProxy, tmp_path: Path) -> None:
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
        replace(fitted, roofline=replace(fitted.roofline, values=2.0 * fitted.roofline.values)),
        replace(fitted, power=fitted.power * 2.0),
        replace(fitted, workspace=fitted.workspace + 1.0),
        replace(fitted, devices=(replace(GPU, cores=1),)),
    ]
    assert len({fitted.digest, *(override.digest for override in overrides)}) == 1 + len(overrides)


@pytest.mark.parametrize("wrong", [{"weight_bytes": -1}, {"num_heads": -1}, {"mlp_ratio": float("nan")}])
def test_invalid_layer_is_named(wrong: dict[str, float]) -> None:
    layer = replace(LAYERS[2], **wrong)
    with pytest.raises(InputError, match=rf"{layer.name}"):
        LayerHwProxy.analytic().predict_table([layer], [GPU])
