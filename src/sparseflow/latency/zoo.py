"""A zoo of models on disk: every network of a configuration at every batch and image size, as ONNX.

::

    OUT/NAME_bBATCH_SIZE.onnx       as exported
    OUT/cpu/NAME_bBATCH_SIZE.onnx   as onnxruntime optimises it for what will run it, here the CPU
    OUT/cpu/NAME_bBATCH_SIZE.json   how both were made; written last, so that a model without it is not whole

Exporting again keeps what is whole and made by the same settings. Each export is checked by onnx, run once by
onnxruntime and compared with what torch computes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pydantic

from sparseflow.core.extras import get_version, require
from sparseflow.core.files import sync_dir, write_atomic
from sparseflow.errors import FileFormatError, InputError, ModelError, RunError, SparseFlowError
from sparseflow.latency import onnx_file, session, sources

if TYPE_CHECKING:
    from torch import nn

SHIPPED = ("resnet18", "quickstart", "all")
"""Configurations that come with the package."""

TOLERANCE = 1e-3
"""Largest difference between onnxruntime and torch, relative to the output's largest magnitude."""

_INPUT, _OUTPUT = "input", "output"

Progress = Callable[[str, int, int], None]


class _Record(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class ModelSpec(_Record):
    """One network of a zoo.

    Attributes:
        name: What its files are called, and which network it is unless `network` says so.
        source: `transformers`, `torchvision` or `package.module:factory`.
        network: The preset's, transformers' or torchvision's name.
        config: What differs in its configuration, or the function's arguments.
        batches: Batch sizes; the zoo's where absent.
        sizes: Heights and widths, pixels; the zoo's where absent.
        exporter: torch's exporter; the zoo's where absent.
    """

    name: str = pydantic.Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=80)
    source: str = sources.TRANSFORMERS
    network: str | None = None
    config: dict[str, Any] = {}
    batches: list[pydantic.PositiveInt] | None = None
    sizes: list[pydantic.PositiveInt] | None = None
    exporter: Literal["torchscript", "dynamo"] | None = None


class ZooConfig(_Record):
    """What a zoo's YAML file may say.

    Attributes:
        models: Networks; a bare name is a preset of transformers.
        batches: Batch sizes.
        sizes: Heights and widths of the images, pixels.
        channels: Channels of the images.
        opset: ONNX operator set to export.
        exporter: torch's exporter: `torchscript` is quicker, `dynamo` the newer.
        seed: What weights and inputs are drawn from.
    """

    models: list[ModelSpec] = pydantic.Field(min_length=1)
    batches: list[pydantic.PositiveInt] = pydantic.Field(default=[1], min_length=1)
    sizes: list[pydantic.PositiveInt] = pydantic.Field(default=[224], min_length=1)
    channels: pydantic.PositiveInt = 3
    opset: int = pydantic.Field(default=17, ge=11, le=24)
    exporter: Literal["torchscript", "dynamo"] = "torchscript"
    seed: int = 0

    @pydantic.field_validator("models", mode="before")
    @classmethod
    def _bare_names(cls, value: Any) -> Any:
        if isinstance(value, list):
            return [{"name": entry} if isinstance(entry, str) else entry for entry in value]
        return value

    @pydantic.model_validator(mode="after")
    def _own_files(self) -> ZooConfig:
        names = [model.name for model in self.models]
        if len(set(names)) < len(names):
            raise ValueError(f"two models have the same name: {names}")
        return self

    def cases(self) -> list[Case]:
        """Every model at every batch and size, models first."""
        return [
            Case(spec=spec, zoo=self, batch=batch, size=size)
            for spec in self.models
            for batch in spec.batches or self.batches
            for size in spec.sizes or self.sizes
        ]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model of a zoo at one batch and image size."""

    spec: ModelSpec
    zoo: ZooConfig
    batch: int
    size: int

    @property
    def name(self) -> str:
        return f"{self.spec.name}_b{self.batch}_{self.size}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.zoo.channels, self.size, self.size)

    @property
    def exporter(self) -> str:
        return self.spec.exporter or self.zoo.exporter

    def settings(self, provider: str) -> dict[str, Any]:
        """Everything that decides what the files hold, in JSON's types."""
        return {
            "source": self.spec.source,
            "network": self.spec.network or self.spec.name,
            "config": self.spec.config,
            "input_shape": list(self.shape),
            "opset": self.zoo.opset,
            "exporter": self.exporter,
            "seed": self.zoo.seed,
            "provider": session.provider_name(provider),
            "versions": {
                name: get_version(name)
                for name in ("torch", "onnx", "onnxruntime", "onnxruntime-gpu", "transformers", "torchvision")
            },
        }


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What became of one case.

    Attributes:
        name: The case's name.
        path: The exported model; None where it failed.
        optimised_path: Its optimised form; None where it failed.
        kept: It was on disk already.
        problem: What went wrong, None where nothing did.
        error: Kind of that error, None where there is none.
    """

    name: str
    path: Path | None
    optimised_path: Path | None
    kept: bool = False
    problem: str | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The outcome in JSON's types."""
        return {
            "name": self.name,
            "path": None if self.path is None else str(self.path),
            "optimised_path": None if self.optimised_path is None else str(self.optimised_path),
            "kept": self.kept,
            "problem": self.problem,
            "error": self.error,
        }


def load_config(config: Path | str) -> ZooConfig:
    """Read a zoo's YAML file, or one of those that come with the package.

    Args:
        config: A path, or `"resnet18"`, `"quickstart"` or `"all"`.

    Raises:
        InputError: There is no such file.
        FileFormatError: It is not YAML, or says what no zoo has.
    """
    yaml = require("yaml", "latency")
    file = Path(config)
    if file.is_file():
        text = file.read_text(encoding="utf-8", errors="replace")
    elif str(config) in SHIPPED:
        text = (resources.files("sparseflow.latency") / "data" / f"{config}.yaml").read_text(encoding="utf-8")
    else:
        raise InputError(f"there is no file {config}; these come with the package: {', '.join(SHIPPED)}")
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise FileFormatError(f"{config} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise FileFormatError(f"{config} must be a mapping with `models`, and is a {type(content).__name__}")
    try:
        return ZooConfig.model_validate(content)
    except pydantic.ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, entry['loc'])) or 'the file'}: {entry['msg']}" for entry in error.errors()
        )
        raise FileFormatError(f"{config} is no zoo: {problems}") from error


def export(
    config: ZooConfig | Path | str,
    out: Path | str,
    *,
    provider: str = "cpu",
    progress: Progress | None = None,
) -> list[Exported]:
    """Export a zoo; what fails is reported and the rest goes on.

    Args:
        config: The zoo, its YAML file or the name of one that comes with the package.
        out: Folder that gets the models; made when absent.
        provider: What will run them: `"cpu"`, `"cuda"` or onnxruntime's name.
        progress: Called with (case, cases done, cases in all).

    Raises:
        InputError: There is no such file or provider.
        FileFormatError: The file is no zoo.
        DeviceError: The provider is not there.
        MissingExtraError: onnx, onnxruntime, transformers or PyYAML is missing.
    """
    zoo = config if isinstance(config, ZooConfig) else load_config(config)
    require("onnx", "latency")
    _prove(provider)
    folder = Path(out)
    (folder / session.short_name(provider)).mkdir(parents=True, exist_ok=True)
    cases = zoo.cases()
    results: list[Exported] = []
    for done, case in enumerate(cases):
        if progress is not None:
            progress(case.name, done, len(cases))
        results.append(_one(case, folder, provider))
    if progress is not None:
        progress("done", len(cases), len(cases))
    return results


def _prove(provider: str) -> None:
    """Fail before any work where the provider is not there: one tiny model says it."""
    onnx = require("onnx", "latency")
    helper = onnx.helper
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "probe",
        [helper.make_tensor_value_info("x", kind, [1])],
        [helper.make_tensor_value_info("y", kind, [1])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    session.open_session(model.SerializeToString(), provider)


def _one(case: Case, folder: Path, provider: str) -> Exported:
    path = folder / f"{case.name}.onnx"
    optimised = folder / session.short_name(provider) / path.name
    record = optimised.with_suffix(".json")
    settings = case.settings(provider)
    if _whole(record, settings, path, optimised):
        return Exported(name=case.name, path=path, optimised_path=optimised, kept=True)
    record.unlink(missing_ok=True)
    try:
        _make(case, path, optimised, provider)
        digests = {"sha256": _sha256(path), "optimised_sha256": _sha256(optimised)}
        write_atomic(record, json.dumps({"settings": settings, **digests}, indent=1, sort_keys=True) + "\n")
    except SparseFlowError as error:
        return _failed(case, error)
    except (RuntimeError, MemoryError) as error:
        # torch says so of a network that does not take the size, and of memory that ran out.
        return _failed(case, ModelError(f"{case.name} does not run on images of {list(case.shape)}: {error}"))
    return Exported(name=case.name, path=path, optimised_path=optimised)


def _failed(case: Case, error: SparseFlowError) -> Exported:
    return Exported(
        name=case.name, path=None, optimised_path=None, problem=str(error), error=type(error).__name__
    )


def _whole(record: Path, settings: dict[str, Any], path: Path, optimised: Path) -> bool:
    try:
        stored = json.loads(record.read_text(encoding="utf-8"))
        return (
            stored["settings"] == settings
            and stored["sha256"] == _sha256(path)
            and stored["optimised_sha256"] == _sha256(optimised)
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _make(case: Case, path: Path, optimised: Path, provider: str) -> None:
    import torch

    onnx = require("onnx", "latency")
    spec = case.spec
    model = sources.build(
        spec.source, spec.network or spec.name, spec.config, size=case.size, seed=case.zoo.seed
    )
    weights = sum(p.numel() * p.element_size() for p in (*model.parameters(), *model.buffers()))
    if weights > onnx_file.LARGEST_BYTES:
        raise ModelError(
            f"the weights of {case.name} take {weights / 1e9:.2f} GB, and one ONNX file holds at most 2 GB; "
            f"weights in files of their own are not supported: choose a smaller network"
        )
    images = torch.randn(case.shape, generator=torch.Generator().manual_seed(case.zoo.seed))
    with torch.no_grad():
        expected = model(images)
    if not isinstance(expected, torch.Tensor):
        expected = expected[0] if expected else None
    if expected is None:
        raise ModelError(f"{case.name} gives no tensor")
    with _beside(path) as raw, _beside(optimised) as better:
        _export(model, images, raw, case)
        try:
            onnx.checker.check_model(str(raw))
        except onnx.checker.ValidationError as error:
            raise RunError(f"torch exported a {case.name} that onnx refuses: {error}") from error
        settings = {"optimized_model_filepath": str(better)}
        # The comparison with torch is one of float32, which a GPU would round to TF32 by default.
        options = {"use_tf32": "0"} if session.short_name(provider) == "cuda" else None
        opened = session.open_session(raw, provider, "all", settings=settings, provider_options=options)
        found = session.run(opened, [opened.get_outputs()[0].name], {_INPUT: images.numpy()})[0]
        _compare(case, found, expected.numpy())


def _compare(case: Case, found: Any, expected: Any) -> None:
    from sparseflow.latency.extract import relative_error

    error = relative_error(found, expected)
    if error > TOLERANCE:
        raise RunError(
            f"onnxruntime and torch disagree on {case.name} by {error:.2e} of the output's scale "
            f"(allowed {TOLERANCE}); try another exporter or opset"
        )


def _export(model: nn.Module, images: Any, target: Path, case: Case) -> None:
    import torch

    more: dict[str, Any] = {"dynamo": False}
    if case.exporter == "dynamo":
        more = {"dynamo": True, "external_data": False, "verbose": False}
    with warnings.catch_warnings(), _quiet("torch.onnx"), torch.no_grad():
        # torch deprecates the exporter that is four times quicker, and warns of every constant it traces.
        warnings.simplefilter("ignore")
        try:
            torch.onnx.export(
                model,
                (images,),
                str(target),
                input_names=[_INPUT],
                output_names=[_OUTPUT],
                opset_version=case.zoo.opset,
                **more,
            )
        except Exception as error:
            text = next(
                iter(re.sub(r"\x1b\[\d*m", "", str(error)).strip().splitlines()), type(error).__name__
            )
            raise RunError(
                f"torch cannot export {case.name} with `exporter: {case.exporter}` and opset "
                f"{case.zoo.opset}: {text[:300]}"
            ) from error


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A file beside `path` that takes its place when the block ends, and is gone when it raises."""
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=".onnx", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
        sync_dir(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
