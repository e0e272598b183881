"""Inputs on which every step of the recurrence is exactly representable, and their exact answer.

Keys and queries are signed unit vectors (some queries have two entries, some keys are zero), values
and states small integers, decay exactly 1 or 0, strength 0, 1/2, 1 or 2. Channel c of the state
then changes only at tokens whose key is +-e_c: s <- s + b (v -+ s). Halvings of one channel between
resets (b = 1 or a decay of 0) are limited, so that states, updates, outputs and the entries of any
chunk's triangular inverse (products of 1 - b: powers of 1/2, or +-1, +-2) fit the significant bits
of the array types: an algorithm in chunks with operands rounded to bfloat16 and sums in fp32 makes
no error either. `exact.references` has such an algorithm, and the suite holds the inputs to it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from flash_kda.inputs.problem import BF16, FP32, Problem

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Spec:
    """One exact case."""

    name: str
    lengths: tuple[int, ...] | None = None  # packed
    batch: int = 1
    tokens: int = 0
    pad: int = 0  # rows past the last sequence
    heads: int = 2
    value_heads: int = 2
    key_dim: int = 128
    value_dim: int = 128
    dtype: np.dtype[Any] = BF16
    gate_dtype: np.dtype[Any] = BF16
    gate: str = "lower_bound"
    lower_bound: float = -5.0
    beta_kind: str = "logit"
    scale: float | None = 0.5
    state_in: np.dtype[Any] | None = FP32
    state_out: np.dtype[Any] | None = FP32
    has_bias: bool = True  # A_log and dt_bias are given
    halvings: int = 3  # of one channel between resets
    largest: int = 8  # |values| and |states|
    used_channels: int = 24  # keys are drawn from so many channels of a head
    seed: int = 0

    def but(self, **changes: Any) -> Spec:
        return replace(self, **changes)


@dataclass(frozen=True)
class Exact:
    """A problem and its exact answer in float64."""

    spec: Spec
    problem: Problem
    out: Array  # [B, T, HV, V]
    final: Array  # [N, HV, V, K], of each sequence


def _raw_gate(spec: Spec, rng: np.random.Generator, closed: Array) -> Array:
    """Raw gates whose decay is exactly 0 where `closed`, exactly 1 elsewhere."""
    if spec.gate == "log_decay":
        return np.where(closed, -np.inf, 0.0)
    if spec.gate == "lower_bound" and spec.lower_bound == 0:
        return rng.standard_normal(closed.shape, dtype=np.float32)
    size = rng.uniform(1e4, 2e4, closed.shape).astype(np.float32)
    return np.where(closed, size, -size)


def _strengths(spec: Spec, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Wanted strengths; `_advance` turns some into 1 where a channel's bits run out."""
    choices = [0.0, 1.0, 1.0, 2.0] if spec.beta_kind == "doubled_logit" else [0.0, 0.5, 0.5, 1.0]
    return rng.choice(choices, shape)


def _raw_beta(spec: Spec, b: Array) -> Array:
    if spec.beta_kind == "probability":
        return b
    p = b / 2 if spec.beta_kind == "doubled_logit" else b
    return np.select([p == 0, p == 0.5, p == 1], [-np.inf, 0.0, np.inf], np.nan)


@dataclass
class _Rows:
    """What the exact walk needs of each token: [B, T, heads]."""

    key: Array  # channel of the key
    key_sign: Array  # +-1, 0 for a zero key
    query: Array  # [B, T, heads, 2] channels
    query_sign: Array  # [B, T, heads, 2]
    values: Array  # [B, T, HV, V]
    strength: Array  # [B, T, HV], adjusted on the way
    closed: Array  # [B, T, HV, K] decay 0


def _draw(spec: Spec, rng: np.random.Generator, B: int, T: int) -> _Rows:
    H, HV, K, V = spec.heads, spec.value_heads, spec.key_dim, spec.value_dim
    used = np.stack([rng.permutation(K)[: min(K, spec.used_channels)] for _ in range(H)])
    pick = rng.integers(0, used.shape[1], (B, T, H))
    key = used[np.arange(H), pick]
    key_sign = rng.choice([-1, 1], (B, T, H)) * (rng.random((B, T, H)) > 0.05)
    near = used[np.arange(H)[:, None], rng.integers(0, used.shape[1], (B, T, H, 2))]
    query = np.where(rng.random((B, T, H, 2)) < 0.8, near, rng.integers(0, K, (B, T, H, 2)))
    query_sign = rng.choice([-1, 1], (B, T, H, 2))
    single = (rng.random((B, T, H)) < 0.5) | (query[..., 0] == query[..., 1])
    query_sign[..., 1] *= ~single
    query_sign[..., 0] *= rng.random((B, T, H)) > 0.03
    values = rng.integers(-spec.largest, spec.largest + 1, (B, T, HV, V), dtype=np.int16)
    can_close = spec.gate != "lower_bound"
    closed = np.zeros((B, T, HV, K), bool)
    if can_close:
        closed = (rng.random((B, T, HV, 1)) < 0.06) & (rng.random((B, T, HV, K)) < 0.4)
        closed |= rng.random((B, T, HV, 1)) < 0.005  # everything forgotten
    return _Rows(
        key, key_sign, query, query_sign, values, _strengths(spec, rng, (B, T, HV)), closed
    )


def _one_hot(channels: Array, signs: Array, K: int, dtype: np.dtype[Any]) -> Array:
    """Sum of signed unit vectors over the last axis of `channels`."""
    x = np.zeros((*channels.shape[:-1], K), np.float32)
    for i in range(channels.shape[-1]):
        old = np.take_along_axis(x, channels[..., i, None], -1)
        np.put_along_axis(x, channels[..., i, None], old + signs[..., i, None], -1)
    return x.astype(dtype)


def _advance(spec: Spec, rows: _Rows, spans: list[tuple[int, int, int]], S: Array) -> Array:
    """Walks all sequences together, channel by channel; returns out, updates S [N, HV, K, V].

    Changes strengths in `rows` to 1 where bits would run out.
    """
    B, T, HV = rows.strength.shape
    out = np.zeros((B, T, HV, spec.value_dim))
    scale = spec.key_dim**-0.5 if spec.scale is None else spec.scale
    group = HV // spec.heads
    heads = np.arange(HV)
    halved = np.zeros((len(spans), HV, spec.key_dim), np.int64)
    size = np.full(halved.shape, float(spec.largest))  # a bound on |state|, for strengths of 2
    order = sorted(range(len(spans)), key=lambda n: spans[n][1] - spans[n][2])
    longest = max((end - start for _, start, end in spans), default=0)
    for t in range(longest):
        n = np.array([n for n in order if spans[n][2] - spans[n][1] > t])
        b_row = np.array([spans[i][0] for i in n])
        at = np.array([spans[i][1] + t for i in n])
        closed = rows.closed[b_row, at]
        if closed.any():
            i, hv, c = np.nonzero(closed)
            S[n[i], hv, c] = 0
            halved[n[i], hv, c] = 0
            size[n[i], hv, c] = 0
        k = rows.key[b_row, at][:, heads // group]  # [n, HV]
        sign = rows.key_sign[b_row, at][:, heads // group]
        where = (n[:, None], heads[None], k)
        b = rows.strength[b_row, at]
        spent = (b == 0.5) & (halved[where] >= spec.halvings)
        spent |= (b == 2) & (size[where] > 4 * spec.largest)
        b = np.where(spent & (sign != 0), 1.0, b)
        rows.strength[b_row, at] = b
        writes = sign != 0
        halved[where] = np.where(writes & (b == 1), 0, halved[where] + (writes & (b == 0.5)))
        grown = 2 * spec.largest + size[where]
        size[where] = np.select(
            [writes & (b == 1), writes & (b == 2)], [float(spec.largest), grown], size[where]
        )
        column = S[where]
        u = b[..., None] * (rows.values[b_row, at] - sign[..., None] * column)
        S[where] = column + u * sign[..., None]
        q, q_sign = rows.query[b_row, at], rows.query_sign[b_row, at]
        total = np.zeros_like(u)
        for i in range(2):
            read = S[n[:, None], heads[None], q[:, heads // group, i]]
            total += q_sign[:, heads // group, i, None] * read
        out[b_row, at] = scale * total
    return out


def generate(spec: Spec) -> Exact:
    """Draws the case and walks it."""
    rng = np.random.default_rng([spec.seed, *spec.name.encode()])
    B, T, cu = spec.batch, spec.tokens, None
    spans = [(b, 0, T) for b in range(B)]
    if spec.lengths is not None:
        cu = np.concatenate([[0], np.cumsum(spec.lengths)]).astype(np.int64)
        B, T = 1, int(cu[-1]) + spec.pad
        spans = [(0, int(a), int(b)) for a, b in pairwise(cu)]
    rows = _draw(spec, rng, B, T)
    HV, K, V = spec.value_heads, spec.key_dim, spec.value_dim
    S = np.zeros((len(spans), HV, K, V))
    if spec.state_in is not None:
        S[...] = rng.integers(-spec.largest, spec.largest + 1, S.shape)
    state = None if spec.state_in is None else np.swapaxes(S, 2, 3).astype(spec.state_in)
    out = _advance(spec, rows, spans, S)
    given = spec.gate != "log_decay" and spec.has_bias
    problem = Problem(
        q=_one_hot(rows.query, rows.query_sign, K, spec.dtype),
        k=_one_hot(rows.key[..., None], rows.key_sign[..., None], K, spec.dtype),
        v=rows.values.astype(spec.dtype),
        g=_raw_gate(spec, rng, rows.closed).astype(spec.gate_dtype),
        beta=_raw_beta(spec, rows.strength).astype(spec.gate_dtype),
        A_log=rng.uniform(0, 0.5, HV).astype(np.float32) if given else None,
        dt_bias=rng.standard_normal((HV, K), dtype=np.float32) if given else None,
        initial_state=None if state is None else np.ascontiguousarray(state),
        cu_seqlens=cu,
        gate=spec.gate,  # type: ignore[arg-type]
        beta_kind=spec.beta_kind,  # type: ignore[arg-type]
        l2norm=False,
        lower_bound=spec.lower_bound,
        scale=spec.scale,
        final_dtype=spec.state_out,
    )
    return Exact(spec, problem, out, np.ascontiguousarray(np.swapaxes(S, 2, 3)))


def representable(x: Array, dtype: np.dtype[Any]) -> bool:
    """Whether every element of the float64 array survives the dtype."""
    return bool((x.astype(dtype).astype(np.float64) == x).all())
