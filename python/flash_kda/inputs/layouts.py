"""Named inputs about memory and scheduling: strides, alignment, offsets, many items, repetition."""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from flash_kda._host import Array
from flash_kda.inputs.call import Result, from_torch
from flash_kda.inputs.checker import Checker
from flash_kda.inputs.problem import BF16, FP32, Problem, Shape, normal, ordinary

_MAP_NORESERVE = 0x4000  # Linux


def sparse_buffer(elements: int, dtype: np.dtype[Any]) -> Array:
    """Zero pages that take memory only where they are written (Linux). Raises MemoryError."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", _MAP_NORESERVE)
    try:
        pages = mmap.mmap(-1, elements * dtype.itemsize, flags=flags)
    except OSError as error:
        raise MemoryError(f"{elements * dtype.itemsize} bytes of address space: {error}") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)  # or each row would take 2 MiB
    return np.frombuffer(pages, dtype)


def spread(x: Array, pitches: tuple[int, ...], lead: int = 0, buffer: Array | None = None) -> Array:
    """A copy of `x` with the given strides in elements, `lead` elements into its buffer."""
    if buffer is None:
        span = sum((n - 1) * s for n, s in zip(x.shape, pitches, strict=True)) + 1
        buffer = np.full(lead + span, np.nan, x.dtype)
    strides = [s * x.itemsize for s in pitches]
    view = as_strided(buffer[lead:], x.shape, strides)
    view[...] = x
    return view


def t20(c: Checker) -> None:
    """Offsets past 2^31 elements in every direction, with a needle at the far end."""
    if c.device != "cpu":
        far_on_device(c)
        return
    tokens, heads = c.tokens(2304, 1100), 6
    p = ordinary(c.rng(), Shape(heads, tokens), state_in=FP32)
    p.v[:, -20:] = (p.v[:, -20:].astype(np.float32) * 50).astype(BF16)
    pitch = (1 << 31) // tokens + 4096  # a row; the last rows lie past 2^31 elements
    views, wide = {}, {"q": 128, "k": 128, "v": 128, "g": 128, "beta": 1}
    for name, step in wide.items():
        x = getattr(p, name)
        buffer = sparse_buffer((tokens - 1) * pitch + heads * step, x.dtype)
        strides = (0, pitch, step, 1)[: x.ndim]
        views[name] = spread(x, strides, buffer=buffer)
    out = as_strided(
        sparse_buffer((tokens - 1) * pitch + heads * 128, BF16), p.v.shape, [0, pitch * 2, 256, 2]
    )
    how: dict[str, Any] = {} if c.forward is not None else {"out": out}
    result = c.run(p.but(**views), **how)
    c.accuracy("row pitch past 2^31 / T", p, heads=(0, 2, 5), result=result)
    c.same(
        "row pitch past 2^31 / T", result.out[:, -64:], c.run(p).out[:, -64:], "bitwise as dense"
    )
    few = ordinary(c.rng(1), Shape(3, 70), state_in=FP32)
    far = (1 << 30) + 64  # a head; head 2 lies past 2^31 elements
    moved = {}
    for name in ("q", "k", "v", "g"):
        x = getattr(few, name)
        moved[name] = spread(x, (0, 128, far, 1), buffer=sparse_buffer(2 * far + 70 * 128, x.dtype))
    assert few.initial_state is not None
    moved["initial_state"] = spread(
        few.initial_state, (0, far, 128, 1), buffer=sparse_buffer(2 * far + 128 * 128, FP32)
    )
    c.same("head pitch 2^30", c.run(few.but(**moved)).out, c.run(few).out, "bitwise as dense")


def far_on_device(c: Checker) -> None:
    """T20 at full size: T * H * K past 2^31 elements, made on the device."""
    import torch

    import flash_kda

    tokens, heads = c.tokens(262144, 180000), 96
    torch.cuda.manual_seed(20)
    made = {"dtype": torch.bfloat16, "device": c.device}
    x = {name: torch.randn(1, tokens, heads, 128, **made) for name in ("q", "k", "v", "g")}
    x["v"][:, -20:] *= 50
    x["beta"] = torch.randn(1, tokens, heads, **made)
    x["A_log"] = torch.rand(heads, device=c.device) / 2
    x["dt_bias"] = torch.randn(heads, 128, device=c.device) / 10
    out = torch.full_like(x["v"], float("nan"))
    final = torch.full((1, heads, 128, 128), float("nan"), device=c.device)
    q, k, v, g, beta = (x[name] for name in ("q", "k", "v", "g", "beta"))
    flash_kda.fwd(q, k, v, g, beta, None, out, x["A_log"], x["dt_bias"], -5.0, None, final)

    picked = [0, heads // 2 - 1, heads - 1]
    few: dict[str, Any] = {n: from_torch(a[:, :, picked]) for n, a in x.items() if a.dim() > 2}
    p = Problem(
        **few, A_log=from_torch(x["A_log"][picked]), dt_bias=from_torch(x["dt_bias"][picked])
    )
    result = Result(from_torch(out[:, :, picked]), from_torch(final[:, picked]))
    expected = c.accuracy(f"{tokens} tokens, heads 0, 47, 95", p, result=result)
    last = Result(result.out[:, -64:], result.final)
    tail = p.but(**{n: getattr(p, n)[:, -64:] for n in ("q", "k", "v", "g", "beta")})
    c.accuracy(
        "the last 64 tokens", tail, expected=(expected[0][:, -64:], expected[1]), result=last
    )


def t22(c: Checker) -> None:
    """Two inputs by turns, many times, with any number of threads and from two callers at once."""
    lengths: tuple[int, ...] = (1238, 1199, 1240, 1216, 1187, 1203, 909)
    if c.quick:
        lengths = tuple(n // 8 for n in lengths)
    problems = [ordinary(c.rng(i), Shape(12, lengths=lengths), state_in=FP32) for i in range(2)]
    first = [c.run(p) for p in problems]
    for i, (p, result) in enumerate(zip(problems, first, strict=True)):
        c.accuracy(f"input {i}", p, heads=(0,), result=result)
    cpu = c.device == "cpu" and c.forward is None
    counts = (1, 2, 3, 5, 8, 16) if cpu else (0,)
    for threads in counts:
        how = {"threads": threads} if cpu else {}
        _repeat(c, f"{threads or 'all'} threads", problems, first, 4 if cpu else 100, how)
    if cpu:
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(lambda i: c.run(problems[i % 2]), range(8)))
        for i, result in enumerate(results):
            c.same(f"two callers, call {i}", result.out, first[i % 2].out, "bitwise")
            c.same(f"two callers, call {i}", result.final, first[i % 2].final, "bitwise")


def _repeat(
    c: Checker, case: str, problems: Any, first: Any, rounds: int, how: dict[str, Any]
) -> None:
    for turn in range(rounds):
        result = c.run(problems[turn % 2], **how)
        c.same(f"{case}, round {turn}", result.out, first[turn % 2].out, "bitwise")
        c.same(f"{case}, round {turn}", result.final, first[turn % 2].final, "bitwise")


def strided_variants(p: Problem, rng: np.random.Generator) -> dict[str, dict[str, Array]]:
    """The same values in other layouts: name -> the arrays that differ."""
    batch, tokens, heads, dim = p.q.shape
    row = heads * dim
    fused_pitch = 3 * row + 8
    fused = np.full(batch * tokens * fused_pitch, np.nan, BF16)
    columns = {
        name: spread(getattr(p, name), (tokens * fused_pitch, fused_pitch, dim, 1), i * row, fused)
        for i, name in enumerate(("q", "k", "v"))
    }
    by_head = {
        name: spread(getattr(p, name), (row * tokens, dim, dim * tokens, 1))
        for name in ("q", "k", "v", "g")
    }
    odd = {
        name: spread(getattr(p, name), (tokens * (row + 3), row + 3, dim, 1), lead=1)
        for name in ("q", "k", "v", "g")
    }
    wide = {"beta": spread(p.beta, (tokens * 6288, 6288, 1), lead=16)}
    state = p.initial_state
    assert state is not None
    _, value_heads, value_dim, key_dim = state.shape
    slot = value_heads * (value_dim + 1) * (key_dim + 4)
    strides = (slot + 64, (value_dim + 1) * (key_dim + 4), key_dim + 4, 1)
    return {
        "columns of one matrix": columns,
        "[B, H, T, D] storage": by_head,
        "2-byte alignment, odd pitch": odd,
        "beta of row pitch 6288": wide,
        "padded initial state": {"initial_state": spread(state, strides)},
    }


def t23(c: Checker) -> None:
    """Layouts that callers bring: same bits as from dense arrays."""
    for heads in (1, 3, 6, 12):
        p = ordinary(c.rng(heads), Shape(heads, 150, batch=2), state_in=FP32)
        dense = c.run(p)
        c.accuracy(f"H {heads}, dense", p, result=dense)
        for name, arrays in strided_variants(p, c.rng()).items():
            _allowed(c, f"H {heads}, {name}", p.but(**arrays), dense)
    p = ordinary(c.rng(1), Shape(1, 100), state_in=FP32)
    wide = normal(c.rng(2), (1, 100, 4, 128))
    wide[:, :, 2:3] = p.q
    odd = as_strided(
        wide[:, :, 2:3], p.q.shape, (2, 4 * 256, 6, 2)
    )  # strides of size-1 dimensions mean nothing
    _allowed(c, "H 1, slice of a wider tensor", p.but(q=odd), c.run(p))
    p = ordinary(c.rng(3), Shape(4, 100), state_in=FP32)
    shared = as_strided(p.q[:, :, :1], p.q.shape, (0, 4 * 256, 0, 2))
    _allowed(c, "one query row for all heads", p.but(q=shared), c.run(p.but(q=shared.copy())))


def _allowed(c: Checker, case: str, problem: Problem, dense: Any) -> None:
    """Right to the bit, or (on a GPU) an error that says what is wrong with the layout."""
    try:
        result = c.run(problem)
    except (ValueError, NotImplementedError) as error:
        named = any(word in str(error) for word in ("stride", "align"))
        c.expect(case, named and c.device != "cpu", f"refused: {error}")
        return
    c.same(case, result.out, dense.out, "bitwise as dense")
    c.same(case, result.final, dense.final, "bitwise as dense")


def many_items(c: Checker) -> None:
    """More sequences times heads than a grid axis holds."""
    dim = 16 if c.device == "cpu" else 128
    count = 3000 if c.quick else 70000
    p = ordinary(
        c.rng(), Shape(1, lengths=(1,) * count, key_dim=dim, value_dim=dim), state_out=None
    )
    result = c.run(p)
    kept = [*range(0, count, max(1, count // 500)), count - 1]
    few = p.but(
        cu_seqlens=np.arange(len(kept) + 1),
        **{name: getattr(p, name)[:, kept] for name in ("q", "k", "v", "g", "beta")},
    )
    c.accuracy(f"{count} sequences of one token", few, result=Result(result.out[:, kept], None))
