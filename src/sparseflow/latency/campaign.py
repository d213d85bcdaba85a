"""What a collection measures and in which order: its configuration, its items and its plan.

::

    kernels: extracted/          # folders of kernels as `latency extract` writes them, or single files
    models: [resnet18.onnx]      # whole models, or folders of them
    provider: cpu
    threads: 1
    stressor: cpu-fma            # see sparseflow.core.load
    levels: [0, 0.3, 0.6, 0.9]
    rounds: 5

A *round* visits every level once, in an order drawn anew; each visit is a *block*, which measures every item
once, in an order drawn anew, and the reference item at its begin, at its end and in between. A machine that
drifts so slows all levels alike, and the reference shows by how much.

The plan is drawn from the seed once and then kept on disk, with the content of every file that is measured: a
collection that is taken up again runs what is left of the same plan or says what differs.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from sparseflow.core.config import describe_validation_error
from sparseflow.core.extras import require
from sparseflow.core.load import KINDS
from sparseflow.core.telemetry.schema import MIN_WINDOW_S
from sparseflow.errors import FileFormatError, InputError, ModelError
from sparseflow.latency import onnx_file, session
from sparseflow.latency.extract import METADATA_KEY
from sparseflow.latency.graph import KERNELS_FOLDER
from sparseflow.latency.kernels import Kernel

FORMAT, VERSION = "sparseflow.latency.collection", 1
MODEL_OP = "Model"
"""What stands in place of an operator for a whole model."""

COPIES = 48
"""By default on a GPU: two microseconds' work in each adds up to what can be told from the scatter."""

Level = Annotated[float, Field(ge=0.0, le=1.0)]
Paths = list[Path]
Progress = Callable[[str, float], None]


class Telemetry(BaseModel):
    """Where load is read from; arguments of `core.telemetry.readers.open_reader`, but for the GPU."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = "host"
    metrics: list[str] | None = None
    url: str | None = None
    labels: dict[str, str] | None = None
    max_age_s: float = 30.0


class Config(BaseModel):
    """Settings of a collection.

    Attributes:
        kernels: Files or folders of extracted kernels.
        models: Files or folders of whole models.
        provider: `"cpu"` or `"cuda"`.
        threads: Threads within an operator; None is onnxruntime's own choice.
        cpus: CPUs that both the measured work and a CPU load run on; by default all that may be used.
        gpu: Number of the GPU.
        conv_search: `cudnn_conv_algo_search` of the CUDA provider.
        stressor: Kind of load; on a GPU `gpu-matmul` unless told otherwise.
        levels: Shares of the device's time that the load takes while nothing else wants the device.
        steady_timeout_s: Longest wait for a level.
        rounds: How often each item is measured at each level.
        copies: On a GPU, copies of a kernel that are issued in one go to tell the device's time for it from
            the host's (`stream.py`); 0 leaves that out. At rest only.
        keep: Items that stay loaded from one visit to the next; memory must hold them all.
        warmup: Runs before the samples of a measurement.
        loops: Samples of a measurement at least.
        max_samples: About how many samples a measurement keeps: runs of some microseconds are timed several
            at a time, so that the mean is over all of them and the rows stay small.
        min_time_s: How long a measurement takes at least: several cycles of the load.
        max_time_s: When it ends even with fewer samples than `loops`.
        reference: Id of the item that shows drift; by default a kernel of middling work.
        reference_every: Items between two measurements of it.
        telemetry: Where load is read from; on a GPU its own counters unless told otherwise.
        seed: What orders and inputs are drawn from.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kernels: Paths = []
    models: Paths = []
    provider: str = "cpu"
    threads: Annotated[int, Field(ge=1)] | None = 1
    cpus: list[int] | None = None
    gpu: Annotated[int, Field(ge=0)] = 0
    conv_search: str = "EXHAUSTIVE"
    stressor: str = "cpu-fma"
    levels: Annotated[list[Level], Field(min_length=1)] = [0.0, 0.3, 0.6, 0.9]
    steady_timeout_s: Annotated[float, Field(gt=0.0)] = 30.0
    rounds: Annotated[int, Field(ge=1)] = 5
    copies: Annotated[int, Field(ge=0)] = 0
    keep: Annotated[int, Field(ge=0)] = 0
    warmup: Annotated[int, Field(ge=0)] = 5
    loops: Annotated[int, Field(ge=1)] = 20
    max_samples: Annotated[int, Field(ge=1)] = 2000
    min_time_s: Annotated[float, Field(ge=MIN_WINDOW_S)] = 0.3
    max_time_s: Annotated[float, Field(gt=0.0)] = 3.0
    reference: str | None = None
    reference_every: Annotated[int, Field(ge=1)] = 25
    telemetry: Telemetry = Telemetry()
    seed: int = 0

    @pydantic.field_validator("kernels", "models", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return [value] if isinstance(value, str | Path) else value

    @pydantic.model_validator(mode="before")
    @classmethod
    def _on_a_gpu(cls, given: Any) -> Any:
        """What is not told of a collection on a GPU has to do with it, and not with the CPU."""
        if isinstance(given, dict) and given.get("provider") in ("cuda", session.PROVIDERS["cuda"]):
            telemetry = given.get("telemetry", {})
            if isinstance(telemetry, dict):
                telemetry = {"source": "gpm"} | telemetry
            return {"copies": COPIES, "stressor": "gpu-matmul"} | given | {"telemetry": telemetry}
        return given

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Config:
        if not self.kernels and not self.models:
            raise ValueError("name at least one folder or file under `kernels` or `models`")
        if self.stressor not in KINDS:
            raise ValueError(f"`stressor` (={self.stressor!r}) must be one of: {', '.join(KINDS)}")
        if len(set(self.levels)) != len(self.levels):
            raise ValueError(f"`levels` (={self.levels}) names a level twice; raise `rounds` instead")
        if self.max_time_s < self.min_time_s:
            raise ValueError(f"`max_time_s` (={self.max_time_s}) must not be below `min_time_s`")
        if session.short_name(self.provider) == "cpu" and self.copies:
            raise ValueError(
                f"`copies` (={self.copies}) must be 0 on a CPU, which has done its work when the call returns"
            )
        return self


@dataclass(frozen=True, kw_only=True)
class Item:
    """Something to measure.

    Attributes:
        id: The kernel's id, or the file's name for a whole model.
        op: The kernel's canonical name, or `"Model"`.
        input_shape: Shapes of what is fed, `1x64x56x56`, several joined by `;`.
        path: Its file.
        sha256: Of the file.
        flops: Operations of a kernel, None for a model.
    """

    id: str
    op: str
    input_shape: str
    path: str
    sha256: str
    flops: float | None


@dataclass(frozen=True, kw_only=True)
class Step:
    """One measurement.

    Attributes:
        key: Unique within the plan, and sorted like it.
        block: Number of its block.
        round: Number of its round.
        level: Load beside it.
        item: What is measured.
        reference: Whether it shows drift, and is not a sample of its item.
    """

    key: str
    block: int
    round: int
    level: float
    item: Item
    reference: bool


@dataclass(frozen=True, kw_only=True)
class Block:
    """A visit to one level: the numbers of the items in order, and which steps are the reference's."""

    round: int
    level: float
    items: tuple[int, ...]
    reference: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that a collection measures, in order.

    Attributes:
        config: The settings, in JSON's types.
        items: What is measured.
        blocks: In the order in which they run.
        environment: The circumstances in which it was begun.
    """

    config: Mapping[str, Any]
    items: tuple[Item, ...]
    blocks: tuple[Block, ...]
    environment: Mapping[str, Any]

    def steps(self) -> Iterator[Step]:
        """Every measurement, in order."""
        for number, block in enumerate(self.blocks):
            for place, (index, reference) in enumerate(zip(block.items, block.reference, strict=True)):
                yield Step(
                    key=f"{number:04d}-{place:05d}",
                    block=number,
                    round=block.round,
                    level=block.level,
                    item=self.items[index],
                    reference=reference,
                )

    def to_dict(self) -> dict[str, Any]:
        """The plan in JSON's types."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, record: Any) -> Plan:
        """Read back what `to_dict` gave.

        Raises:
            FileFormatError: It is no such record, or of another version.
        """
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise FileFormatError("this is not the plan of a collection")
        if record.get("version") != VERSION:
            raise FileFormatError(
                f"the plan of the collection has version {record.get('version')}; {VERSION} is read here: "
                "collect into another folder"
            )
        try:
            return cls(
                config=record["config"],
                items=tuple(Item(**item) for item in record["items"]),
                blocks=tuple(
                    Block(
                        round=block["round"],
                        level=block["level"],
                        items=tuple(block["items"]),
                        reference=tuple(block["reference"]),
                    )
                    for block in record["blocks"]
                ),
                environment=record["environment"],
            )
        except (KeyError, TypeError) as error:
            raise FileFormatError(f"the plan of the collection is damaged: {error!r}") from error

    def check_same(self, other: Plan) -> None:
        """See that `other`, made now, is the plan that was begun.

        Raises:
            InputError: Settings, files or the device differ; the message says which.
        """
        advice = "collect into another folder, or put things back as they were"
        keys = self.config.keys() | other.config.keys()
        differing = sorted(key for key in keys if self.config.get(key) != other.config.get(key))
        if differing:
            raise InputError(
                f"the collection was begun with other settings: {', '.join(differing)}; {advice}"
            )
        before, now = ({item.id: item.sha256 for item in plan.items} for plan in (self, other))
        changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        if changed:
            raise InputError(
                f"{len(changed)} files differ from those that the collection was begun with, {changed[0]} "
                f"for one; {advice}"
            )
        began, here = (plan.environment.get("device_key") for plan in (self, other))
        if began != here:
            raise InputError(f"the collection was begun on {began}, and this is {here}; {advice}")


def read_config(path: Path | str) -> Config:
    """Settings from a YAML file; paths in it are relative to it.

    Raises:
        InputError: There is no such file.
        FileFormatError: It is not YAML, or a setting is unknown, missing or out of range.
    """
    yaml = require("yaml", "latency")
    file = Path(path)
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{file} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise FileFormatError(f"{file} must hold settings such as `kernels:` and `levels:`")
    try:
        config = Config.model_validate(content)
    except pydantic.ValidationError as error:
        raise FileFormatError(f"{file}: {describe_validation_error(error)}") from error
    here = file.parent.resolve()
    return config.model_copy(
        update={side: [here / entry for entry in getattr(config, side)] for side in ("kernels", "models")}
    )


def make_plan(config: Config, environment: Mapping[str, Any], progress: Progress | None = None) -> Plan:
    """The plan of a collection: the same one for the same settings and files.

    Args:
        config: The settings.
        environment: The circumstances.
        progress: Called with (file that is read, 0.0): nothing has been measured yet.

    Raises:
        InputError: There is nothing to measure, two models share a name, or the reference is not an item.
        FileFormatError, ModelError: A file cannot be used.
    """
    items = tuple(find_items(config, progress))
    reference = pick_reference(items, config.reference)
    generator = random.Random(config.seed)
    blocks = []
    for number in range(config.rounds):
        for level in generator.sample(config.levels, len(config.levels)):
            order = generator.sample(range(len(items)), len(items))
            steps: list[tuple[int, bool]] = [(reference, True)]
            for place, index in enumerate(order, start=1):
                steps.append((index, False))
                if place % config.reference_every == 0 or place == len(order):
                    steps.append((reference, True))
            blocks.append(
                Block(
                    round=number,
                    level=level,
                    items=tuple(index for index, _ in steps),
                    reference=tuple(is_reference for _, is_reference in steps),
                )
            )
    plain = json.loads(config.model_dump_json())
    return Plan(config=plain, items=items, blocks=tuple(blocks), environment=dict(environment))


def find_items(config: Config, progress: Progress | None = None) -> list[Item]:
    """What the settings name, each kernel once however many models hold it.

    Args, Raises: as `make_plan`.
    """
    tell = progress or (lambda what, done: None)
    kernels: dict[str, Item] = {}
    for path in _files(config.kernels, True):
        tell(f"reading {path.name}", 0.0)
        item = _item(path, True)
        kernels[item.id] = item
    models: dict[str, Item] = {}
    for path in _files(config.models, False):
        tell(f"reading {path.name}", 0.0)
        item = _item(path, False)
        if item.id in models and models[item.id].sha256 != item.sha256:
            raise InputError(f"{path} and {models[item.id].path} are two models of one name; rename one")
        models[item.id] = item
    found = [*kernels.values(), *models.values()]
    if not found:
        raise InputError(
            "`kernels` and `models` hold no .onnx file; make some with: sparseflow latency extract"
        )
    return sorted(found, key=lambda item: (item.op == MODEL_OP, item.id))


def _files(entries: Paths, kernels: bool) -> Iterator[Path]:
    for entry in entries:
        if entry.is_dir():
            # Beside the folder of kernels stands the whole optimised graph, which is none.
            inner = entry / KERNELS_FOLDER
            yield from sorted((inner if kernels and inner.is_dir() else entry).glob("*.onnx"))
        elif entry.is_file():
            yield entry
        else:
            raise InputError(f"there is no file or folder {entry}")


def _item(path: Path, kernel: bool) -> Item:
    model = onnx_file.load(path)
    try:
        onnx_file.fix_inputs(model, {})
    except InputError as error:
        raise ModelError(f"{path}: a collection needs inputs of fixed extents: {error}") from error
    record = next((entry.value for entry in model.metadata_props if entry.key == METADATA_KEY), None)
    if kernel and record is None:
        raise FileFormatError(f"{path} is not a kernel that `latency extract` wrote; list it under `models`")
    shapes = (
        "x".join(str(dim.dim_value) for dim in value.type.tensor_type.shape.dim) or "scalar"
        for value in onnx_file.true_inputs(model)
    )
    described = None
    if kernel and record is not None:
        try:
            described = Kernel.from_dict(json.loads(record))
        except ValueError as error:
            raise FileFormatError(f"{path} holds a damaged kernel record: {error}") from error
    return Item(
        id=described.id if described else path.stem,
        op=described.op if described else MODEL_OP,
        input_shape=";".join(shapes),
        path=str(path.resolve()),
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        flops=described.flops if described else None,
    )


def pick_reference(items: tuple[Item, ...], asked: str | None) -> int:
    """Place of the item that shows drift: the one asked for, or a kernel of middling work.

    Raises:
        InputError: None of the items has the id that was asked for.
    """
    if asked is not None:
        for index, item in enumerate(items):
            if item.id == asked:
                return index
        raise InputError(f"`reference` (={asked!r}) is none of the {len(items)} items; name one by its id")
    ranked = sorted(range(len(items)), key=lambda index: (items[index].flops or 0.0, items[index].id))
    kernels = [index for index in ranked if items[index].flops]
    return kernels[len(kernels) // 2] if kernels else ranked[0]
