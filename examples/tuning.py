# %% [markdown]
# # Tune a kernel for a sparse matrix
#
# The product of a sparse and a dense matrix is the most expensive step of a graph neural network. Which loops
# and which storage format are fastest depends on the sparsity pattern, the number of columns and the
# processor. SparseFlow generates C code for many variants, measures them on your matrix, and returns the
# fastest as a function.
#
# The matrix of this tutorial is a graph of the handwritten digits of scikit-learn: each image is connected
# to its ten nearest neighbors. The tutorial needs `pip install 'sparseflow[tuning]' matplotlib` and a C
# compiler.

# %%
import logging
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph

from sparseflow import tuning

logging.getLogger("sparseflow").setLevel(logging.ERROR)  # hides the note about other work on this machine

images, digits = load_digits(return_X_y=True)
images = images.astype(np.float32)
graph = kneighbors_graph(images, n_neighbors=10).astype(np.float32)
graph /= 10  # the product is the mean over the neighbors
print(f"{graph.shape[0]} x {graph.shape[1]} matrix with {graph.nnz} elements")

# %% [markdown]
# ## Tune
#
# `spmm` is the product of the graph and a dense matrix, here with 64 columns, one for each pixel. Eight
# variants are measured besides the hand-written ones; without `max_trials` the search takes a minute.
# `TuningSession` also returns the measurements; `tuning.tune(...)` with the same arguments returns only the
# kernel.

# %%
session = tuning.TuningSession("spmm", graph, n_cols=images.shape[1], max_trials=8, threads=1)
result = session.run()
kernel = result.kernel
assert not any(trial.error for trial in result.trials)
print(f"{len(result.trials)} variants measured")

# %% [markdown]
# ## Use the kernel
#
# A kernel is called like a function. The result equals that of scipy up to rounding.

# %%
means = kernel(images)
difference = np.abs(means - graph @ images).max() / means.max()
print(f"largest difference from scipy: {difference:.0e} of the largest value")
assert difference < 1e-5

# %% [markdown]
# The bars compare the kernel with hand-written variants and with scipy. `csr` is a plain loop over the rows,
# `tiled_csr` accumulates sums in registers, and `bcsr4x1` stores blocks of four rows.

# %%
times = {name: ratio / result.best_ratio for name, ratio in result.baselines.items()}
times["scipy"] = times.pop("library")
for name, ratio in times.items():
    print(f"{name} takes {ratio:.2f} times as long as the tuned kernel")
figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
axes.barh(["tuned"], [1.0])
axes.barh(list(times), list(times.values()), color="lightgray")
axes.invert_yaxis()
axes.set_xlabel("time relative to the tuned kernel")
plt.show()

# %% [markdown]
# ## Keep the kernel
#
# A file holds the matrix and the schedule, which describes the loops and the storage format. `tuning.load`
# compiles it again without a search.

# %%
path = Path(tempfile.mkdtemp()) / "digits.sfk"
kernel.save(path)
loaded = tuning.load(path)
assert np.array_equal(loaded(images), means)
print("the loaded kernel computes the same result")

# %% [markdown]
# ## Your own matrix
#
# Set `graph` to your matrix, a scipy.sparse matrix or a sparse torch tensor. Omit `threads` to use all CPUs,
# and tune on a machine that runs nothing else.
#
# ## What to read next
#
# - [Tune a kernel for a graph neural network](../how-to/tune-a-kernel-for-a-gnn.md) in torch, with gradients
# - [Prepare matrices](../how-to/prepare-matrices.md) from files of Matrix Market, SuiteSparse or scipy
# - [How tuning works](../explanation/tuning.md), and [its benchmarks](../benchmarks/tuning.md)
