"""Kernels in a stream: what is run and what is reckoned from it. What a CPU says there means nothing."""

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
from sparseflow.latency import instruments, session, stream
from sparseflow.latency.campaign import COPIES, Config, Item, make_plan, read_config
from sparseflow.latency.collect import collect, read
from sparseflow.latency.extract import METADATA_KEY, dummy_inputs, extract
from sparseflow.latency.instruments import Bench
from sparseflow.latency.runner import Runner
from sparseflow.latency.stream import FEWEST, ISSUES, PAIRS, Bound, Plug, Streamed, copied, measure
from tests.latency.onnx_models import FLOAT, convnet, model, save, values
from tests.latency.synthetic import StreamedBench

SAMPLES = ("stream_ns", "plug_ns", "issue_ns", "plug_issue_ns")
PRODUCT = "plug"
"""Name of the node that keeps the device busy."""


def one_kernel(built: onnx.ModelProto, folder: Path) -> Path:
    """The file of the kernel that a model consists of."""
    (found,) = extract(save(built, folder), folder, check=False, threads=1)
    assert found.path is not None
    return found.path


def split() -> onnx.ModelProto:
    """Two outputs."""
    node = helper.make_node("Split", ["x"], ["a", "b"], axis=1)
    return model([node], [("x", FLOAT, [4, 8])], [("a", FLOAT, None), ("b", FLOAT, None)])


def clip() -> onnx.ModelProto:
    """The second of three inputs left out."""
    weights = {"high": np.array(0.5, np.float32)}
    node = helper.make_node("Clip", ["x", "", "high"], ["y"])
    return model([node], [("x", FLOAT, [4, 4])], [("y", FLOAT, None)], weights)


def lstm() -> onnx.ModelProto:
    """The first of two outputs left out."""
    weights = {"w": values(1, 12, 4), "r": values(1, 12, 3)}
    node = helper.make_node("LSTM", ["x", "w", "r"], ["", "h"], hidden_size=3)
    return model([node], [("x", FLOAT, [5, 2, 4])], [("h", FLOAT, None)], weights)


def matmul() -> onnx.ModelProto:
    """The same operator as the plug's own."""
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    return model([node], [("x", FLOAT, [4, 8])], [("y", FLOAT, None)], {"w": values(8, 3)})


def shift() -> onnx.ModelProto:
    """Two inputs that are fed."""
    node = helper.make_node("Add", ["x", "z"], ["y"])
    return model([node], [("x", FLOAT, [4, 8]), ("z", FLOAT, [8])], [("y", FLOAT, None)])


BUILT = {made.__name__: made for made in (split, clip, lstm, matmul, shift)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("kernels")
    return {name: one_kernel(made(), folder / name) for name, made in BUILT.items()}


@pytest.fixture(scope="module")
def plug() -> Plug:
    """The smallest one, whatever this machine takes for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "_PLUG_MS", 0.0)
        return Plug("cpu", threads=1)


class Device:
    """Answers in place of sessions what follows from these times, all in milliseconds.

    A run takes `plug_ms` and `device_ms` for each copy, a call `call_ms` and `host_ms` for each copy.
    """

    def __init__(self, plug_ms: float, device_ms: float, host_ms: float, call_ms: float = 0.01) -> None:
        self.plug_ms, self.device_ms, self.host_ms, self.call_ms = plug_ms, device_ms, host_ms, call_ms
        self.asked: list[tuple[str, int]] = []
        """(what, copies behind the plug), of every run."""

    def run_ms(self, copies: int) -> float:
        self.asked.append(("run", copies))
        return self.plug_ms + copies * self.device_ms

    def issue_ms(self, copies: int) -> float:
        self.asked.append(("issue", copies))
        return self.call_ms + copies * self.host_ms


class ScriptedBound(Bound):
    """A session on a made-up device."""

    def __init__(self, device: Device, copies: int) -> None:
        self.device, self.copies = device, copies

    def run_ms(self) -> float:
        return self.device.run_ms(self.copies)

    def issue_ms(self) -> float:
        return self.device.issue_ms(self.copies)


class ScriptedPlug(Plug):
    """A plug on a made-up device."""

    def __init__(self, device: Device) -> None:
        self.size, self.device = 4, device
        self.alone = ScriptedBound(device, 0)

    def opened(self, model: onnx.ModelProto, inputs: Mapping[str, Any]) -> Bound:
        return ScriptedBound(self.device, len(model.graph.node) - 1)


def scripted(file: Path, device: Device, *, copies: int = 48, alone_ms: float = 0.01, setup_ms: float = 0.0):
    return measure(file, ScriptedPlug(device), inputs={}, copies=copies, alone_ms=alone_ms, setup_ms=setup_ms)


# What is run.


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Every session that is opened, each writing down what it runs."""
    opened: list[Any] = []
    plain = session.open_session

    def open_session(content: Any, provider: str, level: str, **options: Any) -> Any:
        assert level == "disable", "what is optimised is no longer the plug and the copies"
        writes = {"enable_profiling": True, "profile_file_prefix": str(tmp_path / f"profile_{len(opened)}")}
        opened.append(plain(content, provider, level, **options, settings=writes))
        return opened[-1]

    monkeypatch.setattr(session, "open_session", open_session)
    return opened


def nodes_run(opened: Any) -> list[list[tuple[str, str]]]:
    """(name, operator) of the nodes of each run of a session, in the order in which they ran."""
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


@pytest.mark.parametrize("copies", [FEWEST, 11])
@pytest.mark.parametrize("name", BUILT)
def test_the_plug_runs_before_all_copies_and_every_copy_runs(
    name: str,
    copies: int,
    files: dict[str, Path],
    profiled: list[Any],
    plug: Plug,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = Runner(files[name], "cpu", threads=1)
    before = len(profiled)
    # A CPU works within the call, so that it would never be done before the plug.
    monkeypatch.setattr(Bound, "issue_ms", lambda bound: 0.0)
    found = measure(files[name], plug, inputs=runner.inputs, copies=copies, alone_ms=0.01)
    operator = onnx.load(str(files[name])).graph.node[0].op_type
    runs = nodes_run(profiled[-1])
    assert len(profiled) == before + 1 and len(runs) >= PAIRS and found.copies == copies
    for run in runs:
        assert run[0] == (PRODUCT, "MatMul")
        assert sorted(run[1:]) == sorted((f"copy_{number}", operator) for number in range(copies))


def test_the_plug_alone_is_one_product_of_matrices(profiled: list[Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(stream, "_PLUG_MS", 0.0)
    made = Plug("cpu", threads=1)
    made.alone.run_ms()
    assert set(map(tuple, nodes_run(profiled[-1]))) == {((PRODUCT, "MatMul"),)}


def test_a_plug_grows_until_it_takes_long_enough_or_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_SMALLEST_PLUG", 8)
    monkeypatch.setattr(stream, "_LARGEST_PLUG", 40)
    sizes: list[int] = []

    def run_ms(bound: Bound) -> float:
        (operand,) = bound._inputs.values()
        sizes.append(operand.shape()[0])
        return 0.1 * sizes[-1]

    monkeypatch.setattr(Bound, "run_ms", run_ms)
    for wanted, size in ((0.1, 8), (0.8, 8), (0.9, 12), (1.3, 18), (2.0, 27), (1e9, 40)):
        monkeypatch.setattr(stream, "_PLUG_MS", wanted)
        assert Plug("cpu", threads=1).size == size
    assert sorted(set(sizes)) == [8, 12, 18, 27, 40]


def test_one_slow_run_does_not_pass_for_a_plug_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_SMALLEST_PLUG", 8)
    monkeypatch.setattr(stream, "_LARGEST_PLUG", 12)
    taken: list[int] = []

    def run_ms(bound: Bound) -> float:
        taken.append(1)
        return 50.0 if len(taken) % 2 else 1.0

    monkeypatch.setattr(Bound, "run_ms", run_ms)
    assert Plug("cpu", threads=1).size == 12


def test_a_plug_on_a_device_that_is_not_there_is_refused() -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("onnxruntime has CUDA here")
    with pytest.raises((DeviceError, RunError)):
        Plug("cuda")
    with pytest.raises(InputError, match="abacus"):
        Plug("abacus")


# Copies.


@settings(deadline=None, max_examples=20)
@given(name=st.sampled_from(sorted(BUILT)), copies=st.integers(0, 40))
def test_copies_read_the_same_and_write_outputs_of_their_own(name: str, copies: int) -> None:
    built = BUILT[name]()
    kept = built.SerializeToString()
    node = built.graph.node[0]
    made = copied(built, copies)
    assert len(made) == len({copy.name for copy in made}) == copies
    written = [output for copy in made for output in copy.output if output]
    assert len(written) == len(set(written)) == copies * sum(map(bool, node.output))
    assert not set(written) & {*node.output, *node.input}
    for copy in made:
        assert (copy.op_type, copy.domain, list(copy.input)) == (node.op_type, node.domain, list(node.input))
        assert list(copy.attribute) == list(node.attribute)
        assert [bool(output) for output in copy.output] == [bool(output) for output in node.output]
    assert built.SerializeToString() == kept


@pytest.mark.parametrize("name", BUILT)
def test_every_copy_gives_what_the_kernel_gives(name: str, files: dict[str, Path], plug: Plug) -> None:
    alone = onnx.load(str(files[name]))
    expected = Runner(files[name], "cpu", threads=1).outputs()
    copies = copied(alone, 3)
    made = plug.model(copies, alone)
    outputs = [output for copy in copies for output in copy.output if output]
    del made.graph.output[:]
    made.graph.output.extend(onnx.ValueInfoProto(name=output) for output in outputs)
    opened = session.open_session(made.SerializeToString(), "cpu", "disable", threads=1)
    operand = {"sparseflow_operand": np.ones((plug.size, plug.size), np.float32)}
    found = opened.run(outputs, dummy_inputs(files[name]) | operand)
    assert len(found) == 3 * len(expected) > 0
    for place, each in enumerate(found):
        np.testing.assert_array_equal(each, expected[place % len(expected)])


@pytest.mark.parametrize("name", BUILT)
def test_the_plug_leaves_the_kernels_model_as_it_was(name: str, plug: Plug) -> None:
    built = BUILT[name]()
    kept = built.SerializeToString()
    made = plug.model(copied(built, 5), built)
    assert built.SerializeToString() == kept
    assert [node.op_type for node in made.graph.node].count(built.graph.node[0].op_type) >= 5
    assert list(made.graph.initializer) == list(built.graph.initializer)
    assert list(made.opset_import) == list(built.opset_import)


# How many of them.


@pytest.mark.parametrize(
    ("given", "copies"),
    [
        ({"copies": 48}, 48),
        ({"copies": 7}, 7),
        ({"copies": FEWEST}, FEWEST),
        ({"copies": 1}, FEWEST),
        ({"copies": 0}, FEWEST),
        # Twenty milliseconds of kernels, and half a second of what they set up.
        ({"alone_ms": 1.0}, 20),
        ({"alone_ms": 3.0}, 6),
        ({"alone_ms": 1000.0}, FEWEST),
        ({"alone_ms": 0.0}, 48),
        ({"setup_ms": 50.0}, 10),
        ({"setup_ms": 90.0}, 5),
        ({"setup_ms": 9000.0}, FEWEST),
        ({"alone_ms": 2.0, "setup_ms": 100.0}, 5),
        ({"alone_ms": 4.0, "setup_ms": 50.0}, 5),
        ({"copies": 9, "alone_ms": 1.0, "setup_ms": 20.0}, 9),
    ],
)
def test_copies_are_as_many_as_asked_for_but_fewer_where_they_take_long(
    files: dict[str, Path], given: dict[str, Any], copies: int
) -> None:
    device = Device(plug_ms=2.0, device_ms=0.01, host_ms=0.001)
    found = scripted(files["split"], device, **given)
    assert found.copies == copies and {many for _, many in device.asked} == {0, copies}


@settings(deadline=None)
@given(host=st.floats(1e-4, 10.0), copies=st.integers(0, 200), plug=st.floats(0.1, 10.0))
def test_the_host_is_done_long_before_the_plug_or_copies_are_the_fewest(
    host: float, copies: int, plug: float, files: dict[str, Path]
) -> None:
    device = Device(plug_ms=plug, device_ms=0.01, host_ms=host)
    found = scripted(files["matmul"], device, copies=copies)
    assert FEWEST <= found.copies <= max(copies, FEWEST)
    assert found.copies == FEWEST or device.call_ms + found.copies * host < 0.8 * plug
    # Not fewer than it takes: twice as many were too many.
    if found.copies not in (max(copies, FEWEST), FEWEST):
        assert device.call_ms + (2 * found.copies + 1) * host >= 0.8 * plug


# What is reckoned.


@settings(deadline=None)
@given(
    plug=st.floats(1.0, 50.0), device=st.floats(0.0, 0.4), host=st.floats(0.0, 0.1), copies=st.integers(0, 99)
)
def test_the_times_of_device_and_host_are_told_apart(
    plug: float, device: float, host: float, copies: int, files: dict[str, Path]
) -> None:
    found = scripted(files["clip"], Device(plug, device, host), copies=copies)
    assert found.device_ms == pytest.approx(device, abs=1e-9)
    assert found.host_ms == pytest.approx(host, abs=1e-9)
    assert list(map(len, (found.run_ms, found.plug_ms))) == [PAIRS] * 2
    assert list(map(len, (found.issue_ms, found.plug_issue_ms))) == [ISSUES] * 2
    assert set(found.plug_ms) == {plug}
    assert found.run_ms[0] == pytest.approx(plug + found.copies * device)


class Noisy(Device):
    """Answers with any times over and over, and keeps what it answered."""

    def __init__(self, times: list[float], most: float) -> None:
        super().__init__(1.0, 0.0, 0.0)
        self.times, self.most = itertools.cycle(times), most
        self.told: dict[tuple[str, bool], list[float]] = {}

    def _next(self, what: str, copies: int, most: float) -> float:
        value = min(next(self.times), most)
        self.told.setdefault((what, copies > 0), []).append(value)
        return value

    def run_ms(self, copies: int) -> float:
        return self._next("run", copies, math.inf)

    def issue_ms(self, copies: int) -> float:
        return self._next("issue", copies, self.most)


@settings(deadline=None)
@given(
    times=st.lists(st.floats(0.001, 100.0), min_size=1, max_size=40),
    most=st.sampled_from([1e-4, 0.5, 100.0]),
    copies=st.integers(0, 60),
)
def test_a_time_is_the_middle_of_pairs_or_the_least_of_calls_and_never_negative(
    times: list[float], most: float, copies: int, files: dict[str, Path]
) -> None:
    device = Noisy(times, most)
    found = scripted(files["split"], device, copies=copies)
    # Every sample is kept, and nothing is among them but the last runs of each kind.
    assert found.run_ms == tuple(device.told["run", True][-PAIRS:])
    assert found.plug_ms == tuple(device.told["run", False][-PAIRS:])
    assert found.issue_ms == tuple(device.told["issue", True][-ISSUES:])
    assert found.plug_issue_ms == tuple(device.told["issue", False][-ISSUES:])
    differences = sorted(run - alone for run, alone in zip(found.run_ms, found.plug_ms, strict=True))
    middle = (differences[PAIRS // 2 - 1] + differences[PAIRS // 2]) / 2
    least = min(found.issue_ms) - min(found.plug_issue_ms)
    assert found.device_ms == pytest.approx(max(middle / found.copies, 0.0), abs=1e-12)
    assert found.host_ms == pytest.approx(max(least / found.copies, 0.0), abs=1e-12)
    assert found.device_ms >= 0.0 and found.host_ms >= 0.0
    assert FEWEST <= found.copies <= max(copies, FEWEST)


def test_a_machine_that_gets_slower_and_single_runs_that_are_disturbed_do_not_matter(
    files: dict[str, Path],
) -> None:
    class Drifting(Device):
        def run_ms(self, copies: int) -> float:
            plain = super().run_ms(copies)
            number = len(self.asked)
            return plain * (1.0 + 0.001 * number) + (30.0 if number % 9 == 0 else 0.0)

        def issue_ms(self, copies: int) -> float:
            plain = super().issue_ms(copies)
            return plain + (5.0 if len(self.asked) % 3 else 0.0)

    found = scripted(files["split"], Drifting(plug_ms=2.0, device_ms=0.05, host_ms=0.004), copies=20)
    assert found.device_ms == pytest.approx(0.05, rel=0.1)
    assert found.host_ms == pytest.approx(0.004, rel=1e-6)


@pytest.mark.parametrize("name", BUILT)
def test_a_row_holds_every_sample_in_whole_nanoseconds(name: str, files: dict[str, Path], plug: Plug) -> None:
    runner = Runner(files[name], "cpu", threads=1)
    found = measure(files[name], plug, inputs=runner.inputs, copies=5, alone_ms=0.01)
    row = found.to_row()
    assert set(row) == {"copies", "device_ms", "host_ms", "overtaken", *SAMPLES}
    assert FEWEST <= row["copies"] <= 5 and row["device_ms"] >= 0.0 and row["host_ms"] >= 0.0
    assert [len(row[side]) for side in SAMPLES] == [PAIRS, PAIRS, ISSUES, ISSUES]
    for side in SAMPLES:
        assert all(type(value) is int and value > 0 for value in row[side])
    again = statistics.median(a - b for a, b in zip(row["stream_ns"], row["plug_ns"], strict=True))
    assert row["device_ms"] == pytest.approx(max(again / 1e6 / row["copies"], 0.0), abs=1e-6)
    least = min(row["issue_ns"]) - min(row["plug_issue_ns"])
    assert row["host_ms"] == pytest.approx(max(least / 1e6 / row["copies"], 0.0), abs=1e-6)
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_a_row_is_in_nanoseconds_what_was_measured_in_milliseconds() -> None:
    found = Streamed(
        copies=4, device_ms=0.25, host_ms=0.5, overtaken=True, run_ms=(1.5, 2.0000004),
        plug_ms=(1e-6,), issue_ms=(), plug_issue_ms=(3.0,),
    )  # fmt: skip
    assert found.to_row() == {
        "copies": 4, "device_ms": 0.25, "host_ms": 0.5, "overtaken": True,
        "stream_ns": [1_500_000, 2_000_000], "plug_ns": [1], "issue_ns": [], "plug_issue_ns": [3_000_000],
    }  # fmt: skip


@pytest.mark.parametrize(("host_ms", "overtaken"), [(0.001, False), (0.03, False), (0.5, True), (5.0, True)])
def test_a_kernel_that_the_host_cannot_issue_in_time_is_marked(
    files: dict[str, Path], host_ms: float, overtaken: bool
) -> None:
    found = scripted(files["split"], Device(2.0, 0.01, host_ms))
    assert found.overtaken == overtaken
    assert found.copies == FEWEST or not overtaken


# What cannot be measured.


def test_a_file_that_is_absent_or_damaged_is_refused(files: dict[str, Path], tmp_path: Path) -> None:
    device = Device(2.0, 0.01, 0.001)
    with pytest.raises(InputError, match=r"there is no model file .*absent\.onnx"):
        scripted(tmp_path / "absent.onnx", device)
    content = files["split"].read_bytes()
    for number, damaged in enumerate((b"", b"no model", content[:60], content[: len(content) // 2])):
        path = tmp_path / f"damaged_{number}.onnx"
        path.write_bytes(damaged)
        with pytest.raises(FileFormatError, match=path.name):
            scripted(path, device)
    assert not device.asked


def test_a_whole_model_is_no_kernel(plug: Plug, tmp_path: Path) -> None:
    path = save(convnet(), tmp_path, "net.onnx")
    runner = Runner(path, "cpu", threads=1)
    with pytest.raises(InputError):
        measure(path, plug, inputs=runner.inputs, copies=5, alone_ms=0.01)


def test_a_whole_model_is_refused_with_its_name_and_what_it_lacks(tmp_path: Path) -> None:
    # Its first node writes an output of the model, so that copies of it could be run.
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Erf", ["y"], ["z"])]
    path = save(model(nodes, [("x", FLOAT, [4])], [("y", FLOAT, None)]), tmp_path, "net.onnx")
    with pytest.raises(InputError, match=r"net\.onnx was not made by `latency extract`"):
        scripted(path, Device(2.0, 0.01, 0.001))


def test_what_onnxruntime_does_not_take_is_told(files: dict[str, Path], plug: Plug, tmp_path: Path) -> None:
    unknown = onnx.load(str(files["matmul"]))
    unknown.graph.node[0].op_type = "MatMulti"
    path = save(unknown, tmp_path, "unknown.onnx")
    inputs = Runner(files["matmul"], "cpu", threads=1).inputs
    with pytest.raises((InputError, RunError), match="MatMulti"):
        measure(path, plug, inputs=inputs, copies=5, alone_ms=0.01)
    other = {name: plug.alone._inputs["sparseflow_operand"] for name in inputs}
    with pytest.raises(RunError, match=files["matmul"].name):
        measure(files["matmul"], plug, inputs=other, copies=5, alone_ms=0.01)


# In a collection.


@pytest.mark.parametrize("provider", ["cuda", "CUDAExecutionProvider"])
def test_a_gpu_has_kernels_copied_unless_that_is_left_out(provider: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"kernels": [tmp_path], "provider": provider}
    assert Config(**given).copies == COPIES == 48
    assert Config(**given, copies=0).copies == 0
    assert Config(**given, copies=7).copies == 7
    file = tmp_path / "collect.yaml"
    file.write_text(f"kernels: .\nprovider: {provider}\n")
    assert read_config(file).copies == COPIES
    kept = Config(**given, copies=3)
    assert Config.model_validate(json.loads(kept.model_dump_json())) == kept


@pytest.mark.parametrize("provider", ["cpu", "CPUExecutionProvider"])
def test_on_a_cpu_nothing_is_copied(provider: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"kernels": [tmp_path], "provider": provider}
    assert Config(**given).copies == Config(kernels=[tmp_path]).copies == 0
    assert Config(**given, copies=0).copies == 0
    with pytest.raises(pydantic.ValidationError, match=r"`copies` \(=48\) must be 0 on a CPU"):
        Config(**given, copies=48)
    file = tmp_path / "collect.yaml"
    file.write_text(f"kernels: .\nprovider: {provider}\ncopies: 5\n")
    with pytest.raises(FileFormatError, match=r"collect\.yaml: .*`copies` \(=5\) must be 0 on a CPU"):
        read_config(file)


def test_copies_are_a_count(tmp_path: Path) -> None:
    for wrong in (-1, 1.5, "many"):
        with pytest.raises(pydantic.ValidationError, match="copies"):
            Config(kernels=[tmp_path], provider="cuda", copies=wrong)  # type: ignore[arg-type]


class NoLoad:
    """A load that takes nothing and is what it should be at once."""

    def __init__(self, kind: str, level: float, **options: Any) -> None:
        self.level = level

    def start(self) -> None:
        return None

    def set_level(self, level: float) -> None:
        self.level = level

    def wait_until_steady(self, timeout_s: float) -> float:
        return self.level

    @contextmanager
    def held(self) -> Iterator[None]:
        yield

    def between(self, begin_s: float, end_s: float) -> float:
        return self.level

    def close(self) -> None:
        return None


class Asked:
    """Takes the place of what measures in a stream, and writes down what it is asked."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.plugs: list[tuple[str, dict[str, Any]]] = []
        self.measured: list[tuple[Path, dict[str, Any]]] = []
        self.error: Exception | None = None
        patch.setattr(instruments, "Plug", self._plug)
        patch.setattr(stream, "measure", self._measure)
        patch.setattr(instruments, "Stressor", NoLoad)
        patch.setattr(instruments, "CALM_S", 0.1)

    def _plug(self, provider: str, **options: Any) -> str:
        self.plugs.append((provider, options))
        return "the plug"

    def _measure(self, path: Path | str, plug: str, **options: Any) -> Streamed:
        assert plug == "the plug"
        self.measured.append((Path(path), options))
        if self.error is not None:
            raise self.error
        return Streamed(
            copies=7, device_ms=0.25, host_ms=0.125, overtaken=False, run_ms=(3.0,) * PAIRS,
            plug_ms=(2.0,) * PAIRS, issue_ms=(1.0,) * ISSUES, plug_issue_ms=(0.5,) * ISSUES,
        )  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


def settings_of(files: dict[str, Path], folder: Path, copies: int) -> Config:
    """Two kernels and a model on this CPU, with copies as if it were a GPU."""
    given: dict[str, Any] = {
        "kernels": [files["split"], files["matmul"]], "models": save(convnet(), folder, "net.onnx"),
        "levels": [0.0, 0.4], "rounds": 1, "min_time_s": 0.11, "max_time_s": 0.2, "loops": 1, "warmup": 1,
        "reference_every": 50,
    }  # fmt: skip
    return Config(**given).model_copy(update={"copies": copies})


def items_of(config: Config) -> dict[str, Item]:
    return {item.op: item for item in make_plan(config, {}).items}


def test_only_kernels_are_measured_in_a_stream_and_only_at_rest(
    files: dict[str, Path], asked: Asked, tmp_path: Path
) -> None:
    config = settings_of(files, tmp_path, 31)
    items = items_of(config)
    rows: dict[tuple[str, float], dict[str, Any]] = {}
    with Bench(config) as bench:
        for level in (0.0, 0.4, 0.0):
            with bench.block(level):
                for op in ("Model", "Split", "MatMul"):
                    rows[op, level] = bench.measure(items[op])
                    assert rows[op, level]["error"] is None
            if level:
                assert len(asked.measured) == 2
    assert len(asked.plugs) == 1, "one plug does for the whole collection"
    assert asked.plugs[0][0] == "cpu"
    assert [path.name for path, _ in asked.measured] == 2 * [files["split"].name, files["matmul"].name]
    for path, options in asked.measured:
        assert options["copies"] == 31 and options["alone_ms"] > 0.0 and options["setup_ms"] >= 0.0
        assert set(options["inputs"]) == set(dummy_inputs(path))
    for (op, level), row in rows.items():
        told = {name: row[name] for name in ("copies", "device_ms", "host_ms", *SAMPLES) if name in row}
        if op == "Model" or level:
            assert told == {}
        else:
            assert (told["copies"], told["device_ms"], told["host_ms"]) == (7, 0.25, 0.125)
            assert [len(told[side]) for side in SAMPLES] == [PAIRS, PAIRS, ISSUES, ISSUES]
        assert row["latency_ms"] > 0.0 and row["samples_ns"]


def test_without_copies_nothing_is_measured_in_a_stream(
    files: dict[str, Path], asked: Asked, tmp_path: Path
) -> None:
    config = settings_of(files, tmp_path, 0)
    with Bench(config) as bench, bench.block(0.0):
        row = bench.measure(items_of(config)["Split"])
    assert row["error"] is None and "device_ms" not in row
    assert not asked.plugs and not asked.measured


def test_a_kernel_that_fails_in_a_stream_is_told_and_a_device_that_is_lost_raised(
    files: dict[str, Path], asked: Asked, tmp_path: Path
) -> None:
    config = settings_of(files, tmp_path, 31)
    item = items_of(config)["Split"]
    with Bench(config) as bench, bench.block(0.0):
        asked.error = RunError("it does not fit")
        row = bench.measure(item)
        assert row["error"] is None and row["stream_error"] == "RunError: it does not fit"
        assert row["latency_ms"] > 0.0 and "device_ms" not in row
        asked.error = DeviceError("the GPU is gone")
        with pytest.raises(DeviceError, match="the GPU is gone"):
            bench.measure(item)
        asked.error = None
        assert bench.measure(item)["device_ms"] == 0.25


def test_a_real_stream_is_measured_by_the_bench_of_this_machine(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_PLUG_MS", 0.0)
    monkeypatch.setattr(instruments, "CALM_S", 0.1)
    config = settings_of(files, tmp_path, 5)
    with Bench(config) as bench, bench.block(0.0):
        row = bench.measure(items_of(config)["Split"])
    assert row["error"] is None and FEWEST <= row["copies"] <= 5
    assert [len(row[side]) for side in SAMPLES] == [PAIRS, PAIRS, ISSUES, ISSUES]


def test_what_was_measured_in_a_stream_survives_the_table(files: dict[str, Path], tmp_path: Path) -> None:
    config = settings_of(files, tmp_path / "models", 0)
    bench = StreamedBench(config)
    kept: list[dict[str, Any]] = []
    plain = bench.measure

    def measured(item: Item) -> dict[str, Any]:
        kept.append(plain(item))
        return kept[-1]

    bench.measure = measured
    collect(config, tmp_path / "out", instruments=bench)
    rows = read(tmp_path / "out")
    assert len(rows) == len(kept) and (tmp_path / "out" / "rows.parquet").is_file()
    streamed = [row for row in rows if row["device_ms"] is not None]
    assert {row["op_type"] for row in streamed} == {"Split", "MatMul"}
    assert {row["level"] for row in streamed} == {0.0}
    for row, told in zip(rows, kept, strict=True):
        for name in ("copies", "device_ms", "host_ms", *SAMPLES):
            assert row[name] == told.get(name)
        if row in streamed:
            assert all(type(value) is int for side in SAMPLES for value in row[side])
            assert [len(row[side]) for side in SAMPLES] == [PAIRS, PAIRS, ISSUES, ISSUES]
            assert type(row["copies"]) is int
    assert METADATA_KEY in {entry.key for entry in onnx.load(streamed[0]["path"]).metadata_props}
