"""Measures calls against the fp64 recurrence; one row for each thing that was looked at."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flash_kda._host import Array
from flash_kda.inputs import workers
from flash_kda.inputs.call import Forward, Result, is_poison, package, same_bits
from flash_kda.inputs.problem import BF16, Problem
from flash_kda.metrics import HeadError, errors_by_head
from flash_kda.reference import recurrent_kda

Bounds = tuple[float, float]  # relative RMS of out and of the state
Oracle = tuple[Array, Array]
_Marks = tuple[str, bool, str]

ORDINARY: Bounds = (5e-3, 5e-3)
STRESS: Bounds = (1e-2, 1e-2)
CANCELLING: Bounds = (5e-2, 8e-2)  # near-identical keys under full writes: updates nearly cancel
# One element, in bf16 units of the head's largest oracle element; not asked where updates cancel.
_WORST_UNITS = 8.0


@dataclass(frozen=True)
class Row:
    """One measured head of one sequence, or one yes/no property (then the errors are None)."""

    input: str
    case: str
    ok: bool
    sequence: int | None = None
    head: int | None = None
    out_error: float | None = None  # relative RMS
    state_error: float | None = None
    out_bound: float | None = None
    state_bound: float | None = None
    worst_units: float | None = (
        None  # largest single error of out and state: metrics.worst_bf16_units
    )
    note: str = ""
    served: bool = True  # False: the device does not offer what the case asks for, and says so
    known: str = ""  # why a row that is not ok is no news: a known shortfall of the backend

    @property
    def failed(self) -> bool:
        """Not ok, and not known to be so."""
        return not self.ok and not self.known

    @property
    def margin(self) -> float:
        """The larger of error / bound; 0 or inf for a property."""
        if self.out_error is None or not self.out_bound:
            return 0.0 if self.ok else float("inf")
        ratios = [self.out_error / self.out_bound]
        if self.out_bound <= STRESS[0]:
            ratios.append((self.worst_units or 0) / _WORST_UNITS)
        if self.state_error is not None and self.state_bound:
            ratios.append(self.state_error / self.state_bound)
        return max(ratios)


# The CUDA backend's figures outside their bounds that are known: relative RMS of out, or the figure
# that a property goes by. A row within `_KNOWN_SLACK` of its figure is shown as a known shortfall;
# anything worse is a failure.
#
# T16: one go of few heads is cut into segments whose states come by another way than the pieces'
# (docs/numerics.md); both are right to 3.3e-3, and they lie apart by a little more than the 2e-3
# that is asked for. With sequence_split=False they meet it.
KNOWN_SHORTFALLS: dict[tuple[str, str], float] = {
    ("T16", "pieces on chunk borders"): 2.1e-3,
}
_KNOWN_SLACK = 1.25
# The note of a row whose call was run again with sequences in one piece.
IN_ONE_PIECE = "sequence_split=False"
_NOT_SERVED = "not served by the CUDA kernels"


def not_served(error: BaseException, device: str) -> bool:
    """Whether a GPU backend says that it does not offer what was asked for."""
    return device != "cpu" and isinstance(error, NotImplementedError) and _NOT_SERVED in str(error)


def _optional(problem: Problem) -> bool:
    """Whether the call needs what the contract leaves open to a GPU backend."""
    kinds = problem.gate != "lower_bound" or problem.g.dtype != BF16 or problem.q.dtype != BF16
    sizes = (problem.q.shape[3], problem.v.shape[3]) != (128, 128)
    pools = (problem.initial_state_indices, problem.final_state_indices, problem.checkpoints)
    return kinds or sizes or any(x is not None for x in pools)


def _read_size(problem: Problem, wanted: Sequence[int]) -> Array:
    """RMS of out [N, heads] if the initial state were read as it is: scale * S q of every token."""
    assert problem.initial_state is not None
    group = problem.value_heads // problem.q.shape[2]
    scale = problem.q.shape[3] ** -0.5 if problem.scale is None else problem.scale
    size = np.zeros((problem.sequences, len(wanted)))
    for n, (row, start, end) in enumerate(problem.offsets):
        for i, head in enumerate(wanted):
            q = problem.q[row, start:end, head // group].astype(np.float64)
            if problem.l2norm:
                q /= np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6)
            state = problem.initial_state[n, head].astype(np.float64)
            size[n, i] = abs(scale) * np.sqrt(((q @ state.T) ** 2).mean())
    return size


def _out_rms(problem: Problem, o: Array) -> Array:
    """RMS [N, heads] of the oracle's out."""
    spans = [o[row, start:end] for row, start, end in problem.offsets]
    return np.stack([np.sqrt((x * x).mean(axis=(0, 2))) for x in spans])


def _oracle_here(problem: Problem, heads: Sequence[int]) -> Oracle:
    arrays = {
        name: getattr(problem, name)
        for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
    }
    options = problem.options()
    if problem.initial_state is not None:
        options["initial_state_indices"] = problem.initial_state_indices
    o, final = recurrent_kda(**arrays, **options, heads=heads)[:2]
    return o, final


def oracle(problem: Problem, heads: Sequence[int] | None = None) -> Oracle:
    """The output [B, T, heads, V] and the states after each sequence [N, heads, V, K] in fp64.

    The heads are shared out over processes (`workers`).
    """
    wanted = list(range(problem.value_heads)) if heads is None else list(heads)
    tokens = sum(end - start for _, start, end in problem.offsets)
    parts = min(len(wanted), workers.most_workers())
    if parts < 2 or tokens * len(wanted) < 4096:
        return _oracle_here(problem, wanted)
    shares = [list(map(int, part)) for part in np.array_split(wanted, parts)]
    results = workers.call_each(_oracle_here, [(problem, share) for share in shares])
    return (
        np.concatenate([o for o, _ in results], axis=2),
        np.concatenate([final for _, final in results], axis=1),
    )


@dataclass
class Checker:
    """What one input's checks are given: how to call, how far to go, where rows are put."""

    input: str
    device: str = "cpu"
    quick: bool = False
    forward: Forward | None = None  # in place of the package, to try the checks themselves
    say: Callable[[str], None] = lambda text: None  # told each case as it starts
    rows: list[Row] = field(default_factory=list)

    def rng(self, salt: int = 0) -> np.random.Generator:
        """A generator of its own for each input."""
        return np.random.default_rng([salt, *self.input.encode()])

    def tokens(self, full: int, quick: int = 1024) -> int:
        """A length: `full`, or at most `quick` when in a hurry."""
        return min(full, quick) if self.quick else full

    def run(self, problem: Problem, **how: Any) -> Result:
        """One call with poisoned outputs and inputs compared before and after."""
        if self.forward is not None:
            return self.forward(problem)
        return package(problem, self.device, **how)

    def accuracy(
        self,
        case: str,
        problem: Problem,
        bounds: Bounds = STRESS,
        *,
        heads: Sequence[int] | None = None,
        expected: Oracle | None = None,
        result: Result | None = None,
        by_state: bool = False,
    ) -> Oracle:
        """Compares a call with the oracle for each sequence and head; returns the oracle's.

        by_state: the error of out is relative to what the initial state would give as out if it
          were read as it is (RMS of scale * S q), where that is more than out itself.

        A call whose plan cuts sequences into segments is measured a second time with them in one
        piece.
        """
        self.say(case)
        wanted = list(range(problem.value_heads)) if heads is None else list(heads)
        try:
            got = self.run(problem) if result is None else result
        except NotImplementedError as error:
            if not (not_served(error, self.device) and _optional(problem)):
                raise
            self.rows.append(Row(self.input, case, True, note=f"not served: {error}", served=False))
            return oracle(problem, wanted) if expected is None else expected
        expected = oracle(problem, wanted) if expected is None else expected
        self._measure(case, problem, got, wanted, expected, bounds, by_state=by_state)
        if got.split and self.forward is None:
            whole = self.run(problem, sequence_split=False)
            self._measure(
                case, problem, whole, wanted, expected, bounds, by_state=by_state, note=IN_ONE_PIECE
            )
        return expected

    def _measure(
        self,
        case: str,
        problem: Problem,
        got: Result,
        wanted: Sequence[int],
        expected: Oracle,
        bounds: Bounds,
        *,
        by_state: bool,
        note: str = "",
    ) -> None:
        """Rows of one call's results."""
        o, final = expected
        cu = problem.cu_seqlens
        outs = list(
            errors_by_head(got.out[:, :, wanted], o, None if cu is None else [int(i) for i in cu])
        )
        states: list[float | None] = [None] * len(outs)
        if got.final is not None:
            taken = _states(problem, got)[:, None, wanted]
            state_errors = list(errors_by_head(taken, final[:, None]))
            states = [e.rms for e in state_errors]
            outs = [
                replace(e, units=max(e.units, s.units))
                for e, s in zip(outs, state_errors, strict=True)
            ]
        if by_state:
            size = _out_rms(problem, o)
            ratio = size / np.maximum(size, _read_size(problem, wanted))
            outs = [replace(e, rms=e.rms * ratio[e.sequence, e.head]) for e in outs]
        most = _WORST_UNITS if bounds[0] <= STRESS[0] else math.inf
        for e, state in zip(outs, states, strict=True):
            good_but_out = e.units <= most and (state is None or state <= bounds[1])
            good = e.rms <= bounds[0] and good_but_out
            self.rows.append(
                Row(
                    self.input,
                    case,
                    good,
                    e.sequence,
                    wanted[e.head],
                    e.rms,
                    state,
                    bounds[0],
                    None if state is None else bounds[1],
                    e.units,
                    *self._known(case, e, good, good_but_out, note),
                )
            )
        end = problem.v.shape[1] if cu is None else int(cu[-1])
        if end < problem.v.shape[1]:
            self.expect(
                case, is_poison(got.out[:, end:]), "rows past the last sequence are untouched"
            )

    def _known(self, case: str, e: HeadError, good: bool, good_but_out: bool, note: str) -> _Marks:
        """Marks of a row that the CUDA backend is known to miss: note, served, known."""
        figure = KNOWN_SHORTFALLS.get((self.input, case))
        if figure is None or self.device == "cpu":
            return note, True, ""
        if good:
            missed = f"within its bound, which it was known to miss ({figure:.2e})"
            return "; ".join(filter(None, (note, missed))), True, ""
        if good_but_out and e.rms <= _KNOWN_SLACK * figure:
            return note, True, f"known shortfall of the CUDA backend: out {figure:.2e} measured"
        return note, True, ""

    def expect(self, case: str, holds: bool, note: str) -> None:
        """A property that either holds or not."""
        self.rows.append(Row(self.input, case, bool(holds), note=note))

    def within(self, case: str, figure: float, bound: float, note: str, shortfall: str) -> None:
        """A property by its figure; `shortfall` names it in KNOWN_SHORTFALLS."""
        known = KNOWN_SHORTFALLS.get((self.input, shortfall))
        missed = ""
        if known is not None and self.device != "cpu" and bound < figure <= _KNOWN_SLACK * known:
            missed = f"known shortfall of the CUDA backend: {known:.1e} measured"
        self.rows.append(Row(self.input, case, figure <= bound, note=note, known=missed))

    def same(self, case: str, a: Array | None, b: Array | None, note: str) -> None:
        """Two results that must agree bit for bit."""
        self.expect(case, a is not None and b is not None and same_bits(a, b), note)


def _states(problem: Problem, got: Result) -> Array:
    """The final state of each sequence, out of the pool if there is one."""
    assert got.final is not None
    if problem.final_state_indices is None:
        return got.final
    return np.stack([got.final[max(int(slot), 0)] for slot in problem.final_state_indices])
