"""Zoos: configurations, exports, what is kept and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("yaml")
pytest.importorskip("transformers")

import torch

from sparseflow.errors import DeviceError, FileFormatError, InputError, ModelError
from sparseflow.latency import sources, zoo
from sparseflow.latency.graph import analyze
from sparseflow.latency.zoo import SHIPPED, ZooConfig, export, load_config

HERE = "tests.latency.onnx_models"
TINY = {"name": "tiny", "source": f"{HERE}:tiny"}


def config(*models: Any, **more: Any) -> ZooConfig:
    return ZooConfig.model_validate({"models": list(models), "sizes": [8], **more})


def test_shipped_configurations() -> None:
    assert [c.name for c in load_config("resnet18").cases()] == [
        f"resnet18_b{batch}_{size}" for batch in (16, 64, 128) for size in (224, 320, 512)
    ]
    quick = load_config("quickstart").cases()
    assert len(quick) == 8 and {c.shape for c in quick} == {(1, 3, 160, 160), (1, 3, 224, 224)}
    assert len(load_config("all").cases()) == 90
    for name in SHIPPED:
        assert {m.name for m in load_config(name).models} <= set(sources.PRESETS)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("models: [", "not YAML"),
        ("- resnet18", "must be a mapping"),
        ("", "must be a mapping"),
        ("models: []", "models"),
        ("batches: [1]", "models"),
        ("models: [resnet18]\nbatch: 3", "batch"),
        ("models: [resnet18]\nbatches: [0]", "batches"),
        ("models: [resnet18, resnet18]", "same name"),
        ("models: [{name: ../escape}]", "name"),
        ("models: [{name: a, sauce: torchvision}]", "sauce"),
        ("models: [resnet18]\nexporter: magic", "exporter"),
        ("models: [resnet18]\nopset: 3", "opset"),
    ],
)
def test_wrong_configurations(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "zoo.yaml"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=says):
        load_config(path)


def test_no_configuration() -> None:
    with pytest.raises(InputError, match="these come with the package: resnet18"):
        load_config("absent.yaml")


def test_a_function_of_yours(tmp_path: Path) -> None:
    wide = {**TINY, "name": "wide", "config": {"wide": 6}, "batches": [3]}
    told: list[tuple[str, int, int]] = []
    results = export(config(TINY, wide, batches=[1, 2]), tmp_path, progress=lambda *a: told.append(a))
    assert [r.name for r in results] == ["tiny_b1_8", "tiny_b2_8", "wide_b3_8"]
    assert told[0] == ("tiny_b1_8", 0, 3) and told[-1][1:] == (3, 3)
    for result in results:
        assert result.path is not None and result.optimised_path is not None and not result.kept
        assert result.optimised_path.parent == tmp_path / "cpu"
    assert results[2].path is not None
    graph = analyze(results[2].path)
    assert graph.inputs[0].shape == (3, 3, 8, 8) and graph.outputs[0].shape == (3, 5)
    left = {p.name for p in tmp_path.rglob("*") if p.is_file()}
    names = ("tiny_b1_8", "tiny_b2_8", "wide_b3_8")
    assert left == {f"{n}.onnx" for n in names} | {f"{n}.json" for n in names}


def test_what_is_whole_is_kept(tmp_path: Path) -> None:
    (first,) = export(config(TINY), tmp_path)
    assert first.path is not None and first.optimised_path is not None
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    (again,) = export(config(TINY), tmp_path)
    assert again.kept and {p: p.stat().st_mtime_ns for p in before} == before

    def spoil_raw() -> None:
        assert first.path is not None
        first.path.write_bytes(first.path.read_bytes()[:-7])

    def lose_optimised() -> None:
        assert first.optimised_path is not None
        first.optimised_path.unlink()

    def spoil_record() -> None:
        assert first.optimised_path is not None
        first.optimised_path.with_suffix(".json").write_text("{")

    for damage in (spoil_raw, lose_optimised, spoil_record):
        damage()
        (mended,) = export(config(TINY), tmp_path)
        assert not mended.kept and mended.problem is None
        assert export(config(TINY), tmp_path)[0].kept
    assert not export(config(TINY, seed=1), tmp_path)[0].kept
    assert not export(config({**TINY, "config": {"wide": 5}}), tmp_path)[0].kept


def test_an_export_that_dies_leaves_nothing_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(zoo, "_compare", dies)
    with pytest.raises(KeyboardInterrupt):
        export(config(TINY), tmp_path)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
    monkeypatch.undo()
    assert export(config(TINY), tmp_path)[0].problem is None


def test_weights_come_from_the_seed_and_the_generator_is_left_alone(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    first, second, other = (
        export(config(TINY, seed=seed), tmp_path / str(i))[0].path for i, seed in enumerate((0, 0, 1))
    )
    assert first is not None and second is not None and other is not None
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("spec", "kind", "says"),
    [
        ({"name": "a", "source": f"{HERE}:absent"}, "InputError", "cannot be imported"),
        ({"name": "a", "source": "no.such.module:f"}, "InputError", "cannot be imported"),
        ({"name": "a", "source": f"{HERE}:FLOAT"}, "InputError", "not a function"),
        ({"name": "a", "source": "somewhere"}, "InputError", "package.module:factory"),
        ({**TINY, "config": {"tall": 1}}, "InputError", "cannot be called"),
        ({"name": "a", "source": f"{HERE}:not_a_network"}, "ModelError", "not a torch.nn.Module"),
        ({**TINY, "sizes": [9]}, "ModelError", "does not run on images"),
        ({"name": "a", "source": f"{HERE}:huge"}, "ModelError", "4.29 GB"),
        ({"name": "nonesuch"}, "InputError", "presets: resnet18"),
        ({"name": "resnet18", "config": {"depth": 3}}, "InputError", "no field depth"),
    ],
)
def test_what_fails_is_told_and_the_rest_goes_on(tmp_path: Path, spec: Any, kind: str, says: str) -> None:
    bad, good = export(config(spec, {**TINY, "name": "good"}), tmp_path)
    assert bad.error == kind and says in str(bad.problem) and bad.path is None
    assert good.problem is None and good.path is not None


def test_torchvision_is_optional_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(
        ModelError, match=r"`torchvision` is needed for resnet18.*source: transformers has resnet18"
    ):
        sources.build("torchvision", "resnet18", {}, size=64, seed=0)


def test_a_torchvision_made_for_another_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> ModuleType:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(sources.importlib, "import_module", broken)
    with pytest.raises(ModelError, match=r"does not fit this torch .*nms"):
        sources.build("torchvision", "resnet18", {}, size=64, seed=0)


def test_a_provider_that_is_absent_fails_before_any_work(tmp_path: Path) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    with pytest.raises(DeviceError, match="CUDAExecutionProvider was asked for"):
        export(config(TINY), tmp_path / "out", provider="cuda")
    assert not (tmp_path / "out").exists()


def test_a_disagreement_with_torch_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparseflow.latency import session

    monkeypatch.setattr(session, "run", lambda opened, outputs, feeds: [torch.zeros(1, 5).numpy() + 1e3])
    (result,) = export(config(TINY), tmp_path)
    assert result.error == "RunError" and "disagree on tiny_b1_8" in str(result.problem)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_the_record_says_how(tmp_path: Path) -> None:
    (result,) = export(config(TINY, opset=18), tmp_path)
    assert result.optimised_path is not None
    record = json.loads(result.optimised_path.with_suffix(".json").read_text())
    assert record["settings"]["opset"] == 18 and record["settings"]["provider"] == "CPUExecutionProvider"
    assert record["settings"]["versions"]["torch"].startswith(torch.__version__.partition("+")[0])


def test_the_dynamo_exporter(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    (result,) = export(config({**TINY, "exporter": "dynamo"}, opset=18), tmp_path)
    assert result.problem is None and result.path is not None
    assert analyze(result.path).counts()["Conv_Relu"] == 1
