"""Robust tabu search where one program is one restart; `reference.py` says which move is made.

A program makes all its moves without coming back to the host. The changes of all swaps and the moves up to
which they are tabu stay in registers; a move alters the rows and columns of the two that were swapped, which
are computed afresh, and what is left by Taillard's update. Flows and distances are shared by all programs and
stay in the first-level cache; a program's own memory is its permutation and its tabu times, of which it reads
and writes a few rows a move. All of it is padded to a power of two by sites that exchange nothing and never
move: a stride that is known when compiling leaves a load no address to compute and no mask.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from sparseflow.codesign.layout.qap.kernels.tabu.reference import changes
from sparseflow.codesign.layout.qap.kernels.tabu.rule import Rule

_VARY = ["n", "movers", "first", "moves", "low", "span", "patience"]


@triton.jit
def _mix(counter, seed):
    h = (tl.full((), counter, tl.uint32) * 0x9E3779B9) ^ seed
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _rows(
    a_ptr, b_ptr, own_ptr, p_ptr, p, r, s, at_r, at_s,
    TERMS: tl.constexpr, SYMMETRIC: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The changes by swapping r, which is at `at_r`, with every other, and those of s, [BN] each.

    The first axis is the one along which memory is read: neighbouring threads have neighbouring columns, and
    each adds up what it has alone.
    """
    i = tl.arange(0, BN)
    row_r = tl.zeros([BN], a_ptr.dtype.element_ty)
    row_s = tl.zeros([BN], a_ptr.dtype.element_ty)
    for t in tl.static_range(TERMS):
        a, b, own = a_ptr + t * BN * BN, b_ptr + t * BN * BN, own_ptr + t * 2 * BN
        total_r = tl.zeros([BN], a_ptr.dtype.element_ty)
        total_s = tl.zeros([BN], a_ptr.dtype.element_ty)
        for begin in range(0, BN, BK):
            k = begin + tl.arange(0, BK)
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
            # Antisymmetric terms have nothing on the diagonal, and what mirrors cancels.
            own_a, own_b = tl.load(own + i), tl.load(own + BN + p)
            corner_a = own_a + tl.load(own + r) - 2 * tl.load(a + r * BN + i)
            corner_b = own_b + tl.load(own + BN + at_r) - 2 * tl.load(b + at_r * BN + p)
            row_r += corner_a * corner_b
            corner_a = own_a + tl.load(own + s) - 2 * tl.load(a + s * BN + i)
            corner_b = own_b + tl.load(own + BN + at_s) - 2 * tl.load(b + at_s * BN + p)
            row_s += corner_a * corner_b
    return row_r, row_s


@triton.jit(do_not_specialize=_VARY)
def tabu_kernel(
    a_ptr, b_ptr, own_ptr, p_ptr, best_ptr, worth_ptr, until_ptr, mirror_ptr, delta_ptr, seed_ptr, wall_ptr,
    n, movers, first, moves, low, span, patience,
    TERMS: tl.constexpr, SYMMETRIC: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    restart = tl.program_id(0).to(tl.int64)
    p_ptr += restart * BN
    worth_ptr += restart * 2
    until_ptr += restart * BN * BN
    mirror_ptr += restart * BN * BN
    i = tl.arange(0, BN)
    upper = (i[:, None] < i[None, :]) & (i[:, None] < movers) & (i[None, :] < n)
    number = i[:, None] * BN + i[None, :]
    best_ptr += restart * BN + i
    # Symmetric: whichever axis is read first.
    delta_ptr += restart * BN * BN + i[:, None] + i[None, :] * BN
    seed = tl.load(seed_ptr + restart).to(tl.uint32)
    wall, aspired = tl.load(wall_ptr), tl.load(wall_ptr + 1)
    here, best = tl.load(worth_ptr), tl.load(worth_ptr + 1)
    p, best_p, delta = tl.load(p_ptr + i), tl.load(best_ptr), tl.load(delta_ptr)
    gate = tl.minimum(
        tl.load(mirror_ptr + i[:, None] + p[None, :] * BN), tl.load(until_ptr + p[:, None] + i[None, :] * BN)
    )
    for move in range(first, first + moves):
        key = tl.where((gate < move) | (delta < best - here), delta, 3 * wall)
        key = tl.where(gate < move - patience, delta - wall, key)
        key = tl.where(upper, key, 3 * wall)
        lowest = tl.min(tl.min(key, axis=1), axis=0)
        place = tl.min(tl.min(tl.where(key == lowest, number, BN * BN), axis=1), axis=0)
        found = lowest < 3 * wall
        # Where all are tabu nothing is swapped with nothing, and nothing is written.
        r, s = tl.where(found, place // BN, 0), tl.where(found, place % BN, 0)
        change = tl.where(lowest < aspired, lowest + wall, lowest)
        here += tl.where(found, change, 0)
        from_r, from_s = tl.load(p_ptr + r), tl.load(p_ptr + s)
        # All threads read where the two were before one of them writes.
        tl.debug_barrier()
        until_r = move + low + ((_mix(2 * move, seed).to(tl.uint64) * span) >> 32).to(tl.int32)
        until_s = move + low + ((_mix(2 * move + 1, seed).to(tl.uint64) * span) >> 32).to(tl.int32)
        tl.store(p_ptr + r, from_s, mask=found)
        tl.store(p_ptr + s, from_r, mask=found)
        tl.store(until_ptr + r * BN + from_r, until_r, mask=found)
        tl.store(until_ptr + s * BN + from_s, until_s, mask=found & (s < movers))
        tl.store(mirror_ptr + from_r * BN + r, until_r, mask=found)
        tl.store(mirror_ptr + from_s * BN + s, until_s, mask=found & (s < movers))
        tl.debug_barrier()
        p = tl.load(p_ptr + i)
        best_p = tl.where(here < best, p, best_p)
        best = tl.minimum(here, best)
        at_r, at_s = tl.where(found, from_s, from_r), tl.where(found, from_r, from_s)
        for t in tl.static_range(TERMS):
            a, b = a_ptr + t * BN * BN, b_ptr + t * BN * BN
            x = 2 * (tl.load(a + r * BN + i) - tl.load(a + s * BN + i))
            y = tl.load(b + at_s * BN + p) - tl.load(b + at_r * BN + p)
            delta += (x[:, None] - x[None, :]) * (y[:, None] - y[None, :])
        row_r, row_s = _rows(a_ptr, b_ptr, own_ptr, p_ptr, p, r, s, at_r, at_s, TERMS, SYMMETRIC, BN, BK)
        gate_r = tl.minimum(tl.load(until_ptr + r * BN + p), tl.load(mirror_ptr + at_r * BN + i))
        gate_s = tl.minimum(tl.load(until_ptr + s * BN + p), tl.load(mirror_ptr + at_s * BN + i))
        is_r, is_s = i == r, i == s
        delta = tl.where(is_r[:, None], row_r[None, :], tl.where(is_r[None, :], row_r[:, None], delta))
        delta = tl.where(is_s[:, None], row_s[None, :], tl.where(is_s[None, :], row_s[:, None], delta))
        gate = tl.where(is_r[:, None], gate_r[None, :], tl.where(is_r[None, :], gate_r[:, None], gate))
        gate = tl.where(is_s[:, None], gate_s[None, :], tl.where(is_s[None, :], gate_s[:, None], gate))
    tl.store(best_ptr, best_p)
    tl.store(delta_ptr, delta)
    tl.store(worth_ptr, here)
    tl.store(worth_ptr + 1, best)


class Restarts:
    """The state of many restarts, on their device.

    Args:
        a: Flows of the terms, [T, n, n], n from 2 to `MOST_IN_REGISTERS`; int32 (with a wall below 2^28),
            int64 or float64.
        b: Distances of the terms, [T, n, n], of the same dtype.
        symmetric: How many terms are symmetric; they come first.
        movers: How many exchange something; they come first.
        wall: More than twice any change.
        start: Where each is at first, int64, [R, n].
        until: Move up to which a site is tabu at first, int64, [n, n].
        seed: Of the tenures, int64 below 2^32, [R].
        rule: How long what is tabu.
        warps: Warps of a program; by default so many that a thread holds 32 bytes of each square.
    """

    def __init__(
        self, a: Tensor, b: Tensor, *, symmetric: int, movers: int, wall: int | float, start: Tensor,
        until: Tensor, seed: Tensor, rule: Rule, warps: int | None = None,
    ) -> None:  # fmt: skip
        self._n, self._movers, self._rule = a.shape[1], movers, rule
        size = max(16, 1 << (self._n - 1).bit_length())
        extra = size - self._n
        self._a, self._b = (pad(matrix, (0, extra, 0, extra)) for matrix in (a, b))
        self._own = torch.stack([m.diagonal(dim1=1, dim2=2) for m in (self._a, self._b)], 1).contiguous()
        stay = torch.arange(self._n, size, device=a.device).expand(len(start), -1)
        self._p = torch.cat([start, stay], 1).to(torch.int32)
        self._best = self._p.clone()
        self._worth = a.new_zeros(len(start), 2)
        self._until = pad(until, (0, extra, 0, extra)).to(torch.int32).repeat(len(start), 1, 1)
        self._mirror = self._until.mT.contiguous()
        # No change comes near half of it: keys below minus that have had the wall taken off.
        self._seed, self._wall = seed, a.new_tensor([wall, -(wall // 2)])
        self._delta = self._changes()
        self._settings = {
            "TERMS": len(a), "SYMMETRIC": symmetric, "BN": size, "BK": min(size, 64 // a.element_size()),
            "num_warps": warps or min(16, max(1, size * size * a.element_size() // 4096)),
            # Moves wait for memory and for each other: many programs a multiprocessor hide that.
            "maxnreg": 128,
        }  # fmt: skip
        self._done = 0

    def advance(self, moves: int) -> None:
        """Make `moves` moves in every restart, without waiting for them."""
        if self._a.is_floating_point() and self._done:
            # What every move adds to would drift.
            self._delta = self._changes()
        kernel: Any = tabu_kernel
        with torch.cuda.device_of(self._a):
            kernel[(len(self._p),)](
                self._a, self._b, self._own, self._p, self._best, self._worth, self._until, self._mirror,
                self._delta, self._seed, self._wall, self._n, self._movers, self._done + 1, moves,
                self._rule.low, self._rule.span, self._rule.patience, **self._settings,
            )  # fmt: skip
        self._done += moves

    def here(self) -> Tensor:
        """Where each is in every restart, int64, [R, n]."""
        return self._p[:, : self._n].long()

    def best(self) -> Tensor:
        """The best permutation of every restart, int64, [R, n]."""
        return self._best[:, : self._n].long()

    def _changes(self) -> Tensor:
        return changes(self._a, self._b, self._p.long()).contiguous()
