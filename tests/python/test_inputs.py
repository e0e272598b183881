"""Every named input on the installed package, and proof that the checks see the faults they are
for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from flash_kda import inputs
from flash_kda.inputs.call import Result, poison
from flash_kda.inputs.checker import oracle
from flash_kda.inputs.problem import BF16, Problem
from flash_kda.reference import log_decay


@pytest.mark.parametrize("name", inputs.NAMES)
def test_named_input(name: str, device: str, full: bool) -> None:
    rows = inputs.check(name, device, quick=not full)
    assert rows, "nothing was measured"
    bad = [f"{r.case} [{r.sequence}, {r.head}]: {r}" for r in rows if not r.ok]
    assert not bad, f"{len(bad)} of {len(rows)} rows:\n" + "\n".join(bad[:10])


def honest(p: Problem) -> Result:
    """The oracle, rounded as the contract says."""
    o, final = oracle(p)
    out = poison(np.empty(p.v.shape, p.v.dtype))
    end = p.v.shape[1] if p.cu_seqlens is None else int(p.cu_seqlens[-1])
    out[:, :end] = o[:, :end].astype(out.dtype)
    return Result(out, None if p.final_dtype is None else final.astype(p.final_dtype))


def transposed_state(p: Problem) -> Result:
    if p.initial_state is None:
        return honest(p)
    return honest(p.but(initial_state=np.swapaxes(p.initial_state, 2, 3).copy()))


def gate_of_head_0(p: Problem) -> Result:
    return honest(p.but(g=np.broadcast_to(p.g[:, :, :1], p.g.shape).copy()))


def bf16_decay(p: Problem) -> Result:
    a, bias = (None if x is None else x.astype(np.float64) for x in (p.A_log, p.dt_bias))
    a = None if a is None else a[:, None]
    g = np.exp(log_decay(p.g.astype(np.float64), a, bias, p.gate, p.lower_bound))
    with np.errstate(divide="ignore"):
        rounded = np.log(g.astype(BF16).astype(np.float64))
    return honest(p.but(g=rounded, gate="log_decay", A_log=None, dt_bias=None))


def epsilon_on_the_mean(p: Problem) -> Result:
    def normed(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) / np.sqrt(x.shape[-1])

    return honest(p.but(q=normed(p.q), k=normed(p.k), l2norm=False))


def leaking_neighbours(p: Problem) -> Result:
    result = honest(p)
    with np.errstate(invalid="ignore"):
        given = (p.q, p.k, p.v, p.g, p.beta, p.initial_state)
        leak = sum(x.astype(np.float32).sum() * 0 for x in given)
    return Result((result.out.astype(np.float32) + leak).astype(BF16), result.final)


def wrapped_slot(p: Problem) -> Result:
    """Negative slots taken from the end, Python's way."""
    dense = p.but(
        initial_state=p.initial_state[p.initial_state_indices], initial_state_indices=None
    )
    return honest(dense.but(final_state_indices=None))


def writes_past_the_end(p: Problem) -> Result:
    result = honest(p)
    result.out[:, int(p.cu_seqlens[-1]) :] = 0
    return result


def bf16_state(p: Problem) -> Result:
    """A state rounded to bfloat16 on its way out."""
    result = honest(p)
    return Result(result.out, None if result.final is None else result.final.astype(BF16) * 1.02)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("T18", transposed_state),
        ("ordinary", gate_of_head_0),
        ("slow-decay", bf16_decay),
        ("T7", epsilon_on_the_mean),
        ("T14", leaking_neighbours),
        ("pools", wrapped_slot),
        ("T13", writes_past_the_end),
        ("T9", bf16_state),
    ],
)
def test_a_fault_is_seen(name: str, fault: Callable[[Problem], Result]) -> None:
    rows = inputs.check(name, quick=True, forward=fault)
    assert any(not row.ok for row in rows)
    if name != "pools":  # its stand-in would have to know pools
        assert all(row.ok for row in inputs.check(name, quick=True, forward=honest))


def test_errors_of_the_call_become_rows() -> None:
    def refuse(p: Problem) -> Result:
        raise NotImplementedError("q: expected something else")

    def crash(p: Problem) -> Result:
        raise RuntimeError("device fault")

    (row,) = inputs.check("T1", quick=True, forward=refuse)
    assert not row.ok
    assert "not served: q" in row.note
    assert inputs.check("softplus", quick=True, forward=refuse)[0].ok
    (row,) = inputs.check("T1", quick=True, forward=crash)
    assert not row.ok
    with pytest.raises(ValueError, match="^name: .*T1.*got 'T2'"):
        inputs.check("T2")


def test_summary_keeps_the_worst_of_each_case() -> None:
    rows = inputs.check("T18", quick=True, forward=transposed_state)
    kept = inputs.summarize(rows)
    assert {r.case for r in kept} == {r.case for r in rows}
    for row in kept:
        same = [
            r for r in rows if (r.case, r.out_error is None) == (row.case, row.out_error is None)
        ]
        assert row.ok == all(r.ok for r in same)
    assert all(inputs.describe(name).endswith((".", "s")) for name in inputs.NAMES)
