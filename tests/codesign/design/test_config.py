"""Tests of `codesign.design.config`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from sparseflow.codesign.design.config import (
    CodesignConfig,
    HwLossSchedule,
    Lambdas,
    read_config,
)
from sparseflow.codesign.design.hardware import Hardware
from sparseflow.codesign.hardware.chips import read_library
from sparseflow.codesign.joint.trainer import JointTrainer
from sparseflow.codesign.partition.split_search import PartitionConfig
from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.config import parse_config as settings_of_task
from tests.codesign.toys import QUICK, Toy, hardware, parse_config, quick


def test_shipped_config_builds_hardware() -> None:
    config = read_config("version_c")
    task = settings_of_task(config.task, "`task`")
    hw = Hardware(config)
    assert hw.initial_chip.name == "npu-m" and hw.num_slots == 8 and len(hw.chips) == 4
    # The hardware's batch can be trained, and every phase of the schedule is reached.
    schedule = config.schedule
    assert schedule.warmup_epochs + schedule.ramp_epochs < task.train.epochs
    assert {item.name for item in hw.chips} < {chip.name for chip in read_library().chips}


def test_config_defaults() -> None:
    config = parse_config({"task": {}})
    assert config.partition == PartitionConfig() and config.loss == Lambdas()
    assert config.schedule == HwLossSchedule() and config.mapping.mode == "balanced"
    assert config.joint.use_fine_split and config.joint.hw_every == 1
    names = [chip.name for chip in Hardware(parse_config({"task": {}, "hardware": {"slots": 2}})).chips]
    assert names == [chip.name for chip in read_library().chips]


def test_config_sections_become_dataclasses() -> None:
    result = parse_config({
        "task": {"a": {1: 2}}, "partition": {"max_split_layers": 2, "w_comm": 0.5, "segments": 7},
        "loss": {"lambda_T": 3}, "schedule": {"warmup_epochs": 2, "max_weight": 0.25},
    })  # fmt: skip
    config = result.partition
    assert (config.max_split_layers, config.w_comm, config.segments) == (2, 0.5, 7)
    assert type(config.max_split_layers) is type(config.segments) is int
    assert result.loss == Lambdas(lambda_T=3.0)
    assert result.schedule == HwLossSchedule(warmup_epochs=2, max_weight=0.25)
    assert type(result.schedule.warmup_epochs) is int


@pytest.mark.parametrize("content", [QUICK, {"task": {"ast": {"stages": {1: 0.5}}, "deep": [1, None, "x"]}}])
def test_config_json_round_trip(content: dict[str, Any]) -> None:
    config = parse_config(content)
    record = json.loads(json.dumps(config.model_dump(mode="json")))
    repeated = parse_config(record)
    assert repeated.model_dump(mode="json") == record
    assert repeated.model_copy(update={"task": {}}) == config.model_copy(update={"task": {}})


def test_read_config_applies_overrides(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(json.dumps(QUICK))
    config = read_config(tmp_path / "mine.yaml", {"hardware.slots": 2, "loss.lambda_T": 4.0, "task.x": 1})
    assert (config.hardware.slots, config.loss.lambda_T, config.task) == (2, 4.0, {"x": 1})
    assert read_config(tmp_path / "mine.yaml") == parse_config(QUICK)
    with pytest.raises(InputError, match=r"hardware\.slots"):
        read_config(tmp_path / "mine.yaml", {"hardware.slots": 0})
    with pytest.raises(InputError, match=r"`hardware\.slots\.x`"):
        read_config(tmp_path / "mine.yaml", {"hardware.slots.x": 0})
    with pytest.raises(InputError, match="version_c"):
        read_config("nothing")
    (tmp_path / "list.yaml").write_text("[1, 2]")
    with pytest.raises(FileFormatError):
        read_config(tmp_path / "list.yaml")
    (tmp_path / "torn.yaml").write_text("task: {")
    with pytest.raises(FileFormatError, match=r"torn\.yaml"):
        read_config(tmp_path / "torn.yaml")


def test_read_config_of_a_chip_library_is_refused() -> None:
    with pytest.raises(InputError, match="chips: Extra inputs"):
        read_config("chips")


WRONG = [
    # Missing or unknown.
    ({"task": None}, r"task: "),
    ({"tasks": {}}, r"tasks: Extra inputs"),
    ({"hardware": {"slot": 3}}, r"hardware\.slot: Extra inputs"),
    ({"mapping": {"modes": "serial"}}, r"mapping\.modes: Extra"),
    ({"wafer": {"radius": 3}}, r"wafer\.radius: Extra"),
    ({"joint": {"epochs": 3}}, r"joint\.epochs: Extra"),
    ({"partition": {"w_lat": 1.0}}, r"partition\.w_lat: Unexpected"),
    ({"loss": {"lambda_t": 1.0, "b": 2}}, r"loss\.lambda_t: Unexpected"),
    ({"schedule": {"rise": 3}}, r"schedule\.rise: Unexpected"),
    # Negative, or out of range.
    ({"hardware": {"slots": 0}}, r"hardware\.slots: .*greater than or equal to 1"),
    ({"hardware": {"slots": -3}}, r"hardware\.slots"),
    ({"hardware": {"slots": 10**12}}, r"hardware\.slots: .*less than or equal to 1024"),
    ({"hardware": {"batch_size": 0}}, r"hardware\.batch_size"),
    ({"hardware": {"chips": "npu-s"}}, r"hardware\.chips"),
    ({"hardware": {"links": [[0, 1]]}}, r"hardware\.links\.0"),
    ({"mapping": {"mode": "fast"}}, r"mapping\.mode: .*'balanced' or 'serial'"),
    ({"mapping": {"time_limit_s": 0.0}}, r"mapping\.time_limit_s"),
    ({"wafer": {"radius_mm": -1.0}}, r"wafer\.radius_mm"),
    ({"wafer": {"margin_mm": -0.1}}, r"wafer\.margin_mm"),
    ({"wafer": {"sigma_mm": 0.0}}, r"wafer\.sigma_mm"),
    ({"wafer": {"w_comm": -1.0}}, r"wafer\.w_comm"),
    ({"wafer": {"restarts": 0}}, r"wafer\.restarts"),
    ({"wafer": {"refine_steps": -1}}, r"wafer\.refine_steps"),
    ({"joint": {"alpha_steps": -1}}, r"joint\.alpha_steps"),
    ({"joint": {"alpha_rate": 0.0}}, r"joint\.alpha_rate"),
    ({"joint": {"plan_every": 0}}, r"joint\.plan_every"),
    ({"joint": {"hw_every": 0}}, r"joint\.hw_every"),
    ({"joint": {"seed": -1}}, r"joint\.seed"),
    ({"joint": {"tau": [1.0]}}, r"joint\.tau"),
    ({"partition": {"w_comm": -1.0}}, r"`w_comm` \(=-1\.0\)"),
    ({"partition": {"max_groups_per_layer": 1}}, r"`max_groups_per_layer` \(=1\)"),
    ({"partition": {"segments": 2.5}}, r"partition\.segments: .*integer"),
    ({"loss": {"lambda_T": -1.0}}, r"`lambda_T` \(=-1\.0\)"),
    ({"schedule": {"warmup_epochs": 0}}, r"`warmup_epochs` \(=0\)"),
    ({"schedule": {"ramp_epochs": 1.5}}, r"schedule\.ramp_epochs: .*integer"),
    ({"schedule": {"max_weight": -1}}, r"`max_weight` \(=-1"),
    ({"schedule": {"epsilon": 1.1}}, r"`epsilon` \(=1\.1\)"),
    ({"schedule": {"warmup_epochs": "two"}}, r"schedule\.warmup_epochs"),
    # Not finite.
    ({"loss": {"lambda_T": math.inf}}, r"loss\.lambda_T: .*finite"),
    ({"schedule": {"warmup_epochs": math.inf}}, r"schedule\.warmup_epochs: .*finite"),
    ({"partition": {"segments": math.nan}}, r"partition\.segments: .*finite"),
    ({"wafer": {"radius_mm": math.inf}}, r"wafer\.radius_mm: .*finite"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), WRONG)
def test_invalid_config_names_field_and_value(content: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=rf".*{message}"):
        parse_config({"task": {}} | content, "mine.yaml")


@pytest.mark.parametrize(
    ("content", "location"),
    [
        ({"partition": {"max_split_layers": 2.5}}, "partition"), ({"loss": {"lambda_T": -1.0}}, "loss"),
        ({"schedule": {"ramp_epochs": 1.5}}, "schedule"), ({"schedule": {"rise": 3}}, "schedule"),
        ({"hardware": {"chips": ["npu-s", "npu-m", "npu-s"]}}, "hardware.chips"),
        ({"hardware": {"slots": 2.5}}, "hardware.slots"),
        ({"joint": {"plan_every": 1.5}}, "joint.plan_every"),
    ],
)  # fmt: skip
def test_invalid_config_names_section(content: dict[str, Any], location: str) -> None:
    with pytest.raises(InputError, match=rf"{location}"):
        parse_config({"task": {}} | content, "mine.yaml")


def test_duplicate_chip_is_refused() -> None:
    with pytest.raises(InputError):
        parse_config({"task": {}, "hardware": {"chips": ["npu-s", "npu-m", "npu-s"]}})


def test_config_without_content_is_refused() -> None:
    for full in ([], None, 3):
        with pytest.raises(InputError):
            parse_config(full)


@pytest.mark.parametrize("tau", [[0.0, 0.3], [2.0, 0.0], [-1.0, 0.3], [2.0, -0.3]])
def test_temperature_of_zero_or_less_is_refused(tau: list[float], tmp_path: Path) -> None:
    # Where the settings take it, the trainer must not.
    with pytest.raises(InputError, match="tau"):
        settings = quick(joint={"tau": tau})
        JointTrainer(Toy(), Hardware(settings), settings, tmp_path)


@pytest.mark.parametrize(
    "changes", [{"mapping": {"strategy": "guess"}}, {"hardware": {"chips": ["npu-s"] * 2}}]
)
def test_hardware_refuses_unknown_names(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        hardware(**changes)


def test_config_is_immutable() -> None:
    config = quick()
    for part, name in ((config, "joint"), (config.joint, "seed"), (config.hardware, "slots")):
        with pytest.raises(ValueError, match="frozen"):
            setattr(part, name, 1)
    assert isinstance(config, CodesignConfig)
