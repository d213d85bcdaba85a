"""Kernels are compiled once, whole or not at all, whoever else compiles, crashes or scribbles."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sparseflow.errors import DeviceError, InputError, RunError
from sparseflow.tuning.codegen import compile as compiling
from sparseflow.tuning.codegen.compile import (
    Cache,
    compile_program,
    compile_source,
    compiler,
    default_folder,
)

SOURCE = """
void sparseflow_kernel(const void *const *inputs, void *const *outputs) {
    ((float *)outputs[0])[0] = ((const float *)inputs[0])[0];
}
"""


@pytest.fixture
def wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that notes each time it compiles; gives the file with the notes."""
    log = tmp_path / "log"
    log.touch()
    real = compiler().path
    script(tmp_path / "noting-cc", f'[ "$1" = --version ] || echo x >> {log}; exec {real} "$@"', monkeypatch)
    return log


def script(path: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))


def count(log: Path) -> int:
    return len(log.read_text().split())


def whole(folder: Path) -> None:
    """Every name in a cache is that of a complete entry."""
    for entry in folder.glob("*.json"):
        assert Cache(folder).get(entry.stem) is not None
    for path in folder.iterdir():
        assert path.suffix in {".json", ".so", ".exe", ".c"} or path.name == "building"


def test_compiles_once(tmp_path: Path, wrapped: Path) -> None:
    first = compile_source(SOURCE, cache=tmp_path / "cache")
    assert first.read_bytes()[:4] == b"\x7fELF"
    assert first.is_absolute()
    assert compile_source(SOURCE, cache=tmp_path / "cache") == first
    assert count(wrapped) == 1
    whole(tmp_path / "cache")
    assert list((tmp_path / "cache" / "building").iterdir()) == []


def test_what_changes_the_result_changes_the_entry(tmp_path: Path, wrapped: Path) -> None:
    made = {
        compile_source(SOURCE, cache=tmp_path),
        compile_source(SOURCE + "int more;", cache=tmp_path),
        compile_source(SOURCE, extra_flags=["-O1"], cache=tmp_path),
        compile_program(SOURCE + "int main(void) { return 0; }", cache=tmp_path),
    }
    assert len(made) == 4
    assert count(wrapped) == 4


def test_another_cpu_has_entries_of_its_own(
    tmp_path: Path, wrapped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_source(SOURCE, cache=tmp_path)
    monkeypatch.setattr(compiling, "_cpu", lambda: "model name another")
    compile_source(SOURCE, cache=tmp_path)
    assert count(wrapped) == 2


def test_the_cpu_is_told_with_its_flags() -> None:
    assert len(compiling._cpu()) > 20


def test_the_note_tells_what_made_it(tmp_path: Path) -> None:
    made = compile_source(SOURCE, cache=tmp_path)
    (note,) = tmp_path.glob("*.json")
    told = json.loads(note.read_text())
    assert told["file"] == made.name
    assert told["bytes"] == made.stat().st_size
    assert told["compiler"] == compiler().version
    assert "-fno-signed-zeros" in told["command"]
    assert not any(str(tmp_path) in word for word in told["command"])


def test_a_damaged_entry_is_compiled_again(tmp_path: Path, wrapped: Path) -> None:
    made = compile_source(SOURCE, cache=tmp_path)
    good = made.read_bytes()
    (note,) = tmp_path.glob("*.json")
    text = note.read_text()
    damages = [
        lambda: made.write_bytes(good[:-1]),
        lambda: made.write_bytes(b""),
        lambda: made.write_bytes(good[:100] + b"?" + good[101:]),
        lambda: made.unlink(),
        lambda: note.unlink(),
        lambda: note.write_text(""),
        lambda: note.write_text("[]"),
        lambda: note.write_text("{}"),
        lambda: note.write_bytes(b"\xff\x00"),
        lambda: note.write_text(text.replace(made.name, "../elsewhere.so")),
        lambda: note.write_text(text.replace(made.name, "")),
    ]
    for times, damage in enumerate(damages, start=2):
        damage()
        assert compile_source(SOURCE, cache=tmp_path) == made
        assert made.read_bytes() == good
        assert count(wrapped) == times


def test_an_error_tells_where_and_keeps_the_source(tmp_path: Path) -> None:
    source = "int fine;\nvoid broken( {\n"
    with pytest.raises(RunError, match=r"exit status 1") as raised:
        compile_source(source, cache=tmp_path)
    (kept,) = tmp_path.glob("*.c")
    assert str(kept) in str(raised.value)
    assert ":2:" in str(raised.value)
    assert kept.read_text() == source
    assert list(tmp_path.glob("*.so")) == []
    assert list((tmp_path / "building").iterdir()) == []


def test_an_endless_message_is_cut(tmp_path: Path) -> None:
    with pytest.raises(RunError) as raised:
        compile_source("\n".join(f"int a{i} = b{i};" for i in range(100)), cache=tmp_path)
    assert len(str(raised.value).splitlines()) <= 1 + compiling.ERROR_LINES


def test_a_compiler_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'if [ "$1" = --version ]; then echo slow; else sleep 1000; fi'
    script(tmp_path / "slow-cc", body, monkeypatch)
    with pytest.raises(RunError, match=r"within 0.5 s and was killed"):
        compile_source(SOURCE, cache=tmp_path / "cache", timeout_s=0.5)
    assert list((tmp_path / "cache").glob("*.so")) == []


def test_a_compiler_that_crashes_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "bad-cc", 'if [ "$1" = --version ]; then echo bad; else kill -SEGV $$; fi', monkeypatch)
    with pytest.raises(RunError, match="SIGSEGV"):
        compile_source(SOURCE, cache=tmp_path / "cache")


def test_a_compiler_that_makes_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "idle-cc", "echo idle", monkeypatch)
    with pytest.raises(RunError, match="status 0"):
        compile_source(SOURCE, cache=tmp_path / "cache")


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError, match="no C compiler"):
        compile_source(SOURCE, cache=tmp_path / "cache")


@pytest.mark.parametrize("named", ["/nowhere/cc", "no-such-compiler -O2", "'open quote", "false"])
def test_a_compiler_that_is_named_is_not_replaced_by_another(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", named)
    with pytest.raises(DeviceError, match=r"\$CC"):
        compiler()


def test_arguments_in_cc_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{compiler().path} -DANSWER=42")
    assert compiler().command[1:] == ("-DANSWER=42",)
    assert compile_source("int answer = ANSWER;", cache=tmp_path).is_file()


def test_a_time_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="timeout_s"):
        compile_source(SOURCE, cache=tmp_path, timeout_s=0)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="SPARSEFLOW_CACHE"):
        compile_source(SOURCE, cache=tmp_path / "file")


def test_where_the_cache_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEFLOW_CACHE", str(tmp_path / "own"))
    assert default_folder() == tmp_path / "own" / "tuning"
    monkeypatch.delenv("SPARSEFLOW_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_folder() == tmp_path / "xdg" / "sparseflow" / "tuning"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_folder() == tmp_path / "home" / ".cache" / "sparseflow" / "tuning"


def test_a_relative_folder_gives_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert compile_source(SOURCE, cache=Path("here")).parent == tmp_path / "here"


def test_what_killed_processes_left_is_swept(tmp_path: Path) -> None:
    old, new = tmp_path / "building" / "old", tmp_path / "building" / "new"
    old.mkdir(parents=True)
    (old / "built.so").touch()
    new.mkdir()
    long_ago = time.time() - 2 * compiling.STALE_S
    os.utime(old, (long_ago, long_ago))
    compile_source(SOURCE, cache=tmp_path)
    assert not old.exists()
    assert new.exists()


CHILD = """
import sys
from pathlib import Path
from sparseflow.tuning.codegen.compile import compile_source
print("ready", flush=True)
for number in range(int(sys.argv[2])):
    print(compile_source(f"int number = {number};", cache=Path(sys.argv[1])), flush=True)
"""


def test_many_processes_share_a_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path), "3"]
    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(lambda _: subprocess.run(command, capture_output=True, check=True), range(4)))
    assert len({run.stdout for run in runs}) == 1
    for line in runs[0].stdout.decode().split()[1:]:
        assert Path(line).read_bytes()[:4] == b"\x7fELF"
    whole(tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 3


def test_a_kill_at_any_time_leaves_only_whole_entries(tmp_path: Path) -> None:
    for delay_s in (0.0, 0.02, 0.05, 0.08, 0.12):
        command = [sys.executable, "-c", CHILD, str(tmp_path), "1000"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(delay_s)
            process.send_signal(signal.SIGKILL)
        whole(tmp_path)
    assert compile_source("int number = 0;", cache=tmp_path).is_file()
    whole(tmp_path)
