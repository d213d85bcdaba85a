"""Generate the tables of README.md and docs/ from `results/`.

::

    python benchmarks/tables.py            write the tables
    python benchmarks/tables.py --check    write nothing; exit with 1 if a table is out of date

The text between `<!-- table:<wing> -->` and `<!-- /table -->` is replaced by the claims of a wing.
`<!-- table:<wing> targets -->` lists the claims with a target, `<!-- table:wings -->` counts the claims and
targets of each wing, `<!-- table:ids <id> <id> ... -->` lists the named claims in this order,
`<!-- table:details <id> <id> ... -->` shows the numbers behind the named claims, a column each,
`<!-- table:lost -->` lists missed targets and slowdowns of all wings, and `<!-- table:gpus -->` lists the
records of `make test-gpu`. The text between `<!-- claim:<id> -->` and `<!-- /claim -->` is replaced by the
value of one claim.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.claims import RESULTS, WINGS, Claim, check_claim, load_claims
from sparseflow.core.files import read_json, write_atomic
from sparseflow.errors import FileFormatError, SparseFlowError

ROOT = Path(__file__).resolve().parents[1]

_BLOCK = re.compile(
    r"(<!-- table:(?P<name>[a-z]+)(?P<words>(?:\s[a-z0-9/-]+)*)\s-->\n)(?P<body>.*?)(?P<end><!-- /table -->)",
    re.DOTALL,
)
_OPENING = re.compile(r"<!-- (?:table|claim):")
_INLINE = re.compile(r"(<!-- claim:(?P<id>[a-z0-9/-]+) -->).*?(?P<end><!-- /claim -->)")


def list_pages(root: Path) -> list[Path]:
    """List the files that may contain tables."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def render_tables(text: str, results: Path) -> str:
    """Replace every table in `text`.

    Raises:
        FileFormatError: A marker is not closed or unknown, or the claims cannot be read.
    """

    def replace(match: re.Match[str]) -> str:
        name, words = match["name"], match["words"].split()
        if name == "wings" and not words:
            lines = format_wing_table(results)
        elif name == "lost" and not words:
            lines = format_lost_table(results)
        elif name == "gpus" and not words:
            lines = format_gpu_table(results)
        elif name == "ids" and words:
            lines = format_selected_claims(words, results)
        elif name == "details" and words:
            lines = format_details(words, results)
        elif words in ([], ["targets"]):
            lines = format_claim_table(name, results, targets=bool(words))
        else:
            raise FileFormatError(f"unknown table: `{match[1].strip()}`")
        return f"{match[1]}{lines}{match['end']}"

    def replace_inline(match: re.Match[str]) -> str:
        (claim,) = _select_claims([match["id"]], results)
        value = f"{claim.value:.3g}" if isinstance(claim.value, float) else format_value(claim.value)
        return f"{match[1]}{value}{format_unit(claim.unit)}{match['end']}"

    if len(_OPENING.findall(text)) != len(_BLOCK.findall(text)) + len(_INLINE.findall(text)):
        raise FileFormatError(
            "every `<!-- table:... -->` must be followed by `<!-- /table -->`, and every "
            "`<!-- claim:... -->` by `<!-- /claim -->` in the same line"
        )
    return _INLINE.sub(replace_inline, _BLOCK.sub(replace, text))


def format_claim_table(wing: str, results: Path, *, targets: bool = False) -> str:
    """Format the claims of a wing, or only those with a target, as a Markdown table."""
    claims = [claim for claim in _load_checked(wing, results) if claim.target is not None or not targets]
    if not claims:
        return "\nNothing has been measured yet.\n\n"
    source = f"Samples and conditions: `results/{wing}/claims.json`."
    return "\n".join(["", *_format_rows(claims), "", source, "", ""])


def format_selected_claims(ids: Sequence[str], results: Path) -> str:
    """Format the claims with the given ids as a Markdown table."""
    return "\n".join(["", *_format_rows(_select_claims(ids, results)), "", ""])


def format_details(ids: Sequence[str], results: Path) -> str:
    """Format the numbers in the details of claims as a Markdown table, a column for each claim."""
    claims = _select_claims(ids, results)
    cases = dict.fromkeys(case for claim in claims for case in claim.details)
    lines = [
        "| " + " | ".join(["case", *(claim.claim.rstrip(".") for claim in claims)]) + " |",
        "| --- |" + " ---: |" * len(claims),
    ]
    for case in cases:
        values = [claim.details.get(case) for claim in claims]
        cells = ["–" if value is None else format_value(value) for value in values]
        lines.append("| " + " | ".join([case, *cells]) + " |")
    return "\n".join(["", *lines, "", ""])


def format_wing_table(results: Path) -> str:
    """Format the number of claims, targets and met targets of each wing as a Markdown table."""
    lines = ["| wing | claims | targets | met | not met |", "| --- | ---: | ---: | ---: | ---: |"]
    for wing in WINGS:
        claims = _load_checked(wing, results)
        met = [claim.met for claim in claims if claim.target is not None]
        lines.append(
            f"| [{wing}]({wing}.md) | {len(claims)} | {len(met)} | {sum(met)} | {len(met) - sum(met)} |"
        )
    return "\n".join(["", *lines, "", ""])


def format_lost_table(results: Path) -> str:
    """Format the claims of all wings that miss their target or are slower than their baseline."""
    claims = [claim for wing in WINGS for claim in _load_checked(wing, results) if is_lost(claim)]
    return "\n".join(["", *_format_rows(claims), "", ""])


def is_lost(claim: Claim) -> bool:
    """Whether a claim misses its target, or is a speedup or relative throughput below 1."""
    is_gain = claim.unit in ("x", "×") and claim.claim.startswith(("Speedup", "Throughput"))
    return not claim.met or (is_gain and isinstance(claim.value, float) and claim.value < 1)


def format_gpu_table(results: Path) -> str:
    """Format the records that `make test-gpu` wrote, one row for each device, as a Markdown table."""
    lines = ["| device | passed | failed | skipped | minutes | torch | triton | revision | date |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | --- | --- | --- | --- |")
    for path in sorted((results / "gpu_tests").glob("*.json")):
        record = read_json(path)
        environment, tests = record["environment"], record["tests"]
        versions = environment["device"]["versions"]
        cells = (
            environment["device"]["name"],
            tests["passed"],
            tests["failed"] + tests["error"],
            tests["skipped"],
            f"{record['duration_s'] / 60:.1f}",
            versions.get("torch", "–"),
            versions.get("triton", "–"),
            environment["git"] or "–",
            environment["time"][:10],
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(["", *lines, "", ""])


def format_value(value: bool | float | str) -> str:
    """Format a value with at most four significant digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value)}"
    return f"{value:.4g}"


def format_unit(unit: str) -> str:
    """Format a unit as it follows a number: `1.4x`, but `3.2 ms`."""
    return unit if unit in ("x", "×", "") else f" {unit}"


def _load_checked(wing: str, results: Path) -> list[Claim]:
    if wing not in WINGS:
        raise FileFormatError(f"`<!-- table:{wing} -->` must name one of: {', '.join(WINGS)}")
    claims = load_claims(results / wing / "claims.json")
    for claim in claims:
        check_claim(claim, results)
    return claims


def _select_claims(ids: Sequence[str], results: Path) -> list[Claim]:
    claims = {claim.id: claim for wing in WINGS for claim in _load_checked(wing, results)}
    missing = [id for id in ids if id not in claims]
    if missing:
        raise FileFormatError(f"no claims with the ids {', '.join(missing)}")
    return [claims[id] for id in ids]


def _format_rows(claims: Sequence[Claim]) -> list[str]:
    """Format claims as the rows of a table, followed by the commands that measured them."""
    commands = list(dict.fromkeys(claim.command for claim in claims))
    names = ["claim", "measured", "target", "against", "on", "date", "command"]
    aligns = ["---", "---:", "---:", "---", "---", "---", "---:"]
    lines = ["| " + " | ".join(names) + " |", "| " + " | ".join(aligns) + " |"]
    for claim in claims:
        status = "" if claim.target is None else " ✓" if claim.met else " ✗ not met"
        cells = (
            claim.claim,
            f"**{format_value(claim.value)}**{format_unit(claim.unit)}{_format_interval(claim)}",
            f"{claim.target or '–'}{status}",
            claim.baseline or "–",
            claim.device,
            str(claim.date),
            f"{commands.index(claim.command) + 1}",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    items = [f"{number}. `{command}`" for number, command in enumerate(commands, 1)]
    return [*lines, "", "Commands:", "", *items]


def _format_interval(claim: Claim) -> str:
    low, high = claim.details.get("low"), claim.details.get("high")
    if low is None or high is None:
        return ""
    dash = "–" if isinstance(low, int | float) and low >= 0 else " to "
    return f" ({format_value(low)}{dash}{format_value(high)})"


def main(arguments: Sequence[str]) -> int:
    check = list(arguments) == ["--check"]
    if arguments and not check:
        print(__doc__, file=sys.stderr)
        return 2
    stale = []
    for page in list_pages(ROOT):
        before = page.read_text(encoding="utf-8")
        try:
            after = render_tables(before, RESULTS)
        except SparseFlowError as error:
            print(f"{page.relative_to(ROOT)}: {error}", file=sys.stderr)
            return 2
        if after != before:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                write_atomic(page, after)
    if stale:
        print(("out of date, run `make tables`: " if check else "written: ") + ", ".join(stale))
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
