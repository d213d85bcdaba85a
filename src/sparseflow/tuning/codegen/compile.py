"""C source to a shared object, by the system's compiler, remembered on disk.

A cache entry is `<key>.json`, which names `<key>-<sha256>.so` beside it and holds the checksum. Both are
written elsewhere and renamed, the JSON last, so that whoever finds a name finds all that it promises;
processes that compile the same source at once each publish a whole entry and the last one stays. Nothing is
synced to the disk: what a power cut loses fails its checksum and is compiled again.
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

from sparseflow.core.files import get_cache_dir
from sparseflow.errors import DeviceError, InputError, RunError
from sparseflow.tuning.codegen import subprocess_runner

CACHE_VERSION = 1

OPTIMISE = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    # A sum may be reordered, without which no reduction is vectorised; NaN and infinity stay what they are.
    "-fassociative-math",
    "-fno-signed-zeros",
    "-ffp-contract=fast",
)
"""How kernels are optimised. Not by `-ffast-math`, which would have all of a process lose subnormals."""

KERNEL_FLAGS = (*OPTIMISE, "-std=gnu11", "-fopenmp", "-shared", "-fPIC")
PROGRAM_FLAGS = ("-O2", "-std=gnu11", "-fopenmp")

ERROR_LINES = 6
STALE_S = 3600.0
"""Age, in seconds, at which a working folder is taken for one that a killed process left."""


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """A C compiler that answered.

    Attributes:
        command: Its path, and the arguments that `$CC` names with it.
        version: The first line that it tells about itself.
        flags: What kernels are compiled with.
    """

    command: tuple[str, ...]
    version: str
    flags: tuple[str, ...] = KERNEL_FLAGS

    @property
    def path(self) -> Path:
        return Path(self.command[0])


def compiler() -> Compiler:
    """The C compiler that `$CC` names, else the first of `cc`, `gcc` and `clang` on the PATH.

    Raises:
        DeviceError: There is none, or `$CC` names one that is not there or does not answer.
    """
    own = os.environ.get("CC", "").strip()
    for name in [own] if own else ["cc", "gcc", "clang"]:
        try:
            words = shlex.split(name)
        except ValueError as error:
            raise DeviceError(f"$CC (={own!r}) cannot be read as a command: {error}") from error
        found = shutil.which(words[0])
        if found is not None and (version := _version(found, os.stat(found).st_mtime_ns)):
            return Compiler(command=(os.path.abspath(found), *words[1:]), version=version)
    if own:
        raise DeviceError(f"$CC (={own!r}) is no C compiler that runs here; unset it or name another")
    raise DeviceError(
        "no C compiler was found (cc, gcc, clang): tuning compiles each schedule; install one, on Debian "
        "with `apt-get install gcc`, or name one in $CC"
    )


@lru_cache(maxsize=16)
def _version(path: str, changed_ns: int) -> str | None:
    """What the compiler at `path` says it is; the time of its file makes an upgrade be asked again."""
    try:
        ended = subprocess_runner.run([path, "--version"], timeout_s=120.0)
    except OSError:
        return None
    return ended.output.partition("\n")[0].strip() or None if ended.code == 0 else None


def default_folder() -> Path:
    """`tuning` in `$SPARSEFLOW_CACHE`, else `$XDG_CACHE_HOME/sparseflow`, else `~/.cache/sparseflow`."""
    return get_cache_dir() / "tuning"


class Cache:
    """What was compiled, on disk. Many processes may share a folder.

    Args:
        folder: Where entries stand; by default what `default_folder` gives.
    """

    def __init__(self, folder: Path | None = None) -> None:
        # dlopen and exec must not search their paths for it.
        self.folder = Path(os.path.abspath(default_folder() if folder is None else folder))

    def get(self, key: str) -> Path | None:
        """The compiled file of `key`, or None where there is none that is what its checksum says."""
        try:
            entry = json.loads((self.folder / f"{key}.json").read_bytes())
            name, digest = entry["file"], entry["sha256"]
            found = self.folder / Path(name).name
            if hashlib.sha256(found.read_bytes()).hexdigest() == digest:
                return found
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return None

    def put(self, key: str, built: Path, **facts: object) -> Path:
        """Move a compiled file, which lies in a folder from `building`, under its final name.

        Args:
            key: What it will be asked for by.
            built: The file.
            facts: What else the JSON shall tell a reader.
        """
        content = built.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        final = self.folder / f"{key}-{digest[:16]}{built.suffix}"
        entry = {
            "version": CACHE_VERSION,
            "file": final.name,
            "sha256": digest,
            "bytes": len(content),
            **facts,
        }
        note = built.with_suffix(".json")
        note.write_text(json.dumps(entry, indent=1))
        built.replace(final)
        note.replace(self.folder / f"{key}.json")
        return final

    def keep_source(self, key: str, source: str) -> Path:
        """Keep a source that does not compile, for whoever reads the error."""
        final = self.folder / f"{key}.c"
        with self.building() as folder:
            draft = folder / "source.c"
            draft.write_text(source)
            draft.replace(final)
        return final

    @contextmanager
    def building(self) -> Iterator[Path]:
        """A folder of one's own on the cache's file system, gone afterwards.

        Raises:
            RunError: The cache cannot be written.
        """
        root = self.folder / "building"
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._sweep(root)
            folder = tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True)
        except OSError as error:
            raise RunError(
                f"compiled kernels cannot be kept in {self.folder} ({error.strerror or error}); set "
                "SPARSEFLOW_CACHE to a folder that can be written"
            ) from error
        with folder as path:
            yield Path(path)

    @staticmethod
    def _sweep(root: Path) -> None:
        oldest = time.time() - STALE_S
        for left in root.iterdir():
            try:
                stale = left.stat().st_mtime < oldest
            except OSError:
                continue  # its owner was quicker
            if stale:
                shutil.rmtree(left, ignore_errors=True)


def compile_source(
    source: str,
    *,
    extra_flags: Sequence[str] = (),
    cache: Path | None = None,
    timeout_s: float = 60.0,
) -> Path:
    """Compile C to a shared object, or find it compiled already.

    Args:
        source: The C source.
        extra_flags: Flags after `KERNEL_FLAGS`.
        cache: Folder of the cache; by default what `default_folder` gives.
        timeout_s: Seconds after which the compiler is killed.

    Returns:
        The shared object, in the cache. It runs on this CPU and must not be written to.

    Raises:
        DeviceError: There is no C compiler.
        RunError: The source does not compile, or not in time (the message holds the first errors and says
            where the source lies), or the cache cannot be written.
    """
    own = compiler()
    return _compiled(own, source, (*own.flags, *extra_flags), ".so", cache, timeout_s)


def compile_program(source: str, *, cache: Path | None = None, timeout_s: float = 60.0) -> Path:
    """Compile C to a program linked with OpenMP and libdl; arguments and errors are `compile_source`'s."""
    return _compiled(compiler(), source, PROGRAM_FLAGS, ".exe", cache, timeout_s)


def _compiled(
    own: Compiler, source: str, flags: tuple[str, ...], suffix: str, folder: Path | None, timeout_s: float
) -> Path:
    if timeout_s <= 0:
        raise InputError(f"`timeout_s` (={timeout_s}) must be above 0")
    store = Cache(folder)
    key = _key(source, own, flags, suffix)
    found = store.get(key)
    if found is not None:
        return found
    with store.building() as building:
        built = building / f"built{suffix}"
        command = [*own.command, *flags, "-pipe", "-x", "c", "-", "-o", str(built), "-ldl", "-lm"]
        # A compiler that is killed leaves its temporary files: here they are swept away with the folder.
        environment = {**os.environ, "TMPDIR": str(building), "LC_ALL": "C"}
        started = time.monotonic()
        try:
            ended = subprocess_runner.run(
                command, timeout_s=timeout_s, stdin=source.encode(), environment=environment
            )
        except OSError as error:
            raise DeviceError(f"the C compiler {own.path} cannot be started: {error}") from error
        seconds = time.monotonic() - started
        if ended.code == 0 and built.is_file():
            return store.put(
                key, built, compiler=own.version, command=command[:-4], seconds=round(seconds, 3)
            )
    kept = store.keep_source(key, source)
    if ended.overdue:
        what = f"did not finish within {timeout_s:g} s and was killed"
    elif ended.signal_name:
        what = f"was ended by {ended.signal_name}"
    else:
        what = f"failed with exit status {ended.code}"
    raise RunError(f"{own.path} {what}; the source is kept in {kept}{_first_errors(ended.output)}")


def _first_errors(output: str) -> str:
    """The lines that tell an error, each on a line of its own; without any, what was said first."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"error|undefined reference|cannot find", line)] or lines
    return "".join(f"\n  {line[:300]}" for line in errors[:ERROR_LINES])


def _key(source: str, own: Compiler, flags: Sequence[str], suffix: str) -> str:
    facts = [CACHE_VERSION, source, list(flags), suffix, own.command, own.version, _cpu()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:40]


@lru_cache(maxsize=1)
def _cpu() -> str:
    """What `-march=native` depends on: the first CPU's model and every one of its flags."""
    try:
        text = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return platform.processor() or platform.machine()
    names = "vendor_id|cpu family|model|model name|stepping|flags|Features|CPU \\w+"
    return "\n".join(
        f"{name} {value}" for name, value in re.findall(rf"^({names})\s*: *(.*)$", text, re.MULTILINE)
    )
