"""Resuming joint training after errors and SIGKILL, and damaged files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseflow.codesign.design.saved_plan import PLAN_FILE
from sparseflow.codesign.hardware.chips import read_library
from sparseflow.codesign.hardware.proxy import LayerHwProxy
from sparseflow.codesign.joint import trainer
from sparseflow.codesign.joint.trace import TRACE_FILE, replay
from sparseflow.codesign.joint.trainer import DesignResult, Mode
from sparseflow.core.journal import Journal
from sparseflow.core.training.checkpoint import CHECKPOINT_FILE
from sparseflow.errors import FileFormatError, InputError, RunError
from tests.codesign.toys import PAYS, Toy, rows_of, trained
from tests.killed import run_script


def same_run(first: tuple[Toy, list[DesignResult]], other: tuple[Toy, list[DesignResult]]) -> None:
    assert first[1] == other[1]
    torch.testing.assert_close(first[0].state_dict(), other[0].state_dict(), rtol=0.0, atol=0.0)


class Stopped(Exception):
    """Stands for whatever stops a run."""


def stop_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, count: int, *, after: bool) -> None:
    """Stop before or after a function is called for the n-th time, from 0."""
    original: Callable[..., Any] = getattr(owner, name)
    calls: list[int] = []

    def stopping(*args: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == count + 1 and not after:
            raise Stopped
        result = original(*args, **named)
        if len(calls) == count + 1:
            raise Stopped
        return result

    monkeypatch.setattr(owner, name, stopping)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for mode in ("joint", "two-stage"):
        folder = tmp_path_factory.mktemp(mode)
        result[mode] = folder, trained(folder, Toy(4), mode=mode, **PAYS)
    return result


def goes_on(folder: Path, mode: Mode, unbroken: dict[str, Any]) -> None:
    """A run that was stopped gives what one that was not does."""
    other, expected = unbroken[mode]
    same_run(trained(folder, Toy(4), mode=mode, **PAYS), expected)
    assert rows_of(folder) == rows_of(other)
    assert (folder / PLAN_FILE).read_bytes() == (other / PLAN_FILE).read_bytes()


WRITES: dict[Mode, Sequence[int]] = {"joint": (0, 3), "two-stage": (4, 9)}
"""Rows of these runs: two epochs, a round and an end."""


@pytest.mark.parametrize(
    ("mode", "count"), [(mode, count) for mode, writes in WRITES.items() for count in writes]
)
def test_run_resumes_after_any_row(
    mode: Mode, count: int, tmp_path: Path, unbroken: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, Journal, "append", count, after=count % 2 == 0)
    with pytest.raises(Stopped):
        trained(tmp_path, Toy(4), mode=mode, **PAYS)
    monkeypatch.undo()
    with (tmp_path / TRACE_FILE).open("ab") as file:
        file.write(b'{"kind": "epo')  # what a kill in mid-write leaves
    goes_on(tmp_path, mode, unbroken)


@pytest.mark.parametrize(("mode", "count"), [("joint", 3), ("two-stage", 5)])
@pytest.mark.parametrize("after", [False, True])
def test_run_resumes_after_any_checkpoint(
    mode: Mode,
    count: int,
    after: bool,
    tmp_path: Path,
    unbroken: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop_at(monkeypatch, trainer.checkpoint, "save", count, after=after)
    with pytest.raises(Stopped):
        trained(tmp_path, Toy(4), mode=mode, **PAYS)
    monkeypatch.undo()
    goes_on(tmp_path, mode, unbroken)


KILLED = """
import sys
import torch._dynamo  # for all forks; optimizers import it late
from pathlib import Path
from tests.codesign.toys import PAYS, Toy, trained
from tests.killed import killed_when

for mode, place, at in zip(*[iter(sys.argv[2:])] * 3):
    killed_when(
        lambda progress: trained(Path(sys.argv[1], mode), Toy(4), mode=mode, progress=progress, **PAYS),
        lambda what, share: (what, round(share * 12)) == (place, int(at)),
    )
"""
KILLS: dict[Mode, tuple[str, str]] = {
    "joint": ("epoch 3", "8"),
    "two-stage": ("hardware round 2 of 3", "8"),
}
"""Where a run of each mode is killed."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of runs that SIGKILL ended, by mode: processes forked from one that imported all."""
    root = tmp_path_factory.mktemp("killed")
    kills = [word for mode, index in KILLS.items() for word in (mode, *index)]
    run_script(KILLED, str(root), *kills)
    return root


@pytest.mark.parametrize("mode", KILLS)
def test_run_resumes_after_sigkill(mode: Mode, killed: Path, unbroken: dict[str, Any]) -> None:
    folder = killed / mode
    assert (folder / CHECKPOINT_FILE).is_file() and not (folder / PLAN_FILE).exists()
    goes_on(folder, mode, unbroken)


def test_finished_run_is_not_repeated(tmp_path: Path) -> None:
    first = trained(tmp_path, Toy(3))
    record: list[str] = []
    designs = trained(tmp_path, Toy(3), progress=lambda kind, _: record.append(kind))
    same_run(first, designs)
    assert record == ["refining the hardware"] and len(rows_of(tmp_path)) == 5


def test_run_in_directory_of_other_run_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, Toy(1), schedule={"warmup_epochs": 1})
    before = (tmp_path / TRACE_FILE).read_bytes()
    with pytest.raises(InputError):
        trained(tmp_path, Toy(1), mode="two-stage", schedule={"warmup_epochs": 1})
    with pytest.raises(InputError, match=r"settings\.loss\.lambda_T"):
        trained(tmp_path, Toy(1), schedule={"warmup_epochs": 1}, loss={"lambda_T": 2.0})
    with pytest.raises(InputError, match=r"`mode` \(='both'\)"):
        trained(tmp_path, Toy(1), mode="both")  # pyright: ignore[reportArgumentType]
    assert (tmp_path / TRACE_FILE).read_bytes() == before


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    trained(tmp_path, Toy(2))
    trace, checkpoint = (tmp_path / TRACE_FILE).read_bytes(), (tmp_path / CHECKPOINT_FILE).read_bytes()
    lines = trace.splitlines(keepends=True)
    for content in (
        b"".join(lines[:2]),
        b"",
        trace[: len(lines[0]) + 5],
        b"".join([lines[0], b"{\n", *lines]),
    ):
        (tmp_path / TRACE_FILE).write_bytes(content)
        with pytest.raises(FileFormatError, match="trace"):
            trained(tmp_path, Toy(2))
    (tmp_path / TRACE_FILE).unlink()
    with pytest.raises(FileFormatError, match="trace"):
        trained(tmp_path, Toy(2))
    (tmp_path / TRACE_FILE).write_bytes(trace)
    for content in (checkpoint[:-30], b"torn"):
        (tmp_path / CHECKPOINT_FILE).write_bytes(content)
        with pytest.raises(FileFormatError, match="checkpoint"):
            trained(tmp_path, Toy(2))
    (tmp_path / CHECKPOINT_FILE).write_bytes(checkpoint)
    assert trained(tmp_path, Toy(2))[1]


@pytest.mark.usefixtures("refused_at_once")
def test_concurrent_run_is_refused(tmp_path: Path) -> None:
    refused: list[str] = []

    def meanwhile(kind: str, share: float) -> None:
        if kind == "epoch 3" and not refused:
            with pytest.raises(RunError) as error:
                trained(tmp_path, Toy(4), **PAYS)
            refused.append(str(error.value))

    designs = trained(tmp_path, Toy(4), progress=meanwhile, **PAYS)
    assert refused and len(rows_of(tmp_path)) == 6
    same_run(designs, trained(tmp_path / "alone", Toy(4), **PAYS))


def slower(proxy: LayerHwProxy) -> LayerHwProxy:
    values = proxy.roofline.values * torch.tensor([0.5, 0.5, 1.0])
    return replace(proxy, roofline=replace(proxy.roofline, values=values))


@pytest.mark.parametrize("mode", ["joint", "two-stage"])
def test_resume_with_other_proxy_is_refused(
    mode: Mode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The settings name the same file all the time, and what is in it is fitted anew.
    file, run = tmp_path / "proxy.safetensors", tmp_path / "run"
    LayerHwProxy.analytic().save(file)
    by_file: dict[str, Any] = {"hardware": {"proxy": str(file)}}
    stop_at(monkeypatch, Journal, "append", 2, after=True)
    with pytest.raises(Stopped):
        trained(run, Toy(4), mode=mode, **by_file)
    monkeypatch.undo()
    before = (run / TRACE_FILE).read_bytes()
    slower(LayerHwProxy.analytic()).save(file)
    with pytest.raises(InputError):
        trained(run, Toy(4), mode=mode, **by_file)
    assert (run / TRACE_FILE).read_bytes() == before
    LayerHwProxy.analytic().save(file)
    assert trained(run, Toy(4), mode=mode, **by_file)[1]
    assert all(item.is_exact for item in replay(run / TRACE_FILE))
    # A replay goes by the run's own copy.
    file.unlink()
    assert all(item.is_exact for item in replay(run / TRACE_FILE))


def test_resume_with_other_library_is_refused(tmp_path: Path) -> None:
    file, run = tmp_path / "chips.yaml", tmp_path / "run"
    library = read_library().model_dump(mode="json")
    file.write_text(json.dumps(library))
    trained(run, Toy(2), hardware={"library": str(file)})
    library["chips"][0]["tdp_w"] += 1.0
    file.write_text(json.dumps(library))
    with pytest.raises(InputError, match=r"library\.chips"):
        trained(run, Toy(2), hardware={"library": str(file)})
