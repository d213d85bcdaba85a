"""Which chip each slot holds: logits over chip types and *empty*, drawn by Gumbel-Softmax.

Notation: S slots, T chip types; alpha [S, T + 1], rows add up to 1, the last column is *empty*.

Averaging specifications would make chips that nobody sells, so what a slot costs is the expectation of what
the real types cost: sum_t alpha[s, t] * cost(type t). With `hard` the forward pass sees one type and
gradients go through the probabilities (straight through).

    Jang, Gu, Poole: Categorical Reparameterization with Gumbel-Softmax. ICLR 2017.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparseflow.codesign.hardware.chips import ChipType
from sparseflow.errors import InputError

EMPTY = "empty"


@dataclass(frozen=True, kw_only=True, eq=False)
class Specs:
    """What slots hold on average: for people and logs, not for costs.

    Attributes:
        peak_flops: FLOP/s, [S].
        peak_bw: Bytes/s, [S].
        mem_gb: [S].
        area_mm2: [S].
        tdp_w: [S].
    """

    peak_flops: Tensor
    peak_bw: Tensor
    mem_gb: Tensor
    area_mm2: Tensor
    tdp_w: Tensor


class ChipSlotConfig(nn.Module):
    """S slots that each hold a chip of some type, or nothing.

    Args:
        chips: The T types.
        slots: S.
        tau: Temperature of the draw; lower is nearer to one type.
        hard: Whether the forward pass sees one type.
        first: Name of the type that slots lean to at first (`"empty"` is one); none by default.
        lean: By how much, in logits.

    Raises:
        InputError: No type, no slot, a temperature that is not positive, or an unknown `first`.
    """

    def __init__(
        self,
        chips: Sequence[ChipType],
        slots: int,
        *,
        tau: float = 1.0,
        hard: bool = True,
        first: str | None = None,
        lean: float = 2.0,
    ) -> None:
        super().__init__()
        if not chips or slots < 1 or not 0.0 < tau < math.inf:
            raise InputError(
                f"`chips` (={len(chips)}) and `slots` (={slots}) must be at least 1, `tau` (={tau}) above 0"
            )
        self.chips, self.slots, self.tau, self.hard = tuple(chips), slots, tau, hard
        logits = torch.zeros(slots, len(chips) + 1)
        if first is not None:
            names = [*(chip.name for chip in chips), EMPTY]
            if first not in names:
                raise InputError(f"`first` (={first!r}) must be one of: {', '.join(names)}")
            logits[:, names.index(first)] = lean
        self.logits = nn.Parameter(logits)

    def forward(self, generator: torch.Generator | None = None) -> tuple[Tensor, Specs]:
        """Draw what slots hold.

        Args:
            generator: What noise is drawn from; without one there is none, and alpha follows from the logits.

        Returns:
            alpha [S, T + 1] (one type each with `hard`, whether or not there is noise; see `probabilities`),
            and the specifications that slots have on average, empty ones counted as 0.
        """
        logits = self.logits
        if generator is not None:
            uniform = torch.rand(logits.shape, generator=generator, dtype=torch.float64)
            noise = -torch.log(-torch.log(uniform.clamp(1e-12, 1.0 - 1e-12)))
            logits = logits + noise.to(logits)
        alpha = torch.softmax(logits / self.tau, dim=-1)
        if self.hard:
            one = torch.zeros_like(alpha).scatter(-1, alpha.argmax(-1, keepdim=True), 1.0)
            alpha = one + (alpha - alpha.detach())  # exactly one type in the forward pass
        return alpha, self.specs(alpha)

    def specs(self, alpha: Tensor) -> Specs:
        """Expected specifications, each [S]."""

        def mean(name: str) -> Tensor:
            values = [getattr(chip, name) for chip in self.chips]
            return alpha[:, :-1] @ torch.tensor(values, dtype=alpha.dtype)

        return Specs(
            peak_flops=mean("peak_flops"), peak_bw=mean("peak_bw"), mem_gb=mean("mem_gb"),
            area_mm2=mean("area_mm2"), tdp_w=mean("tdp_w"),
        )  # fmt: skip

    @property
    def probabilities(self) -> Tensor:
        """How likely a hard draw gives each slot each type, whatever the temperature, [S, T + 1]."""
        # The largest of logits with Gumbel noise, divided by whatever, is distributed as their softmax.
        return torch.softmax(self.logits, dim=-1)

    def decode(self) -> list[ChipType | None]:
        """The type that each slot most likely holds; None where that is to be empty."""
        return [self.chips[at] if at < len(self.chips) else None for at in self.logits.argmax(-1).tolist()]

    def hold(self, chosen: Sequence[str | None], lean: float = 4.0) -> None:
        """Set logits so that slots most likely hold these types.

        Args:
            chosen: A name, or None for empty, for each slot.
            lean: Logit of the chosen over the others.

        Raises:
            InputError: As many names as slots are needed, each of a type that is there.
        """
        names = [chip.name for chip in self.chips]
        unknown = sorted({str(name) for name in chosen if name is not None and name not in names})
        if len(chosen) != self.slots or unknown:
            raise InputError(
                f"`chosen` has {len(chosen)} names (unknown: {', '.join(unknown) or 'none'}); expected "
                f"{self.slots}, each one of {', '.join(names)}, or None"
            )
        with torch.no_grad():
            self.logits.zero_()
            for slot, name in enumerate(chosen):
                self.logits[slot, len(names) if name is None else names.index(name)] = lean

    def count_loss(self, alpha: Tensor) -> Tensor:
        """Chips that are there: sum over slots of 1 - alpha[:, empty]; a scalar."""
        return (1.0 - alpha[:, -1]).sum()

    def area_loss(self, alpha: Tensor) -> Tensor:
        """Expected area, mm2; a scalar."""
        return self.specs(alpha).area_mm2.sum()
