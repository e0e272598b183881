"""Every named input on the installed package, and proof that the checks see the faults they are
for."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest

from flash_kda import inputs
from flash_kda.inputs.call import Result, package, poison
from flash_kda.inputs.checker import IN_ONE_PIECE, KNOWN_SHORTFALLS, Checker, oracle
from flash_kda.inputs.problem import BF16, Problem
from flash_kda.reference import log_decay


@pytest.mark.parametrize("name", inputs.NAMES)
def test_named_input(name: str, device: str, full: bool) -> None:
    rows = inputs.check(name, device, quick=not full)
    assert rows, "nothing was measured"
    bad = [f"{r.case} [{r.sequence}, {r.head}]: {r}" for r in rows if r.failed]
    assert not bad, f"{len(bad)} of {len(rows)} rows:\n" + "\n".join(bad[:10])
    if device == "cpu":
        assert all(r.served and not r.known for r in rows)
    for case in {r.case for r in rows if (name, r.case) in KNOWN_SHORTFALLS and r.ok}:
        if device != "cpu":  # passing is news: the entry may go
            warnings.warn(f"{name}, {case}: within its bound, a known shortfall", stacklevel=1)
    missed = [f"{r.case}: {r.known}" for r in rows if r.known]
    if missed:
        pytest.xfail("; ".join(missed))
    refused = [f"{r.case}: {r.note}" for r in rows if not r.served]
    if refused and len(refused) == len(rows):
        pytest.skip("; ".join(refused))


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


REFUSAL = "{} is not served by the CUDA kernels of this build; the CPU backend serves it"


def test_what_a_gpu_need_not_serve_is_shown_and_no_failure() -> None:
    """A stand-in for a GPU that serves the bounded gate alone, in bf16."""

    def bounded_only(p: Problem) -> Result:
        if p.gate != "lower_bound":
            raise NotImplementedError(REFUSAL.format("a gate without lower_bound"))
        if p.g.dtype != BF16:
            raise NotImplementedError(REFUSAL.format("g of type float32"))
        return honest(p)

    for name, case in (("T6", "softplus"), ("ordinary", "batch, fp32 gate and beta")):
        rows = inputs.check(name, "cuda", quick=True, forward=bounded_only)
        (refused,) = [r for r in rows if not r.served]
        assert refused.case == case
        assert refused.ok
        assert "not served: " in refused.note
        assert len(rows) > 1
        assert not any(r.failed for r in rows)
        assert any(r.failed for r in inputs.check(name, "cpu", quick=True, forward=bounded_only))

    def nothing(p: Problem) -> Result:
        raise NotImplementedError(REFUSAL.format("anything"))

    assert any(r.failed for r in inputs.check("T6", "cuda", quick=True, forward=nothing))


@pytest.mark.parametrize(("factor", "fails"), [(1.2, False), (2.0, True)])
def test_a_known_shortfall_is_no_failure_until_it_grows(
    monkeypatch: pytest.MonkeyPatch, factor: float, fails: bool
) -> None:
    monkeypatch.setitem(KNOWN_SHORTFALLS, ("T1", "cosine 0.99"), 1.26e-2)

    def noisy(p: Problem) -> Result:
        result = honest(p)
        noise = np.random.default_rng(0).standard_normal(result.out.shape)
        o = result.out.astype(np.float64)
        size = factor * 1.26e-2 * np.sqrt((o * o).mean())
        return Result((o + size * noise).astype(BF16), result.final)

    rows = inputs.check("T1", "cuda", quick=True, forward=noisy)
    by_case = {r.case: r for r in rows}
    assert by_case["cosine 0.99"].failed == fails
    assert bool(by_case["cosine 0.99"].known) != fails
    assert not by_case["cosine 0.99"].ok
    assert not by_case["one row"].known
    on_cpu = inputs.check("T1", "cpu", quick=True, forward=noisy)
    assert {r.case for r in on_cpu if r.failed} >= {"cosine 0.95", "cosine 0.99", "positive keys"}


@pytest.mark.parametrize(
    ("figure", "where", "ok", "failed"),
    [
        (2e-3, "cuda", True, False),
        (2.5e-3, "cuda", False, False),
        (2.8e-3, "cuda", False, True),
        (2.5e-3, "cpu", False, True),
    ],
)
def test_a_known_property_too(figure: float, where: str, ok: bool, failed: bool) -> None:
    c = Checker("T16", where, quick=True)
    c.within("pieces", figure, 2e-3, "", "pieces on chunk borders")
    (row,) = c.rows
    assert (row.ok, row.failed) == (ok, failed)


@pytest.mark.parametrize("wrong", ["neither", "split", "whole"])
def test_calls_that_are_cut_are_measured_in_one_piece_too(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    asked: list[bool] = []

    def cut(p: Problem, device: str, sequence_split: bool = True, **how: object) -> Result:
        asked.append(sequence_split)
        result = honest(p)
        if wrong == ("split" if sequence_split else "whole"):
            result.out[:, -1, 0] += 1
        return Result(result.out, result.final, split=sequence_split)

    monkeypatch.setattr("flash_kda.inputs.checker.package", cut)
    rows = inputs.check("T7", "cuda", quick=True)
    measured = [r for r in rows if r.out_error is not None]
    whole = [r for r in measured if r.note == IN_ONE_PIECE]
    assert 2 * len(whole) == len(measured)
    assert asked.count(True) == asked.count(False) > 0
    assert any(r.failed for r in whole) == (wrong == "whole")
    assert any(r.failed for r in measured if r not in whole) == (wrong == "split")


def test_pieces_at_chunk_borders_of_a_gpu_are_held_closer() -> None:
    """Pieces whose state is off by 3e-3 fail at a border of chunks and pass elsewhere."""

    def wobbling(p: Problem) -> Result:
        result = package(p)
        if p.v.shape[1] < 2048:
            np.multiply(result.final, np.float32(1.003), out=result.final)
        return result

    rows = inputs.check("T16", "cuda", quick=True, forward=wobbling)
    failed = {r.case for r in rows if r.failed}
    assert "pieces at 32" in failed
    assert "pieces at 37" not in failed
    assert not any(r.failed for r in inputs.check("T16", "cuda", quick=True, forward=package))


def test_the_oracle_comes_from_other_processes_too() -> None:
    from flash_kda.inputs import workers

    assert workers.call_each(divmod, [(7, 2), (9, 4), (1, 1)]) == [(3, 1), (2, 1), (1, 0)]
    with pytest.raises(ZeroDivisionError):
        workers.call_each(divmod, [(7, 2), (9, 0)])
    (first, again) = workers.call_each(_process, [(), ()])
    assert first != again
    workers._idle[0]._process.kill()  # as if it had crashed: its part is computed here
    assert set(workers.call_each(divmod, [(7, 2), (9, 4)])) == {(3, 1), (2, 1)}


def _process() -> int:
    import os

    return os.getpid()


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
