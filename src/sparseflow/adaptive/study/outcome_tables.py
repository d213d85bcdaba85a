"""Outcome tables of a study: which plans answer which samples correctly, and the latency of each.

Outcomes are stored in chunks, so that an interrupted collection resumes and a larger one reuses them.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparseflow.adaptive.plan.space import PlanSpace
from sparseflow.adaptive.policy.outcomes import OutcomeTable
from sparseflow.adaptive.profile import Measurement, PlanProfile, compute_model_id, compute_weights_id
from sparseflow.adaptive.profile.storage import ProfileHeader
from sparseflow.adaptive.questions.task import PlanOutcomes, SampleCounts, SampleRange, Split, StudyTask
from sparseflow.adaptive.study.latencies import LatencySamples, RequestSize, sample_latencies
from sparseflow.core.artifact import Artifact
from sparseflow.core.progress import Progress, subrange
from sparseflow.core.training.distributed import DistributedContext
from sparseflow.errors import FileFormatError, InputError

OUTCOMES_DIR, LATENCIES_FILE = "outcomes", "latencies.safetensors"

_STORED_DTYPES = {
    "correct": torch.uint8, "kinds": torch.uint8, "text_tokens": torch.int32, "new_tokens": torch.int32,
    "vision_tokens": torch.int32,
}  # fmt: skip
"""Stored number format of integer tensors; the others are float32."""


class _ChunkHeader(Artifact):
    FORMAT: ClassVar[str] = "sparseflow.adaptive.outcome-chunk"
    VERSION: ClassVar[int] = 2
    HINT: ClassVar[str] = "remove it to evaluate its samples again"

    fingerprint: dict[str, Any]


class _LatenciesHeader(Artifact):
    FORMAT: ClassVar[str] = "sparseflow.adaptive.latency-samples"
    VERSION: ClassVar[int] = 2
    HINT: ClassVar[str] = "remove it to compute the latencies again"

    fingerprint: str
    device_load: float


def collect_outcomes(
    task: StudyTask,
    space: PlanSpace,
    out_dir: Path,
    counts: Mapping[Split, int],
    *,
    context: DistributedContext,
    progress: Progress | None = None,
) -> dict[Split, PlanOutcomes]:
    """Evaluate the first samples of splits under every plan; stored chunks are reused.

    Args:
        task: Model and questions.
        space: Plans.
        out_dir: Directory of the chunks; created if it does not exist.
        counts: Number of samples of each split.
        context: Processes that share the directory.
        progress: Called with (message, fraction done).

    Raises:
        InputError: A count is not positive, the model cannot run a plan, or the directory holds chunks of
            another model, task or plan space.
        FileFormatError: A chunk is damaged.
    """
    if min(counts.values(), default=0) < 1:
        raise InputError(f"`counts` (={dict(counts)}) must be at least 1 sample of each split")
    out_dir.mkdir(parents=True, exist_ok=True)
    fingerprint, size = _compute_fingerprint(task, space), task.chunk_size
    chunks: list[tuple[Split, int, int]] = [
        (split, first, min(size, count - first))
        for split, count in counts.items()
        for first in range(0, count, size)
    ]
    missing: list[tuple[Split, int, int]] = []
    for split, first, count in chunks:
        path = _get_chunk_path(out_dir, split, first)
        if not path.is_file() or len(_load_chunk(path, fingerprint, space).kinds) < count:
            missing.append((split, first, count))
    # All processes must divide the same list, so none may write before.
    context.barrier()
    for index, (split, first, count) in enumerate(missing):
        if index % context.world_size != context.rank:
            continue
        report = progress if context.rank == 0 else None
        num_done = len(chunks) - len(missing) + index
        outcomes = task.evaluate_plans(
            space, split=split, first=first, count=count,
            progress=subrange(report, num_done / len(chunks), (num_done + 1) / len(chunks)),
        )  # fmt: skip
        _save_chunk(_get_chunk_path(out_dir, split, first), outcomes, fingerprint)
        if report is not None:
            report(
                f"plans evaluated on {first + len(outcomes.kinds)} {split} samples",
                (num_done + 1) / len(chunks),
            )
    context.barrier()
    return {
        split: _concatenate(
            [
                _load_chunk(_get_chunk_path(out_dir, split, first), fingerprint, space)
                for first in range(0, count, size)
            ],
            count,
        )
        for split, count in counts.items()
    }


def _compute_fingerprint(task: StudyTask, space: PlanSpace) -> dict[str, Any]:
    """Everything that outcomes depend on."""
    fingerprint = {
        "weights": compute_weights_id(task.model),
        "dtype": str(next(task.model.parameters()).dtype).removeprefix("torch."),
        "task": dict(task.identity()),
        "plans": space.to_dict(),
    }
    return json.loads(json.dumps(fingerprint))


def _get_chunk_path(out_dir: Path, split: Split, first: int) -> Path:
    return out_dir / f"{split}-{first:06d}.safetensors"


def _save_chunk(path: Path, outcomes: PlanOutcomes, fingerprint: dict[str, Any]) -> None:
    tensors = {
        name: tensor.to(_STORED_DTYPES.get(name, torch.float32))
        for name, tensor in _get_tensors(outcomes).items()
    }
    _ChunkHeader(fingerprint=fingerprint).save_tensors(path, tensors)


def _load_chunk(path: Path, fingerprint: Mapping[str, Any], space: PlanSpace) -> PlanOutcomes:
    header, tensors = _ChunkHeader.load_tensors(path)
    differences = sorted(name for name in fingerprint if header.fingerprint.get(name) != fingerprint[name])
    if differences:
        raise InputError(
            f"{path} has other {', '.join(differences)}; use another directory, or remove {path.parent}"
        )
    try:
        outcomes = PlanOutcomes(
            plans=space.plans,
            **{name: tensor.long() if name in _STORED_DTYPES else tensor for name, tensor in tensors.items()},
        )
    except TypeError as error:
        raise FileFormatError(f"{path}: {error}; {_ChunkHeader.HINT}") from error
    if outcomes.correct.shape[1:] != (len(space),):
        raise FileFormatError(
            f"{path}: expected {len(space)} plans, got shape {list(outcomes.correct.shape)}; "
            f"{_ChunkHeader.HINT}"
        )
    return outcomes


def _concatenate(chunks: list[PlanOutcomes], count: int) -> PlanOutcomes:
    tensors = [_get_tensors(chunk) for chunk in chunks]
    merged = {name: torch.cat([chunk[name] for chunk in tensors])[:count] for name in tensors[0]}
    return PlanOutcomes(plans=chunks[0].plans, **merged | {"correct": merged["correct"].float()})


def _get_tensors(outcomes: PlanOutcomes) -> dict[str, Tensor]:
    """Tensors by name, without those that are None."""
    tensors = {field.name: getattr(outcomes, field.name) for field in fields(outcomes)}
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


@dataclass(frozen=True, kw_only=True, eq=False)
class StudyTables:
    """Outcome tables of disjoint samples.

    Attributes:
        train: Outcomes to train on.
        validation: Outcomes to calibrate and select with.
        test: Outcomes to evaluate on.
        kinds: Kind of question -> which test samples, shape [samples], bool.
        size: Median request size of the test.
        latency: Latency of requests of that size.
    """

    train: OutcomeTable
    validation: OutcomeTable
    test: OutcomeTable
    kinds: Mapping[str, Tensor]
    size: RequestSize
    latency: LatencySamples


def build_study_tables(
    task: StudyTask,
    profile: PlanProfile,
    out_dir: Path | str,
    *,
    counts: SampleCounts,
    context: DistributedContext,
    progress: Progress | None = None,
) -> StudyTables:
    """Build outcome tables, or resume an earlier call with the same directory.

    Args:
        task: Model and questions; the model has the architecture and number format of the profile.
        profile: Profile of its plans, possibly from another device: latencies are those of that device.
        out_dir: Directory of the study; outcomes are stored in `outcomes/`.
        counts: Number of samples; the task may have fewer.
        context: Processes that share the directory.
        progress: Called with (message, fraction done).

    Raises:
        InputError: The profile is of another model or too small, the task has too few samples, or the
            directory holds outcomes of another model or task.
        FileFormatError: A file of the directory is damaged.
    """
    model_id = compute_model_id(task.model)
    if profile.metadata.model_id != model_id:
        raise InputError(
            f"the profile is of another model (id {profile.metadata.model_id}, current: {model_id}); profile "
            "this one with `sparseflow adaptive profile`"
        )
    root = Path(out_dir) / OUTCOMES_DIR
    ranges = task.select_samples(counts, progress if context.rank == 0 else None)
    # Errors of the profile are raised before the evaluation, which may take hours.
    images = 1.0 if profile.space.geometry.tiers and ranges.images else 0.0
    sample_latencies(profile, [RequestSize(1, 1, images=images)])
    outcomes = collect_outcomes(
        task, profile.space, root, ranges.counts(), context=context, progress=progress
    )
    sizes = {split: _list_sizes(split_outcomes, profile) for split, split_outcomes in outcomes.items()}
    distinct_sizes = sorted(set().union(*sizes.values()))
    latencies = _load_or_sample_latencies(profile, distinct_sizes, root / LATENCIES_FILE, context)
    latency_ms = torch.from_numpy(latencies.ms)
    size_index = {size: index for index, size in enumerate(distinct_sizes)}
    num_positions = len(profile.space.geometry.positions)

    def make_table(samples: SampleRange) -> OutcomeTable:
        rows = slice(samples.first, samples.first + samples.count)
        split_outcomes = outcomes[samples.split]
        return OutcomeTable(
            space=profile.space, correct=split_outcomes.correct[rows],
            latency_ms=latency_ms[[size_index[size] for size in sizes[samples.split][rows]]],
            language=split_outcomes.language[rows], tokens=split_outcomes.tokens[rows, :, :num_positions],
        )  # fmt: skip

    test = outcomes[ranges.test.split]
    size = _compute_median_size(sizes[ranges.test.split])
    kinds = {kind: test.kinds == index for index, kind in enumerate(task.kinds)}
    return StudyTables(
        train=make_table(ranges.train),
        validation=make_table(ranges.validation),
        test=make_table(ranges.test),
        kinds={kind: samples for kind, samples in kinds.items() if bool(samples.any())},
        size=size,
        latency=sample_latencies(profile, [size]),
    )


def get_dtype(profile: PlanProfile) -> torch.dtype:
    """Number format of the profiled model, so that answers are those of the timed model."""
    default = "float32" if profile.metadata.device.get("kind") == "cpu" else "bfloat16"
    name = profile.metadata.config.get("dtype", default)
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise FileFormatError(f"the profile has an unknown number format: {name!r}")
    return dtype


def _list_sizes(outcomes: PlanOutcomes, profile: PlanProfile) -> list[RequestSize]:
    lengths = zip(outcomes.text_tokens.tolist(), outcomes.new_tokens.tolist(), strict=True)
    if outcomes.vision_tokens is None:
        return [RequestSize(*length) for length in lengths]
    images = [profile.metadata.count_images(tokens) for tokens in outcomes.vision_tokens.tolist()]
    return [RequestSize(*length, images=count) for length, count in zip(lengths, images, strict=True)]


def _compute_median_size(sizes: list[RequestSize]) -> RequestSize:
    median, images = statistics.median_low, [size.images for size in sizes if size.images is not None]
    return RequestSize(
        median([size.text_tokens for size in sizes]), median([size.new_tokens for size in sizes]),
        median(images) if images else None,
    )  # fmt: skip


def _load_or_sample_latencies(
    profile: PlanProfile, sizes: list[RequestSize], path: Path, context: DistributedContext
) -> LatencySamples:
    """Store latencies, because fits in two processes may differ in their last bits."""
    fingerprint = _compute_latency_fingerprint(profile, sizes)
    if context.rank == 0 and (not path.is_file() or _load_latencies(path)[0] != fingerprint):
        latencies = sample_latencies(profile, sizes)
        _LatenciesHeader(fingerprint=fingerprint, device_load=latencies.load).save_tensors(
            path, {"ms": torch.from_numpy(latencies.ms), "measured": torch.from_numpy(latencies.measured)}
        )
    context.barrier()
    return _load_latencies(path)[1]


def _compute_latency_fingerprint(profile: PlanProfile, sizes: Sequence[RequestSize]) -> str:
    def to_dict(measurement: Measurement) -> dict[str, Any]:
        return asdict(measurement) | {"plan": measurement.plan.id}

    content = [
        ProfileHeader.from_metadata(profile.metadata).to_dict(),
        [to_dict(measurement) for measurement in profile.measurements],
        [size[: 2 + (size.images is not None)] for size in sizes],
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _load_latencies(path: Path) -> tuple[str, LatencySamples]:
    """Fingerprint and latencies of a file."""
    header, tensors = _LatenciesHeader.load_tensors(path)
    try:
        ms, measured = tensors["ms"].numpy(), tensors["measured"].numpy()
    except KeyError as error:
        raise FileFormatError(f"{path} has no tensor {error}; {_LatenciesHeader.HINT}") from error
    return header.fingerprint, LatencySamples(ms=ms, measured=measured, load=header.device_load)
