"""VideoViT: a video transformer with token, head, channel and block pruning.

Notation: a clip [B, F, in_chans, H, W] becomes tokens [B, T, N, C] with T = F / tubelet_size and N = h * w
patches of `patch_size`. Each token attends to all tokens of all frames. Class scores come from the mean of
the kept tokens or from a class token.

Each stage (see `ASTConfig.stages`) keeps a fixed number of tokens. The other tokens are

- softly masked in training with the AST selector and with a learned score (`softness`), so that gradients
  reach the score; the other selectors drop them;
- masked in evaluation, so that the features of all tokens can be inspected;
- removed after `compact`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparseflow.errors import SampleError
from sparseflow.pruning.model.ast_pruner import ASTPruner
from sparseflow.pruning.model.blocks import MLP, Attention, BlockGates, TransformerBlock
from sparseflow.pruning.model.config import ATTENTION_SELECTORS, SOFT_SELECTORS, ASTConfig, VideoViTConfig
from sparseflow.pruning.model.gates import UnitGates, make_soft_mask
from sparseflow.pruning.selectors.partial_grid import GridScore
from sparseflow.pruning.selectors.tokens import (
    TokenState,
    compute_weighted_mean,
    count_kept_tokens,
    drop_tokens,
    mask_tokens,
    mask_top_tokens,
)
from sparseflow.pruning.selectors.tome import merge_similar_tokens

Layout = Literal["BTCHW", "BCTHW"]
LAYOUTS = ("BTCHW", "BCTHW")


class VideoViT(nn.Module):
    """Video transformer with optional token dropping and gated heads, channels and blocks.

    Args:
        img_size: Height and width of frames, pixels.
        num_frames: Frames of a clip.
        num_classes: Classes.
        embed_dim: Width of a token.
        depth: Blocks.
        num_heads: Heads of a block.
        mlp_ratio: Hidden channels of an MLP divided by `embed_dim`.
        patch_size: Height and width of a patch, pixels.
        in_chans: Channels of a frame.
        drop_rate: Dropout of the embeddings and of the outputs of the branches.
        attn_drop: Dropout of the attention weights.
        drop_path_rate: Stochastic depth rate of the last block; it increases linearly from 0.
        use_ast_prune: Whether the model prunes.
        ast_cfg: `ASTConfig`, or a mapping that `ASTConfig.from_dict` parses.
        tubelet_size: Frames of a token; 2 in VideoMAE.
        pool: `"mean"` of the kept tokens, or `"cls"` for a class token.
        position: `"factored"`, the sum of one embedding per patch and one per frame, or `"joint"`, one
            embedding per token.
        norm_eps: Epsilon of the layer norms.
        final_norm_eps: Epsilon of the last layer norm; `norm_eps` by default.

    Raises:
        InputError: A value is out of range, or sizes are not divisible.
    """

    def __init__(
        self,
        img_size: int,
        num_frames: int,
        num_classes: int,
        embed_dim: int,
        depth: int,
        num_heads: int,
        mlp_ratio: float,
        patch_size: int,
        in_chans: int = 3,
        drop_rate: float = 0.0,
        attn_drop: float = 0.0,
        drop_path_rate: float = 0.0,
        use_ast_prune: bool = False,
        ast_cfg: Mapping[str, Any] | ASTConfig | None = None,
        *,
        tubelet_size: int = 1,
        pool: str = "mean",
        position: str = "factored",
        norm_eps: float = 1e-6,
        final_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.config = config = VideoViTConfig(
            img_size=img_size, num_frames=num_frames, num_classes=num_classes, embed_dim=embed_dim,
            depth=depth, num_heads=num_heads, mlp_ratio=mlp_ratio, patch_size=patch_size,
            in_chans=in_chans, drop_rate=drop_rate, attn_drop=attn_drop, drop_path_rate=drop_path_rate,
            tubelet_size=tubelet_size, pool=pool, position=position, norm_eps=norm_eps,
            final_norm_eps=final_norm_eps,
        )  # fmt: skip
        ast = ast_cfg if isinstance(ast_cfg, ASTConfig) else ASTConfig.from_dict(ast_cfg or {})
        self.ast = ast if use_ast_prune else None
        # Integers of a module are constants of a compiled graph. Shares would become dynamic, and with them
        # all shapes, once a second model with other shares is compiled.
        self._num_kept: dict[int, int] = {}
        if self.ast is not None:
            self.ast.check_depth(depth)
            self._num_kept = {
                block: count_kept_tokens(share, config.num_tokens) for block, share in self.ast.stages.items()
            }
        self.compacted = False
        self.softness = ast.softness
        self.hard_gates = False
        t, h, w = config.grid
        dim = embed_dim
        self.patch = nn.Linear(in_chans * tubelet_size * patch_size**2, dim)
        if position == "joint":
            self.position = nn.Parameter(torch.empty(1, t, h * w, dim))
        else:
            self.position_time = nn.Parameter(torch.empty(1, t, 1, dim))
            self.position_space = nn.Parameter(torch.empty(1, 1, h * w, dim))
        self.cls = nn.Parameter(torch.empty(1, 1, dim)) if pool == "cls" else None
        self.dropout = nn.Dropout(drop_rate)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                Attention(dim, num_heads, config.head_dim, dropout=attn_drop, out_dropout=drop_rate),
                MLP(dim, config.mlp_channels, dropout=drop_rate),
                dim,
                drop_path=drop_path_rate * index / max(1, depth - 1),
                eps=norm_eps,
            )
            for index in range(depth)
        )
        self.norm = nn.LayerNorm(dim, eps=norm_eps if final_norm_eps is None else final_norm_eps)
        self.head = nn.Linear(dim, num_classes)
        self.pruner: ASTPruner | None = None
        if self.ast is not None:
            self.pruner = ASTPruner(
                self.ast, grid=config.grid, depth=depth, num_heads=num_heads,
                mlp_channels=config.mlp_channels, dim=embed_dim,
            )  # fmt: skip
        self._init_weights()

    @property
    def gates(self) -> UnitGates | None:
        """Gates of heads, channels and blocks."""
        return None if self.pruner is None else self.pruner.gates

    @property
    def score(self) -> GridScore | None:
        """Score of features by the selector; None for other selectors."""
        return None if self.pruner is None else self.pruner.score

    def _init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith(("position", "cls")):
                nn.init.trunc_normal_(parameter, std=0.02)

    def forward(
        self, x: Tensor, return_intermediate: bool = False, *, layout: Layout = "BTCHW"
    ) -> Tensor | tuple[Tensor, dict[str, Any]]:
        """Compute class scores.

        Args:
            x: Clips, [B, T, C, H, W], or as `layout` says.
            return_intermediate: Whether to return features and sparsity, too.
            layout: `"BTCHW"` or `"BCTHW"`.

        Returns:
            Logits, [B, num_classes]. With `return_intermediate` also a dictionary: `"token_feat"`
            [B, T, N, C], the features before the first stage (without stages: after the last block);
            `"kept_tokens"` [B, T, N], bool, the tokens that the last stage keeps; and `"ast_stats"`, scalars:
            `"L_AST"` and the sparsity of each grain, `"sparsity_token"`, `"sparsity_head"`, `"sparsity_ch"`
            and `"sparsity_block"`.

        Raises:
            SampleError: Clips are empty, of another shape, or not of a floating dtype.
        """
        tokens = self.embed(self.check_clips(x, layout))
        features: Tensor | None = None
        masks: dict[int, Tensor] = {}
        gates: dict[str, Tensor] = {}
        if self.pruner is not None:
            gates = self.pruner.compute_gates(hard=self.hard_gates or not self.training)
        stages: Mapping[int, float] = {} if self.ast is None else self.ast.stages
        for index, block in enumerate(self.blocks):
            if index in stages:
                if features is None:
                    features = tokens.grid
                tokens = self.apply_stage(tokens, index, masks)
            block_gates = BlockGates(**{grain: gate_values[index] for grain, gate_values in gates.items()})
            tokens = replace(tokens, x=block(tokens.x, tokens.attn_bias, block_gates))
        logits = self.classify(tokens)
        if not return_intermediate:
            return logits
        t, h, w = self.config.grid
        if features is None:
            features = tokens.grid
        info = {
            "token_feat": features.unflatten(1, (t, h * w)),
            "kept_tokens": self._locate_kept_tokens(tokens).view(-1, t, h * w),
            "ast_stats": self._compute_stats(tokens, masks),
        }
        return logits, info

    def check_clips(self, x: Tensor, layout: Layout = "BTCHW") -> Tensor:
        """Check clips and convert them to [B, T, C, H, W] in the dtype of the weights.

        Raises:
            SampleError: As `forward`.
        """
        if layout not in LAYOUTS:
            raise SampleError(f"`layout` (={layout!r}) must be one of {', '.join(LAYOUTS)}")
        config = self.config
        shape = tuple(x.shape)
        if layout == "BCTHW" and x.ndim == 5:
            x = x.transpose(1, 2)
        expected = config.clip_shape
        if x.ndim != 5 or tuple(x.shape[1:]) != expected:
            sizes = dict(zip("TCHW", expected, strict=True))
            axes = ", ".join(f"{axis}={sizes[axis]}" for axis in layout[1:])
            raise SampleError(
                f"clips have the shape {shape}; the model expects [B, {axes}]. If channels and frames are "
                "swapped, set `layout`"
            )
        if not len(x) or not x.is_floating_point():
            raise SampleError(
                f"got {len(x)} clips of {x.dtype}; expected at least one, of a floating dtype. Convert and "
                "normalize pixels as in training"
            )
        # `patch` may have been replaced by another module.
        return x.to((self.position if config.position == "joint" else self.position_space).dtype)

    def embed(self, x: Tensor) -> TokenState:
        """Compute the tokens of clips that passed `check_clips`."""
        config = self.config
        t, h, w = config.grid
        p, f = config.patch_size, config.tubelet_size
        b = len(x)
        patches = x.reshape(b, t, f, config.in_chans, h, p, w, p).permute(0, 1, 4, 6, 3, 2, 5, 7)
        embedded = self.patch(patches.reshape(b, t, h * w, -1))
        if config.position == "joint":
            embedded = embedded + self.position
        else:
            embedded = embedded + self.position_space + self.position_time
        embedded = embedded.flatten(1, 2)
        if self.cls is not None:
            embedded = torch.cat([self.cls.expand(b, -1, -1).to(embedded.dtype), embedded], 1)
        positions = torch.arange(config.num_tokens, device=x.device).expand(b, -1)
        return TokenState(x=self.dropout(embedded), num_prefix=int(self.cls is not None), positions=positions)

    def apply_stage(self, tokens: TokenState, block: int, masks: dict[int, Tensor]) -> TokenState:
        """Apply the stage before a block; soft masks are added to `masks`."""
        assert self.ast is not None
        ast, num_kept = self.ast, self._num_kept[block]
        if ast.selector == "tome":
            normed, attention = self._get_attention_input(tokens, block)
            keys = attention.compute_mean_keys(normed)[:, tokens.num_prefix :]
            return merge_similar_tokens(tokens, keys, num_kept)
        soft = self.training and ast.selector in SOFT_SELECTORS and self.softness > 0.0 and not self.compacted
        score = self._score_tokens(tokens, block)
        if not soft and (self.training or self.compacted):
            return drop_tokens(tokens, score, num_kept, merge=ast.merge)
        if tokens.retained is not None:
            score = score.masked_fill(~tokens.retained, float("-inf"))
        retained = mask_top_tokens(score, num_kept)
        if soft:
            weight, attn_bias = make_soft_mask(score, num_kept, self.softness)
            if tokens.weight is not None:
                assert tokens.attn_bias is not None
                weight = weight * tokens.weight
                attn_bias = attn_bias + tokens.attn_bias[:, tokens.num_prefix :]
            masks[block] = weight
        else:
            weight = retained.to(score.dtype)
            attn_bias = torch.zeros_like(weight).masked_fill(~retained, float("-inf"))
        return mask_tokens(tokens, weight, attn_bias, retained, merge=ast.merge)

    def _get_attention_input(self, tokens: TokenState, index: int) -> tuple[Tensor, Attention]:
        """Normalized input of a block's attention, and that attention."""
        block = self.blocks[index]
        assert isinstance(block, TransformerBlock)
        assert block.norm1 is not None and block.attention is not None
        return block.norm1(tokens.x), block.attention

    def _score_tokens(self, tokens: TokenState, block: int) -> Tensor:
        """Score of each grid token by the selector, [B, S]."""
        assert self.pruner is not None
        if self.pruner.config.selector in ATTENTION_SELECTORS:
            return self._score_by_attention(tokens, block)
        return self.pruner.score_tokens(tokens, block)

    def _score_by_attention(self, tokens: TokenState, block: int) -> Tensor:
        assert self.ast is not None
        normed, attention = self._get_attention_input(tokens, block)
        weight = tokens.weight
        if weight is not None:
            weight = torch.cat([weight.new_ones(len(weight), tokens.num_prefix), weight], 1)
            weight = weight / weight.sum(1, keepdim=True)
        if self.ast.selector == "vid_tldr":
            score = -attention.compute_attention_entropy(normed, tokens.attn_bias)
        else:
            score = attention.compute_received_attention(
                normed, weight, tokens.attn_bias, first=self.config.pool == "cls"
            )
        return score[:, tokens.num_prefix :]

    def classify(self, tokens: TokenState) -> Tensor:
        """Class scores of the final tokens, [B, num_classes]."""
        return self.head(self.norm(self._pool(tokens)))

    def _pool(self, tokens: TokenState) -> Tensor:
        if self.config.pool == "cls":
            return tokens.x[:, 0]
        weight = tokens.size if tokens.weight is None else tokens.weight
        if weight is None:
            return tokens.grid.mean(1)
        return compute_weighted_mean(tokens.grid, weight)

    def _locate_kept_tokens(self, tokens: TokenState) -> Tensor:
        """Whether each token of the clip is kept, bool, [B, T * N]."""
        if tokens.retained is not None:
            return tokens.retained
        mask = torch.zeros(len(tokens.x), self.config.num_tokens, dtype=torch.bool, device=tokens.x.device)
        return mask.scatter(1, tokens.positions, True)

    def _compute_stats(self, tokens: TokenState, masks: Mapping[int, Tensor]) -> dict[str, Tensor]:
        device = tokens.x.device
        zero = torch.zeros((), device=device)
        units = self._compute_removed_share() if self.gates is None else self.gates.compute_sparsity()
        num_kept = zero + tokens.positions.shape[1]
        if tokens.retained is not None:
            num_kept = tokens.retained.sum(1).float().mean()
        loss = zero if self.pruner is None else self.pruner.compute_loss(masks).to(device)
        return {
            "L_AST": loss,
            "sparsity_token": 1.0 - num_kept / self.config.num_tokens,
            "sparsity_head": zero + units.get("head", 0.0),
            "sparsity_ch": zero + units.get("channel", 0.0),
            "sparsity_block": zero + units.get("block", 0.0),
        }

    def _compute_removed_share(self) -> dict[str, float]:
        """Grain -> share that `compact` removed; heads and channels are those of the remaining blocks."""
        config, blocks = self.config, [block for block in self.blocks if block.attention is not None]
        heads = sum(block.attention.num_heads for block in blocks)  # pyright: ignore
        channels = sum(block.mlp.up.out_features for block in blocks)  # pyright: ignore
        num_blocks = max(1, len(blocks))
        return {
            "head": 1.0 - heads / (num_blocks * config.num_heads) if blocks else 1.0,
            "channel": 1.0 - channels / (num_blocks * config.mlp_channels) if blocks else 1.0,
            "block": 1.0 - len(blocks) / config.depth,
        }

    def to_dict(self) -> dict[str, Any]:
        """Constructor arguments of this architecture, in JSON types."""
        return {
            **asdict(self.config),
            "use_ast_prune": self.ast is not None,
            "ast_cfg": None if self.ast is None else self.ast.to_dict(),
        }
