"""Inputs that break kernels of this kind, by name, and the checks that run them.

Each name stands for a kind of fault that users reported. `check` runs one on the installed package
and returns rows: for each sequence and head the relative RMS error of the output and of the state
against the fp64 recurrence, with their bounds, and yes/no properties (bitwise equality, untouched
memory). Needs ml_dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flash_kda.inputs import layouts, numerics, packing
from flash_kda.inputs.call import Forward
from flash_kda.inputs.checker import Checker, Row

__all__ = ["NAMES", "Forward", "Row", "check", "describe", "summarize"]


@dataclass(frozen=True)
class _Input:
    run: Callable[[Checker], None]
    extra: bool = False  # not every device has to serve it: NotImplementedError is an answer


_INPUTS: dict[str, _Input] = {
    "ordinary": _Input(numerics.ordinary_inputs),
    "T1": _Input(numerics.t1),
    "T3": _Input(numerics.t3),
    "T5": _Input(numerics.t5),
    "T6": _Input(numerics.t6),
    "T7": _Input(numerics.t7),
    "T9": _Input(packing.t9),
    "T10": _Input(packing.t10),
    "T12": _Input(packing.t12),
    "T13": _Input(packing.t13),
    "T14": _Input(packing.t14),
    "T16": _Input(packing.t16),
    "T18": _Input(packing.t18),
    "T19": _Input(packing.t19),
    "T20": _Input(layouts.t20),
    "T22": _Input(layouts.t22),
    "T23": _Input(layouts.t23),
    "slow-decay": _Input(numerics.slow_decay),
    "softplus": _Input(numerics.softplus_gates, extra=True),
    "strengths": _Input(numerics.strengths, extra=True),
    "pools": _Input(packing.pools, extra=True),
    "grouped": _Input(packing.grouped, extra=True),
    "many-items": _Input(layouts.many_items),
}

NAMES: tuple[str, ...] = tuple(_INPUTS)


def describe(name: str) -> str:
    """One line on what the input is."""
    return (_INPUTS[name].run.__doc__ or "").partition("\n")[0]


def check(
    name: str,
    device: str = "cpu",
    *,
    quick: bool = False,
    forward: Forward | None = None,
    say: Callable[[str], None] | None = None,
) -> list[Row]:
    """Runs one input and returns a row for each thing that was measured.

    Args:
      name: one of `NAMES`.
      device: "cpu", or "cuda" (through torch).
      quick: shorter sequences, for a check in passing.
      forward: called in place of the package; to try the checks themselves.
      say: told the name of each case as it starts, for a progress display.

    Raises:
      ValueError: no such input. An exception of the checked call becomes a row that is not ok,
        unless a GPU backend says that it does not serve an option that is not its duty: then the
        row is ok and not `served`.
    """
    if name not in _INPUTS:
        raise ValueError(f"name: expected one of {', '.join(NAMES)}, got {name!r}")
    last = ""

    def note_case(case: str) -> None:
        nonlocal last
        last = case
        if say is not None:
            say(case)

    checker = Checker(name, device, quick, forward, note_case)
    try:
        _INPUTS[name].run(checker)
    except NotImplementedError as error:
        checker.rows.append(
            Row(name, last, _INPUTS[name].extra, note=f"not served: {error}", served=False)
        )
    except Exception as error:  # every failure of the checked build belongs in the table
        checker.rows.append(Row(name, last, False, note=f"{type(error).__name__}: {error}"))
    return checker.rows


def summarize(rows: Iterable[Row]) -> list[Row]:
    """For each case the measured row nearest its bound, and one property: the first that failed."""
    cases: dict[tuple[str, str, bool], Row] = {}
    for row in rows:
        key = (row.input, row.case, row.out_error is None)
        kept = cases.get(key)
        if kept is None or (kept.ok, -kept.margin) > (row.ok, -row.margin):
            cases[key] = row
    return list(cases.values())
