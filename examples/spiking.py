# %% [markdown]
# # Accelerate a spiking network
#
# The neurons of a spiking network output 0 or 1, and mostly 0. PyTorch multiplies the zeros like any other
# number. SparseFlow finds the convolutions that read spikes, measures for each of them whether skipping the
# zeros is faster on your machine, and leaves everything else as it is.
#
# This tutorial uses a trained ResNet-18 with four time steps and test images of CIFAR-10, which the package
# contains. The tutorial needs `pip install 'sparseflow[spiking]' matplotlib` and
# `pip install --no-deps 'spikingjelly>=2.0'`.

# %%
import matplotlib.pyplot as plt
import torch
from spikingjelly.activation_based import functional

import sparseflow
from sparseflow.core.timing import compare
from sparseflow.spiking import load_images, load_network, normalize

torch.set_num_threads(1)  # other programs on this machine disturb one thread least
model = load_network()
pixels, labels = load_images()
batches = normalize(pixels[:32]).split(4)


def run(network, images):
    functional.reset_net(network)  # clears the membranes of the previous images
    with torch.inference_mode():
        return network(images)


expected = torch.cat([run(model, images) for images in batches])
accuracy = (expected.argmax(1) == torch.from_numpy(labels[:32])).float().mean()
print(f"accuracy of the original network on {len(expected)} images: {accuracy:.0%}")

# %% [markdown]
# ## Optimize
#
# `optimize` takes the network and a typical batch. It measures with this batch, so use the batch size of your
# application. The network keeps its weights, its `state_dict` and its membranes; only its `forward` is
# replaced.

# %%
model = sparseflow.optimize(model, batches[0])
outputs = torch.cat([run(model, images) for images in batches])
equal = (outputs.argmax(1) == expected.argmax(1)).float().mean()
print(f"equal predictions: {equal:.0%}")
assert equal == 1

# %% [markdown]
# ## Explain
#
# `explain` has a row for each convolution: the neurons that feed it, the share of inputs that fire, how it
# runs, and why. `print(sparseflow.explain(model))` shows all of it as a table.

# %%
layers = sparseflow.explain(model).layers
rates = sorted(layer.firing_rate for layer in layers if layer.firing_rate is not None)
print(f"{len(rates)} of {len(layers)} convolutions read spikes")
print(f"inputs that fire: {rates[0]:.0%} to {rates[-1]:.0%}, median {rates[len(rates) // 2]:.0%}")
print(f"convolutions that skip zeros: {sum(layer.backend == 'events' for layer in layers)}")

# %% [markdown]
# ## Measure
#
# `compare` times both networks in turns, so that a change of the machine's load affects both.

# %%
original = load_network()
times = compare(
    {"original": lambda: run(original, batches[0]), "optimized": lambda: run(model, batches[0])},
    rounds=8,
    baseline="original",
)
speedup = times.speedup("optimized")
for name in times.times_ms:
    print(f"{name}: {times.samples(name).median_ms:.0f} ms for a batch of {len(batches[0])}")
print(f"speed-up: {speedup.median:.1f}x, 95 % interval {speedup.low:.1f}x to {speedup.high:.1f}x")

# %% [markdown]
# The chart shows the latency of each layer before and after, as `optimize` measured it. The latency of a
# layer includes its normalization, its residual connection and its neuron.

# %%
groups = [layer for layer in layers if layer.latency_before_ms and layer.group in (None, layer.name)][::-1]
names = [layer.name for layer in groups]
figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
axes.barh(names, [layer.latency_before_ms for layer in groups], color="lightgray", label="original")
axes.barh(names, [layer.latency_after_ms for layer in groups], height=0.4, label="optimized")
axes.set_xlabel("latency, ms")
axes.legend()
plt.show()

# %% [markdown]
# ## Restore
#
# `restore` undoes the optimization.

# %%
sparseflow.restore(model)
assert torch.equal(run(model, batches[0]), expected[:4])

# %% [markdown]
# ## Your own network
#
# Replace `model` by your network in eval mode and `batches` by your inputs. The neurons of spikingjelly are
# known; register others with `sparseflow.register_neuron`.
#
# ## What to read next
#
# - [Optimize a spiking network](../how-to/optimize-a-spiking-network.md): your own network and neurons, GPUs
# - [How the spiking wing works](../explanation/spiking.md), and [its benchmarks](../benchmarks/spiking.md)
