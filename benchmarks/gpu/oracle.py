"""The recurrence in fp64, token by token, all heads at once, in torch: quick on a GPU.

Written for one sequence; shares no code with the package. tests/python/test_gpu_bench.py compares
it with `flash_kda.reference`.
"""

from __future__ import annotations

import torch
from benchmarks.gpu.data import Inputs

_EPSILON = 1e-6
_PART = 2048  # tokens whose factors are made at a time


def recurrence(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [T, H, V] and the last state [H, V, K] in fp64. One sequence (no cu_seqlens)."""
    if inputs.cu_seqlens is not None or inputs.q.shape[0] != 1:
        raise ValueError("inputs: expected one sequence, B = 1 without cu_seqlens")
    _, tokens, heads, value_dim = inputs.v.shape
    key_dim = inputs.q.shape[3]
    device = inputs.v.device
    state = torch.zeros(heads, value_dim, key_dim, dtype=torch.float64, device=device)
    if inputs.initial_state is not None:
        state += inputs.initial_state[0]
    out = torch.empty(tokens, heads, value_dim, dtype=torch.float64, device=device)
    for start in range(0, tokens, _PART):
        _advance(inputs, slice(start, min(start + _PART, tokens)), state, out)
    return out, state


def _advance(inputs: Inputs, part: slice, state: torch.Tensor, out: torch.Tensor) -> None:
    """Takes `state` over the tokens of `part`, in place, and writes their outputs."""
    q, k, v, g, beta = (
        x[0, part].double() for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    )
    q = q / (q.square().sum(-1, keepdim=True) + _EPSILON).sqrt() * q.shape[-1] ** -0.5
    k = k / (k.square().sum(-1, keepdim=True) + _EPSILON).sqrt()
    steepness = inputs.A_log.double().exp()[:, None]
    decay = (inputs.lower_bound * (steepness * (g + inputs.dt_bias.double())).sigmoid()).exp()
    decay = decay[:, :, None, :]
    strength = beta.sigmoid()[:, :, None]
    key_columns, query_columns = k[..., None], q[..., None]
    for t in range(q.shape[0]):
        state *= decay[t]
        update = strength[t] * (v[t] - torch.bmm(state, key_columns[t])[:, :, 0])
        state.baddbmm_(update[:, :, None], k[t][:, None, :])
        out[part.start + t] = torch.bmm(state, query_columns[t])[:, :, 0]


def worst_relative_rms(x: torch.Tensor, reference: torch.Tensor, head_dim: int) -> float:
    """The largest rms(x - reference) / rms(reference) of a head; inf where x is not finite."""
    dims = [d for d in range(reference.dim()) if d != head_dim]
    error = (x.double() - reference).square().sum(dims).sqrt()
    ratio = error / reference.square().sum(dims).sqrt()
    ratio = torch.where(error == 0, torch.zeros_like(ratio), ratio)
    return float(torch.nan_to_num(ratio, nan=torch.inf).max())
