"""Accuracy of each provider on the same inputs, against the recurrence in fp64.

Every head has data of its own; a row holds the worst head. The inputs are the ones of
`flash_kda.inputs` that kernels of this kind differ on, here for as many heads as a timed case has,
with an initial state as there: the Triton baseline would have to be tuned anew otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from benchmarks.gpu.cases import HEAD_DIM
from benchmarks.gpu.data import Inputs, generator, normal
from benchmarks.gpu.oracle import worst_relative_rms
from benchmarks.gpu.providers import Output

Output64 = tuple[torch.Tensor, torch.Tensor]  # as oracle.recurrence has it

_SATURATED, _OFF = 20.0, -60.0  # raw gates that put the sigmoid at 1 and at 0


def _ordinary(name: str, heads: int, tokens: int, device: str, beta_mean: float = 0.0) -> Inputs:
    rng = generator(name, device)
    rows = (1, tokens, heads, HEAD_DIM)
    return Inputs(
        q=normal(rng, rows),
        k=normal(rng, rows),
        v=normal(rng, rows),
        g=normal(rng, rows),
        beta=normal(rng, rows[:3], beta_mean),
        A_log=torch.rand(heads, generator=rng, device=device) * 0.5,
        dt_bias=normal(rng, (heads, HEAD_DIM), 0.0, 0.1, torch.float32),
        initial_state=normal(rng, (1, heads, HEAD_DIM, HEAD_DIM), dtype=torch.float32),
        cu_seqlens=None,
    )


def _with_raw_gate(inputs: Inputs, g: torch.Tensor) -> Inputs:
    """Names the raw gates: then A_log and dt_bias are 0."""
    return inputs.but(
        g=g.to(torch.bfloat16).expand_as(inputs.g).contiguous(),
        A_log=torch.zeros_like(inputs.A_log),
        dt_bias=torch.zeros_like(inputs.dt_bias),
    )


def default(heads: int, tokens: int, device: str) -> Inputs:
    """Independent N(0, 1)."""
    return _ordinary("default", heads, tokens, device)


def saturated_gate(heads: int, tokens: int, device: str) -> Inputs:
    """By head in turn: the bound everywhere, in even channels, for every second 16 tokens."""
    inputs = _ordinary("saturated-gate", heads, tokens, device)
    g = torch.full((tokens, 3, HEAD_DIM), _SATURATED, device=device)
    g[:, 1, 1::2] = _OFF
    g[torch.arange(tokens, device=device) // 16 % 2 == 1, 2] = _OFF
    return _with_raw_gate(inputs, g[:, torch.arange(heads, device=device) % 3])


def slow_decay(heads: int, tokens: int, device: str) -> Inputs:
    """A decay of 0.9998 a token over a long sequence."""
    inputs = _ordinary("slow-decay", heads, tokens, device, beta_mean=-2.0)
    return _with_raw_gate(inputs, torch.full((1,), -10.0, device=device))


def _parallel_keys(name: str, heads: int, tokens: int, device: str, cosine: float) -> Inputs:
    """Rows q = k of this pairwise cosine; v of period 16, full writes, almost no decay."""
    inputs = _ordinary(name, heads, tokens, device)
    rng = generator(name + " keys", device)
    shared = normal(rng, (1, 1, heads, HEAD_DIM), dtype=torch.float32)
    unit = shared / shared.norm(dim=-1, keepdim=True)
    own = normal(rng, (1, tokens, heads, HEAD_DIM), dtype=torch.float32)
    own -= (own * unit).sum(-1, keepdim=True) * unit
    own /= own.norm(dim=-1, keepdim=True)
    keys = HEAD_DIM**0.5 * (cosine**0.5 * unit + (1.0 - cosine) ** 0.5 * own)
    v = normal(rng, (1, 16, heads, HEAD_DIM))[:, torch.arange(tokens, device=device) % 16]
    rows = keys.to(torch.bfloat16)
    inputs = inputs.but(
        q=rows, k=rows.clone(), v=v.contiguous(), beta=torch.full_like(inputs.beta, 8.0),
        initial_state=torch.zeros_like(inputs.initial_state),
    )  # fmt: skip
    return _with_raw_gate(inputs, torch.full((1,), -12.0, device=device))


def near_parallel_keys(heads: int, tokens: int, device: str) -> Inputs:
    """Keys of pairwise cosine 0.95."""
    return _parallel_keys("near-parallel-keys", heads, tokens, device, 0.95)


def identical_keys(heads: int, tokens: int, device: str) -> Inputs:
    """T1: all keys of a head are one row, so that updates nearly cancel."""
    return _parallel_keys("identical-keys", heads, tokens, device, 1.0)


INPUTS: dict[str, tuple[Callable[[int, int, str], Inputs], int]] = {
    "default": (default, 8192),
    "saturated-gate": (saturated_gate, 8192),
    "slow-decay": (slow_decay, 16384),
    "near-parallel-keys": (near_parallel_keys, 8192),
    "identical-keys": (identical_keys, 8192),
}


def row(name: str, provider: str, output: Output, expected: Output64) -> dict[str, Any]:
    """The worst head's relative RMS error of out and state."""
    out, state = output
    if state is None:
        raise ValueError(f"{provider}: expected a final state, got none")
    return {
        "input": name,
        "provider": provider,
        "out": worst_relative_rms(out[0], expected[0], head_dim=1),
        "state": worst_relative_rms(state[0], expected[1], head_dim=0),
    }
