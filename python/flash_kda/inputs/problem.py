"""One call as data: NumPy arrays, options, and the random distribution that inputs start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from flash_kda._host import Array
from flash_kda.reference import BetaKind, GateKind

try:
    import ml_dtypes
except ImportError as error:  # pragma: no cover - depends on the installation
    raise ImportError(
        "flash_kda.inputs needs ml_dtypes for bfloat16 arrays: pip install 'flash-kda[cli]'"
    ) from error

BF16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
FP16: np.dtype[Any] = np.dtype(np.float16)
FP32: np.dtype[Any] = np.dtype(np.float32)

ARRAYS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")


@dataclass(frozen=True)
class Problem:
    """The arguments of one call; shapes as in the contract. Arrays may be strided views."""

    q: Array  # [B, T, H, K]
    k: Array  # [B, T, H, K]
    v: Array  # [B, T, HV, V]
    g: Array  # [B, T, HV, K]
    beta: Array  # [B, T, HV]
    A_log: Array | None = None  # [HV]
    dt_bias: Array | None = None  # [HV, K]
    initial_state: Array | None = None  # [N, HV, V, K] or [slots, HV, V, K]
    cu_seqlens: Array | None = None  # [N + 1]
    initial_state_indices: Array | None = None  # [N]
    final_state_indices: Array | None = None  # [N]
    # (sequence, position, slot) of states to keep on the way
    checkpoints: tuple[tuple[int, int, int], ...] | None = None
    checkpoint_dtype: np.dtype[Any] = FP32
    gate: GateKind = "lower_bound"
    beta_kind: BetaKind = "logit"
    l2norm: bool = True
    lower_bound: float = -5.0
    scale: float | None = None
    final_dtype: np.dtype[Any] | None = FP32  # None: the final state is not asked for

    @property
    def offsets(self) -> list[tuple[int, int, int]]:
        """(batch row, first token, end) of each sequence."""
        batch, tokens = self.v.shape[:2]
        if self.cu_seqlens is None:
            return [(b, 0, tokens) for b in range(batch)]
        return [(0, a, b) for a, b in pairwise(int(i) for i in self.cu_seqlens)]

    @property
    def sequences(self) -> int:
        """N."""
        return len(self.offsets)

    @property
    def value_heads(self) -> int:
        """HV."""
        return int(self.v.shape[2])

    def but(self, **changes: Any) -> Problem:
        """A copy with some fields replaced."""
        return replace(self, **changes)

    def options(self) -> dict[str, Any]:
        """What is not an array, under the reference's names."""
        return {
            "gate": self.gate,
            "beta_kind": self.beta_kind,
            "l2norm": self.l2norm,
            "lower_bound": self.lower_bound,
            "scale": self.scale,
        }


def normal(
    rng: np.random.Generator,
    shape: Sequence[int],
    mean: float = 0.0,
    std: float = 1.0,
    dtype: npt.DTypeLike = BF16,
) -> Array:
    """N(mean, std) rounded to `dtype`."""
    x = rng.standard_normal(tuple(shape), dtype=np.float32)
    return np.asarray((x * np.float32(std) + np.float32(mean)).astype(dtype))


@dataclass(frozen=True)
class Shape:
    """Sizes of an ordinary problem; `lengths` packs sequences, else `batch` rows of `tokens`."""

    heads: int
    tokens: int = 0
    lengths: tuple[int, ...] | None = None
    batch: int = 1
    value_heads: int | None = None
    key_dim: int = 128
    value_dim: int = 128


def ordinary(
    rng: np.random.Generator,
    shape: Shape,
    *,
    dtype: np.dtype[Any] = BF16,
    gate_dtype: np.dtype[Any] = BF16,
    g: tuple[float, float] = (0.0, 1.0),
    beta: tuple[float, float] = (0.0, 1.0),
    state_in: np.dtype[Any] | None = None,
    state_out: np.dtype[Any] | None = FP32,
    index_dtype: npt.DTypeLike = np.int64,
) -> Problem:
    """Independent N(0, 1) for q, k, v; raw gate and beta logit N of (mean, std).

    A_log is uniform in 0..0.5, dt_bias 0.1 N(0, 1). An initial state, if asked for, is N(0, 1) and
    exact in bfloat16, so that the same values can be given in either state dtype.
    """
    B, T, H, K, V = shape.batch, shape.tokens, shape.heads, shape.key_dim, shape.value_dim
    HV = shape.value_heads or H
    cu, sequences = None, B
    if shape.lengths is not None:
        cu = np.concatenate([[0], np.cumsum(shape.lengths)]).astype(index_dtype)
        T, sequences = max(T, int(cu[-1])), len(shape.lengths)
    state = None
    if state_in is not None:
        state = normal(rng, (sequences, HV, V, K)).astype(state_in)
    return Problem(
        q=normal(rng, (B, T, H, K), dtype=dtype),
        k=normal(rng, (B, T, H, K), dtype=dtype),
        v=normal(rng, (B, T, HV, V), dtype=dtype),
        g=normal(rng, (B, T, HV, K), *g, dtype=gate_dtype),
        beta=normal(rng, (B, T, HV), *beta, dtype=gate_dtype),
        A_log=rng.uniform(0, 0.5, HV).astype(np.float32),
        dt_bias=normal(rng, (HV, K), 0, 0.1, np.float32),
        initial_state=state,
        cu_seqlens=cu,
        final_dtype=state_out,
    )


def with_raw_gate(problem: Problem, head: int, g: Any) -> None:
    """Names the raw gate of one head: writes it and sets that head's A_log and dt_bias to 0."""
    problem.g[:, :, head] = np.asarray(g).astype(problem.g.dtype)
    if problem.A_log is not None:
        problem.A_log[head] = 0
    if problem.dt_bias is not None:
        problem.dt_bias[head] = 0
