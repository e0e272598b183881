"""Exact match: on exactly representable inputs all implementations give the same bits, states too.

The answer comes from `exact.generate` (integers, channel by channel). The package, NumPy's
recurrence and PyTorch's (fp32 and fp64, token by token) must all equal it. "core" cases also hold
for an algorithm in chunks with bf16 operands, so they bind the GPU as well; "cpu-only" cases have
wider numbers, other array types and other head sizes. Zeros compare equal whatever their sign. A
GPU runs the core cases that it serves; the others are counted as not served, and a test of which
nothing ran is skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from flash_kda.inputs.call import Result, is_poison, package
from flash_kda.inputs.checker import not_served
from flash_kda.inputs.problem import BF16, FP16, FP32
from flash_kda.reference import recurrent_kda

torch = pytest.importorskip("torch")

from exact.generate import Exact, Spec, generate, representable  # noqa: E402
from exact.references import by_chunk, by_token  # noqa: E402

MIXED = (1300, 547, 2048, 963, 271, 3063)
GATES = ("lower_bound", "softplus", "log_decay")
_optional = pytest.mark.skip_if_not_served  # a GPU has to serve the bounded gate alone
GATES_TO_SERVE = [g if g == "lower_bound" else pytest.param(g, marks=_optional) for g in GATES]
BETAS = ("logit", "doubled_logit", "probability")
STATES: dict[str, dict[str, Any]] = {
    "none": {"state_in": None, "state_out": None},
    "in": {"state_in": FP32, "state_out": None},
    "in bf16": {"state_in": BF16, "state_out": None},
    "out": {"state_in": None, "state_out": FP32},
    "out bf16": {"state_in": None, "state_out": BF16},
    "fp32 to fp32": {"state_in": FP32, "state_out": FP32},
    "fp32 to bf16": {"state_in": FP32, "state_out": BF16},
    "bf16 to fp32": {"state_in": BF16, "state_out": FP32},
    "bf16 to bf16": {"state_in": BF16, "state_out": BF16},
}
TAILS = range(1, 64)


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Small steps: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def agree(got: np.ndarray, expected: np.ndarray, what: str) -> None:
    """Every element exactly equal; `expected` is float64."""
    wrong = got.astype(np.float64) != expected  # NaN is never equal
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.size} elements differ, first at {place}: "
            f"expected {expected[place]}, got {got[place]}"
        )


def check_result(case: Exact, result: Result) -> None:
    """The result of a call against the exact answer."""
    end = case.problem.v.shape[1]
    if case.problem.cu_seqlens is not None:
        end = int(case.problem.cu_seqlens[-1])
        assert is_poison(result.out[:, end:]), "rows past the end were written"
    agree(result.out[:, :end], case.out[:, :end], f"{case.spec.name}: out")
    if case.spec.state_out is not None:
        assert result.final is not None
        agree(result.final, case.final, f"{case.spec.name}: final state")


def check_references(case: Exact, heads: list[int], *, both: bool) -> None:
    """NumPy's and PyTorch's recurrences against the exact answer, on some heads.

    `both`: each in fp32 and in fp64; otherwise one in fp32, the other in fp64, by turns.
    """
    p = case.problem
    turn = len(case.spec.name) % 2
    arrays = (p.q, p.k, p.v, p.g, p.beta)
    rest = {"A_log": p.A_log, "dt_bias": p.dt_bias, "initial_state": p.initial_state}
    more = {"cu_seqlens": p.cu_seqlens, "heads": heads}
    answers = {
        f"NumPy {np.dtype(t).name}": recurrent_kda(*arrays, **rest, **p.options(), **more, dtype=t)
        for t in ((np.float32, np.float64) if both else (np.float64 if turn else np.float32,))
    }
    for dtype in (
        (torch.float32, torch.float64) if both else (torch.float32 if turn else torch.float64,)
    ):
        answers[f"PyTorch {dtype}"] = by_token(p, heads, dtype)
    for name, (out, final) in answers.items():
        agree(out, case.out[:, :, heads], f"{case.spec.name}: {name} out")
        agree(final, case.final[:, heads], f"{case.spec.name}: {name} state")


def has_to_serve(spec: Spec, device: str) -> bool:
    """Whether the device must have kernels for the case; if not, the call may say so."""
    return device == "cpu" or (spec.gate == "lower_bound" and spec.gate_dtype == BF16)


def run_case(
    spec: Spec, device: str, counts: Counter[str], tier: str = "core", *, both: bool = False
) -> str | None:
    """Generates, checks that the numbers fit their types, and compares package and references.

    Returns the reason if a GPU does not serve the case, else None.
    """
    case = generate(spec)
    store = [t for t in (spec.state_in, spec.state_out) if t is not None]
    assert representable(case.out, spec.dtype)
    assert all(representable(case.final, t) for t in store)
    try:
        result = package(case.problem, device)
    except NotImplementedError as error:
        if has_to_serve(spec, device) or not not_served(error, device):
            raise
        counts[f"refused by {device}"] += 1
        return str(error)
    check_result(case, result)
    if device == "cpu":  # the references run there anyway: once is enough
        check_references(case, [0, spec.value_heads - 1], both=both)
    counts[f"{tier} on {device}"] += 1
    return None


def skip_if_none_ran(answers: list[str | None]) -> None:
    """For a test of several cases: skips it if the device served not one of them."""
    if answers and all(answers):
        pytest.skip(str(answers[0]))


def published(full: bool) -> Iterator[Spec]:
    """The shapes that published timings use; few heads unless `full`."""
    for heads in (96, 64) if full else (5,):
        base = Spec("", heads=heads, value_heads=heads, state_in=BF16, state_out=FP32)
        yield base.but(name=f"1 x 8192, {heads} heads", tokens=8192)
        yield base.but(name=f"mixed, {heads} heads", lengths=MIXED, state_out=BF16)
        yield base.but(name=f"8 x 1024, {heads} heads", batch=8, tokens=1024, state_in=FP32)


def test_published_shapes(device: str, full: bool, exact_cases: Counter[str]) -> None:
    for spec in published(full):
        run_case(spec, device, exact_cases, both=True)
        if not full:
            other = spec.but(
                name=f"{spec.name}, log decay", gate="log_decay", beta_kind="probability"
            )
            run_case(other, device, exact_cases)


@pytest.mark.parametrize("gate", GATES)
def test_tails(device: str, gate: str, exact_cases: Counter[str]) -> None:
    """Every length from 1 to 63 after 0 or 1 whole chunks, alone; and all of them packed."""
    modes, ran = list(STATES.values()), []
    for tail in TAILS:
        for whole in (0, 64):
            beta_kind = BETAS[(tail + whole) % 3]
            spec = Spec(f"tail {whole}+{tail} {gate}", tokens=whole + tail, gate=gate, seed=tail)
            spec = spec.but(beta_kind=beta_kind, **modes[tail % len(modes)])
            ran.append(run_case(spec, device, exact_cases, both=True))
    for name, lengths in (("1..63", tuple(TAILS)), ("63..1", tuple(reversed(TAILS)))):
        spec = Spec(f"packed {name} {gate}", lengths=lengths, gate=gate)
        ran.append(run_case(spec, device, exact_cases))
    skip_if_none_ran(ran)


@pytest.mark.parametrize("mode", STATES)
@pytest.mark.parametrize("gate", GATES)
def test_state_modes(device: str, mode: str, gate: str, exact_cases: Counter[str]) -> None:
    """Each way of giving and asking for states, packed and batched, with grouped value heads."""
    ran = []
    for value_heads, packed, beta_kind in product((2, 4, 6), (True, False), BETAS):
        shape: dict[str, Any] = {"batch": 3, "tokens": 70}
        if packed:
            shape = {"lengths": (0, 65, 1, 0, 64, 15, 0), "pad": 5}
        name = f"{mode} {gate} {beta_kind} HV {value_heads} {'packed' if packed else 'batch'}"
        spec = Spec(name, value_heads=value_heads, gate=gate, beta_kind=beta_kind, **shape)
        ran.append(run_case(spec.but(**STATES[mode]), device, exact_cases))
    skip_if_none_ran(ran)


@pytest.mark.parametrize("state", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("gate", GATES_TO_SERVE)
def test_in_place(device: str, gate: str, state: np.dtype[Any], exact_cases: Counter[str]) -> None:
    for seed, value_heads in product(range(2), (2, 4)):
        spec = Spec("in place", lengths=(130, 0, 64, 31), state_in=state, state_out=state)
        case = generate(spec.but(seed=seed, gate=gate, value_heads=value_heads))
        check_result(case, package(case.problem, device, in_place=True))
        exact_cases[f"core on {device}"] += 1


@_optional
@pytest.mark.parametrize("state", [FP32, BF16], ids=["fp32", "bf16"])
def test_pools_and_checkpoints(
    device: str, state: np.dtype[Any], exact_cases: Counter[str]
) -> None:
    for seed in range(4):
        spec = Spec(
            "pools", lengths=(130, 0, 64, 31), value_heads=4, state_in=state, state_out=state
        )
        gate = GATES[seed % 3] if device == "cpu" else "lower_bound"
        case = generate(spec.but(seed=seed, gate=gate))
        p = case.problem
        rng = np.random.default_rng(seed)
        slots = rng.permutation(9)[:4]
        pool = np.full((9, *p.initial_state.shape[1:]), np.nan, state)  # read nowhere else
        pool[slots] = p.initial_state
        to = rng.permutation(9)[:4]
        skipped = seed % 4
        to[skipped] = -1
        pooled = p.but(
            initial_state=pool, initial_state_indices=slots, final_state_indices=to.astype(np.int32)
        )
        got = package(pooled, device)
        agree(got.out, case.out, "pool: out")
        for n, slot in enumerate(to):
            if slot >= 0:
                agree(got.final[slot], case.final[n], f"pool: slot {slot}")
        others = [s for s in range(got.final.shape[0]) if s not in to]
        assert is_poison(got.final[others])

        placed = package(pooled.but(final_state_indices=slots), device, in_place=True)
        agree(placed.final[slots], case.final, "pool in place")
        assert np.isnan(
            placed.final[[s for s in range(9) if s not in slots]].astype(np.float32)
        ).all()

        zeros = np.where(np.arange(4) == skipped, -1, slots)
        fresh = recurrent_kda(
            p.q, p.k, p.v, p.g, p.beta, A_log=p.A_log, dt_bias=p.dt_bias, initial_state=pool,
            initial_state_indices=zeros, cu_seqlens=p.cu_seqlens, **p.options(),
        )  # fmt: skip
        started = package(pooled.but(initial_state_indices=zeros, final_state_indices=None), device)
        agree(started.out, fresh[0], "negative slot: out")
        agree(started.final, fresh[1], "negative slot: state")

        marks = ((0, 0, 4), (0, 64, 1), (0, 128, 3), (2, 64, 0), (3, 0, -1), (1, 0, 6))
        kept = package(p.but(checkpoints=marks, checkpoint_dtype=state), device)
        check_result(case, kept)
        wanted = recurrent_kda(
            p.q, p.k, p.v, p.g, p.beta, A_log=p.A_log, dt_bias=p.dt_bias, cu_seqlens=p.cu_seqlens,
            initial_state=p.initial_state, checkpoints=[m[:2] for m in marks], **p.options(),
        )[2]  # fmt: skip
        for (_, _, slot), answer in zip(marks, wanted, strict=True):
            if slot >= 0:
                agree(kept.checkpoints[slot], answer, f"checkpoint slot {slot}")
        assert is_poison(kept.checkpoints[[2, 5, 7]])
        exact_cases[f"core on {device}"] += 4


@pytest.mark.parametrize("carried", [FP32, BF16], ids=["fp32", "bf16"])
def test_pieces(device: str, carried: np.dtype[Any], exact_cases: Counter[str]) -> None:
    """A sequence cut anywhere, its state carried in either type, gives the bits of one go."""
    spec = Spec("pieces", tokens=300, state_in=carried, state_out=carried)
    spec = spec.but(gate="softplus" if device == "cpu" else "lower_bound")
    case = generate(spec)
    p = case.problem
    for cuts in ([64, 128], [37], [1, 2, 3, 299], [150], [63, 127, 255]):
        state, outs = p.initial_state, []
        for start, end in zip([0, *cuts], [*cuts, 300], strict=True):
            rows = {n: getattr(p, n)[:, start:end].copy() for n in ("q", "k", "v", "g", "beta")}
            result = package(p.but(**rows, initial_state=state), device)
            state = result.final
            outs.append(result.out)
        check_result(case, Result(np.concatenate(outs, 1), state))
        exact_cases[f"core on {device}"] += 1


def test_bounds_scales_and_gate_types(device: str, exact_cases: Counter[str]) -> None:
    for bound, has_bias, gate_dtype in product(
        (0.0, -1e-3, -2.5, -5.0), (True, False), (BF16, FP32)
    ):
        name = f"bound {bound} {has_bias} {gate_dtype.name}"
        spec = Spec(
            name, lengths=(90, 7), lower_bound=bound, has_bias=has_bias, gate_dtype=gate_dtype
        )
        run_case(spec, device, exact_cases)
    for scale in (1.0, 0.125, -0.25, 2.0):
        run_case(Spec(f"scale {scale}", tokens=90, scale=scale), device, exact_cases)
    for index_dtype in (np.int32, np.int64):
        case = generate(Spec("offsets", lengths=(64, 3, 0, 70)))
        cu = case.problem.cu_seqlens.astype(index_dtype)
        check_result(case, package(case.problem.but(cu_seqlens=cu), device))
        exact_cases[f"core on {device}"] += 1


@pytest.mark.parametrize(
    "dims", [(1, 1), (3, 17), (16, 256), (64, 64), (100, 96), (256, 128), (256, 256)]
)
def test_head_sizes(dims: tuple[int, int], exact_cases: Counter[str]) -> None:
    """Any K and V; K of 16, 64 and 256 with the default scale, a power of two."""
    key_dim, value_dim = dims
    scale = None if key_dim in (1, 16, 64, 256) else 0.5
    for gate, beta_kind, value_heads in product(GATES, BETAS, (2, 6)):
        spec = Spec(
            f"K {key_dim} V {value_dim} {gate} {beta_kind}", lengths=(67, 1, 30), scale=scale
        )
        spec = spec.but(gate=gate, beta_kind=beta_kind, key_dim=key_dim, value_dim=value_dim)
        run_case(spec.but(value_heads=value_heads), "cpu", exact_cases, "cpu-only")


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=["fp16", "fp32"])
def test_other_array_types(dtype: np.dtype[Any], exact_cases: Counter[str]) -> None:
    """fp16 and fp32 arrays hold wider numbers: 10 and 16 bits of them."""
    largest, halvings = (32, 4) if dtype == FP16 else (1000, 5)
    for gate, beta_kind, mode in product(GATES, BETAS, ("none", "fp32 to fp32")):
        spec = Spec(f"{dtype.name} {gate} {beta_kind} {mode}", lengths=(70, 64, 9), dtype=dtype)
        spec = spec.but(gate=gate, beta_kind=beta_kind, largest=largest, halvings=halvings)
        for gate_dtype in (dtype, FP32):
            run = spec.but(gate_dtype=gate_dtype, **STATES[mode])
            run_case(run, "cpu", exact_cases, "cpu-only")


def test_core_cases_are_exact_in_chunks_with_bf16_operands() -> None:
    """What makes a case "core": an algorithm in chunks with operands in bf16 makes no error."""
    for gate, beta_kind, seed in product(GATES, BETAS, range(2)):
        spec = Spec(f"chunks {gate} {beta_kind}", lengths=(0, 63, 200), value_heads=4, seed=seed)
        case = generate(spec.but(gate=gate, beta_kind=beta_kind))
        for chunk in (16, 32, 64, 128):
            out, final = by_chunk(case.problem, [0, 3], chunk)
            agree(out, case.out[:, :, [0, 3]], f"chunks of {chunk}: out")
            agree(final, case.final[:, [0, 3]], f"chunks of {chunk}: state")
    for spec in published(full=False):
        case = generate(spec)
        out, final = by_chunk(case.problem, [0])
        agree(out, case.out[:, :, [0]], f"{spec.name}: out")
        agree(final, case.final[:, [0]], f"{spec.name}: state")


def test_a_wrong_result_is_seen() -> None:
    case = generate(Spec("wrong", lengths=(40, 30), pad=2))
    good = package(case.problem)
    check_result(case, good)
    out = good.out.copy()
    out[0, 69, 1, 127] += BF16.type(0.125)
    with pytest.raises(AssertionError, match="1 of .* elements differ"):
        check_result(case, Result(out, good.final))
    final = good.final.copy()
    final[1, 1, 127, 127] = np.nan
    with pytest.raises(AssertionError, match="final state"):
        check_result(case, Result(good.out, final))
    with pytest.raises(AssertionError):
        check_result(case, Result(good.out, np.swapaxes(good.final, 2, 3)))
    out = good.out.copy()
    out[0, 70] = 0
    with pytest.raises(AssertionError, match="past the end"):
        check_result(case, Result(out, good.final))


@pytest.mark.parametrize("instructions", ["generic", "avx2", "avx512"])
def test_each_instruction_set(instructions: str, exact_cases: Counter[str]) -> None:
    """Part of the suite in a process that is made to use other kernels."""
    environment = os.environ | {"FLASH_KDA_CPU_ISA": instructions}
    ask = "import flash_kda; print(flash_kda.backends()[0].detail)"
    told = subprocess.run(
        [sys.executable, "-c", ask], env=environment, capture_output=True, text=True
    )
    if not told.stdout.startswith(instructions):
        pytest.skip(f"no {instructions} here: {told.stdout.strip() or told.stderr.strip()[-200:]}")
    part = "in_place or pools or pieces or bounds or wrong or (head_sizes and 17)"
    part += " or (state_modes and softplus and out)"
    command = [sys.executable, "-m", "pytest", "-q", "--device", "cpu", "-k", part, __file__]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:]
    found = re.search(r"exact-match cases: (\d+)", result.stdout)
    assert found, result.stdout[-3000:]
    exact_cases[f"core and cpu-only with {instructions} kernels"] += int(found[1])
