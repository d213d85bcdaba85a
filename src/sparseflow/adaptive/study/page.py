"""The page of a study: who wins and where, what plans take and give, and whether predictions hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparseflow.adaptive.study import results
from sparseflow.adaptive.study.figures import (
    budget_pictures,
    front_of,
    gains_picture,
    medians_picture,
    plans_picture,
    promises_picture,
    regret_picture,
)
from sparseflow.adaptive.study.training import GRPO
from sparseflow.core.report import Column, Figure, Headline, Report, Section, Table, plot_curves
from sparseflow.core.training.history import read_history, smooth_curve
from sparseflow.errors import FileFormatError

PAGE = "report.html"

Row = Mapping[str, Any]


def write_page(folder: Path | str, out: Path | str) -> Path:
    """Draw the page of a study from the files in its folder; gives the page's path.

    Args:
        folder: With `judged.json`; histories of trainings, where there are some, are drawn, too.
        out: The page.

    Raises:
        InputError: There is no `judged.json`.
        FileFormatError: It is damaged, or a history is.
    """
    root = Path(folder)
    return write_findings(results.read(root), out, histories=sorted((root / GRPO).glob("seed-*")))


def write_findings(found: Row, out: Path | str, *, histories: Sequence[Path] = ()) -> Path:
    """Draw the page of what was found; gives its path.

    Args:
        found: As `findings` makes it.
        out: The page. Its folder must exist.
        histories: Folders of trainings.

    Raises:
        FileFormatError: Something is missing in it, or a history is damaged.
    """
    try:
        contest = _contest(found)
        sections = [
            *contest[:1], _plans(found), *contest[1:], *_predictor(found), *_training(histories),
            _made(found),
        ]  # fmt: skip
        page = Report(
            title="Plans, controllers and the budgets they keep", summary=_summary(found),
            headlines=_headlines(found), sections=sections, environment=found.get("environment", {}),
            reproduce=found.get("command", ""),
        )  # fmt: skip
        return page.write(Path(out))
    except (KeyError, TypeError, IndexError) as error:
        raise FileFormatError(
            f"{results.FILE} lacks something that its page shows: {error!r}; judge anew"
        ) from error


def _summary(found: Row) -> str:
    if found.get("verdict"):
        return found["verdict"][0]
    front = front_of(found["plans"])
    return f"{len(front)} of {len(found['plans'])} plans are beaten by no other one."


def _headlines(found: Row) -> list[Headline]:
    front, made = front_of(found["plans"]), []
    policies = found.get("policies", [])
    if policies:
        first = policies[0]
        made.append(
            Headline(
                value=f"{first['goodput']['mean']:.1%}",
                label=f"right and in time, {first['name']}",
                note=_interval(first["goodput"]),
            )
        )
        made.append(
            Headline(
                value=f"{first['attainment']['mean']:.1%}",
                label=f"in time, {first['name']}",
                note=f"asked for: {found['attainment']:.1%}",
            )
        )
    span = front[-1]["p50_ms"] / front[0]["p50_ms"]
    ends = f"{front[0]['p50_ms']:.3g} to {front[-1]['p50_ms']:.3g} ms"
    made.append(Headline(value=f"{span:.2f}×", label=f"span of {len(front)} plans", note=ends))
    if found["predictor"] is not None:
        error = found["predictor"]["p50_error"]
        made.append(Headline(value=f"{error:.1%}", label="off: medians of unseen plans and lengths"))
    return made


def _contest(found: Row) -> list[Section]:
    if not found.get("policies"):
        return []
    policies, compared = found["policies"], found["compared"]
    rows = [
        {"name": each["name"], "met": each["met"]}
        | {
            name: f"{100 * each[name]['mean']:.1f} ({_interval(each[name])})"
            for name in ("accuracy", "attainment", "goodput", "regret")
        }
        for each in policies
    ]
    titles = {
        "name": "policy", "goodput": "right in time, %", "accuracy": "right, %", "attainment": "in time, %",
        "regret": "regret, points", "met": "kept",
    }  # fmt: skip
    table = Table(
        title="Policies", columns=_columns(titles), rows=rows,
        caption=f"On {found['samples']['test']} questions of the test, each with {len(found['budgets_ms'])} "
        f"budgets from {found['budgets_ms'][0]:.3g} to {found['budgets_ms'][-1]:.3g} ms; 95 % intervals over "
        "images. Each policy is shown a share of every budget, so that on the validation split "
        f"{found['attainment']:.1%} of its answers were in time, which is kept there or not; if by no share, "
        "then the one that came nearest is shown. The oracle, which regret is measured to, sees all of it.",
    )  # fmt: skip
    others = list(dict.fromkeys(row["other"] for row in compared))
    return [
        Section(title="Who wins", text=found["verdict"], items=[table]),
        Section(title="Over budgets", items=budget_pictures(policies, found["attainment"])),
        Section(
            title="Request by request",
            items=[regret_picture(policies), *(gains_picture(compared, other) for other in others)],
            text=["Differences are of the same requests, so what all find hard does not blur them."],
        ),
    ]


def _plans(found: Row) -> Section:
    front, depth = front_of(found["plans"]), found["depth"]
    titles = {
        "number": "", "tier": "tier", "position": "insertion", "top_k": "top-k", "skipped": "skipped",
        "ms": "ms, median", "spread": "5 to 95 %", "accuracy": "right, %", "measured": "measured",
    }  # fmt: skip
    rows = []
    for number, row in enumerate(front, start=1):
        plan = row["plan"]
        skipped = [block for block in range(depth) if block not in plan["blocks"]]
        interval = f" ({_interval(row)})" if "low" in row else ""
        rows.append(
            {
                "number": number, "tier": plan["tier"] or "text", "position": plan["insertion_position"],
                "top_k": plan["top_k"], "skipped": ", ".join(map(str, skipped)) or None, "ms": row["p50_ms"],
                "spread": f"{row['p5_ms']:.3g} to {row['p95_ms']:.3g}",
                "accuracy": f"{100 * row['accuracy']:.1f}{interval}", "measured": row["measured"],
            }
        )  # fmt: skip
    table = Table(
        title="Plans that none beats", columns=_columns(titles), rows=rows,
        caption=f"Of {depth} blocks; the first ones, up to the insertion, run whole.",
    )  # fmt: skip
    items: list[Figure | Table] = [plans_picture(found["plans"], size=found["size"]), table]
    kinds = list(front[0].get("by_kind", {}))
    if kinds:
        by_kind = [
            {"number": number} | {kind: 100.0 * row["by_kind"][kind] for kind in kinds}
            for number, row in enumerate(front, start=1)
        ]
        columns = _columns({"number": ""} | {kind: f"{kind}, %" for kind in kinds}, digits=1)
        items.append(Table(title="Right answers by kind of question", columns=columns, rows=by_kind))
    return Section(title="Plans", items=items)


def _columns(titles: Mapping[str, str], *, digits: int | None = None) -> list[Column]:
    return [Column(key=key, title=title, digits=digits) for key, title in titles.items()]


def _predictor(found: Row) -> list[Section]:
    if found["predictor"] is None:
        text = (
            "The profile has too few plans and lengths to leave some out, so nothing is said of predictions."
        )
        return [Section(title="Predictions", text=[text])]
    return [
        Section(
            title="Predictions",
            items=[promises_picture(found["predictor"]), medians_picture(found["predictor"])],
        )
    ]


def _training(folders: Sequence[Path]) -> list[Section]:
    held_out: dict[str, tuple[list[float], list[float]]] = {}
    price: dict[str, tuple[list[float], list[float]]] = {}
    for folder in folders:
        rows = list(read_history(folder))
        looks = [row for row in rows if row["kind"] == "held_out"]
        for name in ("accuracy", "attainment"):
            curve = smooth_curve(looks, name)
            if curve[0]:
                held_out[f"{name}, {folder.name}"] = curve
        curve = smooth_curve([row for row in rows if row["kind"] == "train"], "multiplier")
        if curve[0]:
            price[folder.name] = curve
    figures: list[Figure] = []
    if held_out:
        figures.append(plot_curves("On the validation split", held_out, x="step", y="share"))
    if price:
        figures.append(plot_curves("Price of a violation", price, x="step", y="answers"))
    return [Section(title="Training", items=figures)] if figures else []


def _made(found: Row) -> Section:
    plans = found["plans"]
    measured = sum(row["measured"] for row in plans)
    text = [
        "Latency is of requests alone on the profile's device, "
        f"{found['device'].get('name', 'unknown')}, beside a load of {found['load']:.0%}. A request of "
        "another length than was measured takes what a measured one took, times the ratio of predicted "
        "medians; the scatter is that of measured requests.",
        f"{measured} of {len(plans)} plans were measured."
        + (
            " The others take their predicted median, times what a request of some measured plan took over "
            "its own, which was predicted by what had not seen that plan at that length."
            if measured < len(plans)
            else ""
        ),
    ]
    if "task" in found:
        text.append(f"What was asked: {found['task']['name']}. {found['task']['told']}")
    if found.get("policies"):
        text.append(
            "An answer takes as many tokens as the right one has, also where it is wrong. Controllers and "
            f"tables learnt from {found['samples']['train']} questions, and were matched on "
            f"{found['samples']['validation']} more."
        )
    return Section(title="How this was made", text=text)


def _interval(row: Row) -> str:
    return f"{100 * row['low']:.1f} to {100 * row['high']:.1f}"
