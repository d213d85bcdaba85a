"""Answers of the server to OpenAI's client against sequential runs of the same requests (line 7).

::

    PYTHONPATH=src:. python benchmarks/adaptive/server.py --out results/adaptive/server.json
    PYTHONPATH=src:. python benchmarks/adaptive/server.py FOLDER --device cuda --out server.json

A server in this process answers concurrent clients: half of the requests have an image (canvases of
Grid-VQA), half are streamed, with random plans, lengths and numbers of tokens. Everything is float64 and
greedy. Afterwards each request runs by itself, with the model's forward and the plan that its answer names.
The tokens that the engine generated, and the text and number of tokens that the client received, must be
equal. Without FOLDER a Grid-VQA model of 16 blocks is created with random weights so large that every block,
expert and pixel changes the answer.
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
from models import make_content, resolve_settings, run_server

from benchmarks.claims import Claim, record_claims
from sparseflow.adaptive.api import Attached, attach
from sparseflow.adaptive.engine.engine import Engine
from sparseflow.adaptive.engine.requests.request import RequestOutput
from sparseflow.adaptive.grid_vqa.config import VqaConfig, load_vqa_config
from sparseflow.adaptive.grid_vqa.dataset import VqaDataset
from sparseflow.adaptive.grid_vqa.model import build_vqa_model, load_vqa_model, save_vqa_model
from sparseflow.adaptive.plan.space import Plan, PlanSpace
from sparseflow.adaptive.profile.background_traffic import FixedPlanPolicy
from sparseflow.adaptive.profile.collect import select_representative_plans
from sparseflow.adaptive.prompts.chat import PromptBuilder
from sparseflow.adaptive.prompts.images import decode
from sparseflow.adaptive.prompts.messages import ImagePart, Message, Prompt, RequestLimits
from sparseflow.adaptive.prompts.model_folder import open_folder
from sparseflow.adaptive.serve import EngineBackend, Service, create_app
from sparseflow.adaptive.serve.backend import BackendJob, Event, ServiceTime, TokensEvent
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic

_WEIGHT_STD = 0.4
"""Standard deviation of random weights."""
_POLL_INTERVAL_S = 0.001


class ConstantForecast:
    """Forecast for requests without budgets."""

    def min_service_ms(self, prompt: Prompt, max_new_tokens: int, num_concurrent: int | None) -> ServiceTime:
        return ServiceTime(1.0, 1.0)

    def predict(self, plan: Plan, job: BackendJob) -> tuple[float, float]:
        return 1.0, 1.0

    def observe(self, job: BackendJob, output: RequestOutput, *, isolated: bool) -> None:
        pass


class RandomPlanPolicy:
    """Selects a random plan for each job."""

    def __init__(self, plans: Sequence[Plan], seed: int) -> None:
        self._plans, self._random = plans, np.random.default_rng(seed)

    def __call__(self, job: BackendJob) -> FixedPlanPolicy:
        plan = self._plans[int(self._random.integers(len(self._plans)))]
        return FixedPlanPolicy(plan=plan if job.prompt.images else replace(plan, tier=None))


class RecordingBackend(EngineBackend):
    """Records the tokens of each job."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tokens_by_id: dict[str, list[int]] = {}

    def submit(self, job: BackendJob, emit: Callable[[Event], None]) -> Callable[[], None]:
        tokens = self.tokens_by_id.setdefault(job.id, [])

        def record(event: Event) -> None:
            if isinstance(event, TokensEvent):
                tokens.extend(event.ids)
            emit(event)

        return super().submit(job, record)


def create_model(folder: Path, settings: VqaConfig, seed: int) -> None:
    """Write a model with large random weights to a directory."""
    data = VqaDataset(settings)
    torch.manual_seed(seed)
    model = build_vqa_model(settings, data.vocabulary)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(std=1.0 if "embed" in name else _WEIGHT_STD)
    save_vqa_model(model, settings, data.vocabulary, folder, dtype=torch.float32)


def make_requests(folder: Path, count: int, seed: int) -> list[dict[str, Any]]:
    """Build the requests: messages, streaming, and number of tokens."""
    _, _, settings = load_vqa_model(folder)
    images = settings.images.model_copy(update={"archives": (), "question_names": ()})
    samples = list(VqaDataset(settings.model_copy(update={"images": images})).iterate_samples("test", count))
    rng = np.random.default_rng(seed)
    requests = []
    for index, sample in enumerate(samples):
        parts = make_content(sample.question, sample.canvas if index % 2 else None)
        requests.append(
            {
                "messages": [{"role": "user", "content": parts}], "image": bool(index % 2),
                "stream": bool(index // 2 % 2), "new_tokens": int(rng.integers(2, 25)),
            }
        )  # fmt: skip
    return requests


def send(client: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Send a request with OpenAI's client; returns text, tokens, plan and number of pieces."""
    options = {
        "model": "grid-vqa",
        "messages": request["messages"],
        "max_completion_tokens": request["new_tokens"],
    }
    if not request["stream"]:
        completion = client.chat.completions.create(**options)
        return {
            "id": completion.id,
            "text": completion.choices[0].message.content,
            "plan": completion.sparseflow["plan"],
            "pieces": 1,
            "tokens": completion.usage.completion_tokens,
        }
    options |= {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**options))
    deltas = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    pieces = [delta for delta in deltas if delta]
    return {
        "id": chunks[0].id, "text": "".join(pieces), "plan": chunks[-1].sparseflow["plan"],
        "pieces": len(pieces), "tokens": chunks[-1].usage.completion_tokens,
    }  # fmt: skip


def run_sequentially(
    attached: Attached, prompts: PromptBuilder, request: dict[str, Any], plan: Plan
) -> list[int]:
    """Return the tokens of a request run by itself with the model's forward, without stop tokens."""
    message = Message.model_validate(request["messages"][0])
    urls = [part.image_url.url for part in message.content if isinstance(part, ImagePart)]
    prompt = prompts.prompt([message], [decode(url, RequestLimits()) for url in urls])
    inputs = {name: value.to(attached.adapter.model.device) for name, value in prompt.inputs.items()}
    result = attached.generate(plan=plan, max_new_tokens=request["new_tokens"], **inputs)
    return [token for token in result.new_tokens[0].tolist() if token not in attached.stop]


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
        baseline="sequential requests, with the model's forward",
        command="python benchmarks/adaptive/server.py --out results/adaptive/server.json",
        details={
            "dtype": "float64",
            "streamed": record["streamed"],
            "with_image": record["with_image"],
            "max_concurrent_requests": record["most_at_once"],
            "max_concurrent_plans": record["most_plans"],
        },
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", type=Path, nargs="?", help="directory of a Grid-VQA model; by default random weights"
    )
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--clients", type=int, default=8, help="number of concurrent clients")
    parser.add_argument("--plans", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8, help="maximum batch size")
    parser.add_argument("--depth", type=int, default=16, help="blocks of the random model")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model
        if folder is None:
            folder = Path(scratch) / "grid-vqa"
            create_model(folder, load_vqa_config("digits", {"model.depth": args.depth}), args.seed)
        record = measure(args, folder)
    write_atomic(args.out, json.dumps(record, allow_nan=False) + "\n")
    record_claims(make_claims(record), record, args.out)
    print(
        f"{record['equal']} of {len(record['samples'])} answers equal those of sequential runs "
        f"({record['streamed']} streamed, {record['with_image']} with an image, {record['texts']} texts); up "
        f"to {record['most_at_once']} concurrent requests of {record['most_plans']} plans"
    )
    return 0 if record["equal"] == len(record["samples"]) else 1


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import openai

    folder_model = open_folder(folder, device=args.device, dtype=torch.float64)
    # The grouped expert implementation does not support float64.
    folder_model.model.set_experts_implementation("eager")
    requests = make_requests(folder, args.requests, args.seed)
    with attach(folder_model.model) as attached:
        geometry = attached.adapter.geometry
        rng = np.random.default_rng(args.seed)
        space = PlanSpace.from_importance(geometry, rng.random(geometry.depth).tolist())
        plans = select_representative_plans(space, args.plans)
        prompts = PromptBuilder(
            folder_model.tokenizer,
            context=folder_model.context,
            image_processor=folder_model.image_processor,
        )
        engine = Engine(
            attached.adapter,
            attached.runtime,
            plans=plans,
            max_batch=args.batch,
            max_tokens=folder_model.context,
        )
        backend = RecordingBackend(
            engine,
            decider=RandomPlanPolicy(plans, args.seed),
            forecast=ConstantForecast(),
            stop=attached.stop,
        )
        app = create_app(Service("grid-vqa", backend, prompts, temperature=0.0))
        occupancy: Counter[tuple[int, int]] = Counter()
        stopped = threading.Event()

        def poll() -> None:
            while not stopped.wait(_POLL_INTERVAL_S):
                batches = engine.snapshot().batches
                occupancy[sum(batches.values()), len(batches)] += 1

        watcher = threading.Thread(target=poll, daemon=True)
        with run_server(app) as url, ThreadPoolExecutor(args.clients) as clients:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=600.0)
            watcher.start()
            try:
                answers = list(clients.map(lambda request: send(client, request), requests))
            finally:
                stopped.set()
                watcher.join()
                client.close()
        samples = []
        for request, answer in zip(requests, answers, strict=True):
            plan_fields = {
                name: answer["plan"][name] for name in ("tier", "insertion_position", "top_k", "blocks")
            }
            plan = Plan.from_dict(plan_fields)
            expected = run_sequentially(attached, prompts, request, plan)
            text = folder_model.tokenizer.decode(expected, skip_special_tokens=True)
            equal = backend.tokens_by_id[answer["id"]] == expected
            equal = equal and (answer["text"], answer["tokens"]) == (text, len(expected))
            samples.append(
                {
                    "image": request["image"],
                    "stream": request["stream"],
                    "new_tokens": request["new_tokens"],
                    "plan": plan.id,
                    "pieces": answer["pieces"],
                    "text": answer["text"],
                    "tokens": answer["tokens"],
                    "equal": equal,
                }
            )
    return {
        "environment": collect_environment(args.device, seed=args.seed), "settings": resolve_settings(args),
        "client": openai.__version__, "plans": [plan.id for plan in plans], "samples": samples,
        "equal": sum(request["equal"] for request in samples),
        "streamed": sum(request["stream"] for request in samples),
        "with_image": sum(request["image"] for request in samples),
        "texts": len({request["text"] for request in samples}),
        "most_at_once": max((rows for rows, _ in occupancy), default=0),
        "most_plans": max((count for _, count in occupancy), default=0),
        "looks": [[*state, times] for state, times in sorted(occupancy.items())],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
