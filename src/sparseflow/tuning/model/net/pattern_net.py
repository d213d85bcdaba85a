"""The pattern branch: from the cells of a sparse matrix to one vector.

Thirteen convolutions, by either of two plans that have equally many weights:

=========  ==========================================================================================
hdc        5x5; 3x3 dilated by 1, 2, 5; three of stride 2; 3x3 dilated by 1, 2, 5; three of stride 2
strided    5x5; twelve 3x3 of stride 2
=========  ==========================================================================================

`hdc` is AutoSparse's extractor with the dilations of the hybrid dilated convolution (Wang et al.,
"Understanding Convolution for Semantic Segmentation", WACV 2018): those of 1, 2, 5 together see every
coordinate around a site without gaps. `strided` is WACONet (Won et al., "WACO", ASPLOS 2023).

Every convolution is followed by a normalisation over the channels of each site, which knows neither batch nor
size, and ReLU; those that keep sites and channels add their input before ReLU. Each layer's features are
pooled over the sites; a small perceptron makes the result of all layers' or of the last one's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from sparseflow.errors import InputError
from sparseflow.tuning.model.net.coarsen import CELL_FEATURES, MOST, Cells
from sparseflow.tuning.model.net.sparse_conv import Batch, Sites, StridedConv2d, SubmanifoldConv2d, pool

Kind = Literal["hdc", "strided"]
Pooling = Literal["concat", "last"]

_STRIDE = 0
_BLOCK = (1, 2, 5, _STRIDE, _STRIDE, _STRIDE)
_PLANS: Mapping[str, tuple[int, ...]] = {"hdc": _BLOCK * 2, "strided": (_STRIDE,) * 12}
"""The 3x3 convolutions, by dilation."""

_KEPT = 2**21
"""Cells whose neighbours are remembered, in all patterns together; they take some 500 bytes each."""


@dataclass(frozen=True, kw_only=True)
class PatternConfig:
    """What a pattern branch is like.

    Attributes:
        kind: Which convolutions: `"hdc"` or `"strided"`.
        pooling: Which layers' features the result is made of: all, `"concat"`, or the `"last"`.
        channels: Features of a site in every layer.
        width: Length of the result.
        most_cells: Cells of a pattern at most, for `coarsen`.

    Raises:
        InputError: A field is none of these.
    """

    kind: Kind = "hdc"
    pooling: Pooling = "concat"
    channels: int = 32
    width: int = 128
    most_cells: int = MOST

    def __post_init__(self) -> None:
        for name, choices in (("kind", get_args(Kind)), ("pooling", get_args(Pooling))):
            if getattr(self, name) not in choices:
                raise InputError(f"`{name}` (={getattr(self, name)!r}) must be one of {', '.join(choices)}")
        for name in ("channels", "width", "most_cells"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InputError(f"`{name}` (={value!r}) must be a whole number of 1 or more")

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types; `from_dict` reads them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> PatternConfig:
        """What `to_dict` wrote.

        Raises:
            InputError: A field is missing, unknown or of a value that it cannot have.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(record, Mapping) or set(record) != names:
            found = ", ".join(sorted(map(str, record))) if isinstance(record, Mapping) else repr(record)
            raise InputError(f"a pattern branch has the fields {', '.join(sorted(names))}; found: {found}")
        return cls(**record)


class _Layer(nn.Module):
    """A convolution, normalised, with ReLU; with `residual`, its input is added before ReLU."""

    def __init__(self, conv: SubmanifoldConv2d | StridedConv2d, channels: int, *, residual: bool) -> None:
        super().__init__()
        self.conv = conv
        self.norm = nn.LayerNorm(channels)
        self.residual = residual

    def forward(self, features: Tensor, batch: Batch) -> tuple[Tensor, Batch]:
        if isinstance(self.conv, StridedConv2d):
            found, batch = self.conv(features, batch)
        else:
            found = self.conv(features, batch)
        found = self.norm(found)
        return torch.relu(found + features if self.residual else found), batch


class PatternNet(nn.Module):
    """Embeds patterns.

    Args:
        config: What it is like.
    """

    def __init__(self, config: PatternConfig) -> None:
        super().__init__()
        self.config = config
        channels = config.channels
        first = SubmanifoldConv2d(len(CELL_FEATURES), channels, 5)
        self.layers = nn.ModuleList([_Layer(first, channels, residual=False)])
        for dilation in _PLANS[config.kind]:
            strided = dilation == _STRIDE
            conv = (
                StridedConv2d(channels, channels)
                if strided
                else SubmanifoldConv2d(channels, channels, 3, dilation)
            )
            self.layers.append(_Layer(conv, channels, residual=not strided))
        # With the cells themselves, so that no others get their id meanwhile.
        self._known: OrderedDict[tuple[int, torch.device], tuple[Cells, Sites, Tensor]] = OrderedDict()
        pooled = 2 * channels * (len(self.layers) if config.pooling == "concat" else 1)
        self.head = nn.Sequential(
            nn.Linear(pooled, config.width), nn.ReLU(), nn.Linear(config.width, config.width)
        )

    def forward(self, cells: Sequence[Cells]) -> Tensor:
        """Embed a batch.

        Args:
            cells: Of each pattern; one without cells is embedded, too.

        Returns:
            Shape (batch, width), on the device of the weights.

        Raises:
            InputError: There is no pattern, or its cells are not what `coarsen` makes.
        """
        weight = self.layers[0].get_parameter("conv.weight")
        for one in cells:
            if one.features.shape != (len(one.coords), len(CELL_FEATURES)):
                raise InputError(
                    f"features of shape {one.features.shape} for {len(one.coords)} cells; expected "
                    f"{len(CELL_FEATURES)} each, as `coarsen` makes them"
                )
        known = [self._prepared(one, weight.device) for one in cells]
        batch = Batch([sites for sites, _ in known])
        features = torch.cat([given for _, given in known]).to(weight)
        pooled = []
        for layer in self.layers:
            features, batch = layer(features, batch)
            pooled.append(pool(features, batch))
        return self.head(torch.cat(pooled, 1) if self.config.pooling == "concat" else pooled[-1])

    def _prepared(self, cells: Cells, device: torch.device) -> tuple[Sites, Tensor]:
        """Sites and features of a pattern on a device; while training, kept for the next time."""
        key = (id(cells), device)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key][1:]
        with torch.inference_mode(False):  # it may be trained with later
            sites = Sites.of(torch.tensor(cells.coords, device=device), cells.grid)
            features = torch.tensor(cells.features, device=device)
        if self.training:
            self._known[key] = (cells, sites, features)
            while sum(len(each) for _, each, _ in self._known.values()) > max(_KEPT, len(sites)):
                self._known.popitem(last=False)
        return sites, features
