"""Distillation: the class probabilities of a trained model as targets."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sparseflow.errors import InputError
from sparseflow.pruning.compaction.saved_model import load_model
from sparseflow.pruning.config import DistillationConfig
from sparseflow.pruning.model.video_vit import VideoViT


class Distillation:
    """Loss to the class probabilities of a teacher.

    Args:
        config: Teacher, weight and temperature.
        student: Model in training.
        device: Device of the training.

    Raises:
        InputError: The teacher does not exist, or has other classes or clips than the student.
        FileFormatError: The teacher's file is damaged.
    """

    def __init__(self, config: DistillationConfig, student: VideoViT, device: torch.device) -> None:
        self.config = config
        self.teacher = load_model(config.teacher, device=device).requires_grad_(False)
        for name in ("num_classes", "clip_shape"):
            expected, value = getattr(student.config, name), getattr(self.teacher.config, name)
            if value != expected:
                raise InputError(
                    f"the teacher {config.teacher} has the {name} {value}, and the model {expected}; train a "
                    "teacher with the same dataset, `img_size` and `num_frames`"
                )

    def compute_loss(self, clips: Tensor, logits: Tensor) -> Tensor:
        """Compute the KL divergence from the teacher's to the student's probabilities, a scalar.

        It is multiplied by the squared temperature, so that its gradient does not depend on it.

        Args:
            clips: [B, T, C, H, W].
            logits: Logits of the student, [B, num_classes].
        """
        temperature = self.config.temperature
        with torch.no_grad():
            targets = self.teacher(clips)
        divergence = functional.kl_div(
            functional.log_softmax(logits.float() / temperature, 1),
            functional.log_softmax(targets.float() / temperature, 1),
            reduction="batchmean",
            log_target=True,
        )
        return temperature**2 * divergence
