"""The command that measures what plans take: `profile`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparseflow.cli.adaptive.base import MOST_TOKENS, Device, Json, Model, app

if TYPE_CHECKING:
    import torch

    from sparseflow.adaptive.plan.space import Tier

_FEW, _MANY = 16, 64
"""Text tokens of prompts, where nothing is asked for."""
_LOADS = {"engine": [0.0, 0.7], "eager": [0.0]}
"""A predictor knows only loads that were measured; requests that are timed alone tell nothing of a tail."""


@app.command()
def profile(
    model: Model,
    out: Annotated[Path, typer.Option(help="Parquet file; one that was stopped goes on.")],
    importance_of: Annotated[
        Path | None,
        typer.Option(
            "--importance", help="What `importance` found; without it plans skip blocks by a guess."
        ),
    ] = None,
    plans: Annotated[
        int, typer.Option(min=0, help="How many plans to measure, spread over all; 0 for all.")
    ] = 48,
    text_plans: Annotated[
        int, typer.Option(min=0, help="How many more to measure without image, where a model takes some.")
    ] = 6,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Text tokens of prompts; may be repeated. By default 16 and 64, or what fits."
        ),
    ] = None,
    loads: Annotated[
        list[float] | None,
        typer.Option(
            "--load",
            help="Share of the device that others want; may be repeated. By default 0 and 0.7, with --runner "
            "eager 0.",
        ),
    ] = None,
    batches: Annotated[
        list[int] | None,
        typer.Option(
            "--batch",
            help="Requests that run at a time; may be repeated. By default 1 and --max-batch, with --runner "
            "eager 1.",
        ),
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Most at a time: --batch of `serve`.")] = 8,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most tokens of a request, images and answer included; `serve` takes no longer ones. By "
            f"default the model's context, {MOST_TOKENS} at most.",
        ),
    ] = None,
    group: Annotated[
        int | None, typer.Option(min=1, help="Plans whose recordings are held at once; by default what fits.")
    ] = None,
    way: Annotated[
        str, typer.Option("--runner", help="engine, as `serve` runs requests, or eager, as the model does.")
    ] = "engine",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Tokens after the first, in each request.")] = 16,
    seed: int = 0,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Measure what plans take here, and fit a predictor to it, in a file beside the profile.

    The predictor of profile.parquet is predictor.json, that of NAME.parquet is NAME.predictor.json.
    """
    from sparseflow.adaptive.adapters import adapter_of
    from sparseflow.adaptive.plan.runtime import PlanRuntime
    from sparseflow.adaptive.predictor import PlanLatencyPredictor
    from sparseflow.adaptive.profile import EagerRunner, EngineRunner, RequestMix, by_group, spread
    from sparseflow.adaptive.profile import collect_profile as measure
    from sparseflow.adaptive.profile.importance import space_of
    from sparseflow.adaptive.profile.random_prompts import RandomPrompts
    from sparseflow.cli.adaptive.base import example_of, opened
    from sparseflow.cli.options import open_device
    from sparseflow.cli.progress import progress_bar
    from sparseflow.errors import InputError

    if way not in _LOADS:
        raise InputError(f"--runner {way!r} must be engine or eager")
    where = open_device(device)
    there = opened(model, where)
    place = _predictor_file(out, there.model, where)
    limit = max_tokens or min(there.context, MOST_TOKENS)
    if limit > there.context:
        raise InputError(f"--max-tokens {limit} is more than the model's context, {there.context} tokens")
    adapter = adapter_of(there.model)
    space = space_of(there.model, adapter.geometry, importance_of)
    if importance_of is None:
        _note(
            "without --importance plans skip blocks by a guess; `sparseflow adaptive importance` finds which "
            "can be spared"
        )
    example = None if there.sight is None else example_of(there).inputs
    vision = {} if example is None else RandomPrompts(adapter, example, device="cpu").vision
    lengths = tokens or _lengths(vision, limit - steps)
    tiers = _tiers(vision, text_tokens=max(lengths), new_tokens=steps + 1, limit=limit)
    left_out = [tier for tier in space.geometry.tiers if tier not in tiers]
    if not tiers:
        # Images of which nothing is measured are refused.
        example = None
    chosen = spread(
        space, min(plans or len(space), len(space)), seed=seed, text_only=text_plans,
        tiers=tiers if left_out else None,
    )  # fmt: skip
    if not chosen:
        raise InputError(
            f"no plan fits: raise --max-tokens (={limit}), or measure without image (--text-plans)"
        )
    knobs, options = PlanRuntime(adapter), {"example": example, "max_tokens": limit, "seed": seed}
    how: dict[str, Any] = {
        "buckets": lengths, "loads": loads or _LOADS[way], "repeats": repeats, "steps": steps, "seed": seed,
    }  # fmt: skip
    with progress_bar() as progress:
        share = 0.0

        def measured(what: str, done: float) -> None:
            nonlocal share
            share = done
            progress(what, done)

        if way == "engine":
            with EngineRunner(
                knobs, chosen, max_batch=max_batch, group=group,
                mix=RequestMix(lengths=lengths, new_tokens=steps + 1),
                progress=lambda done, of: progress(f"recorded {done} of {of}", share), **options,
            ) as runner:  # fmt: skip
                sizes = batches or sorted({1, max_batch})
                found = by_group(runner, space, out, batches=sizes, progress=measured, **how)
        else:
            eager = EagerRunner(knobs, device=where, **options)
            found = measure(eager, space, out, plans=chosen, batches=batches or [1], progress=measured, **how)
    predictor = PlanLatencyPredictor.fit(found, seed=seed)
    predictor.save(place)
    told = {
        "profile": str(out), "predictor": str(place), "requests": len(found.timed),
        "failed": len(found.visits) - len(found.timed), "held_out_error": predictor.held_out,
        "tiers_left_out": left_out,
    }  # fmt: skip
    if as_json:
        typer.echo(json.dumps(told))
        return
    typer.echo(f"{told['requests']} requests measured, {told['failed']} failed")
    typer.echo(f"medians of plans and lengths that a fit had not seen: {predictor.held_out:.1%} off")
    typer.echo(f"written: {out}, {place}")


def _predictor_file(out: Path, model: Any, where: torch.device) -> Path:
    """The predictor's file beside a profile, which may be written over.

    Raises:
        InputError: It holds something else, or a predictor of another model or device.
    """
    from sparseflow.adaptive.predictor import PlanLatencyPredictor
    from sparseflow.adaptive.profile import model_id
    from sparseflow.adaptive.profile.metadata import device_facts
    from sparseflow.errors import FileFormatError, InputError

    name = "predictor.json" if out.name == "profile.parquet" else f"{out.stem}.predictor.json"
    place = out.with_name(name)
    if not place.exists():
        return place
    try:
        about = PlanLatencyPredictor.load(place).about
    except FileFormatError as error:
        raise InputError(f"{place} would be written over: {error}; move it away, or change --out") from error
    for what, there, here in (
        ("model", about.model_id, model_id(model)),
        ("device", dict(about.device), device_facts(where)),
    ):
        if there != here:
            raise InputError(
                f"{place} would be written over, and it is of another {what}: {there}, and yours is {here}; "
                "move it away, or change --out"
            )
    return place


def _lengths(vision: Mapping[Tier, int], room: int) -> list[int]:
    """Text tokens of prompts that leave out as few tiers as can be, and are as many as can be."""
    rooms = [room - seen for seen in (*reversed(list(vision.values())), 0)]
    longest = next((left for left in rooms if left >= _FEW), _MANY)
    return sorted({_FEW, min(longest, _MANY)})


def _tiers(vision: Mapping[Tier, int], *, text_tokens: int, new_tokens: int, limit: int) -> tuple[Tier, ...]:
    """Those whose longest request fits into so many tokens; the others are told of.

    Args:
        vision: Tokens of an image at each tier.
        text_tokens: Of the longest prompt, those that are not of the image.
        new_tokens: Of its answer.
        limit: Most tokens of a request.

    Raises:
        InputError: Not even a request without image does.
    """
    from sparseflow.adaptive.profile.memory import fitting
    from sparseflow.errors import InputError

    sizes = f"{text_tokens} tokens of text and {new_tokens} new ones"
    if text_tokens + new_tokens - 1 > limit:
        raise InputError(
            f"{sizes} are more than the {limit} of a request: lower --tokens or --steps, or raise "
            "--max-tokens"
        )
    found = fitting(vision, text_tokens=text_tokens, new_tokens=new_tokens, max_tokens=limit)
    for tier in vision:
        if tier not in found:
            _note(
                f"tier {tier} is left out: {vision[tier]} vision tokens, {sizes} are more than the {limit} "
                "of a request (--max-tokens)"
            )
    return found


def _note(text: str) -> None:
    typer.echo(text, err=True)
