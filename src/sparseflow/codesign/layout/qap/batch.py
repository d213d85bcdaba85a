"""Many restarts of tabu search at once, on any device of torch; on a GPU one program is one restart.

The moves are those of `assign(method="tabu")`: for integers a restart finds the very permutation that it
finds there. What runs is `kernels/tabu/triton.py` on a GPU and for up to 128 sites, and otherwise
`kernels/tabu/reference.py`, which computes every change from scratch at every move.
"""

from __future__ import annotations

import time
from importlib import util
from typing import Any

import numpy as np
import torch

from sparseflow.codesign.layout.qap.assignment import Assignment, beginning, check_budget, judged
from sparseflow.codesign.layout.qap.kernels.tabu import reference
from sparseflow.codesign.layout.qap.kernels.tabu.rule import MOST_IN_REGISTERS, Rule, untouched
from sparseflow.codesign.layout.qap.problem import EXACT, checked_permutation, stacked
from sparseflow.codesign.layout.qap.search import DEFAULT_MOVES
from sparseflow.codesign.layout.qap.terms import Terms
from sparseflow.core.extras import require
from sparseflow.errors import DeviceError, InputError

BACKENDS = ("auto", "triton", "reference")

_WORK = {"triton": 4_000_000_000, "reference": 2_000_000}
"""Swaps of all restarts, both ways, of one launch, and so between two looks at the clock."""

_NARROW = 2.0**28
"""Walls below this let a search add in int32."""


def assign_batch(
    flow: Any,
    distance: Any,
    *,
    restarts: int = 1024,
    iterations: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    start: Any = None,
    device: str | torch.device = "cuda",
    backend: str = "auto",
    warps: int | None = None,
) -> Assignment:
    """Search for the best permutation from many starts at once, by robust tabu search.

    Args:
        flow: [n, n], or a stack [K, n, n] whose costs are summed; pad it where places stay empty.
        distance: Of the same shape.
        restarts: How many there are; a GPU is full from about a thousand on.
        iterations: Moves of each; 2000·n by default.
        seconds: Time for all of them; None for no limit.
        seed: Of the first permutations and the tenures; a restart begins as it does in `assign`.
        start: Permutation that the first restart begins with.
        device: Where to search.
        backend: `"triton"`, `"reference"`, or `"auto"`, which is Triton wherever it can be.
        warps: Warps of a restart's program; by default as many as suit n.

    Raises:
        InputError: The matrices cannot be used (see `qap.stacked`), or an argument is out of range.
        DeviceError: The device is not there.
        MissingExtraError: Triton is asked for and not installed, or scipy is not.
    """
    f, d = stacked(flow, distance)
    n = f.shape[1]
    check_budget(restarts, iterations, seconds, seed)
    device = _checked_device(device)
    terms = Terms.of(f, d)
    backend = _chosen(backend, terms, device)
    beginnings = [beginning(seed, restart, n) for restart in range(restarts)]
    if start is not None:
        beginnings[0] = (checked_permutation(start, n), beginnings[0][1])
    if not terms.swaps:
        found = np.stack([permutation for permutation, _ in beginnings])
        return judged(f, d, found, evaluations=0, seconds=0.0, finished=True)
    state = _state(terms, beginnings, backend, device, warps)
    # Compiles.
    state.advance(0)
    wanted = DEFAULT_MOVES * n if iterations is None else iterations
    most = max(1, _WORK[backend] // (restarts * n * n))
    done = 0
    _wait(device)
    begin = time.perf_counter()
    while done < wanted:
        moves = min(most, wanted - done)
        state.advance(moves)
        done += moves
        if seconds is not None:
            _wait(device)
            if time.perf_counter() >= begin + seconds:
                break
    found = terms.outside(state.best().cpu().numpy())
    return judged(
        f, d, found, evaluations=done * restarts * terms.swaps, seconds=time.perf_counter() - begin,
        finished=done == wanted,
    )  # fmt: skip


def _state(
    terms: Terms,
    beginnings: list[tuple[np.ndarray, int]],
    backend: str,
    device: torch.device,
    warps: int | None,
) -> Any:
    """The restarts, at their beginnings."""
    dtype = _dtype(terms, backend)
    there: Any = {
        "start": torch.as_tensor(terms.inside(np.stack([permutation for permutation, _ in beginnings]))).to(
            device
        ),
        "until": torch.as_tensor(untouched(terms.n, terms.movers)).to(device),
        "seed": torch.tensor([own for _, own in beginnings]).to(device),
        "movers": terms.movers,
        "wall": terms.wall if dtype.is_floating_point else int(terms.wall),
        "rule": Rule.of(terms.n),
    }
    a, b = (torch.as_tensor(matrices).to(dtype).to(device) for matrices in (terms.a, terms.b))
    if backend == "reference":
        return reference.Restarts(a, b, **there)
    from sparseflow.codesign.layout.qap.kernels.tabu import triton

    return triton.Restarts(a, b, symmetric=terms.symmetric, warps=warps, **there)


def _dtype(terms: Terms, backend: str) -> torch.dtype:
    """In what to search: what is exact, and quickest for the backend."""
    if terms.a.dtype == np.int64 and 4.0 * terms.wall > EXACT:
        return torch.int64
    # Torch multiplies matrices of floats only.
    narrow = terms.a.dtype == np.int64 and terms.wall < _NARROW and backend == "triton"
    return torch.int32 if narrow else torch.float64


def _chosen(backend: str, terms: Terms, device: torch.device) -> str:
    if backend not in BACKENDS:
        raise InputError(f"`backend` (={backend!r}) must be one of {', '.join(map(repr, BACKENDS))}")
    if backend == "auto":
        able = device.type == "cuda" and terms.n <= MOST_IN_REGISTERS and util.find_spec("triton") is not None
        return "triton" if able else "reference"
    if backend == "triton":
        triton = require("triton", "codesign")
        if terms.n > MOST_IN_REGISTERS:
            raise InputError(
                f"`backend` 'triton' takes up to {MOST_IN_REGISTERS} places, and there are {terms.n}"
            )
        if device.type != "cuda" and not triton.knobs.runtime.interpret:
            raise InputError(f"`backend` 'triton' runs on a CUDA device, not on {device}")
    return backend


def _checked_device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"`device` (={device!r}) is no device of torch: {error}") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError("torch sees no CUDA device here; hand in `device='cpu'`, or call `assign`")
    if found.type == "cuda" and (found.index or 0) >= (there := torch.cuda.device_count()):
        raise DeviceError(f"`device` (={device!r}) is none of the {there} CUDA devices here, from cuda:0 on")
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
