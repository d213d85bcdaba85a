"""Grid-VQA model in parts, to run many plans on one batch: vision once, then blocks one by one.

Each block takes its top-k as an argument, so a plan is a list of (block, top-k). The experts of a block are
computed for every token and weighted by the router; an expert that is not selected has weight 0. This needs
two large matrix products instead of sort, gather and sixteen small products. The sum is the same in another
order, and it is faster if half of the experts are selected. The logits equal those of the model's own forward
with a `PlanRuntime`; a test checks this.

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
    """Return a plan's blocks with their top-k; before the insertion position, it is the model's `top_k`."""
    return tuple((block, top_k if block < plan.insertion_position else plan.top_k) for block in plan.blocks)


class ModelStack:
    """Parts of a Grid-VQA model that can be run one by one.

    Args:
        model: Result of `build_vqa_model`.
        compiled: Whether to compile layers with torch.compile. The first steps are slow; later ones take less
            time and memory.

    Raises:
        ModelError: The model has another structure.
    """

    def __init__(self, model: LlavaForConditionalGeneration, *, compiled: bool = False) -> None:
        config: Any = model.config
        _check_architecture(config)
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
        """Run the vision tower: [B, crops, 3, side, side] -> [B, crops, tokens, vision width]."""
        hidden = self._tower.embeddings(crops.flatten(0, 1))
        for layer in self._tower.encoder.layers:
            attention = layer.self_attn
            modules = (
                layer.layer_norm1,
                attention.q_proj,
                attention.k_proj,
                attention.v_proj,
                attention.out_proj,
                layer.layer_norm2,
                layer.mlp.fc1,
                layer.mlp.fc2,
            )
            parameters = [parameter for module in modules for parameter in (module.weight, module.bias)]
            dropout = attention.dropout if layer.training else 0.0
            hidden = self._vision_layer(
                hidden, parameters, attention.num_heads, layer.layer_norm1.eps, dropout
            )
        return hidden.unflatten(0, crops.shape[:2])

    def project(self, features: Tensor) -> Tensor:
        """Project features of `encode_crops` to the decoder: [B, crops * tokens, d]."""
        return self._projector(features).flatten(1, 2)

    def embed(self, vision: Tensor, text: Tensor, tier: Tier) -> tuple[Tensor, Rotary]:
        """Compute the inputs of the first block.

        Args:
            vision: Result of `project` for the crops of the tier, or more.
            text: Tokens after the image, [B, T] int64. Padding on the right is not attended to by earlier
                tokens.
            tier: Tier of the image.

        Returns:
            Hidden states, [B, 1 + image + T, d], and rotary embeddings.
        """
        text_embeds = self._decoder.embed_tokens(functional.pad(text, (1, 0), value=self._bos))
        image_embeds = vision[:, : CROPS[tier] * self.crop_tokens].to(text_embeds.dtype)
        hidden = torch.cat([text_embeds[:, :1], image_embeds, text_embeds[:, 1:]], dim=1)
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
            balance: List to which the block's load-balancing loss is appended; None skips the loss.
        """
        block, top_k = step
        layer = self._decoder.layers[block]
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
        weights = _route(mlp.gate.weight, normed, top_k, balance)
        return self._experts(hidden, normed, weights, mlp.experts.gate_up_proj, mlp.experts.down_proj)

    def run_blocks(
        self, steps: Sequence[BlockStep], hidden: Tensor, rotary: Rotary, balance: list[Tensor] | None = None
    ) -> Tensor:
        """Run blocks one after the other."""
        for step in steps:
            hidden = self.run_block(step, hidden, rotary, balance)
        return hidden

    def logits(self, hidden: Tensor, tokens: int) -> Tensor:
        """Compute the logits of the token after each of the last `tokens`: [B, tokens, vocabulary]."""
        norm = self._decoder.norm
        return self.model.lm_head(_rms_norm(hidden[:, -tokens:], norm.weight, norm.variance_epsilon))

    def forward_plan(
        self, plan: Plan, vision: Tensor, text: Tensor, balance: list[Tensor] | None = None
    ) -> Tensor:
        """Compute the logits of each text token but the first, [B, T - 1, vocabulary].

        Args:
            plan: Plan to run; it has a tier.
            vision: Result of `project` for the crops of the tier, or more.
            text: Tokens after the image, [B, T] int64.
            balance: List to which the load-balancing losses are appended; None skips them.
        """
        assert plan.tier is not None
        hidden, rotary = self.embed(vision, text, plan.tier)
        hidden = self.run_blocks(get_block_steps(plan, self.top_k), hidden, rotary, balance)
        return self.logits(hidden, text.shape[1])[:, :-1]


def _check_architecture(config: Any) -> None:
    """Check that a configuration describes a model that `ModelStack` can run.

    Raises:
        ModelError: It does not.
    """
    vision, text = config.vision_config, config.text_config
    model_types = (config.model_type, vision.model_type, text.model_type)
    if model_types != ("llava", "siglip_vision_model", "olmoe"):
        raise ModelError(f"expected LLaVA with SigLIP and OLMoE, got {', '.join(model_types)}")
    if (
        text.norm_topk_prob
        or text.clip_qkv is not None
        or text.num_key_value_heads != text.num_attention_heads
    ):
        raise ModelError(
            "expected expert weights without normalization, and keys without clipping or sharing; "
            "train one with sparseflow.adaptive.grid_vqa"
        )
    activations = (vision.hidden_act, text.hidden_act)
    if activations != ("gelu_pytorch_tanh", "silu"):
        raise ModelError(f"expected GELU (tanh) in the tower and SiLU in the experts, got {activations}")
    if config.vision_feature_layer != -1:
        raise ModelError(
            f"expected features of the last vision layer (-1), got layer {config.vision_feature_layer}"
        )


def _compile(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a layer once for all layers and batch shapes."""
    return torch.compile(function, dynamic=True)


def _rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Apply an RMS norm in one kernel, and cast the result to the autocast dtype if autocast is enabled."""
    normed = functional.rms_norm(hidden, hidden.shape[-1:], weight.to(hidden.dtype), epsilon)
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        return normed.to(torch.get_autocast_dtype(device_type))
    return normed


def _run_vision_layer(
    hidden: Tensor, parameters: Sequence[Tensor], num_heads: int, epsilon: float, dropout: float
) -> Tensor:
    """Run a layer of the vision tower: [B, tokens, width].

    Args:
        hidden: Hidden states, [B, tokens, width].
        parameters: Weight and bias of the first norm, the query, key, value and output projections, the
            second norm, and the two MLP layers. A flat list of tensors, so that layers share one compilation.
        num_heads: Number of attention heads.
        epsilon: Epsilon of norms.
        dropout: Attention dropout.
    """
    norm1, q_proj, k_proj, v_proj, out_proj, norm2, fc1, fc2 = zip(
        parameters[::2], parameters[1::2], strict=True
    )
    width = hidden.shape[-1:]
    normed = functional.layer_norm(hidden, width, *norm1, epsilon)
    query, key, value = (
        functional.linear(normed, *projection).unflatten(-1, (num_heads, -1)).transpose(1, 2)
        for projection in (q_proj, k_proj, v_proj)
    )
    attention = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
    hidden = hidden + functional.linear(attention.transpose(1, 2).flatten(2), *out_proj)
    normed = functional.layer_norm(hidden, width, *norm2, epsilon)
    inner = functional.gelu(functional.linear(normed, *fc1), approximate="tanh")
    return hidden + functional.linear(inner, *fc2)


def _run_attention(
    hidden: Tensor, rotary: Rotary, weights: Sequence[Tensor], head_dim: int, scale: float, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Run the attention of a decoder block.

    Args:
        hidden: [B, T, d].
        rotary: Rotary embeddings of `ModelStack.embed`.
        weights: Weights of the norm before attention, the query projection and its norm, the key projection
            and its norm, the value and output projections, and the norm after attention.
        head_dim: Width of an attention head.
        scale: Scale of attention scores.
        epsilon: Epsilon of norms.

    Returns:
        Hidden states after the residual connection, [B, T, d], and their norm, of the same shape.
    """
    input_norm, q_proj, q_norm, k_proj, k_norm, v_proj, out_proj, post_norm = weights
    normed = _rms_norm(hidden, input_norm, epsilon)
    cosine, sine = (angles[:, None].to(normed.dtype) for angles in rotary)

    def split_heads(projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, head_dim)).transpose(1, 2)

    def rotate(heads: Tensor) -> Tensor:
        low, high = heads.chunk(2, dim=-1)
        return heads * cosine + torch.cat([-high, low], dim=-1) * sine

    query = rotate(split_heads(_rms_norm(functional.linear(normed, q_proj), q_norm, epsilon)))
    key = rotate(split_heads(_rms_norm(functional.linear(normed, k_proj), k_norm, epsilon)))
    value = split_heads(functional.linear(normed, v_proj))
    attention = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    hidden = hidden + functional.linear(attention.transpose(1, 2).flatten(2), out_proj)
    return hidden, _rms_norm(hidden, post_norm, epsilon)


def _route(router: Tensor, hidden: Tensor, top_k: int, balance: list[Tensor] | None) -> Tensor:
    """Compute the weight of each expert, [B, T, E] float32; experts that are not selected have weight 0."""
    probabilities = functional.linear(hidden, router).softmax(-1, dtype=torch.float32)
    top_probabilities, expert_ids = probabilities.topk(top_k, dim=-1)
    weights = torch.zeros_like(probabilities).scatter(-1, expert_ids, top_probabilities)
    if balance is not None:
        # Switch Transformer, equation 4. The loss is minimal if all experts get equally many tokens.
        load = (weights > 0).float().mean((0, 1)) / top_k
        balance.append(len(router) * (load.detach() * probabilities.mean((0, 1))).sum())
    return weights


def _run_experts(hidden: Tensor, normed: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Add the weighted outputs of all experts to the hidden states: [B, T, d].

    Args:
        hidden: Hidden states, [B, T, d].
        normed: Their norm, [B, T, d].
        weights: Weight of each expert, [B, T, E].
        gate_up: Gate and up projections, [E, 2 m, d].
        down: Down projections, [E, d, m].
    """
    num_experts, gate_up_width, width = gate_up.shape
    projected = functional.linear(normed, gate_up.reshape(num_experts * gate_up_width, width))
    gate, up = projected.unflatten(-1, (num_experts, 2, gate_up_width // 2)).unbind(-2)
    inner = functional.silu(gate) * up * weights[..., None].to(projected.dtype)
    return hidden + functional.linear(inner.flatten(2), down.permute(1, 0, 2).reshape(width, -1))
