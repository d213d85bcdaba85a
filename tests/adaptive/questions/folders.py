"""Folders of tiny models with a tokenizer, profiles of them by a formula, and files of questions."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.engine.generate import generate
from sparseflow.adaptive.grid_vqa.vocabulary import CHAT_TEMPLATE
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import PlanSpace, Tier
from sparseflow.adaptive.profile import Measurement, PlanProfile, ProfileMetadata, compute_model_id
from sparseflow.adaptive.profile.measurement import get_device_facts
from sparseflow.adaptive.prompts.chat import PromptBuilder
from sparseflow.adaptive.prompts.images import decode
from sparseflow.adaptive.prompts.messages import Message, RequestLimits
from sparseflow.adaptive.prompts.model_folder import ModelFolder, open_folder
from tests.adaptive import tiny
from tests.adaptive.fake_runner import VISION_TOKENS, compute_prefill_ms, compute_step_ms

NEW_TOKENS = 3
WORDS = tuple(f"w{index}" for index in range(5, 60))
_SPECIAL = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3, "<answer>": 4, "<image>": tiny.IMAGE}


def tokenizer() -> Any:
    """One token a word."""
    import tokenizers
    import transformers

    remaining = {"<vision>": tiny.VISION_START, "</vision>": tiny.VISION_END, "<video>": tiny.VIDEO}
    words = _SPECIAL | remaining | {word: 5 + index for index, word in enumerate(WORDS)}
    created = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    created.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=created, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>", "answer_token": "<answer>"},
        chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def model_folder(folder: Path, family: str, *, dtype: torch.dtype = torch.float32, **size: Any) -> Path:
    """Write a tiny model of a family."""
    model = tiny.FAMILIES[family](dtype=dtype, **({"depth": 4, "top_k": 2, "experts": 4} | size))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    processor: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if family == "qwen3_vl_moe":
        processor |= {
            "image_processor_type": "Qwen2VLImageProcessor", "patch_size": tiny.PATCH, "merge_size": 2,
            "temporal_patch_size": 2, "size": {"shortest_edge": 64, "longest_edge": 4096},
        }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


@cache
def opened(folder: Path, dtype: torch.dtype = torch.float32) -> ModelFolder:
    """The model of a folder; it must not be changed."""
    loaded_folder = open_folder(folder, dtype=dtype)
    loaded_folder.model.set_experts_implementation("eager")
    return loaded_folder


def picture(seed: int, *, width: int = 24, height: int = 16) -> bytes:
    """Noise, as PNG."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    with io.BytesIO() as stream:
        Image.fromarray(pixels).save(stream, "PNG")
        return stream.getvalue()


def space_of(loaded: ModelFolder) -> PlanSpace:
    """All plans of a model, early blocks kept."""
    return PlanSpace.from_importance(get_adapter(loaded.model).geometry)


def write(path: Path, lines: Sequence[dict[str, Any] | str]) -> Path:
    """Write lines of JSON."""
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n")
    return path


def lines(
    loaded: ModelFolder, folder: Path, count: int, *, images: bool, seed: int = 0
) -> list[dict[str, Any]]:
    """Questions whose answers some plans give: what a plan, drawn for each, says."""
    random = np.random.default_rng(seed)
    space, lines = space_of(loaded), []
    runtime = PlanRuntime(get_adapter(loaded.model))
    try:
        for index in range(count):
            line: dict[str, Any] = {
                "prompt": " ".join(random.choice(WORDS, random.integers(2, 7))),
                "max_new_tokens": NEW_TOKENS, "kind": ("odd", "even")[index % 2],
            }  # fmt: skip
            if images:
                name = f"{index % 5}.png"
                (folder / name).write_bytes(picture(index % 5))
                line["images"] = [name]
            plan = space.plans[random.integers(len(space))]
            output = generate(
                get_adapter(loaded.model),
                runtime,
                inputs_of(loaded, line, folder),
                plan,
                max_new_tokens=NEW_TOKENS,
            )
            text = loaded.tokenizer.decode(output.new_tokens[0], skip_special_tokens=True)
            lines.append(line | {"answer": text or WORDS[0]})
    finally:
        runtime.remove()
    return lines


def inputs_of(loaded: ModelFolder, line: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A question as a server gets it."""
    urls = [
        "data:image/png;base64," + base64.b64encode((folder / name).read_bytes()).decode()
        for name in line.get("images", ())
    ]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    message = Message.model_validate(
        {"role": "user", "content": [*parts, {"type": "text", "text": line["prompt"]}]}
    )
    prompts = PromptBuilder(loaded.tokenizer, context=loaded.context, image_processor=loaded.image_processor)
    inputs = dict(prompts.prompt([message], [decode(url, RequestLimits()) for url in urls]).inputs)
    return {
        name: value.to(loaded.model.dtype) if value.is_floating_point() else value
        for name, value in inputs.items()
    }


def profile_of(loaded: ModelFolder, space: PlanSpace | None = None) -> PlanProfile:
    """A profile of a model by a formula: two requests of each plan at each of two lengths."""
    space = space_of(loaded) if space is None else space
    random, top_k = np.random.default_rng(0), space.geometry.top_k
    vision: dict[Tier, int] = {tier: VISION_TOKENS[tier] for tier in space.geometry.tiers}
    measurements = [
        Measurement(
            plan=plan, text_tokens=tokens, round=index,
            prefill_ms=compute_prefill_ms(plan, tokens, top_k=top_k) * float(np.exp(0.02 * random.normal())),
            steps_ms=tuple(compute_step_ms(plan, tokens + step, top_k=top_k) for step in range(NEW_TOKENS)),
        )
        for index in range(2)
        for plan in space.plans
        for tokens in (6, 12)
    ]  # fmt: skip
    metadata = ProfileMetadata(
        model_id=compute_model_id(loaded.model),
        device=get_device_facts("cpu"),
        space=space,
        vision_tokens=vision,
        config={"runner": "formula", "dtype": str(loaded.model.dtype).removeprefix("torch.")},
    )
    return PlanProfile(metadata=metadata, environments=({},), measurements=tuple(measurements))
