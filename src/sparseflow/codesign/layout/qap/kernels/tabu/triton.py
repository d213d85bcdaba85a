"""Robust tabu search with one program per restart (Triton); `reference.py` defines the moves.

A program makes all its moves without returning to the host. The changes and tabu times of all swaps stay in
registers; a move recomputes the rows and columns of the swapped items and updates the rest by Taillard's
formula. Flows and distances are shared by all programs and stay in the L1 cache; a program owns its
permutation and tabu times, of which it accesses a few rows per move. Everything is padded to a power of two
by sites without flow that never move: strides known at compile time remove address computations and masks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from sparseflow.codesign.layout.qap.kernels.tabu.reference import compute_changes
from sparseflow.codesign.layout.qap.kernels.tabu.rule import TabuRule

_VARY = ["n", "num_movers", "first", "moves", "low", "span", "patience"]


@triton.jit
def _mix(counter, seed):
    h = (tl.full((), counter, tl.uint32) * 0x9E3779B9) ^ seed
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _rows(
    a_ptr, b_ptr, diagonal_ptr, p_ptr, p, r, s, at_r, at_s,
    TERMS: tl.constexpr, SYMMETRIC: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute the changes of swapping r (at `at_r`) and s (at `at_s`) with every other item, [BN] each.

    The first axis is contiguous in memory: neighboring threads have neighboring columns and reduce
    independently.
    """
    i = tl.arange(0, BN)
    row_r = tl.zeros([BN], a_ptr.dtype.element_ty)
    row_s = tl.zeros([BN], a_ptr.dtype.element_ty)
    for t in tl.static_range(TERMS):
        a, b, diagonal = a_ptr + t * BN * BN, b_ptr + t * BN * BN, diagonal_ptr + t * 2 * BN
        total_r = tl.zeros([BN], a_ptr.dtype.element_ty)
        total_s = tl.zeros([BN], a_ptr.dtype.element_ty)
        for start in range(0, BN, BK):
            k = start + tl.arange(0, BK)
            p_k = tl.load(p_ptr + k)
            a_v = tl.load(a + i[:, None] + k[None, :] * BN)
            b_v = tl.load(b + p[:, None] + p_k[None, :] * BN)
            if t >= SYMMETRIC:
                a_v, b_v = -a_v, -b_v
            a_r, b_r = tl.load(a + r * BN + k), tl.load(b + at_r * BN + p_k)
            total_r += tl.sum((a_r[None, :] - a_v) * (b_v - b_r[None, :]), axis=1)
            a_s, b_s = tl.load(a + s * BN + k), tl.load(b + at_s * BN + p_k)
            total_s += tl.sum((a_s[None, :] - a_v) * (b_v - b_s[None, :]), axis=1)
        row_r += 2 * total_r
        row_s += 2 * total_s
        if t < SYMMETRIC:
            # Antisymmetric terms have zero diagonals, and their mirrored entries cancel.
            diagonal_a, diagonal_b = tl.load(diagonal + i), tl.load(diagonal + BN + p)
            corner_a = diagonal_a + tl.load(diagonal + r) - 2 * tl.load(a + r * BN + i)
            corner_b = diagonal_b + tl.load(diagonal + BN + at_r) - 2 * tl.load(b + at_r * BN + p)
            row_r += corner_a * corner_b
            corner_a = diagonal_a + tl.load(diagonal + s) - 2 * tl.load(a + s * BN + i)
            corner_b = diagonal_b + tl.load(diagonal + BN + at_s) - 2 * tl.load(b + at_s * BN + p)
            row_s += corner_a * corner_b
    return row_r, row_s


@triton.jit(do_not_specialize=_VARY)
def tabu_kernel(
    a_ptr,
    b_ptr,
    diagonal_ptr,
    p_ptr,
    best_ptr,
    cost_change_ptr,
    until_ptr,
    mirror_ptr,
    delta_ptr,
    seed_ptr,
    big_m_ptr,
    n,
    num_movers,
    first,
    moves,
    low,
    span,
    patience,
    TERMS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Make `moves` moves of one restart. Grid (restarts,).

    Each move has four steps: select the best permitted swap (r, s), swap the places and set their tabu times,
    update the changes of all swaps by Taillard's formula, and recompute the changes and tabu times of the
    swaps with r or s.

    Args:
        a_ptr: Flows of the terms, [TERMS, BN, BN].
        b_ptr: Distances of the terms, [TERMS, BN, BN].
        diagonal_ptr: Diagonals of both, [TERMS, 2, BN].
        p_ptr: Current place of each item, int32, [restarts, BN].
        best_ptr: Best permutation so far, int32, [restarts, BN].
        cost_change_ptr: Change of the cost since the start, now and at the best, [restarts, 2].
        until_ptr: Move until which a site is tabu, by (item, site), int32, [restarts, BN, BN].
        mirror_ptr: The same times by (site, item), so that the times of a site are contiguous.
        delta_ptr: Change of each swap, [restarts, BN, BN].
        seed_ptr: Seed of the tenures, [restarts].
        big_m_ptr: `big_m`, and the key below which a swap is overdue, [2].
        n: Number of items without padding.
        num_movers: Number of items with flow; they come first.
        first: Number of the first move.
        moves: Number of moves.
        low: Minimum tenure.
        span: Number of different tenures, starting at `low`.
        patience: Moves after which a swap that was not made takes precedence.
        TERMS: Number of terms.
        SYMMETRIC: Number of symmetric terms; they come first.
        BN: Number of items with padding, a power of two.
        BK: Items that a reduction loads at once.
    """
    restart = tl.program_id(0).to(tl.int64)
    p_ptr += restart * BN
    cost_change_ptr += restart * 2
    until_ptr += restart * BN * BN
    mirror_ptr += restart * BN * BN
    i = tl.arange(0, BN)
    upper = (i[:, None] < i[None, :]) & (i[:, None] < num_movers) & (i[None, :] < n)
    number = i[:, None] * BN + i[None, :]
    best_ptr += restart * BN + i
    # Symmetric, so either axis can be read first.
    delta_ptr += restart * BN * BN + i[:, None] + i[None, :] * BN
    seed = tl.load(seed_ptr + restart).to(tl.uint32)
    big_m, threshold = tl.load(big_m_ptr), tl.load(big_m_ptr + 1)
    current, best = tl.load(cost_change_ptr), tl.load(cost_change_ptr + 1)
    p, best_p, delta = tl.load(p_ptr + i), tl.load(best_ptr), tl.load(delta_ptr)
    swap_until = tl.minimum(
        tl.load(mirror_ptr + i[:, None] + p[None, :] * BN), tl.load(until_ptr + p[:, None] + i[None, :] * BN)
    )
    for move in range(first, first + moves):
        # Select the swap (r, s) with the lowest key.
        key = tl.where((swap_until < move) | (delta < best - current), delta, 3 * big_m)
        key = tl.where(swap_until < move - patience, delta - big_m, key)
        key = tl.where(upper, key, 3 * big_m)
        lowest = tl.min(tl.min(key, axis=1), axis=0)
        index = tl.min(tl.min(tl.where(key == lowest, number, BN * BN), axis=1), axis=0)
        has_move = lowest < 3 * big_m
        # If all swaps are tabu, r = s = 0 and nothing is written.
        r, s = tl.where(has_move, index // BN, 0), tl.where(has_move, index % BN, 0)
        change = tl.where(lowest < threshold, lowest + big_m, lowest)
        current += tl.where(has_move, change, 0)
        # Swap the places of r and s, and set the tabu times of the sites that they leave.
        from_r, from_s = tl.load(p_ptr + r), tl.load(p_ptr + s)
        # All threads must read both places before any of them writes.
        tl.debug_barrier()
        until_r = move + low + ((_mix(2 * move, seed).to(tl.uint64) * span) >> 32).to(tl.int32)
        until_s = move + low + ((_mix(2 * move + 1, seed).to(tl.uint64) * span) >> 32).to(tl.int32)
        tl.store(p_ptr + r, from_s, mask=has_move)
        tl.store(p_ptr + s, from_r, mask=has_move)
        tl.store(until_ptr + r * BN + from_r, until_r, mask=has_move)
        tl.store(until_ptr + s * BN + from_s, until_s, mask=has_move & (s < num_movers))
        tl.store(mirror_ptr + from_r * BN + r, until_r, mask=has_move)
        tl.store(mirror_ptr + from_s * BN + s, until_s, mask=has_move & (s < num_movers))
        tl.debug_barrier()
        p = tl.load(p_ptr + i)
        best_p = tl.where(current < best, p, best_p)
        best = tl.minimum(current, best)
        at_r, at_s = tl.where(has_move, from_s, from_r), tl.where(has_move, from_r, from_s)
        # Update the changes of the swaps without r and s.
        for t in tl.static_range(TERMS):
            a, b = a_ptr + t * BN * BN, b_ptr + t * BN * BN
            x = 2 * (tl.load(a + r * BN + i) - tl.load(a + s * BN + i))
            y = tl.load(b + at_s * BN + p) - tl.load(b + at_r * BN + p)
            delta += (x[:, None] - x[None, :]) * (y[:, None] - y[None, :])
        # Recompute the changes and tabu times of the swaps with r or s.
        row_r, row_s = _rows(a_ptr, b_ptr, diagonal_ptr, p_ptr, p, r, s, at_r, at_s, TERMS, SYMMETRIC, BN, BK)
        swap_until_r = tl.minimum(tl.load(until_ptr + r * BN + p), tl.load(mirror_ptr + at_r * BN + i))
        swap_until_s = tl.minimum(tl.load(until_ptr + s * BN + p), tl.load(mirror_ptr + at_s * BN + i))
        is_r, is_s = i == r, i == s
        delta = tl.where(is_r[:, None], row_r[None, :], tl.where(is_r[None, :], row_r[:, None], delta))
        delta = tl.where(is_s[:, None], row_s[None, :], tl.where(is_s[None, :], row_s[:, None], delta))
        swap_until = tl.where(
            is_r[:, None], swap_until_r[None, :], tl.where(is_r[None, :], swap_until_r[:, None], swap_until)
        )
        swap_until = tl.where(
            is_s[:, None], swap_until_s[None, :], tl.where(is_s[None, :], swap_until_s[:, None], swap_until)
        )
    tl.store(best_ptr, best_p)
    tl.store(delta_ptr, delta)
    tl.store(cost_change_ptr, current)
    tl.store(cost_change_ptr + 1, best)


class TritonRestarts:
    """State of many restarts on their device.

    Args:
        a: Flows of the terms, [T, n, n], n from 2 to `MAX_REGISTER_SITES`; int32 (with `big_m` below 2^28),
            int64 or float64.
        b: Distances of the terms, [T, n, n], of the same dtype.
        symmetric: Number of symmetric terms; they come first.
        num_movers: Number of items with flow; they come first.
        big_m: More than twice any change.
        start: Initial places, int64, [R, n].
        until: Move until which a site is tabu initially, int64, [n, n].
        seed: Seed of the tenures, int64 below 2^32, [R].
        rule: Tenures.
        num_warps: Warps per program; by default so many that a thread holds 32 bytes of each square.
    """

    def __init__(
        self, a: Tensor, b: Tensor, *, symmetric: int, num_movers: int, big_m: int | float, start: Tensor,
        until: Tensor, seed: Tensor, rule: TabuRule, num_warps: int | None = None,
    ) -> None:  # fmt: skip
        self._n, self._num_movers, self._rule = a.shape[1], num_movers, rule
        size = max(16, 1 << (self._n - 1).bit_length())
        extra = size - self._n
        self._a, self._b = (pad(matrix, (0, extra, 0, extra)) for matrix in (a, b))
        self._diagonal = torch.stack([m.diagonal(dim1=1, dim2=2) for m in (self._a, self._b)], 1).contiguous()
        stay = torch.arange(self._n, size, device=a.device).expand(len(start), -1)
        self._p = torch.cat([start, stay], 1).to(torch.int32)
        self._best = self._p.clone()
        self._cost_change = a.new_zeros(len(start), 2)
        self._until = pad(until, (0, extra, 0, extra)).to(torch.int32).repeat(len(start), 1, 1)
        self._mirror = self._until.mT.contiguous()
        # Changes are far below big_m / 2, so keys below -big_m / 2 had big_m subtracted.
        self._seed, self._big_m = seed, a.new_tensor([big_m, -(big_m // 2)])
        self._delta = self._changes()
        self._settings = {
            "TERMS": len(a), "SYMMETRIC": symmetric, "BN": size, "BK": min(size, 64 // a.element_size()),
            "num_warps": num_warps or min(16, max(1, size * size * a.element_size() // 4096)),
            # Many programs per multiprocessor hide the latency of dependent memory accesses.
            "maxnreg": 128,
        }  # fmt: skip
        self._num_moves = 0

    def advance(self, moves: int) -> None:
        """Make `moves` moves in every restart, asynchronously."""
        if self._a.is_floating_point() and self._num_moves:
            # Incremental updates of floats drift.
            self._delta = self._changes()
        kernel: Any = tabu_kernel
        with torch.cuda.device_of(self._a):
            kernel[(len(self._p),)](
                self._a,
                self._b,
                self._diagonal,
                self._p,
                self._best,
                self._cost_change,
                self._until,
                self._mirror,
                self._delta,
                self._seed,
                self._big_m,
                self._n,
                self._num_movers,
                self._num_moves + 1,
                moves,
                self._rule.low,
                self._rule.span,
                self._rule.patience,
                **self._settings,
            )
        self._num_moves += moves

    def current(self) -> Tensor:
        """Current places in every restart, int64, [R, n]."""
        return self._p[:, : self._n].long()

    def best(self) -> Tensor:
        """Best permutation of every restart, int64, [R, n]."""
        return self._best[:, : self._n].long()

    def _changes(self) -> Tensor:
        return compute_changes(self._a, self._b, self._p.long()).contiguous()
