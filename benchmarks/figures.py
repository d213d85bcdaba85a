"""Draw the figures of README.md and of the site into `docs/assets/`.

::

    python benchmarks/figures.py            write the figures
    python benchmarks/figures.py --check    write nothing; exit with 1 if a figure is out of date

`flow.svg` shows what each wing measures, learns, decides and runs. `ratios.svg` shows the main ratios of
`results/` with their 95 % intervals. The colors follow the light or dark theme of the reader.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from benchmarks.claims import RESULTS, WINGS, load_claims
from sparseflow.core.files import write_atomic
from sparseflow.core.report.figures import open_axes
from sparseflow.core.report.svg import BAD, GOOD, INK, MUTED, from_matplotlib

ASSETS = Path(__file__).resolve().parents[1] / "docs" / "assets"

STAGES = ("Measure", "Learn", "Decide", "Run")
FLOW = {
    "spiking": ("firing rates, times", "", "code per layer", "skip zeros"),
    "tuning": ("candidate kernels", "cost model", "schedule", "compiled kernel"),
    "latency": ("kernels under load", "predictor", "", "predict a model"),
    "pruning": ("latency per token", "scores and masks", "kept tokens", "compact model"),
    "codesign": ("layers on hardware", "hardware proxy", "chips, partition, layout", "partitioned model"),
    "adaptive": ("plans of a model", "controllers", "plan per request", "server with budgets"),
}
"""What each wing does in each stage; empty where it has none."""

RATIOS = {
    "adaptive/6-step-16-k8-b1": "MoE decode step against eager transformers",
    "tuning/3-spmm-mkl": "SpMM against Intel MKL",
    "spiking/2-demo-speedup": "Spiking ResNet against compiled dense",
    "tuning/3-spmv-mkl": "SpMV against Intel MKL",
    "spiking/3-spk-w64-dense": "Spiking CNN against compiled fp16",
    "pruning/1-compact-cuda": "Video transformer, half the tokens",
    "pruning/1-compact-cpu": "Video transformer, half the tokens",
    "codesign/7-joint": "Joint against two-stage co-design, predicted",
}
"""Claims of the chart, with their labels."""
TICKS = (1, 2, 3, 5, 10)


def draw_flow() -> str:
    """Draw one lane per wing across the four stages."""
    margin, column, top, lane = 104, 196, 62, 46
    width, height = margin + column * len(STAGES) + 8, top + lane * len(FLOW) + 8
    lines = []
    for index, stage in enumerate(STAGES):
        x = margin + index * column
        tip = 0 if index == len(STAGES) - 1 else 14
        lines.append(
            f'<path class="stage" d="M{x} 10h{column - 20}l{tip} 18l-{tip} 18h-{column - 20}z"/>'
            f'<text class="title" x="{x + (column - 20) / 2}" y="34">{stage}</text>'
        )
    for row, (wing, cells) in enumerate(FLOW.items()):
        y = top + row * lane
        used = [index for index, cell in enumerate(cells) if cell]
        start, end = margin + used[0] * column, margin + used[-1] * column + column - 20
        lines.append(f'<text class="wing" x="8" y="{y + 25}">{wing}</text>')
        lines.append(f'<path class="lane" d="M{start} {y + 20}H{end}"/>')
        for index in used:
            x = margin + index * column
            lines.append(
                f'<rect class="cell" x="{x}" y="{y + 3}" width="{column - 20}" height="34" rx="6"/>'
                f'<text class="text" x="{x + (column - 20) / 2}" y="{y + 25}">{escape(cells[index])}</text>'
            )
    alt = "; ".join(
        f"{wing}: "
        + ", ".join(f"{stage.lower()} {cell}" for stage, cell in zip(STAGES, cells, strict=True) if cell)
        for wing, cells in FLOW.items()
    )
    style = (
        ".stage{fill:var(--after)}.title{fill:var(--paper);font-size:17px;font-weight:600;text-anchor:middle}"
        ".wing{fill:var(--ink);font-size:16px;font-weight:600}.lane{stroke:var(--before);stroke-width:2}"
        ".cell{fill:var(--raised);stroke:var(--line)}.text{fill:var(--ink);font-size:14px;text-anchor:middle}"
    )
    return _make_file(width, height, "".join(lines), alt=f"What each wing does. {alt}.", style=style)


def draw_ratios(results: Path = RESULTS) -> str:
    """Draw the claims of `RATIOS` with their intervals on a logarithmic axis.

    Raises:
        KeyError: A claim does not exist or has no interval.
        FileFormatError: The claims cannot be read.
    """
    claims = {claim.id: claim for wing in WINGS for claim in load_claims(results / wing / "claims.json")}
    rows = []
    for id, label in RATIOS.items():
        claim = claims[id]
        median, low, high = (float(x) for x in (claim.value, claim.details["low"], claim.details["high"]))
        rows.append((f"{label} ({claim.device.split(',')[0]})", median, low, high))
    with open_axes(rows=len(rows), row_in=0.36) as (figure, axes):
        for position, (_, median, low, high) in enumerate(rows):
            color = GOOD if low > 1.0 else BAD if high < 1.0 else MUTED
            axes.barh([position], [median - 1.0], left=1.0, height=0.55, color=color)
            axes.plot([low, high], [position, position], color=INK, linewidth=1.6, solid_capstyle="butt")
            axes.annotate(
                f"{median:.2f}x", (max(high, 1.0), position), xytext=(6, 0), textcoords="offset points",
                va="center", color=INK,
            )  # fmt: skip
        axes.axvline(1.0, color=INK, linewidth=1)
        axes.set_xscale("log")
        axes.set_xlim(0.85, 1.35 * max(row[3] for row in rows))
        axes.set_xticks(TICKS, [f"{tick}x" for tick in TICKS])
        axes.minorticks_off()
        axes.set_yticks(range(len(rows)), [row[0] for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel("ratio to the baseline, larger is better; line: 95 % interval")
        text = "; ".join(
            f"{label} {median:.2f} ({low:.2f} to {high:.2f})" for label, median, low, high in rows
        )
        chart = from_matplotlib(figure, title="Ratios", alt=f"Ratios to the baseline: {text}.")
    width, height = map(float, re.search(r'viewBox="0 0 ([0-9.]+) ([0-9.]+)"', chart.svg).groups())  # pyright: ignore[reportOptionalMemberAccess]
    body = re.sub(r"^<svg[^>]*><title[^>]*>.*?</title>|</svg>\s*$", "", chart.svg)
    return _make_file(width, height, body, alt=chart.alt)


def _make_file(width: float, height: float, body: str, *, alt: str, style: str = "") -> str:
    """Make an SVG file with the colors of the report pages."""
    css = (files("sparseflow.core.report") / "page.css").read_text(encoding="utf-8")
    themes = r"^:root \{.*?^\}|^@media \(prefers-color-scheme: dark\) \{.*?^\}"
    colors = re.sub(r"\s+", " ", "".join(re.findall(themes, css, re.MULTILINE | re.DOTALL)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="-12 -6 {width + 24:g} {height + 12:g}">'
        f"<title>{escape(alt)}</title><style>{colors}"
        f"text{{font-family:var(--sans)}}{style}</style>"
        f'<rect x="-12" y="-6" width="100%" height="100%" rx="8" fill="var(--paper)"/>{body}</svg>\n'
    )


def main(arguments: Sequence[str]) -> int:
    check = list(arguments) == ["--check"]
    if arguments and not check:
        print(__doc__, file=sys.stderr)
        return 2
    stale = []
    for name, content in (("flow.svg", draw_flow()), ("ratios.svg", draw_ratios())):
        path = ASSETS / name
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            stale.append(name)
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, content)
    print(f"{'out of date' if check else 'updated'}: {', '.join(stale) or 'none'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
