# %% [markdown]
# # Prune a model until it meets a latency budget
#
# You have a vision transformer and a latency budget, and you want to know how many tokens the model may keep.
# This tutorial chains two parts of SparseFlow: `sparseflow.pruning` removes tokens from the model, and
# `sparseflow.latency` predicts the latency of every candidate from measurements of the dense model. Only the
# selected candidate has to be trained.
#
# The input is a photograph that scikit-learn contains. The tutorial needs `pip install
# 'sparseflow[pruning,latency]' matplotlib`.

# %%
import logging
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnxruntime
import torch
from sklearn.datasets import load_sample_image

from sparseflow.latency import CollectionConfig, collect, evaluate, extract, predict, train
from sparseflow.pruning import VideoViT, compact

logging.getLogger("sparseflow").setLevel(logging.ERROR)  # hides the note about other work on this machine
out_dir = Path(tempfile.mkdtemp())

photo = load_sample_image("flower.jpg")[:416:2, 112:528:2] / 127.5 - 1.0  # 208 x 208 pixels
clip = (
    torch.from_numpy(photo).float().permute(2, 0, 1)[None, None]
)  # [batch, frames, channels, height, width]

# %% [markdown]
# ## Candidates
#
# Every candidate keeps another share of the tokens after its first block, those that receive most attention.
# Which tokens these are depends on the image, but their number does not. Therefore `compact` returns a model
# whose later blocks compute only the kept tokens. The latency of this model does not depend on its weights,
# so no candidate is trained yet.


# %%
def export(keep: float) -> Path:
    """Write the compact model that keeps a share of the tokens, and check its logits."""
    torch.manual_seed(0)
    pruning = {"selector": "attention", "stages": {1: keep}}
    model = VideoViT(
        208, 1, 1000, 192, 6, 3, 4.0, 16, use_ast_prune=keep < 1.0, ast_cfg=pruning, pool="cls"
    ).eval()
    path = out_dir / f"keep_{round(100 * keep)}.onnx"
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # the exporter warns about checks of shapes
        torch.onnx.export(
            torch.nn.Sequential(compact(model)), (clip,), path, input_names=["clip"], dynamo=False
        )
        expected = model(clip).numpy()
    (logits,) = onnxruntime.InferenceSession(path).run(None, {"clip": clip.numpy()})
    assert np.abs(logits - expected).max() < 1e-4
    return path


models = {keep: export(keep) for keep in (1.0, 0.75, 0.5)}
print(f"{len(models)} models exported, with the logits of the models before compaction")

# %% [markdown]
# ## Measure the dense model, predict the candidates
#
# Only the kernels of the dense model are measured. The predictor learns from them how the latency of a kernel
# depends on its shapes.

# %%
extract(models[1.0], out_dir / "kernels", check=False)
config = CollectionConfig(
    kernels=[out_dir / "kernels"], models=[models[1.0]], levels=[0.0], rounds=1, loops=5, min_time_s=0.1
)
predictor = train([collect(config, out_dir / "measured").path], kind="ratio")
predictions = {keep: predict(path, predictor) for keep, path in models.items()}
for keep, prediction in predictions.items():
    print(f"{keep:4.0%} of the tokens: predicted {prediction.mean_ms:.1f} ms")

# %% [markdown]
# ## Select a candidate and check it
#
# The budget is 70 % of the latency of the dense model. The candidate with most tokens within the budget is
# selected, and only this one is measured.

# %%
budget_ms = 0.7 * predictions[1.0].mean_ms
selected = max(keep for keep, prediction in predictions.items() if prediction.mean_ms <= budget_ms)
row = evaluate([models[selected]], predictor, rounds=1, min_time_s=0.1).rows[0]
print(f"selected: {selected:.0%}, predicted {row.predicted_ms:.1f} ms, measured {row.measured_ms:.1f} ms")
assert row.in_interval

# %% [markdown]
# The chart shows the predicted latency of every candidate, the budget, and the measured latency of the
# selected one.

# %%
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
axes.plot(
    [100 * keep for keep in predictions], [prediction.mean_ms for prediction in predictions.values()],
    marker="o", label="predicted",
)  # fmt: skip
axes.plot(100 * selected, row.measured_ms, "x", color="black", markersize=10, label="measured")
axes.axhline(budget_ms, color="gray", linestyle="--", label="budget")
axes.set(xlabel="tokens kept, %", ylabel="latency, ms", ylim=(0, None))
axes.legend()
plt.show()

# %% [markdown]
# ## Your own model
#
# Replace `VideoViT(...)` by `build_from_pretrained("DIRECTORY", num_frames=1, num_classes=1000, ...)` of
# `sparseflow.pruning` with the directory of a Hugging Face ViT or VideoMAE, and `clip` by your images or
# clips.
#
# ## What to read next
#
# - [Prune your ViT](../how-to/prune-your-vit.md): train the selected candidate on your data
# - [Train a latency predictor](../how-to/train-a-latency-predictor.md) with more networks and under load
# - [How pruning works](../explanation/pruning.md), and [how the prediction works](../explanation/latency.md)
