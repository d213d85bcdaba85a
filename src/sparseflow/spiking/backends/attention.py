"""Sizes of attention between spikes, without softmax: `(q @ k.T) @ v`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MAX_HEAD_CHANNELS = 128
"""Largest number of channels of a head."""

MAX_EXACT_INTEGER = 2048
"""fp16 represents all integers up to this one."""


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Sizes of a product `first @ second @ third` of [T, N, H, rows, columns].

    Attributes:
        steps: T.
        images: N.
        heads: H.
        tokens: Tokens of the query.
        key_tokens: Tokens of key and value.
        channels: Channels of a head in query and key.
        value_channels: Channels of a head in value and output.
        rows_are_tokens: Whether the rows of the product are tokens, so that `first` is the query; otherwise
            its columns are, and `third` is the query, transposed.
    """

    steps: int
    images: int
    heads: int
    tokens: int
    key_tokens: int
    channels: int
    value_channels: int
    rows_are_tokens: bool

    @classmethod
    def from_factors(
        cls, first: Tensor, second: Tensor, third: Tensor, *, rows_are_tokens: bool
    ) -> AttentionShape:
        """Return the sizes for one of the two readings of a product."""
        steps, images, heads, rows, inner = first.shape
        other, columns = third.shape[-2:]
        sizes = (rows, other, inner, columns) if rows_are_tokens else (columns, inner, other, rows)
        return cls(
            steps=steps, images=images, heads=heads, tokens=sizes[0], key_tokens=sizes[1], channels=sizes[2],
            value_channels=sizes[3], rows_are_tokens=rows_are_tokens,
        )  # fmt: skip

    @property
    def summary_size(self) -> int:
        """Elements of the inner product of keys and values, of one head."""
        return self.channels * self.value_channels

    def get_unsupported_reason(self, max_values: tuple[int, int, int]) -> str | None:
        """Return why the kernel cannot run (a sentence), or None.

        Args:
            max_values: Largest value in each factor.
        """
        if max(self.channels, self.value_channels) > MAX_HEAD_CHANNELS:
            return f"a head has more than {MAX_HEAD_CHANNELS} channels"
        query, key, value = (
            max_values if self.rows_are_tokens else (max_values[2], max_values[1], max_values[0])
        )
        if max(query, key * value * self.key_tokens) > MAX_EXACT_INTEGER:
            return f"sums over {self.key_tokens} tokens are not exact in float16"
        return None

    def to_product(self, x: Tensor) -> Tensor:
        """View [..., N, tokens, H, channels] in the product's order, [..., N, H, rows, columns]."""
        rows = x.transpose(-2, -3)
        return rows if self.rows_are_tokens else rows.transpose(-1, -2)
