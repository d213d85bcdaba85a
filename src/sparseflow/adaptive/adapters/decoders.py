"""Text-only mixture-of-experts models of transformers: OLMoE, Mixtral, Qwen3-MoE and others alike."""

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
"""`model_type` of a stack of blocks -> where a block of it has its router, whose `top_k` is what counts."""


class DecoderAdapter(Adapter):
    """Adapter of a stack of blocks, with or without a head.

    Args:
        model: The model.

    Raises:
        ModelError: It has no such blocks, or blocks or routers that plans would not fit.
    """

    tiers: tuple[Tier, ...] = ()

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._decoder = self._find_decoder()
        blocks = getattr(self._decoder, "layers", None)
        if not isinstance(blocks, nn.ModuleList):
            raise ModelError(f"{type(model).__name__} has no stack of blocks where its architecture has one")
        self._blocks = tuple(blocks)
        config: Any = self._decoder.config
        self._path = ROUTERS.get(config.model_type)
        if config.num_hidden_layers != len(self._blocks):
            raise ModelError(
                f"the model has {len(self._blocks)} blocks, its configuration says {config.num_hidden_layers}"
            )
        if len(set(getattr(config, "layer_types", None) or ())) > 1:
            raise ModelError(
                f"blocks of {config.model_type!r} mix kinds of attention; a cache makes the masks of a kind "
                "by its first block, which plans may skip"
            )
        self._geometry = ModelGeometry(depth=len(self._blocks), top_k=self._top_k(), tiers=self.tiers)

    @property
    def geometry(self) -> ModelGeometry:
        """As found in the live model, whatever its configuration says."""
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
        """The block's router; None in a block without experts."""
        if self._path is None:
            return None
        found = block
        for name in self._path.split("."):
            found = getattr(found, name, None)
        return found if isinstance(getattr(found, "top_k", None), int) else None

    def _find_decoder(self) -> nn.Module:
        """The stack of blocks, whether or not the model has a head and a vision tower."""
        inner = getattr(self.model, "model", self.model)
        return getattr(inner, "language_model", inner)

    def _top_k(self) -> int:
        """The top-k of all routers; 1 in a model without experts."""
        if self._path is None:
            self._refuse_unknown_experts()
            return 1
        widths = {router.top_k for block in self._blocks if (router := self.router(block)) is not None}
        if len(widths) != 1:
            raise ModelError(
                f"routers at `{self._path}` of the blocks choose {sorted(map(str, widths)) or 'nothing'}; "
                "plans need one top-k for all"
            )
        (width,) = widths
        return int(width)  # pyright: ignore[reportArgumentType]

    def _refuse_unknown_experts(self) -> None:
        """That a stack of an unknown kind is a dense one, in which knob 2 has nothing to turn."""
        for block in self._blocks:
            for name, module in block.named_modules():
                if any(hasattr(module, sign) for sign in ("top_k", "num_experts", "experts")):
                    kind = self._decoder.config.model_type  # pyright: ignore[reportAttributeAccessIssue]
                    raise ModelError(
                        f"{kind!r} has experts (at {name!r}), and it is not known where its routers are; "
                        "write an adapter as sparseflow.adaptive.plan.adapter says, and register it"
                    )
