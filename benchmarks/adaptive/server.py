r"""OpenAI's own client against the server (line 7): each answer must be what its request gets alone.

::

    PYTHONPATH=src:. python benchmarks/adaptive/server.py --out results/adaptive/server.json
    PYTHONPATH=src:. python benchmarks/adaptive/server.py FOLDER --device cuda --out server.json

A server of this process, with its engine, its batches and HTTP, answers some clients at once: half of the
requests with an image (Grid-VQA's canvases), half of them streamed, plans, lengths and numbers of tokens by
chance. Everything is float64, greedy. Afterwards each request is run alone, by the model's own forward under
the plan that its answer names. Compared are every token that the engine gave out for it, and the text and the
number of tokens that came to the client. Without FOLDER a Grid-VQA model of 16 blocks is made, with random
weights so large that every block, expert and pixel changes what it says.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import content_of, listening, settled

from benchmarks.claims import Claim, record_claims
from sparseflow.adaptive.api import Attached, attach
from sparseflow.adaptive.engine.engine import Engine
from sparseflow.adaptive.engine.requests.request import RequestOutput
from sparseflow.adaptive.grid_vqa.config import VqaConfig, read_settings
from sparseflow.adaptive.grid_vqa.dataset import VqaDataset
from sparseflow.adaptive.grid_vqa.model import build, load, save
from sparseflow.adaptive.plan.space import Plan, PlanSpace
from sparseflow.adaptive.profile.background_traffic import FixedPlanPolicy
from sparseflow.adaptive.profile.collect import select_representative_plans
from sparseflow.adaptive.prompts.chat import PromptBuilder
from sparseflow.adaptive.prompts.images import decode
from sparseflow.adaptive.prompts.messages import ImagePart, Message, Prompt, RequestLimits
from sparseflow.adaptive.prompts.model_folder import open_folder
from sparseflow.adaptive.serve import EngineBackend, Service, create_app
from sparseflow.adaptive.serve.backend import BackendJob, Event, TokensEvent
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic

_LOUD = 0.4
"""Standard deviation of random weights."""
_LOOK_S = 0.001


class Unmeasured:
    """A forecast for requests that ask for nothing."""

    def least_ms(self, prompt: Prompt, new_tokens: int, beside: int) -> float:
        return 1.0

    def of(self, plan: Plan, job: BackendJob) -> tuple[float, float]:
        return 1.0, 1.0

    def observe(self, job: BackendJob, finished: RequestOutput) -> None:
        pass


class Drawn:
    """Gives each job a plan by chance."""

    def __init__(self, plans: Sequence[Plan], seed: int) -> None:
        self._plans, self._random = plans, np.random.default_rng(seed)

    def __call__(self, job: BackendJob) -> FixedPlanPolicy:
        plan = self._plans[int(self._random.integers(len(self._plans)))]
        return FixedPlanPolicy(plan=plan if job.prompt.images else replace(plan, tier=None))


class Listening(EngineBackend):
    """Remembers the tokens that each job was given."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.given: dict[str, list[int]] = {}

    def submit(self, job: BackendJob, emit: Callable[[Event], None]) -> Callable[[], None]:
        mine = self.given.setdefault(job.id, [])

        def heard(event: Event) -> None:
            if isinstance(event, TokensEvent):
                mine.extend(event.ids)
            emit(event)

        return super().submit(job, heard)


def made(folder: Path, settings: VqaConfig, seed: int) -> None:
    """A model with large random weights, in a folder."""
    data = VqaDataset(settings)
    torch.manual_seed(seed)
    model = build(settings, data.vocabulary)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(std=1.0 if "embed" in name else _LOUD)
    save(model, settings, data.vocabulary, folder, dtype=torch.float32)


def questions(folder: Path, count: int, seed: int) -> list[dict[str, Any]]:
    """What clients ask: messages, whether streamed, and how many tokens."""
    _, _, settings = load(folder)
    images = settings.images.model_copy(update={"archives": (), "asked": ()})
    samples = list(VqaDataset(settings.model_copy(update={"images": images})).samples("test", count))
    random = np.random.default_rng(seed)
    asked = []
    for at, sample in enumerate(samples):
        parts = content_of(sample.question, sample.canvas if at % 2 else None)
        asked.append(
            {
                "messages": [{"role": "user", "content": parts}], "image": bool(at % 2),
                "stream": bool(at // 2 % 2), "new_tokens": int(random.integers(2, 25)),
            }
        )  # fmt: skip
    return asked


def answered(client: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """An answer by OpenAI's client: its text, its tokens, its plan, and in how many pieces it came."""
    how = {"model": "grid-vqa", "messages": asked["messages"], "max_completion_tokens": asked["new_tokens"]}
    if not asked["stream"]:
        found = client.chat.completions.create(**how)
        return {
            "id": found.id, "text": found.choices[0].message.content, "plan": found.sparseflow["plan"],
            "pieces": 1, "tokens": found.usage.completion_tokens,
        }  # fmt: skip
    how |= {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**how))
    deltas = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    pieces = [delta for delta in deltas if delta]
    return {
        "id": chunks[0].id, "text": "".join(pieces), "plan": chunks[-1].sparseflow["plan"],
        "pieces": len(pieces), "tokens": chunks[-1].usage.completion_tokens,
    }  # fmt: skip


def alone(attached: Attached, prompts: PromptBuilder, asked: dict[str, Any], plan: Plan) -> list[int]:
    """The tokens that a request gets by itself, by the model's own forward, without its end."""
    message = Message.model_validate(asked["messages"][0])
    urls = [part.image_url.url for part in message.content if isinstance(part, ImagePart)]
    prompt = prompts.prompt([message], [decode(url, RequestLimits()) for url in urls])
    inputs = {name: each.to(attached.adapter.model.device) for name, each in prompt.inputs.items()}
    found = attached.generate(plan=plan, max_new_tokens=asked["new_tokens"], **inputs)
    return [token for token in found.new_tokens[0].tolist() if token not in attached.stop]


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: answers of the server to OpenAI's client."""
    count = len(record["samples"])
    yield Claim(
        id="adaptive/7-openai-client",
        claim=f"Answers of {count} to concurrent requests of OpenAI's client that equal, token by token, a "
        "separate run of each request.",
        value=record["equal"],
        unit="answers",
        target=f">= {count}",
        baseline="each request alone, by the model's own forward",
        command="python benchmarks/adaptive/server.py --out results/adaptive/server.json",
        details={
            "dtype": "float64",
            "streamed": record["streamed"],
            "with_image": record["with_image"],
            "max_concurrent_requests": record["most_at_once"],
            "max_concurrent_plans": record["most_plans"],
        },
    )


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", type=Path, nargs="?", help="folder of a Grid-VQA model; by default a loud one"
    )
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--clients", type=int, default=8, help="that ask at the same time")
    parser.add_argument("--plans", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8, help="as of `serve`")
    parser.add_argument("--depth", type=int, default=16, help="blocks of the model that is made")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    asked = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.model
        if folder is None:
            folder = Path(scratch) / "grid-vqa"
            made(folder, read_settings("digits", {"model.depth": asked.depth}), asked.seed)
        record = measured(asked, folder)
    write_atomic(asked.out, json.dumps(record, allow_nan=False) + "\n")
    record_claims(make_claims(record), record, asked.out)
    print(
        f"{record['equal']} of {len(record['samples'])} answers are what their requests get alone "
        f"({record['streamed']} streamed, {record['with_image']} with an image, {record['texts']} texts); up "
        f"to {record['most_at_once']} requests of {record['most_plans']} plans at a time"
    )
    return 0 if record["equal"] == len(record["samples"]) else 1


def measured(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import openai

    there = open_folder(folder, device=asked.device, dtype=torch.float64)
    # Products by groups of experts are not there in float64.
    there.model.set_experts_implementation("eager")
    wanted = questions(folder, asked.requests, asked.seed)
    with attach(there.model) as attached:
        geometry = attached.adapter.geometry
        random = np.random.default_rng(asked.seed)
        plans = select_representative_plans(PlanSpace.from_importance(geometry, random.random(geometry.depth).tolist()), asked.plans)
        prompts = PromptBuilder(there.tokenizer, context=there.context, sight=there.sight, stop=attached.stop)
        engine = Engine(
            attached.adapter, attached.runtime, plans=plans, max_batch=asked.batch, max_tokens=there.context
        )
        backend = Listening(
            engine, decider=Drawn(plans, asked.seed), forecast=Unmeasured(), stop=attached.stop
        )
        app = create_app(Service("grid-vqa", backend, prompts, temperature=0.0))
        seen: Counter[tuple[int, int]] = Counter()
        over = threading.Event()

        def look() -> None:
            while not over.wait(_LOOK_S):
                batches = engine.snapshot().batches
                seen[sum(batches.values()), len(batches)] += 1

        watcher = threading.Thread(target=look, daemon=True)
        with listening(app) as url, ThreadPoolExecutor(asked.clients) as clients:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=600.0)
            watcher.start()
            try:
                found = list(clients.map(lambda each: answered(client, each), wanted))
            finally:
                over.set()
                watcher.join()
                client.close()
        samples = []
        for each, answer in zip(wanted, found, strict=True):
            told = {name: answer["plan"][name] for name in ("tier", "insertion_position", "top_k", "blocks")}
            plan = Plan.from_dict(told)
            expected = alone(attached, prompts, each, plan)
            text = there.tokenizer.decode(expected, skip_special_tokens=True)
            equal = backend.given[answer["id"]] == expected
            equal = equal and (answer["text"], answer["tokens"]) == (text, len(expected))
            samples.append(
                {
                    "image": each["image"], "stream": each["stream"], "new_tokens": each["new_tokens"],
                    "plan": plan.id, "pieces": answer["pieces"], "text": answer["text"],
                    "tokens": answer["tokens"], "equal": equal,
                }
            )  # fmt: skip
    return {
        "environment": collect_environment(asked.device, seed=asked.seed), "settings": settled(asked),
        "client": openai.__version__, "plans": [plan.id for plan in plans], "samples": samples,
        "equal": sum(each["equal"] for each in samples),
        "streamed": sum(each["stream"] for each in samples),
        "with_image": sum(each["image"] for each in samples),
        "texts": len({each["text"] for each in samples}),
        "most_at_once": max((rows for rows, _ in seen), default=0),
        "most_plans": max((count for _, count in seen), default=0),
        "looks": [[*at, times] for at, times in sorted(seen.items())],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
