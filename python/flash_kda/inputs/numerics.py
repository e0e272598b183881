"""Named inputs that strain the arithmetic: cancelling updates, gates, tiny rows, slow decay."""

from __future__ import annotations

import numpy as np

from flash_kda._host import Array
from flash_kda.inputs.checker import CANCELLING, ORDINARY, STRESS, Checker
from flash_kda.inputs.problem import (
    BF16,
    FP16,
    FP32,
    Problem,
    Shape,
    normal,
    ordinary,
    with_raw_gate,
)

MIXED = (1300, 547, 2048, 963, 271, 3063)
_BIG = 20.0  # a raw gate that saturates the sigmoid at 1
_OFF = -60.0  # and one that saturates it at 0


def ordinary_inputs(c: Checker) -> None:
    """Ordinary inputs: packed and batched, every array type that the device takes."""
    lengths = MIXED if not c.quick else (300, 47, 512, 1)
    for state in (FP32, BF16):
        p = ordinary(c.rng(), Shape(4, lengths=lengths), state_in=state, state_out=state)
        c.accuracy(f"packed, {state.name} states", p, ORDINARY, heads=(0, 3))
    p = ordinary(c.rng(1), Shape(2, c.tokens(1024, 256), batch=4), gate_dtype=FP32, state_in=FP32)
    c.accuracy("batch, fp32 gate and beta", p, ORDINARY)
    c.accuracy("batch, fp32 beta", p.but(g=p.g.astype(BF16)), ORDINARY)
    if c.device == "cpu":
        for dtype in (FP16, FP32):
            p = ordinary(c.rng(2), Shape(2, 300), dtype=dtype, gate_dtype=dtype, state_in=FP32)
            c.accuracy(f"{dtype.name} arrays", p, ORDINARY)


def _identical_keys(c: Checker, tokens: int, keys: Array) -> Problem:
    """T1's gates and strengths over the given keys [T, K]; q = k, v has period 16."""
    rows = keys.astype(BF16)[None, :, None]
    v = normal(c.rng(1), (16, 128))[np.arange(tokens) % 16][None, :, None]
    return Problem(
        q=rows,
        k=rows.copy(),
        v=np.ascontiguousarray(v),
        g=np.full((1, tokens, 1, 128), -12, BF16),
        beta=np.full((1, tokens, 1), 8, BF16),
        A_log=np.zeros(1, np.float32),
        dt_bias=np.zeros((1, 128), np.float32),
    )


def t1(c: Checker) -> None:
    """Every key the same row under full writes and almost no decay; then nearly the same."""
    tokens = c.tokens(16384, 2048)
    rng = c.rng()
    row = rng.standard_normal(128)
    c.accuracy("one row", _identical_keys(c, tokens, np.tile(row, (tokens, 1))), CANCELLING)
    tokens = c.tokens(4096)
    signs = np.where(np.arange(tokens) % 2, -1.0, 1.0)[:, None]
    c.accuracy("signs by turns", _identical_keys(c, tokens, row * signs), CANCELLING)
    even = np.where(row < 0, -1.0, 1.0) * _awkward_element()
    keys = np.tile(even, (tokens, 1))
    c.accuracy("norm between two of bf16", _identical_keys(c, tokens, keys), CANCELLING)
    p = _identical_keys(c, tokens, np.tile(row, (tokens, 1)))
    c.accuracy("random beta", p.but(beta=normal(c.rng(2), p.beta.shape)), CANCELLING)
    for cosine in (0.95, 0.99):
        c.accuracy(
            f"cosine {cosine}", _identical_keys(c, tokens, near(rng, row, tokens, cosine)), STRESS
        )
    c.accuracy(
        "positive keys",
        _identical_keys(c, tokens, np.abs(rng.standard_normal((tokens, 128)))),
        STRESS,
    )


def _awkward_element() -> float:
    """A |k_i| such that 1 / |k| and 1 / |k| times T1's strength round to two numbers of bf16.

    Then what is rounded after that product does not cancel.
    """
    elements = np.arange(128, 256) / 128
    rate = 1 / np.sqrt(128 * elements**2 + 1e-6)
    apart = rate.astype(BF16) != (rate / (1 + np.exp(-8.0))).astype(BF16)
    return float(elements[apart][0])


def near(rng: np.random.Generator, row: Array, count: int, cosine: float) -> Array:
    """Rows whose pairwise cosine is about `cosine`: one shared direction and one of their own."""
    unit = row / np.linalg.norm(row)
    own = rng.standard_normal((count, row.size))
    own -= np.outer(own @ unit, unit)
    own /= np.linalg.norm(own, axis=1, keepdims=True)
    return np.asarray(np.sqrt(row.size) * (np.sqrt(cosine) * unit + np.sqrt(1 - cosine) * own))


def t3(c: Checker) -> None:
    """Gates at their bound, by channel and by turns in time."""
    tokens = c.tokens(4096)
    p = ordinary(c.rng(), Shape(4, tokens, batch=2), state_in=BF16, state_out=BF16)
    with_raw_gate(p, 0, _BIG)
    with_raw_gate(p, 1, np.where(np.arange(128) % 2, _OFF, _BIG))
    with_raw_gate(p, 2, np.where(np.arange(tokens) // 16 % 2, _OFF, _BIG)[None, :, None])
    c.accuracy("bound -5", p)
    if not c.quick:
        for length in (63, 65):  # the bound must hold over tails and borders of any chunk
            part = {
                name: getattr(p, name)[:, :length].copy() for name in ("q", "k", "v", "g", "beta")
            }
            c.accuracy(f"bound -5, {length} tokens", p.but(**part))


def t5(c: Checker) -> None:
    """No decay at all, a constant half-open gate, and bounds at and near zero."""
    tokens = c.tokens(8192)
    p = ordinary(c.rng(), Shape(2, tokens), beta=(-3, 1), state_in=FP32)
    with_raw_gate(p, 0, _OFF)
    with_raw_gate(p, 1, 0.0)
    for bound in (-5.0, 0.0, -1e-3):
        bounded = p.but(lower_bound=bound)
        expected = c.accuracy(f"bound {bound:g}, fp32 states", bounded)
        assert bounded.initial_state is not None
        stored = bounded.but(initial_state=bounded.initial_state.astype(BF16), final_dtype=BF16)
        c.accuracy(f"bound {bound:g}, bf16 states", stored, expected=expected)
    for raw in (-8.0, -4.0):  # constant slow decay
        with_raw_gate(p, 0, raw)
        c.accuracy(f"constant raw gate {raw:g}", p.but(lower_bound=-5.0), heads=(0,))


def t6(c: Checker) -> None:
    """A_log, dt_bias and beta at and past the ends of fp32."""
    a_log = np.array([-80, -30, 0, 10, 30, 80, 88, 100], np.float32)
    p = ordinary(c.rng(), Shape(8, 300), state_in=BF16, state_out=BF16)
    bias = np.tile(np.array([-50, 0, 50], np.float32), 43)[:128]
    g = p.g.copy()
    g[:, ::7] = (-bias).astype(BF16)  # g + bias exactly 0
    beta = np.resize(np.array([-np.inf, -80, 0, 80, np.inf]), p.beta.shape).astype(BF16)
    p = p.but(A_log=a_log, dt_bias=np.tile(bias, (8, 1)), g=g, beta=beta)
    c.accuracy("lower bound", p)
    c.accuracy(
        "doubled beta", p.but(beta_kind="doubled_logit", g=np.full_like(g, 50)), heads=(2, 3)
    )
    c.accuracy("softplus", p.but(gate="softplus"))


def t7(c: Checker) -> None:
    """Rows near and under the norm's epsilon, and rows of zeros."""
    for scale in (1e-4, 1e-5):
        p = ordinary(c.rng(), Shape(2, 512), state_in=FP32)
        for x in (p.q, p.k):
            x[:, :, 0] = (x[:, :, 0].astype(np.float32) * scale).astype(BF16)
        p.k[:, ::5, 1] = 0
        p.q[:, ::7, 1] = 0
        result = c.run(p)
        case = f"rows of {scale:g}"
        c.accuracy(case, p, result=result)
        c.expect(case, not result.out[:, ::7, 1].astype(np.float32).any(), "zero query, zero out")


def slow_decay(c: Checker) -> None:
    """A state that lives for the whole of a very long sequence."""
    tokens = c.tokens(131072, 4096)
    p = ordinary(c.rng(), Shape(2, tokens), beta=(-2, 1), state_in=FP32)
    with_raw_gate(p, 0, np.float32(np.log(8e-5 / 5)))  # a decay of 0.99992 a token
    with_raw_gate(p, 1, normal(c.rng(1), (1, tokens, 128), -8, 1))
    result = c.run(p)
    c.accuracy(f"{tokens} tokens", p, result=result)
    bound = np.abs(p.v.astype(np.float32)).max() * np.sqrt(tokens)
    largest = 0.0 if result.final is None else float(np.abs(result.final).max())
    c.expect(f"{tokens} tokens", largest <= bound, "|state| <= max|v| sqrt(T)")


def softplus_gates(c: Checker) -> None:
    """Decay without a bound: fast, tiny under a large A_log, and none."""
    p = ordinary(c.rng(), Shape(4, c.tokens(2048, 300)), state_in=FP32)
    with_raw_gate(p, 0, 6.0)
    with_raw_gate(p, 1, -18.0)
    with_raw_gate(p, 2, normal(c.rng(1), p.g[:, :, 2].shape, 0, 20))
    assert p.A_log is not None
    p.A_log[1] = 8
    c.accuracy("softplus", p.but(gate="softplus"))
    given = p.but(gate="log_decay", A_log=None, dt_bias=None)
    given.g[:, :, 0] = -6
    given.g[:, :, 1:3] = -np.abs(given.g[:, :, 1:3])
    given.g[:, ::50, 2, ::3] = -np.inf
    given.g[:, :, 3] = -np.exp(given.g[:, :, 3].astype(np.float32) - 4)
    c.accuracy("given log decay", given)
    c.accuracy("no A_log, no dt_bias", p.but(gate="softplus", A_log=None, dt_bias=None))


def strengths(c: Checker) -> None:
    """Beta as a probability at its ends, and doubled."""
    p = ordinary(c.rng(), Shape(2, c.tokens(2048, 300)), gate_dtype=FP32, g=(-3, 2), state_in=FP32)
    ends = np.resize(np.array([0, 1, 1 - 1e-4, 0.5, 1e-6], np.float32), p.beta.shape)
    if c.device != "cpu":  # the gate is not what this is about; beta stays fp32
        p = p.but(g=p.g.astype(BF16))
    c.accuracy("probabilities", p.but(beta=ends, beta_kind="probability"))
    c.accuracy("doubled logits", p.but(beta_kind="doubled_logit"))
