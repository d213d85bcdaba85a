"""Every parser of the package that reads a file or an answer of someone else.

A target names the file that it reads, the mutation that knows its format, and the parser. Parsers import
their wing themselves. Seeds lie in `corpus/<target>/`; `python -m tests.harness.seeds` writes them again
after a change of format.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.mutations import (
    Mutation,
    mutate_bytes,
    mutate_json,
    mutate_json_lines,
    mutate_parquet,
    mutate_safetensors,
    mutate_text,
    mutate_yaml,
    within_gzip,
)

COUNTERS = struct.Struct("<QQ")
"""Layout of the file with which a worker counts: inputs that were started, inputs that were accepted."""

CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A parser.

    Attributes:
        file: Name of the file; it lies in a directory of its own.
        mutation: Mutation that knows the format.
        parse: Reads the file at a path.
    """

    file: str
    mutation: Mutation
    parse: Callable[[Path], Any]


TARGETS: dict[str, Target] = {}


def _add(name: str, file: str, mutation: Mutation) -> Callable[[Callable[[Path], Any]], None]:
    def add(parse: Callable[[Path], Any]) -> None:
        TARGETS[name] = Target(file=file, mutation=mutation, parse=parse)

    return add


# core


@_add("json", "a.json", mutate_json)
def _(path: Path) -> None:
    from sparseflow.core.files import read_json, write_json

    write_json(path.with_name("copy.json"), read_json(path))


@_add("yaml", "a.yaml", mutate_yaml)
def _(path: Path) -> None:
    from sparseflow.core.config import read_config_file

    read_config_file(path, extra="pruning")


@_add("journal", "a.jsonl", mutate_json_lines)
def _(path: Path) -> None:
    from sparseflow.core.journal import read_journal

    read_journal(path, dict)


@_add("run", "run.json", mutate_json)
def _(path: Path) -> None:
    from sparseflow.core.run import list_runs

    for run in list_runs(path.parent):
        run.to_dict()


@_add("report-page", "report.html", mutate_text)
def _(path: Path) -> None:
    from sparseflow.core.report.site.records import read_page

    read_page(path)


@_add("report-claims", "claims.json", mutate_json)
def _(path: Path) -> None:
    from sparseflow.core.report.site.claims import read_claims

    for claim in read_claims(path):
        assert claim.formatted_value
        assert claim.bound is None or claim.larger_is_better is not None


@_add("checkpoint", "checkpoint.pt", mutate_bytes)
def _(path: Path) -> None:
    from sparseflow.core.training import checkpoint

    checkpoint.load(path.parent, {"seed": 0})


@_add("prometheus", "answer.json", mutate_json)
def _(path: Path) -> None:
    from sparseflow.core.telemetry.prometheus_http import PrometheusClient

    client = PrometheusClient("http://127.0.0.1:1")
    client._get = lambda query: path.read_bytes()
    client.read_samples("up", 10.0)


# spiking


@_add("spiking-decisions", "decisions.json", mutate_json)
def _(path: Path) -> None:
    from sparseflow.spiking.autotune.decision_cache import DecisionCache

    DecisionCache(path)


def _load_tensors(path: Path) -> None:
    from sparseflow.spiking.models.network_inputs import load_tensors

    load_tensors(str(path))


for _suffix, _mutation in (
    (".pt", mutate_bytes),
    (".npz", mutate_bytes),
    (".safetensors", mutate_safetensors),
):
    _add(f"spiking-inputs-{_suffix[1:]}", f"x{_suffix}", _mutation)(_load_tensors)


# tuning


@_add("tuning-matrix", "a.mtx", mutate_text)
def _(path: Path) -> None:
    from sparseflow.tuning.schedule.matrix_files import read_matrix

    read_matrix(path)


@_add("tuning-matrix-gzip", "a.mtx.gz", within_gzip(mutate_text))
def _(path: Path) -> None:
    from sparseflow.tuning.schedule.matrix_files import read_matrix

    read_matrix(path)


@_add("tuning-matrix-npz", "a.npz", mutate_bytes)
def _(path: Path) -> None:
    from sparseflow.tuning.schedule.matrix_files import read_matrix

    read_matrix(path)


@_add("tuning-kernel", "kernel.sfk", mutate_safetensors)
def _(path: Path) -> None:
    from sparseflow.tuning.codegen.kernel import load

    load(path, any_cpu=True)  # the seed was tuned on another CPU


@_add("tuning-labels", "labels.parquet", mutate_parquet)
def _(path: Path) -> None:
    from sparseflow.tuning.measure.labels import LabelSet

    labels = LabelSet.open(path.parent)
    for task in labels.tasks:
        labels.read_latencies(task)


@_add("tuning-pattern", "pattern.safetensors", mutate_safetensors)
def _(path: Path) -> None:
    from sparseflow.tuning.measure.labels import read_pattern
    from tests.harness.seeds import make_pattern

    digest = make_pattern().digest()
    (path.parent / "patterns").mkdir()
    (path.parent / "patterns" / f"{digest}.safetensors").write_bytes(path.read_bytes())
    read_pattern(path.parent, digest)


@_add("tuning-import", "schedules.txt", mutate_text)
def _(path: Path) -> None:
    from sparseflow.tuning.measure.label_import import import_labels

    import_labels(path, path.parent / "labels", operator="spmv", matrix="a")


@_add("tuning-families", "families.json", mutate_json)
def _(path: Path) -> None:
    from sparseflow.tuning.measure.families import read_families

    read_families(path)


@_add("tuning-trials", "trials.jsonl", mutate_json_lines)
def _(path: Path) -> None:
    from sparseflow.core.journal import read_journal
    from sparseflow.tuning.search.session import Trial, TrialHeader

    read_journal(path, Trial, header_type=TrialHeader)


@_add("tuning-winners", "winners.json", mutate_json)
def _(path: Path) -> None:
    from sparseflow.tuning.search.winners import WinnerFile

    WinnerFile.load(path)


@_add("tuning-collection", "measured.jsonl", mutate_json_lines)
def _(path: Path) -> None:
    from sparseflow.tuning.measure.collection_log import CollectionLog

    with CollectionLog(path.parent) as log:
        list(log.measurements())


@_add("tuning-config", "train.yaml", mutate_yaml)
def _(path: Path) -> None:
    from sparseflow.tuning.model.training import TrainConfig

    TrainConfig.read(str(path), {})


# latency


@_add("latency-predictor", "predictor.json", mutate_json)
def _(path: Path) -> None:
    from sparseflow.latency.model.predictor import Predictor

    Predictor.load(path)


@_add("latency-graph", "graph.json", mutate_json)
def _(path: Path) -> None:
    from sparseflow.latency.graph.analysis import Graph

    Graph.load(path)


@_add("latency-plan", "plan.json", mutate_json)
def _(path: Path) -> None:
    from sparseflow.latency.measure.collection import read_plan

    read_plan(path.parent)


@_add("latency-rows", "rows.jsonl", mutate_json_lines)
def _(path: Path) -> None:
    from sparseflow.latency.measure.collection import read_rows

    (path.parent / "plan.json").write_bytes((CORPUS / "latency-plan" / "plan.json").read_bytes())
    read_rows(path.parent)


@_add("latency-zoo", "zoo.yaml", mutate_yaml)
def _(path: Path) -> None:
    from sparseflow.latency.graph.zoo import load_zoo_config

    load_zoo_config(path)


@_add("latency-config", "collect.yaml", mutate_yaml)
def _(path: Path) -> None:
    from sparseflow.latency.measure.config import load_collection_config

    load_collection_config(path)


@_add("latency-inference", "inference.yaml", mutate_yaml)
def _(path: Path) -> None:
    from sparseflow.latency.inference_config import load_inference_config

    load_inference_config(path)


@_add("latency-baseline", "baseline.json", mutate_json)
def _(path: Path) -> None:
    from sparseflow.latency.check import LatencyBaseline

    LatencyBaseline.load(path)


@_add("latency-onnx", "model.onnx", mutate_bytes)
def _(path: Path) -> None:
    from sparseflow.latency.graph.analysis import analyze

    analyze(path)


@_add("latency-kernel", "kernel.onnx", mutate_bytes)
def _(path: Path) -> None:
    from sparseflow.latency.graph.extraction import read_kernel

    read_kernel(path)


# pruning


@_add("pruning-config", "train.yaml", mutate_yaml)
def _(path: Path) -> None:
    from sparseflow.pruning.config import read_config

    read_config(path)


@_add("pruning-model", "model.safetensors", mutate_safetensors)
def _(path: Path) -> None:
    from sparseflow.pruning import load_model

    load_model(path)


@_add("pruning-pretrained", "model.safetensors", mutate_safetensors)
def _(path: Path) -> None:
    from sparseflow.pruning.model.hf_weights import open_hf_weights

    open_hf_weights(path, None)


@_add("pruning-latency", "latency.json", mutate_json)
def _(path: Path) -> None:
    from sparseflow.pruning.evaluation.latency_model import VideoViTLatencyModel

    VideoViTLatencyModel.load(path)


@_add("pruning-frame-counts", "frames.json", mutate_json)
def _(path: Path) -> None:
    from sparseflow.pruning.data.frame_counts import count_frames

    count_frames([], counts_path=path)


@_add("pruning-splits", "trainlist01.txt", mutate_text)
def _(path: Path) -> None:
    from sparseflow.pruning.data.splits import read_split

    (path.parent / "classInd.txt").write_text("1 A\n2 B\n")
    (path.parent / "testlist01.txt").write_text("A/v_A_g01_c01.avi\nB/v_B_g01_c01.avi\n")
    read_split(path.parent, 1)


@_add("pruning-video-list", "train.csv", mutate_text)
def _(path: Path) -> None:
    from sparseflow.pruning.data.video_folder import read_video_folder

    read_video_folder(path)


@_add("pruning-template-list", "train.json", mutate_json)
def _(path: Path) -> None:
    from sparseflow.pruning.data.video_folder import read_video_folder

    (path.parent / "labels.json").write_text('{"Moving a something": "0", "Pushing a something": "1"}')
    read_video_folder(path)


@_add("pruning-shard", "train.tar", mutate_bytes)
def _(path: Path) -> None:
    from sparseflow.pruning.data.video_folder import read_video_folder

    read_video_folder(path)


@_add("pruning-checkpoint", "checkpoint.pth", mutate_bytes)
def _(path: Path) -> None:
    from sparseflow.pruning.model.hf_weights import open_hf_weights

    open_hf_weights(path, None)


@_add("pruning-video", "a.mp4", mutate_bytes)
def _(path: Path) -> None:
    from sparseflow.pruning.data.video import iterate_frames, open_video

    for _ in iterate_frames(path):
        pass
    video = open_video(path)
    video.read(range(video.frames))


@_add("pruning-video-cache", "index.jsonl", mutate_json_lines)
def _(path: Path) -> None:
    from sparseflow.pruning.data.cache import VideoCache

    VideoCache.open(path.parent)


# codesign


@_add("codesign-plan", "plan.json", mutate_json)
def _(path: Path) -> None:
    from sparseflow.codesign.design.saved_plan import load_plan

    load_plan(path)


@_add("codesign-chips", "chips.yaml", mutate_yaml)
def _(path: Path) -> None:
    from sparseflow.codesign.hardware.chips import read_library

    read_library(path)


@_add("codesign-config", "train.yaml", mutate_yaml)
def _(path: Path) -> None:
    from sparseflow.codesign.design.config import read_config

    read_config(path)


@_add("codesign-qaplib", "a.dat", mutate_text)
def _(path: Path) -> None:
    from sparseflow.codesign.layout.qap.problem import read_qaplib

    read_qaplib(path)


@_add("codesign-proxy", "proxy.safetensors", mutate_safetensors)
def _(path: Path) -> None:
    from sparseflow.codesign.hardware.proxy import LayerHwProxy

    LayerHwProxy.load(path)


@_add("codesign-points", "points.jsonl", mutate_json_lines)
def _(path: Path) -> None:
    from sparseflow.codesign.hardware.proxy.points import read_points

    read_points(path)


# adaptive


@_add("adaptive-request", "request.json", mutate_json)
def _(path: Path) -> None:
    from sparseflow.adaptive.serve.protocol import parse_request

    parse_request(path.read_bytes(), {})


@_add("adaptive-image", "a.png", mutate_bytes)
def _(path: Path) -> None:
    from sparseflow.adaptive.prompts.images import decode_file
    from sparseflow.adaptive.prompts.messages import RequestLimits

    decode_file(path.read_bytes(), RequestLimits())


@_add("adaptive-questions", "questions.jsonl", mutate_json_lines)
def _(path: Path) -> None:
    from sparseflow.adaptive.questions.file import read_questions

    read_questions(path)


@_add("adaptive-archive", "images.tar", mutate_bytes)
def _(path: Path) -> None:
    from sparseflow.adaptive.grid_vqa.images import read_archives

    read_archives([path])


@_add("adaptive-importance", "importance.json", mutate_json)
def _(path: Path) -> None:
    from sparseflow.adaptive.profile.importance.result import BlockImportance

    BlockImportance.load(path)


@_add("adaptive-plan-quality", "plan_quality.json", mutate_json)
def _(path: Path) -> None:
    from sparseflow.adaptive.profile.plan_quality import PlanQuality

    PlanQuality.load(path)


@_add("adaptive-predictor", "predictor.json", mutate_json)
def _(path: Path) -> None:
    from sparseflow.adaptive.predictor.model import PlanLatencyPredictor

    PlanLatencyPredictor.load(path)


@_add("adaptive-profile", "profile.parquet", mutate_parquet)
def _(path: Path) -> None:
    from sparseflow.adaptive.profile.storage import PlanProfile

    PlanProfile.load(path)


@_add("adaptive-controllers", "controllers.safetensors", mutate_safetensors)
def _(path: Path) -> None:
    from sparseflow.adaptive.controllers.controllers import Controllers

    Controllers.load(path, model_id="a", device="cpu")


@_add("adaptive-grid-vqa", "grid_vqa.json", mutate_json)
def _(path: Path) -> None:
    from sparseflow.adaptive.grid_vqa.model import load_vqa_model
    from sparseflow.errors import FileFormatError

    try:
        load_vqa_model(path.parent)
    except FileFormatError as error:
        if "no file named" not in str(error):  # the weights are no part of the seed
            raise


@_add("adaptive-grpo-config", "grpo.yaml", mutate_yaml)
def _(path: Path) -> None:
    from sparseflow.adaptive.training.config import read_config

    read_config(path)


@_add("adaptive-vqa-config", "vqa.yaml", mutate_yaml)
def _(path: Path) -> None:
    from sparseflow.adaptive.grid_vqa.config import load_vqa_config

    load_vqa_config(path)
