"""Any shape, option, array type and layout against the fp64 recurrence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from flash_kda.inputs.call import is_poison, package, same_bits
from flash_kda.inputs.layouts import spread
from flash_kda.inputs.problem import BF16, FP16, FP32, Problem, Shape, ordinary
from flash_kda.metrics import errors_by_head
from flash_kda.reference import recurrent_kda

# Rounding to the stored type, and fp32 arithmetic; the contract allows bf16 results 5e-3.
BOUNDS = {BF16: 5e-3, FP16: 1e-3, FP32: 5e-5}
# What a stored type cannot tell from 0: its smallest number.
SMALLEST = {BF16: 1e-38, FP16: 2.0**-24, FP32: 1e-38}

settings.register_profile(
    "flash_kda",
    deadline=None,
    max_examples=150,
    derandomize=True,  # the same calls each time; --full looks for new ones
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "flash_kda-full", settings.get_profile("flash_kda"), max_examples=2000, derandomize=False
)


@dataclass(frozen=True)
class Plan:
    """A drawn call and how to lay it out."""

    problem: Problem
    gaps: tuple[int, int]  # elements between heads and between rows
    lead: int  # elements before the first
    framework: str
    threads: int
    in_place: bool


sizes = st.one_of(st.sampled_from([1, 2, 16, 64, 128, 256]), st.integers(1, 130))
lengths = st.one_of(st.sampled_from([0, 1, 63, 64, 65, 128, 129]), st.integers(0, 150))


@st.composite
def calls(draw: st.DrawFn) -> Plan:
    rng = np.random.default_rng(draw(st.integers(0, 2**32), label="seed"))
    heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    dims: dict[str, Any] = {"value_heads": heads * group}
    dims |= {"key_dim": draw(sizes, label="K"), "value_dim": draw(sizes, label="V")}
    if draw(st.booleans(), label="packed"):
        packed = tuple(draw(st.lists(lengths, min_size=1, max_size=5), label="lengths"))
        shape = Shape(heads, sum(packed) + draw(st.integers(0, 3)), lengths=packed, **dims)
    else:
        shape = Shape(heads, draw(lengths, label="T"), batch=draw(st.integers(1, 3)), **dims)
    dtype = draw(st.sampled_from([BF16, FP16, FP32]), label="dtype")
    gate_dtype = draw(st.sampled_from(sorted({dtype, BF16, FP32}, key=str)), label="gate dtype")
    state = st.sampled_from([None, BF16, FP32])
    p = ordinary(
        rng,
        shape,
        dtype=dtype,
        gate_dtype=gate_dtype,
        g=draw(st.sampled_from([(0, 1), (-6, 1), (20, 1), (0, 10), (-60, 1)]), label="g"),
        beta=draw(st.sampled_from([(0, 1), (-3, 1), (8, 1), (0, 30)]), label="beta"),
        state_in=draw(state, label="state in"),
        state_out=draw(state, label="state out"),
        index_dtype=draw(st.sampled_from([np.int32, np.int64])),
    )
    p = draw_options(draw, rng, p)
    in_place = (
        p.initial_state is not None
        and p.final_dtype == p.initial_state.dtype
        and p.initial_state_indices is None
        and p.final_state_indices is None
        and draw(st.booleans(), label="in place")
    )
    return Plan(
        problem=p,
        gaps=(draw(st.integers(0, 5)), draw(st.integers(0, 9))),
        lead=draw(st.integers(0, 9)),
        framework=draw(st.sampled_from(["numpy", "torch"])),
        threads=draw(st.integers(0, 5)),
        in_place=in_place,
    )


def draw_options(draw: st.DrawFn, rng: np.random.Generator, p: Problem) -> Problem:
    gate = draw(st.sampled_from(["lower_bound", "softplus", "log_decay"]), label="gate")
    beta_kind = draw(st.sampled_from(["logit", "doubled_logit", "probability"]), label="beta kind")
    changes: dict[str, Any] = {"gate": gate, "beta_kind": beta_kind}
    if gate == "log_decay":
        changes |= {"A_log": None, "dt_bias": None, "g": -np.abs(p.g) / 4}
    else:
        for name in ("A_log", "dt_bias"):
            if draw(st.booleans(), label=f"no {name}"):
                changes[name] = None
    if beta_kind == "probability":
        with np.errstate(over="ignore"):
            changes["beta"] = (1 / (1 + np.exp(-p.beta.astype(np.float32)))).astype(p.beta.dtype)
    changes["lower_bound"] = draw(st.sampled_from([-5.0, -2.5, -1e-3, 0.0]), label="lower bound")
    changes["scale"] = draw(st.sampled_from([None, 1.0, -0.3]), label="scale")
    if not draw(st.booleans(), label="l2norm"):
        root = np.float32(p.q.shape[3] ** 0.5)
        changes |= {"l2norm": False, "k": (p.k.astype(np.float32) / root).astype(p.k.dtype)}
        length = np.linalg.norm(changes["k"].astype(np.float32), axis=-1, keepdims=True)
        # Longer keys than 1 let the recurrence grow without limit; that is the caller's to avoid.
        shrunk = changes["k"].astype(np.float32) / np.maximum(length, 1)
        changes["k"] = shrunk.astype(p.k.dtype)
    slots = p.sequences + 2
    if p.initial_state is not None and draw(st.booleans(), label="pool in"):
        pool = rng.standard_normal((slots, *p.initial_state.shape[1:]))
        changes["initial_state"] = pool.astype(BF16).astype(p.initial_state.dtype)
        changes["initial_state_indices"] = rng.permutation(slots)[: p.sequences] - 1
    if p.final_dtype is not None and draw(st.booleans(), label="pool out"):
        changes["final_state_indices"] = (rng.permutation(slots)[: p.sequences] - 1).astype("i4")
    if draw(st.booleans(), label="checkpoints"):
        free = iter(rng.permutation(20))
        changes["checkpoints"] = tuple(
            (n, position, int(next(free)))
            for n, (_, start, end) in enumerate(p.offsets)
            for position in range(0, end - start + 1, 64)
            if position < 192
        )[:20]
    return p.but(**changes)


def laid_out(plan: Plan) -> Problem:
    """The same values with gaps between heads and rows, off any alignment."""
    p, (head_gap, row_gap) = plan.problem, plan.gaps
    changes = {}
    for name in ("q", "k", "v", "g"):
        x = getattr(p, name)
        if x.size:
            _, tokens, heads, dim = x.shape
            row = heads * (dim + head_gap) + row_gap
            changes[name] = spread(x, (tokens * row, row, dim + head_gap, 1), plan.lead)
    if p.beta.size:
        _, tokens, heads = p.beta.shape
        row = heads + row_gap
        changes["beta"] = spread(p.beta, (tokens * row, row, 1), plan.lead)
    return p.but(**changes)


def magnitudes(p: Problem) -> tuple[float, float]:
    """Of the terms that add up to outputs and to states: fp32 loses its last places of those.

    It matters where few elements make up a head and happen to cancel, as at K = V = 1.
    """
    given = [p.v] if p.initial_state is None else [p.v, p.initial_state]
    state = max((float(np.abs(x.astype(np.float64)).max(initial=0)) for x in given), default=0.0)
    length = (
        1.0 if p.l2norm else float(np.linalg.norm(p.q.astype(np.float64), axis=-1).max(initial=0))
    )
    scale = p.q.shape[3] ** -0.5 if p.scale is None else abs(p.scale)
    return state * length * scale, state


def close(
    got: np.ndarray, ref: np.ndarray, what: str, magnitude: float, offsets: Any = None
) -> None:
    """[B, T, heads, ...] within the bounds for each sequence and head."""
    bound, smallest = BOUNDS[got.dtype], SMALLEST[got.dtype] + 16 * 2.0**-24 * magnitude
    for e in errors_by_head(got, ref, offsets):
        if e.rms > bound:
            row, start, end = e.sequence, None, None
            if offsets is not None:
                row, start, end = 0, int(offsets[e.sequence]), int(offsets[e.sequence + 1])
            part = (row, slice(start, end), e.head)
            worst = np.abs(got[part].astype(np.float64) - ref[part]).max()
            assert worst <= smallest, f"{what}: {e}"


def check_against_recurrence(p: Problem, got: Any, *, in_place: bool) -> None:
    o, final, saved = recurrent_kda(
        p.q, p.k, p.v, p.g, p.beta, A_log=p.A_log, dt_bias=p.dt_bias, cu_seqlens=p.cu_seqlens,
        initial_state=p.initial_state, initial_state_indices=p.initial_state_indices,
        checkpoints=[m[:2] for m in p.checkpoints or ()], **p.options(),
    )  # fmt: skip
    out_terms, state_terms = magnitudes(p)
    close(got.out, o, "out", out_terms, p.cu_seqlens)
    if p.cu_seqlens is not None:
        assert is_poison(got.out[:, int(p.cu_seqlens[-1]) :])
    if p.final_dtype is None:
        assert got.final is None
    else:
        places = range(p.sequences) if p.final_state_indices is None else p.final_state_indices
        for n, slot in enumerate(int(i) for i in places):
            if slot >= 0:
                close(got.final[slot][None, None], final[n][None, None], f"state {n}", state_terms)
        others = [s for s in range(got.final.shape[0]) if s not in list(places)]
        assert in_place or is_poison(got.final[others])
    for (_, _, slot), state in zip(p.checkpoints or (), saved, strict=True):
        kept = got.checkpoints[slot][None, None]
        close(kept, state[None, None], f"checkpoint slot {slot}", state_terms)


def run(plan: Plan) -> None:
    note(repr(plan.problem.options()))
    p = laid_out(plan)
    how: dict[str, Any] = {"framework": plan.framework, "in_place": plan.in_place}
    got = package(p, threads=plan.threads, **how)
    check_against_recurrence(p, got, in_place=plan.in_place)
    plain = package(plan.problem, threads=1, in_place=plan.in_place)
    assert same_bits(plain.out, got.out)
    assert plain.final is None or same_bits(plain.final, got.final)


def test_any_call(full: bool) -> None:
    pytest.importorskip("torch")
    profile = settings.get_profile("flash_kda-full" if full else "flash_kda")
    profile(given(calls())(run))()
