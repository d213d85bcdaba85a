"""A worker of the fuzzer with targets that fail in every way, for its tests."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.harness.fuzz_worker import main
from tests.harness.mutations import mutate_bytes
from tests.harness.targets import TARGETS, Target


def fail(path: Path) -> None:
    """Die, hang, raise or take memory for some values of the first byte."""
    kind = path.read_bytes()[:1]
    if kind == b"d":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == b"h":
        signal.setitimer(signal.ITIMER_REAL, 0.1)  # instead of half a minute
        time.sleep(20.0)
    if kind == b"e":
        raise KeyError("not of errors.py")
    if kind == b"m":
        len(b"x" * (2**30 + 2**24))


TARGETS["json"] = Target(file="a.json", mutation=mutate_bytes, parse=fail)

if __name__ == "__main__":
    main()
