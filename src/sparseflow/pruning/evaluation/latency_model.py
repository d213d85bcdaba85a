"""Differentiable latency model of a VideoViT, and the loss for a latency budget.

A block with S tokens, H heads of width d and M channels takes a + b S C H d + c S^2 H d + e S C M; the layers
outside of blocks take a constant. The non-negative coefficients are fitted to measured models with randomly
removed tokens, heads, channels and blocks. With sums of gates as numbers of heads and channels, the
prediction is differentiable in the gates.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor

from sparseflow.core.artifact import Artifact
from sparseflow.core.checks import check_at_least
from sparseflow.core.environment import collect_environment
from sparseflow.core.extras import require
from sparseflow.core.progress import Progress
from sparseflow.errors import InputError
from sparseflow.pruning.compaction.compact import resize_blocks
from sparseflow.pruning.compaction.flops import list_block_work
from sparseflow.pruning.evaluation.profile import compare_latency, make_dense
from sparseflow.pruning.model.config import ASTConfig, VideoViTConfig
from sparseflow.pruning.model.video_vit import VideoViT

_TERMS = ("outside", "block", "linear", "attention", "mlp")
_MIN_MODELS = 8

_FREE_FIELDS = ("drop_rate", "attn_drop", "drop_path_rate", "norm_eps", "final_norm_eps")
"""Fields of `VideoViTConfig` that do not change the latency."""


class VideoViTLatencyModel(Artifact):
    """Latency coefficients for one architecture on one device.

    Attributes:
        model: Fields of `VideoViTConfig` of the dense architecture.
        batch_size: Clips per call.
        coefficients: Milliseconds of each term; a term is the fraction of the dense model's amount.
        dense_ms: Latency of the dense model.
        error: Median of |predicted - measured| / measured over the measured models, by leave-one-out.
        environment: Environment of the measurement.
    """

    FORMAT: ClassVar[str] = "sparseflow.pruning.latency-model"
    VERSION: ClassVar[int] = 2
    HINT: ClassVar[str] = "fit one with `sparseflow pruning profile --fit`"

    model: dict[str, Any]
    batch_size: int
    coefficients: dict[str, float]
    dense_ms: float
    error: float
    environment: dict[str, Any]

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        try:
            VideoViTConfig(**self.model)
        except (TypeError, InputError) as error:
            raise ValueError(f"`model` is invalid: {error}") from error
        if set(self.coefficients) != set(_TERMS):
            raise ValueError(
                f"`coefficients` must have the terms {', '.join(_TERMS)}, got {', '.join(self.coefficients)}"
            )
        return self

    def predict(self, model: VideoViT) -> Tensor:
        """Latency of a model after compaction, milliseconds, a scalar that is differentiable in the gates.

        Raises:
            InputError: The model has another architecture.
        """
        mismatched = sorted(
            name
            for name, value in asdict(model.config).items()
            if name not in _FREE_FIELDS and self.model.get(name) != value
        )
        if mismatched:
            raise InputError(
                f"the latency model was fitted to another architecture: {', '.join(mismatched)}; fit a new "
                "one with `sparseflow pruning profile --fit`"
            )
        terms = _compute_terms(model)
        return sum((self.coefficients[name] * terms[name] for name in _TERMS), torch.zeros(()))


def _compute_terms(model: VideoViT) -> dict[str, Tensor]:
    """Amounts that the coefficients multiply, as fractions of those of the dense model."""
    config, depth = model.config, model.config.depth
    gates = {} if model.gates is None else model.gates.compute_gates(hard=False)
    terms = {name: torch.zeros((), device=model.head.weight.device) for name in _TERMS}
    terms["outside"] = terms["outside"] + 1.0
    for work in list_block_work(model, dropped=True):
        if not work.num_heads:
            continue
        alive = gates["block"][work.block] if "block" in gates else 1.0
        heads = gates["head"][work.block].sum() if "head" in gates else work.num_heads
        channels = gates["channel"][work.block].sum() if "channel" in gates else work.channels
        heads, channels = heads / config.num_heads, channels / config.mlp_channels
        tokens = work.num_kept / config.num_tokens
        terms["block"] = terms["block"] + alive / depth
        terms["linear"] = terms["linear"] + alive * tokens * heads / depth
        terms["attention"] = terms["attention"] + alive * tokens**2 * heads / depth
        terms["mlp"] = terms["mlp"] + alive * tokens * channels / depth
    return terms


def fit_latency_model(
    model: VideoViT,
    *,
    batch_size: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    num_models: int = 24,
    rounds: int = 7,
    seed: int = 0,
    progress: Progress | None = None,
) -> VideoViTLatencyModel:
    """Measure models with randomly removed tokens, heads, channels and blocks, and fit the coefficients.

    Args:
        model: Model of the architecture; stages use its token selector.
        batch_size: Clips per call.
        device: Device of the measurement.
        dtype: Dtype of weights and clips.
        num_models: Measured models, each timed against the dense one.
        rounds: Timed calls of each model.
        seed: Random seed.
        progress: Called after each model.

    Raises:
        InputError: `num_models` is below 8.
        MissingExtraError: scikit-learn is missing.
    """
    check_at_least(_MIN_MODELS, num_models=num_models)
    linear_model = require("sklearn.linear_model", "pruning")
    generator, dense = np.random.default_rng(seed), make_dense(model)
    ratios, rows, dense_ms = [], [], []
    for number in range(num_models):
        pruned = _sample_pruned_model(dense, model.ast, generator)
        comparison = compare_latency(
            {"dense": dense, "pruned": pruned}, baseline="dense", batch_size=batch_size, device=device,
            dtype=dtype, rounds=rounds, warmup=2, seed=number,
        )  # fmt: skip
        ratios.append(1.0 / comparison.speedup("pruned").median)
        dense_ms.append(comparison.samples("dense").median_ms)
        rows.append([float(value) for value in _compute_terms(pruned).values()])
        if progress is not None:
            progress(f"fitting, {number + 1} of {num_models}", (number + 1) / num_models)
    # The dense model itself.
    rows.append([1.0] * len(_TERMS))
    ratios.append(1.0)
    scale = float(np.median(dense_ms))
    # Least squares of relative errors.
    x, targets = np.array(rows) / np.array(ratios)[:, None], np.ones(len(ratios))
    regression = linear_model.LinearRegression(positive=True, fit_intercept=False)
    selection = require("sklearn.model_selection", "pruning")
    predicted = selection.cross_val_predict(regression, x, targets, cv=selection.LeaveOneOut())
    coefficients = (scale * regression.fit(x, targets).coef_).tolist()
    return VideoViTLatencyModel(
        model=asdict(model.config),
        batch_size=batch_size,
        coefficients=dict(zip(_TERMS, coefficients, strict=True)),
        dense_ms=scale,
        error=float(np.median(np.abs(predicted - 1.0))),
        environment=collect_environment(device, seed=seed),
    )


def _sample_pruned_model(dense: VideoViT, ast: ASTConfig | None, generator: np.random.Generator) -> VideoViT:
    """A compact model with one random stage and randomly removed heads, channels and blocks."""
    config = dense.config
    stage = int(generator.integers(config.depth))
    base = ASTConfig(selector="uniform") if ast is None else ast
    ast_cfg = replace(base, stages={stage: float(generator.uniform(0.2, 1.0))}, keep={})
    pruned = VideoViT(**{**dense.to_dict(), "use_ast_prune": True, "ast_cfg": ast_cfg})
    num_heads = 1 + int(generator.integers(config.num_heads))
    channels = max(1, int(config.mlp_channels * generator.uniform(0.1, 1.0)))
    is_removed = generator.random(config.depth) < generator.choice([0.0, 0.25])
    is_removed[stage] = False  # attention selectors read the block of their stage
    return resize_blocks(pruned, [(0, 0) if removed else (num_heads, channels) for removed in is_removed])


def compute_budget_loss(latency_model: VideoViTLatencyModel, model: VideoViT, budget: float) -> Tensor:
    """Squared relative excess of the predicted latency over the budget, a scalar; 0 below the budget.

    Args:
        latency_model: Latency model of this architecture.
        model: Model with gates.
        budget: Fraction of the dense model's latency.
    """
    excess = latency_model.predict(model) / (budget * latency_model.dense_ms) - 1.0
    return torch.relu(excess) ** 2
