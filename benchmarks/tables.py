"""Write the tables of README.md and docs/ from `results/`, between their markers.

    python benchmarks/tables.py            write them
    python benchmarks/tables.py --check    write nothing; exit 1 when one is not up to date

A table stands between `<!-- table:<wing> -->` and `<!-- /table -->`. Whatever is typed there is replaced.
`<!-- table:<wing> targets -->` lists only the claims that had a target, `<!-- table:wings -->` how many each
wing had and met, and `<!-- table:ids <id> <id> ... -->` the claims of these ids, of any wing, in this order.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sparseflow.core import claims
from sparseflow.core.files import write_atomic
from sparseflow.errors import FileFormatError, SparseFlowError

ROOT = Path(__file__).resolve().parents[1]

_BLOCK = re.compile(
    r"(<!-- table:(?P<what>[a-z]+)(?P<words>(?:\s[a-z0-9/-]+)*)\s-->\n)(?P<body>.*?)(?P<end><!-- /table -->)",
    re.DOTALL,
)
_OPENING = re.compile(r"<!-- table:")


def pages(root: Path) -> list[Path]:
    """The files that may hold tables."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def render(text: str, results: Path) -> str:
    """`text` with every table written anew.

    Raises:
        FileFormatError: A marker is not closed or names no wing, or the claims cannot be used.
    """

    def fill(found: re.Match[str]) -> str:
        what, words = found["what"], found["words"].split()
        if what == "wings" and not words:
            lines = wings(results)
        elif what == "ids" and words:
            lines = chosen(words, results)
        elif words in ([], ["targets"]):
            lines = table(what, results, targets=bool(words))
        else:
            raise FileFormatError(f"`{found[1].strip()}` is no table that is known here")
        return f"{found[1]}{lines}{found['end']}"

    if len(_OPENING.findall(text)) != len(_BLOCK.findall(text)):
        raise FileFormatError("every `<!-- table:wing -->` must be followed by a `<!-- /table -->`")
    return _BLOCK.sub(fill, text)


def table(wing: str, results: Path, *, targets: bool = False) -> str:
    """The Markdown table of one wing's claims, or of those with a target."""
    rows = [claim for claim in _claims(wing, results) if claim.target is not None or not targets]
    if not rows:
        return "\nNothing has been measured yet.\n\n"
    source = f"Samples, commands and circumstances: `results/{wing}/claims.json`."
    return "\n".join(["", *_lines(rows), "", source, "", ""])


def chosen(ids: list[str], results: Path) -> str:
    """The Markdown table of some claims."""
    found = {claim.id: claim for wing in claims.WINGS for claim in _claims(wing, results)}
    missing = [each for each in ids if each not in found]
    if missing:
        raise FileFormatError(f"no claims are called {', '.join(missing)}")
    return "\n".join(["", *_lines([found[each] for each in ids]), "", ""])


def wings(results: Path) -> str:
    """The Markdown table of how many targets each wing had and met."""
    lines = ["| | targets | met | not met |", "| --- | ---: | ---: | ---: |"]
    for wing in claims.WINGS:
        met = [claim.met for claim in _claims(wing, results) if claim.target is not None]
        counts = f"{len(met)} | {sum(met)} | {len(met) - sum(met)}" if met else "– | – | –"
        lines.append(f"| [{wing}](docs/{wing}.md) | {counts} |")
    return "\n".join(["", *lines, "", ""])


def _claims(wing: str, results: Path) -> list[claims.Claim]:
    if wing not in claims.WINGS:
        raise FileFormatError(f"`<!-- table:{wing} -->` must name one of: {', '.join(claims.WINGS)}")
    found = claims.load(results / wing / "claims.json")
    for claim in found:
        claims.check_samples(claim, results)
    return found


def _lines(rows: list[claims.Claim]) -> list[str]:
    lines = ["| | measured | target | against | on |", "| --- | ---: | ---: | --- | --- |"]
    for claim in rows:
        met = "" if claim.target is None else " ✓" if claim.met else " ✗ not met"
        cells = (
            claim.claim,
            f"**{shown(claim.value)}**{unit(claim.unit)}",
            f"{claim.target or '–'}{met}",
            claim.baseline or "–",
            claim.device,
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return lines


def shown(value: bool | float | str) -> str:
    """A value as a reader wants it: at most four significant digits, no exponent for what fits without."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value)}"
    return f"{value:.4g}"


def unit(name: str) -> str:
    """The unit as it follows a number: `1.4x`, but `3.2 ms`."""
    return name if name in ("x", "×", "") else f" {name}"


def main(arguments: list[str]) -> int:
    check = arguments == ["--check"]
    if arguments and not check:
        print(__doc__, file=sys.stderr)
        return 2
    stale = []
    for page in pages(ROOT):
        before = page.read_text(encoding="utf-8")
        try:
            after = render(before, ROOT / "results")
        except SparseFlowError as error:
            print(f"{page.relative_to(ROOT)}: {error}", file=sys.stderr)
            return 2
        if after != before:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                write_atomic(page, after)
    if stale:
        print(("not up to date, run `make tables`: " if check else "written: ") + ", ".join(stale))
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
