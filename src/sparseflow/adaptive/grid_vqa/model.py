"""The model of Grid-VQA: a SigLIP vision tower, a projector and OLMoE blocks, put together as LLaVA does.

Nothing here is a new architecture: the folder that `save` writes is read by transformers alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from sparseflow.adaptive.adapters.crops import CROPS
from sparseflow.adaptive.grid_vqa.config import VqaConfig, settings_of
from sparseflow.adaptive.grid_vqa.dataset import MEAN, STD
from sparseflow.adaptive.grid_vqa.vocabulary import Vocabulary
from sparseflow.core.extras import require
from sparseflow.core.files import write_atomic
from sparseflow.errors import FileFormatError, InputError

SETTINGS = "grid_vqa.json"
"""File of a model's folder that says what it was trained on."""
IMAGES = "images.tar.gz"
"""File of a model's folder with images that it has not learnt from, where it comes without its archives."""

_TEXT_TOKENS = 64
"""More than a question with its answer has."""


def build(settings: VqaConfig, vocabulary: Vocabulary) -> Any:
    """A `LlavaForConditionalGeneration` whose weights are drawn from torch's generator, float32.

    Raises:
        MissingExtraError: transformers is missing.
    """
    transformers = require("transformers", "adaptive")
    told = settings.model
    vision = transformers.SiglipVisionConfig(
        hidden_size=told.vision_width, intermediate_size=round(told.vision_width * told.vision_mlp),
        num_hidden_layers=told.vision_depth, num_attention_heads=told.vision_heads, image_size=told.crop_px,
        patch_size=told.patch_px, attention_dropout=told.vision_drop, vision_use_head=False,
    )  # fmt: skip
    text = transformers.OlmoeConfig(
        vocab_size=len(vocabulary), hidden_size=told.width, intermediate_size=told.expert_width,
        num_hidden_layers=told.depth, num_attention_heads=told.heads, num_key_value_heads=told.heads,
        num_experts=told.experts, num_experts_per_tok=told.top_k, norm_topk_prob=False,
        max_position_embeddings=1 + CROPS["high"] * told.crop_tokens + _TEXT_TOKENS,
        pad_token_id=vocabulary.pad, bos_token_id=vocabulary.bos, eos_token_id=vocabulary.eos,
    )  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=vocabulary.image,
        image_seq_length=told.crop_tokens, vision_feature_layer=-1, vision_feature_select_strategy="full",
        pad_token_id=vocabulary.pad, bos_token_id=vocabulary.bos, eos_token_id=vocabulary.eos,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config)


def save(
    model: Any,
    settings: VqaConfig,
    vocabulary: Vocabulary,
    folder: Path | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a model as transformers reads it, with tokenizer, image processor and chat template.

    Args:
        model: The model; it stays as it is.
        settings: What it was trained with, kept in `grid_vqa.json`.
        vocabulary: Its words.
        folder: Made when absent.
        dtype: Of the weights on disk.
    """
    root, was = Path(folder), {name: each.detach().clone() for name, each in model.state_dict().items()}
    root.mkdir(parents=True, exist_ok=True)
    try:
        model.to(dtype).save_pretrained(root)
    finally:
        model.to(torch.float32).load_state_dict(was)
    vocabulary.tokenizer.save_pretrained(root)
    side = settings.model.crop_px
    processor = {
        "image_processor_type": "SiglipImageProcessor", "do_resize": True,
        "size": {"height": side, "width": side}, "resample": 3, "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": list(MEAN), "image_std": list(STD), "do_convert_rgb": True,
    }  # fmt: skip
    write_atomic(root / "preprocessor_config.json", json.dumps(processor, indent=1) + "\n")
    kept = {"settings": settings.model_dump(mode="json"), "words": list(vocabulary.words)}
    write_atomic(root / SETTINGS, json.dumps(kept, indent=1) + "\n")


def load(
    folder: Path | str, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Any, Any, VqaConfig]:
    """Read what `save` wrote; nothing is fetched and no code of the folder runs.

    Returns:
        The model, ready to judge; its tokenizer; and what it was trained with.

    Raises:
        InputError: There is no such folder.
        FileFormatError: It holds something else.
        MissingExtraError: transformers is missing.
    """
    transformers = require("transformers", "adaptive")
    root = Path(folder)
    if not (root / SETTINGS).is_file():
        raise InputError(f"{root} holds no model of Grid-VQA: there is no {SETTINGS}; train one into it")
    try:
        kept: dict[str, Any] = json.loads((root / SETTINGS).read_text("utf-8"))
        settings = settings_of(kept["settings"], f"{root / SETTINGS}")
        model = transformers.LlavaForConditionalGeneration.from_pretrained(
            root, dtype=dtype, local_files_only=True, use_safetensors=True
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(root, local_files_only=True)
    except (ValueError, KeyError, TypeError, OSError, RuntimeError) as error:
        text = next(iter(str(error).splitlines()), repr(error))
        raise FileFormatError(f"{root} holds no model of Grid-VQA that can be read: {text}") from error
    return model.to(device).eval(), tokenizer, settings
