"""Tiny random models of each family, and prompts for them.

Built in milliseconds, float64 unless asked otherwise. Experts run by the eager implementation: the grouped
one has no float64. Attention is that of torch: the eager one has its softmax in float32, whatever the model.
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
"""Placeholder of an image."""
VISION_START, VISION_END, VIDEO = 60, 61, 62
WIDTH = 16
SIZE = 8
"""Side of a crop, in pixels."""
PATCH = 4
_SPREAD = 0.4
"""Standard deviation of weights: routers must have opinions, and blocks must matter."""


def text_config(*, depth: int, top_k: int, experts: int) -> dict[str, Any]:
    """Arguments of a language model's configuration."""
    return {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": WIDTH,
        "num_hidden_layers": depth, "num_attention_heads": 2, "num_key_value_heads": 1,
        "num_experts": experts, "num_experts_per_tok": top_k, "max_position_embeddings": 512,
        "initializer_range": _SPREAD, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def _built(model: Callable[[Any], Any], config: Any, seed: int, dtype: torch.dtype) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = model(config)
        with torch.no_grad():
            for parameter in made.parameters():
                # Norms are ones otherwise, and could be left out unseen.
                parameter.add_(0.1 * torch.randn_like(parameter))
    made = made.to(dtype).eval()
    made.set_experts_implementation("eager")
    # Nothing of it is a generation's business here.
    made.generation_config.eos_token_id = None
    return made


def olmoe(
    *, depth: int = 6, top_k: int = 6, experts: int = 8, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Any:
    """`OlmoeForCausalLM`."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    config = OlmoeConfig(**text_config(depth=depth, top_k=top_k, experts=experts))
    return _built(OlmoeForCausalLM, config, seed, dtype)


def mixtral(
    *, depth: int = 6, top_k: int = 6, experts: int = 8, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Any:
    """`MixtralForCausalLM`."""
    from transformers import MixtralConfig, MixtralForCausalLM

    given = text_config(depth=depth, top_k=top_k, experts=experts)
    config = MixtralConfig(**given, num_local_experts=given.pop("num_experts"))
    return _built(MixtralForCausalLM, config, seed, dtype)


def llava_siglip(
    *, depth: int = 6, top_k: int = 6, experts: int = 8, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Any:
    """`LlavaForConditionalGeneration` of SigLIP and OLMoE: 4 tokens a crop."""
    from transformers import OlmoeConfig, SiglipVisionConfig

    vision = SiglipVisionConfig(**_vision(), num_channels=3)
    text = OlmoeConfig(**text_config(depth=depth, top_k=top_k, experts=experts))
    return _llava(vision, text, "full", seed, dtype)


def llava_clip(
    *, depth: int = 6, top_k: int = 6, experts: int = 8, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Any:
    """`LlavaForConditionalGeneration` of CLIP and OLMoE: 4 tokens a crop, the class token left out."""
    from transformers import CLIPVisionConfig, OlmoeConfig

    vision = CLIPVisionConfig(**_vision(), projection_dim=8)
    text = OlmoeConfig(**text_config(depth=depth, top_k=top_k, experts=experts))
    return _llava(vision, text, "default", seed, dtype)


def llava_dense(*, depth: int = 6, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """`LlavaForConditionalGeneration` of CLIP and Llama, without experts."""
    from transformers import CLIPVisionConfig, LlamaConfig

    given = text_config(depth=depth, top_k=1, experts=1)
    text = LlamaConfig(**{name: each for name, each in given.items() if "experts" not in name})
    return _llava(CLIPVisionConfig(**_vision(), projection_dim=8), text, "default", seed, dtype)


def qwen3_vl_moe(
    *, depth: int = 6, top_k: int = 6, experts: int = 8, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Any:
    """`Qwen3VLMoeForConditionalGeneration`: patches of 4 x 4 pixels, 2 x 2 of them a token."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    config = Qwen3VLMoeConfig(
        text_config=text_config(depth=depth, top_k=top_k, experts=experts)
        | {"head_dim": 8, "moe_intermediate_size": WIDTH, "rope_parameters": rope},
        vision_config={
            "depth": 2, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_heads": 2, "patch_size": PATCH,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": WIDTH,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1], "initializer_range": _SPREAD,
        },
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )  # fmt: skip
    return _built(Qwen3VLMoeForConditionalGeneration, config, seed, dtype)


FAMILIES: MappingProxyType[str, Callable[..., Any]] = MappingProxyType(
    {
        "olmoe": olmoe,
        "mixtral": mixtral,
        "llava_siglip": llava_siglip,
        "llava_clip": llava_clip,
        "qwen3_vl_moe": qwen3_vl_moe,
    }
)


def text(*, tokens: int = 9, rows: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """A prompt without image."""
    ids = torch.randint(3, 60, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def prompt(
    model: Any, *, images: int = 1, tokens: int = 9, rows: int = 1, seed: int = 0
) -> dict[str, Tensor]:
    """A prompt with images at the highest tier; without any where the model takes none.

    Args:
        model: One of these.
        images: How many in each row.
        tokens: Of text after them.
        rows: How many prompts, all of one length.
        seed: Of tokens and pixels.
    """
    end = text(tokens=tokens, rows=rows, seed=seed)
    kind, dtype = model.config.model_type, model.dtype
    if not images or kind not in ("llava", "qwen3_vl_moe"):
        return end
    generator = torch.Generator().manual_seed(seed + 1)
    count = images * rows
    found: dict[str, Tensor] = {}
    if kind == "llava":
        parts = [torch.full((1, CROPS["high"] * (SIZE // PATCH) ** 2), IMAGE), torch.tensor([[5]])] * images
        pixels = torch.randn(count * CROPS["high"], 3, SIZE, SIZE, dtype=dtype, generator=generator)
    else:
        # 6 x 8 patches, then 8 x 6, and so on.
        grids = torch.tensor([[1, 6, 8] if at % images % 2 == 0 else [1, 8, 6] for at in range(count)])
        sides = [torch.tensor([[VISION_START]]), torch.full((1, 12), IMAGE), torch.tensor([[VISION_END]])]
        parts = sides * images
        pixels = torch.randn(int(grids.prod(1).sum()), 3, 1, PATCH, PATCH, dtype=dtype, generator=generator)
        pixels = pixels.expand(-1, -1, 2, -1, -1).reshape(len(pixels), -1)
        found["image_grid_thw"] = grids
    ids = torch.cat([*(part.expand(rows, -1) for part in parts), end["input_ids"]], 1)
    found |= {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    if kind == "qwen3_vl_moe":
        found["mm_token_type_ids"] = (ids == IMAGE).int()
    return found


def _vision() -> dict[str, Any]:
    return {
        "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": SIZE, "patch_size": PATCH, "initializer_range": _SPREAD,
    }  # fmt: skip


def _llava(
    vision: Any, language: Any, strategy: Literal["default", "full"], seed: int, dtype: torch.dtype
) -> Any:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config=vision, text_config=language, image_token_index=IMAGE,
        vision_feature_select_strategy=strategy, vision_feature_layer=-1,
    )  # fmt: skip
    return _built(LlavaForConditionalGeneration, config, seed, dtype)
