"""Settings: what ships can be used, what is wrong is named, and what is written comes back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from sparseflow.codesign.design.config import Lambdas, Schedule, Settings, read_settings, settings_of, shipped
from sparseflow.codesign.design.hardware import Hardware
from sparseflow.codesign.hardware.chips import read_library
from sparseflow.codesign.joint.trainer import JointTrainer
from sparseflow.codesign.partition.split_search import PartitionConfig
from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.settings import settings_of as settings_of_task
from tests.codesign.toys import QUICK, Toy, hardware, quick


def test_what_ships_can_be_used() -> None:
    assert shipped() == ["version_c"]
    found = read_settings("version_c")
    task = settings_of_task(found.task, "`task`")
    hw = Hardware(found)
    assert hw.first.name == "npu-m" and hw.slots == 8 and len(hw.chips) == 4
    # The hardware's batch can be trained, and every phase of the schedule is reached.
    schedule = found.guard_schedule()
    assert schedule.settle + schedule.ramp < task.train.epochs
    assert {each.name for each in hw.chips} < {chip.name for chip in read_library().chips}


def test_defaults_are_those_of_the_document() -> None:
    found = settings_of({"task": {}})
    assert found.partition_config() == PartitionConfig() and found.lambdas() == Lambdas()
    assert found.guard_schedule() == Schedule() and found.mapping.mode == "balanced"
    assert found.joint.use_fine_split and found.joint.hw_every == 1
    names = [chip.name for chip in Hardware(settings_of({"task": {}, "hardware": {"slots": 2}})).chips]
    assert names == [chip.name for chip in read_library().chips]


def test_parts_become_what_they_are_of() -> None:
    found = settings_of({
        "task": {"a": {1: 2}}, "partition": {"max_split_layers": 2, "w_comm": 0.5, "segments": 7},
        "loss": {"lambda_T": 3}, "schedule": {"settle": 2, "most": 0.25},
    })  # fmt: skip
    config = found.partition_config()
    assert (config.max_split_layers, config.w_comm, config.segments) == (2, 0.5, 7)
    assert type(config.max_split_layers) is type(config.segments) is int
    assert found.lambdas() == Lambdas(lambda_T=3.0)
    assert found.guard_schedule() == Schedule(settle=2, most=0.25)
    assert type(found.guard_schedule().settle) is int


@pytest.mark.parametrize("content", [QUICK, {"task": {"ast": {"stages": {1: 0.5}}, "deep": [1, None, "x"]}}])
def test_there_and_back(content: dict[str, Any]) -> None:
    found = settings_of(content)
    told = json.loads(json.dumps(found.model_dump(mode="json")))
    again = settings_of(told)
    assert again.model_dump(mode="json") == told
    assert again.model_copy(update={"task": {}}) == found.model_copy(update={"task": {}})


def test_a_file_and_changes_that_go_before_it(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(json.dumps(QUICK))
    found = read_settings(tmp_path / "mine.yaml", {"hardware.slots": 2, "loss.lambda_T": 4.0, "task.x": 1})
    assert (found.hardware.slots, found.lambdas().lambda_T, found.task) == (2, 4.0, {"x": 1})
    assert read_settings(tmp_path / "mine.yaml") == settings_of(QUICK)
    with pytest.raises(InputError, match=r"hardware\.slots"):
        read_settings(tmp_path / "mine.yaml", {"hardware.slots": 0})
    with pytest.raises(InputError, match=r"`hardware\.slots\.x`"):
        read_settings(tmp_path / "mine.yaml", {"hardware.slots.x": 0})
    with pytest.raises(InputError, match="version_c"):
        read_settings("nothing")
    (tmp_path / "list.yaml").write_text("[1, 2]")
    with pytest.raises(FileFormatError):
        read_settings(tmp_path / "list.yaml")
    (tmp_path / "torn.yaml").write_text("task: {")
    with pytest.raises(FileFormatError, match=r"torn\.yaml"):
        read_settings(tmp_path / "torn.yaml")


def test_a_library_is_no_configuration() -> None:
    with pytest.raises(InputError, match="task"):
        read_settings("chips")


WRONG = [
    # Missing or unknown.
    ({"task": None}, r"task: "),
    ({"tasks": {}}, r"tasks: Extra inputs"),
    ({"hardware": {"slot": 3}}, r"hardware\.slot: Extra inputs"),
    ({"mapping": {"modes": "serial"}}, r"mapping\.modes: Extra"),
    ({"wafer": {"radius": 3}}, r"wafer\.radius: Extra"),
    ({"joint": {"epochs": 3}}, r"joint\.epochs: Extra"),
    ({"partition": {"w_lat": 1.0}}, r"partition has no w_lat; it has: w_latency, "),
    ({"loss": {"lambda_t": 1.0, "b": 2}}, r"loss has no b, lambda_t; it has: lambda_T, "),
    ({"schedule": {"rise": 3}}, r"schedule has no rise; it has: settle, ramp, most, epsilon, good_epochs"),
    # Negative, or out of range.
    ({"hardware": {"slots": 0}}, r"hardware\.slots: .*greater than or equal to 1"),
    ({"hardware": {"slots": -3}}, r"hardware\.slots"),
    ({"hardware": {"batch": 0}}, r"hardware\.batch"),
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
    ({"partition": {"w_comm": -1.0}}, r"`w_comm` \(=-1\.0\) must be finite and not negative"),
    ({"partition": {"max_groups_per_layer": 1}}, r"`max_groups_per_layer` \(=1\) must be at least 2"),
    ({"partition": {"segments": 2.5}}, r"`segments` \(=2\.5\) must be a whole number"),
    ({"loss": {"lambda_T": -1.0}}, r"`lambda_T` \(=-1\.0\) must be finite and not negative"),
    ({"schedule": {"settle": 0}}, r"`settle` \(=0\)"),
    ({"schedule": {"ramp": 1.5}}, r"`ramp` \(=1\.5\) must be a whole number"),
    ({"schedule": {"most": -1}}, r"`most` \(=-1"),
    ({"schedule": {"epsilon": 1.0}}, r"`epsilon` \(=1\.0\)"),
    ({"schedule": {"settle": "two"}}, r"schedule\.settle"),
    # Not finite.
    ({"loss": {"lambda_T": math.inf}}, r"loss\.lambda_T: .*finite"),
    ({"schedule": {"settle": math.inf}}, r"schedule\.settle: .*finite"),
    ({"partition": {"segments": math.nan}}, r"partition\.segments: .*finite"),
    ({"wafer": {"radius_mm": math.inf}}, r"wafer\.radius_mm: .*finite"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), WRONG)
def test_what_is_wrong_is_named_and_where(content: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=rf".*{message}"):
        settings_of({"task": {}} | content, "mine.yaml")


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ({"partition": {"max_split_layers": 2.5}}, "partition"), ({"loss": {"lambda_T": -1.0}}, "loss"),
        ({"schedule": {"ramp": 1.5}}, "schedule"), ({"schedule": {"rise": 3}}, "schedule"),
        ({"hardware": {"chips": ["npu-s", "npu-m", "npu-s"]}}, "hardware.chips"),
        ({"hardware": {"slots": 2.5}}, "hardware.slots"),
        ({"joint": {"plan_every": 1.5}}, "joint.plan_every"),
    ],
)  # fmt: skip
def test_where_something_is_wrong_is_told(content: dict[str, Any], where: str) -> None:
    with pytest.raises(InputError, match=rf"{where}"):
        settings_of({"task": {}} | content, "mine.yaml")


def test_a_chip_that_is_named_twice_is_refused() -> None:
    with pytest.raises(InputError):
        settings_of({"task": {}, "hardware": {"chips": ["npu-s", "npu-m", "npu-s"]}})


def test_a_task_is_needed() -> None:
    with pytest.raises(InputError, match="task"):
        settings_of({})
    for whole in ([], None, 3):
        with pytest.raises(InputError):
            settings_of(whole)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("tau", [[0.0, 0.3], [2.0, 0.0], [-1.0, 0.3], [2.0, -0.3]])
def test_a_temperature_is_above_0(tau: list[float], tmp_path: Path) -> None:
    # Where the settings take it, the trainer must not.
    with pytest.raises(InputError, match="tau"):
        settings = quick(joint={"tau": tau})
        JointTrainer(Toy(), Hardware(settings), settings, tmp_path)


@pytest.mark.parametrize(
    "changes", [{"mapping": {"strategy": "guess"}}, {"hardware": {"chips": ["npu-s"] * 2}}]
)
def test_what_only_the_hardware_can_tell(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        hardware(**changes)


def test_settings_do_not_change() -> None:
    found = quick()
    for part, name in ((found, "joint"), (found.joint, "seed"), (found.hardware, "slots")):
        with pytest.raises(ValueError, match="frozen"):
            setattr(part, name, 1)
    assert isinstance(found, Settings)
