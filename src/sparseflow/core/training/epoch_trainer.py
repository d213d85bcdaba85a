"""A training that someone else drives: epochs one at a time, with one more term in its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from sparseflow.core.layers import LayeredModel, LayerNode


class EpochTrainer(Protocol):
    """A model that is being trained, which can list its layers.

    Attributes:
        epochs: Epochs that there are.
    """

    epochs: int

    def train_epoch(
        self, extra_loss: Callable[[], Tensor] | None, progress: Callable[[str, float], None] | None = None
    ) -> Mapping[str, float]:
        """Train for one epoch more.

        Args:
            extra_loss: One more term of the loss, of each step.
            progress: Called with (what was done, fraction of the epoch).

        Returns:
            Means over the epoch's steps, such as `"loss"`.
        """
        ...

    def evaluate_accuracy(self) -> float:
        """On data that is not trained on, from 0 to 1, as the model will be used."""
        ...

    def differentiable_layers(self, batch: int) -> Sequence[LayerNode]:
        """Layers, for batches of this size, with figures that have gradients to what makes them so large."""
        ...

    def export_model(self) -> LayeredModel:
        """The model as it will be used, real sparsity and all; a copy."""
        ...

    def save(self, path: Path) -> None:
        """Write the model as it will be used to a file of safetensors."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes: tensors, numbers, texts, lists and dictionaries of these."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        ...
