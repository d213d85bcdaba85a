"""Grid-VQA model in parts, to run many plans on one batch: vision once, then blocks one by one.

Each block takes its top-k as an argument, so a plan is a list of (block, top-k). The experts of a block are
computed for every token and weighted by the router, with weight 0 for experts that are not selected: two
large matrix products instead of sort, gather and sixteen small products. It is the same sum in another order,
and faster if half of the experts are selected. The logits equal those of the model's own forward with a
`PlanRuntime`, as a test checks.

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
BlockStep = tuple[int, int]
"""Block and its top-k."""


def get_block_steps(plan: Plan, top_k: int) -> tuple[BlockStep, ...]:
    """Blocks of a plan with their top-k; blocks before the insertion position have the model's `top_k`."""
    return tuple((block, top_k if block < plan.insertion_position else plan.top_k) for block in plan.blocks)


class ModelStack:
    """Parts of a model.

    Args:
        model: Result of `build_vqa_model`.
        compiled: Whether to compile layers with torch.compile: slow at first, then less time and memory.

    Raises:
        ModelError: The model has another structure.
    """

    def __init__(self, model: LlavaForConditionalGeneration, *, compiled: bool = False) -> None:
        config: Any = model.config
        kinds = (config.model_type, config.vision_config.model_type, config.text_config.model_type)
        if kinds != ("llava", "siglip_vision_model", "olmoe"):
            raise ModelError(f"expected LLaVA with SigLIP and OLMoE, got {', '.join(kinds)}")
        text = config.text_config
        if (
            text.norm_topk_prob
            or text.clip_qkv is not None
            or text.num_key_value_heads != text.num_attention_heads
        ):
            raise ModelError(
                "expected expert weights without normalization, and keys without clipping or sharing; "
                "train one with sparseflow.adaptive.grid_vqa"
            )
        acts = (config.vision_config.hidden_act, text.hidden_act)
        if acts != ("gelu_pytorch_tanh", "silu"):
            raise ModelError(f"expected GELU (tanh) in the tower and SiLU in the experts, got {acts}")
        if config.vision_feature_layer != -1:
            raise ModelError(
                f"expected features of the last vision layer (-1), got layer {config.vision_feature_layer}"
            )
        self.model = model
        self.top_k: int = config.text_config.num_experts_per_tok
        self.crop_tokens = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
        inner: Any = model.model
        # Some transformers releases have another wrapper around the tower.
        self._tower = getattr(inner.vision_tower, "vision_model", inner.vision_tower)
        self._projector, self._decoder = inner.multi_modal_projector, inner.language_model
        self._bos: int = config.text_config.bos_token_id
        self._vision_layer = _compile(_run_vision_layer) if compiled else _run_vision_layer
        self._attention = _compile(_run_attention) if compiled else _run_attention
        self._experts = _compile(_run_experts) if compiled else _run_experts

    @property
    def depth(self) -> int:
        """Number of decoder blocks."""
        return len(self._decoder.layers)

    def encode_crops(self, crops: Tensor) -> Tensor:
        """Vision tower: [B, crops, 3, side, side] -> [B, crops, tokens, vision width]."""
        hidden = self._tower.embeddings(crops.flatten(0, 1))
        for layer in self._tower.encoder.layers:
            attention, drop = layer.self_attn, layer.self_attn.dropout if layer.training else 0.0
            heads = (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj)
            parts = (layer.layer_norm1, *heads, layer.layer_norm2, layer.mlp.fc1, layer.mlp.fc2)
            weights = [weight for part in parts for weight in (part.weight, part.bias)]
            hidden = self._vision_layer(hidden, weights, attention.num_heads, layer.layer_norm1.eps, drop)
        return hidden.unflatten(0, crops.shape[:2])

    def project(self, features: Tensor) -> Tensor:
        """Project features of `encode_crops` to the decoder: [B, crops * tokens, d]."""
        return self._projector(features).flatten(1, 2)

    def embed(self, vision: Tensor, text: Tensor, tier: Tier) -> tuple[Tensor, Rotary]:
        """Inputs of the first block.

        Args:
            vision: Result of `project` for the crops of the tier, or more.
            text: Tokens after the image, [B, T] int64. Padding on the right is not attended to by earlier
                tokens.
            tier: Tier of the image.

        Returns:
            Hidden states, [B, 1 + image + T, d], and rotary embeddings.
        """
        words = self._decoder.embed_tokens(functional.pad(text, (1, 0), value=self._bos))
        image = vision[:, : CROPS[tier] * self.crop_tokens].to(words.dtype)
        hidden = torch.cat([words[:, :1], image, words[:, 1:]], dim=1)
        position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        return hidden, self._decoder.rotary_emb(hidden, position_ids)

    def run_block(
        self, step: BlockStep, hidden: Tensor, rotary: Rotary, balance: list[Tensor] | None = None
    ) -> Tensor:
        """Run a block.

        Args:
            step: Block and top-k.
            hidden: [B, T, d].
            rotary: Rotary embeddings of `embed`.
            balance: The block's load-balancing loss is appended, if given.
        """
        layer = self._decoder.layers[step[0]]
        attention, mlp = layer.self_attn, layer.mlp
        hidden, normed = self._attention(
            hidden, rotary,
            [
                layer.input_layernorm.weight, attention.q_proj.weight, attention.q_norm.weight,
                attention.k_proj.weight, attention.k_norm.weight, attention.v_proj.weight,
                attention.o_proj.weight, layer.post_attention_layernorm.weight,
            ],
            attention.head_dim, attention.scaling, layer.input_layernorm.variance_epsilon,
        )  # fmt: skip
        weights = _route(mlp.gate.weight, normed, step[1], balance)
        return self._experts(hidden, normed, weights, mlp.experts.gate_up_proj, mlp.experts.down_proj)

    def run_blocks(
        self, steps: Sequence[BlockStep], hidden: Tensor, rotary: Rotary, balance: list[Tensor] | None = None
    ) -> Tensor:
        """Run blocks one after the other."""
        for step in steps:
            hidden = self.run_block(step, hidden, rotary, balance)
        return hidden

    def logits(self, hidden: Tensor, tokens: int) -> Tensor:
        """Logits of the token after each of the last `tokens`: [B, tokens, words]."""
        norm = self._decoder.norm
        return self.model.lm_head(_rms_norm(hidden[:, -tokens:], norm.weight, norm.variance_epsilon))

    def forward_plan(
        self, plan: Plan, vision: Tensor, text: Tensor, balance: list[Tensor] | None = None
    ) -> Tensor:
        """Logits of each text token but the first, given those before it: [B, T - 1, words]."""
        assert plan.tier is not None
        hidden, rotary = self.embed(vision, text, plan.tier)
        hidden = self.run_blocks(get_block_steps(plan, self.top_k), hidden, rotary, balance)
        return self.logits(hidden, text.shape[1])[:, :-1]


def _compile(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a layer once for all layers and batch shapes."""
    return torch.compile(function, dynamic=True)


def _rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm in one kernel, cast to the number format of matrix products."""
    normed = functional.rms_norm(hidden, hidden.shape[-1:], weight.to(hidden.dtype), epsilon)
    kind = hidden.device.type
    return normed.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else normed


def _run_vision_layer(
    hidden: Tensor, weights: Sequence[Tensor], heads: int, epsilon: float, drop: float
) -> Tensor:
    """Layer of the vision tower: [B, tokens, width].

    Args:
        hidden: Input.
        weights: Weights and biases of the first norm, the query, key, value and output projections, the
            second norm, and the two MLP layers.
        heads: Attention heads.
        epsilon: Epsilon of norms.
        drop: Attention dropout.
    """
    first, queries, keys, values, out, second, wide, narrow = zip(weights[::2], weights[1::2], strict=True)
    width = hidden.shape[-1:]
    plain = functional.layer_norm(hidden, width, *first, epsilon)
    query, key, value = (
        functional.linear(plain, *projection).unflatten(-1, (heads, -1)).transpose(1, 2)
        for projection in (queries, keys, values)
    )
    attention = functional.scaled_dot_product_attention(query, key, value, dropout_p=drop)
    hidden = hidden + functional.linear(attention.transpose(1, 2).flatten(2), *out)
    plain = functional.layer_norm(hidden, width, *second, epsilon)
    inner = functional.gelu(functional.linear(plain, *wide), approximate="tanh")
    return hidden + functional.linear(inner, *narrow)


def _run_attention(
    hidden: Tensor, rotary: Rotary, weights: Sequence[Tensor], head: int, scale: float, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Attention of a decoder block.

    Args:
        hidden: [B, T, d].
        rotary: Rotary embeddings of `ModelStack.embed`.
        weights: Weights of the norm before, the query projection and its norm, the key projection and its
            norm, the value and output projections, and the norm after.
        head: Width of an attention head.
        scale: Scale of attention scores.
        epsilon: Epsilon of norms.

    Returns:
        Hidden states after the residual, and their norm: [B, T, d].
    """
    before, query, query_norm, key, key_norm, value, out, after = weights
    plain = _rms_norm(hidden, before, epsilon)
    head_shape = (-1, head)
    cosine, sine = (angles[:, None].to(plain.dtype) for angles in rotary)
    rotated: list[Tensor] = []
    for weight, norm in ((query, query_norm), (key, key_norm)):
        projected = (
            _rms_norm(functional.linear(plain, weight), norm, epsilon)
            .unflatten(-1, head_shape)
            .transpose(1, 2)
        )
        low, high = projected.chunk(2, dim=-1)
        rotated.append(projected * cosine + torch.cat([-high, low], dim=-1) * sine)
    values = functional.linear(plain, value).unflatten(-1, head_shape).transpose(1, 2)
    rotated_query, rotated_key = rotated
    projected = functional.scaled_dot_product_attention(
        rotated_query, rotated_key, values, is_causal=True, scale=scale
    )
    hidden = hidden + functional.linear(projected.transpose(1, 2).flatten(2), out)
    return hidden, _rms_norm(hidden, after, epsilon)


def _route(router: Tensor, hidden: Tensor, top_k: int, balance: list[Tensor] | None) -> Tensor:
    """Weight of each expert, 0 for experts that are not selected: [B, T, E] float32."""
    probabilities = functional.linear(hidden, router).softmax(-1, dtype=torch.float32)
    value, index = probabilities.topk(top_k, dim=-1)
    weights = torch.zeros_like(probabilities).scatter(-1, index, value)
    if balance is not None:
        # Switch Transformer, equation 4: minimal if all experts get equally many tokens.
        load = (weights > 0).float().mean((0, 1)) / top_k
        balance.append(len(router) * (load.detach() * probabilities.mean((0, 1))).sum())
    return weights


def _run_experts(hidden: Tensor, normed: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Add the weighted outputs of all experts to the hidden states: [B, T, d].

    Args:
        hidden: [B, T, d].
        normed: Hidden states after the norm.
        weights: [B, T, E].
        gate_up: [E, 2 m, d].
        down: [E, d, m].
    """
    count, double_width, width = gate_up.shape
    wide = functional.linear(normed, gate_up.reshape(count * double_width, width))
    wide = wide.unflatten(-1, (count, 2, double_width // 2))
    inner = functional.silu(wide[..., 0, :]) * wide[..., 1, :] * weights[..., None].to(wide.dtype)
    return hidden + functional.linear(inner.flatten(2), down.permute(1, 0, 2).reshape(width, -1))
