"""Residual model: predicts the ratio of measured to analytic cost.

A committee of small networks predicts log(measured / analytic) of latency, memory and power. Each member is
trained without some configurations; these held-out configurations select the weight decay and a factor that
shrinks the correction, possibly to 0. Extrapolation is limited: features are clamped to their training range,
outputs are bounded by the training targets, and the correction decays to 0 with the distance from that range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sparseflow.codesign.hardware.proxy.analytic import minimize_adam
from sparseflow.codesign.hardware.proxy.features import FEATURES

TARGETS = ("lat_ms", "mem_mb", "power_w")

_BOUND_MARGIN = 1.25
"""Factor by which log ratios may exceed those of the training data."""

_MAX_LOG_FACTOR = math.log(30.0)
_HUBER_DELTA = 0.03
"""Errors below this are squared, larger ones absolute, which targets a small median error."""

_CONSTANT_SCALE = 0.25
"""Scale of constant features: a deviation of 1 removes the correction."""

_TARGET_WEIGHTS = (1.0, 0.1, 0.1)
"""Loss weights of the targets; latency dominates."""

_SHRINKAGE_FACTORS = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Factors of the correction to select from."""


class LayerProxyModel(nn.Module):
    """A committee of networks with two hidden layers; predicts 0 until it is fitted.

    Args:
        members: Number of networks, at least 2; predictions are averaged.
        hidden: Width of both hidden layers.
    """

    mean: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor
    bound: Tensor
    share: Tensor

    def __init__(self, *, members: int = 5, hidden: int = 32) -> None:
        super().__init__()
        count = len(FEATURES)
        self.members, self.hidden = members, hidden
        sizes = ((count, hidden), (hidden, hidden), (hidden, len(TARGETS)))
        self.weights = nn.ParameterList(torch.zeros(members, *size, dtype=torch.float64) for size in sizes)
        self.biases = nn.ParameterList(torch.zeros(members, 1, n, dtype=torch.float64) for _, n in sizes)
        for name, value in (("mean", 0.0), ("scale", 1.0), ("low", 0.0), ("high", 0.0)):
            self.register_buffer(name, torch.full((count,), value, dtype=torch.float64))
        for name in ("bound", "share"):
            self.register_buffer(name, torch.zeros(len(TARGETS), dtype=torch.float64))
        self.requires_grad_(False)

    def forward(self, features: Tensor) -> Tensor:
        """Predict log ratios.

        Args:
            features: See `build_layer_features`, [..., len(FEATURES)].

        Returns:
            Log ratio of each of `TARGETS`, [..., 3]; within `bound`, and 0 far from the training data.
        """
        x = (features.double() - self.mean) / self.scale
        excess = torch.relu(self.low - x) + torch.relu(x - self.high)
        fade = torch.exp(-excess.square().sum(-1, keepdim=True))
        clamped = torch.minimum(torch.maximum(x, self.low), self.high).reshape(-1, x.shape[-1])
        output = _forward_committee(clamped, list(self.weights), list(self.biases), self.bound)
        return self.share * output.mean(0).reshape(*x.shape[:-1], len(TARGETS)) * fade

    def fit(
        self,
        features: Tensor,
        targets: Tensor,
        groups: Sequence[object] | None = None,
        *,
        decays: Sequence[float] = (0.3, 1.0, 3.0, 10.0, 30.0),
        steps: int = 400,
        learning_rate: float = 0.01,
        seed: int = 0,
    ) -> None:
        """Fit the model to measurements, from scratch.

        Args:
            features: [N, len(FEATURES)].
            targets: log(measured / analytic), [N, 3]; NaN where not measured.
            groups: Group of each sample; samples of a group are held out together. By default each is its own
                group.
            decays: Weight decays to select from.
            steps: Gradient steps.
            learning_rate: Initial learning rate.
            seed: Random seed of weights and held-out groups.
        """
        generator = torch.Generator().manual_seed(seed)
        features, targets = features.detach().double(), targets.detach().double()
        observed = torch.isfinite(targets)
        targets = torch.where(observed, targets, 0.0)
        std = features.std(0, correction=0)
        is_constant = std < 1e-9
        self.mean.copy_(features.mean(0))
        self.scale.copy_(torch.where(is_constant, _CONSTANT_SCALE, std))
        x = (features - self.mean) / self.scale
        self.low.copy_(torch.where(is_constant, 0.0, x.min(0).values))
        self.high.copy_(torch.where(is_constant, 0.0, x.max(0).values))
        self.bound.copy_((_BOUND_MARGIN * targets.abs().max(0).values).clamp_max(_MAX_LOG_FACTOR))

        held_out = self._assign_held_out(len(x) if groups is None else groups, generator)
        weights, biases = self._init_parameters(len(decays), generator)
        sample_weights = (~held_out[..., None] & observed).float()
        sample_weights = (sample_weights / sample_weights.sum(1, keepdim=True).clamp_min(1.0)).repeat(
            len(decays), 1, 1
        )
        sample_weights = sample_weights * torch.tensor(_TARGET_WEIGHTS)
        decay = torch.tensor(decays).repeat_interleave(self.members)[:, None, None]
        data = x.float(), targets.float(), self.bound.float()

        def loss() -> Tensor:
            prediction = _forward_committee(data[0], weights, biases, data[2])
            errors = nn.functional.huber_loss(
                prediction, data[1].expand_as(prediction), reduction="none", delta=_HUBER_DELTA
            )
            return (errors * sample_weights).sum()

        def decay_weights(rate: float) -> None:
            for weight in weights:
                weight.mul_(1.0 - rate * decay)

        minimize_adam(
            [*weights, *biases], loss, steps=steps, learning_rate=learning_rate, after_step=decay_weights
        )
        with torch.no_grad():
            output = _forward_committee(data[0], weights, biases, data[2]).unflatten(
                0, (len(decays), self.members)
            )
            # Prediction of the member that was trained without the sample, [decays, N, 3].
            held_out_output = (output * held_out[None, ..., None]).sum(1).double()
            best = self._select_decay(held_out_output, targets, observed)
            selected = slice(best * self.members, (best + 1) * self.members)
            for parameter, trained in zip([*self.weights, *self.biases], [*weights, *biases], strict=True):
                parameter.copy_(trained[selected])

    def _assign_held_out(self, groups: int | Sequence[object], generator: torch.Generator) -> Tensor:
        """Held-out samples of each member, bool [members, N]; each sample is held out by one member."""
        names = range(groups) if isinstance(groups, int) else groups
        index_of = {name: index for index, name in enumerate(dict.fromkeys(names))}
        fold = torch.randperm(len(index_of), generator=generator) % self.members
        return fold[[index_of[name] for name in names]] == torch.arange(self.members)[:, None]

    def _init_parameters(
        self, num_copies: int, generator: torch.Generator
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Initial weights, the same for each decay; the last layer is small, so initial outputs are near
        0.
        """
        weights = [
            torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[1])
            for parameter in self.weights
        ]
        weights[-1] *= 0.1
        biases = [torch.zeros(parameter.shape) for parameter in self.biases]
        return (
            [tensor.repeat(num_copies, 1, 1).requires_grad_() for tensor in weights],
            [bias.repeat(num_copies, 1, 1).requires_grad_() for bias in biases],
        )

    def _select_decay(self, predictions: Tensor, targets: Tensor, observed: Tensor) -> int:
        """Index of the decay with the lowest held-out latency error; sets the shrinkage of each target."""
        count = observed.sum(0).clamp_min(1)
        factors = torch.tensor(_SHRINKAGE_FACTORS, dtype=torch.float64)[:, None, None, None]
        errors = ((factors * predictions - targets).abs() * observed).sum(2) / count  # [factors, decays, 3]
        best = int(errors[0, :, 0].argmin())
        self.share.copy_(factors.flatten()[errors[:, best].argmin(0)])
        return best


def _forward_committee(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], bound: Tensor
) -> Tensor:
    """Outputs of all members for scaled and clamped features, [members, n, 3]."""
    hidden = x.expand(len(weights[0]), -1, -1)
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        hidden = torch.baddbmm(bias, nn.functional.silu(hidden) if index else hidden, weight)
    return bound * torch.tanh(hidden / bound.clamp_min(1e-9))
