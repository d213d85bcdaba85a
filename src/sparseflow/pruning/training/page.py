"""Report page of a training: losses, accuracy and sparsity."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from sparseflow.core.report import Figure, Page, plot_frames
from sparseflow.core.training.history import read_history, smooth_curve
from sparseflow.pruning.data.datasets import VideoDataset
from sparseflow.pruning.model.video_vit import VideoViT

PAGE_FILE = "report.html"
_NUM_CLIPS = 3
"""Clips in the picture of kept tokens."""
_MAX_FRAMES, _MAX_SIDE = 8, 112
"""Most frames of a clip, and most pixels per side of a frame, in the picture of kept tokens."""

_SPARSITY = {
    "tokens": "sparsity_token",
    "heads": "sparsity_head",
    "channels": "sparsity_ch",
    "blocks": "sparsity_block",
}


def write_training_page(
    out_dir: Path | str,
    environment: Mapping[str, Any] | None = None,
    *,
    model: VideoViT | None = None,
    data: VideoDataset | None = None,
) -> Path:
    """Write `report.html` of a training and return its path.

    Args:
        out_dir: Directory of the training.
        environment: Environment of the training, from `collect_environment`.
        model: Trained model in evaluation mode; its kept tokens are drawn on clips of `data`.
        data: Dataset of the training.

    Raises:
        FileFormatError: The history is damaged.
    """
    root = Path(out_dir)
    rows = list(read_history(root))
    train = [row for row in rows if row["kind"] == "train"]
    test = [row for row in rows if row["kind"] == "test"]
    accuracy = f"{test[-1]['video_top1']:.2%} top-1 accuracy over videos" if test else "not evaluated yet"
    page = Page(
        "VideoViT training",
        f"After {train[-1]['step'] if train else 0} steps: {accuracy}.",
        environment=environment,
        reproduce="sparseflow pruning train --config settings.json --out …",
    )
    if model is not None and data is not None:
        # A generator of its own, because a loader draws a seed from the global one.
        loader = DataLoader(data.test, batch_size=_NUM_CLIPS, generator=torch.Generator())
        kept_tokens = plot_kept_tokens(model, next(iter(loader))["clip"])
        if kept_tokens is not None:
            page.section("Kept tokens")
            page.figure(kept_tokens)
    page.section("Training")
    losses = {name: smooth_curve(train, name) for name in ("loss", "task")}
    page.curves("Training loss", losses, x="step", y="loss")
    test_curve = [float(row["step"]) for row in test], [float(row["video_top1"]) for row in test]
    curves = {"training clips": smooth_curve(train, "accuracy"), "test videos": test_curve}
    page.curves("Accuracy", curves, x="step", y="top-1 accuracy")
    sparsity = {name: smooth_curve(train, key) for name, key in _SPARSITY.items()}
    page.curves("Sparsity", sparsity, x="step", y="fraction removed")
    page.section("Epochs")
    columns = {"epoch": "epoch", "clip_top1": "clip accuracy", "video_top1": "video accuracy", "loss": "loss"}
    sparsity_columns = {key: f"sparsity of {name}" for name, key in _SPARSITY.items()}
    page.table(
        "Accuracy on test clips",
        [{"epoch": epoch, **row} for epoch, row in enumerate(test, start=1)],
        columns=columns | sparsity_columns,
        digits=dict.fromkeys(columns, 4) | dict.fromkeys(sparsity_columns, 3),
    )
    return page.write(root / PAGE_FILE)


def plot_kept_tokens(model: VideoViT, clips: torch.Tensor) -> Figure | None:
    """Plot clips with the tokens that the last stage of a model keeps; None if it keeps all tokens.

    Args:
        model: Model in evaluation mode.
        clips: Clips of the test set, [B, frames, C, H, W].
    """
    config = model.config
    device = next(model.parameters()).device
    with torch.inference_mode():
        _, info = model(clips.to(device), return_intermediate=True)
    selected = info["kept_tokens"].cpu()
    if selected.all():
        return None
    num_frames, height, width = config.grid
    visible = range(0, num_frames, -(-num_frames // _MAX_FRAMES))
    divisors = [step for step in range(1, config.patch_size + 1) if config.patch_size % step == 0]
    num_pixels = max(height, width) * config.patch_size
    step = next((step for step in divisors if num_pixels // step <= _MAX_SIDE), config.patch_size)
    frames = clips[:, :: config.tubelet_size, :, ::step, ::step][:, list(visible)].float()
    low, high = frames.amin((1, 2, 3, 4), True), frames.amax((1, 2, 3, 4), True)
    pixels = ((frames - low) / (high - low).clamp_min(1e-6)).permute(0, 1, 3, 4, 2)
    masks = selected.view(-1, num_frames, height, width)[:, list(visible)]
    return plot_frames(
        "Tokens of test clips",
        [clip[..., 0] if clip.shape[-1] != 3 else clip for clip in pixels.numpy()],
        list(masks.numpy()),
        caption="The last stage keeps the tokens of patches in full contrast; it removes the gray ones.",
    )
