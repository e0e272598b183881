"""Bitwise relations between calls: what a result may not depend on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flash_kda.inputs.call import package, same_bits
from flash_kda.inputs.problem import BF16, FP32, Problem, Shape, ordinary

TOKEN_ARRAYS = ("q", "k", "v", "g", "beta")
LENGTHS = (1, 63, 0, 64, 65, 200, 17, 130)
VARIANTS: dict[str, dict[str, Any]] = {
    "lower bound": {},
    "softplus": {"gate": "softplus"},
    "log decay": {"gate": "log_decay", "A_log": None, "dt_bias": None},
    "doubled": {"beta_kind": "doubled_logit"},
    "probability": {"beta_kind": "probability"},
    "no norm": {"l2norm": False, "scale": 0.1},
}
_optional = pytest.mark.skip_if_not_served  # a GPU has to serve the bounded gate alone
VARIANTS_TO_SERVE = [
    pytest.param(name, marks=_optional) if "gate" in options else name
    for name, options in VARIANTS.items()
]


def make(variant: str, shape: Shape, seed: int = 0, **more: Any) -> Problem:
    p = ordinary(np.random.default_rng(seed), shape, state_in=FP32, **more)
    if variant == "log decay":
        p.g[...] = -np.abs(p.g)
    if variant == "probability":
        p.beta[...] = 1 / (1 + np.exp(-p.beta.astype(np.float32)))
    if variant == "no norm":
        p.k[...] = (p.k.astype(np.float32) / 12).astype(p.k.dtype)
    return p.but(**VARIANTS[variant])


def rows(p: Problem, row: int, start: int, end: int) -> dict[str, Any]:
    return {n: getattr(p, n)[row : row + 1, start:end].copy() for n in TOKEN_ARRAYS}


def take_heads(p: Problem, order: list[int]) -> Problem:
    """Value heads in another order; key heads follow (HV a multiple of H, whole groups)."""
    group = p.v.shape[2] // p.q.shape[2]
    key_order = [h // group for h in order[::group]]
    arrays = {n: getattr(p, n)[:, :, order] for n in ("v", "g", "beta")}
    arrays |= {n: getattr(p, n)[:, :, key_order] for n in ("q", "k")}
    arrays["initial_state"] = p.initial_state[:, order]
    if p.A_log is not None:
        arrays |= {"A_log": p.A_log[order], "dt_bias": p.dt_bias[order]}
    return p.but(**{n: np.ascontiguousarray(x) for n, x in arrays.items()})


@pytest.mark.parametrize("variant", VARIANTS_TO_SERVE)
def test_packed_as_each_alone(variant: str, device: str) -> None:
    p = make(variant, Shape(2, lengths=LENGTHS, value_heads=4))
    packed = package(p, device)
    for n, (_, start, end) in enumerate(p.offsets):
        state = p.initial_state[n : n + 1].copy()
        for cu in (None, np.array([0, end - start], np.int32)):
            alone = p.but(**rows(p, 0, start, end), initial_state=state, cu_seqlens=cu)
            one = package(alone, device)
            assert same_bits(one.out, packed.out[:, start:end]), f"sequence {n}: out"
            assert same_bits(one.final[0], packed.final[n]), f"sequence {n}: state"


@pytest.mark.parametrize("variant", VARIANTS_TO_SERVE)
def test_batch_as_each_row_alone_and_as_packed(variant: str, device: str) -> None:
    p = make(variant, Shape(2, 100, batch=5, value_heads=6))
    batch = package(p, device)
    flat = {n: getattr(p, n).reshape(1, 500, *getattr(p, n).shape[2:]) for n in TOKEN_ARRAYS}
    packed = package(p.but(**flat, cu_seqlens=np.arange(0, 501, 100)), device)
    assert same_bits(packed.out.reshape(batch.out.shape), batch.out)
    assert same_bits(packed.final, batch.final)
    for b in range(5):
        one = package(p.but(**rows(p, b, 0, 100), initial_state=p.initial_state[b : b + 1]), device)
        assert same_bits(one.out[0], batch.out[b])
        assert same_bits(one.final[0], batch.final[b])


@pytest.mark.parametrize("variant", VARIANTS_TO_SERVE)
def test_order_of_heads_and_sequences(variant: str, device: str) -> None:
    p = make(variant, Shape(3, lengths=LENGTHS, value_heads=6))
    before = package(p, device)
    order = [4, 5, 0, 1, 2, 3]
    after = package(take_heads(p, order), device)
    assert same_bits(after.out, np.ascontiguousarray(before.out[:, :, order]))
    assert same_bits(after.final, np.ascontiguousarray(before.final[:, order]))

    sequences = list(np.random.default_rng(1).permutation(len(LENGTHS)))
    parts = [rows(p, *p.offsets[n]) for n in sequences]
    arrays = {n: np.concatenate([part[n] for part in parts], axis=1) for n in TOKEN_ARRAYS}
    cu = np.concatenate([[0], np.cumsum([LENGTHS[n] for n in sequences])])
    moved = p.but(**arrays, cu_seqlens=cu, initial_state=p.initial_state[sequences])
    after = package(moved, device)
    expected = np.concatenate(
        [before.out[:, a:b] for _, a, b in (p.offsets[n] for n in sequences)], 1
    )
    assert same_bits(after.out, expected)
    assert same_bits(after.final, before.final[sequences])


@pytest.mark.parametrize("head", [0, 3])
def test_one_head_as_among_others(head: int, device: str) -> None:
    p = make("lower bound", Shape(4, lengths=LENGTHS))
    every = package(p, device)
    one = package(take_heads(p, [head]), device)
    assert same_bits(one.out, np.ascontiguousarray(every.out[:, :, [head]]))
    assert same_bits(one.final, np.ascontiguousarray(every.final[:, [head]]))


@pytest.mark.parametrize("poisoned", [np.nan, np.inf, -np.inf, 3e38])
def test_neighbours_of_any_value(poisoned: float, device: str) -> None:
    """A sequence and head, whatever stands in the others and in rows past the end."""
    p = make("lower bound", Shape(2, 600, lengths=LENGTHS))
    before = package(p, device)
    kept, head = 5, 1  # sequence of 200 tokens
    _, start, end = p.offsets[kept]
    dirty = {n: np.full_like(getattr(p, n), poisoned) for n in TOKEN_ARRAYS}
    for n, x in dirty.items():
        x[:, start:end, head] = getattr(p, n)[:, start:end, head]
    state = np.full_like(p.initial_state, poisoned)
    state[kept, head] = p.initial_state[kept, head]
    after = package(p.but(**dirty, initial_state=state), device)
    assert same_bits(after.out[:, start:end, head], before.out[:, start:end, head])
    assert same_bits(after.final[kept, head], before.final[kept, head])


@pytest.mark.parametrize("shape", [Shape(1, 300), Shape(5, lengths=LENGTHS), Shape(2, 70, batch=3)])
def test_any_number_of_threads(shape: Shape) -> None:
    p = make("lower bound", shape)
    one = package(p, threads=1)
    for threads in (0, 2, 3, 4, 7, 16, 64):
        many = package(p, threads=threads)
        assert same_bits(many.out, one.out), f"{threads} threads"
        assert same_bits(many.final, one.final), f"{threads} threads"


def test_state_types_do_not_touch_the_output(device: str) -> None:
    """The running state is fp32 whatever the storage: values exact in bf16 give the same bits."""
    p = make("lower bound", Shape(2, lengths=LENGTHS))
    wide = package(p, device)
    narrow = package(p.but(initial_state=p.initial_state.astype(BF16), final_dtype=BF16), device)
    assert same_bits(narrow.out, wide.out)
    assert same_bits(narrow.final, wide.final.astype(BF16))
    unasked = package(p.but(final_dtype=None), device)
    assert same_bits(unasked.out, wide.out)


@pytest.mark.parametrize("cuts", [[64], [128, 192], [37], [1, 2, 63, 64, 65, 299]], ids=str)
def test_split_with_a_carried_state(cuts: list[int], device: str) -> None:
    """At multiples of 64 bitwise as in one go, elsewhere at rounding's level."""
    p = make("lower bound", Shape(2, 300))
    whole = package(p, device)
    state, outs = p.initial_state, []
    for start, end in zip([0, *cuts], [*cuts, 300], strict=True):
        part = package(p.but(**rows(p, 0, start, end), initial_state=state), device)
        state = part.final
        outs.append(part.out)
    out = np.concatenate(outs, 1)
    if all(cut % 64 == 0 for cut in cuts):
        assert same_bits(out, whole.out)
        assert same_bits(state, whole.final)
    scale = np.abs(whole.final).max()
    assert np.abs(state - whole.final).max() <= 2e-3 * scale
    whole_out = whole.out.astype(np.float32)
    assert np.abs(out.astype(np.float32) - whole_out).max() <= 2**-7 * np.abs(whole_out).max()


def test_zero_tokens_and_zero_queries() -> None:
    p = make("lower bound", Shape(2, 90))
    p.q[:, 10:20] = 0
    result = package(p)
    assert not result.out[:, 10:20].astype(np.float32).any()
    silent = p.but(beta=np.full_like(p.beta, -np.inf), g=np.full_like(p.g, -1e4))
    assert same_bits(package(silent).final, p.initial_state)  # no write, no decay
