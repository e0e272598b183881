"""Independent PyTorch references: token by token, and in chunks with bf16 operands."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flash_kda.inputs.call import to_torch
from flash_kda.inputs.problem import Problem

Array = np.ndarray[Any, Any]
Pair = tuple[Array, Array]


def _head_rows(
    p: Problem, heads: list[int], dtype: torch.dtype
) -> list[tuple[int, slice, int, dict[str, torch.Tensor]]]:
    """Sequence, rows, batch row; q, k, v [heads, L, .], decay [heads, L, K], b [heads, L]."""
    group = p.v.shape[2] // p.q.shape[2]
    key_heads = [h // group for h in heads]
    parts = []
    for n, (row, start, end) in enumerate(p.offsets):
        rows = slice(start, end)
        picked = {
            "q": p.q[row, rows][:, key_heads],
            "k": p.k[row, rows][:, key_heads],
            "v": p.v[row, rows][:, heads],
            "g": p.g[row, rows][:, heads],
            "beta": p.beta[row, rows][:, heads],
        }
        x = {name: to_torch(np.ascontiguousarray(a), "cpu").to(dtype) for name, a in picked.items()}
        x = {name: a.transpose(0, 1) for name, a in x.items()}
        g = x.pop("g")
        if p.gate != "log_decay":
            if p.dt_bias is not None:
                g = g + torch.from_numpy(p.dt_bias[heads]).to(dtype)[:, None]
            a = torch.ones(len(heads), 1, 1, dtype=dtype)
            if p.A_log is not None:
                a = torch.from_numpy(p.A_log[heads]).to(dtype).exp()[:, None, None]
            if p.gate == "lower_bound":
                g = p.lower_bound * torch.sigmoid(a * g)
            else:
                g = -a * torch.nn.functional.softplus(g)
        x["decay"] = g.exp()
        beta = x.pop("beta")
        if p.beta_kind != "probability":
            beta = torch.sigmoid(beta) * (2 if p.beta_kind == "doubled_logit" else 1)
        x["b"] = beta
        parts.append((n, rows, row, x))
    return parts


def _initial(p: Problem, n: int, heads: list[int], dtype: torch.dtype) -> torch.Tensor:
    if p.initial_state is None:
        return torch.zeros(len(heads), p.v.shape[3], p.q.shape[3], dtype=dtype)
    return torch.from_numpy(p.initial_state[n, heads].astype(np.float32)).to(dtype)


def _scale(p: Problem) -> float:
    return float(p.q.shape[3] ** -0.5 if p.scale is None else p.scale)


def by_token(p: Problem, heads: list[int], dtype: torch.dtype) -> Pair:
    """The recurrence token by token; out [B, T, heads, V], states [N, heads, V, K] as float64."""
    out = torch.zeros(*p.v.shape[:2], len(heads), p.v.shape[3], dtype=dtype)
    states = torch.zeros(p.sequences, len(heads), p.v.shape[3], p.q.shape[3], dtype=dtype)
    for n, rows, row, x in _head_rows(p, heads, dtype):
        S = _initial(p, n, heads, dtype)
        o = torch.zeros(len(heads), rows.stop - rows.start, p.v.shape[3], dtype=dtype)
        for t in range(rows.stop - rows.start):
            S = S * x["decay"][:, t, None, :]
            k = x["k"][:, t, :, None]
            u = x["b"][:, t, None, None] * (x["v"][:, t, :, None] - S @ k)
            S = S + u @ k.transpose(1, 2)
            o[:, t] = _scale(p) * (S @ x["q"][:, t, :, None])[..., 0]
        out[row, rows] = o.transpose(0, 1)
        states[n] = S
    return out.double().numpy(), states.double().numpy()


def _round(x: torch.Tensor) -> torch.Tensor:
    """To bfloat16 and back: what a tensor core's operand is."""
    return x.to(torch.bfloat16).to(torch.float32)


def by_chunk(p: Problem, heads: list[int], chunk: int = 64) -> Pair:
    """64 tokens at a time, every matrix operand rounded to bfloat16, sums in fp32.

    With decay 0 or 1 alone, the decay between two tokens says whether a channel was closed between
    them: D[i, j, c] in {0, 1}. Then A = b_i sum_c k_i D_ij k_j, U = (I + A)^-1 diag(b) (V - (K D_i)
    S^T).
    """
    out = torch.zeros(*p.v.shape[:2], len(heads), p.v.shape[3])
    states = torch.zeros(p.sequences, len(heads), p.v.shape[3], p.q.shape[3])
    for n, rows, row, x in _head_rows(p, heads, torch.float32):
        S = _initial(p, n, heads, torch.float32)
        length = rows.stop - rows.start
        for t in range(0, length, chunk):
            part = {name: a[:, t : min(t + chunk, length)] for name, a in x.items()}
            o, S = _one_chunk(part, S, _scale(p))
            out[row, rows.start + t : rows.start + t + o.shape[1]] = o.transpose(0, 1)
        states[n] = S
    return out.double().numpy(), states.double().numpy()


def _one_chunk(
    x: dict[str, torch.Tensor], S: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, b, decay = x["q"], x["k"], x["v"], x["b"], x["decay"]
    count = q.shape[1]
    if not bool(((decay == 0) | (decay == 1)).all()):
        raise ValueError("decay: expected exactly 0 or 1 everywhere")
    closings = torch.cumsum((decay == 0).to(torch.int32), 1)  # [h, C, K]
    open_between = (closings[:, :, None] == closings[:, None]).to(torch.float32)  # D [h, i, j, c]
    open_before = (closings == 0).to(torch.float32)  # from before the chunk's first token
    strict = torch.ones(count, count).tril(-1)
    upto = torch.ones(count, count).tril()
    A = b[..., None] * torch.einsum("hic,hijc,hjc->hij", k, open_between, k) * strict
    eye = torch.eye(count).expand(A.shape)
    M = _round(torch.linalg.solve_triangular(eye + A, eye, upper=False, unitriangular=True))
    W = _round(M @ _round(b[..., None] * _round(k * open_before)))
    U = _round(M @ _round(b[..., None] * v)) - W @ _round(S).transpose(1, 2)
    U = _round(U)
    P = _round(torch.einsum("hic,hijc,hjc->hij", q, open_between, k) * upto)
    o = scale * (_round(q * open_before) @ _round(S).transpose(1, 2) + P @ U)
    last = open_between[:, -1]  # [h, j, c]
    S = S * open_before[:, -1][:, None] + U.transpose(1, 2) @ _round(k * last)
    return o, S
