"""Installs the wheel with each extra into new virtual environments: `make install-check`.

For each Python and extra, pip installs torch at its pin and then the wheel with the extra, as a user does.
The import, `sparseflow doctor`, `pip check` and the smallest command of each wing must work, and torch must
keep its version.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparseflow.core.environment import get_git_revision
from sparseflow.core.extras import SEPARATE_PACKAGES
from sparseflow.core.files import write_json

ROOT = Path(__file__).parents[2]
WINGS = ("spiking", "tuning", "latency", "pruning", "codesign", "adaptive")
EXTRAS = {
    "base": (),
    **{name: (name,) for name in (*WINGS, "distributed")},
    "all": (*WINGS, "distributed"),
}
FILES = {
    "matrix.mtx": "%%MatrixMarket matrix coordinate real general\n3 3 3\n1 1 1.0\n2 3 2.0\n3 1 -1.0\n",
    "problem.dat": "3\n0 1 2 1 0 3 2 3 0\n0 5 1 5 0 2 1 2 0\n",
    "model.py": """
import onnx
from onnx import TensorProto, helper
x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 8]) for name in "xy")
graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", [x], [y])
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), "model.onnx")
""",
}
COMMANDS = {
    "spiking": ("sparseflow demo --rounds 4 --batch-size 2 --no-compile",),
    "tuning": ("sparseflow tune spmv matrix.mtx --trials 0 --budget-s 1 --threads 1",),
    "latency": ("python model.py", "sparseflow latency analyze model.onnx"),
    "pruning": ("sparseflow pruning profile --config moving_digits --batch-size 1 --rounds 1 --no-compile",),
    "codesign": ("sparseflow codesign layout problem.dat --budget-s 1",),
    "adaptive": ("sparseflow adaptive demo --model digits --num-questions 2 --num-budgets 2",),
}
"""The smallest commands of each wing; they use `FILES`."""


def list_commands(extra: str, torch: str, wheel: Path) -> Iterator[str]:
    """Yield the commands that install an extra and use it."""
    names = EXTRAS[extra]
    wings = [name for name in names if name in WINGS]
    pip = "python -m pip -q --disable-pip-version-check"
    requirement = f"{wheel}[{','.join(names)}]" if names else str(wheel)
    yield f"{pip} install --no-compile {torch}"
    yield f"{pip} install --no-compile {shlex.quote(requirement)}"
    yield f"{pip} check"
    if "spiking" in wings:
        separate = " ".join(map(shlex.quote, SEPARATE_PACKAGES.values()))
        yield f"{pip} install --no-compile --no-deps {separate}"
    release = torch.partition("==")[2]
    yield f"python -c \"import torch; assert torch.__version__.partition('+')[0] == '{release}'\""
    yield 'python -c "import sparseflow; sparseflow.__version__"'
    yield "sparseflow doctor"
    for wing in wings:
        yield from COMMANDS[wing]


def check_extra(python: str, extra: str, torch: str, wheel: Path) -> dict[str, Any]:
    """Install one extra into a new environment and run its commands.

    Returns:
        A row of the record: Python, extra, duration in seconds, and the first command that fails with the
        end of its output, or None.
    """
    start = time.monotonic()
    failure = None
    with tempfile.TemporaryDirectory(prefix="install-") as name:
        for file, content in FILES.items():
            (Path(name) / file).write_text(content)
        subprocess.run([python, "-m", "venv", f"{name}/venv"], check=True)
        environment = {"PATH": f"{name}/venv/bin:/usr/bin:/bin", "HOME": name}
        for command in list_commands(extra, torch, wheel):
            process = subprocess.run(
                command, shell=True, cwd=name, env=environment, capture_output=True, text=True, check=False
            )
            if process.returncode:
                failure = {"command": command, "output": (process.stdout + process.stderr)[-2000:]}
                break
    return {
        "python": python,
        "extra": extra,
        "failure": failure,
        "duration_s": round(time.monotonic() - start, 1),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Check every Python and extra, write the record, and return 1 if a command failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters")
    parser.add_argument("--extra", nargs="+", default=list(EXTRAS), choices=EXTRAS, help="extras")
    parser.add_argument("--out", type=Path, default=Path("runs/install.json"), help="record, a JSON file")
    options = parser.parse_args(arguments)
    pin = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pin is not None, "constraints.txt pins torch"
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", directory, str(ROOT)]
        subprocess.run(build, check=True)
        (wheel,) = Path(directory).glob("*.whl")
        for python in options.python:
            for extra in options.extra:
                rows.append(check_extra(python, extra, pin[0], wheel))
                outcome = "failed" if rows[-1]["failure"] else "passed"
                print(f"{python} {extra}: {outcome} in {rows[-1]['duration_s']} s", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    time_text = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(
        options.out, {"time": time_text, "git": get_git_revision(), "torch": pin[0], "rows": rows}, indent=1
    )
    failed = [row for row in rows if row["failure"]]
    for row in failed:
        print(f"\n{row['python']} {row['extra']}: {row['failure']['command']}\n{row['failure']['output']}")
    print(f"{len(rows) - len(failed)} of {len(rows)} passed; record: {options.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
