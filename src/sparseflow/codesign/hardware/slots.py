"""Learnable chip types of slots (Gumbel-Softmax).

Notation: S slots, T chip types; alpha [S, T + 1] has rows that sum to 1, and its last column is "empty".

The cost of a slot is the expectation of the costs of the real types, sum_t alpha[s, t] * cost(type t), not
the cost of a chip with averaged specifications. With `hard` the forward pass uses one type per slot, and
gradients flow through the probabilities (straight-through estimator).

    Jang, Gu, Poole: Categorical Reparameterization with Gumbel-Softmax. ICLR 2017.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from sparseflow.codesign.hardware.chips import ChipType
from sparseflow.core.checks import check_at_least, check_one_of, check_positive

EMPTY = "empty"


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpectedSpecs:
    """Expected specifications of the slots, for display only.

    Attributes:
        peak_flops: FLOP/s at the fastest precision, [S].
        peak_bw: Bytes/s, [S].
        mem_gb: GB, [S].
        area_mm2: mm2, [S].
        tdp_w: W, [S].
    """

    peak_flops: Tensor
    peak_bw: Tensor
    mem_gb: Tensor
    area_mm2: Tensor
    tdp_w: Tensor


class ChipSlotConfig(nn.Module):
    """S slots that each contain a chip of some type, or no chip.

    Args:
        chips: The T chip types.
        num_slots: Number of slots, S.
        tau: Temperature of the Gumbel-Softmax; lower is closer to one type.
        hard: Whether the forward pass uses one type per slot.
        initial_chip: Name of the type that the initial logits favor (`"empty"` is one); none by default.
        initial_logit: Logit of that type; the others are 0.

    Raises:
        InputError: There are no types or slots, `tau` is not positive, or `initial_chip` is unknown.
    """

    def __init__(
        self,
        chips: Sequence[ChipType],
        num_slots: int,
        *,
        tau: float = 1.0,
        hard: bool = True,
        initial_chip: str | None = None,
        initial_logit: float = 2.0,
    ) -> None:
        super().__init__()
        check_at_least(1, num_chips=len(chips), num_slots=num_slots)
        check_positive(tau=tau)
        self.chips, self.num_slots, self.tau, self.hard = tuple(chips), num_slots, tau, hard
        logits = torch.zeros(num_slots, len(chips) + 1)
        if initial_chip is not None:
            names = [*(chip.name for chip in chips), EMPTY]
            check_one_of(names, initial_chip=initial_chip)
            logits[:, names.index(initial_chip)] = initial_logit
        self.logits = nn.Parameter(logits)

    def forward(self, generator: torch.Generator | None = None) -> tuple[Tensor, ExpectedSpecs]:
        """Sample the content of the slots.

        Args:
            generator: Random generator of the Gumbel noise; without it there is no noise.

        Returns:
            alpha [S, T + 1], one-hot with `hard`, and the expected specifications, with empty slots counted
            as 0.
        """
        logits = self.logits
        if generator is not None:
            uniform = torch.rand(logits.shape, generator=generator, dtype=torch.float64)
            noise = -torch.log(-torch.log(uniform.clamp(1e-12, 1.0 - 1e-12)))
            logits = logits + noise.to(logits)
        alpha = torch.softmax(logits / self.tau, dim=-1)
        if self.hard:
            one_hot = torch.zeros_like(alpha).scatter(-1, alpha.argmax(-1, keepdim=True), 1.0)
            alpha = one_hot + (alpha - alpha.detach())  # one-hot in the forward pass
        return alpha, self.expected_specs(alpha)

    def expected_specs(self, alpha: Tensor) -> ExpectedSpecs:
        """Compute the expected specifications."""
        specs = [
            [max(chip.peak_flops.values()), chip.peak_bw, chip.mem_gb, chip.area_mm2, chip.tdp_w]
            for chip in self.chips
        ]
        means = (alpha[:, :-1] @ torch.tensor(specs, dtype=alpha.dtype)).unbind(1)
        names = (field.name for field in fields(ExpectedSpecs))
        return ExpectedSpecs(**dict(zip(names, means, strict=True)))

    @property
    def probabilities(self) -> Tensor:
        """Probability that a hard sample selects each type, at any temperature, [S, T + 1]."""
        # The argmax of logits with Gumbel noise follows their softmax, at any temperature.
        return torch.softmax(self.logits, dim=-1)

    def decode(self) -> list[ChipType | None]:
        """Return the most likely type of each slot; None for an empty slot."""
        return [
            self.chips[index] if index < len(self.chips) else None
            for index in self.logits.argmax(-1).tolist()
        ]

    def count_loss(self, alpha: Tensor) -> Tensor:
        """Expected number of chips: sum over slots of 1 - alpha[:, empty]; a scalar."""
        return (1.0 - alpha[:, -1]).sum()

    def area_loss(self, alpha: Tensor) -> Tensor:
        """Expected total area, mm2; a scalar."""
        return self.expected_specs(alpha).area_mm2.sum()
