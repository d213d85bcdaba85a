"""A model's folder, as transformers writes it: the model, its words, and how images get into its prompts.

Nothing is fetched, no code of the folder runs, and weights are read from safetensors only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.adapters.llava import LlavaAdapter
from sparseflow.adaptive.plan.adapter import load_plugin
from sparseflow.core.extras import require
from sparseflow.errors import FileFormatError, InputError, ModelError

if TYPE_CHECKING:
    from sparseflow.adaptive.prompts.messages import Prompt

_PROCESSOR = "preprocessor_config.json"


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFolder:
    """What a model's folder holds.

    Attributes:
        model: In evaluation mode, on its device.
        tokenizer: Its words.
        sight: How images get into prompts (`serve.chat.ImagePromptProcessor`); None for a model that takes
            none.
        context: Most tokens of a prompt and its answer together.
    """

    model: Any
    tokenizer: Any
    sight: Any
    context: int

    def prompt(self, text: str, images: Sequence[Path | str] = ()) -> Prompt:
        """A prompt of one user's message: its `inputs` are those of the model's forward at the highest tier.

        Args:
            text: What is asked.
            images: Files of images, which come before the text.

        Raises:
            InputError: An image cannot be read or used, or the prompt is too long.
        """
        from sparseflow.adaptive.prompts.chat import PromptBuilder

        prompts = PromptBuilder(self.tokenizer, context=self.context, sight=self.sight)
        return prompts.of_user(text, images)


def open_folder(
    folder: Path | str, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> ModelFolder:
    """Read a model.

    Args:
        folder: With `config.json`, weights and tokenizer.
        device: Where to put it.
        dtype: Of its weights; by default float32 on a CPU and bfloat16 elsewhere.

    Raises:
        InputError: There is no such folder.
        FileFormatError: It holds something that cannot be read.
        ModelError: Its architecture has no adapter, or one of a package that cannot be loaded.
        MissingExtraError: transformers is missing.
    """
    transformers = require("transformers", "adaptive")
    root, where = Path(folder), torch.device(device)
    if not (root / "config.json").is_file():
        raise InputError(
            f"{root} holds no model: there is no config.json; give a folder that transformers wrote"
        )
    wanted = dtype or (torch.float32 if where.type == "cpu" else torch.bfloat16)
    try:
        # A package that brings the adapter may tell transformers of the model's classes, too.
        told = json.loads((root / "config.json").read_text("utf-8"))
        load_plugin(str(told.get("model_type") if isinstance(told, dict) else None))
        config = transformers.AutoConfig.from_pretrained(root, local_files_only=True, trust_remote_code=False)
        seeing = getattr(config, "vision_config", None) is not None
        kind = transformers.AutoModelForImageTextToText if seeing else transformers.AutoModelForCausalLM
        model = kind.from_pretrained(
            root, dtype=wanted, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            root, local_files_only=True, trust_remote_code=False
        )
        sight = _sight(root, model, tokenizer, transformers) if seeing else None
    except (ValueError, KeyError, TypeError, OSError, RuntimeError) as error:
        if isinstance(error, ModelError):
            raise
        text = next(iter(str(error).splitlines()), repr(error))
        raise FileFormatError(f"{root} holds no model that can be read: {text}") from error
    text_config = config.get_text_config()
    return ModelFolder(
        model=model.to(where).eval(), tokenizer=tokenizer, sight=sight,
        context=int(text_config.max_position_embeddings),
    )  # fmt: skip


def _sight(root: Path, model: Any, tokenizer: Any, transformers: Any) -> Any:
    # Of the server, but what makes prompts needs no server.
    from sparseflow.adaptive.prompts.processors import CropProcessor, PatchProcessor

    adapter, config = get_adapter(model), model.config
    if isinstance(adapter, LlavaAdapter):
        told = json.loads((root / _PROCESSOR).read_text("utf-8"))
        return CropProcessor(
            tokenizer, image_token=config.image_token_id, size=config.vision_config.image_size,
            tokens_per_crop=adapter.tokens_per_crop, mean=told["image_mean"], std=told["image_std"],
        )  # fmt: skip
    processor = transformers.Qwen2VLImageProcessorPil.from_pretrained(root, local_files_only=True)
    merge = config.vision_config.spatial_merge_size
    return PatchProcessor(tokenizer, processor, image_token=config.image_token_id, merge=merge)
