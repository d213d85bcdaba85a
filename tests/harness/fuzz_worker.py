"""Process that runs one target on many inputs and may die; `fuzz.py` starts it.

Atheris (libFuzzer) chooses inputs by the coverage of SparseFlow's code. An exception that `errors.py` does
not know is recorded and the work goes on. An input that takes more than `TIME_LIMIT_S` of CPU time, or
`WALL_LIMIT_S`, kills this process by a signal; so may a native crash. The input then lies in the state
directory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import resource
import shutil
import signal
import sys
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import atheris

from tests.harness.mutations import mutate_bytes
from tests.harness.targets import CORPUS, COUNTERS, TARGETS

fuzzer: Any = atheris
"""Its compiled part has no types."""

TIME_LIMIT_S = 5.0
WALL_LIMIT_S = 30.0
"""A deadlock takes no CPU time, and a busy machine takes long for little."""

MEMORY_LIMIT_BYTES = 2**30
_ADDRESS_SPACE_BYTES = 3 * 2**30
"""Address space above that of the imported packages: a larger allocation raises MemoryError."""


class Worker:
    """Runs inputs of one target.

    Args:
        name: Target.
        state: Directory with the file `counters`; receives `failures.jsonl` and the files of failing inputs.
    """

    def __init__(self, name: str, state: Path) -> None:
        self._target, self._state = TARGETS[name], state
        self._folder = state / "input"
        with (state / "counters").open("r+b") as file:
            self._counters = mmap.mmap(file.fileno(), COUNTERS.size)
        self._recorded: set[str] = set()

    def import_parser(self, seed: bytes) -> None:
        """Run a seed without limits, which imports all modules of the parser."""
        with suppress(Exception):
            self._target.parse(self._write(seed))

    def run(self, data: bytes) -> None:
        """Run one input."""
        from sparseflow.errors import SparseFlowError

        started, accepted = COUNTERS.unpack(self._counters)
        self._counters[:] = COUNTERS.pack(started + 1, accepted)
        path = self._write(data)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of resident memory
        for limit in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(limit, signal.SIG_DFL)  # Atheris handles them otherwise
        signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT_S)
        signal.setitimer(signal.ITIMER_REAL, WALL_LIMIT_S)
        try:
            self._target.parse(path)
            self._counters[:] = COUNTERS.pack(started + 1, accepted + 1)
        except SparseFlowError:
            pass
        except MemoryError as error:
            self._record("memory", data, error)
        except Exception as error:  # whatever the package raises is the finding
            self._record("exception", data, error)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        if read_peak_bytes() > MEMORY_LIMIT_BYTES:
            self._record("memory", data, None)

    def _write(self, data: bytes) -> Path:
        path = self._folder / self._target.file
        # Parsers may leave files beside the input.
        if any(entry != path for entry in self._folder.iterdir()):
            shutil.rmtree(self._folder)
            self._folder.mkdir()
        path.write_bytes(data)
        return path

    def _record(self, kind: str, data: bytes, error: BaseException | None) -> None:
        location = ""
        for frame in traceback.extract_tb(None if error is None else error.__traceback__):
            if "sparseflow" in frame.filename:
                location = f"{frame.filename.partition('src/')[2]}:{frame.lineno}"
        record = {
            "kind": kind,
            "error": type(error).__name__,
            "message": str(error)[:200],
            "location": location,
        }
        key = json.dumps([kind, record["error"], location])
        digest = hashlib.sha256(data).hexdigest()[:16]
        if key not in self._recorded:  # one input of each fault is enough
            self._recorded.add(key)
            (self._state / digest).write_bytes(data)
        with (self._state / "failures.jsonl").open("a") as file:
            file.write(json.dumps(record | {"input": digest}) + "\n")


def list_compiled_modules() -> list[str]:
    """List the modules with functions that Numba compiles; it does not know instrumented code."""
    root = CORPUS.parents[2] / "src"
    paths = (path for path in root.rglob("*.py") if {"kernels", "backends"} & set(path.parts))
    return [".".join(path.relative_to(root).with_suffix("").parts) for path in paths]


def read_peak_bytes() -> int:
    """Return the peak of this process's resident memory since the last reset."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split(None, 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    worker = Worker(arguments.target, arguments.state)
    corpus = arguments.state / "corpus"
    # The first seed imports the parser, without limits; nothing of SparseFlow may be imported before.
    with fuzzer.instrument_imports(include=["sparseflow"], exclude=list_compiled_modules()):
        worker.import_parser(min(corpus.iterdir()).read_bytes())
    limit = _read_virtual_bytes() + _ADDRESS_SPACE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    mutation = TARGETS[arguments.target].mutation
    seeds = [seed.read_bytes() for seed in sorted(corpus.iterdir())]

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        random = Random(seed)
        # Most inputs with new coverage are refused early; changes of a valid file reach further.
        data = random.choice(seeds) if random.random() < 0.5 else data
        try:
            changed = mutation(random, data) if random.random() < 0.7 else fuzzer.Mutate(data, len(data) + 64)
        except Exception:  # an input that cannot be changed as a file of its format; libFuzzer would wait
            changed = mutate_bytes(random, data)
        return changed[:max_size]

    largest = max(map(len, seeds))
    options: dict[str, Any] = {
        "runs": arguments.runs, "seed": arguments.seed + 1, "max_len": 2 * largest + 2**16, "timeout": 0,
        "rss_limit_mb": 0, "malloc_limit_mb": 0, "len_control": 0, "mutate_depth": 2,
        "verbosity": 0, "artifact_prefix": f"{arguments.state}/",
        **dict.fromkeys(("handle_segv", "handle_bus", "handle_abrt", "handle_ill", "handle_fpe", "handle_int",
                         "handle_term", "handle_xfsz", "handle_usr1", "handle_usr2"), 0),
    }  # fmt: skip
    flags = [f"-{name}={value}" for name, value in options.items()]
    fuzzer.Setup([sys.argv[0], *flags, str(corpus)], worker.run, custom_mutator=mutate)
    fuzzer.Fuzz()


def _read_virtual_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmSize:")[2].split(None, 1)[0])


if __name__ == "__main__":
    main()
