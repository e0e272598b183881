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
from flash_kda.inputs.problem import Problem
from flash_kda.metrics import errors_by_head
from flash_kda.reference import recurrent_kda

Bounds = tuple[float, float]  # relative RMS of out and of the state
Oracle = tuple[Array, Array]

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
    ) -> Oracle:
        """Compares a call with the oracle for each sequence and head; returns the oracle's."""
        self.say(case)
        wanted = list(range(problem.value_heads)) if heads is None else list(heads)
        got = self.run(problem) if result is None else result
        o, final = oracle(problem, wanted) if expected is None else expected
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
        most = _WORST_UNITS if bounds[0] <= STRESS[0] else math.inf
        for e, state in zip(outs, states, strict=True):
            good = e.rms <= bounds[0] and e.units <= most
            good = good and (state is None or state <= bounds[1])
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
                )
            )
        end = problem.v.shape[1] if cu is None else int(cu[-1])
        if end < problem.v.shape[1]:
            self.expect(
                case, is_poison(got.out[:, end:]), "rows past the last sequence are untouched"
            )
        return o, final

    def optional(self, case: str, problem: Problem, bounds: Bounds = STRESS) -> None:
        """`accuracy` of a call that a GPU need not serve: NotImplementedError is an answer."""
        try:
            result = self.run(problem)
        except NotImplementedError as error:
            if self.device == "cpu":
                raise
            self.say(case)
            self.expect(case, True, f"not served: {error}")
            return
        self.accuracy(case, problem, bounds, result=result)

    def expect(self, case: str, holds: bool, note: str) -> None:
        """A property that either holds or not."""
        self.rows.append(Row(self.input, case, bool(holds), note=note))

    def same(self, case: str, a: Array | None, b: Array | None, note: str) -> None:
        """Two results that must agree bit for bit."""
        self.expect(case, a is not None and b is not None and same_bits(a, b), note)


def _states(problem: Problem, got: Result) -> Array:
    """The final state of each sequence, out of the pool if there is one."""
    assert got.final is not None
    if problem.final_state_indices is None:
        return got.final
    return np.stack([got.final[max(int(slot), 0)] for slot in problem.final_state_indices])
