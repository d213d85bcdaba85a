"""What the benchmarks of this folder share: models, from a folder or with random weights; a server of this
process; and options."""

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


def built(asked: argparse.Namespace) -> tuple[Adapter, Inputs | None]:
    """A model, and a request of it with one image."""
    import transformers

    if asked.model is not None:
        model = transformers.AutoModelForImageTextToText.from_pretrained(asked.model, dtype=asked.dtype)
    else:
        made = GEOMETRIES[asked.geometry]
        text = transformers.OlmoeConfig(**made["text"])
        config = transformers.LlavaConfig(
            vision_config=transformers.SiglipVisionConfig(**made["vision"]), text_config=text,
            image_token_index=text.vocab_size - 1, vision_feature_select_strategy="full",
            vision_feature_layer=-1,
        )  # fmt: skip
        torch.manual_seed(asked.seed)
        torch.set_default_dtype(getattr(torch, asked.dtype))
        with torch.device(asked.device):
            model = transformers.LlavaForConditionalGeneration(config)
        torch.set_default_dtype(torch.float32)
    model = model.to(asked.device).eval()
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


def content_of(text: str, canvas: np.ndarray | None = None) -> list[dict[str, Any]]:
    """What a user's message holds, as OpenAI's clients send it; a canvas is [height, width, 3] uint8."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if canvas is not None:
        from PIL import Image

        file = io.BytesIO()
        Image.fromarray(canvas).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return parts


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """A server of this process within; gives its address."""
    from sparseflow.adaptive.serve.lifecycle import Server

    up, where = threading.Event(), []

    def announce(told: str) -> None:
        where.append(json.loads(told)["url"])
        up.set()

    server = Server(app, port=0, drain_s=30.0, announce=announce)
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    try:
        if not up.wait(60.0):
            raise SystemExit("the server did not come up")
        yield where[0]
    finally:
        server.stop()
        thread.join()


def options(parser: argparse.ArgumentParser) -> None:
    """Add what `built` needs, `--seed` and `--out`."""
    parser.add_argument("--model", type=Path, help="folder of a model; by default random weights")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="tiny")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", help="float32 on a CPU, bfloat16 on a GPU by default")
    parser.add_argument("--max-batch", type=int, default=8, help="most requests at a time")
    parser.add_argument("--max-tokens", type=int, help="of a request; by default what the model knows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")


def settled(asked: argparse.Namespace) -> dict[str, Any]:
    """Fill in what depends on the device; gives the options as a record keeps them."""
    if "dtype" in asked:
        asked.dtype = asked.dtype or ("bfloat16" if asked.device.startswith("cuda") else "float32")

    def kept(value: Any) -> Any:
        if isinstance(value, list):
            return [kept(each) for each in value]
        return value.name if isinstance(value, Path) else value

    return {name: kept(value) for name, value in vars(asked).items() if name != "out"}


def max_total_tokens(asked: argparse.Namespace, adapter: Adapter) -> int:
    """Of a request."""
    config: Any = adapter.decoder.config
    # Random weights know more than is of use here.
    most = 2560 if asked.model is None else 8192
    return asked.max_tokens or min(int(config.max_position_embeddings), most)


def room(asked: argparse.Namespace, adapter: Adapter, new_tokens: int) -> int:
    """Text tokens that a request has room for beside its vision tokens (highest tier) and its answer."""
    size = getattr(adapter, "tokens_per_crop", None)
    return max_total_tokens(asked, adapter) - (0 if size is None else 14 * size) - new_tokens


def ends_per_s(ended: Sequence[float]) -> float:
    """How many of some requests end in a second, from when each ended; the first third is for caches and
    clocks."""
    counted = sorted(ended)[len(ended) // 3 :]
    return (len(counted) - 1) / (counted[-1] - counted[0])


def write_table(path: Path, columns: Mapping[str, Any]) -> None:
    """Samples by column as a Parquet file, in place of what is there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(dict(columns)), sink, compression="zstd")
    write_atomic(path, sink.getvalue().to_pybytes())


def within(wanted: Sequence[int] | None, usual: Sequence[int], most: int, option: str) -> list[int]:
    """Numbers of text tokens: those that are wanted, or the usual ones, smaller where there is no room.

    Raises:
        InputError: Those that are wanted do not fit.
    """
    if wanted and max(wanted) > most:
        raise InputError(
            f"`{option}` (={max(wanted)}) must be at most {most} tokens, for which the model has room"
        )
    shrunk = min(1.0, most / max(usual))
    return sorted({max(1, int(each * shrunk)) for each in usual}) if not wanted else list(wanted)
