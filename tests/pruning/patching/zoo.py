"""Small models of every supported family of transformers, with large random weights, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

transformers: Any = pytest.importorskip("transformers")

_SIZES: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 40,
    "image_size": 32, "patch_size": 8, "num_labels": 5,
}  # fmt: skip
_IMAGE = (3, 32, 32)
_VIDEO = (4, 3, 32, 32)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model class, the changes of its configuration, and the shape of its input.

    Attributes:
        family: Name that `patch` reports.
        model: Class of the model.
        config: Class of its configuration.
        changes: Arguments of the configuration besides `_SIZES`.
        shape: Shape of an input without the batch.
        num_prefix: Class tokens and registers.
        argument: Name of the input.
        output: Output of the model that is compared.
        frames: Frames of the grid.
        attention: Whether the selector `attention` supports the model.
    """

    family: str
    model: str
    config: str
    changes: dict[str, Any]
    shape: tuple[int, ...] = _IMAGE
    num_prefix: int = 1
    argument: str = "pixel_values"
    output: str = "logits"
    frames: int = 1
    attention: bool = True

    def build(self) -> Any:
        """The model in evaluation mode."""
        config = getattr(transformers, self.config)(**_SIZES | self.changes)
        return randomize(getattr(transformers, self.model)(config))

    def make_input(self, batch_size: int = 3, *, seed: int = 0) -> dict[str, Tensor]:
        """A random input."""
        g = torch.Generator().manual_seed(seed)
        return {self.argument: torch.randn((batch_size, *self.shape), generator=g, dtype=torch.float64)}

    def run(self, model: Any, **inputs: Tensor) -> Tensor:
        """The output of a model that is compared."""
        return getattr(model(**inputs or self.make_input()), self.output)


def randomize(model: Any) -> Any:
    """A model with large random weights, so that every part affects the outputs, in float64."""
    g = torch.Generator().manual_seed(0)
    model = model.double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=g, dtype=torch.float64)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1.0 + 0.3 * noise)
            elif parameter.ndim in (2, 4, 5) and "bias" not in name:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
            else:
                parameter.copy_(0.5 * noise)
    return model


_VIDEOMAE = {"num_frames": 4, "decoder_hidden_size": 24, "decoder_num_attention_heads": 2}
_VJEPA2 = {
    "crop_size": 32, "frames_per_clip": 4, "num_pooler_layers": 1, "pred_hidden_size": 24,
    "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1, "mlp_ratio": 2.0,
}  # fmt: skip
_BEIT = {"use_relative_position_bias": True, "layer_scale_init_value": 0.5}


def _case(family: str, prefix: str, head: str, config: str | None = None, **fields: Any) -> Case:
    values: dict[str, Any] = {"changes": {}} | fields
    return Case(family=family, model=prefix + head, config=config or f"{prefix}Config", **values)


CASES: dict[str, Case] = {
    "vit": _case("ViT", "ViT", "ForImageClassification"),
    "deit": _case("DeiT", "DeiT", "ForImageClassificationWithTeacher", num_prefix=2),
    "dinov2": _case("DINOv2", "Dinov2", "ForImageClassification"),
    "dinov2_registers": _case(
        "DINOv2 with registers", "Dinov2WithRegisters", "ForImageClassification", num_prefix=5
    ),
    "dinov3": _case("DINOv3", "DINOv3ViT", "Model", num_prefix=5, output="pooler_output",
                    changes={"num_register_tokens": 4}, attention=False),
    "clip": _case("CLIP", "CLIP", "VisionModelWithProjection", "CLIPVisionConfig", output="image_embeds"),
    "siglip": _case("SigLIP", "Siglip", "VisionModel", "SiglipVisionConfig", num_prefix=0,
                    output="pooler_output"),
    "beit": _case("BEiT", "Beit", "ForImageClassification", changes=_BEIT, attention=False),
    "beit_shared": _case("BEiT", "Beit", "Model", output="last_hidden_state",
                         changes={"use_shared_relative_position_bias": True}),
    "videomae": _case("VideoMAE", "VideoMAE", "ForVideoClassification", shape=_VIDEO, num_prefix=0, frames=2,
                      changes=_VIDEOMAE),
    "vivit": _case("ViViT", "Vivit", "ForVideoClassification", shape=_VIDEO, frames=2,
                   changes={"num_frames": 4, "tubelet_size": [2, 8, 8]}),
    "vjepa2": _case("V-JEPA 2", "VJEPA2", "ForVideoClassification", shape=_VIDEO, num_prefix=0, frames=2,
                    argument="pixel_values_videos", changes=_VJEPA2, attention=False),
    "timesformer": _case("TimeSformer", "Timesformer", "ForVideoClassification", shape=_VIDEO, frames=4,
                         changes={"num_frames": 4}, attention=False),
}  # fmt: skip
"""Grids have 4 x 4 patches."""
