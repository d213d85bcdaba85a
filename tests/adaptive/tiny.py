"""Tiny random models of each family, and prompts for them.

The models are built in milliseconds, in float64 by default. Experts use the eager implementation, because the
grouped one does not support float64, and attention uses that of torch, because the eager one computes its
softmax in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from sparseflow.adaptive.adapters.crops import CROPS

VOCABULARY = 64
IMAGE = 63
"""Placeholder token of an image."""
VISION_START, VISION_END, VIDEO = 60, 61, 62
WIDTH = 16
SIZE = 8
"""Side of a crop, pixels."""
PATCH = 4
_SPREAD = 0.4
"""Standard deviation of weights, large enough that routers are decisive and every block matters."""


def make_text_config(*, depth: int, top_k: int, experts: int) -> dict[str, Any]:
    """Return the arguments of a language model's configuration."""
    return {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": WIDTH,
        "num_hidden_layers": depth, "num_attention_heads": 2, "num_key_value_heads": 1,
        "num_experts": experts, "num_experts_per_tok": top_k, "max_position_embeddings": 512,
        "initializer_range": _SPREAD, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def _build(model: Callable[[Any], Any], config: Any, seed: int, dtype: torch.dtype) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built = model(config)
        with torch.no_grad():
            for parameter in built.parameters():
                # Norm weights of 1 would hide a missing norm.
                parameter.add_(0.1 * torch.randn_like(parameter))
    built = built.to(dtype).eval()
    built.set_experts_implementation("eager")
    # No stop token, so that generation always reaches the maximum length.
    built.generation_config.eos_token_id = None
    return built


def build_olmoe(
    *, depth: int = 6, top_k: int = 6, experts: int = 8, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Any:
    """Build an `OlmoeForCausalLM`."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    config = OlmoeConfig(**make_text_config(depth=depth, top_k=top_k, experts=experts))
    return _build(OlmoeForCausalLM, config, seed, dtype)


def build_mixtral(
    *, depth: int = 6, top_k: int = 6, experts: int = 8, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Any:
    """Build a `MixtralForCausalLM`."""
    from transformers import MixtralConfig, MixtralForCausalLM

    settings = make_text_config(depth=depth, top_k=top_k, experts=experts)
    config = MixtralConfig(**settings, num_local_experts=settings.pop("num_experts"))
    return _build(MixtralForCausalLM, config, seed, dtype)


def build_llava_siglip(
    *, depth: int = 6, top_k: int = 6, experts: int = 8, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Any:
    """Build a `LlavaForConditionalGeneration` of SigLIP and OLMoE with 4 tokens per crop."""
    from transformers import OlmoeConfig, SiglipVisionConfig

    vision = SiglipVisionConfig(**_make_vision_config(), num_channels=3)
    text = OlmoeConfig(**make_text_config(depth=depth, top_k=top_k, experts=experts))
    return _build_llava(vision, text, "full", seed, dtype)


def build_llava_clip(
    *, depth: int = 6, top_k: int = 6, experts: int = 8, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Any:
    """Build a `LlavaForConditionalGeneration` of CLIP and OLMoE: 4 tokens per crop, no class token."""
    from transformers import CLIPVisionConfig, OlmoeConfig

    vision = CLIPVisionConfig(**_make_vision_config(), projection_dim=8)
    text = OlmoeConfig(**make_text_config(depth=depth, top_k=top_k, experts=experts))
    return _build_llava(vision, text, "default", seed, dtype)


def build_llava_dense(*, depth: int = 6, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """Build a `LlavaForConditionalGeneration` of CLIP and Llama, without experts."""
    from transformers import CLIPVisionConfig, LlamaConfig

    settings = make_text_config(depth=depth, top_k=1, experts=1)
    text = LlamaConfig(**{name: value for name, value in settings.items() if "experts" not in name})
    return _build_llava(
        CLIPVisionConfig(**_make_vision_config(), projection_dim=8), text, "default", seed, dtype
    )


def build_qwen3_vl_moe(
    *, depth: int = 6, top_k: int = 6, experts: int = 8, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Any:
    """Build a `Qwen3VLMoeForConditionalGeneration`: 4 x 4 pixels per patch, 2 x 2 patches per token."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    config = Qwen3VLMoeConfig(
        text_config=make_text_config(depth=depth, top_k=top_k, experts=experts)
        | {"head_dim": 8, "moe_intermediate_size": WIDTH, "rope_parameters": rope},
        vision_config={
            "depth": 2, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_heads": 2, "patch_size": PATCH,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": WIDTH,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1], "initializer_range": _SPREAD,
        },
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )  # fmt: skip
    return _build(Qwen3VLMoeForConditionalGeneration, config, seed, dtype)


FAMILIES: MappingProxyType[str, Callable[..., Any]] = MappingProxyType(
    {
        "olmoe": build_olmoe,
        "mixtral": build_mixtral,
        "llava_siglip": build_llava_siglip,
        "llava_clip": build_llava_clip,
        "qwen3_vl_moe": build_qwen3_vl_moe,
    }
)


def make_text_prompt(*, tokens: int = 9, rows: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """Return a prompt without image."""
    ids = torch.randint(3, 60, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def make_prompt(
    model: Any, *, images: int = 1, tokens: int = 9, rows: int = 1, seed: int = 0
) -> dict[str, Tensor]:
    """Return a prompt with images at the highest tier, or without images for a text model.

    Args:
        model: Model of this module.
        images: Number of images per row.
        tokens: Number of text tokens after the images.
        rows: Number of prompts, of equal length.
        seed: Seed of tokens and pixels.
    """
    text_prompt = make_text_prompt(tokens=tokens, rows=rows, seed=seed)
    model_type, dtype = model.config.model_type, model.dtype
    if not images or model_type not in ("llava", "qwen3_vl_moe"):
        return text_prompt
    generator = torch.Generator().manual_seed(seed + 1)
    count = images * rows
    inputs: dict[str, Tensor] = {}
    if model_type == "llava":
        id_parts = [
            torch.full((1, CROPS["high"] * (SIZE // PATCH) ** 2), IMAGE),
            torch.tensor([[5]]),
        ] * images
        pixels = torch.randn(count * CROPS["high"], 3, SIZE, SIZE, dtype=dtype, generator=generator)
    else:
        # 6 x 8 patches, then 8 x 6, and so on.
        grids = torch.tensor([[1, 6, 8] if index % images % 2 == 0 else [1, 8, 6] for index in range(count)])
        sides = [torch.tensor([[VISION_START]]), torch.full((1, 12), IMAGE), torch.tensor([[VISION_END]])]
        id_parts = sides * images
        pixels = torch.randn(int(grids.prod(1).sum()), 3, 1, PATCH, PATCH, dtype=dtype, generator=generator)
        pixels = pixels.expand(-1, -1, 2, -1, -1).reshape(len(pixels), -1)
        inputs["image_grid_thw"] = grids
    ids = torch.cat([*(part.expand(rows, -1) for part in id_parts), text_prompt["input_ids"]], 1)
    inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    if model_type == "qwen3_vl_moe":
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    return inputs


def _make_vision_config() -> dict[str, Any]:
    return {
        "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": SIZE, "patch_size": PATCH, "initializer_range": _SPREAD,
    }  # fmt: skip


def _build_llava(
    vision: Any, language: Any, strategy: Literal["default", "full"], seed: int, dtype: torch.dtype
) -> Any:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config=vision, text_config=language, image_token_index=IMAGE,
        vision_feature_select_strategy=strategy, vision_feature_layer=-1,
    )  # fmt: skip
    return _build(LlavaForConditionalGeneration, config, seed, dtype)
