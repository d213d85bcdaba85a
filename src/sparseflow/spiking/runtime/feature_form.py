"""`FeatureForm`: how the network's tensors relate to the [T, N, C, H, W] of groups.

Groups run on feature maps. A linear layer or a one-dimensional convolution between spikes is a 1x1
convolution of maps with one row, so these layers and the neurons behind them run as groups, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparseflow.spiking.graph.fusion_matcher import FeatureKind

_RANKS: dict[FeatureKind, int] = {"map": 4, "vector": 2, "sequence": 3, "tokens": 3}


@dataclass(frozen=True)
class FeatureForm:
    """Form of a tensor in the network.

    Attributes:
        kind: "map" is [N, C, H, W], "vector" [N, C], "sequence" [N, C, L] and "tokens" [N, L, C], with a time
            axis in front unless `single_step`.
        single_step: The network runs one step at a time.
    """

    kind: FeatureKind = "map"
    single_step: bool = False

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return _RANKS[self.kind] + (not self.single_step)

    def to_maps(self, x: Tensor) -> Tensor:
        """Convert to [T, N, C, H, W]; a view."""
        return self.expand(x.unsqueeze(0) if self.single_step else x)

    def from_maps(self, x: Tensor) -> Tensor:
        """Convert from [T, N, C, H, W]; a view."""
        return self.reduce(x[0] if self.single_step else x)

    def expand(self, x: Tensor) -> Tensor:
        """Add the missing dimensions of [C, H, W] behind any others, such as those of a membrane; a view."""
        if self.kind == "vector":
            return x[..., None, None]
        if self.kind == "sequence":
            return x.unsqueeze(-2)
        return x.transpose(-1, -2).unsqueeze(-2) if self.kind == "tokens" else x

    def reduce(self, x: Tensor) -> Tensor:
        """Undo `expand`."""
        if self.kind == "vector":
            return x[..., 0, 0]
        if self.kind == "sequence":
            return x.squeeze(-2)
        return x.squeeze(-2).transpose(-1, -2) if self.kind == "tokens" else x
