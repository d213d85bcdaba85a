"""Grid-VQA model: a SigLIP vision tower, a projector and OLMoE blocks, composed as LLaVA.

The saved directory is read by transformers without this package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from sparseflow.adaptive.adapters.crops import CROPS
from sparseflow.adaptive.grid_vqa.config import VqaConfig
from sparseflow.adaptive.grid_vqa.dataset import MEAN, STD
from sparseflow.adaptive.grid_vqa.vocabulary import Vocabulary
from sparseflow.core.config import validate_config
from sparseflow.core.extras import require
from sparseflow.core.files import read_json, write_atomic
from sparseflow.errors import FileFormatError, InputError

SETTINGS = "grid_vqa.json"
"""File of a model's directory with its training configuration."""
IMAGES = "images.tar.gz"
"""File of a model's directory with held-out images, if it is shipped without its archives."""

_TEXT_TOKENS = 64
"""Upper bound of the tokens of a question with its answer."""


def build_vqa_model(config: VqaConfig, vocabulary: Vocabulary) -> Any:
    """Build a `LlavaForConditionalGeneration` with random weights from torch's generator, float32.

    Raises:
        MissingExtraError: transformers is missing.
    """
    transformers = require("transformers", "adaptive")
    sizes = config.model
    vision = transformers.SiglipVisionConfig(
        hidden_size=sizes.vision_width,
        intermediate_size=round(sizes.vision_width * sizes.vision_mlp),
        num_hidden_layers=sizes.vision_depth,
        num_attention_heads=sizes.vision_heads,
        image_size=sizes.crop_px,
        patch_size=sizes.patch_px,
        attention_dropout=sizes.vision_drop,
        vision_use_head=False,
    )
    text = transformers.OlmoeConfig(
        vocab_size=len(vocabulary), hidden_size=sizes.width, intermediate_size=sizes.expert_width,
        num_hidden_layers=sizes.depth, num_attention_heads=sizes.heads, num_key_value_heads=sizes.heads,
        num_experts=sizes.experts, num_experts_per_tok=sizes.top_k, norm_topk_prob=False,
        max_position_embeddings=1 + CROPS["high"] * sizes.crop_tokens + _TEXT_TOKENS,
        pad_token_id=vocabulary.pad, bos_token_id=vocabulary.bos, eos_token_id=vocabulary.eos,
    )  # fmt: skip
    llava_config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=vocabulary.image,
        image_seq_length=sizes.crop_tokens, vision_feature_layer=-1, vision_feature_select_strategy="full",
        pad_token_id=vocabulary.pad, bos_token_id=vocabulary.bos, eos_token_id=vocabulary.eos,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(llava_config)


def save_vqa_model(
    model: Any,
    config: VqaConfig,
    vocabulary: Vocabulary,
    folder: Path | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a model as a transformers directory, with tokenizer, image processor and chat template.

    Args:
        model: Model; it is not changed.
        config: Training configuration, stored in `grid_vqa.json`.
        vocabulary: Vocabulary.
        folder: Directory; created if it does not exist.
        dtype: Number format of the stored weights.
    """
    root, weights = (
        Path(folder),
        {name: weight.detach().clone() for name, weight in model.state_dict().items()},
    )
    root.mkdir(parents=True, exist_ok=True)
    try:
        model.to(dtype).save_pretrained(root)
    finally:
        model.to(torch.float32).load_state_dict(weights)
    vocabulary.tokenizer.save_pretrained(root)
    side = config.model.crop_px
    processor = {
        "image_processor_type": "SiglipImageProcessor", "do_resize": True,
        "size": {"height": side, "width": side}, "resample": 3, "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": list(MEAN), "image_std": list(STD), "do_convert_rgb": True,
    }  # fmt: skip
    write_atomic(root / "preprocessor_config.json", json.dumps(processor, indent=1) + "\n")
    record = {"settings": config.model_dump(mode="json"), "words": list(vocabulary.words)}
    write_atomic(root / SETTINGS, json.dumps(record, indent=1) + "\n")


def load_vqa_model(
    folder: Path | str, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Any, Any, VqaConfig]:
    """Read what `save_vqa_model` wrote. Nothing is downloaded and no code of the directory is run.

    Returns:
        The model in evaluation mode, its tokenizer, and its training configuration.

    Raises:
        InputError: The directory does not exist.
        FileFormatError: It is damaged or foreign.
        MissingExtraError: transformers is missing.
    """
    transformers = require("transformers", "adaptive")
    root = Path(folder)
    if not (root / SETTINGS).is_file():
        raise InputError(f"{root} is not a Grid-VQA model: {SETTINGS} is missing; train one")
    try:
        record: dict[str, Any] = read_json(root / SETTINGS)
        config = validate_config(VqaConfig, record["settings"], str(root / SETTINGS))
        model = transformers.LlavaForConditionalGeneration.from_pretrained(
            root, dtype=dtype, local_files_only=True, use_safetensors=True
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(root, local_files_only=True)
    except (ValueError, KeyError, TypeError, OSError, RuntimeError) as error:
        text = next(iter(str(error).splitlines()), repr(error))
        raise FileFormatError(f"{root} is not a readable Grid-VQA model: {text}") from error
    return model.to(device).eval(), tokenizer, config
