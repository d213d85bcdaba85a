"""Protocol of a training that an outer loop drives one epoch at a time, with an additional loss term."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from sparseflow.core.layers import LayeredModel, LayerNode
    from sparseflow.core.progress import Progress


class EpochTrainer(Protocol):
    """A model in training whose layers can be listed.

    Attributes:
        epochs: Number of epochs of the full training.
    """

    epochs: int

    def train_epoch(
        self, extra_loss: Callable[[], Tensor] | None, progress: Progress | None = None
    ) -> Mapping[str, float]:
        """Train for one more epoch.

        Args:
            extra_loss: Scalar that is added to the loss of each step.
            progress: Called with the fraction of the epoch.

        Returns:
            Means of the metrics over the epoch's steps, such as `"loss"`.
        """
        ...

    def evaluate_accuracy(self) -> float:
        """Accuracy on held-out data, from 0 to 1, of the model as it will be deployed."""
        ...

    def differentiable_layers(self, batch_size: int) -> Sequence[LayerNode]:
        """Layers for batches of `batch_size` samples, with FLOPs and bytes differentiable in the gates."""
        ...

    def export_model(self) -> LayeredModel:
        """A copy of the model as it will be deployed, with its sparsity applied."""
        ...

    def save(self, path: Path) -> None:
        """Write the exported model to a safetensors file."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Training state: tensors, numbers, strings, lists and dicts of these."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state_dict`."""
        ...
