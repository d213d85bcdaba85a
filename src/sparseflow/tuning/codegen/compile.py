"""Compilation of C code with the system's compiler and an on-disk cache.

A cache entry is `<key>.json`, which names `<key>-<sha256>.so` and has its checksum. Both files are written to
a temporary directory and renamed, the JSON file last, so that an entry is complete as soon as it is visible.
Processes that compile the same source at the same time publish complete entries; the last one remains. Files
are not synced to disk: an entry that is lost in a power failure fails its checksum and is compiled again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sparseflow.core.checks import check_positive
from sparseflow.core.files import get_cache_dir, read_json
from sparseflow.errors import DeviceError, RunError
from sparseflow.tuning.codegen import subprocess_runner

CACHE_VERSION = 1

OPTIMIZE_FLAGS = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    # Reductions can only be vectorized if sums may be reordered; NaN and infinity are preserved.
    "-fassociative-math",
    "-fno-signed-zeros",
    "-ffp-contract=fast",
    # The position of a short loop changes its time by up to a quarter.
    "-falign-loops=32",
)
"""Optimization flags of kernels; `-ffast-math` would disable subnormals in the full process."""

KERNEL_FLAGS = (*OPTIMIZE_FLAGS, "-std=gnu11", "-fopenmp", "-shared", "-fPIC")
PROGRAM_FLAGS = ("-O2", "-std=gnu11", "-fopenmp")

MAX_ERROR_LINES = 6
STALE_S = 3600.0
"""Age of a build directory that is considered abandoned by a killed process, seconds."""


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """A working C compiler.

    Attributes:
        command: Path of the compiler and the arguments that `$CC` adds.
        version: First line of its version output.
    """

    command: tuple[str, ...]
    version: str

    @property
    def path(self) -> Path:
        return Path(self.command[0])


def find_compiler() -> Compiler:
    """Find the C compiler: `$CC`, else the first of `cc`, `gcc` and `clang` on the PATH.

    Raises:
        DeviceError: There is no compiler, or the compiler of `$CC` does not work.
    """
    requested = os.environ.get("CC", "").strip()
    for name in [requested] if requested else ["cc", "gcc", "clang"]:
        try:
            words = shlex.split(name)
        except ValueError as error:
            raise DeviceError(f"$CC (={requested!r}) is not a valid command: {error}") from error
        path = shutil.which(words[0])
        if path is not None and (version := _read_version(path, os.stat(path).st_mtime_ns)):
            return Compiler(command=(os.path.abspath(path), *words[1:]), version=version)
    if requested:
        raise DeviceError(f"$CC (={requested!r}) is not a working C compiler; unset it or set another")
    raise DeviceError(
        "no C compiler found (cc, gcc, clang); install one, on Debian with `apt-get install gcc`, or set $CC"
    )


@lru_cache(maxsize=16)
def _read_version(path: str, changed_ns: int) -> str | None:
    """Return the version line of a compiler; `changed_ns` invalidates the cached result after an upgrade."""
    try:
        result = subprocess_runner.run_process([path, "--version"], timeout_s=120.0)
    except OSError:
        return None
    return result.output.partition("\n")[0].strip() or None if result.code == 0 else None


class CompileCache:
    """On-disk cache of compiled code; processes may share a directory.

    Args:
        cache_dir: Directory; by default `tuning` in the cache directory of SparseFlow.
    """

    def __init__(self, cache_dir: Path | None = None) -> None:
        # An absolute path, so that dlopen and exec do not search for the file.
        self.cache_dir = Path(os.path.abspath(cache_dir or get_cache_dir() / "tuning"))

    def get(self, key: str) -> Path | None:
        """Return the compiled file of `key`, or None if there is no file with a valid checksum."""
        try:
            entry = read_json(self.cache_dir / f"{key}.json")
            name, digest = entry["file"], entry["sha256"]
            path = self.cache_dir / Path(name).name
            if hashlib.sha256(path.read_bytes()).hexdigest() == digest:
                return path
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return None

    def put(self, key: str, built_path: Path, **metadata: object) -> Path:
        """Publish a compiled file from a build directory under its final name.

        Args:
            key: Cache key.
            built_path: Compiled file.
            metadata: Further content of the JSON file.
        """
        digest = hashlib.sha256(built_path.read_bytes()).hexdigest()
        final = self.cache_dir / f"{key}-{digest[:16]}{built_path.suffix}"
        entry = {"file": final.name, "sha256": digest, **metadata}
        entry_path = built_path.with_suffix(".json")
        entry_path.write_text(json.dumps(entry, indent=1))
        built_path.replace(final)
        entry_path.replace(self.cache_dir / f"{key}.json")
        return final

    def keep_failed_source(self, key: str, source: str) -> Path:
        """Store a source that does not compile, for debugging."""
        final = self.cache_dir / f"{key}.c"
        with self.open_build_dir() as folder:
            draft = folder / "source.c"
            draft.write_text(source)
            draft.replace(final)
        return final

    @contextmanager
    def open_build_dir(self) -> Iterator[Path]:
        """Create a temporary directory on the file system of the cache.

        Raises:
            RunError: The cache is not writable, also within the `with` block, or its disk is full.
        """
        root = self.cache_dir / "building"
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._remove_stale(root)
            with tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True) as path:
                yield Path(path)
        except OSError as error:
            raise RunError(
                f"cannot write compiled kernels to {self.cache_dir} ({error.strerror or error}); set "
                "SPARSEFLOW_CACHE to a writable directory"
            ) from error

    @staticmethod
    def _remove_stale(root: Path) -> None:
        min_mtime = time.time() - STALE_S
        for entry in root.iterdir():
            try:
                stale = entry.stat().st_mtime < min_mtime
            except OSError:
                continue  # already removed by its owner
            if stale:
                shutil.rmtree(entry, ignore_errors=True)


def compile_source(source: str, *, cache_dir: Path | None = None, timeout_s: float = 60.0) -> Path:
    """Compile C code to a shared object, or return the cached object.

    Args:
        source: C source.
        cache_dir: Cache directory; see `CompileCache`.
        timeout_s: Time limit of the compiler, seconds.

    Returns:
        Path of the shared object in the cache, for this CPU. It must not be modified.

    Raises:
        DeviceError: There is no C compiler.
        RunError: The compilation fails or exceeds the time limit, or the cache is not writable. The message
            has the first errors and the path of the source.
    """
    return _compile_cached(find_compiler(), source, KERNEL_FLAGS, ".so", cache_dir, timeout_s)


def compile_program(source: str, *, cache_dir: Path | None = None, timeout_s: float = 60.0) -> Path:
    """Compile C code to an executable with OpenMP and libdl; see `compile_source`."""
    return _compile_cached(find_compiler(), source, PROGRAM_FLAGS, ".exe", cache_dir, timeout_s)


def _compile_cached(
    compiler: Compiler,
    source: str,
    flags: tuple[str, ...],
    suffix: str,
    cache_dir: Path | None,
    timeout_s: float,
) -> Path:
    check_positive(timeout_s=timeout_s)
    compile_cache = CompileCache(cache_dir)
    key = _compute_key(source, compiler, flags, suffix)
    cached = compile_cache.get(key)
    if cached is not None:
        return cached
    with compile_cache.open_build_dir() as building:
        built_path = building / f"built{suffix}"
        command = [*compiler.command, *flags, "-pipe", "-x", "c", "-", "-o", str(built_path), "-ldl", "-lm"]
        # The temporary files of a killed compiler are removed with the build directory.
        environment = {**os.environ, "TMPDIR": str(building), "LC_ALL": "C"}
        try:
            result = subprocess_runner.run_process(
                command, timeout_s=timeout_s, stdin=source.encode(), environment=environment
            )
        except OSError as error:
            raise DeviceError(f"the C compiler {compiler.path} cannot be started: {error}") from error
        if result.code == 0 and built_path.is_file():
            return compile_cache.put(key, built_path, compiler=compiler.version, command=command[:-4])
    source_path = compile_cache.keep_failed_source(key, source)
    if result.timed_out:
        outcome = f"did not finish within {timeout_s:g} s and was killed"
    elif result.signal_name:
        outcome = f"was ended by {result.signal_name}"
    else:
        outcome = f"failed with exit status {result.code}"
    raise RunError(
        f"{compiler.path} {outcome}; the source is kept in {source_path}{_format_errors(result.output)}"
    )


def _format_errors(output: str) -> str:
    """Format the first error lines, or the first lines if none is an error."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"error|undefined reference|cannot find", line)] or lines
    return "".join(f"\n  {line[:300]}" for line in errors[:MAX_ERROR_LINES])


def _compute_key(source: str, compiler: Compiler, flags: Sequence[str], suffix: str) -> str:
    facts = [
        CACHE_VERSION,
        source,
        list(flags),
        suffix,
        compiler.command,
        compiler.version,
        _read_cpu_features(),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:40]


@lru_cache(maxsize=1)
def _read_cpu_features() -> str:
    """Read what `-march=native` depends on: the model and the flags of the first CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return platform.processor() or platform.machine()
    names = "vendor_id|cpu family|model|model name|stepping|flags|Features|CPU \\w+"
    return "\n".join(
        f"{name} {value}" for name, value in re.findall(rf"^({names})\s*: *(.*)$", text, re.MULTILINE)
    )
