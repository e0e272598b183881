"""The reference recurrence itself, against textbook loops over Python floats and by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from flash_kda import reference

KINDS = [
    (gate, beta_kind)
    for gate in ("lower_bound", "softplus", "log_decay")
    for beta_kind in ("logit", "doubled_logit", "probability")
]


def textbook(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    a_log: Any,
    bias: Any,
    S: Any,
    options: dict[str, Any],
) -> tuple[list[list[float]], list[list[float]]]:
    """One head of one sequence with plain Python floats; `S` is a list of rows."""
    out = []
    K, V = len(S[0]), len(S)
    for t in range(len(q)):
        qt, kt = [float(x) for x in q[t]], [float(x) for x in k[t]]
        if options["l2norm"]:
            nq, nk = (math.sqrt(sum(x * x for x in row) + 1e-6) for row in (qt, kt))
            qt, kt = [x / nq for x in qt], [x / nk for x in kt]
        decay = []
        for c in range(K):
            x = float(g[t][c])
            if options["gate"] == "lower_bound":
                x = options["lower_bound"] / (1 + math.exp(-math.exp(a_log) * (x + bias[c])))
            elif options["gate"] == "softplus":
                x = -math.exp(a_log) * math.log(1 + math.exp(x + bias[c]))
            decay.append(math.exp(x))
        b = float(beta[t])
        if options["beta_kind"] != "probability":
            b = (2 if options["beta_kind"] == "doubled_logit" else 1) / (1 + math.exp(-b))
        S = [[S[i][c] * decay[c] for c in range(K)] for i in range(V)]
        u = [b * (float(v[t][i]) - sum(S[i][c] * kt[c] for c in range(K))) for i in range(V)]
        S = [[S[i][c] + u[i] * kt[c] for c in range(K)] for i in range(V)]
        out.append([options["scale"] * sum(S[i][c] * qt[c] for c in range(K)) for i in range(V)])
    return out, S


def problem(
    rng: np.random.Generator, B: int, T: int, H: int, HV: int, K: int, V: int
) -> dict[str, Any]:
    return {
        "q": rng.standard_normal((B, T, H, K)),
        "k": rng.standard_normal((B, T, H, K)),
        "v": rng.standard_normal((B, T, HV, V)),
        "g": rng.standard_normal((B, T, HV, K)),
        "beta": rng.standard_normal((B, T, HV)),
        "A_log": rng.uniform(0, 0.5, HV),
        "dt_bias": rng.standard_normal((HV, K)),
    }


@pytest.mark.parametrize(("gate", "beta_kind"), KINDS)
@pytest.mark.parametrize("packed", [False, True])
def test_agrees_with_textbook_loops(gate: Any, beta_kind: Any, packed: bool) -> None:
    rng = np.random.default_rng(1)
    H, HV, K, V = 2, 4, 5, 3
    offsets = [0, 0, 7, 70, 70, 79] if packed else [0, 90]
    B, T = (1, 82) if packed else (2, 90)
    x = problem(rng, B, T, H, HV, K, V)
    if gate == "log_decay":
        x["g"] = -np.abs(x["g"]) * 0.1
        x["A_log"] = x["dt_bias"] = None
    if beta_kind == "probability":
        x["beta"] = 1 / (1 + np.exp(-x["beta"]))
    options = {
        "gate": gate,
        "beta_kind": beta_kind,
        "l2norm": packed,
        "lower_bound": -3.0,
        "scale": 0.7,
    }
    N = len(offsets) - 1 if packed else B
    initial = rng.standard_normal((N, HV, V, K))
    o, final = reference.recurrent_kda(
        **x, **options, initial_state=initial, cu_seqlens=np.array(offsets) if packed else None
    )[:2]
    for n in range(N):
        row, rows = (0, slice(offsets[n], offsets[n + 1])) if packed else (n, slice(None))
        for hv in range(HV):
            h = hv // (HV // H)
            a_log = 0 if x["A_log"] is None else x["A_log"][hv]
            bias = [0] * K if x["dt_bias"] is None else x["dt_bias"][hv]
            args = (x["q"][row, rows, h], x["k"][row, rows, h], x["v"][row, rows, hv])
            more = (x["g"][row, rows, hv], x["beta"][row, rows, hv], a_log, bias)
            expected, S = textbook(*args, *more, initial[n, hv].tolist(), options)
            np.testing.assert_allclose(
                o[row, rows, hv], np.array(expected).reshape(-1, V), rtol=1e-9
            )
            np.testing.assert_allclose(final[n, hv], S, rtol=1e-9, atol=1e-12)
    if packed:
        assert not o[:, 79:].any()


def test_decay_comes_before_the_error() -> None:
    # S = 4, decay 1/2, k = 1, b = 1/2, v = 8: u = (8 - 2) / 2 = 3, S = 5. The other order gives 4.
    one = np.ones((1, 1, 1, 1))
    g = one * math.log(0.5)
    o, final = reference.recurrent_kda(
        one, one, 8 * one, g, one[..., 0] / 2, gate="log_decay", beta_kind="probability",
        l2norm=False, scale=2.0, initial_state=4 * one,
    )[:2]  # fmt: skip
    assert final.item() == 5
    assert o.item() == 10


def test_heads_pools_and_checkpoints() -> None:
    rng = np.random.default_rng(2)
    x = problem(rng, 1, 200, 2, 4, 6, 3)
    cu = np.array([0, 130, 200])
    pool = rng.standard_normal((5, 4, 3, 6))
    every, final_pool, saved = reference.recurrent_kda(
        **x, cu_seqlens=cu, initial_state=pool, initial_state_indices=[3, -1],
        final_state_indices=[-1, 1], checkpoints=[(0, 64), (0, 130), (1, 0), (1, 64)],
    )  # fmt: skip
    dense = np.stack([pool[3], np.zeros_like(pool[3])])
    o, final = reference.recurrent_kda(**x, cu_seqlens=cu, initial_state=dense)[:2]
    np.testing.assert_array_equal(every, o)
    np.testing.assert_array_equal(final_pool[1], final[1])
    np.testing.assert_array_equal(final_pool[[0, 2, 3, 4]], pool[[0, 2, 3, 4]])
    np.testing.assert_array_equal(saved[1], final[0])
    assert not saved[2].any()
    head = reference.recurrent_kda(
        **{name: a if name in ("A_log", "dt_bias") else a[:, :64] for name, a in x.items()},
        initial_state=pool[3:4], heads=[3, 1],
    )  # fmt: skip
    np.testing.assert_allclose(saved[0][[3, 1]], head[1][0], rtol=1e-12)
    np.testing.assert_allclose(every[:, :64, [3, 1]], head[0], rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extreme_gates_stay_finite(dtype: Any) -> None:
    g = np.array([-1e4, -50, 0, 50, 1e4], dtype)
    for a_log in (-80, 0, 30, 80, 88, 100):
        y = reference.log_decay(g, np.asarray(a_log, dtype), None, "lower_bound", -5.0)
        assert np.isfinite(y).all()
        assert y[2] == -2.5
        softened = reference.log_decay(g, np.asarray(a_log, dtype), None, "softplus", 0.0)
        assert (softened <= 0).all()  # -inf is a decay of exactly zero
        assert softened[0] == 0
    # raw + bias = -18 under A_log 8: a real decay of exp(8) * exp(-18), lost by log(1 + x) in fp32
    y = reference.log_decay(np.asarray([-18], dtype), np.asarray(8, dtype), None, "softplus", 0.0)
    np.testing.assert_allclose(y, -math.exp(-10), rtol=1e-5)
    s = reference.sigmoid(np.array([-np.inf, -800, 0, 800, np.inf, np.nan], dtype))
    np.testing.assert_array_equal(s, [0, np.exp(dtype(-800)), 0.5, 1, 1, np.nan])


def test_torch_arrays_and_wrong_shapes() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    x = problem(rng, 1, 9, 1, 2, 4, 4)
    y = {name: torch.from_numpy(a).bfloat16() for name, a in x.items()}
    rounded = {name: a.double().numpy() for name, a in y.items()}
    for a, b in zip(reference.recurrent_kda(**y), reference.recurrent_kda(**rounded), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="cu_seqlens"):
        reference.recurrent_kda(**x, cu_seqlens=[0, 5, 3])
    with pytest.raises(ValueError, match="gate"):
        reference.recurrent_kda(**x, gate="sigmoid")  # type: ignore[arg-type]


def test_measures() -> None:
    ref = np.array([3.0, 4.0])
    assert reference.relative_rms(ref * 1.01, ref) == pytest.approx(0.01)
    assert reference.relative_rms(ref * np.nan, ref) == np.inf
    assert reference.relative_rms(np.zeros(3), np.zeros(3)) == 0
    assert reference.relative_rms(np.ones(3), np.zeros(3)) == np.inf
    assert reference.worst_bf16_units(ref + np.array([0, 2.0**-5]), ref) == 1
