"""A Grid-VQA model in its parts, to run many plans on one batch: vision once, blocks one by one.

A block is told its number of experts, so a plan is a list of (block, top-k). The experts of a block are
computed for every token and weighted by what the router gives them, 0 for those not chosen: two large matrix
products in place of a sort, a gather and sixteen small ones. That is the same sum in another order, and
faster where half of the experts are chosen anyway. `Knobs` on the model's own forward gives the same logits;
a test says so.

Shapes: B samples, T tokens, d the decoder's width, E experts of width m.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparseflow.adaptive.adapters.crops import CROPS
from sparseflow.adaptive.plan import Plan, Tier
from sparseflow.errors import ModelError

if TYPE_CHECKING:
    from transformers import LlavaForConditionalGeneration

Rotary = tuple[Tensor, Tensor]
Step = tuple[int, int]
"""A block, and how many experts a token goes to in it."""


def steps_of(plan: Plan, top_k: int) -> tuple[Step, ...]:
    """The blocks of a plan with their top-k; `top_k` is the model's own, of blocks before the insertion."""
    return tuple((block, top_k if block < plan.insertion_position else plan.top_k) for block in plan.blocks)


class Stack:
    """A model's parts.

    Args:
        model: As `model.build` makes it.

    Raises:
        ModelError: It is put together in another way.
    """

    def __init__(self, model: LlavaForConditionalGeneration) -> None:
        config: Any = model.config
        kinds = (config.model_type, config.vision_config.model_type, config.text_config.model_type)
        if kinds != ("llava", "siglip_vision_model", "olmoe"):
            raise ModelError(f"a Grid-VQA model is LLaVA of SigLIP and OLMoE, not {', '.join(kinds)}")
        text = config.text_config
        if (
            text.norm_topk_prob
            or text.clip_qkv is not None
            or text.num_key_value_heads != text.num_attention_heads
        ):
            raise ModelError(
                "a Grid-VQA model has neither normalized weights of experts, nor clipped or shared keys; "
                "train one with sparseflow.adaptive.grid_vqa"
            )
        self.model = model
        self.top_k: int = config.text_config.num_experts_per_tok
        self.crop_tokens = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
        inner: Any = model.model
        self._tower, self._projector, self._decoder = (
            inner.vision_tower,
            inner.multi_modal_projector,
            inner.language_model,
        )
        self._bos: int = config.text_config.bos_token_id
        self._layer: int = config.vision_feature_layer

    @property
    def depth(self) -> int:
        """Blocks of the decoder."""
        return len(self._decoder.layers)

    def see(self, crops: Tensor) -> Tensor:
        """What the vision tower makes of [B, crops, 3, side, side]: [B, crops, tokens, vision width]."""
        found = self._tower(crops.flatten(0, 1), output_hidden_states=True, return_dict=True)
        return found.hidden_states[self._layer].unflatten(0, crops.shape[:2])

    def project(self, seen: Tensor) -> Tensor:
        """What `see` gave, as the decoder takes it: [B, crops * tokens, d]."""
        return self._projector(seen).flatten(1, 2)

    def begin(self, vision: Tensor, text: Tensor, tier: Tier) -> tuple[Tensor, Rotary]:
        """What the first block takes.

        Args:
            vision: What `project` gave of the tier's crops, or of more.
            text: Tokens after the image, [B, T] int64. Padding on the right is seen by no token before it.
            tier: How many crops to look at.

        Returns:
            Hidden states [B, 1 + image + T, d], and rotary positions.
        """
        words = self._decoder.embed_tokens(functional.pad(text, (1, 0), value=self._bos))
        image = vision[:, : CROPS[tier] * self.crop_tokens].to(words.dtype)
        hidden = torch.cat([words[:, :1], image, words[:, 1:]], dim=1)
        places = torch.arange(hidden.shape[1], device=hidden.device)[None]
        return hidden, self._decoder.rotary_emb(hidden, places)

    def block(
        self, step: Step, hidden: Tensor, rotary: Rotary, balance: list[Tensor] | None = None
    ) -> Tensor:
        """Run a block.

        Args:
            step: Which, with how many experts.
            hidden: [B, T, d].
            rotary: As `begin` gave them.
            balance: Gets the block's load-balancing loss, if given.
        """
        layer = self._decoder.layers[step[0]]
        hidden = hidden + _attended(layer.self_attn, _normed(layer.input_layernorm, hidden), rotary)
        return hidden + _experts(layer.mlp, _normed(layer.post_attention_layernorm, hidden), step[1], balance)

    def run(
        self, steps: Sequence[Step], hidden: Tensor, rotary: Rotary, balance: list[Tensor] | None = None
    ) -> Tensor:
        """Run blocks one after the other."""
        for step in steps:
            hidden = self.block(step, hidden, rotary, balance)
        return hidden

    def logits(self, hidden: Tensor, tokens: int) -> Tensor:
        """Of the token after each of the last `tokens`: [B, tokens, words]."""
        return self.model.lm_head(_normed(self._decoder.norm, hidden[:, -tokens:]))

    def answers(
        self, plan: Plan, vision: Tensor, text: Tensor, balance: list[Tensor] | None = None
    ) -> Tensor:
        """Logits of each text token but the first, given those before it: [B, T - 1, words]."""
        assert plan.tier is not None
        hidden, rotary = self.begin(vision, text, plan.tier)
        hidden = self.run(steps_of(plan, self.top_k), hidden, rotary, balance)
        return self.logits(hidden, text.shape[1])[:, :-1]


def _normed(norm: Any, hidden: Tensor) -> Tensor:
    """A norm in one kernel, its result in the type that products are computed in."""
    found = functional.rms_norm(
        hidden, hidden.shape[-1:], norm.weight.to(hidden.dtype), norm.variance_epsilon
    )
    kind = hidden.device.type
    return found.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else found


def _attended(attention: Any, hidden: Tensor, rotary: Rotary) -> Tensor:
    """What each token gathers from those up to it."""
    apart = (*hidden.shape[:-1], -1, attention.head_dim)
    cosine, sine = (each[:, None].to(hidden.dtype) for each in rotary)
    both = []
    for project, norm in ((attention.q_proj, attention.q_norm), (attention.k_proj, attention.k_norm)):
        heads = _normed(norm, project(hidden)).view(apart).transpose(1, 2)
        low, high = heads.chunk(2, dim=-1)
        both.append(heads * cosine + torch.cat([-high, low], dim=-1) * sine)
    value = attention.v_proj(hidden).view(apart).transpose(1, 2)
    query, key = both
    found = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=attention.scaling
    )
    return attention.o_proj(found.transpose(1, 2).flatten(2))


def _experts(mlp: nn.Module, hidden: Tensor, top_k: int, balance: list[Tensor] | None) -> Tensor:
    gate: Any = mlp.gate
    experts: Any = mlp.experts
    flat = hidden.flatten(0, 1)
    chances = functional.linear(flat, gate.weight).softmax(-1, dtype=torch.float32)
    value, index = chances.topk(top_k, dim=-1)
    weights = torch.zeros_like(chances).scatter(1, index, value)
    count, twice, width = experts.gate_up_proj.shape
    wide = functional.linear(flat, experts.gate_up_proj.reshape(count * twice, width)).view(
        -1, count, 2, twice // 2
    )
    inner = experts.act_fn(wide[:, :, 0]) * wide[:, :, 1] * weights[:, :, None].to(wide.dtype)
    down = experts.down_proj.permute(1, 0, 2).reshape(width, -1)
    if balance is not None:
        # Switch transformer's, equation 4: least where every expert gets as many tokens.
        load = (weights > 0).float().mean(0) / top_k
        balance.append(count * (load.detach() * chances.mean(0)).sum())
    return functional.linear(inner.flatten(1), down).view_as(hidden)
