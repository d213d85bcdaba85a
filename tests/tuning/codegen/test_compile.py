"""Compilation and its cache with concurrent, killed and damaging processes."""

from __future__ import annotations

import errno
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
    CompileCache,
    compile_program,
    compile_source,
    find_compiler,
)

SOURCE = """
void sparseflow_kernel(const void *const *inputs, void *const *outputs) {
    ((float *)outputs[0])[0] = ((const float *)inputs[0])[0];
}
"""


@pytest.fixture
def wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a compiler that logs its calls; returns the log."""
    log = tmp_path / "log"
    log.touch()
    real = find_compiler().path
    script(tmp_path / "noting-cc", f'[ "$1" = --version ] || echo x >> {log}; exec {real} "$@"', monkeypatch)
    return log


def script(path: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))


def count(log: Path) -> int:
    return len(log.read_text().split())


def full(folder: Path) -> None:
    """Check that a cache only has complete entries."""
    for entry in folder.glob("*.json"):
        assert CompileCache(folder).get(entry.stem) is not None
    for path in folder.iterdir():
        assert path.suffix in {".json", ".so", ".exe", ".c"} or path.name == "building"


def test_compile_same_source_compiles_once(tmp_path: Path, wrapped: Path) -> None:
    first = compile_source(SOURCE, cache_dir=tmp_path / "cache")
    assert first.read_bytes()[:4] == b"\x7fELF"
    assert first.is_absolute()
    assert compile_source(SOURCE, cache_dir=tmp_path / "cache") == first
    assert count(wrapped) == 1
    full(tmp_path / "cache")
    assert list((tmp_path / "cache" / "building").iterdir()) == []


def test_compile_changed_input_changes_key(tmp_path: Path, wrapped: Path) -> None:
    created = {
        compile_source(SOURCE, cache_dir=tmp_path),
        compile_source(SOURCE + "int more;", cache_dir=tmp_path),
        compile_program(SOURCE + "int main(void) { return 0; }", cache_dir=tmp_path),
    }
    assert len(created) == count(wrapped) == 3


def test_compile_other_cpu_has_other_entry(
    tmp_path: Path, wrapped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_source(SOURCE, cache_dir=tmp_path)
    monkeypatch.setattr(compiling, "_read_cpu_features", lambda: "model name another")
    compile_source(SOURCE, cache_dir=tmp_path)
    assert count(wrapped) == 2


def test_cpu_features_include_flags() -> None:
    assert len(compiling._read_cpu_features()) > 20


def test_cache_entry_has_metadata(tmp_path: Path) -> None:
    library = compile_source(SOURCE, cache_dir=tmp_path)
    (note,) = tmp_path.glob("*.json")
    record = json.loads(note.read_text())
    assert record["file"] == library.name
    assert record["compiler"] == find_compiler().version
    assert "-fno-signed-zeros" in record["command"]
    assert not any(str(tmp_path) in word for word in record["command"])


def test_cache_damaged_entry_is_recompiled(tmp_path: Path, wrapped: Path) -> None:
    library = compile_source(SOURCE, cache_dir=tmp_path)
    good = library.read_bytes()
    (note,) = tmp_path.glob("*.json")
    text = note.read_text()
    damages = [
        lambda: library.write_bytes(good[:-1]),
        lambda: library.write_bytes(b""),
        lambda: library.write_bytes(good[:100] + b"?" + good[101:]),
        lambda: library.unlink(),
        lambda: note.unlink(),
        lambda: note.write_text(""),
        lambda: note.write_text("[]"),
        lambda: note.write_text("{}"),
        lambda: note.write_bytes(b"\xff\x00"),
        lambda: note.write_text(text.replace(library.name, "../elsewhere.so")),
        lambda: note.write_text(text.replace(library.name, "")),
    ]
    for times, damage in enumerate(damages, start=2):
        damage()
        assert compile_source(SOURCE, cache_dir=tmp_path) == library
        assert library.read_bytes() == good
        assert count(wrapped) == times


def test_compile_error_has_location_and_source(tmp_path: Path) -> None:
    source = "int fine;\nvoid broken( {\n"
    with pytest.raises(RunError) as raised:
        compile_source(source, cache_dir=tmp_path)
    (source_file,) = tmp_path.glob("*.c")
    assert str(source_file) in str(raised.value)
    assert ":2:" in str(raised.value)
    assert source_file.read_text() == source
    assert list(tmp_path.glob("*.so")) == []
    assert list((tmp_path / "building").iterdir()) == []


def test_compile_endless_message_is_truncated(tmp_path: Path) -> None:
    with pytest.raises(RunError) as raised:
        compile_source("\n".join(f"int a{i} = b{i};" for i in range(100)), cache_dir=tmp_path)
    assert len(str(raised.value).splitlines()) <= 1 + compiling.MAX_ERROR_LINES


def test_compile_hanging_compiler_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'if [ "$1" = --version ]; then echo slow; else sleep 1000; fi'
    script(tmp_path / "slow-cc", body, monkeypatch)
    with pytest.raises(RunError):
        compile_source(SOURCE, cache_dir=tmp_path / "cache", timeout_s=0.5)
    assert list((tmp_path / "cache").glob("*.so")) == []


def test_compile_crashing_compiler_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "bad-cc", 'if [ "$1" = --version ]; then echo bad; else kill -SEGV $$; fi', monkeypatch)
    with pytest.raises(RunError):
        compile_source(SOURCE, cache_dir=tmp_path / "cache")


def test_compile_missing_output_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "idle-cc", "echo idle", monkeypatch)
    with pytest.raises(RunError):
        compile_source(SOURCE, cache_dir=tmp_path / "cache")


def test_find_compiler_none_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError):
        compile_source(SOURCE, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("named", ["/nowhere/cc", "no-such-compiler -O2", "'open quote", "false"])
def test_find_compiler_invalid_cc_raises(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", named)
    with pytest.raises(DeviceError):
        find_compiler()


def test_find_compiler_keeps_cc_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{find_compiler().path} -DANSWER=42")
    assert find_compiler().command[1:] == ("-DANSWER=42",)
    assert compile_source("int answer = ANSWER;", cache_dir=tmp_path).is_file()


def test_compile_zero_timeout_raises(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        compile_source(SOURCE, cache_dir=tmp_path, timeout_s=0)


def test_cache_unwritable_dir_raises(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError):
        compile_source(SOURCE, cache_dir=tmp_path / "file")


@pytest.mark.parametrize("name", ["put", "keep_failed_source"])
def test_cache_full_disk_raises(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", fail)  # publishes files of both functions
    with pytest.raises(RunError, match=r"No space left on device.*SPARSEFLOW_CACHE"):
        compile_source(SOURCE if name == "put" else "not C", cache_dir=tmp_path)


def test_cache_default_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEFLOW_CACHE", str(tmp_path / "own"))
    assert CompileCache().cache_dir == tmp_path / "own" / "tuning"
    monkeypatch.delenv("SPARSEFLOW_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert CompileCache().cache_dir == tmp_path / "xdg" / "sparseflow" / "tuning"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert CompileCache().cache_dir == tmp_path / "home" / ".cache" / "sparseflow" / "tuning"


def test_cache_relative_dir_gives_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert compile_source(SOURCE, cache_dir=Path("here")).parent == tmp_path / "here"


def test_cache_stale_build_dirs_are_removed(tmp_path: Path) -> None:
    old, new = tmp_path / "building" / "old", tmp_path / "building" / "new"
    old.mkdir(parents=True)
    (old / "built.so").touch()
    new.mkdir()
    long_ago = time.time() - 2 * compiling.STALE_S
    os.utime(old, (long_ago, long_ago))
    compile_source(SOURCE, cache_dir=tmp_path)
    assert not old.exists()
    assert new.exists()


CHILD = """
import sys
from pathlib import Path
from sparseflow.tuning.codegen.compile import compile_source
print("ready", flush=True)
for number in range(int(sys.argv[2])):
    print(compile_source(f"int number = {number};", cache_dir=Path(sys.argv[1])), flush=True)
"""


def test_cache_concurrent_processes_succeed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path), "3"]
    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(lambda _: subprocess.run(command, capture_output=True, check=True), range(4)))
    assert len({run.stdout for run in runs}) == 1
    for line in runs[0].stdout.decode().split()[1:]:
        assert Path(line).read_bytes()[:4] == b"\x7fELF"
    full(tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 3


def test_cache_killed_process_leaves_complete_entries(tmp_path: Path) -> None:
    for delay_s in (0.0, 0.02, 0.05, 0.08, 0.12):
        command = [sys.executable, "-c", CHILD, str(tmp_path), "1000"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(delay_s)
            process.send_signal(signal.SIGKILL)
        full(tmp_path)
    assert compile_source("int number = 0;", cache_dir=tmp_path).is_file()
    full(tmp_path)
