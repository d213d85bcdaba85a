"""What the adaptive wing's commands share: the application, its options, and opening a model."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from sparseflow.adaptive.prompts.messages import Prompt
    from sparseflow.adaptive.prompts.model_folder import ModelFolder

app = typer.Typer(add_completion=False, no_args_is_help=True)

Model = Annotated[Path, typer.Argument(help="A model's folder, as transformers writes it.")]
Device = Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="train.steps=3: goes before the file's; may be repeated."),
]
QuestionsFile = Annotated[
    Path | None,
    typer.Option(
        "--questions",
        help="JSON lines with prompt, answer and images; without, Grid-VQA's are asked of a model of that.",
    ),
]
Archives = Annotated[list[Path] | None, typer.Option(help="Archives of images, if they are elsewhere now.")]

MOST_TOKENS = 4096
"""Of a request, where a profile says nothing else: keys and values of a long context take much memory."""


@app.callback()
def adaptive() -> None:
    """Keep latency budgets with a multimodal mixture-of-experts model."""


@app.command()
def doctor(as_json: Json = False) -> None:
    """What this wing needs, and whether it is here."""
    from sparseflow.core.doctor import diagnose

    found = diagnose()
    mine = [each for each in found.extras if each.name in ("adaptive", "distributed")]
    if as_json:
        told = {"devices": found.to_json()["devices"], "extras": [asdict(each) for each in mine]}
        typer.echo(json.dumps(told))
    else:
        for device in found.devices:
            place = device.kind if device.index is None else f"{device.kind}:{device.index}"
            typer.echo(f"{place}: {device.name}, {device.memory_bytes / 2**30:.0f} GiB")
        for each in mine:
            typer.echo(
                f"{'ok' if each.ok else '--'} {each.name}: {each.detail}{'; ' + each.fix if each.fix else ''}"
            )
    raise typer.Exit(0 if mine[0].ok else 1)


def opened(folder: Path, device: Any) -> ModelFolder:
    """A model's folder, without what transformers says while it reads."""
    from sparseflow.adaptive.prompts.model_folder import open_folder

    quiet()
    return open_folder(folder, device=device)


def quiet() -> None:
    """Let transformers say nothing but errors: its bars and hints are of what the command says itself."""
    from sparseflow.core.extras import require

    logging = require("transformers.utils.logging", "adaptive")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def example_of(opened: ModelFolder) -> Prompt:
    """A prompt with one image at the highest tier, for measuring, which may be beyond the model's context."""
    import torch

    from sparseflow.adaptive.prompts.chat import PromptBuilder
    from sparseflow.adaptive.prompts.messages import Message

    parts = [{"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "text", "text": "what"}]
    message = Message.model_validate({"role": "user", "content": parts})
    noise = torch.randint(
        0, 256, (3, 224, 224), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    return PromptBuilder(opened.tokenizer, context=sys.maxsize, sight=opened.sight).prompt([message], [noise])
