# %% [markdown]
# # Partition a vision transformer over several chips
#
# You have a model and several accelerator chips, and you want to know which chips to use, which layers to run
# on which chip, and how fast the result is. SparseFlow predicts the cost of each layer on each type of chip,
# selects chips, maps segments of layers to them, and places the chips. It then runs the partitioned model and
# compares its outputs.
#
# The model has the layers of a ViT-S/16 that drops half of its tokens in the fourth block, so that later
# blocks do less work than earlier ones. The input is two photographs that scikit-learn contains. The tutorial
# needs `pip install 'sparseflow[codesign,pruning]' matplotlib`.

# %%
import tempfile

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import Circle, Rectangle
from sklearn.datasets import load_sample_images

from sparseflow import codesign
from sparseflow.pruning import LayeredVideoViT, VideoViT, compact

photos = np.stack([photo[:224, :224] for photo in load_sample_images().images]) / 127.5 - 1.0
samples = torch.from_numpy(photos).float().permute(0, 3, 1, 2)[:, None]  # [batch, frame, channel, row, col]

torch.manual_seed(0)
pruning = {"selector": "attention", "stages": {3: 0.5}}
vit = VideoViT(224, 1, 1000, 384, 12, 6, 4.0, 16, use_ast_prune=True, ast_cfg=pruning)
model = LayeredVideoViT(compact(vit))

# %% [markdown]
# ## Layers and their cost
#
# A plan depends on the work, the memory and the outputs of each layer, but not on the values of the weights.

# %%
layers = model.describe_layers(batch_size=2)
print(f"{len(layers)} layers, {sum(layer.flops for layer in layers) / 1e9:.1f} GFLOP per batch")
for layer in layers[1], layers[7], layers[-2]:
    print(f"{layer.name}: {layer.flops / 1e9:.2f} GFLOP, sends {layer.traffic_out_bytes / 1e3:.0f} kB")

# %% [markdown]
# ## Choose chips and partition the model
#
# There are four slots, each for one of three chips of the shipped library or for none. `plan_design`
# minimizes a weighted sum of latency, energy, area, number of chips, and the distance of chips that
# communicate. It writes the plan and a report page. The strategy `"dp"` is dynamic programming, which gives
# each chip consecutive layers; the default, `"auto"`, also considers other mappings.

# %%
chips = ("npu-s", "npu-m", "npu-l")
hardware = codesign.HardwareConfig(chips=chips, slots=4, initial_chip="npu-m", link="ucie", batch_size=2)
config = codesign.CodesignConfig(
    hardware=hardware, mapping=codesign.MappingConfig(strategy="dp"), wafer=codesign.WaferConfig(radius_mm=40)
)
plan = codesign.plan_design(config, model, tempfile.mkdtemp())
print(f"{plan.metrics['chips']} chips, {plan.metrics['area_mm2']:.0f} mm2")
for slot, name in enumerate(plan.decision.chips):
    print(f"slot {slot}: {name or 'no chip'}, {plan.decision.assign_layers(layers).count(slot)} layers")
print(f"predicted: {plan.metrics['latency_ms']:.3f} ms and {plan.metrics['energy_mj']:.1f} mJ per batch")
print(plan.prediction)

# %% [markdown]
# ## Run the plan
#
# `verify` runs every chip's layers on this machine and sends the outputs between them. It compares the logits
# with those of the unpartitioned model and the transferred bytes with the plan, and raises an error if they
# differ.

# %%
result = codesign.verify(model, plan.decision, samples, planned=plan.layers)
print(f"largest difference of the logits: {max(result.errors.values()):.0e}")
print(f"bytes between chips: {result.moved_bytes['local']}, planned {result.moved_bytes['planned']}")
assert result.moved_bytes["local"] == result.moved_bytes["planned"]

# %% [markdown]
# The left chart shows the chips on the wafer. The right chart shows how long each chip is busy with one
# batch; the slowest chip determines the time between two batches.

# %%
stats = plan.hardware.evaluate_cost(plan.layers, plan.decision).stats
figure, (wafer, busy) = plt.subplots(1, 2, figsize=(8, 3.5), layout="constrained")
wafer.add_patch(Circle((0, 0), config.wafer.radius_mm, fill=False, color="gray"))
for slot, chip in enumerate(plan.hardware.get_chips(plan.decision)):
    if chip is not None:
        (x, y), (width, height) = plan.decision.positions_mm[slot], chip.size_mm
        wafer.add_patch(Rectangle((x - width / 2, y - height / 2), width, height, color=f"C{slot}"))
        wafer.text(x, y, str(slot), ha="center", va="center")
        busy.bar(f"{slot}: {chip.name}", stats.busy_ms[slot], color=f"C{slot}")
wafer.set(xlabel="mm", ylabel="mm", xlim=(-42, 42), ylim=(-42, 42), aspect="equal", title="wafer")
busy.set(ylabel="ms per batch", title="predicted time")
plt.show()

# %% [markdown]
# ## Your own model and chips
#
# - A Hugging Face ViT or VideoMAE: replace `VideoViT(...)` by
#   `sparseflow.pruning.build_from_pretrained("DIRECTORY", num_frames=1, num_classes=1000, ...)`.
# - Your chips: write a YAML library and pass `HardwareConfig(library="chips.yaml", ...)`.
#
# ## What to read next
#
# - [Plan a partition](../how-to/plan-a-partition.md): other models, your own chips, measured layer costs
# - [How co-design works](../explanation/codesign.md), and [its accuracy](../benchmarks/codesign.md)
