"""`sparseflow adaptive`: measure a mixture-of-experts model's plans, and keep latency budgets with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from sparseflow.adaptive.attached import Attached
    from sparseflow.adaptive.folder import Opened
    from sparseflow.adaptive.plan import PlanSpace
    from sparseflow.adaptive.serve.backend import Prompt

app = typer.Typer(add_completion=False, no_args_is_help=True)

Model = Annotated[Path, typer.Argument(help="A model's folder, as transformers writes it.")]
Device = Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else.")]
Controller = Annotated[Path | None, typer.Option(help="Trained controllers (safetensors).")]
WorthFile = Annotated[Path | None, typer.Option("--worth", help="How good plans are, as `eval` writes it.")]


@app.callback()
def adaptive() -> None:
    """Keep latency budgets with a multimodal mixture-of-experts model."""


@app.command("grid-vqa")
def grid_vqa(
    out: Annotated[Path, typer.Option(help="Folder of the training; one that was stopped goes on.")],
    config: Annotated[
        str, typer.Option(help="A YAML file, or one that is shipped: digits, gpu, large.")
    ] = "digits",
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="train.steps=3: goes before the file's; may be repeated."),
    ] = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Train a small model that answers questions about images, under random plans."""
    from sparseflow.adaptive.grid_vqa.settings import read_settings
    from sparseflow.adaptive.grid_vqa.training import train
    from sparseflow.cli.options import changes_of, device_of
    from sparseflow.cli.progress import bar

    settings = read_settings(config, changes_of(changes, extra="adaptive"))
    with bar() as tell:
        trained = train(settings, out, device=device_of(device), progress=tell)
    if trained.report is None:
        return  # another process tells
    told = {"folder": str(trained.folder), **trained.report}
    if as_json:
        typer.echo(json.dumps(told))
        return
    typer.echo(f"accuracy of the full plan: {trained.report['accuracy']:.1%}")
    typer.echo(f"model: {told['folder']}")


@app.command()
def importance(
    model: Model,
    out: Annotated[Path, typer.Option(help="JSON file of what was found; a journal beside it goes on.")],
    samples: Annotated[int, typer.Option(min=1, help="Questions to score each set of blocks on.")] = 512,
    beam: Annotated[int, typer.Option(min=1, help="Sets of each size that larger ones are made of.")] = 4,
    archives: Annotated[
        list[Path] | None, typer.Option(help="Archives of images, if they are elsewhere now.")
    ] = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Find which blocks of a Grid-VQA model can be skipped, alone and together."""
    from sparseflow.adaptive.adapters import adapter_of
    from sparseflow.adaptive.grid_vqa.dataset import Data
    from sparseflow.adaptive.grid_vqa.evaluate import accuracy
    from sparseflow.adaptive.grid_vqa.model import load
    from sparseflow.adaptive.importance import importance as search
    from sparseflow.adaptive.plan import Plan
    from sparseflow.adaptive.profile import model_id
    from sparseflow.cli.options import device_of
    from sparseflow.cli.progress import bar
    from sparseflow.core.files import write_atomic

    where = device_of(device)
    network, _, settings = load(model, device=where)
    if archives:
        images = settings.images.model_copy(update={"archives": tuple(archives)})
        settings = settings.model_copy(update={"images": images})
    data, geometry = Data(settings, where), adapter_of(network).geometry

    def score(blocks: tuple[int, ...]) -> Any:
        plan = Plan(tier="high", insertion_position=1, top_k=geometry.top_k, blocks=blocks)
        return accuracy(network, data, [plan], split="val", count=samples)[:, 0].numpy()

    with bar() as tell:
        found = search(
            score,
            geometry,
            beam=beam,
            journal=out.with_suffix(".jsonl"),
            model_id=model_id(network),
            progress=tell,
        )
    write_atomic(out, json.dumps(found.to_dict()) + "\n")
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
        return
    typer.echo(f"all blocks: {found.full:.1%} of {found.samples}; {found.evaluations} sets were scored")
    for drop in found.singles:
        typer.echo(
            f"without block {drop.without[0]}: {-drop.drop:+.1%} ({-drop.high:+.1%} to {-drop.low:+.1%})"
        )
    typer.echo(f"written: {out}")


@app.command()
def profile(
    model: Model,
    out: Annotated[Path, typer.Option(help="Parquet file; one that was stopped goes on.")],
    importance_of: Annotated[
        Path | None,
        typer.Option("--importance", help="What `importance` found; without it early blocks are kept."),
    ] = None,
    plans: Annotated[
        int, typer.Option(min=0, help="How many plans to measure, spread over all; 0 for all.")
    ] = 48,
    tokens: Annotated[list[int] | None, typer.Option(help="Text tokens of prompts; may be repeated.")] = None,
    loads: Annotated[
        list[float] | None,
        typer.Option("--load", help="Share of the device that others want; several."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Tokens after the first, in each request.")] = 16,
    seed: int = 0,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Measure what plans take here, and fit a predictor to it: predictor.json beside the profile."""
    from sparseflow.adaptive.adapters import adapter_of
    from sparseflow.adaptive.folder import open_folder
    from sparseflow.adaptive.knobs import Knobs
    from sparseflow.adaptive.plan import PlanSpace
    from sparseflow.adaptive.predictor import Predictor
    from sparseflow.adaptive.profile import EagerRunner, spread
    from sparseflow.adaptive.profile import profile as measure
    from sparseflow.cli.options import device_of
    from sparseflow.cli.progress import bar

    where = device_of(device)
    opened = open_folder(model, device=where)
    adapter = adapter_of(opened.model)
    geometry = adapter.geometry
    if importance_of is None:
        space = PlanSpace.of(geometry, [float(geometry.depth - block) for block in range(geometry.depth)])
    else:
        space = _importance(importance_of)
    example = None if opened.sight is None else _example(opened).inputs
    runner = EagerRunner(Knobs(adapter), device=where, example=example, seed=seed)
    chosen = spread(space, min(plans, len(space)), seed=seed) if plans else None
    with bar() as tell:
        found = measure(
            runner, space, out, buckets=tokens or [16, 64], plans=chosen, loads=loads or [0.0],
            repeats=repeats, steps=steps, seed=seed, progress=tell,
        )  # fmt: skip
    predictor = Predictor.fit(found, seed=seed)
    place = out.with_name("predictor.json")
    predictor.save(place)
    told = {
        "profile": str(out), "predictor": str(place), "requests": len(found.timed),
        "failed": len(found.visits) - len(found.timed), "held_out_error": predictor.held_out,
    }  # fmt: skip
    if as_json:
        typer.echo(json.dumps(told))
        return
    typer.echo(f"{told['requests']} requests measured, {told['failed']} failed")
    typer.echo(f"medians of plans and lengths that a fit had not seen: {predictor.held_out:.1%} off")
    typer.echo(f"written: {out}, {place}")


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    image: Annotated[list[Path] | None, typer.Option(help="An image; may be repeated.")] = None,
    profile_file: Annotated[
        Path | None, typer.Option("--profile", help="A profile, or a predictor.json; needed for budgets.")
    ] = None,
    controller: Controller = None,
    worth: WorthFile = None,
    budget_ms: Annotated[float | None, typer.Option(help="From now to the last token.")] = None,
    on_infeasible: Annotated[str, typer.Option(help="reject, best_effort or truncate.")] = "best_effort",
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Answer one prompt within a budget."""
    from sparseflow.cli.options import device_of

    opened, attached = _attached(model, profile_file, controller, worth, device_of(device))
    asked = _prompt(opened, prompt, image or [])
    inputs = {name: each.to(attached.adapter.model.device) for name, each in asked.inputs.items()}
    # Once before, for what is made when it is first used.
    attached.generate(max_new_tokens=2, **inputs)
    found = attached.generate(
        latency_budget_ms=budget_ms, on_infeasible=on_infeasible,  # pyright: ignore[reportArgumentType]
        max_new_tokens=max_new_tokens, **inputs,
    )  # fmt: skip
    text = opened.tokenizer.decode(found.new_tokens[0], skip_special_tokens=True)
    told = {
        "text": text, "plan": found.plan.to_dict(), "predicted_ms": found.predicted_ms,
        "measured_ms": found.measured_ms, "budget_ms": budget_ms, "budget_met": found.budget_met,
        "feasible": found.feasible,
    }  # fmt: skip
    if as_json:
        typer.echo(json.dumps(told))
        return
    typer.echo(text)
    expected = "" if found.predicted_ms is None else f", {found.predicted_ms:.1f} ms expected"
    kept = "" if found.budget_met is None else f"; budget {'kept' if found.budget_met else 'missed'}"
    typer.echo(f"{found.plan.id}: {found.measured_ms:.1f} ms{expected}{kept}", err=True)


@app.command()
def serve(
    model: Model,
    profile_file: Annotated[Path, typer.Option("--profile", help="A profile, or a predictor.json.")],
    controller: Controller = None,
    worth: WorthFile = None,
    name: Annotated[
        str | None, typer.Option(help="What clients ask for; by default the folder's name.")
    ] = None,
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    plans: Annotated[
        int, typer.Option(min=2, help="Most plans to run; requests of one meet in a batch.")
    ] = 12,
    batch: Annotated[int, typer.Option(min=1, help="Most requests that decode at a time.")] = 8,
    drain_s: Annotated[float, typer.Option(help="Seconds that running requests have after a signal.")] = 30.0,
    device: Device = "cpu",
) -> None:
    """Serve a model as OpenAI's API does, with `latency_budget_ms` as one more field of a request."""
    from sparseflow.adaptive.runtime.engine import Engine
    from sparseflow.adaptive.serve.app import create_app
    from sparseflow.adaptive.serve.bridge import EngineBackend, Predicted, deciding
    from sparseflow.adaptive.serve.chat import Prompts
    from sparseflow.adaptive.serve.lifecycle import serve as run
    from sparseflow.adaptive.serve.service import Service
    from sparseflow.adaptive.worth import pareto
    from sparseflow.cli.options import device_of
    from sparseflow.cli.progress import bar

    opened, attached = _attached(model, profile_file, controller, worth, device_of(device))
    chooser = attached.chooser
    assert chooser is not None
    space = chooser.predictor.space
    ms, _ = chooser.predictor.predict_all(text_tokens=32, images=int(opened.sight is not None), new_tokens=16)
    kept = pareto(space.plans, ms.tolist(), ms.tolist() if chooser.worth is None else chooser.worth, plans)
    chooser = chooser.only(kept)
    engine = Engine(attached.adapter, attached.knobs, plans=kept, max_batch=batch, max_tokens=opened.context)
    with bar() as tell:
        engine.warm(
            None if opened.sight is None else _example(opened).inputs,
            progress=lambda done, of: tell(f"warmed {done} of {of} steps", done / of),
        )
    backend = EngineBackend(
        engine, decider=deciding(chooser), forecast=Predicted(chooser.predictor, kept), stop=attached.stop,
    )  # fmt: skip
    prompts = Prompts(opened.tokenizer, context=opened.context, sight=opened.sight, stop=attached.stop)
    service = Service(name or model.resolve().name, backend, prompts)
    run(create_app(service), host=host, port=port, drain_s=drain_s)


@app.command()
def doctor(as_json: Json = False) -> None:
    """What this wing needs, and whether it is here."""
    from sparseflow.core.doctor import diagnose

    found = diagnose()
    mine = [each for each in found.extras if each.name in ("adaptive", "distributed")]
    told = {
        "devices": [str(device) for device in found.devices],
        "extras": [
            {"name": each.name, "ok": each.ok, "detail": each.detail, "fix": each.fix} for each in mine
        ],
    }
    if as_json:
        typer.echo(json.dumps(told))
    else:
        for each in mine:
            typer.echo(
                f"{'ok' if each.ok else '--'} {each.name}: {each.detail}{'; ' + each.fix if each.fix else ''}"
            )
    raise typer.Exit(0 if mine[0].ok else 1)


def _importance(path: Path) -> PlanSpace:
    from sparseflow.adaptive.importance import Importance
    from sparseflow.errors import FileFormatError, InputError

    try:
        return Importance.from_dict(json.loads(path.read_text("utf-8"))).space()
    except FileNotFoundError as error:
        raise InputError(
            f"--importance {path} is not there; `sparseflow adaptive importance` writes it"
        ) from error
    except ValueError as error:
        raise FileFormatError(f"{path} does not hold the importance of blocks: {error}") from error


def _attached(
    model: Path, profile_file: Path | None, controller: Path | None, worth: Path | None, device: Any
) -> tuple[Opened, Attached]:
    from sparseflow.adaptive.attached import attach
    from sparseflow.adaptive.folder import open_folder
    from sparseflow.adaptive.worth import Worth

    opened = open_folder(model, device=device)
    values = None if worth is None else Worth.read(worth).accuracy
    return opened, attach(opened.model, profile_file, controller, worth=values)


def _prompt(opened: Opened, text: str, images: list[Path]) -> Prompt:
    """A prompt of one user's message."""
    import base64
    import mimetypes

    from sparseflow.adaptive.serve.chat import Prompts
    from sparseflow.adaptive.serve.images import decode
    from sparseflow.adaptive.serve.limits import Limits
    from sparseflow.adaptive.serve.schema import Message
    from sparseflow.errors import InputError

    urls = []
    for path in images:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(f"--image {path} cannot be read: {error.strerror}") from error
        kind = mimetypes.guess_type(path.name)[0] or "image/png"
        urls.append(f"data:{kind};base64,{base64.b64encode(content).decode()}")
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    message = Message.model_validate({"role": "user", "content": [*parts, {"type": "text", "text": text}]})
    prompts = Prompts(opened.tokenizer, context=opened.context, sight=opened.sight)
    return prompts.prompt([message], [decode(url, Limits()) for url in urls])


def _example(opened: Opened) -> Prompt:
    """A prompt with one image, for measuring."""
    import torch

    from sparseflow.adaptive.serve.chat import Prompts
    from sparseflow.adaptive.serve.schema import Message

    parts = [{"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "text", "text": "what"}]
    message = Message.model_validate({"role": "user", "content": parts})
    noise = torch.randint(
        0, 256, (3, 224, 224), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    return Prompts(opened.tokenizer, context=opened.context, sight=opened.sight).prompt([message], [noise])
