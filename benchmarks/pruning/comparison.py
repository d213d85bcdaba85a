"""Claims of the comparison that `sparseflow pruning compare` writes.

::

    sparseflow pruning compare --config moving_objects --share 0.5 --share 0.3 --share 0.2 --share 0.1 \\
        --training-free --ablations --device cuda --out runs/moving-objects
    cp runs/moving-objects/comparison.json results/pruning/moving-objects.json
    python -m benchmarks.claims record benchmarks/pruning/comparison.py results/pruning/moving-objects.json
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.claims import Claim, slugify
from sparseflow.pruning.data.moving_digits import MovingDigits
from sparseflow.pruning.training.comparison import TRAINING_FREE, split_name


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: AST against other selectors and against itself without parts."""
    if any(split_name(model["model"])[1] for model in record["models"]):
        yield from make_share_claims(record)
        return
    models = {model["model"]: model for model in record["models"]}
    dense, ast = models["dense"], models["ast"]
    # Records of version 0.1 do not name the measure; its default was entropy.
    measure = record["settings"]["ast"].get("score", {}).get("measure", "entropy")
    yield make_difference(
        record,
        ast,
        dense,
        "over_dense",
        claim=f"Accuracy of AST ({measure}) on moving digits minus that of the dense model, mean of "
        "{seeds} seeds.",
        target=">= -0.5",
        baseline="the dense model",
        slug="ast-dense",
    )
    for name, model in models.items():
        slug = "-".join(name.replace(",", "").split())
        if name == "one frame":
            chance = 1.0 / len(MovingDigits.classes)
            yield Claim(
                id=f"pruning/2-{slug}",
                claim="Accuracy on clips that repeat their first frame, against chance.",
                value=round(100.0 * model["accuracy"], 2),
                unit="points",
                target="chance",
                met=model["accuracy_low"] <= chance <= model["accuracy_high"],
                command=record["command"],
                details={
                    "low": round(100.0 * model["accuracy_low"], 2),
                    "high": round(100.0 * model["accuracy_high"], 2),
                    "chance": 100.0 * chance,
                },
            )
        elif name not in ("dense", "ast"):
            yield make_difference(
                record,
                model,
                ast,
                "over_ast",
                claim=f"Accuracy of '{name}' minus that of AST at the same number of tokens, mean of "
                "{seeds} seeds.",
                baseline=f"AST2.0-lite v2 ({measure})",
                slug=slug,
            )


def make_share_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a comparison at several shares of tokens, one for each selector and share."""
    models, dataset = (
        {model["model"]: model for model in record["models"]},
        record["settings"]["data"]["kind"],
    )
    dense = models["dense"]
    for name, model in models.items():
        selector, text, end = split_name(name)
        if not text:
            continue
        share = float(text)
        ast = models[f"ast{text}{end if end == TRAINING_FREE else ''}"]
        arguments: dict[str, Any] = {"slug": f"{slugify(dataset)}-{slugify(name)}"}
        title = f"'{selector}{end}' with {share:.0%} of the tokens on {dataset}"
        if selector == "ast" and end in ("", TRAINING_FREE):
            target = ">= -0.2" if share == 0.5 and not end else None
            yield make_difference(
                record, model, dense, "over_dense", target=target, baseline="the dense model",
                claim=f"Accuracy of {title} minus that of the dense model, mean of {{seeds}} seeds.",
                **arguments,
            )  # fmt: skip
        else:
            yield make_difference(
                record, model, ast, "over_ast", target="<= 0", baseline="AST at the same share",
                claim=f"Accuracy of {title} minus that of AST, mean of {{seeds}} seeds.", **arguments,
            )  # fmt: skip


def make_difference(
    record: dict[str, Any],
    model: dict[str, Any],
    other: dict[str, Any],
    key: str,
    *,
    claim: str,
    baseline: str,
    slug: str,
    target: str | None = None,
) -> Claim:
    """Make the claim of the accuracy difference `model[key]` of a model over another one."""
    return Claim(
        id=f"pruning/2-{slug}",
        claim=claim.format(seeds=model["seeds"]),
        value=round(100.0 * model[key], 2),
        unit="points",
        target=target,
        baseline=baseline,
        command=record["command"],
        details={
            "low": round(100.0 * model[f"{key}_low"], 2),
            "high": round(100.0 * model[f"{key}_high"], 2),
            "accuracy": round(model["accuracy"], 4),
            "accuracy_baseline": round(other["accuracy"], 4),
        },
    )
