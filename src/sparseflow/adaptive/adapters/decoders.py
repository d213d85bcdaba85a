"""Adapter for text-only mixture-of-experts models of transformers, such as OLMoE, Mixtral and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn

from sparseflow.adaptive.plan.adapter import Adapter
from sparseflow.adaptive.plan.space import ModelGeometry, Tier
from sparseflow.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROUTERS: MappingProxyType[str, str] = MappingProxyType(
    {
        "deepseek_v3": "mlp.gate",
        "ernie4_5_moe": "mlp.gate",
        "flex_olmo": "mlp.gate",
        "glm4_moe": "mlp.gate",
        "mixtral": "mlp.gate",
        "olmoe": "mlp.gate",
        "qwen2_moe": "mlp.gate",
        "qwen3_moe": "mlp.gate",
        "qwen3_vl_moe_text": "mlp.gate",
    }
)
"""`model_type` -> path of the router within a block; the router's `top_k` is the effective one."""


class DecoderAdapter(Adapter):
    """Adapter of a stack of blocks, with or without a head.

    Args:
        model: The model.

    Raises:
        ModelError: The model has no stack of blocks, or its blocks or routers do not fit plans.
    """

    tiers: tuple[Tier, ...] = ()

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        inner = getattr(model, "model", model)
        self._decoder: nn.Module = getattr(inner, "language_model", inner)
        blocks = getattr(self._decoder, "layers", None)
        if not isinstance(blocks, nn.ModuleList):
            raise ModelError(f"{type(model).__name__} has no `layers`")
        self._blocks = tuple(blocks)
        config: Any = self._decoder.config
        self._path = ROUTERS.get(config.model_type)
        if config.num_hidden_layers != len(self._blocks):
            raise ModelError(
                f"the model has {len(self._blocks)} blocks, but its config has {config.num_hidden_layers}"
            )
        if len(set(getattr(config, "layer_types", None) or ())) > 1:
            raise ModelError(
                f"{config.model_type!r} mixes attention types, which is not supported: a cache "
                "creates the masks of a type by its first block, which plans may skip"
            )
        self._geometry = ModelGeometry(depth=len(self._blocks), top_k=self._top_k(), tiers=self.tiers)

    @property
    def geometry(self) -> ModelGeometry:
        """Geometry of the live model, independent of its config."""
        return self._geometry

    @property
    def decoder(self) -> nn.Module:
        """The stack of blocks."""
        return self._decoder

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The blocks in order."""
        return self._blocks

    def router(self, block: nn.Module) -> nn.Module | None:
        """Router of a block; None for a block without experts."""
        if self._path is None:
            return None
        module = block
        for name in self._path.split("."):
            module = getattr(module, name, None)
        return module if isinstance(getattr(module, "top_k", None), int) else None

    def _top_k(self) -> int:
        """Top-k that all routers share; 1 for a model without experts."""
        if self._path is None:
            self._refuse_unknown_experts()
            return 1
        widths = {router.top_k for block in self._blocks if (router := self.router(block)) is not None}
        if len(widths) != 1:
            raise ModelError(
                f"routers at `{self._path}` have top-k {sorted(map(str, widths)) or 'none'}; plans "
                "need one top-k for all"
            )
        (width,) = widths
        return int(width)  # pyright: ignore[reportArgumentType]

    def _refuse_unknown_experts(self) -> None:
        """Check that a model of unknown type has no experts."""
        for block in self._blocks:
            for name, module in block.named_modules():
                if any(hasattr(module, attribute) for attribute in ("top_k", "num_experts", "experts")):
                    model_type = self._decoder.config.model_type  # pyright: ignore[reportAttributeAccessIssue]
                    raise ModelError(
                        f"{model_type!r} has experts (at {name!r}), but its routers are unknown; see "
                        "sparseflow.adaptive.plan.adapter for how to add an adapter"
                    )
