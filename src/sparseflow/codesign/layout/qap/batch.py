"""Batched tabu search: many restarts at once on a torch device; on a GPU each program is one restart.

The moves are those of `assign(method="tabu")`: for integers a restart finds the same permutation. On a GPU
with up to 128 sites it runs `kernels/tabu/triton.py`, otherwise `kernels/tabu/reference.py`, which recomputes
all changes in every move.
"""

from __future__ import annotations

import time
from importlib import util
from typing import Any

import numpy as np
import torch

from sparseflow.codesign.layout.qap.assignment import QapAssignment, check_budget, draw_start, make_assignment
from sparseflow.codesign.layout.qap.kernels.tabu import reference
from sparseflow.codesign.layout.qap.kernels.tabu.rule import MAX_REGISTER_SITES, TabuRule, init_tabu
from sparseflow.codesign.layout.qap.problem import EXACT, check_permutation, stack_matrices
from sparseflow.codesign.layout.qap.search import DEFAULT_MOVES
from sparseflow.codesign.layout.qap.terms import QapTerms
from sparseflow.core.checks import check_one_of
from sparseflow.core.extras import require
from sparseflow.errors import DeviceError, InputError

BACKENDS = ("auto", "triton", "reference")

_CHUNK_SWAPS = {"triton": 4_000_000_000, "reference": 2_000_000}
"""Swaps (both directions) of all restarts per launch, between two time checks."""

_MAX_INT32_BIG_M = 2.0**28
"""Walls below this permit sums in int32."""


def assign_batch(
    flow: Any,
    distance: Any,
    *,
    restarts: int = 1024,
    iterations: int | None = None,
    budget_s: float | None = None,
    seed: int = 0,
    start: Any = None,
    device: str | torch.device = "cuda",
    backend: str = "auto",
    num_warps: int | None = None,
) -> QapAssignment:
    """Search from many starts at once by robust tabu search.

    Args:
        flow: [n, n], or a stack [K, n, n] whose costs are summed; pad it if places stay empty.
        distance: Of the same shape.
        restarts: Number of restarts; about a thousand fill a GPU.
        iterations: Moves per restart; 2000·n by default.
        budget_s: Time budget of all restarts, s; None for no limit.
        seed: Random seed of starts and tenures; restarts start as in `assign`.
        start: Initial permutation of the first restart.
        device: Device of the search.
        backend: `"triton"`, `"reference"`, or `"auto"`, which uses Triton where possible.
        num_warps: Warps per program; by default chosen by n.

    Raises:
        InputError: See `stack_matrices`; or an argument is out of range.
        DeviceError: The device does not exist.
        MissingExtraError: SciPy, or Triton if requested, is missing.
    """
    f, d = stack_matrices(flow, distance)
    n = f.shape[1]
    check_budget(restarts, iterations, budget_s, seed)
    device = _check_device(device)
    terms = QapTerms.from_matrices(f, d)
    backend = _select_backend(backend, terms, device)
    starts = [draw_start(seed, restart, n) for restart in range(restarts)]
    if start is not None:
        starts[0] = (check_permutation(start, n), starts[0][1])
    if not terms.num_swaps:
        permutations = np.stack([permutation for permutation, _ in starts])
        return make_assignment(f, d, permutations, evaluations=0, elapsed_s=0.0, finished=True)
    state = _make_restarts(terms, starts, backend, device, num_warps)
    # Compile before time is measured.
    state.advance(0)
    num_moves = DEFAULT_MOVES * n if iterations is None else iterations
    max_moves = max(1, _CHUNK_SWAPS[backend] // (restarts * n * n))
    completed = 0
    _synchronize(device)
    start_s = time.perf_counter()
    while completed < num_moves:
        moves = min(max_moves, num_moves - completed)
        state.advance(moves)
        completed += moves
        if budget_s is not None:
            _synchronize(device)
            if time.perf_counter() >= start_s + budget_s:
                break
    permutations = terms.from_rows(state.best().cpu().numpy())
    return make_assignment(
        f,
        d,
        permutations,
        evaluations=completed * restarts * terms.num_swaps,
        elapsed_s=time.perf_counter() - start_s,
        finished=completed == num_moves,
    )


def _make_restarts(
    terms: QapTerms,
    starts: list[tuple[np.ndarray, int]],
    backend: str,
    device: torch.device,
    num_warps: int | None,
) -> Any:
    """Create the restarts at their initial permutations."""
    dtype = _select_dtype(terms, backend)
    arguments: Any = {
        "start": torch.as_tensor(terms.to_rows(np.stack([permutation for permutation, _ in starts]))).to(
            device
        ),
        "until": torch.as_tensor(init_tabu(terms.n, terms.num_movers)).to(device),
        "seed": torch.tensor([search_seed for _, search_seed in starts]).to(device),
        "num_movers": terms.num_movers,
        "big_m": terms.big_m if dtype.is_floating_point else int(terms.big_m),
        "rule": TabuRule.for_size(terms.n),
    }
    a, b = (torch.as_tensor(matrices).to(dtype).to(device) for matrices in (terms.a, terms.b))
    if backend == "reference":
        return reference.ReferenceRestarts(a, b, **arguments)
    from sparseflow.codesign.layout.qap.kernels.tabu import triton

    return triton.TritonRestarts(a, b, symmetric=terms.num_symmetric, num_warps=num_warps, **arguments)


def _select_dtype(terms: QapTerms, backend: str) -> torch.dtype:
    """Select the fastest exact dtype of the backend."""
    if terms.a.dtype == np.int64 and 4.0 * terms.big_m > EXACT:
        return torch.int64
    # torch multiplies only float matrices.
    narrow = terms.a.dtype == np.int64 and terms.big_m < _MAX_INT32_BIG_M and backend == "triton"
    return torch.int32 if narrow else torch.float64


def _select_backend(backend: str, terms: QapTerms, device: torch.device) -> str:
    check_one_of(BACKENDS, backend=backend)
    if backend == "auto":
        able = (
            device.type == "cuda" and terms.n <= MAX_REGISTER_SITES and util.find_spec("triton") is not None
        )
        return "triton" if able else "reference"
    if backend == "triton":
        triton = require("triton", "codesign")
        if terms.n > MAX_REGISTER_SITES:
            raise InputError(f"`backend` 'triton' supports up to {MAX_REGISTER_SITES} places; got {terms.n}")
        if device.type != "cuda" and not triton.knobs.runtime.interpret:
            raise InputError(f"`backend` 'triton' requires a CUDA device; got {device}")
    return backend


def _check_device(device: str | torch.device) -> torch.device:
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"`device` (={device!r}) is not a torch device: {error}") from error
    if parsed.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError("CUDA is not available; use `device='cpu'` or `assign`")
    if parsed.type == "cuda" and (parsed.index or 0) >= (count := torch.cuda.device_count()):
        raise DeviceError(f"`device` (={device!r}) does not exist; there are {count} CUDA devices")
    return parsed


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
