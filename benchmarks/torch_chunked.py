"""KDA in PyTorch for the CPU: 64-token chunks, batched matrix products, fp32.

The rival of `cpu_vs_torch.py`, written to be as fast as eager PyTorch allows: one chunk of all
heads at a time, so that its tensors stay in the last-level cache; the triangular system is solved
once, for the updates themselves; decays inside a chunk are taken from the start of each block of 16
tokens, which keeps every exponent within 80 for lower bounds down to -5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

CHUNK = 64
BLOCK = 16
BLOCKS = CHUNK // BLOCK


@dataclass(frozen=True)
class Gate:
    """Log decay = lower_bound * sigmoid(exp(A_log) * (g + dt_bias))."""

    A_log: torch.Tensor  # [H], fp32
    dt_bias: torch.Tensor  # [H, K], fp32
    lower_bound: float


def _rows(x: torch.Tensor) -> torch.Tensor:
    """One chunk [c, H, X] as fp32 [H, CHUNK, X], padded with zeros."""
    rows = x.transpose(0, 1).float()
    if rows.shape[1] < CHUNK:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, CHUNK - rows.shape[1]))
    return rows


def _normalized(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


@dataclass(frozen=True)
class Decays:
    """Decays of one chunk, by block. Two exponentials an element; the rest is products."""

    inside: torch.Tensor  # [H, BLOCKS, BLOCK, K]: from the start of the token's block to the token
    before: torch.Tensor  # [H, BLOCKS, 1, K]: from the start of the chunk to that of the block
    after: torch.Tensor  # [H, BLOCKS, 1, K]: from the end of the block to that of the chunk
    block: torch.Tensor  # [H, BLOCKS, 1, K]: along the block


def _decays(g: torch.Tensor, gate: Gate) -> Decays:
    """Decays of raw gates [c, H, K]; padding decays nothing."""
    x = (g.transpose(0, 1).float() + gate.dt_bias[:, None]).mul_(gate.A_log.exp()[:, None, None])
    log_decay = torch.sigmoid_(x).mul_(gate.lower_bound)
    if log_decay.shape[1] < CHUNK:
        log_decay = torch.nn.functional.pad(log_decay, (0, 0, 0, CHUNK - log_decay.shape[1]))
    heads, _, keys = log_decay.shape
    sums = log_decay.view(heads, BLOCKS, BLOCK, keys).cumsum(2)
    total = sums[:, :, -1:]
    upto = total.cumsum(1)
    return Decays(
        inside=sums.exp(),
        before=(upto - total).exp(),
        after=(upto[:, -1:] - upto).exp(),
        block=total.exp(),
    )


def _pair_products(
    k_fall: torch.Tensor, q_fall: torch.Tensor, k_rise: torch.Tensor, decays: Decays
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum_K k_i k_j decay(j..i) for j < i, and of q_i and k_j for j <= i; [H, CHUNK, CHUNK].

    `k_fall`, `q_fall`: times the decay inside the block. `k_rise`: divided by it (at most e^80 at a
    lower bound of -5).
    """
    heads, _, _, keys = k_fall.shape
    rows = torch.cat((k_fall, q_fall), 2)  # [H, BLOCKS, 2 * BLOCK, K]
    products = rows.new_zeros(heads, 2, CHUNK, CHUNK)
    diagonal = rows @ k_rise.transpose(2, 3)
    columns = rows.new_empty(heads, 0, keys)
    for a in range(BLOCKS):
        here = slice(a * BLOCK, (a + 1) * BLOCK)
        products[:, :, here, here] = diagonal[:, a].view(heads, 2, BLOCK, BLOCK)
        if a > 0:
            product = torch.bmm(rows[:, a], columns.transpose(1, 2))
            products[:, :, here, : a * BLOCK] = product.view(heads, 2, BLOCK, a * BLOCK)
        if a < BLOCKS - 1:  # all keys so far, decayed to the end of block a
            block = decays.block[:, a]
            columns = torch.cat((columns * block, k_rise[:, a] * block), 1)
    return products[:, 0].tril_(-1), products[:, 1].tril_()


def _chunk(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    gate: Gate,
    scale: float,
    state: torch.Tensor,
) -> torch.Tensor:
    """Consume one chunk [c, H, ...] of q, k, v, g, beta; update `state`; give [H, CHUNK, V]."""
    q, k, v = _normalized(_rows(rows[0])).mul_(scale), _normalized(_rows(rows[1])), _rows(rows[2])
    decays = _decays(rows[3], gate)
    # The padding's keys are zero, so that what its beta is does not matter.
    strength = torch.sigmoid_(_rows(rows[4][:, :, None]))
    blocks = decays.inside.shape
    k_fall, q_fall = k.view(blocks) * decays.inside, q.view(blocks) * decays.inside
    k_rise = k.view(blocks) / decays.inside
    kk, qk = _pair_products(k_fall, q_fall, k_rise, decays)

    transposed = state.transpose(1, 2)
    read_k, read_q = (
        k_fall.mul_(decays.before).view(k.shape),
        q_fall.mul_(decays.before).view(k.shape),
    )
    error = torch.baddbmm(v, read_k, transposed, alpha=-1).mul_(strength)
    update = torch.linalg.solve_triangular(
        kk.mul_(strength), error, upper=False, unitriangular=True
    )
    out = torch.baddbmm(torch.bmm(read_q, transposed), qk, update)
    write = k_rise.mul_(decays.block * decays.after).view(k.shape)
    state.mul_(decays.before[:, -1] * decays.block[:, -1])
    state.baddbmm_(update.transpose(1, 2), write)
    return out


def chunked_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    gate: Gate,
    scale: float,
    state: torch.Tensor,
    lengths: list[int],
) -> torch.Tensor:
    """Run a packed batch: q, k, g [T, H, K], v [T, H, V], beta logits [T, H].

    `state` [N, H, V, K] is updated in place.

    Returns the output [T, H, V] in v's dtype.
    """
    out = torch.empty_like(v)
    begin = 0
    for n, length in enumerate(lengths):
        for first in range(begin, begin + length, CHUNK):
            here = slice(first, min(first + CHUNK, begin + length))
            chunk = _chunk((q[here], k[here], v[here], g[here], beta[here]), gate, scale, state[n])
            out[here] = chunk[:, : here.stop - first].transpose(0, 1)
        begin += length
    return out
