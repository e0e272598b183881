"""How far a result is from the reference: per sequence and head, as the operator promises it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from flash_kda._host import Array, to_numpy


def relative_rms(x: Any, ref: Any, axis: tuple[int, ...] | None = None) -> Array:
    """``rms(x - ref) / rms(ref)`` over ``axis`` (all axes if None), in float64.

    0 where both are all zero; inf where ``ref`` alone is zero or ``x`` is not finite.
    """
    a, b = to_numpy(x).astype(np.float64), to_numpy(ref).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.sqrt(np.sum((a - b) ** 2, axis=axis))
        size = np.sqrt(np.sum(b * b, axis=axis))
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(error == 0, 0.0, error / size)
    return np.where(np.isfinite(ratio), ratio, np.inf)


def worst_bf16_units(x: Any, ref: Any, axis: tuple[int, ...] | None = None) -> Array:
    """The largest ``|x - ref|`` over ``axis``, in bf16 units (last places) of the top ``|ref|``.

    One unit of ``m`` is ``2 ** (floor(log2 m) - 7)``. 0 where both are zero, inf where ``x`` is not
    finite.
    """
    a, b = to_numpy(x).astype(np.float64), to_numpy(ref).astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.max(np.abs(a - b), axis=axis, initial=0.0)
    largest = np.max(np.abs(b), axis=axis, initial=0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        unit = np.exp2(np.floor(np.log2(largest)) - 7)
        ratio = np.where(error == 0, 0.0, error / unit)
    return np.where(np.isfinite(ratio), ratio, np.inf)


@dataclass(frozen=True)
class HeadError:
    """One head of one sequence."""

    sequence: int
    head: int  # position in the compared arrays
    rms: float  # relative RMS error
    units: float  # worst element, in bf16 units of the head's largest reference element


def errors_by_head(
    x: Any, ref: Any, cu_seqlens: Sequence[int] | None = None
) -> Iterator[HeadError]:
    """Compares ``[B, T, heads, ...]`` (packed with ``cu_seqlens``) for each sequence and head.

    States ``[N, heads, V, K]`` compare as ``x[:, None]``: N sequences of one row.
    """
    a, b = to_numpy(x), to_numpy(ref)
    if a.shape != b.shape:
        raise ValueError(f"x: expected the reference's shape {b.shape}, got {a.shape}")
    if cu_seqlens is None:
        spans = [(n, slice(None)) for n in range(a.shape[0])]
    else:
        bounds = [int(i) for i in cu_seqlens]
        spans = [(0, slice(i, j)) for i, j in pairwise(bounds)]
    for sequence, (row, span) in enumerate(spans):
        for head in range(a.shape[2]):
            part, expected = a[row, span, head], b[row, span, head]
            rms = float(relative_rms(part, expected))
            yield HeadError(sequence, head, rms, float(worst_bf16_units(part, expected)))
