"""Loading of a transformers model directory: model, tokenizer and image processor.

Only local files are read, no code of the directory is run, and weights come from safetensors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.adapters.llava import LlavaAdapter
from sparseflow.adaptive.plan.adapter import load_plugin
from sparseflow.core.extras import require
from sparseflow.core.files import read_json
from sparseflow.errors import FileFormatError, InputError, MissingExtraError, ModelError

if TYPE_CHECKING:
    from sparseflow.adaptive.prompts.messages import Prompt

_PROCESSOR = "preprocessor_config.json"


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFolder:
    """Model, tokenizer and image processor of a directory.

    Attributes:
        model: Model in evaluation mode, on its device.
        tokenizer: Tokenizer of the model.
        image_processor: Builder of image inputs (`ImagePromptProcessor`); None for a model without images.
        context: Maximum number of tokens of a prompt with its answer.
    """

    model: Any
    tokenizer: Any
    image_processor: Any
    context: int

    def prompt(self, text: str, images: Sequence[Path | str] = ()) -> Prompt:
        """Build the prompt of one user message, with `inputs` at the highest tier.

        Args:
            text: Text of the message.
            images: Image files, placed before the text.

        Raises:
            InputError: An image cannot be read or used, or the prompt is too long.
        """
        from sparseflow.adaptive.prompts.chat import PromptBuilder

        prompts = PromptBuilder(self.tokenizer, context=self.context, image_processor=self.image_processor)
        return prompts.build_user_prompt(text, images)


def open_folder(
    folder: Path | str, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> ModelFolder:
    """Load a model directory.

    Args:
        folder: Directory with `config.json`, weights and tokenizer.
        device: Device of the model.
        dtype: Data type of the weights; by default float32 on a CPU and bfloat16 elsewhere.

    Raises:
        InputError: The directory does not exist or has no `config.json`.
        FileFormatError: A file cannot be read.
        ModelError: The architecture has no adapter, or the package of the adapter cannot be loaded.
        MissingExtraError: transformers is missing.
    """
    transformers = require("transformers", "adaptive")
    root, target_device = Path(folder), torch.device(device)
    if not (root / "config.json").is_file():
        raise InputError(f"{root} has no config.json; expected a directory that `save_pretrained` wrote")
    target_dtype = dtype or (torch.float32 if target_device.type == "cpu" else torch.bfloat16)
    try:
        # The package of an adapter may also register the model classes with transformers.
        metadata = read_json(root / "config.json")
        load_plugin(str(metadata.get("model_type") if isinstance(metadata, dict) else None))
        config = transformers.AutoConfig.from_pretrained(root, local_files_only=True, trust_remote_code=False)
        has_vision = getattr(config, "vision_config", None) is not None
        auto_class = (
            transformers.AutoModelForImageTextToText if has_vision else transformers.AutoModelForCausalLM
        )
        model = auto_class.from_pretrained(
            root, dtype=target_dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            root, local_files_only=True, trust_remote_code=False
        )
        image_processor = (
            _create_image_processor(root, model, tokenizer, transformers) if has_vision else None
        )
        context = int(config.get_text_config().max_position_embeddings)
    except (ModelError, FileFormatError, MissingExtraError):
        raise
    except Exception as error:  # transformers, tokenizers and safetensors raise errors of any type
        text = " ".join(str(error).split())[:300] or type(error).__name__
        raise FileFormatError(f"the model in {root} cannot be read: {text}") from error
    return ModelFolder(
        model=model.to(target_device).eval(), tokenizer=tokenizer, image_processor=image_processor,
        context=context,
    )  # fmt: skip


def _create_image_processor(root: Path, model: Any, tokenizer: Any, transformers: Any) -> Any:
    from sparseflow.adaptive.prompts.processors import CropProcessor, PatchProcessor

    adapter, config = get_adapter(model), model.config
    if isinstance(adapter, LlavaAdapter):
        settings = read_json(root / _PROCESSOR)
        return CropProcessor(
            tokenizer, image_token=config.image_token_id, size=config.vision_config.image_size,
            tokens_per_crop=adapter.tokens_per_crop, mean=settings["image_mean"], std=settings["image_std"],
        )  # fmt: skip
    processor = transformers.Qwen2VLImageProcessorPil.from_pretrained(root, local_files_only=True)
    merge = config.vision_config.spatial_merge_size
    return PatchProcessor(tokenizer, processor, image_token=config.image_token_id, merge=merge)
