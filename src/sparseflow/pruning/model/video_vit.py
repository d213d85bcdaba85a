"""VideoViT: a transformer over the tokens of a video, which drops what AST2.0-lite v2 says is worth little.

Notation: a clip [B, F, in_chans, H, W] becomes tokens [B, T, N, C], T = F / tubelet_size and N = h * w
patches of `patch_size`; a token attends to all tokens of all frames. Class scores come from the mean of the
tokens that are left, or from a class token.

At each stage (see `ASTConfig.stages`) a fixed number of tokens stays. What becomes of the others depends:

- in training, entropies give soft masks (`softness`), through which the score learns; rivals drop;
- in evaluation they are masked, so that one model shows what each would have been;
- after `compact` they are gone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparseflow.errors import InputError, SampleError
from sparseflow.pruning.model.blocks import Attention, Block, BlockGates, Perceptron
from sparseflow.pruning.model.config import ASTConfig
from sparseflow.pruning.model.gates import UnitGates, drive, soft_mask
from sparseflow.pruning.selectors import tokens as steps
from sparseflow.pruning.selectors.ast import Score
from sparseflow.pruning.selectors.tokens import Tokens

Layout = Literal["BTCHW", "BCTHW"]

_MOST_RATIO = 64
"""Hidden channels over width: more is a slip."""


@dataclass(frozen=True, kw_only=True)
class VideoViTConfig:
    """What a VideoViT is made of; see `VideoViT`.

    Raises:
        InputError: A value is out of range, or sizes do not divide.
    """

    img_size: int
    num_frames: int
    num_classes: int
    embed_dim: int
    depth: int
    num_heads: int
    mlp_ratio: float
    patch_size: int
    in_chans: int = 3
    drop_rate: float = 0.0
    attn_drop: float = 0.0
    drop_path_rate: float = 0.0
    tubelet_size: int = 1
    pool: str = "mean"
    position: str = "factored"
    norm_eps: float = 1e-6
    final_norm_eps: float | None = None

    def __post_init__(self) -> None:
        for name in (
            "img_size", "num_frames", "num_classes", "embed_dim", "depth", "num_heads", "patch_size",
            "in_chans", "tubelet_size",
        ):  # fmt: skip
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InputError(f"`{name}` (={value!r}) must be a whole number of at least 1")
        for whole, part in (
            ("img_size", "patch_size"), ("num_frames", "tubelet_size"), ("embed_dim", "num_heads"),
        ):  # fmt: skip
            sizes = getattr(self, whole), getattr(self, part)
            if sizes[0] % sizes[1]:
                raise InputError(f"`{whole}` (={sizes[0]}) must be divisible by `{part}` (={sizes[1]})")
        for name in ("drop_rate", "attn_drop", "drop_path_rate", "mlp_ratio", "norm_eps", "final_norm_eps"):
            value = getattr(self, name)
            if name == "final_norm_eps" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise InputError(f"`{name}` (={value!r}) must be a finite number")
            if name.endswith("eps") and not value > 0.0:
                raise InputError(f"`{name}` (={value!r}) must be above 0")
        for name in ("drop_rate", "attn_drop", "drop_path_rate"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise InputError(f"`{name}` (={getattr(self, name)!r}) must be from 0 to below 1")
        if not 0.0 < self.mlp_ratio <= _MOST_RATIO or self.channels < 1:
            raise InputError(
                f"`mlp_ratio` (={self.mlp_ratio!r}) must leave a hidden channel, and be at most {_MOST_RATIO}"
            )
        if self.pool not in ("mean", "cls"):
            raise InputError(f"`pool` (={self.pool!r}) must be mean or cls")
        if self.position not in ("factored", "joint"):
            raise InputError(f"`position` (={self.position!r}) must be factored or joint")

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tokens in time, rows and columns."""
        side = self.img_size // self.patch_size
        return self.num_frames // self.tubelet_size, side, side

    @property
    def tokens(self) -> int:
        """T * N."""
        t, h, w = self.grid
        return t * h * w

    @property
    def channels(self) -> int:
        """Hidden channels of a perceptron."""
        return round(self.embed_dim * self.mlp_ratio)

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads


class VideoViT(nn.Module):
    """A video transformer that may drop tokens, and gate heads, channels and blocks.

    Args:
        img_size: Height and width of frames, pixels.
        num_frames: Frames of a clip.
        num_classes: Classes.
        embed_dim: Width of a token.
        depth: Blocks.
        num_heads: Heads of a block.
        mlp_ratio: Hidden channels of a perceptron over `embed_dim`.
        patch_size: Height and width of a patch, pixels.
        in_chans: Channels of a frame.
        drop_rate: Dropout of embeddings and of what branches put out.
        attn_drop: Dropout of attention.
        drop_path_rate: Stochastic depth of the last block; it rises from 0.
        use_ast_prune: Whether anything is pruned.
        ast_cfg: `ASTConfig`, or what its `from_dict` reads.
        tubelet_size: Frames of a token; VideoMAE has 2.
        pool: `"mean"` of the tokens that are left, or the class token's, `"cls"`.
        position: `"factored"`, an embedding a patch plus one a frame, or `"joint"`, one a token.
        norm_eps: Of layer norms.
        final_norm_eps: Of the last one; as the others by default.

    Raises:
        InputError: A value is out of range, or sizes do not divide.
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
        if self.ast is not None:
            self.ast.check(depth)
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
            Block(
                Attention(dim, num_heads, config.head_dim, dropout=attn_drop, out_dropout=drop_rate),
                Perceptron(dim, config.channels, dropout=drop_rate),
                dim,
                drop_path=drop_path_rate * at / max(1, depth - 1),
                eps=norm_eps,
            )
            for at in range(depth)
        )
        self.norm = nn.LayerNorm(dim, eps=norm_eps if final_norm_eps is None else final_norm_eps)
        self.head = nn.Linear(dim, num_classes)
        self.gates = self.score = None
        if self.ast is not None:
            if self.ast.keep:
                self.gates = UnitGates(self.ast, depth=depth, heads=num_heads, channels=config.channels)
            if self.ast.selector == "ast" and self.ast.stages:
                self.score = Score(t, (h, w), self.ast.score)
            if self.ast.selector == "random":
                # Evaluation drops the same tokens in every sample, so that it can be repeated.
                self.register_buffer("order", steps.ranks(torch.rand(config.tokens)))
            if self.ast.selector == "uniform":
                self.register_buffer("order", steps.lattice(config.tokens))
        self._init_weights()

    def _init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        for name, each in self.named_parameters(recurse=False):
            if name.startswith(("position", "cls")):
                nn.init.trunc_normal_(each, std=0.02)

    def forward(
        self, x: Tensor, return_intermediate: bool = False, *, layout: Layout = "BTCHW"
    ) -> Tensor | tuple[Tensor, dict[str, Any]]:
        """Class scores.

        Args:
            x: Clips, [B, T, C, H, W], or as `layout` says.
            return_intermediate: Whether to tell more.
            layout: `"BTCHW"` or `"BCTHW"`.

        Returns:
            logits [B, num_classes]; with `return_intermediate` also a dictionary: `"token_feat"`
            [B, T, N, C], features before the first stage (after the last block where there is none), and
            `"ast_stats"`: `"L_AST"` and the sparsity of each grain, `"sparsity_token"`, `_head`, `_ch` and
            `_block`, scalars.

        Raises:
            SampleError: Clips of another shape, none at all, or not of a floating dtype.
        """
        tokens = self.embed(self.checked(x, layout))
        features: Tensor | None = None
        masks: dict[int, Tensor] = {}
        gates = None if self.gates is None else self.gates.values(
            hard=self.hard_gates or not self.training
        )  # fmt: skip
        stages: Mapping[int, float] = {} if self.ast is None else self.ast.stages
        for at, block in enumerate(self.blocks):
            if at in stages:
                if features is None:
                    features = tokens.grid
                tokens = self.stage(tokens, at, masks)
            mine = None
            if gates is not None:
                mine = BlockGates(**{grain: gate[at] for grain, gate in gates.items()})
            tokens = replace(tokens, x=block(tokens.x, tokens.bias, mine))
        logits = self.classify(tokens)
        if not return_intermediate:
            return logits
        t, h, w = self.config.grid
        if features is None:
            features = tokens.grid
        info = {"token_feat": features.unflatten(1, (t, h * w)), "ast_stats": self._stats(tokens, masks)}
        return logits, info

    def checked(self, x: Tensor, layout: Layout = "BTCHW") -> Tensor:
        """Clips as [B, T, C, H, W], in the dtype of the weights.

        Raises:
            SampleError: As `forward`.
        """
        if layout not in ("BTCHW", "BCTHW"):
            raise SampleError(f"`layout` (={layout!r}) must be BTCHW or BCTHW")
        config = self.config
        if layout == "BCTHW" and x.ndim == 5:
            x = x.transpose(1, 2)
        wanted = (config.num_frames, config.in_chans, config.img_size, config.img_size)
        if x.ndim != 5 or tuple(x.shape[1:]) != wanted:
            named = dict(zip("TCHW", wanted, strict=True))
            expected = ", ".join(f"{each}={named[each]}" for each in layout[1:])
            given = tuple(x.shape) if layout == "BTCHW" or x.ndim != 5 else tuple(x.transpose(1, 2).shape)
            raise SampleError(
                f"clips have the shape {given}; expected [B, {expected}], as the model was made. "
                "The other order of channels and frames is told by `layout`"
            )
        if not len(x) or not x.is_floating_point():
            raise SampleError(
                f"{len(x)} clips of {x.dtype}; there must be at least one, of a floating dtype: convert "
                "pixels, and normalise them as in training"
            )
        # Not that of `patch`, which may have been replaced.
        return x.to((self.position if config.position == "joint" else self.position_space).dtype)

    def embed(self, x: Tensor) -> Tokens:
        """Tokens of clips that `checked` gave."""
        config = self.config
        t, h, w = config.grid
        p, f = config.patch_size, config.tubelet_size
        b = len(x)
        patches = x.reshape(b, t, f, config.in_chans, h, p, w, p).permute(0, 1, 4, 6, 3, 2, 5, 7)
        found = self.patch(patches.reshape(b, t, h * w, -1))
        if config.position == "joint":
            found = found + self.position
        else:
            found = found + self.position_space + self.position_time
        found = found.flatten(1, 2)
        if self.cls is not None:
            found = torch.cat([self.cls.expand(b, -1, -1).to(found.dtype), found], 1)
        place = torch.arange(config.tokens, device=x.device).expand(b, -1)
        return Tokens(x=self.dropout(found), front=int(self.cls is not None), place=place)

    def stage(self, tokens: Tokens, at: int, masks: dict[int, Tensor]) -> Tokens:
        """What the stage before a block leaves; soft masks are put into `masks`."""
        assert self.ast is not None
        ast, kept = self.ast, steps.count(self.ast.stages[at], self.config.tokens)
        if ast.selector == "tome":
            normed, attention = self._looked_at(tokens, at)
            return steps.merge_alike(tokens, attention.keys(normed)[:, tokens.front :], kept)
        soft = self.training and ast.selector == "ast" and self.softness > 0.0 and not self.compacted
        score = self._scored(tokens, at)
        if not soft and (self.training or self.compacted):
            return steps.drop(tokens, score, kept, merge=ast.merge)
        if tokens.left is not None:
            score = score.masked_fill(~tokens.left, float("-inf"))
        left = torch.zeros_like(score, dtype=torch.bool).scatter(1, steps.best(score, kept), True)
        if soft:
            weight, bias = soft_mask(score, kept, self.softness)
            if tokens.weight is not None:
                assert tokens.bias is not None
                weight, bias = weight * tokens.weight, bias + tokens.bias[:, tokens.front :]
            masks[at] = weight
        else:
            weight = left.to(score.dtype)
            bias = torch.zeros_like(weight).masked_fill(~left, float("-inf"))
        return steps.mask(tokens, weight, bias, left, merge=ast.merge)

    def _looked_at(self, tokens: Tokens, at: int) -> tuple[Tensor, Attention]:
        """What the attention of a stage's block would get, and that attention: what ToMe and EViT go by."""
        block = self.blocks[at]
        assert isinstance(block, Block) and block.norm1 is not None and block.attention is not None
        return block.norm1(tokens.x), block.attention

    def _scored(self, tokens: Tokens, at: int) -> Tensor:
        """A score for each token of the grid, [B, S]."""
        assert self.ast is not None
        config, x = self.config, tokens.grid
        t, h, w = config.grid
        b, s, _ = x.shape
        if self.ast.selector == "random" and self.training:
            return torch.rand(b, s, device=x.device)
        if self.ast.selector in ("random", "uniform"):
            return self.get_buffer("order").float().expand(b, -1).gather(1, tokens.place)
        if self.ast.selector == "attention":
            normed, attention = self._looked_at(tokens, at)
            weight = tokens.weight
            if weight is not None:
                weight = torch.cat([weight.new_ones(b, tokens.front), weight], 1)
                weight = weight / weight.sum(1, keepdim=True)
            found = attention.received(normed, weight, tokens.bias, first=config.pool == "cls")
            return found[:, tokens.front :]
        assert self.score is not None
        if s == config.tokens:
            there = None if tokens.left is None else tokens.left.view(b, t, h * w)
            return self.score(x.unflatten(1, (t, h * w)), there).flatten(1)
        places = tokens.place[..., None].expand(-1, -1, x.shape[-1])
        full = x.new_zeros(b, config.tokens, x.shape[-1]).scatter(1, places, x)
        there = torch.zeros(b, config.tokens, dtype=torch.bool, device=x.device)
        there = there.scatter(1, tokens.place, True).view(b, t, h * w)
        return self.score(full.unflatten(1, (t, h * w)), there).flatten(1).gather(1, tokens.place)

    def classify(self, tokens: Tokens) -> Tensor:
        """Class scores from the last tokens, [B, num_classes]."""
        return self.head(self.norm(self._pool(tokens)))

    def _pool(self, tokens: Tokens) -> Tensor:
        if self.config.pool == "cls":
            return tokens.x[:, 0]
        weight = tokens.size if tokens.weight is None else tokens.weight
        if weight is None:
            return tokens.grid.mean(1)
        return steps.weighted_mean(tokens.grid, weight)

    def _stats(self, tokens: Tokens, masks: Mapping[int, Tensor]) -> dict[str, Tensor]:
        x = tokens.x
        zero = torch.zeros((), device=x.device)
        units = self._cut() if self.gates is None else self.gates.sparsity()
        left = zero + tokens.place.shape[1]
        if tokens.left is not None:
            left = tokens.left.sum(1).float().mean()
        return {
            "L_AST": zero if self.ast is None else drive(self.gates, masks, self.ast).to(x.device),
            "sparsity_token": 1.0 - left / self.config.tokens,
            "sparsity_head": zero + units.get("head", 0.0),
            "sparsity_ch": zero + units.get("channel", 0.0),
            "sparsity_block": zero + units.get("block", 0.0),
        }

    def _cut(self) -> dict[str, float]:
        """Grain -> share that `compact` cut away; heads and channels of blocks that are left."""
        config, there = self.config, [each for each in self.blocks if each.attention is not None]
        heads = sum(each.attention.heads for each in there)  # pyright: ignore
        channels = sum(each.perceptron.up.out_features for each in there)  # pyright: ignore
        blocks = max(1, len(there))
        return {
            "head": 1.0 - heads / (blocks * config.num_heads) if there else 1.0,
            "channel": 1.0 - channels / (blocks * config.channels) if there else 1.0,
            "block": 1.0 - len(there) / config.depth,
        }

    def to_dict(self) -> dict[str, Any]:
        """The arguments that make a model like this one, in JSON's types."""
        return {
            **asdict(self.config),
            "use_ast_prune": self.ast is not None,
            "ast_cfg": None if self.ast is None else self.ast.to_dict(),
        }
