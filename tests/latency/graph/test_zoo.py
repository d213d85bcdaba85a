"""Model zoos: configurations and exports."""

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

from sparseflow.core.config import list_configs
from sparseflow.errors import DeviceError, FileFormatError, InputError, ModelError
from sparseflow.latency.graph import networks, zoo
from sparseflow.latency.graph.analysis import analyze
from sparseflow.latency.graph.zoo import ZooConfig, export_zoo, load_zoo_config

HERE = "tests.latency.onnx_models"
TINY = {"name": "tiny", "source": f"{HERE}:tiny"}


def config(*models: Any, **more: Any) -> ZooConfig:
    return ZooConfig.model_validate({"models": list(models), "sizes": [8], **more})


def test_shipped_configs() -> None:
    assert [c.name for c in load_zoo_config("resnet18").list_cases()] == [
        f"resnet18_b{batch}_{size}" for batch in (16, 64, 128) for size in (224, 320, 512)
    ]
    quick = load_zoo_config("quickstart").list_cases()
    assert len(quick) == 8 and {c.shape for c in quick} == {(1, 3, 160, 160), (1, 3, 224, 224)}
    assert len(load_zoo_config("all").list_cases()) == 90
    for name in list_configs("sparseflow.latency"):
        assert {m.name for m in load_zoo_config(name).models} <= set(networks.PRESETS)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("models: [", "zoo.yaml"),
        ("- resnet18", "list"),
        ("", "NoneType"),
        ("models: []", "models"),
        ("batches: [1]", "models"),
        ("models: [resnet18]\nbatch: 3", "batch"),
        ("models: [resnet18]\nbatches: [0]", "batches"),
        ("models: [resnet18, resnet18]", "resnet18"),
        ("models: [{name: ../escape}]", "name"),
        ("models: [{name: a, sauce: torchvision}]", "sauce"),
        ("models: [resnet18]\nexporter: magic", "exporter"),
        ("models: [resnet18]\nopset: 3", "opset"),
    ],
)
def test_invalid_config_raises(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "zoo.yaml"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=field):
        load_zoo_config(path)


def test_missing_config_raises() -> None:
    with pytest.raises(InputError, match=r"resnet18"):
        load_zoo_config("absent.yaml")


def test_export_factory_function(tmp_path: Path) -> None:
    wide = {**TINY, "name": "wide", "config": {"wide": 6}, "batches": [3]}
    reports: list[tuple[str, float]] = []
    results = export_zoo(config(TINY, wide, batches=[1, 2]), tmp_path, progress=lambda *a: reports.append(a))
    assert [r.name for r in results] == ["tiny_b1_8", "tiny_b2_8", "wide_b3_8"]
    assert reports[0] == ("tiny_b1_8", 0.0) and reports[-1][1] == 1.0
    for result in results:
        assert result.path is not None and result.optimized_path is not None and not result.reused
        assert result.optimized_path.parent == tmp_path / "cpu"
    assert results[2].path is not None
    graph = analyze(results[2].path)
    assert graph.inputs[0].shape == (3, 3, 8, 8) and graph.outputs[0].shape == (3, 5)
    file_names = {p.name for p in tmp_path.rglob("*") if p.is_file()}
    names = ("tiny_b1_8", "tiny_b2_8", "wide_b3_8")
    assert file_names == {f"{n}.onnx" for n in names} | {f"{n}.json" for n in names}


def test_export_reuses_complete_files(tmp_path: Path) -> None:
    (first,) = export_zoo(config(TINY), tmp_path)
    assert first.path is not None and first.optimized_path is not None
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    (repeated,) = export_zoo(config(TINY), tmp_path)
    assert repeated.reused and {p: p.stat().st_mtime_ns for p in before} == before

    def spoil_raw() -> None:
        assert first.path is not None
        first.path.write_bytes(first.path.read_bytes()[:-7])

    def remove_optimized() -> None:
        assert first.optimized_path is not None
        first.optimized_path.unlink()

    def spoil_record() -> None:
        assert first.optimized_path is not None
        first.optimized_path.with_suffix(".json").write_text("{")

    for damage in (spoil_raw, remove_optimized, spoil_record):
        damage()
        (repaired,) = export_zoo(config(TINY), tmp_path)
        assert not repaired.reused and repaired.problem is None
        assert export_zoo(config(TINY), tmp_path)[0].reused
    assert not export_zoo(config(TINY, seed=1), tmp_path)[0].reused
    assert not export_zoo(config({**TINY, "config": {"wide": 5}}), tmp_path)[0].reused


def test_interrupted_export_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(zoo, "_check_output", dies)
    with pytest.raises(KeyboardInterrupt):
        export_zoo(config(TINY), tmp_path)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
    monkeypatch.undo()
    killed = tmp_path / ".export-tiny_b1_8-abc"
    killed.mkdir()
    (killed / "model.onnx").touch()
    assert export_zoo(config(TINY), tmp_path)[0].problem is None
    assert not killed.exists()


def test_export_depends_on_seed_only(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    first, second, other = (
        export_zoo(config(TINY, seed=seed), tmp_path / str(i))[0].path for i, seed in enumerate((0, 0, 1))
    )
    assert first is not None and second is not None and other is not None
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("spec", "error", "value"),
    [
        ({"name": "a", "source": f"{HERE}:absent"}, "InputError", "absent"),
        ({"name": "a", "source": "no.such.module:f"}, "InputError", "no.such.module"),
        ({"name": "a", "source": f"{HERE}:FLOAT"}, "InputError", "FLOAT"),
        ({"name": "a", "source": "somewhere"}, "InputError", "package.module:factory"),
        ({**TINY, "config": {"tall": 1}}, "InputError", "tall"),
        ({"name": "a", "source": f"{HERE}:not_a_network"}, "ModelError", "not_a_network"),
        ({**TINY, "sizes": [9]}, "ModelError", "[1, 3, 9, 9]"),
        ({"name": "a", "source": f"{HERE}:huge"}, "ModelError", "4.29 GB"),
        ({"name": "nonesuch"}, "InputError", "resnet18"),
        ({"name": "resnet18", "config": {"depth": 3}}, "InputError", "depth"),
    ],
)
def test_export_failure_does_not_stop_others(tmp_path: Path, spec: Any, error: str, value: str) -> None:
    bad, good = export_zoo(config(spec, {**TINY, "name": "good"}), tmp_path)
    assert bad.error == error and value in str(bad.problem) and bad.path is None
    assert good.problem is None and good.path is not None


def test_missing_torchvision_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ModelError, match=r"`torchvision`.*resnet18.*transformers has resnet18"):
        networks.build_network("torchvision", "resnet18", {}, image_size=64, seed=0)


def test_incompatible_torchvision_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> ModuleType:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(networks.importlib, "import_module", broken)
    with pytest.raises(ModelError):
        networks.build_network("torchvision", "resnet18", {}, image_size=64, seed=0)


def test_export_missing_provider_raises(tmp_path: Path) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    with pytest.raises(DeviceError, match=r"CUDAExecutionProvider"):
        export_zoo(config(TINY), tmp_path / "out", provider="cuda")
    assert not (tmp_path / "out").exists()


def test_export_output_mismatch_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparseflow.latency.graph import session

    monkeypatch.setattr(session, "run", lambda opened, outputs, feeds: [torch.zeros(1, 5).numpy() + 1e3])
    (result,) = export_zoo(config(TINY), tmp_path)
    assert result.error == "RunError" and "tiny_b1_8" in str(result.problem)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_export_record_contains_settings(tmp_path: Path) -> None:
    (result,) = export_zoo(config(TINY, opset=18), tmp_path)
    assert result.optimized_path is not None
    record = json.loads(result.optimized_path.with_suffix(".json").read_text())
    assert record["settings"]["opset"] == 18 and record["settings"]["provider"] == "CPUExecutionProvider"
    assert record["settings"]["versions"]["torch"].startswith(torch.__version__.partition("+")[0])


def test_export_dynamo(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    (result,) = export_zoo(config({**TINY, "exporter": "dynamo"}, opset=18), tmp_path)
    assert result.problem is None and result.path is not None
    assert analyze(result.path).count_ops()["Conv_Relu"] == 1
