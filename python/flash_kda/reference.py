"""The KDA recurrence, token by token, in NumPy: what every backend is measured against.

Per sequence and value head ``hv`` (its key head is ``hv // (HV // H)``), with state ``S`` of shape
``[V, K]``::

    q_t, k_t <- x / sqrt(sum(x * x) + 1e-6)                  if l2norm
    g_t [K]  <- lower_bound * sigmoid(exp(A_log) * (g + dt_bias))    gate="lower_bound"
                -exp(A_log) * softplus(g + dt_bias)                  gate="softplus"
                g                                                    gate="log_decay"
    b_t      <- sigmoid(beta)                                    beta_kind="logit"
                2 * sigmoid(beta)                                beta_kind="doubled_logit"
                beta                                             beta_kind="probability"
    S        <- S * exp(g_t)[None, :]                        decay first
    u_t [V]  <- b_t * (v_t - S k_t)                          then the error
    S        <- S + u_t k_t^T
    o_t [V]  <- scale * S q_t

Source: Kimi Linear technical report (arXiv:2510.26692). It needs NumPy alone, is slow on purpose
(about 30 us per token and head at K = V = 128) and shares no code with the backends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from flash_kda._host import Array, to_numpy
from flash_kda.metrics import relative_rms, worst_bf16_units

__all__ = [
    "log_decay",
    "recurrent_kda",
    "relative_rms",
    "sigmoid",
    "softplus",
    "to_numpy",
    "worst_bf16_units",
    "write_strength",
]

GateKind = Literal["lower_bound", "softplus", "log_decay"]
BetaKind = Literal["logit", "doubled_logit", "probability"]
Progress = Callable[[int, int], None]

_NORM_EPSILON = 1e-6
_Due = dict[int, list[tuple[int, int]]]  # position -> (item, checkpoint) pairs due there
_TIME_BLOCK = 64  # tokens converted to the computation's dtype at a time
_STATE_BUDGET = 1 << 19  # bytes of state worked on at once: stays in a core's second-level cache


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow; exactly 0, 1/2, 1 at -inf, 0, +inf."""
    e = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, np.ones_like(e), e) / (1 + e))


def softplus(x: Array) -> Array:
    """log(1 + exp(x)), accurate for large arguments of both signs."""
    return np.asarray(np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))


def log_decay(
    g: Array, A_log: Array | None, dt_bias: Array | None, gate: GateKind, lower_bound: float
) -> Array:
    """The log decay of each channel. ``A_log`` and ``dt_bias`` must broadcast against ``g``."""
    if gate == "log_decay":
        return g
    x = g if dt_bias is None else g + dt_bias
    with np.errstate(over="ignore", invalid="ignore"):
        a = g.dtype.type(1) if A_log is None else np.exp(A_log)
        # Where exp(A_log) overflows, a zero argument still is zero: the gate is half open there.
        if gate == "lower_bound":
            y = np.where(x == 0, 0, a * x).astype(g.dtype)
            return np.asarray(g.dtype.type(lower_bound) * sigmoid(y))
        if gate == "softplus":
            y = softplus(x)
            return np.asarray(-np.where(y == 0, 0, a * y).astype(g.dtype))
    raise ValueError(f"gate: expected 'lower_bound', 'softplus' or 'log_decay', got {gate!r}")


def write_strength(beta: Array, beta_kind: BetaKind) -> Array:
    """The factor on each token's update."""
    if beta_kind == "logit":
        return sigmoid(beta)
    if beta_kind == "doubled_logit":
        return np.asarray(2 * sigmoid(beta))
    if beta_kind == "probability":
        return beta
    raise ValueError(
        f"beta_kind: expected 'logit', 'doubled_logit' or 'probability', got {beta_kind!r}"
    )


@dataclass(frozen=True)
class _Item:
    """One head of one sequence: rows [start, start + length) of batch row `batch`."""

    sequence: int
    batch: int
    start: int
    length: int
    head: int  # value head in the caller's arrays
    column: int  # its place in the outputs


@dataclass(frozen=True)
class _Inputs:
    """The caller's arrays on the host, holding the wanted heads alone, and the options."""

    q: Array  # [B, T, n, K], n = number of wanted value heads; so are k, v, g, beta
    k: Array
    v: Array
    g: Array
    beta: Array
    A_log: Array | None  # [n]
    dt_bias: Array | None  # [n, K]
    dtype: np.dtype[Any]
    gate: GateKind = "lower_bound"
    beta_kind: BetaKind = "logit"
    l2norm: bool = True
    lower_bound: float = -5.0
    scale: float = 1.0


def _take_heads(x: Any, heads: Sequence[int], name: str) -> Array:
    """[B, T, heads, ...]; picks before it copies to the host: few heads of many are cheap."""
    if not hasattr(x, "shape") or len(x.shape) < 3:
        raise ValueError(
            f"{name}: expected [batch, tokens, heads, ...], got {getattr(x, 'shape', x)}"
        )
    if isinstance(x, np.ndarray) and list(heads) != list(range(x.shape[2])):
        return np.stack([x[:, :, head] for head in heads], axis=2)
    picked = x if list(heads) == list(range(x.shape[2])) else x[:, :, list(heads)]
    return to_numpy(picked, name)


def _items(
    offsets: list[int] | None, batch: int, tokens: int, heads: Sequence[int]
) -> tuple[list[_Item], int]:
    """Every (sequence, head), longest first, and the number of sequences."""
    if offsets is None:
        spans = [(b, 0, tokens) for b in range(batch)]
    else:
        if batch != 1:
            raise ValueError(f"cu_seqlens: expected a batch of 1 with it, got {batch}")
        rising = all(a <= b for a, b in pairwise(offsets))
        if not offsets or offsets[0] != 0 or not rising or offsets[-1] > tokens:
            raise ValueError(
                f"cu_seqlens: expected offsets rising from 0 to at most {tokens}, got {offsets[:8]}"
            )
        spans = [(0, a, b - a) for a, b in pairwise(offsets)]
    items = [
        _Item(n, b, start, length, head, column)
        for n, (b, start, length) in enumerate(spans)
        for column, head in enumerate(heads)
    ]
    items.sort(key=lambda item: -item.length)
    return items, len(spans)


def _load(inputs: _Inputs, items: Sequence[_Item], t0: int, t1: int) -> tuple[Array, ...]:
    """q, k, v, exp(g), b of tokens [t0, t1) of each item, with the items as the first axis.

    Shorter items are padded with zeros; nothing reads the padding.
    """

    def rows(x: Array) -> Array:
        out = np.zeros((len(items), t1 - t0, *x.shape[3:]), inputs.dtype)
        for i, item in enumerate(items):
            stop = min(t1, item.length)
            out[i, : stop - t0] = x[item.batch, item.start + t0 : item.start + stop, item.column]
        return out

    def of_head(x: Array | None) -> Array | None:
        if x is None:
            return None
        per_item = np.stack([x[item.column] for item in items]).astype(inputs.dtype)
        return per_item.reshape(len(items), 1, -1)

    q, k, v, g, beta = (rows(x) for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta))
    if inputs.l2norm:
        epsilon = inputs.dtype.type(_NORM_EPSILON)
        q = q / np.sqrt(np.sum(q * q, axis=-1, keepdims=True) + epsilon)
        k = k / np.sqrt(np.sum(k * k, axis=-1, keepdims=True) + epsilon)
    g = log_decay(
        g, of_head(inputs.A_log), of_head(inputs.dt_bias), inputs.gate, inputs.lower_bound
    )
    return q, k, v, np.exp(g), write_strength(beta, inputs.beta_kind)


def _run(
    inputs: _Inputs,
    items: Sequence[_Item],
    S: Array,  # [items, V, K], updated
    o: Array,  # [B, T, n, V], written
    save: Callable[[int, Array], None],  # told the states after t tokens, for each t
) -> Iterator[int]:
    """Advances the items together, the longest first; yields the head-tokens that it did."""
    lengths = [item.length for item in items]
    scale = inputs.dtype.type(inputs.scale)
    outer = np.empty_like(S)
    for t0 in range(0, max(lengths, default=0), _TIME_BLOCK):
        active = [item for item in items if item.length > t0]
        t1 = min(t0 + _TIME_BLOCK, active[0].length)
        q, k, v, decay, b = _load(inputs, active, t0, t1)
        block = np.empty_like(v)
        for t in range(t0, t1):
            save(t, S)
            n = sum(length > t for length in lengths)
            i = t - t0
            state = S[:n]
            state *= decay[:n, i, None, :]
            u = b[:n, i, None] * (v[:n, i] - np.einsum("nvk,nk->nv", state, k[:n, i]))
            np.multiply(u[:, :, None], k[:n, i, None, :], out=outer[:n])
            state += outer[:n]
            block[:n, i] = scale * np.einsum("nvk,nk->nv", state, q[:n, i])
        for j, item in enumerate(active):
            stop = min(t1, item.length)
            o[item.batch, item.start + t0 : item.start + stop, item.column] = block[j, : stop - t0]
        yield sum(min(t1, item.length) - t0 for item in active)
    save(max(lengths, default=0), S)


def recurrent_kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    scale: float | None = None,
    A_log: Any = None,
    dt_bias: Any = None,
    gate: GateKind = "lower_bound",
    lower_bound: float = -5.0,
    beta_kind: BetaKind = "logit",
    l2norm: bool = True,
    initial_state: Any = None,
    initial_state_indices: Any = None,
    final_state_indices: Any = None,
    cu_seqlens: Any = None,
    checkpoints: Sequence[tuple[int, int]] | None = None,
    heads: Sequence[int] | None = None,
    dtype: npt.DTypeLike = np.float64,
    progress: Progress | None = None,
) -> tuple[Array, Array] | tuple[Array, Array, Array]:
    """Runs the recurrence of this module's docstring and rounds nowhere but in ``dtype``.

    Args:
      q: queries ``[B, T, H, K]``.
      k: keys ``[B, T, H, K]``.
      v: values ``[B, T, HV, V]``.
      g: raw gate or log decay ``[B, T, HV, K]``.
      beta: writing strength ``[B, T, HV]``.
      scale: ``K ** -0.5`` if None.
      A_log: ``HV`` elements; its exponential is 1 if None.
      dt_bias: ``[HV, K]`` or ``[HV * K]``; 0 if None.
      gate: how ``g`` becomes the log decay, see the module's docstring.
      lower_bound: of the log decay, for ``gate="lower_bound"``.
      beta_kind: how ``beta`` becomes the writing strength.
      l2norm: whether ``q`` and ``k`` are normalised.
      initial_state: ``[N, HV, V, K]``, or a pool ``[slots, HV, V, K]`` with indices.
      initial_state_indices: ``[N]`` slots of the pool; a negative one starts from zero.
      final_state_indices: ``[N]``; then the returned final state is a copy of the pool
        ``initial_state`` with those slots replaced (negative: none).
      cu_seqlens: ``[N + 1]`` offsets of the sequences packed in ``T``; then ``B == 1``.
      checkpoints: pairs (sequence, position); the state after that many tokens of that sequence.
      heads: the value heads to compute, all if None; every array is still given with all heads, and
        the results hold these heads alone, in this order.
      dtype: the float type of the computation and of the results.
      progress: called with (head-tokens done, head-tokens in all) now and then.

    Returns:
      ``(o [B, T, heads, V], final_state [N, heads, V, K])``, and if ``checkpoints`` is not None the
      states there, ``[checkpoints, heads, V, K]``. Rows of ``o`` past the last sequence are zero.

    Raises:
      TypeError: an argument is no array. ValueError: shapes or options do not fit.
    """
    wanted = list(range(v.shape[2])) if heads is None else [int(h) for h in heads]
    dtype = np.dtype(dtype)
    inputs = _gather(q, k, v, g, beta, A_log, dt_bias, wanted, dtype)
    inputs = replace(inputs, gate=gate, beta_kind=beta_kind, l2norm=l2norm, lower_bound=lower_bound)
    inputs = replace(inputs, scale=q.shape[3] ** -0.5 if scale is None else scale)
    offsets = None if cu_seqlens is None else _integers(cu_seqlens, "cu_seqlens")
    items, sequences = _items(offsets, v.shape[0], v.shape[1], wanted)

    states = np.zeros((sequences, len(wanted), v.shape[3], q.shape[3]), dtype)
    pool = None if initial_state is None else to_numpy(initial_state, "initial_state")[:, wanted]
    if pool is not None:
        for n, slot in enumerate(_slots(initial_state_indices, sequences)):
            if slot >= 0:
                states[n] = pool[slot]
    o = np.zeros((*v.shape[:2], len(wanted), v.shape[3]), dtype)
    marks = [(int(n), int(p)) for n, p in checkpoints or ()]
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        saved = _advance(inputs, items, states, o, marks, progress)

    final = states
    if final_state_indices is not None:
        final = _into_pool(states, pool, _slots(final_state_indices, sequences))
    return (o, final) if checkpoints is None else (o, final, saved)


def _gather(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    A_log: Any,
    dt_bias: Any,
    wanted: list[int],
    dtype: np.dtype[Any],
) -> _Inputs:
    """The wanted value heads of every array, with the key head of each beside it."""
    key_heads, key_dim, value_heads = q.shape[2], q.shape[3], v.shape[2]
    if key_heads < 1 or value_heads % key_heads:
        raise ValueError(f"v: expected a multiple of {key_heads} heads, got {value_heads}")
    group = value_heads // key_heads
    bias = None if dt_bias is None else to_numpy(dt_bias, "dt_bias").reshape(value_heads, key_dim)
    a_log = None if A_log is None else to_numpy(A_log, "A_log").reshape(value_heads)
    return _Inputs(
        q=_take_heads(q, [h // group for h in wanted], "q"),
        k=_take_heads(k, [h // group for h in wanted], "k"),
        v=_take_heads(v, wanted, "v"),
        g=_take_heads(g, wanted, "g"),
        beta=_take_heads(beta, wanted, "beta"),
        A_log=None if a_log is None else a_log[wanted],
        dt_bias=None if bias is None else bias[wanted],
        dtype=dtype,
    )


def _advance(
    inputs: _Inputs,
    items: list[_Item],
    states: Array,  # [N, heads, V, K], updated
    o: Array,  # [B, T, heads, V], written
    marks: list[tuple[int, int]],  # checkpoints: (sequence, position)
    progress: Progress | None,
) -> Array:
    """Runs all items, a few at a time; returns the checkpoints [marks, heads, V, K]."""
    saved = np.zeros((len(marks), *states.shape[1:]), states.dtype)
    item_bytes = states.shape[2] * states.shape[3] * states.itemsize
    step = max(1, _STATE_BUDGET // max(1, item_bytes))
    total, done = sum(item.length for item in items), 0
    for i in range(0, len(items), step):
        part = items[i : i + step]
        S = np.stack([states[item.sequence, item.column] for item in part])
        due: dict[int, list[tuple[int, int]]] = {}
        for j, item in enumerate(part):
            for m, (n, position) in enumerate(marks):
                if n == item.sequence:
                    due.setdefault(position, []).append((j, m))

        def save(t: int, S: Array, part: list[_Item] = part, due: _Due = due) -> None:
            for j, m in due.get(t, ()):
                saved[m, part[j].column] = S[j]

        for advanced in _run(inputs, part, S, o, save):
            done += advanced
            if progress is not None:
                progress(done, total)
        for j, item in enumerate(part):
            states[item.sequence, item.column] = S[j]
    return saved


def _integers(x: Any, name: str) -> list[int]:
    return [int(i) for i in (x if isinstance(x, list | tuple) else to_numpy(x, name))]


def _slots(indices: Any, sequences: int) -> list[int]:
    if indices is None:
        return list(range(sequences))
    slots = _integers(indices, "state indices")
    if len(slots) != sequences:
        raise ValueError(f"state indices: expected {sequences} of them, got {len(slots)}")
    return slots


def _into_pool(final: Array, pool: Array | None, slots: list[int]) -> Array:
    """A copy of the pool (zeros, just large enough, if there is none) with the slots replaced."""
    size = max(slots, default=-1) + 1
    shape, dtype = (size, *final.shape[1:]), final.dtype
    result = np.zeros(shape, dtype) if pool is None else pool.astype(dtype)
    for n, slot in enumerate(slots):
        if slot >= 0:
            result[slot] = final[n]
    return result
