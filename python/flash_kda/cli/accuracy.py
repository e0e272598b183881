"""Error of a run against the fp64 recurrence on some heads, and its course along the sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flash_kda.cli.backend import Runner
from flash_kda.cli.console import Stages, UserError
from flash_kda.cli.problem import Array, Problem, sequence_bounds
from flash_kda.metrics import relative_rms, worst_bf16_units
from flash_kda.reference import recurrent_kda

# The contract's bound on the relative RMS error of ordinary bf16 inputs, for each (sequence, head).
ORDINARY_BOUND = 5e-3

# Tokens in one point of the curves. States can be had at multiples of 64 tokens.
WINDOW = 64
_MAX_POINTS = 256


@dataclass(frozen=True)
class HeadError:
    """Relative RMS errors of one sequence and value head.

    `worst`: the worst element of `out`, in bf16 units of the head's largest.
    """

    sequence: int
    head: int
    out: float
    state: float
    worst: float


@dataclass(frozen=True)
class Curves:
    """Along one sequence, for each checked head: [heads, points]."""

    sequence: int
    length: int  # tokens of the sequence
    positions: Array  # tokens of the sequence before each point
    error: Array  # relative RMS error of `out` in the tokens up to there
    state_norm: Array  # Frobenius norm of the fp64 state there
    run_state_norm: (
        Array | None
    )  # the same of the backend's own checkpoints; None if it serves none


@dataclass(frozen=True)
class Accuracy:
    """What the comparison found."""

    heads: list[int]
    rows: list[HeadError]
    curves: list[Curves]

    def worst(self, what: str) -> float:
        """The largest "out", "state" or "worst" of all rows; NaN counts as largest."""
        values = np.array([getattr(row, what) for row in self.rows], dtype=np.float64)
        return float(values.max()) if values.size else 0.0


def pick_heads(problem: Problem, count: int, seed: int) -> list[int]:
    """`count` value heads: the first, the last, and others by chance."""
    total = problem.value_heads
    count = min(count, total)
    if count <= 2:
        return [0, total - 1][:count]
    rng = np.random.default_rng(seed)
    middle = rng.choice(np.arange(1, total - 1), size=count - 2, replace=False)
    return sorted({0, total - 1, *(int(head) for head in middle)})


def _checkpoints(problem: Problem) -> list[tuple[int, int]]:
    """(sequence, position) of the points of the curves, at most about `_MAX_POINTS` in all."""
    lengths = problem.seq_lens
    points = sum(length // WINDOW for length in lengths)
    stride = WINDOW * max(1, -(-points // _MAX_POINTS))
    return [(n, p) for n, length in enumerate(lengths) for p in range(stride, length + 1, stride)]


def _reference(
    problem: Problem, heads: list[int], marks: list[tuple[int, int]], stages: Stages
) -> tuple[Array, ...]:
    stages.begin("fp64 recurrence", 1)
    arrays = dict(problem.arrays)
    options = problem.options
    try:
        return recurrent_kda(
            **arrays,
            scale=options.scale,
            gate=options.gate.value,
            lower_bound=options.lower_bound,
            beta_kind=options.beta.value,
            l2norm=options.l2norm,
            heads=heads,
            checkpoints=marks,
            dtype=np.float64,
            progress=stages.update,
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"fp64 recurrence: {error}") from error


def _run_state_norms(
    problem: Problem, heads: list[int], marks: list[tuple[int, int]], device: str, threads: int
) -> Array | None:
    """Norms [marks, heads] of the backend's own checkpoints, from a call on these heads alone."""
    small = problem.select_heads(heads)
    shape = (len(marks), len(heads), problem.value_dim, problem.key_dim)
    states = np.full(shape, np.nan, np.float32)
    index = {
        "checkpoint_sequences": np.array([n for n, _ in marks], np.int64),
        "checkpoint_positions": np.array([p for _, p in marks], np.int64),
        "checkpoint_slots": np.arange(len(marks), dtype=np.int64),
    }
    try:
        states = Runner(small, device, threads).checkpoints(states, index)
    except UserError as error:
        # The plot does without them where the backend serves no checkpoints.
        if isinstance(error.__cause__, NotImplementedError):
            return None
        raise
    norms: Array = np.sqrt(np.sum(states.astype(np.float64) ** 2, axis=(2, 3)))
    return norms


def _curves(
    problem: Problem,
    out: Array,  # [B, T, heads, V]
    reference: tuple[Array, ...],
    marks: list[tuple[int, int]],
    run_norms: Array | None,
) -> list[Curves]:
    ref_out, _, ref_states = reference
    ref_norms = np.sqrt(np.sum(ref_states**2, axis=(2, 3)))
    curves = []
    for n, (row, start, stop) in enumerate(sequence_bounds(problem)):
        of_n = [m for m, (sequence, _) in enumerate(marks) if sequence == n]
        if not of_n:
            continue
        positions = np.array([marks[m][1] for m in of_n])
        errors = []
        for begin, end in zip([0, *positions[:-1]], positions, strict=True):
            rows = slice(start + begin, start + end)
            want = ref_out[row, rows]
            got = out[row, rows].astype(np.float64)
            norm = np.sqrt(np.sum(want**2, axis=(0, 2)))
            wrong = np.sqrt(np.sum((got - want) ** 2, axis=(0, 2)))
            errors.append(np.divide(wrong, norm, out=np.zeros_like(wrong), where=norm > 0))
        curves.append(
            Curves(
                n,
                stop - start,
                positions,
                np.array(errors).T,
                ref_norms[of_n].T,
                None if run_norms is None else run_norms[of_n].T,
            )
        )
    return curves


def measure(
    runner: Runner,
    heads: list[int],
    stages: Stages,
    *,
    with_curves: bool,
    threads: int = 0,
) -> Accuracy:
    """Compares the results that `runner` holds with the fp64 recurrence on `heads`."""
    problem = runner.problem
    full_out, full_state = runner.results()
    out, state = full_out[:, :, heads], full_state[:, heads]
    marks = _checkpoints(problem) if with_curves else []
    reference = _reference(problem, heads, marks, stages)
    ref_out, ref_state = reference[0], reference[1]
    rows = []
    for n, (row, begin, end) in enumerate(sequence_bounds(problem)):
        for i, head in enumerate(heads):
            rows.append(
                HeadError(
                    n,
                    head,
                    _rms(out[row, begin:end, i], ref_out[row, begin:end, i]),
                    _rms(state[n, i], ref_state[n, i]),
                    _worst(out[row, begin:end, i], ref_out[row, begin:end, i]),
                )
            )
    curves: list[Curves] = []
    if with_curves and marks:
        norms = _run_state_norms(problem, heads, marks, runner.device, threads)
        curves = _curves(problem, out, reference, marks, norms)
    return Accuracy(heads, rows, curves)


def _rms(got: Any, want: Any) -> float:
    return float(relative_rms(got, want)) if want.size else 0.0


def _worst(got: Any, want: Any) -> float:
    return float(worst_bf16_units(got, want)) if want.size else 0.0
