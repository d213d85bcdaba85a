"""The model zoo: networks exported to ONNX at every batch and image size of a configuration.

::

    OUT/NAME_bBATCH_SIZE.onnx       exported model
    OUT/cpu/NAME_bBATCH_SIZE.onnx   graph optimized by onnxruntime for the provider
    OUT/cpu/NAME_bBATCH_SIZE.json   settings and digests of both; written last, so that it marks a complete
    export

A second export keeps complete files with equal settings. Each export is checked by onnx, run once by
onnxruntime and compared with torch.
"""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pydantic

from sparseflow.core.config import StrictModel, load_config
from sparseflow.core.extras import get_version, require
from sparseflow.core.files import read_json, write_json
from sparseflow.core.progress import Progress
from sparseflow.errors import ModelError, RunError, SparseFlowError
from sparseflow.latency.graph import networks, onnx_file, session

if TYPE_CHECKING:
    from torch import nn

TOLERANCE = 1e-3
"""Maximum difference between onnxruntime and torch, relative to the output's largest magnitude."""

_INPUT, _OUTPUT = "input", "output"


class ModelSpec(StrictModel):
    """One network of a zoo.

    Attributes:
        name: Name of the files, and of the network unless `network` is set.
        source: `transformers`, `torchvision` or `package.module:factory`.
        network: Name of the preset or of the model in transformers or torchvision.
        config: Differences from the default configuration, or arguments of the function.
        batches: Batch sizes; by default the zoo's.
        sizes: Heights and widths, pixels; by default the zoo's.
        exporter: torch exporter; by default the zoo's.
    """

    name: str = pydantic.Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=80)
    source: str = networks.TRANSFORMERS
    network: str | None = None
    config: dict[str, Any] = pydantic.Field(default={})
    batches: list[pydantic.PositiveInt] | None = None
    sizes: list[pydantic.PositiveInt] | None = None
    exporter: Literal["torchscript", "dynamo"] | None = None


class ZooConfig(StrictModel):
    """Configuration of a zoo.

    Attributes:
        models: Networks; a bare name is a preset of transformers.
        batches: Batch sizes.
        sizes: Heights and widths of the images, pixels.
        channels: Channels of the images.
        opset: ONNX opset.
        exporter: torch exporter: `torchscript` is faster, `dynamo` is newer.
        seed: Random seed of weights and inputs.
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
    def _expand_bare_names(cls, value: Any) -> Any:
        if isinstance(value, list):
            return [{"name": entry} if isinstance(entry, str) else entry for entry in value]
        return value

    @pydantic.model_validator(mode="after")
    def _check_unique_names(self) -> ZooConfig:
        names = [model.name for model in self.models]
        if len(set(names)) < len(names):
            raise ValueError(f"`models` contains duplicate names: {names}")
        return self

    def list_cases(self) -> list[ZooCase]:
        """List every model at every batch and image size, models first."""
        return [
            ZooCase(spec=spec, zoo=self, batch_size=batch, image_size=size)
            for spec in self.models
            for batch in spec.batches or self.batches
            for size in spec.sizes or self.sizes
        ]


@dataclass(frozen=True, kw_only=True)
class ZooCase:
    """One model of a zoo at one batch and image size."""

    spec: ModelSpec
    zoo: ZooConfig
    batch_size: int
    image_size: int

    @property
    def name(self) -> str:
        return f"{self.spec.name}_b{self.batch_size}_{self.image_size}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.batch_size, self.zoo.channels, self.image_size, self.image_size)

    @property
    def exporter(self) -> str:
        return self.spec.exporter or self.zoo.exporter

    def settings(self, provider: str) -> dict[str, Any]:
        """Return all settings that determine the files, in JSON types."""
        return {
            "source": self.spec.source,
            "network": self.spec.network or self.spec.name,
            "config": self.spec.config,
            "input_shape": list(self.shape),
            "opset": self.zoo.opset,
            "exporter": self.exporter,
            "seed": self.zoo.seed,
            "provider": session.resolve_provider(provider),
            "versions": {
                name: get_version(name)
                for name in ("torch", "onnx", "onnxruntime", "onnxruntime-gpu", "transformers", "torchvision")
            },
        }


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """Outcome of one case's export.

    Attributes:
        name: Name of the case.
        path: Exported model; None on failure.
        optimized_path: Optimized model; None on failure.
        reused: Whether complete files existed.
        problem: Error message; None on success.
        error: Class name of the error; None on success.
    """

    name: str
    path: Path | None = None
    optimized_path: Path | None = None
    reused: bool = False
    problem: str | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()}


def load_zoo_config(config: Path | str) -> ZooConfig:
    """Read the configuration of a zoo.

    Args:
        config: A YAML file, or a shipped name: `"resnet18"`, `"quickstart"` or `"all"`.

    Raises:
        InputError: The file does not exist.
        FileFormatError: The file is not YAML, or a setting is unknown, missing or out of range.
    """
    return load_config(ZooConfig, config, extra="latency", package="sparseflow.latency")


def export_zoo(
    config: ZooConfig | Path | str,
    out_dir: Path | str,
    *,
    provider: str = "cpu",
    progress: Progress | None = None,
) -> list[ExportResult]:
    """Export a zoo. A failure is reported in the results and does not stop the other exports.

    Args:
        config: Configuration, its YAML file, or a shipped name: `"resnet18"`, `"quickstart"` or `"all"`.
        out_dir: Directory for the models; created if missing.
        provider: Provider to optimize for: `"cpu"`, `"cuda"` or onnxruntime's name.
        progress: Receives the case name and the fraction done.

    Raises:
        InputError: The file or provider does not exist.
        FileFormatError: The configuration is invalid.
        DeviceError: The provider is not available.
        MissingExtraError: onnx, onnxruntime, transformers or PyYAML is missing.
    """
    zoo = config if isinstance(config, ZooConfig) else load_zoo_config(config)
    require("onnx", "latency")
    _check_provider(provider)
    folder = Path(out_dir)
    (folder / session.get_device_type(provider)).mkdir(parents=True, exist_ok=True)
    cases = zoo.list_cases()
    results: list[ExportResult] = []
    for index, case in enumerate(cases):
        if progress is not None:
            progress(case.name, index / len(cases))
        results.append(_export_case(case, folder, provider))
    if progress is not None:
        progress("done", 1.0)
    return results


def _check_provider(provider: str) -> None:
    """Open a session of a tiny model, to fail early if the provider is not available."""
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


def _export_case(case: ZooCase, folder: Path, provider: str) -> ExportResult:
    path = folder / f"{case.name}.onnx"
    optimized = folder / session.get_device_type(provider) / path.name
    record = optimized.with_suffix(".json")
    result = ExportResult(name=case.name, path=path, optimized_path=optimized)
    with suppress(SparseFlowError, OSError):
        if read_json(record) == _make_record(case, provider, path, optimized):
            return replace(result, reused=True)
    record.unlink(missing_ok=True)
    try:
        _export_and_optimize(case, path, optimized, provider)
        write_json(record, _make_record(case, provider, path, optimized), indent=1)
    except SparseFlowError as error:
        return ExportResult(name=case.name, problem=str(error), error=type(error).__name__)
    except (RuntimeError, MemoryError) as error:
        # torch raises these for unsupported image sizes and lack of memory.
        problem = f"{case.name} cannot run on images of shape {list(case.shape)}: {error}"
        return ExportResult(name=case.name, problem=problem, error=ModelError.__name__)
    return result


def _make_record(case: ZooCase, provider: str, path: Path, optimized: Path) -> dict[str, Any]:
    return {
        "settings": case.settings(provider),
        "sha256": onnx_file.compute_sha256(path),
        "optimized_sha256": onnx_file.compute_sha256(optimized),
    }


def _export_and_optimize(case: ZooCase, path: Path, optimized: Path, provider: str) -> None:
    import torch

    onnx = require("onnx", "latency")
    spec = case.spec
    model = networks.build_network(
        spec.source, spec.network or spec.name, spec.config, image_size=case.image_size, seed=case.zoo.seed
    )
    weights = sum(p.numel() * p.element_size() for p in (*model.parameters(), *model.buffers()))
    onnx_file.check_weight_bytes(weights, case.name)
    images = torch.randn(case.shape, generator=torch.Generator().manual_seed(case.zoo.seed))
    if spec.source in (networks.TRANSFORMERS, networks.TORCHVISION):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(case.zoo.seed)
            networks.normalize_activations(model, torch.randn(2, *case.shape[1:]))
    with torch.no_grad():
        expected = model(images)
    if not isinstance(expected, torch.Tensor):
        expected = expected[0] if expected else None
    if expected is None:
        raise ModelError(f"{case.name} returns no tensor")
    prefix = f".export-{case.name}-"
    for abandoned in path.parent.glob(f"{prefix}*"):
        shutil.rmtree(abandoned, ignore_errors=True)  # of a killed export
    with tempfile.TemporaryDirectory(prefix=prefix, dir=path.parent) as temporary:
        model_file, optimized_file = Path(temporary) / path.name, Path(temporary) / f"optimized-{path.name}"
        _export_onnx(model, images, model_file, case)
        try:
            onnx.checker.check_model(str(model_file))
        except onnx.checker.ValidationError as error:
            raise RunError(f"torch exported a {case.name} that onnx rejects: {error}") from error
        # The comparison with torch needs float32; the default on a GPU is TF32.
        runtime_session = session.open_session(
            model_file,
            provider,
            settings={"optimized_model_filepath": str(optimized_file)},
            provider_options=session.make_provider_options(provider, use_tf32="0"),
        )
        output_name = runtime_session.get_outputs()[0].name
        output = session.run(runtime_session, [output_name], {_INPUT: images.numpy()})[0]
        _check_output(case, output, expected.numpy())
        model_file.replace(path)
        optimized_file.replace(optimized)


def _check_output(case: ZooCase, output: Any, expected: Any) -> None:
    from sparseflow.latency.graph.extraction import compute_relative_error

    error = compute_relative_error(output, expected)
    if error > TOLERANCE:
        raise RunError(
            f"the outputs of onnxruntime and torch for {case.name} differ by {error:.2e} of the output's "
            f"scale, the limit is {TOLERANCE}; try another exporter or opset"
        )


def _export_onnx(model: nn.Module, images: Any, target: Path, case: ZooCase) -> None:
    import torch

    exporter_options: dict[str, Any] = {"dynamo": False}
    if case.exporter == "dynamo":
        require("onnxscript", "latency")
        exporter_options = {"dynamo": True, "external_data": False, "verbose": False}
    with warnings.catch_warnings(), _silence_logger("torch.onnx"), torch.no_grad():
        # torch deprecates the exporter that is four times faster, and warns about every traced constant.
        warnings.simplefilter("ignore")
        try:
            torch.onnx.export(
                model,
                (images,),
                str(target),
                input_names=[_INPUT],
                output_names=[_OUTPUT],
                opset_version=case.zoo.opset,
                **exporter_options,
            )
        except Exception as error:
            reason = re.sub(r"\x1b\[\d*m", "", session.format_first_line(error))
            raise RunError(
                f"torch cannot export {case.name} with `exporter: {case.exporter}` and opset "
                f"{case.zoo.opset}: {reason}"
            ) from error


@contextmanager
def _silence_logger(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
