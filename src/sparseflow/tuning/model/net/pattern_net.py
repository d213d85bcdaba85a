"""Pattern branch of AutoSparse Net: embeds the cells of a sparse matrix.

There are two variants with thirteen convolutions and equally many weights:

=========  ==========================================================================================
hdc        5x5; 3x3 dilated by 1, 2, 5; three of stride 2; 3x3 dilated by 1, 2, 5; three of stride 2
strided    5x5; twelve 3x3 of stride 2
=========  ==========================================================================================

`hdc` is AutoSparse's feature extractor with the dilations of hybrid dilated convolution (Wang et al.,
"Understanding Convolution for Semantic Segmentation", WACV 2018): dilations 1, 2, 5 together cover every
coordinate around a site. `strided` is WACONet (Won et al., "WACO", ASPLOS 2023).

Every convolution is followed by layer normalization over the channels of each site and ReLU. Convolutions
that keep sites and channels have a residual connection before ReLU. The features of each layer are pooled
over the sites; an MLP maps the pooled features of all layers or of the last layer to the embedding.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from sparseflow.core.config import StrictModel
from sparseflow.errors import InputError
from sparseflow.tuning.model.net.coarsen import CELL_FEATURES, MAX_CELLS, Cells
from sparseflow.tuning.model.net.sparse_conv import (
    ActiveSites,
    SiteBatch,
    StridedConv2d,
    SubmanifoldConv2d,
    pool,
)

_STRIDE = 0
_BLOCK = (1, 2, 5, _STRIDE, _STRIDE, _STRIDE)
_PLANS: Mapping[str, tuple[int, ...]] = {"hdc": _BLOCK * 2, "strided": (_STRIDE,) * 12}
"""Dilations of the 3x3 convolutions."""

_MAX_CACHED_CELLS = 2**21
"""Cells of all patterns whose kernel maps are cached, about 500 bytes each."""


class PatternConfig(StrictModel):
    """Configuration of the pattern branch.

    Attributes:
        kind: Convolutions: `"hdc"` or `"strided"`.
        pooling: Pooled layers: `"concat"` for all, or `"last"`.
        channels: Features of a site in every layer.
        width: Length of the embedding.
        max_cells: Maximum number of cells of a pattern, for `coarsen`.
    """

    kind: Literal["hdc", "strided"] = "hdc"
    pooling: Literal["concat", "last"] = "concat"
    channels: int = Field(default=32, ge=1)
    width: int = Field(default=128, ge=1)
    max_cells: int = Field(default=MAX_CELLS, ge=1)


class _ConvLayer(nn.Module):
    """Convolution, normalization and ReLU, optionally with a residual connection before ReLU."""

    def __init__(self, conv: SubmanifoldConv2d | StridedConv2d, channels: int, *, residual: bool) -> None:
        super().__init__()
        self.conv = conv
        self.norm = nn.LayerNorm(channels)
        self.residual = residual

    def forward(self, features: Tensor, batch: SiteBatch) -> tuple[Tensor, SiteBatch]:
        if isinstance(self.conv, StridedConv2d):
            outputs, batch = self.conv(features, batch)
        else:
            outputs = self.conv(features, batch)
        outputs = self.norm(outputs)
        return torch.relu(outputs + features if self.residual else outputs), batch


class PatternNet(nn.Module):
    """Embeds sparsity patterns.

    Args:
        config: Configuration.
    """

    def __init__(self, config: PatternConfig) -> None:
        super().__init__()
        self.config = config
        channels = config.channels
        first = SubmanifoldConv2d(len(CELL_FEATURES), channels, 5)
        self.layers = nn.ModuleList([_ConvLayer(first, channels, residual=False)])
        for dilation in _PLANS[config.kind]:
            strided = dilation == _STRIDE
            conv = (
                StridedConv2d(channels, channels)
                if strided
                else SubmanifoldConv2d(channels, channels, 3, dilation)
            )
            self.layers.append(_ConvLayer(conv, channels, residual=not strided))
        # The cells are stored, too, so that their id is not reused.
        self._site_cache: OrderedDict[tuple[int, torch.device], tuple[Cells, ActiveSites, Tensor]] = (
            OrderedDict()
        )
        pooled = 2 * channels * (len(self.layers) if config.pooling == "concat" else 1)
        self.head = nn.Sequential(
            nn.Linear(pooled, config.width), nn.ReLU(), nn.Linear(config.width, config.width)
        )

    def forward(self, cells: Sequence[Cells]) -> Tensor:
        """Embed a batch of patterns.

        Args:
            cells: Cells of each pattern; a pattern may have no cells.

        Returns:
            Shape [batch, width], on the device of the weights.

        Raises:
            InputError: `cells` is empty, or its features are not those of `coarsen`.
        """
        weight = self.layers[0].get_parameter("conv.weight")
        for item in cells:
            if item.features.shape != (len(item.coords), len(CELL_FEATURES)):
                raise InputError(
                    f"features of shape {item.features.shape} for {len(item.coords)} cells; expected "
                    f"{len(CELL_FEATURES)} each, as `coarsen` returns them"
                )
        prepared = [self._prepare(item, weight.device) for item in cells]
        batch = SiteBatch([sites for sites, _ in prepared])
        features = torch.cat([cell_features for _, cell_features in prepared]).to(weight)
        pooled = []
        for layer in self.layers:
            features, batch = layer(features, batch)
            pooled.append(pool(features, batch))
        return self.head(torch.cat(pooled, 1) if self.config.pooling == "concat" else pooled[-1])

    def _prepare(self, cells: Cells, device: torch.device) -> tuple[ActiveSites, Tensor]:
        """Return sites and features of a pattern on a device; cached during training."""
        key = (id(cells), device)
        if key in self._site_cache:
            self._site_cache.move_to_end(key)
            return self._site_cache[key][1:]
        with torch.inference_mode(False):  # training may use it later
            sites = ActiveSites.from_coords(torch.tensor(cells.coords, device=device), cells.grid)
            features = torch.tensor(cells.features, device=device)
        if self.training:
            self._site_cache[key] = (cells, sites, features)
            while sum(len(entry) for _, entry, _ in self._site_cache.values()) > max(
                _MAX_CACHED_CELLS, len(sites)
            ):
                self._site_cache.popitem(last=False)
        return sites, features
