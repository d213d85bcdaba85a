"""Claims of `make demo` and `make test` on a fresh clone.

The record holds `demo_exit`, `demo_s`, `test_exit` and `test_s`. ::

    python -m benchmarks.claims record benchmarks/spiking/fresh_clone.py fresh.json
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.claims import Claim, write_samples


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: exit codes of both commands."""
    samples = write_samples("spiking/1-fresh-clone.json", record)
    for target in ("demo", "test"):
        yield Claim(
            id=f"spiking/1-make-{target}",
            claim=f"Exit code of `make {target}` on a fresh clone without a virtual environment.",
            value=record[f"{target}_exit"],
            target="== 0",
            device="2-core CPU",
            command=f"git clone …; make {target}",
            samples=samples,
        )
