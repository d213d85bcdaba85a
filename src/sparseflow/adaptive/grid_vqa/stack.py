"""A Grid-VQA model in its parts, to run many plans on one batch: vision once, blocks one by one.

A block is told its number of experts, so a plan is a list of (block, top-k). The experts of a block are
computed for every token and weighted by what the router gives them, 0 for those not chosen: two large matrix
products in place of a sort, a gather and sixteen small ones. That is the same sum in another order, and
faster where half of the experts are chosen anyway. `PlanRuntime` on the model's own forward gives the same
logits; a test says so.

Shapes: B samples, T tokens, d the decoder's width, E experts of width m.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from sparseflow.adaptive.adapters.crops import CROPS
from sparseflow.adaptive.plan.space import Plan, Tier
from sparseflow.errors import ModelError

if TYPE_CHECKING:
    from transformers import LlavaForConditionalGeneration

_P = ParamSpec("_P")
_R = TypeVar("_R")
Rotary = tuple[Tensor, Tensor]
Step = tuple[int, int]
"""A block, and how many experts a token goes to in it."""


def steps_of(plan: Plan, top_k: int) -> tuple[Step, ...]:
    """The blocks of a plan with their top-k; `top_k` is the model's own, of blocks before the insertion."""
    return tuple((block, top_k if block < plan.insertion_position else plan.top_k) for block in plan.blocks)


class ModelStack:
    """A model's parts.

    Args:
        model: As `model.build` makes it.
        compiled: Whether torch.compile fuses what its layers do: slow at first, and less time and memory from
            then on.

    Raises:
        ModelError: It is put together in another way.
    """

    def __init__(self, model: LlavaForConditionalGeneration, *, compiled: bool = False) -> None:
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
        acts = (config.vision_config.hidden_act, text.hidden_act)
        if acts != ("gelu_pytorch_tanh", "silu"):
            raise ModelError(f"a Grid-VQA model has GELU (tanh) and SiLU in tower and experts, not {acts}")
        if config.vision_feature_layer != -1:
            raise ModelError(
                "a Grid-VQA model takes what the last layer of its vision tower gives, not layer "
                f"{config.vision_feature_layer}"
            )
        self.model = model
        self.top_k: int = config.text_config.num_experts_per_tok
        self.crop_tokens = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
        inner: Any = model.model
        # Some releases of transformers wrap the tower once more.
        self._tower = getattr(inner.vision_tower, "vision_model", inner.vision_tower)
        self._projector, self._decoder = inner.multi_modal_projector, inner.language_model
        self._bos: int = config.text_config.bos_token_id
        self._look = _fused(_look) if compiled else _look
        self._attend = _fused(_attend) if compiled else _attend
        self._mix = _fused(_mix) if compiled else _mix

    @property
    def depth(self) -> int:
        """Blocks of the decoder."""
        return len(self._decoder.layers)

    def see(self, crops: Tensor) -> Tensor:
        """What the vision tower makes of [B, crops, 3, side, side]: [B, crops, tokens, vision width]."""
        hidden = self._tower.embeddings(crops.flatten(0, 1))
        for layer in self._tower.encoder.layers:
            attention, drop = layer.self_attn, layer.self_attn.dropout if layer.training else 0.0
            heads = (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj)
            parts = (layer.layer_norm1, *heads, layer.layer_norm2, layer.mlp.fc1, layer.mlp.fc2)
            weights = [weight for part in parts for weight in (part.weight, part.bias)]
            hidden = self._look(hidden, weights, attention.num_heads, layer.layer_norm1.eps, drop)
        return hidden.unflatten(0, crops.shape[:2])

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
        attention, mlp = layer.self_attn, layer.mlp
        hidden, normed = self._attend(
            hidden, rotary,
            [
                layer.input_layernorm.weight, attention.q_proj.weight, attention.q_norm.weight,
                attention.k_proj.weight, attention.k_norm.weight, attention.v_proj.weight,
                attention.o_proj.weight, layer.post_attention_layernorm.weight,
            ],
            attention.head_dim, attention.scaling, layer.input_layernorm.variance_epsilon,
        )  # fmt: skip
        weights = _routed(mlp.gate.weight, normed, step[1], balance)
        return self._mix(hidden, normed, weights, mlp.experts.gate_up_proj, mlp.experts.down_proj)

    def run(
        self, steps: Sequence[Step], hidden: Tensor, rotary: Rotary, balance: list[Tensor] | None = None
    ) -> Tensor:
        """Run blocks one after the other."""
        for step in steps:
            hidden = self.block(step, hidden, rotary, balance)
        return hidden

    def logits(self, hidden: Tensor, tokens: int) -> Tensor:
        """Of the token after each of the last `tokens`: [B, tokens, words]."""
        norm = self._decoder.norm
        return self.model.lm_head(_normed(hidden[:, -tokens:], norm.weight, norm.variance_epsilon))

    def answers(
        self, plan: Plan, vision: Tensor, text: Tensor, balance: list[Tensor] | None = None
    ) -> Tensor:
        """Logits of each text token but the first, given those before it: [B, T - 1, words]."""
        assert plan.tier is not None
        hidden, rotary = self.begin(vision, text, plan.tier)
        hidden = self.run(steps_of(plan, self.top_k), hidden, rotary, balance)
        return self.logits(hidden, text.shape[1])[:, :-1]


def _fused(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A layer's work, compiled once for all layers and for any numbers of samples and tokens."""
    return torch.compile(function, dynamic=True)


def _normed(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """A norm in one kernel, its result in the type that products are computed in."""
    found = functional.rms_norm(hidden, hidden.shape[-1:], weight.to(hidden.dtype), epsilon)
    kind = hidden.device.type
    return found.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else found


def _look(hidden: Tensor, weights: Sequence[Tensor], heads: int, epsilon: float, drop: float) -> Tensor:
    """A layer of the vision tower: [B, tokens, width].

    Args:
        hidden: What it takes.
        weights: Weight and bias of the first norm, of queries, keys, values and what attention gives, of the
            second norm, and of the two products after it.
        heads: Of attention.
        epsilon: Of norms.
        drop: Share of attention that is dropped.
    """
    first, queries, keys, values, out, second, wide, narrow = zip(weights[::2], weights[1::2], strict=True)
    width = hidden.shape[-1:]
    plain = functional.layer_norm(hidden, width, *first, epsilon)
    query, key, value = (
        functional.linear(plain, *each).unflatten(-1, (heads, -1)).transpose(1, 2)
        for each in (queries, keys, values)
    )
    found = functional.scaled_dot_product_attention(query, key, value, dropout_p=drop)
    hidden = hidden + functional.linear(found.transpose(1, 2).flatten(2), *out)
    plain = functional.layer_norm(hidden, width, *second, epsilon)
    inner = functional.gelu(functional.linear(plain, *wide), approximate="tanh")
    return hidden + functional.linear(inner, *narrow)


def _attend(
    hidden: Tensor, rotary: Rotary, weights: Sequence[Tensor], head: int, scale: float, epsilon: float
) -> tuple[Tensor, Tensor]:
    """What each token gathers from those up to it.

    Args:
        hidden: [B, T, d].
        rotary: As `ModelStack.begin` gave them.
        weights: Of the norm before, of queries and their norm, of keys and theirs, of values, of what
            attention gives, and of the norm after.
        head: Width of a head of attention.
        scale: Of products of queries and keys.
        epsilon: Of norms.

    Returns:
        Hidden states with what was gathered, and these after the norm: [B, T, d].
    """
    before, query, query_norm, key, key_norm, value, out, after = weights
    plain = _normed(hidden, before, epsilon)
    apart = (-1, head)
    cosine, sine = (each[:, None].to(plain.dtype) for each in rotary)
    both: list[Tensor] = []
    for weight, norm in ((query, query_norm), (key, key_norm)):
        found = _normed(functional.linear(plain, weight), norm, epsilon).unflatten(-1, apart).transpose(1, 2)
        low, high = found.chunk(2, dim=-1)
        both.append(found * cosine + torch.cat([-high, low], dim=-1) * sine)
    values = functional.linear(plain, value).unflatten(-1, apart).transpose(1, 2)
    turned, matched = both
    found = functional.scaled_dot_product_attention(turned, matched, values, is_causal=True, scale=scale)
    hidden = hidden + functional.linear(found.transpose(1, 2).flatten(2), out)
    return hidden, _normed(hidden, after, epsilon)


def _routed(gate: Tensor, hidden: Tensor, top_k: int, balance: list[Tensor] | None) -> Tensor:
    """How much of each expert a token gets, 0 for those not chosen: [B, T, E] float32."""
    chances = functional.linear(hidden, gate).softmax(-1, dtype=torch.float32)
    value, index = chances.topk(top_k, dim=-1)
    weights = torch.zeros_like(chances).scatter(-1, index, value)
    if balance is not None:
        # Switch transformer's, equation 4: least where every expert gets as many tokens.
        load = (weights > 0).float().mean((0, 1)) / top_k
        balance.append(len(gate) * (load.detach() * chances.mean((0, 1))).sum())
    return weights


def _mix(hidden: Tensor, normed: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Hidden states with what all experts give, each as much as `_routed` says: [B, T, d].

    Args:
        hidden: [B, T, d].
        normed: The same after the norm.
        weights: [B, T, E].
        gate_up: [E, 2 m, d].
        down: [E, d, m].
    """
    count, twice, width = gate_up.shape
    wide = functional.linear(normed, gate_up.reshape(count * twice, width))
    wide = wide.unflatten(-1, (count, 2, twice // 2))
    inner = functional.silu(wide[..., 0, :]) * wide[..., 1, :] * weights[..., None].to(wide.dtype)
    return hidden + functional.linear(inner.flatten(2), down.permute(1, 0, 2).reshape(width, -1))
