"""The plan of a collection: its targets and the order of all measurements.

A round measures every level once, in random order. Each level is one block, which measures every target once,
in random order, and the reference at its start, at its end and in between. Drift of the machine then affects
all levels equally, and the reference shows its size.

The plan is created once from the seed and stored with the digest of every measured file. A resumed collection
completes the same plan, or reports the differences.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import model_validator

from sparseflow.core.artifact import Artifact
from sparseflow.core.progress import Progress
from sparseflow.errors import FileFormatError, InputError
from sparseflow.latency.graph import onnx_file
from sparseflow.latency.graph.analysis import KERNELS_FOLDER
from sparseflow.latency.graph.dimensions import is_size, list_names, resolve_shapes, select_for_model
from sparseflow.latency.graph.extraction import is_kernel_model, read_inputs, read_kernel
from sparseflow.latency.graph.inputs import is_open, list_extents
from sparseflow.latency.measure.config import CollectionConfig, Paths

MODEL_OP = "Model"
"""Operator name of a full model."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A kernel or model to measure.

    Attributes:
        id: Id of the kernel, or name of the model's file.
        op: Canonical name of the kernel, or `"Model"`.
        input_shape: Input shapes such as `1x64x56x56`, joined by `;`.
        path: File.
        sha256: Digest of the file.
        flops: Operations of a kernel, None for a model.
        shapes: Input -> shape.
        sizes: Keys of the settings `shapes` that apply, inputs or open dimensions, alone or as MODEL:NAME.
    """

    id: str
    op: str
    input_shape: str
    path: str
    sha256: str
    flops: float | None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    sizes: tuple[str, ...] = ()

    @property
    def input_keys(self) -> set[str]:
        """Names of the inputs of a model, alone and as MODEL:INPUT, and `sizes`."""
        return {*self.shapes, *(f"{self.id}:{name}" for name in self.shapes), *self.sizes}

    def select_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return input -> value of a model, from the values of all models."""
        return select_for_model(values, self.id, self.shapes)


@dataclass(frozen=True, kw_only=True)
class PlanStep:
    """One measurement.

    Attributes:
        key: Unique key; keys sort in the order of the plan.
        block: Index of the block.
        round: Index of the round.
        level: Load during the measurement.
        target: Measured target.
        reference: Whether the step shows drift and is not a sample of its target.
    """

    key: str
    block: int
    round: int
    level: float
    target: Target
    reference: bool


@dataclass(frozen=True, kw_only=True)
class PlanBlock:
    """Measurements at one level: indices of the targets in order, and whether each step is the reference."""

    round: int
    level: float
    targets: tuple[int, ...]
    reference: tuple[bool, ...]


class CollectionPlan(Artifact):
    """All measurements of a collection, in order.

    Attributes:
        config: Settings, in JSON types.
        targets: Kernels and models to measure.
        blocks: Blocks in execution order.
        environment: Environment at the start of the collection.
        problems: File that cannot be measured -> message.
    """

    FORMAT: ClassVar[str] = "sparseflow.latency.collection"
    VERSION: ClassVar[int] = 2
    HINT: ClassVar[str] = "run `sparseflow latency collect` again, into another directory"

    config: Mapping[str, Any]
    targets: tuple[Target, ...]
    blocks: tuple[PlanBlock, ...]
    environment: Mapping[str, Any]
    problems: Mapping[str, str] = {}

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        for block in self.blocks:
            fits = all(0 <= index < len(self.targets) for index in block.targets)
            if not fits or len(block.targets) != len(block.reference):
                raise ValueError("a block has a target that does not exist, or another number of references")
        return self

    def iter_steps(self) -> Iterator[PlanStep]:
        """Yield every measurement, in order."""
        for block_index, block in enumerate(self.blocks):
            for position, (index, reference) in enumerate(zip(block.targets, block.reference, strict=True)):
                yield PlanStep(
                    key=f"{block_index:04d}-{position:05d}",
                    block=block_index,
                    round=block.round,
                    level=block.level,
                    target=self.targets[index],
                    reference=reference,
                )

    def check_equal(self, other: CollectionPlan) -> None:
        """Check that `other`, created now, is the plan that was started.

        Raises:
            InputError: Settings, files or the device differ; the message says which.
        """
        advice = "collect into another directory, or restore the previous settings and files"
        differing = _list_differences(self.config, other.config)
        if differing:
            raise InputError(
                f"the collection was started with other settings: {', '.join(differing)}; {advice}"
            )
        previous, current = ({target.id: target.sha256 for target in plan.targets} for plan in (self, other))
        changed = _list_differences(previous, current)
        if changed:
            raise InputError(
                f"{len(changed)} files changed since the start of the collection, such as {changed[0]}; "
                f"{advice}"
            )
        started_on, device = (plan.environment.get("device_key") for plan in (self, other))
        if started_on != device:
            raise InputError(f"the collection was started on {started_on}, not on {device}; {advice}")


def make_plan(
    config: CollectionConfig,
    environment: Mapping[str, Any],
    progress: Progress | None = None,
    *,
    exclude: Mapping[str, str] | None = None,
) -> CollectionPlan:
    """Create the plan of a collection; equal settings and files give equal plans.

    Args:
        config: Settings.
        environment: Environment.
        progress: Receives each file that is read and 0.0, since nothing has been measured.
        exclude: File that cannot be measured -> message.

    Raises:
        InputError: There is nothing to measure, two models share a name, the reference is not a target, or no
            model has an input of `shapes` or `inputs`.
        FileFormatError, ModelError: The only file is invalid.
    """
    problems = dict(exclude or {})
    targets = tuple(find_targets(config, progress, problems))
    if not problems:
        _check_inputs_used(config, targets)
    reference = select_reference(targets, config.reference)
    generator = random.Random(config.seed)
    blocks = []
    for round_index in range(config.rounds):
        for level in generator.sample(config.levels, len(config.levels)):
            order = generator.sample(range(len(targets)), len(targets))
            steps: list[tuple[int, bool]] = [(reference, True)]
            for position, index in enumerate(order, start=1):
                steps.append((index, False))
                if position % config.reference_every == 0 or position == len(order):
                    steps.append((reference, True))
            blocks.append(
                PlanBlock(
                    round=round_index,
                    level=level,
                    targets=tuple(index for index, _ in steps),
                    reference=tuple(is_reference for _, is_reference in steps),
                )
            )
    return CollectionPlan(
        config=json.loads(config.model_dump_json()),
        targets=targets,
        blocks=tuple(blocks),
        environment=dict(environment),
        problems=problems,
    )


def find_targets(
    config: CollectionConfig, progress: Progress | None = None, problems: dict[str, str] | None = None
) -> list[Target]:
    """List the targets of a configuration; a kernel of several models occurs once.

    Args:
        config: Settings.
        progress: As `make_plan`.
        problems: File -> message. These files are skipped, and invalid files are added; None raises instead.

    Raises:
        InputError: As `make_plan`.
        FileFormatError, ModelError: A file is invalid, and `problems` is None or there is no other file.
    """
    skipped = {} if problems is None else problems
    first_problem: Exception | None = None
    kernels: dict[str, Target] = {}
    models: dict[str, Target] = {}
    for paths, are_kernels in ((config.kernels, True), (config.models, False)):
        for path in _iter_files(paths, are_kernels):
            if str(path.resolve()) in skipped:
                continue
            if progress is not None:
                progress(f"reading {path.name}", 0.0)
            try:
                target = _read_target(path, are_kernels, config)
            except InputError as error:
                if problems is None:
                    raise
                first_problem = first_problem or error
                skipped[str(path.resolve())] = str(error)
                continue
            if are_kernels:
                kernels[target.id] = target
                continue
            if target.id in models and models[target.id].sha256 != target.sha256:
                raise InputError(
                    f"{path} and {models[target.id].path} are different models of the same name; rename one"
                )
            models[target.id] = target
    targets = [*kernels.values(), *models.values()]
    if not targets and first_problem is not None and len(skipped) == 1:
        raise first_problem
    if not targets and skipped:
        path, problem = next(iter(skipped.items()))
        raise InputError(f"none of {len(skipped)} files can be measured; {path}: {problem}")
    if not targets:
        raise InputError(
            "`kernels` and `models` contain no .onnx file; create some with `sparseflow latency extract`"
        )
    return sorted(targets, key=lambda target: (target.op == MODEL_OP, target.id))


def select_reference(targets: Sequence[Target], requested_id: str | None) -> int:
    """Return the index of the target that shows drift: the requested one, or a kernel of median work.

    Raises:
        InputError: No target has the requested id.
    """
    if requested_id is not None:
        for index, target in enumerate(targets):
            if target.id == requested_id:
                return index
        raise InputError(
            f"`reference` (={requested_id!r}) must be the id of one of the {len(targets)} targets"
        )
    ranked = sorted(range(len(targets)), key=lambda index: (targets[index].flops or 0.0, targets[index].id))
    kernels = [index for index in ranked if targets[index].flops]
    return kernels[len(kernels) // 2] if kernels else ranked[0]


def _check_inputs_used(config: CollectionConfig, targets: Sequence[Target]) -> None:
    """Check that each shape and value of a configuration is that of a model's input.

    Raises:
        InputError: One is not.
    """
    unknown = {*config.shapes, *config.inputs}.difference(*(target.input_keys for target in targets))
    if unknown:
        raise InputError(
            "`shapes` or `inputs`: no model has an input or open dimension "
            f"{', '.join(sorted(unknown))}; the inputs are: "
            f"{', '.join(sorted({name for target in targets for name in target.shapes}))}"
        )
    applied = {key for target in targets for key in target.sizes}
    for key, shape in config.shapes.items():
        declared = {target.shapes[key] for target in targets if key in target.shapes}
        if key not in applied and tuple(shape) not in declared:
            raise InputError(
                f"the shape {shape} of `{key}` fits no model; the declared shapes are: "
                f"{', '.join(map(str, sorted(map(list, declared))))}"
            )


def _list_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def list_models(entries: Paths) -> list[Path]:
    """List the ONNX files among files and directories.

    Raises:
        InputError: An entry does not exist.
    """
    return list(_iter_files(entries, are_kernels=False))


def _iter_files(entries: Paths, are_kernels: bool) -> Iterator[Path]:
    for entry in entries:
        if entry.is_dir():
            # The optimized graph is stored next to the directory of kernels and is not a kernel.
            kernel_dir = entry / KERNELS_FOLDER
            yield from sorted((kernel_dir if are_kernels and kernel_dir.is_dir() else entry).glob("*.onnx"))
        elif entry.is_file():
            yield entry
        else:
            raise InputError(f"{entry} does not exist")


def _read_target(path: Path, is_kernel: bool, config: CollectionConfig) -> Target:
    """Read a file and check that a collection can feed it.

    Raises:
        InputError, FileFormatError, ModelError: The file is invalid, an input has open dimensions, or a shape
            or value does not fit.
    """
    model = onnx_file.load_model(path)
    if is_kernel and not is_kernel_model(model):
        raise FileFormatError(f"{path} is not a kernel from `latency extract`; list it under `models`")
    extents, own_prefix = list_extents(model), f"{path.stem}:"
    # A shape without the name of a model leaves fixed dimensions alone.
    fixed = {info.name for info in onnx_file.list_inputs(model) if not is_open(info)}
    entries = {
        key: tuple(shape)
        for key, shape in config.shapes.items()
        if key not in fixed and is_size(key.removeprefix(own_prefix), extents)
    }
    sizes = select_for_model(entries, path.stem, list_names(entries, path.stem))
    shapes = resolve_shapes(extents, sizes) if sizes else {}
    values = select_for_model(config.inputs, path.stem, extents)
    specs = read_inputs(path, model, shapes, values).specs
    kernel = read_kernel(path, model) if is_kernel else None
    return Target(
        id=kernel.id if kernel else path.stem,
        op=kernel.op if kernel else MODEL_OP,
        input_shape=";".join("x".join(map(str, spec.shape)) or "scalar" for spec in specs),
        path=str(path.resolve()),
        sha256=onnx_file.compute_sha256(path),
        flops=kernel.flops if kernel else None,
        shapes={} if kernel else {spec.name: spec.shape for spec in specs},
        sizes=() if kernel else tuple(entries),
    )
