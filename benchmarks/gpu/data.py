"""Inputs of a call as torch tensors, made on the device."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from benchmarks.gpu.cases import HEAD_DIM, Case

LOWER_BOUND = -5.0
STATE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "none": None}
# Elements drawn at a time in fp32, so that a draft never takes more room than the arrays.
_DRAFT = 1 << 26


@dataclass(frozen=True)
class Inputs:
    """One call with the bounded gate, l2norm on, beta as logits; H = HV, K = V = 128."""

    q: torch.Tensor  # [1, T, H, K] bf16
    k: torch.Tensor  # [1, T, H, K] bf16
    v: torch.Tensor  # [1, T, H, V] bf16
    g: torch.Tensor  # [1, T, H, K] bf16
    beta: torch.Tensor  # [1, T, H] bf16
    A_log: torch.Tensor  # [H] fp32
    dt_bias: torch.Tensor  # [H, K] fp32
    initial_state: torch.Tensor | None  # [N, H, V, K] fp32 or bf16
    cu_seqlens: torch.Tensor | None  # [N + 1] int64; None: one sequence
    lower_bound: float = LOWER_BOUND
    final_state: torch.dtype | None = torch.float32  # None: not asked for

    def but(self, **changes: Any) -> Inputs:
        """A copy with some fields replaced."""
        return replace(self, **changes)


def generator(name: str, device: str) -> torch.Generator:
    """Random numbers of their own for each name, the same in each run."""
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))


def normal(
    rng: torch.Generator,
    shape: Iterable[int],
    mean: float = 0.0,
    std: float = 1.0,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """N(mean, std) rounded to `dtype`."""
    x = torch.empty(tuple(shape), dtype=dtype, device=rng.device)
    flat = x.view(-1)
    for start in range(0, flat.numel(), _DRAFT):
        part = flat[start : start + _DRAFT]
        draft = torch.randn(part.numel(), generator=rng, device=rng.device)
        part.copy_(draft.mul_(std).add_(mean))
    return x


def random_inputs(case: Case, device: str) -> Inputs:
    """Independent N(0, 1) for q, k, v, raw gate, beta logit and state; A_log 0..0.5, bias 0.1 N."""
    rng = generator(case.name, device)
    rows = (1, case.tokens, case.heads, HEAD_DIM)
    offsets = list(accumulate(case.lengths, initial=0))
    state_type = STATE_TYPES[case.states]
    states = (len(case.lengths), case.heads, HEAD_DIM, HEAD_DIM)
    return Inputs(
        q=normal(rng, rows),
        k=normal(rng, rows),
        v=normal(rng, rows),
        g=normal(rng, rows),
        beta=normal(rng, rows[:3]),
        A_log=torch.rand(case.heads, generator=rng, device=device) * 0.5,
        dt_bias=normal(rng, (case.heads, HEAD_DIM), 0.0, 0.1, torch.float32),
        initial_state=None if state_type is None else normal(rng, states, dtype=state_type),
        cu_seqlens=torch.tensor(offsets, device=device) if case.packed else None,
        final_state=state_type,
    )
