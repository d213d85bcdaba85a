"""Shared code of the benchmarks: models, prompts, a server in this process, and options."""

from __future__ import annotations

import argparse
import base64
import io
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparseflow.adaptive.adapters import Adapter, Inputs, get_adapter
from sparseflow.core.files import write_atomic
from sparseflow.errors import InputError

GEOMETRIES: dict[str, dict[str, Any]] = {
    "least": {
        "vision": {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 8, "patch_size": 4,
        },
        "text": {
            "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4,
            "num_attention_heads": 2, "num_experts": 4, "num_experts_per_tok": 3, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2,
        },
    },
    "tiny": {
        "vision": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 32, "patch_size": 8,
        },
        "text": {
            "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 12,
            "num_attention_heads": 4, "num_experts": 16, "num_experts_per_tok": 8, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2,
        },
    },
    "olmoe-1b-7b": {
        "vision": {"image_size": 192, "patch_size": 16},
        "text": {"num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16},
    },
}  # fmt: skip


def build_model(args: argparse.Namespace) -> tuple[Adapter, Inputs | None]:
    """Load or build a model; also return the inputs of a request with one image."""
    import transformers

    if args.model is not None:
        model = transformers.AutoModelForImageTextToText.from_pretrained(args.model, dtype=args.dtype)
    else:
        geometry = GEOMETRIES[args.geometry]
        text = transformers.OlmoeConfig(**geometry["text"])
        config = transformers.LlavaConfig(
            vision_config=transformers.SiglipVisionConfig(**geometry["vision"]), text_config=text,
            image_token_index=text.vocab_size - 1, vision_feature_select_strategy="full",
            vision_feature_layer=-1,
        )  # fmt: skip
        torch.manual_seed(args.seed)
        torch.set_default_dtype(getattr(torch, args.dtype))
        with torch.device(args.device):
            model = transformers.LlavaForConditionalGeneration(config)
        torch.set_default_dtype(torch.float32)
    model = model.to(args.device).eval()
    adapter = get_adapter(model)
    size = getattr(adapter, "tokens_per_crop", None)
    if size is None:
        return adapter, None
    vision: Any = model.config.vision_config
    ids = torch.tensor([[1, *[model.config.image_token_index] * (14 * size), 2]])
    pixels = torch.rand(
        14, 3, vision.image_size, vision.image_size, generator=torch.Generator().manual_seed(1)
    )
    return adapter, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def make_content(text: str, canvas: np.ndarray | None = None) -> list[dict[str, Any]]:
    """Build the content of a user message in OpenAI's format; a canvas is [height, width, 3] uint8."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if canvas is not None:
        from PIL import Image

        file = io.BytesIO()
        Image.fromarray(canvas).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return parts


@contextmanager
def run_server(app: Any) -> Iterator[str]:
    """Serve an app in this process; yields its URL."""
    from sparseflow.adaptive.serve.lifecycle import Server

    listening, urls = threading.Event(), []

    def announce(line: str) -> None:
        urls.append(json.loads(line)["url"])
        listening.set()

    server = Server(app, port=0, drain_s=30.0, announce=announce)
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    try:
        if not listening.wait(60.0):
            raise SystemExit("the server did not start within 60 s")
        yield urls[0]
    finally:
        server.stop()
        thread.join()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `build_model` reads, `--seed` and `--out`."""
    parser.add_argument("--model", type=Path, help="directory of a model; by default random weights")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="tiny")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", help="by default float32 on a CPU and bfloat16 on a GPU")
    parser.add_argument("--max-batch", type=int, default=8, help="maximum number of concurrent requests")
    parser.add_argument(
        "--max-tokens", type=int, help="maximum tokens of a request; by default that of the model"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")


def resolve_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Set defaults that depend on the device, and return the options in JSON types."""
    if "dtype" in args:
        args.dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")

    def to_json(value: Any) -> Any:
        if isinstance(value, list):
            return [to_json(item) for item in value]
        return value.name if isinstance(value, Path) else value

    return {name: to_json(value) for name, value in vars(args).items() if name != "out"}


def max_total_tokens(args: argparse.Namespace, adapter: Adapter) -> int:
    """Return the maximum number of tokens of a request."""
    config: Any = adapter.decoder.config
    # The configuration of random weights allows more than the benchmarks use.
    limit = 2560 if args.model is None else 8192
    return args.max_tokens or min(int(config.max_position_embeddings), limit)


def max_text_tokens(args: argparse.Namespace, adapter: Adapter, new_tokens: int) -> int:
    """Return the maximum number of text tokens, given vision tokens (highest tier) and answer."""
    size = getattr(adapter, "tokens_per_crop", None)
    return max_total_tokens(args, adapter) - (0 if size is None else 14 * size) - new_tokens


def compute_throughput(end_times_s: Sequence[float]) -> float:
    """Compute requests per second from end times; the first third is warm-up."""
    steady_s = sorted(end_times_s)[len(end_times_s) // 3 :]
    return (len(steady_s) - 1) / (steady_s[-1] - steady_s[0])


def write_table(path: Path, columns: Mapping[str, Any]) -> None:
    """Write columns to a Parquet file, atomically."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(dict(columns)), sink, compression="zstd")
    write_atomic(path, sink.getvalue().to_pybytes())


def fit_lengths(
    requested: Sequence[int] | None, defaults: Sequence[int], limit: int, option: str
) -> list[int]:
    """Return the requested text lengths, or the defaults scaled down to `limit`.

    Raises:
        InputError: A requested length exceeds `limit`.
    """
    if requested and max(requested) > limit:
        raise InputError(f"`{option}` (={max(requested)}) must be at most {limit} tokens")
    scale = min(1.0, limit / max(defaults))
    return sorted({max(1, int(length * scale)) for length in defaults}) if not requested else list(requested)
