"""Training steps of a GCN and a GAT with tuned kernels, with torch.sparse and with PyG (line 7).

::

    export PYTHONPATH=src:.
    python benchmarks/tuning/gnn.py matrices/*.mtx.gz --out results/tuning/gnn.json

Needs torch_geometric and scikit-learn. The graphs are those of square matrices, and the nearest neighbors of
scikit-learn's digits. Both networks have two layers of `--hidden` features. A step is a forward pass, a
backward pass and a step of Adam. All implementations start from the same weights; their losses and gradients
are compared before the measurement. Then their steps take turns.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph
from torch import Tensor, nn

from benchmarks.claims import Claim, write_samples
from sparseflow import tuning
from sparseflow.core.environment import collect_environment
from sparseflow.core.files import write_atomic
from sparseflow.core.timing import bootstrap_median, compare
from sparseflow.errors import RunError
from sparseflow.tuning.schedule.matrix_files import parse_matrix_name, read_matrix

NUM_FEATURES, NUM_CLASSES = 64, 10
TOLERANCE = 1e-3

Aggregate = Callable[..., Tensor]
"""GCN: (features, bias, whether ReLU follows) -> features. GAT: (features, scores of edges) -> features."""


class Network(nn.Module):
    """Two layers of a GCN, or of a GAT with one head.

    Args:
        kind: `"gcn"` or `"gat"`.
        aggregate: Aggregation of neighbors.
        graph: Normalized adjacency matrix with sorted indices.
        hidden: Features between the layers.
    """

    def __init__(self, kind: str, aggregate: Aggregate, graph: sp.csr_array, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.aggregate = kind, aggregate
        sizes = [(NUM_FEATURES, hidden), (hidden, NUM_CLASSES)]
        self.projections = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)
        self.biases = nn.ParameterList(torch.zeros(size) for _, size in sizes)
        self.sources = nn.ModuleList(nn.Linear(size, 1, bias=False) for _, size in sizes)
        self.targets = nn.ModuleList(nn.Linear(size, 1, bias=False) for _, size in sizes)
        self.rows, self.cols = (torch.from_numpy(part).long() for part in graph.tocoo().coords)

    def forward(self, x: Tensor) -> Tensor:
        for layer, (project, bias) in enumerate(zip(self.projections, self.biases, strict=True)):
            x = project(x)
            if self.kind == "gcn":
                x = self.aggregate(x, bias, layer == 0)
                continue
            scores = self.targets[layer](x)[self.rows, 0] + self.sources[layer](x)[self.cols, 0]
            x = self.aggregate(x, nn.functional.leaky_relu(scores, 0.2)) + bias
            x = x.relu() if layer == 0 else x
        return x


def make_aggregations(kind: str, graph: sp.csr_array, kernel: tuning.Kernel) -> dict[str, Aggregate]:
    """Create the aggregations of a network by the name of their implementation."""
    from torch_geometric.utils import scatter, softmax

    rows, cols = (torch.from_numpy(part).long() for part in graph.tocoo().coords)
    indptr, indices = torch.from_numpy(graph.indptr).long(), torch.from_numpy(graph.indices).long()
    values, size = torch.from_numpy(graph.data), len(graph.indptr) - 1
    adjacency, ones = torch.sparse_csr_tensor(indptr, indices, values, graph.shape), torch.ones(size, 1)

    def activate(x: Tensor, bias: Tensor, is_activated: bool) -> Tensor:
        return torch.relu(x + bias) if is_activated else x + bias

    def aggregate_tuned(x: Tensor, bias: Tensor, is_activated: bool) -> Tensor:
        return kernel(x, bias=bias, activation="relu" if is_activated else None)

    def aggregate_messages(x: Tensor, bias: Tensor, is_activated: bool) -> Tensor:
        messages = values.view(-1, 1) * x.index_select(0, cols)
        return activate(scatter(messages, rows, 0, size), bias, is_activated)

    def attend_tuned(x: Tensor, scores: Tensor) -> Tensor:
        attention = kernel.with_values(torch.exp(scores - scores.max()))
        return attention(x) / attention(ones)

    def attend_sparse(x: Tensor, scores: Tensor) -> Tensor:
        weights = torch.exp(scores - scores.max())
        matrix = torch.sparse_csr_tensor(indptr, indices, weights, graph.shape)
        return torch.sparse.mm(matrix, x) / torch.sparse.mm(matrix, ones)

    def attend_messages(x: Tensor, scores: Tensor) -> Tensor:
        weights = softmax(scores, rows, num_nodes=size)
        return scatter(weights.view(-1, 1) * x.index_select(0, cols), rows, 0, size)

    if kind == "gat":
        return {"tuned": attend_tuned, "torch.sparse": attend_sparse, "PyG": attend_messages}
    return {
        "tuned": aggregate_tuned,
        "torch.sparse": lambda x, *epilogue: activate(torch.sparse.mm(adjacency, x), *epilogue),
        "PyG": aggregate_messages,
    }


def make_step(network: Network, features: Tensor, labels: Tensor) -> Callable[[], float]:
    """Create a function that trains a step and returns the loss."""
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)

    def step() -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(features), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def check_networks(networks: Mapping[str, Network], features: Tensor, labels: Tensor) -> None:
    """Raise an error if the gradients of two implementations differ."""
    gradients = {}
    for name, network in networks.items():
        nn.functional.cross_entropy(network(features), labels).backward()
        used = [parameter.grad.flatten() for parameter in network.parameters() if parameter.grad is not None]
        gradients[name] = torch.cat(used)
    expected = gradients["PyG"]
    for name, gradient in gradients.items():
        error = float((gradient - expected).abs().max() / expected.abs().max())
        if error > TOLERANCE:
            raise RunError(f"the gradients of {name} differ from those of PyG by {error:.1e}")


def normalize(graph: sp.csr_array) -> sp.csr_array:
    """Add self-loops and normalize, D^-1/2 (A + I) D^-1/2, without weights."""
    pattern = ((abs(graph) + abs(graph.T) + sp.eye_array(len(graph.indptr) - 1)) != 0).astype(np.float32)
    scale = sp.diags_array(np.asarray(pattern.sum(axis=1)).ravel() ** -0.5)
    result = sp.csr_array(scale @ pattern @ scale, dtype=np.float32)
    result.sort_indices()
    return result


def read_graphs(paths: list[Path]) -> Iterator[tuple[str, sp.csr_array, Tensor, Tensor]]:
    """Yield name, graph, features and labels; those of matrices are random."""
    images, digits = load_digits(return_X_y=True)
    graph = normalize(sp.csr_array(kneighbors_graph(images, n_neighbors=10)))
    yield "digits", graph, torch.from_numpy(images / 16).float(), torch.from_numpy(digits)
    generator = torch.Generator().manual_seed(0)
    for path in sorted(paths):
        graph = normalize(read_matrix(path, dtype=np.float32).to_scipy())
        features = torch.randn(len(graph.indptr) - 1, NUM_FEATURES, generator=generator)
        labels = torch.randint(NUM_CLASSES, (len(features),), generator=generator)
        yield parse_matrix_name(path), graph, features, labels


def make_claims(record: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a record: speedups of training steps over torch.sparse and PyG."""
    samples = write_samples("tuning/gnn.json", record)
    for kind in ("gcn", "gat"):
        rows = [row for row in record["rows"] if row["network"] == kind]
        for baseline in ("torch.sparse", "PyG"):
            speedups = {row["graph"]: compute_speedup(row, baseline) for row in rows}
            yield Claim(
                id=f"tuning/7-{kind}-{baseline.replace('.', '-').lower()}",
                claim=f"Speedup of training steps of a {kind.upper()} with tuned kernels over {baseline}, "
                f"geometric mean of {len(rows)} graphs.",
                value=round(statistics.geometric_mean(speedups.values()), 2),
                unit="x",
                target=">= 1",
                baseline=baseline,
                command="python benchmarks/tuning/gnn.py MATRICES --out results/tuning/gnn.json",
                samples=samples,
                details={name: round(speedup, 2) for name, speedup in speedups.items()}
                | {
                    "torch": torch.__version__,
                    "pyg": record["settings"]["pyg"],
                    "load_average": round(record["environment"]["load_average"][0], 1),
                },
            )


def compute_speedup(row: dict[str, Any], baseline: str) -> float:
    """Return the median over rounds of the baseline's time over that of tuned kernels."""
    times = row["times_ms"]
    ratios = [slow / fast for slow, fast in zip(times[baseline], times["tuned"], strict=True)]
    return bootstrap_median(ratios).median


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("matrices", type=Path, nargs="*", help="square matrices")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of a search")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, required=True, help="JSON")
    args = parser.parse_args()
    pyg_version = importlib.metadata.version("torch_geometric")
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", "Sparse")  # of torch: sparse tensors are in beta state
    settings = {name: getattr(args, name) for name in ("hidden", "budget", "rounds", "threads")}
    record = {"environment": collect_environment("cpu"), "settings": settings | {"pyg": pyg_version}}
    rows: list[dict[str, Any]] = []
    for name, graph, features, labels in read_graphs(args.matrices):
        kernel = tuning.tune("spmm", graph, n_cols=args.hidden, budget_s=args.budget, threads=args.threads)
        for kind in ("gcn", "gat"):
            aggregations = make_aggregations(kind, graph, kernel)
            networks = {
                key: Network(kind, function, graph, args.hidden) for key, function in aggregations.items()
            }
            check_networks(networks, features, labels)
            steps = {key: make_step(network, features, labels) for key, network in networks.items()}
            result = compare(steps, rounds=args.rounds, baseline="tuned")
            row = {"graph": name, "nodes": len(labels), "edges": graph.nnz, "network": kind}
            rows.append(row | {"times_ms": dict(result.times_ms), "schedule": str(kernel.schedule)})
            write_atomic(args.out, json.dumps(record | {"rows": rows}))
            speedups = {key: round(compute_speedup(rows[-1], key), 2) for key in steps}
            print(f"{name:20s} {kind} {result.samples('tuned').median_ms:8.2f} ms  {speedups}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
