# %% [markdown]
# # Predict the latency of an ONNX model
#
# You want to know how long an ONNX model takes on a machine, before you deploy it and without running it
# there each time it changes. SparseFlow measures the kernels of a few networks once, learns from them how
# long a kernel takes on this machine, and adds up the kernels of any other model.
#
# The models of this tutorial are networks of the ONNX model zoo that the package `onnx` contains. The
# tutorial needs `pip install 'sparseflow[latency]' matplotlib`.

# %%
import logging
import tempfile
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import onnx

from sparseflow.latency import CollectionConfig, analyze, collect, evaluate, extract, predict, train

logging.getLogger("sparseflow").setLevel(logging.ERROR)  # hides the note about other work on this machine

zoo = Path(onnx.__path__[0]) / "backend" / "test" / "data" / "light"
train_model = zoo / "light_squeezenet.onnx"
model = zoo / "light_inception_v2.onnx"
out_dir = Path(tempfile.mkdtemp())

# %% [markdown]
# ## Kernels of a model
#
# onnxruntime fuses operators before it runs a model. `analyze` optimizes the model as onnxruntime does and
# returns the graph that is executed. `Conv_Relu` is a convolution with a fused ReLU. Nodes that do the same
# work share one kernel.

# %%
graph = analyze(model)
print(f"{len(graph.nodes)} nodes, {len(graph.kernels)} kernels, {graph.flops / 1e9:.1f} GFLOP")
print("most frequent:", ", ".join(f"{count} {op}" for op, count in Counter(graph.count_ops()).most_common(3)))

# %% [markdown]
# ## Measure kernels and train a predictor
#
# `extract` writes each kernel of a network as a small ONNX model. `collect` measures the kernels and the
# network on this machine, and `train` fits a predictor to the measurements. Here, each kernel is measured for
# a tenth of a second.

# %%
extract(train_model, out_dir / "kernels", check=False)
config = CollectionConfig(
    kernels=[out_dir / "kernels"], models=[train_model], levels=[0.0], rounds=1, loops=5, min_time_s=0.1
)
summary = collect(config, out_dir / "measured")
predictor = train([summary.path], kind="ratio")
predictor.save(out_dir / "predictor.json")
error = predictor.quality["kernels"]["ratio"]["by_kernel"]["mape"]
print(f"{summary.targets} targets measured, mean error on held-out kernels {100 * error:.0f} %")

# %% [markdown]
# ## Predict another network
#
# This network was not measured. A prediction has a mean, quantiles, an interval, and `coverage`, the share of
# the latency that comes from operators with measurements. The interval is wide here, because a predictor of
# one network has not been tested on others. With several networks, the interval is fitted to the errors on
# networks that are held out.

# %%
prediction = predict(model, predictor)
low_ms, high_ms = prediction.interval
print(f"predicted: {prediction.mean_ms:.1f} ms, 90 % interval {low_ms:.1f} to {high_ms:.1f} ms")
print(f"coverage: {100 * prediction.coverage:.0f} %")

# %% [markdown]
# `evaluate` measures the model and compares both. All latencies are those of one thread, the default of a
# collection.

# %%
row = evaluate([model], predictor, rounds=1, min_time_s=0.2).rows[0]
print(f"measured: {row.measured_ms:.1f} ms, error of the prediction {100 * row.error:+.0f} %")
assert low_ms < row.measured_ms < high_ms

# %% [markdown]
# The chart shows the ten kernels with most predicted time, which tells where an optimization pays.

# %%
kernels = prediction.per_kernel[9::-1]
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
axes.barh([kernel.kernel_id for kernel in kernels], [kernel.count * kernel.mean_ms for kernel in kernels])
axes.set_xlabel("predicted time, ms")
axes.set_title(model.stem)
plt.show()

# %% [markdown]
# ## Your own model
#
# Set `model` to your file. If an input has open dimensions, pass `shapes={"input": (1, 3, 224, 224)}` to
# `analyze`, `extract` and `predict`. If `coverage` is far below 100 %, train with a model that has the
# missing operators.
#
# ## What to read next
#
# - [Train a latency predictor](../how-to/train-a-latency-predictor.md) with more networks and under load
# - [Gate latency in CI](../how-to/gate-latency-in-ci.md)
# - [Predict under load](../how-to/predict-under-load.md)
# - [How the prediction works](../explanation/latency.md), and [its accuracy](../benchmarks/latency.md)
