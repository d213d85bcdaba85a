"""Kernels in a stream. Times on a CPU are not meaningful."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import numpy as np
import onnx
import pydantic
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from sparseflow.errors import DeviceError, FileFormatError, InputError, RunError
from sparseflow.latency.graph import session
from sparseflow.latency.graph.extraction import METADATA_KEY, extract, make_dummy_inputs
from sparseflow.latency.measure import instruments, stream
from sparseflow.latency.measure.collection import collect, read_rows
from sparseflow.latency.measure.config import DEFAULT_COPIES, CollectionConfig, load_collection_config
from sparseflow.latency.measure.instruments import LocalInstruments
from sparseflow.latency.measure.plan import Target, make_plan
from sparseflow.latency.measure.runner import Runner
from sparseflow.latency.measure.stream import (
    MIN_COPIES,
    NUM_ISSUE_PAIRS,
    NUM_RUN_PAIRS,
    BlockingKernel,
    BoundSession,
    StreamTiming,
    copy_node,
    measure_stream,
)
from tests.latency.onnx_models import FLOAT, convnet, model, save, values
from tests.latency.synthetic import StreamedBench

SAMPLES = ("stream_ns", "plug_ns", "issue_ns", "plug_issue_ns")
PRODUCT = "plug"
"""Name of the blocking node."""


def one_kernel(built: onnx.ModelProto, folder: Path) -> Path:
    """Extract the single kernel of a model."""
    (result,) = extract(save(built, folder), folder, check=False, threads=1)
    assert result.path is not None
    return result.path


def split() -> onnx.ModelProto:
    """Build a kernel with two outputs."""
    node = helper.make_node("Split", ["x"], ["a", "b"], axis=1)
    return model([node], [("x", FLOAT, [4, 8])], [("a", FLOAT, None), ("b", FLOAT, None)])


def clip() -> onnx.ModelProto:
    """Build a kernel whose second input of three is omitted."""
    weights = {"high": np.array(0.5, np.float32)}
    node = helper.make_node("Clip", ["x", "", "high"], ["y"])
    return model([node], [("x", FLOAT, [4, 4])], [("y", FLOAT, None)], weights)


def lstm() -> onnx.ModelProto:
    """Build a kernel whose first output of two is omitted."""
    weights = {"w": values(1, 12, 4), "r": values(1, 12, 3)}
    node = helper.make_node("LSTM", ["x", "w", "r"], ["", "h"], hidden_size=3)
    return model([node], [("x", FLOAT, [5, 2, 4])], [("h", FLOAT, None)], weights)


def matmul() -> onnx.ModelProto:
    """Build a kernel with the operator of the blocking kernel."""
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    return model([node], [("x", FLOAT, [4, 8])], [("y", FLOAT, None)], {"w": values(8, 3)})


def shift() -> onnx.ModelProto:
    """Build a kernel with two activations."""
    node = helper.make_node("Add", ["x", "z"], ["y"])
    return model([node], [("x", FLOAT, [4, 8]), ("z", FLOAT, [8])], [("y", FLOAT, None)])


BUILT = {stream_model.__name__: stream_model for stream_model in (split, clip, lstm, matmul, shift)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("kernels")
    return {name: one_kernel(build(), folder / name) for name, build in BUILT.items()}


@pytest.fixture(scope="module")
def blocker() -> BlockingKernel:
    """The smallest blocking kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "_MIN_BLOCKER_MS", 0.0)
        return BlockingKernel("cpu", threads=1)


class Device:
    """Simulated device; all times in milliseconds.

    A run takes `plug_ms` plus `device_ms` per copy, a call takes `call_ms` plus `host_ms` per copy.
    """

    def __init__(self, plug_ms: float, device_ms: float, host_ms: float, call_ms: float = 0.01) -> None:
        self.plug_ms, self.device_ms, self.host_ms, self.call_ms = plug_ms, device_ms, host_ms, call_ms
        self.requests: list[tuple[str, int]] = []
        """(what, copies behind the plug), of every run."""

    def run_ms(self, copies: int) -> float:
        self.requests.append(("run", copies))
        return self.plug_ms + copies * self.device_ms

    def issue_ms(self, copies: int) -> float:
        self.requests.append(("issue", copies))
        return self.call_ms + copies * self.host_ms


class ScriptedSession(BoundSession):
    """Session on a simulated device."""

    def __init__(self, device: Device, copies: int) -> None:
        self.device, self.copies = device, copies

    def measure_run_ms(self) -> float:
        return self.device.run_ms(self.copies)

    def measure_issue_ms(self) -> float:
        return self.device.issue_ms(self.copies)


class ScriptedBlocker(BlockingKernel):
    """Blocking kernel on a simulated device."""

    def __init__(self, device: Device) -> None:
        self.size, self.device = 4, device
        self.session = ScriptedSession(device, 0)

    def open_session(self, model: onnx.ModelProto, inputs: Mapping[str, Any]) -> BoundSession:
        return ScriptedSession(self.device, len(model.graph.node) - 1)


def scripted(
    file: Path, device: Device, *, copies: int = 48, isolated_ms: float = 0.01, setup_ms: float = 0.0
):
    return measure_stream(
        file, ScriptedBlocker(device), inputs={}, copies=copies, isolated_ms=isolated_ms, setup_ms=setup_ms
    )


# Executed nodes.


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Sessions that were opened, with onnxruntime's profiler enabled."""
    opened: list[Any] = []
    plain = session.open_session

    def open_session(content: Any, provider: str, level: str, **options: Any) -> Any:
        assert level == "disable", "optimization changes the blocking kernel and the copies"
        writes = {"enable_profiling": True, "profile_file_prefix": str(tmp_path / f"profile_{len(opened)}")}
        opened.append(plain(content, provider, level, **options, settings=writes))
        return opened[-1]

    monkeypatch.setattr(session, "open_session", open_session)
    return opened


def nodes_run(opened: Any) -> list[list[tuple[str, str]]]:
    """Return (name, operator) of the nodes of each run, in execution order."""
    events = json.loads(Path(opened.end_profiling()).read_text())
    ran = [event for event in events if event.get("name", "").endswith("_kernel_time")]
    ran.sort(key=lambda event: event["ts"])
    runs: list[list[tuple[str, str]]] = []
    for event in ran:
        name = event["name"].removesuffix("_kernel_time")
        if name == PRODUCT or not runs:
            runs.append([])
        runs[-1].append((name, event["args"]["op_name"]))
    return runs


@pytest.mark.parametrize("copies", [MIN_COPIES, 11])
@pytest.mark.parametrize("name", BUILT)
def test_blocker_runs_before_all_copies(
    name: str,
    copies: int,
    files: dict[str, Path],
    profiled: list[Any],
    blocker: BlockingKernel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = Runner(files[name], "cpu", threads=1)
    before = len(profiled)
    # A CPU executes within the call, so the issue would never end before the blocking kernel.
    monkeypatch.setattr(BoundSession, "measure_issue_ms", lambda bound: 0.0)
    timing = measure_stream(files[name], blocker, inputs=runner.inputs, copies=copies, isolated_ms=0.01)
    operator = onnx.load(str(files[name])).graph.node[0].op_type
    runs = nodes_run(profiled[-1])
    assert len(profiled) == before + 1 and len(runs) >= NUM_RUN_PAIRS and timing.copies == copies
    for run in runs:
        assert run[0] == (PRODUCT, "MatMul")
        assert sorted(run[1:]) == sorted((f"copy_{number}", operator) for number in range(copies))


def test_blocker_is_one_matmul(profiled: list[Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(stream, "_MIN_BLOCKER_MS", 0.0)
    stream_model = BlockingKernel("cpu", threads=1)
    stream_model.session.measure_run_ms()
    assert set(map(tuple, nodes_run(profiled[-1]))) == {((PRODUCT, "MatMul"),)}


def test_blocker_grows_to_minimum_time_or_maximum_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_MIN_MATRIX_SIZE", 8)
    monkeypatch.setattr(stream, "_MAX_MATRIX_SIZE", 40)
    sizes: list[int] = []

    def run_ms(bound: BoundSession) -> float:
        (operand,) = bound._inputs.values()
        sizes.append(operand.shape()[0])
        return 0.1 * sizes[-1]

    monkeypatch.setattr(BoundSession, "measure_run_ms", run_ms)
    for blocker_ms, size in ((0.1, 8), (0.8, 8), (0.9, 12), (1.3, 18), (2.0, 27), (1e9, 40)):
        monkeypatch.setattr(stream, "_MIN_BLOCKER_MS", blocker_ms)
        assert BlockingKernel("cpu", threads=1).size == size
    assert sorted(set(sizes)) == [8, 12, 18, 27, 40]


def test_blocker_size_ignores_slow_outlier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_MIN_MATRIX_SIZE", 8)
    monkeypatch.setattr(stream, "_MAX_MATRIX_SIZE", 12)
    run_times_ms: list[int] = []

    def run_ms(bound: BoundSession) -> float:
        run_times_ms.append(1)
        return 50.0 if len(run_times_ms) % 2 else 1.0

    monkeypatch.setattr(BoundSession, "measure_run_ms", run_ms)
    assert BlockingKernel("cpu", threads=1).size == 12


def test_blocker_missing_device_raises() -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("onnxruntime has CUDA here")
    with pytest.raises((DeviceError, RunError)):
        BlockingKernel("cuda")
    with pytest.raises(InputError):
        BlockingKernel("abacus")


# Copies.


@settings(max_examples=20)
@given(name=st.sampled_from(sorted(BUILT)), copies=st.integers(0, 40))
def test_copies_share_inputs_not_outputs(name: str, copies: int) -> None:
    built = BUILT[name]()
    content = built.SerializeToString()
    node = built.graph.node[0]
    stream_model = copy_node(built, copies)
    assert len(stream_model) == len({copy.name for copy in stream_model}) == copies
    written = [output for copy in stream_model for output in copy.output if output]
    assert len(written) == len(set(written)) == copies * sum(map(bool, node.output))
    assert not set(written) & {*node.output, *node.input}
    for copy in stream_model:
        assert (copy.op_type, copy.domain, list(copy.input)) == (node.op_type, node.domain, list(node.input))
        assert list(copy.attribute) == list(node.attribute)
        assert [bool(output) for output in copy.output] == [bool(output) for output in node.output]
    assert built.SerializeToString() == content


@pytest.mark.parametrize("name", BUILT)
def test_copies_compute_kernel_outputs(name: str, files: dict[str, Path], blocker: BlockingKernel) -> None:
    kernel_model = onnx.load(str(files[name]))
    expected = Runner(files[name], "cpu", threads=1).run_once()
    copies = copy_node(kernel_model, 3)
    stream_model = blocker.make_model(copies, kernel_model)
    outputs = [output for copy in copies for output in copy.output if output]
    del stream_model.graph.output[:]
    stream_model.graph.output.extend(onnx.ValueInfoProto(name=output) for output in outputs)
    opened = session.open_session(stream_model.SerializeToString(), "cpu", "disable", threads=1)
    operand = {"sparseflow_operand": np.ones((blocker.size, blocker.size), np.float32)}
    outputs = opened.run(outputs, make_dummy_inputs(files[name]) | operand)
    assert len(outputs) == 3 * len(expected) > 0
    for position, output in enumerate(outputs):
        np.testing.assert_array_equal(output, expected[position % len(expected)])


@pytest.mark.parametrize("name", BUILT)
def test_make_model_does_not_change_kernel(name: str, blocker: BlockingKernel) -> None:
    built = BUILT[name]()
    content = built.SerializeToString()
    stream_model = blocker.make_model(copy_node(built, 5), built)
    assert built.SerializeToString() == content
    assert [node.op_type for node in stream_model.graph.node].count(built.graph.node[0].op_type) >= 5
    assert list(stream_model.graph.initializer) == list(built.graph.initializer)
    assert list(stream_model.opset_import) == list(built.opset_import)


# Number of copies.


@pytest.mark.parametrize(
    ("arguments", "copies"),
    [
        ({"copies": 48}, 48),
        ({"copies": 7}, 7),
        ({"copies": MIN_COPIES}, MIN_COPIES),
        ({"copies": 1}, MIN_COPIES),
        ({"copies": 0}, MIN_COPIES),
        # At most 20 ms of kernels and 500 ms of setup.
        ({"isolated_ms": 1.0}, 20),
        ({"isolated_ms": 3.0}, 6),
        ({"isolated_ms": 1000.0}, MIN_COPIES),
        ({"isolated_ms": 0.0}, 48),
        ({"setup_ms": 50.0}, 10),
        ({"setup_ms": 90.0}, 5),
        ({"setup_ms": 9000.0}, MIN_COPIES),
        ({"isolated_ms": 2.0, "setup_ms": 100.0}, 5),
        ({"isolated_ms": 4.0, "setup_ms": 50.0}, 5),
        ({"copies": 9, "isolated_ms": 1.0, "setup_ms": 20.0}, 9),
    ],
)
def test_copies_limited_by_time(files: dict[str, Path], arguments: dict[str, Any], copies: int) -> None:
    device = Device(plug_ms=2.0, device_ms=0.01, host_ms=0.001)
    timing = scripted(files["split"], device, **arguments)
    assert timing.copies == copies and {num_copies for _, num_copies in device.requests} == {0, copies}


@given(host=st.floats(1e-4, 10.0), copies=st.integers(0, 200), blocker=st.floats(0.1, 10.0))
def test_copies_reduced_for_slow_host(
    host: float, copies: int, blocker: float, files: dict[str, Path]
) -> None:
    device = Device(plug_ms=blocker, device_ms=0.01, host_ms=host)
    timing = scripted(files["matmul"], device, copies=copies)
    assert MIN_COPIES <= timing.copies <= max(copies, MIN_COPIES)
    assert timing.copies == MIN_COPIES or device.call_ms + timing.copies * host < 0.8 * blocker
    # Not fewer than necessary: twice as many are too many.
    if timing.copies not in (max(copies, MIN_COPIES), MIN_COPIES):
        assert device.call_ms + (2 * timing.copies + 1) * host >= 0.8 * blocker


# Computed times.


@given(
    blocker=st.floats(1.0, 50.0),
    device=st.floats(0.0, 0.4),
    host=st.floats(0.0, 0.1),
    copies=st.integers(0, 99),
)
def test_device_and_host_time_separated(
    blocker: float, device: float, host: float, copies: int, files: dict[str, Path]
) -> None:
    timing = scripted(files["clip"], Device(blocker, device, host), copies=copies)
    assert timing.device_ms == pytest.approx(device, abs=1e-9)
    assert timing.host_ms == pytest.approx(host, abs=1e-9)
    assert list(map(len, (timing.run_ms, timing.blocker_ms))) == [NUM_RUN_PAIRS] * 2
    assert list(map(len, (timing.issue_ms, timing.blocker_issue_ms))) == [NUM_ISSUE_PAIRS] * 2
    assert set(timing.blocker_ms) == {blocker}
    assert timing.run_ms[0] == pytest.approx(blocker + timing.copies * device)


class Noisy(Device):
    """Simulated device with repeating times that records them."""

    def __init__(self, times: list[float], max_ms: float) -> None:
        super().__init__(1.0, 0.0, 0.0)
        self.times, self.max_ms = itertools.cycle(times), max_ms
        self.reported: dict[tuple[str, bool], list[float]] = {}

    def _next(self, name: str, copies: int, max_ms: float) -> float:
        value = min(next(self.times), max_ms)
        self.reported.setdefault((name, copies > 0), []).append(value)
        return value

    def run_ms(self, copies: int) -> float:
        return self._next("run", copies, math.inf)

    def issue_ms(self, copies: int) -> float:
        return self._next("issue", copies, self.max_ms)


@given(
    times=st.lists(st.floats(0.001, 100.0), min_size=1, max_size=40),
    max_ms=st.sampled_from([1e-4, 0.5, 100.0]),
    copies=st.integers(0, 60),
)
def test_times_are_median_and_minimum(
    times: list[float], max_ms: float, copies: int, files: dict[str, Path]
) -> None:
    device = Noisy(times, max_ms)
    timing = scripted(files["split"], device, copies=copies)
    # Exactly the last runs of each kind are samples.
    assert timing.run_ms == tuple(device.reported["run", True][-NUM_RUN_PAIRS:])
    assert timing.blocker_ms == tuple(device.reported["run", False][-NUM_RUN_PAIRS:])
    assert timing.issue_ms == tuple(device.reported["issue", True][-NUM_ISSUE_PAIRS:])
    assert timing.blocker_issue_ms == tuple(device.reported["issue", False][-NUM_ISSUE_PAIRS:])
    differences = sorted(
        run - blocker_ms for run, blocker_ms in zip(timing.run_ms, timing.blocker_ms, strict=True)
    )
    middle = (differences[NUM_RUN_PAIRS // 2 - 1] + differences[NUM_RUN_PAIRS // 2]) / 2
    min_difference_ms = min(timing.issue_ms) - min(timing.blocker_issue_ms)
    assert timing.device_ms == pytest.approx(max(middle / timing.copies, 0.0), abs=1e-12)
    assert timing.host_ms == pytest.approx(max(min_difference_ms / timing.copies, 0.0), abs=1e-12)
    assert timing.device_ms >= 0.0 and timing.host_ms >= 0.0
    assert MIN_COPIES <= timing.copies <= max(copies, MIN_COPIES)


def test_times_robust_to_drift_and_outliers(
    files: dict[str, Path],
) -> None:
    class Drifting(Device):
        def run_ms(self, copies: int) -> float:
            plain = super().run_ms(copies)
            number = len(self.requests)
            return plain * (1.0 + 0.001 * number) + (30.0 if number % 9 == 0 else 0.0)

        def issue_ms(self, copies: int) -> float:
            plain = super().issue_ms(copies)
            return plain + (5.0 if len(self.requests) % 3 else 0.0)

    timing = scripted(files["split"], Drifting(plug_ms=2.0, device_ms=0.05, host_ms=0.004), copies=20)
    assert timing.device_ms == pytest.approx(0.05, rel=0.1)
    assert timing.host_ms == pytest.approx(0.004, rel=1e-6)


@pytest.mark.parametrize("name", BUILT)
def test_row_contains_samples_in_nanoseconds(
    name: str, files: dict[str, Path], blocker: BlockingKernel
) -> None:
    runner = Runner(files[name], "cpu", threads=1)
    timing = measure_stream(files[name], blocker, inputs=runner.inputs, copies=5, isolated_ms=0.01)
    row = timing.to_row()
    assert set(row) == {"copies", "device_ms", "host_ms", "overtaken", *SAMPLES}
    assert MIN_COPIES <= row["copies"] <= 5 and row["device_ms"] >= 0.0 and row["host_ms"] >= 0.0
    assert [len(row[side]) for side in SAMPLES] == [
        NUM_RUN_PAIRS,
        NUM_RUN_PAIRS,
        NUM_ISSUE_PAIRS,
        NUM_ISSUE_PAIRS,
    ]
    for side in SAMPLES:
        assert all(type(value) is int and value > 0 for value in row[side])
    median_ms = statistics.median(a - b for a, b in zip(row["stream_ns"], row["plug_ns"], strict=True))
    assert row["device_ms"] == pytest.approx(max(median_ms / 1e6 / row["copies"], 0.0), abs=1e-6)
    min_difference_ms = min(row["issue_ns"]) - min(row["plug_issue_ns"])
    assert row["host_ms"] == pytest.approx(max(min_difference_ms / 1e6 / row["copies"], 0.0), abs=1e-6)
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_row_converts_milliseconds() -> None:
    timing = StreamTiming(
        copies=4, device_ms=0.25, host_ms=0.5, overtaken=True, run_ms=(1.5, 2.0000004),
        blocker_ms=(1e-6,), issue_ms=(), blocker_issue_ms=(3.0,),
    )  # fmt: skip
    assert timing.to_row() == {
        "copies": 4, "device_ms": 0.25, "host_ms": 0.5, "overtaken": True,
        "stream_ns": [1_500_000, 2_000_000], "plug_ns": [1], "issue_ns": [], "plug_issue_ns": [3_000_000],
    }  # fmt: skip


@pytest.mark.parametrize(("host_ms", "overtaken"), [(0.001, False), (0.03, False), (0.5, True), (5.0, True)])
def test_slow_host_marked_overtaken(files: dict[str, Path], host_ms: float, overtaken: bool) -> None:
    timing = scripted(files["split"], Device(2.0, 0.01, host_ms))
    assert timing.overtaken == overtaken
    assert timing.copies == MIN_COPIES or not overtaken


# Errors.


def test_measure_stream_damaged_file_raises(files: dict[str, Path], tmp_path: Path) -> None:
    device = Device(2.0, 0.01, 0.001)
    with pytest.raises(InputError):
        scripted(tmp_path / "absent.onnx", device)
    content = files["split"].read_bytes()
    for number, damaged in enumerate((b"", b"no model", content[:60], content[: len(content) // 2])):
        path = tmp_path / f"damaged_{number}.onnx"
        path.write_bytes(damaged)
        with pytest.raises(FileFormatError, match=path.name):
            scripted(path, device)
    assert not device.requests


def test_measure_stream_model_raises(blocker: BlockingKernel, tmp_path: Path) -> None:
    path = save(convnet(), tmp_path, "net.onnx")
    runner = Runner(path, "cpu", threads=1)
    with pytest.raises(InputError):
        measure_stream(path, blocker, inputs=runner.inputs, copies=5, isolated_ms=0.01)


def test_measure_stream_model_error_names_file(tmp_path: Path) -> None:
    # Its first node writes an output of the model, so copies of it could be executed.
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Erf", ["y"], ["z"])]
    path = save(model(nodes, [("x", FLOAT, [4])], [("y", FLOAT, None)]), tmp_path, "net.onnx")
    with pytest.raises(InputError, match=r"`latency extract`"):
        scripted(path, Device(2.0, 0.01, 0.001))


def test_measure_stream_rejected_copies_raise(
    files: dict[str, Path], blocker: BlockingKernel, tmp_path: Path
) -> None:
    unknown = onnx.load(str(files["matmul"]))
    unknown.graph.node[0].op_type = "MatMulti"
    path = save(unknown, tmp_path, "unknown.onnx")
    inputs = Runner(files["matmul"], "cpu", threads=1).inputs
    with pytest.raises((InputError, RunError), match="MatMulti"):
        measure_stream(path, blocker, inputs=inputs, copies=5, isolated_ms=0.01)
    other = {name: blocker.session._inputs["sparseflow_operand"] for name in inputs}
    with pytest.raises(RunError, match=files["matmul"].name):
        measure_stream(files["matmul"], blocker, inputs=other, copies=5, isolated_ms=0.01)


# Collections.


@pytest.mark.parametrize("provider", ["cuda", "CUDAExecutionProvider"])
def test_config_gpu_copies_default(provider: str, tmp_path: Path) -> None:
    defaults: dict[str, Any] = {"kernels": [tmp_path], "provider": provider}
    assert CollectionConfig(**defaults).copies == DEFAULT_COPIES == 48
    assert CollectionConfig(**defaults, copies=0).copies == 0
    assert CollectionConfig(**defaults, copies=7).copies == 7
    file = tmp_path / "collect.yaml"
    file.write_text(f"kernels: .\nprovider: {provider}\n")
    assert load_collection_config(file).copies == DEFAULT_COPIES
    config = CollectionConfig(**defaults, copies=3)
    assert CollectionConfig.model_validate(json.loads(config.model_dump_json())) == config


@pytest.mark.parametrize("provider", ["cpu", "CPUExecutionProvider"])
def test_config_cpu_copies_must_be_zero(provider: str, tmp_path: Path) -> None:
    defaults: dict[str, Any] = {"kernels": [tmp_path], "provider": provider}
    assert CollectionConfig(**defaults).copies == CollectionConfig(kernels=[tmp_path]).copies == 0
    assert CollectionConfig(**defaults, copies=0).copies == 0
    with pytest.raises(pydantic.ValidationError, match=r"`copies` \(=48\) must be 0 on a CPU"):
        CollectionConfig(**defaults, copies=48)
    file = tmp_path / "collect.yaml"
    file.write_text(f"kernels: .\nprovider: {provider}\ncopies: 5\n")
    with pytest.raises(FileFormatError, match=r"`copies`.*5.*0"):
        load_collection_config(file)


def test_config_copies_invalid_raises(tmp_path: Path) -> None:
    for wrong in (-1, 1.5, "many"):
        with pytest.raises(pydantic.ValidationError, match="copies"):
            CollectionConfig(kernels=[tmp_path], provider="cuda", copies=wrong)  # type: ignore[arg-type]


class NoLoad:
    """Stressor without load that reaches its level immediately."""

    def __init__(self, kind: str, level: float, **options: Any) -> None:
        self.level = level

    def start(self) -> None:
        return None

    def set_level(self, level: float) -> None:
        self.level = level

    def reach_load(self, level: float, timeout_s: float) -> float:
        self.level = level
        return level

    @contextmanager
    def hold_duty(self) -> Iterator[None]:
        yield

    def measure_share_between(self, begin_s: float, end_s: float) -> float:
        return self.level

    def close(self) -> None:
        return None


class Recorder:
    """Replaces the stream measurement and records its arguments."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.blockers: list[tuple[str, dict[str, Any]]] = []
        self.measured: list[tuple[Path, dict[str, Any]]] = []
        self.error: Exception | None = None
        patch.setattr(instruments, "BlockingKernel", self._make_blocker)
        patch.setattr(stream, "measure_stream", self._measure)
        patch.setattr(instruments, "Stressor", NoLoad)
        patch.setattr(instruments, "IDLE_WINDOW_S", 0.1)

    def _make_blocker(self, provider: str, **options: Any) -> str:
        self.blockers.append((provider, options))
        return "the blocker"

    def _measure(self, path: Path | str, blocker: str, **options: Any) -> StreamTiming:
        assert blocker == "the blocker"
        self.measured.append((Path(path), options))
        if self.error is not None:
            raise self.error
        return StreamTiming(
            copies=7,
            device_ms=0.25,
            host_ms=0.125,
            overtaken=False,
            run_ms=(3.0,) * NUM_RUN_PAIRS,
            blocker_ms=(2.0,) * NUM_RUN_PAIRS,
            issue_ms=(1.0,) * NUM_ISSUE_PAIRS,
            blocker_issue_ms=(0.5,) * NUM_ISSUE_PAIRS,
        )


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def settings_of(files: dict[str, Path], folder: Path, copies: int) -> CollectionConfig:
    """Return settings for two kernels and a model on this CPU, with copies as on a GPU."""
    defaults: dict[str, Any] = {
        "kernels": [files["split"], files["matmul"]], "models": save(convnet(), folder, "net.onnx"),
        "levels": [0.0, 0.4], "rounds": 1, "min_time_s": 0.11, "max_time_s": 0.2, "loops": 1, "warmup": 1,
        "reference_every": 50,
    }  # fmt: skip
    return CollectionConfig(**defaults).model_copy(update={"copies": copies})


def items_of(config: CollectionConfig) -> dict[str, Target]:
    return {item.op: item for item in make_plan(config, {}).targets}


def test_stream_only_for_idle_kernels(files: dict[str, Path], recorder: Recorder, tmp_path: Path) -> None:
    config = settings_of(files, tmp_path, 31)
    items = items_of(config)
    rows: dict[tuple[str, float], dict[str, Any]] = {}
    with LocalInstruments(config) as bench:
        for level in (0.0, 0.4, 0.0):
            with bench.block(level):
                for op in ("Model", "Split", "MatMul"):
                    rows[op, level] = bench.measure(items[op])
                    assert rows[op, level]["error"] is None
            if level:
                assert len(recorder.measured) == 2
    assert len(recorder.blockers) == 1, "one plug does for the whole collection"
    assert recorder.blockers[0][0] == "cpu"
    assert [path.name for path, _ in recorder.measured] == 2 * [files["split"].name, files["matmul"].name]
    for path, options in recorder.measured:
        assert options["copies"] == 31 and options["isolated_ms"] > 0.0 and options["setup_ms"] >= 0.0
        assert set(options["inputs"]) == set(make_dummy_inputs(path))
    for (op, level), row in rows.items():
        stream_columns = {
            name: row[name] for name in ("copies", "device_ms", "host_ms", *SAMPLES) if name in row
        }
        if op == "Model" or level:
            assert stream_columns == {}
        else:
            assert (stream_columns["copies"], stream_columns["device_ms"], stream_columns["host_ms"]) == (
                7,
                0.25,
                0.125,
            )
            assert [len(stream_columns[side]) for side in SAMPLES] == [
                NUM_RUN_PAIRS,
                NUM_RUN_PAIRS,
                NUM_ISSUE_PAIRS,
                NUM_ISSUE_PAIRS,
            ]
        assert row["latency_ms"] > 0.0 and row["samples_ns"]


def test_stream_disabled_without_copies(files: dict[str, Path], recorder: Recorder, tmp_path: Path) -> None:
    config = settings_of(files, tmp_path, 0)
    with LocalInstruments(config) as bench, bench.block(0.0):
        row = bench.measure(items_of(config)["Split"])
    assert row["error"] is None and "device_ms" not in row
    assert not recorder.blockers and not recorder.measured


def test_stream_failure_gives_stream_error(
    files: dict[str, Path], recorder: Recorder, tmp_path: Path
) -> None:
    config = settings_of(files, tmp_path, 31)
    item = items_of(config)["Split"]
    with LocalInstruments(config) as bench, bench.block(0.0):
        recorder.error = RunError("it does not fit")
        row = bench.measure(item)
        assert row["error"] is None and row["stream_error"] == "RunError: it does not fit"
        assert row["latency_ms"] > 0.0 and "device_ms" not in row
        recorder.error = DeviceError("the GPU is gone")
        with pytest.raises(DeviceError):
            bench.measure(item)
        recorder.error = None
        assert bench.measure(item)["device_ms"] == 0.25


def test_local_instruments_measure_stream(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_MIN_BLOCKER_MS", 0.0)
    monkeypatch.setattr(instruments, "IDLE_WINDOW_S", 0.1)
    config = settings_of(files, tmp_path, 5)
    with LocalInstruments(config) as bench, bench.block(0.0):
        row = bench.measure(items_of(config)["Split"])
    assert row["error"] is None and MIN_COPIES <= row["copies"] <= 5
    assert [len(row[side]) for side in SAMPLES] == [
        NUM_RUN_PAIRS,
        NUM_RUN_PAIRS,
        NUM_ISSUE_PAIRS,
        NUM_ISSUE_PAIRS,
    ]


def test_stream_columns_round_trip(files: dict[str, Path], tmp_path: Path) -> None:
    config = settings_of(files, tmp_path / "models", 0)
    bench = StreamedBench(config)
    measured_rows: list[dict[str, Any]] = []
    plain = bench.measure

    def measured(target: Target) -> dict[str, Any]:
        measured_rows.append(plain(target))
        return measured_rows[-1]

    bench.measure = measured
    collect(config, tmp_path / "out", instruments=bench)
    rows = read_rows(tmp_path / "out")
    assert len(rows) == len(measured_rows) and (tmp_path / "out" / "rows.parquet").is_file()
    streamed = [row for row in rows if row["device_ms"] is not None]
    assert {row["op_type"] for row in streamed} == {"Split", "MatMul"}
    assert {row["level"] for row in streamed} == {0.0}
    for row, expected in zip(rows, measured_rows, strict=True):
        for name in ("copies", "device_ms", "host_ms", *SAMPLES):
            assert row[name] == expected.get(name)
        if row in streamed:
            assert all(type(value) is int for side in SAMPLES for value in row[side])
            assert [len(row[side]) for side in SAMPLES] == [
                NUM_RUN_PAIRS,
                NUM_RUN_PAIRS,
                NUM_ISSUE_PAIRS,
                NUM_ISSUE_PAIRS,
            ]
            assert type(row["copies"]) is int
    assert METADATA_KEY in {entry.key for entry in onnx.load(streamed[0]["path"]).metadata_props}
