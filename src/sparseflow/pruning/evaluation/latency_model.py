"""What a model will take here, from what its blocks hold: a loss by which gates learn to keep a budget.

A block with S tokens, H heads of width d and M channels takes a + b S C H d + c S^2 H d + e S C M; what is
outside of blocks takes a constant. The coefficients, none negative, are fitted to measured models with
tokens, heads, channels and blocks cut at random. With gates in place of heads and channels it is
differentiable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseflow.core.environment import collect_environment
from sparseflow.core.extras import require
from sparseflow.core.files import write_atomic
from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.compaction.compact import shaped
from sparseflow.pruning.evaluation.profile import dense, timed
from sparseflow.pruning.model.blocks import Block
from sparseflow.pruning.model.config import ASTConfig
from sparseflow.pruning.model.video_vit import VideoViT, VideoViTConfig
from sparseflow.pruning.selectors import tokens as steps

_TERMS = ("outside", "block", "linear", "attention", "perceptron")


_FREE = ("drop_rate", "attn_drop", "drop_path_rate", "norm_eps", "final_norm_eps")
"""What a model may be made of that costs nothing in use."""


@dataclass(frozen=True, kw_only=True)
class LatencyModel:
    """Coefficients for one kind of model on one device.

    Attributes:
        model: What it is made of but for what is cut: `VideoViTConfig`'s fields.
        batch: Clips of a call.
        coefficients: Milliseconds for each of what `_terms` gives, over what a dense model has of it.
        dense_ms: What the dense model takes.
        error: Median over measured models of |predicted - measured| / measured, each left out in its turn.
        environment: Where it was measured.
    """

    model: dict[str, Any]
    batch: int
    coefficients: dict[str, float]
    dense_ms: float
    error: float
    environment: dict[str, Any]

    def predict(self, model: VideoViT) -> Tensor:
        """Milliseconds of a model once it is compact, a scalar; gradients go to its gates.

        Raises:
            InputError: The model is made of other things.
        """
        mine = asdict(model.config).items()
        differ = sorted(name for name, value in mine if name not in _FREE and self.model.get(name) != value)
        if differ:
            raise InputError(
                f"this cost model is of a model with other {', '.join(differ)}: fit one for yours"
            )
        found = _terms(model)
        return sum((self.coefficients[name] * found[name] for name in _TERMS), torch.zeros(()))

    def save(self, path: Path | str) -> None:
        """Write it as JSON, in place of what is there."""
        write_atomic(Path(path), json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> LatencyModel:
        """Read what `save` wrote.

        Raises:
            InputError: There is no such file.
            FileFormatError: It is something else.
        """
        file = Path(path)
        if not file.is_file():
            raise InputError(f"there is no file {file}; `sparseflow pruning profile --fit {file}` makes one")
        try:
            found = cls(**json.loads(file.read_bytes()))
            VideoViTConfig(**found.model)
            if set(found.coefficients) != set(_TERMS):
                raise ValueError(f"its coefficients are not {', '.join(_TERMS)}")
        except (TypeError, ValueError) as error:
            raise FileFormatError(f"{file} is not a cost model that can be read: {error}") from error
        return found


def _terms(model: VideoViT) -> dict[str, Tensor]:
    """What the formula multiplies, each over what a dense model has."""
    config = model.config
    total, depth = config.tokens, config.depth
    gates = {} if model.gates is None else model.gates.values(hard=False)
    device = model.head.weight.device
    found = {name: torch.zeros((), device=device) for name in _TERMS}
    found["outside"] = found["outside"] + 1.0
    left = total
    for at, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        if model.ast is not None and at in model.ast.stages:
            left = steps.count(model.ast.stages[at], total)
        if block.attention is None or block.perceptron is None:
            continue
        one = torch.ones((), device=device)
        alive = gates["block"][at] if "block" in gates else one
        heads = gates["head"][at].sum() if "head" in gates else one * block.attention.heads
        channels = (
            gates["channel"][at].sum() if "channel" in gates else one * block.perceptron.up.out_features
        )
        share, heads, channels = left / total, heads / config.num_heads, channels / config.channels
        found["block"] = found["block"] + alive / depth
        found["linear"] = found["linear"] + alive * share * heads / depth
        found["attention"] = found["attention"] + alive * share**2 * heads / depth
        found["perceptron"] = found["perceptron"] + alive * share * channels / depth
    return found


def fit(
    model: VideoViT,
    *,
    batch: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    models: int = 24,
    rounds: int = 7,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> LatencyModel:
    """Measure models with tokens, heads, channels and blocks cut at random, and fit the coefficients.

    Args:
        model: Of the kind that is to be pruned; stages cost what its selector does.
        batch: Clips of a call.
        device: Where to measure.
        dtype: Of weights and clips.
        models: How many to measure; each in turns with the dense one.
        rounds: Calls of each that are timed.
        seed: What is drawn from.
        progress: Called with (models measured, models).

    Raises:
        InputError: Fewer than 8 models.
        MissingExtraError: scikit-learn is missing.
    """
    if models < 8:
        raise InputError(f"`models` (={models}) must be at least 8: there are {len(_TERMS)} coefficients")
    regression = require("sklearn.linear_model", "pruning").LinearRegression
    random, whole = np.random.default_rng(seed), dense(model)
    ratios, rows, dense_ms = [], [], []
    for number in range(models):
        cut = _cut(whole, model.ast, random)
        found = timed(
            {"dense": whole, "cut": cut}, baseline="dense", batch=batch, device=device, dtype=dtype,
            rounds=rounds, warmup=2, seed=number,
        )  # fmt: skip
        ratios.append(1.0 / found.speedup("cut").median)
        dense_ms.append(found.samples("dense").median_ms)
        rows.append([float(value) for value in _terms(cut).values()])
        if progress is not None:
            progress(number + 1, models)
    rows.append([1.0] * len(_TERMS))
    ratios.append(1.0)
    x, y, scale = np.array(rows), np.array(ratios), float(np.median(dense_ms))

    def solved(some: Sequence[int]) -> np.ndarray:
        # Relative errors count: each row is over what was measured.
        return (
            regression(positive=True, fit_intercept=False)
            .fit(x[some] / y[some, None], np.ones(len(some)))
            .coef_
        )

    every = list(range(len(y)))
    errors = [abs(float(x[out] @ solved([at for at in every if at != out])) / y[out] - 1.0) for out in every]
    return LatencyModel(
        model=asdict(model.config),
        batch=batch,
        coefficients=dict(zip(_TERMS, (scale * solved(every)).tolist(), strict=True)),
        dense_ms=scale,
        error=float(np.median(errors)),
        environment=collect_environment(device, seed=seed),
    )


def _cut(whole: VideoViT, ast: ASTConfig | None, random: np.random.Generator) -> VideoViT:
    """A model with a stage somewhere, and with heads, channels and blocks cut, as much as chance has it."""
    config = whole.config
    stage = int(random.integers(config.depth))
    base = ASTConfig(selector="uniform") if ast is None else ast
    staged = replace(base, stages={stage: float(random.uniform(0.2, 1.0))}, keep={})
    found = VideoViT(**{**whole.to_dict(), "use_ast_prune": True, "ast_cfg": staged})
    heads = 1 + int(random.integers(config.num_heads))
    channels = max(1, int(config.channels * random.uniform(0.1, 1.0)))
    gone = random.random(config.depth) < random.choice([0.0, 0.25])
    gone[stage] = False  # some selectors look at it
    return shaped(found, [(0, 0) if each else (heads, channels) for each in gone])


def over_budget(cost: LatencyModel, model: VideoViT, budget: float) -> Tensor:
    """The loss: by how much of the budget the prediction is above it, squared; 0 below.

    Args:
        cost: Of this kind of model.
        model: With gates.
        budget: Share of what the dense model takes.
    """
    return torch.relu(cost.predict(model) / (budget * cost.dense_ms) - 1.0) ** 2
