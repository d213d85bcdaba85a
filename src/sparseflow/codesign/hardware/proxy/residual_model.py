"""What is learned on top of the analytic model: by which factor a measurement differs from it.

A committee of small perceptrons predicts log(measured / analytic) of latency, memory and power. Each member
leaves out some configurations; those say how strongly weights must decay, and by how much what is learned is
better shrunk, down to nothing. Far from what was measured it can do no harm: features are held within the
range they had there, what comes out is bounded by what was seen there, and it fades to nothing with the
distance from that range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sparseflow.codesign.hardware.proxy.analytic import descend
from sparseflow.codesign.hardware.proxy.features import FEATURES

TARGETS = ("lat_ms", "mem_mb", "power_w")

_MARGIN = 1.25
"""What is learned may go beyond what was seen by this factor, of the logarithm."""

_MOST = math.log(30.0)
_CLOSE = 0.03
"""Errors below this count squared, larger ones as they are: what is sought is a small median."""

_SAME = 0.25
"""Scale of a feature that never changed: leaving its value by 1 leaves nothing of what was learned."""

_WEIGHTS = (1.0, 0.1, 0.1)
"""Of targets: latency is what counts, and what is learned of the others must not disturb it."""

_SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
"""What may be left of what was learned, to choose from."""


class LayerProxyModel(nn.Module):
    """A committee of perceptrons with two hidden layers each; it says 0 until it has learned.

    Args:
        members: Perceptrons, whose mean counts; at least 2.
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
        """Logarithms of factors.

        Args:
            features: As `build_layer_features` makes them, [..., len(FEATURES)].

        Returns:
            For each of `TARGETS`, [..., 3]; within `bound`, and 0 far from what was measured.
        """
        x = (features.double() - self.mean) / self.scale
        beyond = torch.relu(self.low - x) + torch.relu(x - self.high)
        near = torch.exp(-beyond.square().sum(-1, keepdim=True))
        inside = torch.minimum(torch.maximum(x, self.low), self.high).reshape(-1, x.shape[-1])
        said = _said(inside, list(self.weights), list(self.biases), self.bound)
        return self.share * said.mean(0).reshape(*x.shape[:-1], len(TARGETS)) * near

    def learn(
        self,
        features: Tensor,
        targets: Tensor,
        groups: Sequence[object] | None = None,
        *,
        decays: Sequence[float] = (0.3, 1.0, 3.0, 10.0, 30.0),
        steps: int = 400,
        rate: float = 0.01,
        seed: int = 0,
    ) -> None:
        """Fit to what was measured; forgets what it knew.

        Args:
            features: [N, len(FEATURES)].
            targets: log(measured / analytic), [N, 3]; NaN where it was not measured.
            groups: What is left out together, N of them; by default each sample for itself.
            decays: Of weights, to choose from.
            steps: Of gradient descent.
            rate: Of learning, at first.
            seed: What weights, and what members leave out, are drawn from.
        """
        generator = torch.Generator().manual_seed(seed)
        features, targets = features.detach().double(), targets.detach().double()
        there = torch.isfinite(targets)
        targets = torch.where(there, targets, 0.0)
        spread = features.std(0, correction=0)
        same = spread < 1e-9
        self.mean.copy_(features.mean(0))
        self.scale.copy_(torch.where(same, _SAME, spread))
        x = (features - self.mean) / self.scale
        self.low.copy_(torch.where(same, 0.0, x.min(0).values))
        self.high.copy_(torch.where(same, 0.0, x.max(0).values))
        self.bound.copy_((_MARGIN * targets.abs().max(0).values).clamp_max(_MOST))

        left_out = self._left_out(len(x) if groups is None else groups, generator)
        weights, biases = self._drawn(len(decays), generator)
        learnt = (~left_out[..., None] & there).float()
        learnt = (learnt / learnt.sum(1, keepdim=True).clamp_min(1.0)).repeat(len(decays), 1, 1)
        learnt = learnt * torch.tensor(_WEIGHTS)
        decay = torch.tensor(decays).repeat_interleave(self.members)[:, None, None]
        single = x.float(), targets.float(), self.bound.float()

        def loss() -> Tensor:
            said = _said(single[0], weights, biases, single[2])
            off = nn.functional.huber_loss(said, single[1].expand_as(said), reduction="none", delta=_CLOSE)
            return (off * learnt).sum()

        def after(rate: float) -> None:
            for weight in weights:
                weight.mul_(1.0 - rate * decay)

        descend([*weights, *biases], loss, steps=steps, rate=rate, after=after)
        with torch.no_grad():
            said = _said(single[0], weights, biases, single[2]).unflatten(0, (len(decays), self.members))
            # What the member says that left it out, [decays, N, 3].
            unseen = (said * left_out[None, ..., None]).sum(1).double()
            best = self._chosen(unseen, targets, there)
            mine = slice(best * self.members, (best + 1) * self.members)
            for own, found in zip([*self.weights, *self.biases], [*weights, *biases], strict=True):
                own.copy_(found[mine])

    def _left_out(self, groups: int | Sequence[object], generator: torch.Generator) -> Tensor:
        """Which samples each member leaves out, bool [members, N]; each sample is left out by one."""
        names = range(groups) if isinstance(groups, int) else groups
        place = {name: at for at, name in enumerate(dict.fromkeys(names))}
        part = torch.randperm(len(place), generator=generator) % self.members
        return part[[place[name] for name in names]] == torch.arange(self.members)[:, None]

    def _drawn(self, times: int, generator: torch.Generator) -> tuple[list[Tensor], list[Tensor]]:
        """Weights to begin with, the same for each decay; the last ones are small, so that little is said."""
        weights = [
            torch.randn(own.shape, generator=generator) / math.sqrt(own.shape[1]) for own in self.weights
        ]
        weights[-1] *= 0.1
        biases = [torch.zeros(own.shape) for own in self.biases]
        return (
            [each.repeat(times, 1, 1).requires_grad_() for each in weights],
            [each.repeat(times, 1, 1).requires_grad_() for each in biases],
        )

    def _chosen(self, unseen: Tensor, targets: Tensor, there: Tensor) -> int:
        """The decay with the least error of latency where it was left out; sets the share of each target."""
        count = there.sum(0).clamp_min(1)
        shares = torch.tensor(_SHARES, dtype=torch.float64)[:, None, None, None]
        errors = ((shares * unseen - targets).abs() * there).sum(2) / count  # [shares, decays, 3]
        best = int(errors[0, :, 0].argmin())
        self.share.copy_(shares.flatten()[errors[:, best].argmin(0)])
        return best


def _said(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], bound: Tensor) -> Tensor:
    """What each perceptron says of features that are scaled and within the range, [members, n, 3]."""
    hidden = x.expand(len(weights[0]), -1, -1)
    for at, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        hidden = torch.baddbmm(bias, nn.functional.silu(hidden) if at else hidden, weight)
    return bound * torch.tanh(hidden / bound.clamp_min(1e-9))
