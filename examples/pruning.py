# %% [markdown]
# # Prune the tokens of a video transformer
#
# A video transformer computes the same work for every patch of every frame, although most patches show a
# background that does not change. SparseFlow scores the patches, keeps a fixed share of them, and removes the
# others from the model, which becomes faster.
#
# This tutorial trains a small transformer that recognizes in which of eight directions a handwritten digit
# moves. The digits are those of scikit-learn. The tutorial needs `pip install 'sparseflow[pruning]'
# matplotlib`.

# %%
import tempfile

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.utils.data import DataLoader

from sparseflow.pruning import compact, load_video_dataset, profile_video_vit, read_config, train

# %% [markdown]
# ## Train with a quarter of the tokens
#
# `moving_digits` is a shipped configuration. `stages: {0: 0.25}` keeps a quarter of the tokens from block 0
# on. The default selector scores a token by how much its patch changes over time and differs from its
# neighbors. With `softness: 0`, tokens are dropped during training, too, so that training is faster.

# %%
config = read_config(
    "moving_digits",
    {
        "ast.stages": {0: 0.25}, "ast.softness": 0, "train.softness_end": None,
        "data.clutter": 0, "data.noise": 0, "data.test_clips": 512, "train.epochs": 3,
    },
)  # fmt: skip
result = train(config, tempfile.mkdtemp())
model = result.model
print(f"{model.config.num_tokens} tokens per clip, {1 - result.stats['sparsity_token']:.0%} of them kept")
assert result.accuracy is not None and result.accuracy.clip_top1 > 0.5
print(f"accuracy on clips of other digits: {result.accuracy.clip_top1:.0%}; by guessing: 12.5%")

# %% [markdown]
# ## Remove the other tokens from the model
#
# The trained model only masks the other tokens, so that all of them can be inspected. `compact` returns a
# model that does not compute them. Its class scores are the same.

# %%
batch = next(iter(DataLoader(load_video_dataset(config).test, batch_size=8)))
fast = compact(model)
with torch.inference_mode():
    logits, info = model(batch["clip"], return_intermediate=True)
    difference = (fast(batch["clip"]) - logits).abs().max() / logits.abs().max()
print(f"largest difference of the scores: {difference:.0e} of the largest score")
assert difference < 1e-5

# %% [markdown]
# ## Measure the speed
#
# `profile_video_vit` times the model without pruning, with masks, and compact, in turns. Masks do not save
# time, because they compute all tokens.

# %%
profile = profile_video_vit(model, batch_size=64)
for name in profile.comparison.times_ms:
    print(f"{name}: {profile.clips_per_s(name):.0f} clips/s, {profile.flops[name] / 1e6:.0f} MFLOP per clip")
print(f"speed-up of the compact model: {profile.comparison.speedup('compact').median:.1f}x")

# %% [markdown]
# The picture shows every second frame of two clips. Patches whose tokens are kept have the original
# brightness; the other patches are dimmed. The kept patches lie on the path of the digit. A digit that leaves
# on one side enters on the other.

# %%
frames, side, _ = model.config.grid
patch = np.ones((model.config.patch_size, model.config.patch_size))
figure, axes = plt.subplots(2, frames, figsize=(7, 3.6), layout="constrained")
for row, clip, selected in zip(axes, batch["clip"], info["kept_tokens"], strict=False):
    for axis, frame, tokens in zip(row, clip[:: model.config.tubelet_size, 0], selected, strict=True):
        is_kept = np.kron(tokens.numpy().reshape(side, side), patch)
        axis.imshow((1 - frame.numpy()) * np.where(is_kept, 1.0, 0.7), cmap="gray", vmin=0, vmax=1)
        axis.set(xticks=[], yticks=[])
plt.show()

# %% [markdown]
# ## Your own videos
#
# - Your videos: replace `"moving_digits"` by a YAML file with `data: {kind: ucf101, ...}`, which reads video
#   files with a list of labels.
# - Your transformer: set `pretrained: DIRECTORY` in this file to start from a Hugging Face ViT or VideoMAE.
#
# ## What to read next
#
# - [Prune your ViT](../how-to/prune-your-vit.md): your videos, your weights, a latency budget, export to ONNX
# - [How pruning works](../explanation/pruning.md), and [what it gains and loses](../benchmarks/pruning.md)
# - [Prune a model until it meets a latency budget](prune_then_predict.md)
