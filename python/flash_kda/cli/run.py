"""`flash-kda run`: one call on real sizes: time, rates, and error against the fp64 recurrence."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from flash_kda.cli import accuracy as acc
from flash_kda.cli import backend, files, plots
from flash_kda.cli.cases import CASES, Case
from flash_kda.cli.console import (
    EXIT_BAD_RESULT,
    Stages,
    UserError,
    check_parent,
    stdout,
    write_json,
)
from flash_kda.cli.problem import Options, Problem, StateDType

# Timed calls and calls before them; a GPU's clock needs some to settle.
_CALLS = {"cpu": (5, 1), "cuda": (50, 10)}


@dataclass(frozen=True)
class Outputs:
    """Where results go besides the table."""

    tensors: Path | None = None
    plot: Path | None = None
    json_file: Path | None = None
    json: bool = False
    explain: bool = False

    def check(self) -> None:
        """Refuses what could not be written, before the work."""
        check_parent(self.tensors, "--output")
        check_parent(self.json_file, "--json-file")
        if self.tensors is not None:
            files.check_tensor_path(self.tensors, "--output")
        plots.check_plot_path(self.plot)


@dataclass(frozen=True)
class Measurement:
    """How to run and what to compare."""

    device: backend.DeviceChoice
    threads: int
    repeats: int | None
    warmup: int | None
    check_heads: int
    seed: int


def find_case(name: str) -> Case:
    """A published case by name."""
    if name not in CASES:
        raise UserError(f"no case '{name}'; there are {', '.join(CASES)}")
    return CASES[name]


def parse_lengths(text: str) -> tuple[int, ...]:
    """Turns "1300,547,2x1024" into (1300, 547, 1024, 1024)."""
    lengths: list[int] = []
    for part in text.split(","):
        count, _, length = part.strip().rpartition("x")
        try:
            repeat = int(count) if count else 1
            lengths += [int(length)] * repeat
        except (ValueError, MemoryError, OverflowError):
            raise UserError(
                f"--seq-lens {text}: '{part}' is neither a length nor COUNTxLENGTH"
            ) from None
        if repeat < 1 or lengths[-1] < 0:
            raise UserError(f"--seq-lens {text}: '{part}' is negative or empty")
    return tuple(lengths)


def load_problem(path: Path, options: Options, state_dtype: StateDType) -> Problem:
    """A user's own tensors."""
    arrays = files.load_tensors(path)
    return Problem(path.name, arrays, options, state_dtype, {"input": str(path)})


def run(
    make_problem: Callable[[Stages], Problem],
    how: Measurement,
    outputs: Outputs,
) -> int:
    """Makes or loads the problem, runs it, measures, reports; returns the exit status."""
    outputs.check()
    if outputs.plot is not None and how.check_heads == 0:
        raise UserError("--plot: draws the checked heads; give --check-heads at least 1")
    device = backend.pick_device(how.device)
    with Stages(enabled=not outputs.json) as stages:
        problem = make_problem(stages)
        runner = backend.Runner(problem, device, how.threads)
        plan = runner.explain()
        repeats, warmup = _CALLS[device]
        seconds = runner.time(
            repeats if how.repeats is None else how.repeats,
            warmup if how.warmup is None else how.warmup,
            stages,
        )
        heads = acc.pick_heads(problem, how.check_heads, how.seed)
        measured = acc.Accuracy([], [], [])
        if heads:
            with_curves = outputs.plot is not None
            measured = acc.measure(
                runner, heads, stages, with_curves=with_curves, threads=how.threads
            )
    record = _record(problem, device, how, plan, seconds, measured)
    if not outputs.json:
        _print(problem, record, plan if outputs.explain else None)
    if outputs.plot is not None:
        plots.plot_run(outputs.plot, problem.title, measured)
        _say(outputs, f"plot: {outputs.plot}")
    if outputs.tensors is not None:
        out, state = runner.results()
        files.save_tensors(outputs.tensors, {"o": out, "final_state": state})
        _say(outputs, f"tensors: {outputs.tensors}")
    write_json(record, outputs.json_file, outputs.json)
    # Inputs of a user's own may be of any difficulty; the bound is for ordinary ones.
    if problem.generated and heads and not record["accuracy"]["within_bound"]:
        return EXIT_BAD_RESULT
    return 0


def _say(outputs: Outputs, text: str) -> None:
    if not outputs.json:
        stdout().print(text)


def _record(
    problem: Problem,
    device: str,
    how: Measurement,
    plan: str,
    seconds: list[float],
    measured: acc.Accuracy,
) -> dict[str, Any]:
    median = statistics.median(seconds)
    rate = 1 / median if median > 0 else float("inf")
    worst_out, worst_state = measured.worst("out"), measured.worst("state")
    return {
        "title": problem.title,
        "source": problem.source,
        "options": problem.options.record(),
        "seq_lens": problem.seq_lens,
        "heads": problem.key_heads,
        "value_heads": problem.value_heads,
        "key_dim": problem.key_dim,
        "value_dim": problem.value_dim,
        "dtype": str(problem.arrays["q"].dtype),
        "state_dtype": str(problem.state_dtype.numpy),
        "device": device,
        "device_name": backend.device_name(device),
        "threads": how.threads or backend.usable_cores() if device == "cpu" else None,
        "plan": plan,
        "time": {
            "method": "wall clock" if device == "cpu" else "CUDA events",
            "seconds": seconds,
            "median_s": median,
            "tokens_per_s": problem.tokens * rate,
            "gb_per_s": problem.bytes_moved() * rate * 1e-9,
            "gflop_per_s": problem.flop() * rate * 1e-9,
            "bytes": problem.bytes_moved(),
            "flop": problem.flop(),
        },
        "accuracy": {
            "against": "fp64 recurrence on the same rounded inputs",
            "heads": measured.heads,
            "bound": acc.ORDINARY_BOUND,
            "worst_out": worst_out,
            "worst_state": worst_state,
            "worst_element_bf16_units": measured.worst("worst"),
            "within_bound": max(worst_out, worst_state) <= acc.ORDINARY_BOUND,
            "rows": [vars(row) for row in measured.rows],
        },
    }


def _lengths_in_words(lengths: list[int]) -> str:
    if len(set(lengths)) == 1 and len(lengths) > 1:
        return f"{len(lengths)} x {lengths[0]}"
    shown = ", ".join(str(n) for n in lengths[:8])
    return shown if len(lengths) <= 8 else f"{shown}, ... ({len(lengths)} sequences)"


def _print(problem: Problem, record: dict[str, Any], plan: str | None) -> None:
    console = stdout()
    table = Table(title=f"{problem.title} on {record['device_name']}", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    timing, accuracy = record["time"], record["accuracy"]
    table.add_row("sequences", _lengths_in_words(record["seq_lens"]))
    table.add_row("heads (key, value)", f"{record['heads']}, {record['value_heads']}")
    table.add_row("head size (key, value)", f"{record['key_dim']}, {record['value_dim']}")
    table.add_row("arrays, final state", f"{record['dtype']}, {record['state_dtype']}")
    repeats = len(timing["seconds"])
    table.add_row(
        f"time ({timing['method']}, median of {repeats})", f"{timing['median_s'] * 1e3:,.3f} ms"
    )
    table.add_row("tokens/s", f"{timing['tokens_per_s']:,.0f}")
    table.add_row("GB/s", f"{timing['gb_per_s']:,.2f}")
    table.add_row("GFLOP/s", f"{timing['gflop_per_s']:,.1f}")
    if accuracy["heads"]:
        heads = ", ".join(str(head) for head in accuracy["heads"])
        table.add_row("checked against fp64", f"heads {heads}")
        table.add_row("worst relative RMS error of out", f"{accuracy['worst_out']:.2e}")
        table.add_row("worst relative RMS error of states", f"{accuracy['worst_state']:.2e}")
        table.add_row(
            "worst single element", f"{accuracy['worst_element_bf16_units']:.2f} bf16 units"
        )
        verdict = "yes" if accuracy["within_bound"] else "NO"
        table.add_row(f"within {accuracy['bound']:g} (ordinary inputs)", verdict)
    console.print(table)
    console.print(
        "GB/s: each input read once, out and final states written once. "
        "GFLOP/s: 7 K V operations a token and value head.",
        style="dim",
    )
    if plan is not None:
        console.print(plan, markup=False)
