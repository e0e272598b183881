"""The table of cases that the C++ tests read as well, through the Python package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flash_kda.inputs.call import Result, is_poison, package
from flash_kda.inputs.layouts import spread
from flash_kda.inputs.problem import BF16, FP16, FP32, Problem, normal
from flash_kda.metrics import errors_by_head
from flash_kda.reference import recurrent_kda

TABLE = json.loads((Path(__file__).parents[1] / "cases.json").read_text())
DTYPES = {"bfloat16": BF16, "float16": FP16, "float32": FP32, None: None}
BOUNDS = {BF16: 5e-3, FP16: 1e-3, FP32: 5e-5}


def load(case: dict[str, Any]) -> dict[str, Any]:
    unknown = set(case) - set(TABLE["defaults"]) - {"name"}
    assert not unknown, f"{case['name']}: keys that the defaults lack: {unknown}"
    return TABLE["defaults"] | case


def slots(c: dict[str, Any], key: str) -> np.ndarray | None:
    return np.array(c[key], c["index_dtype"]) if c[key] else None


def build(c: dict[str, Any]) -> Problem:
    rng = np.random.default_rng(c["seed"])
    H, HV, K, V = c["H"], c["HV"], c["K"], c["V"]
    lengths, packed = c["seq_lens"], c["packed"]
    B, T = (1, sum(lengths) + c["padding"]) if packed else (len(lengths), lengths[0])
    dtype, std = DTYPES[c["dtype"]], 1 if c["l2norm"] else K**-0.5
    g = normal(rng, (B, T, HV, K), c["g_mean"], c["g_std"], c["g_dtype"])
    beta = normal(rng, (B, T, HV), dtype=c["beta_dtype"])
    if c["gate"] == "log_decay":
        g = -np.abs(g)
    if c["beta_kind"] == "probability":
        beta = rng.random((B, T, HV), np.float32).astype(beta.dtype)
    given = c["gate"] != "log_decay"
    state = None
    if c["initial_state"]:
        used = c["initial_state_indices"] + c["final_state_indices"] * c["in_place"]
        count = max(len(lengths), max(used, default=0) + 1)
        state = normal(rng, (count, HV, V, K), dtype=c["initial_state"])
    p = Problem(
        q=normal(rng, (B, T, H, K), 0, std, dtype),
        k=normal(rng, (B, T, H, K), 0, std, dtype),
        v=normal(rng, (B, T, HV, V), dtype=dtype),
        g=g,
        beta=beta,
        A_log=rng.uniform(0, 0.5, HV).astype(np.float32) if c["A_log"] and given else None,
        dt_bias=normal(rng, (HV, K), 0, 0.1, np.float32) if c["dt_bias"] and given else None,
        initial_state=state,
        cu_seqlens=np.cumsum([0, *lengths]).astype(c["index_dtype"]) if packed else None,
        initial_state_indices=slots(c, "initial_state_indices") if state is not None else None,
        final_state_indices=slots(c, "final_state_indices") if c["final_state"] else None,
        checkpoints=tuple(map(tuple, c["checkpoints"])) or None,
        checkpoint_dtype=DTYPES[c["checkpoint_dtype"]],
        final_dtype=DTYPES[c["final_state"]],
        **{key: c[key] for key in ("gate", "beta_kind", "l2norm", "lower_bound", "scale")},
    )
    return strided(p, c["row_gap"], c["beta_pitch"])


def strided(p: Problem, gap: int, beta_pitch: int) -> Problem:
    changes = {}
    for name in ("q", "k", "v", "g"):
        _, T, H, D = (x := getattr(p, name)).shape
        row = H * (D + gap) + gap
        changes[name] = spread(x, (T * row + gap, row, D + gap, 1))
    _, T, H = p.beta.shape
    row = beta_pitch or H + gap
    changes["beta"] = spread(p.beta, (T * row, row, 1))
    return p.but(**changes) if gap or beta_pitch else p


@pytest.mark.parametrize("case", TABLE["cases"], ids=lambda c: c["name"])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_case(case: dict[str, Any], framework: str) -> None:
    if framework == "torch":
        pytest.importorskip("torch")
    p = build(c := load(case))
    got = package(p, framework=framework, in_place=c["in_place"])
    marks = c["checkpoints"]
    o, final, saved = recurrent_kda(
        p.q, p.k, p.v, p.g, p.beta, A_log=p.A_log, dt_bias=p.dt_bias, cu_seqlens=p.cu_seqlens,
        initial_state=p.initial_state, initial_state_indices=p.initial_state_indices,
        checkpoints=[m[:2] for m in marks], **p.options(),
    )  # fmt: skip
    offsets = None if p.cu_seqlens is None else p.cu_seqlens
    for e in errors_by_head(got.out, o, offsets):
        assert e.rms <= BOUNDS[p.v.dtype], f"out: {e}"
    assert is_poison(got.out[:, p.offsets[-1][2] :])
    check_states(p, got, final, in_place=c["in_place"])
    for (_, _, slot), state in zip(marks, saved, strict=True):
        if slot >= 0:
            for e in errors_by_head(got.checkpoints[slot][None, None], state[None, None]):
                assert e.rms <= BOUNDS[got.checkpoints.dtype], f"checkpoint slot {slot}: {e}"


def check_states(p: Problem, got: Result, final: np.ndarray, *, in_place: bool) -> None:
    if p.final_dtype is None:
        assert got.final is None
        return
    indices = p.final_state_indices
    places = range(p.sequences) if indices is None else [int(i) for i in indices]
    for n, slot in enumerate(places):
        if slot >= 0:
            for e in errors_by_head(got.final[slot][None, None], final[n][None, None]):
                assert e.rms <= BOUNDS[p.final_dtype], f"state {n}: {e}"
    others = [s for s in range(got.final.shape[0]) if s not in places]
    if in_place:
        assert np.array_equal(got.final[others], p.initial_state[others])
    else:
        assert is_poison(got.final[others])
