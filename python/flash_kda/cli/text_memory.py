"""Text as keys and values: how `recall` puts the bytes of a file into the operator's memory.

Token t of a sequence stores what byte t - 1 taught and asks for byte t:

    k_t = features(bytes before t - 1)    v_t = code(byte t - 1)    q_t = features(bytes before t)

so every answer rests on pairs stored before it, although the operator writes before it reads.
docs/recall.md explains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flash_kda.cli.problem import Array

# One value channel for each pair of bytes (b, b + 128), told apart by the sign.
VALUE_DIM = 128
NO_ANSWER = -1

# Weight of the code of the j last bytes in the features: _BACK_OFF ** (j - 1). Longer contexts are
# more exact but rarer; with the shorter ones beside them, an unseen context finds its relatives.
_BACK_OFF = 0.75
_BEFORE_START = 256  # stands for a byte before the file's first
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: Array) -> Array:
    """The finaliser of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = x ^ (x >> np.uint64(31))
    return mixed


def _signs(hashes: Array, size: int) -> Array:
    """[n] 64-bit hashes -> [n, size] of -1 and +1 in int8."""
    words = -(-size // 64)
    with np.errstate(over="ignore"):
        steps = _GOLDEN * np.arange(1, words + 1, dtype=np.uint64)
        bits = _mix(hashes[:, None] + steps[None, :])
    flat = np.unpackbits(bits.view(np.uint8).reshape(len(hashes), -1), axis=1)[:, :size]
    signs: Array = (2 * flat.astype(np.int8) - 1).astype(np.int8)
    return signs


def features(text: Array, start: int, stop: int, orders: Sequence[int], key_dim: int) -> Array:
    """Features of the bytes before each position of [start, stop).

    For order n: the sum over j = 1 .. n of 0.75 ** (j - 1) times a random sign vector that is the
    hash of the last j bytes. `text` is the whole file, uint8. Returns unit rows in fp32,
    [stop - start, orders, K].
    """
    count, longest = stop - start, max(orders)
    padded = np.full(count + longest, _BEFORE_START, np.uint64)
    known = min(start, longest)
    padded[longest - known :] = text[start - known : stop]
    summed = np.zeros((count, key_dim), np.float32)
    out = np.empty((count, len(orders), key_dim), np.float32)
    hashes = np.zeros(count, np.uint64)
    for j in range(1, longest + 1):
        with np.errstate(over="ignore"):
            hashes = _mix(
                hashes * _GOLDEN + padded[longest - j : longest - j + count] + np.uint64(j)
            )
        summed += np.float32(_BACK_OFF ** (j - 1)) * _signs(hashes, key_dim)
        if j in orders:
            rows = summed / np.maximum(np.linalg.norm(summed, axis=1, keepdims=True), 1e-6)
            for i in (i for i, order in enumerate(orders) if order == j):
                out[:, i] = rows
    return out


def encode(
    text: Array, start: int, stop: int, orders: Sequence[int], key_dim: int
) -> tuple[Array, Array, Array]:
    """q, k [tokens, orders, K] and v [tokens, V] in fp32 for tokens [start, stop) of a file."""
    if start == stop:
        empty = np.zeros((0, len(orders), key_dim), np.float32)
        return empty, empty, np.zeros((0, VALUE_DIM), np.float32)
    first = max(0, start - 1)
    rows = features(text, first, stop, orders, key_dim)
    v = np.zeros((stop - start, VALUE_DIM), np.float32)
    learned = text[first : stop - 1].astype(np.int64)
    v[1 if start == 0 else 0 :][np.arange(len(learned)), learned % VALUE_DIM] = np.where(
        learned < 128, 1, -1
    )
    if start > 0:
        return rows[1:], rows[:-1], v
    nothing = np.zeros_like(rows[:1])  # the first token has nothing to store
    return rows, np.concatenate([nothing, rows[:-1]]), v


def decode(out: Array) -> Array:
    """[..., V] read-outs -> [...] bytes as int16, NO_ANSWER where the memory is empty."""
    values = out.astype(np.float32)
    channel = np.argmax(np.abs(values), axis=-1)
    top = np.take_along_axis(values, channel[..., None], axis=-1)[..., 0]
    answer = channel + np.where(top < 0, 128, 0)
    decoded: Array = np.where(top == 0, NO_ANSWER, answer).astype(np.int16)
    return decoded


def count_predictions(text: Array, order: int) -> Array:
    """What a plain count-based predictor says: the byte that followed the context most often.

    The context is the last `order` bytes. Ties go to the later byte; NO_ANSWER for a context not
    seen before. It never forgets, and its table grows with the text.
    """
    data = text.tobytes()
    answers = np.full(len(data), NO_ANSWER, np.int16)
    counts: dict[bytes, dict[int, int]] = {}
    best: dict[bytes, int] = {}
    for t, byte in enumerate(data):
        context = data[max(0, t - order) : t]
        seen = counts.get(context)
        if seen is None:
            counts[context] = {byte: 1}
            best[context] = byte
            continue
        answers[t] = best[context]
        seen[byte] = seen.get(byte, 0) + 1
        if seen[byte] >= seen[best[context]]:
            best[context] = byte
    return answers


@dataclass(frozen=True)
class Memory:
    """Constants of the memory: the share of the error written each time, and how long it holds."""

    write: float = 0.1
    half_life: float = math.inf  # tokens until a stored value has halved
    key_dim: int = 128

    def beta_logit(self) -> float:
        """`beta` whose sigmoid is `write`; +inf for 1."""
        return math.inf if self.write == 1 else math.log(self.write / (1 - self.write))

    def raw_gate(self, lower_bound: float) -> float:
        """`g` whose bounded gate is a decay with this half-life (A_log = dt_bias = 0)."""
        share = math.log(2) / self.half_life / -lower_bound
        return -60.0 if share < 1e-20 else math.log(share / (1 - share))
