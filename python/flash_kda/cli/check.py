"""`flash-kda check`: the accuracy of the installed build on the named inputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from flash_kda import inputs
from flash_kda.cli import backend
from flash_kda.cli.console import (
    EXIT_BAD_RESULT,
    Stages,
    UserError,
    check_parent,
    stdout,
    write_json,
)


@dataclass(frozen=True)
class Settings:
    """What `check` was asked for; no names means all."""

    names: tuple[str, ...]
    quick: bool
    device: backend.DeviceChoice
    verbose: bool
    json_file: Path | None
    json: bool


def listing() -> Table:
    """Every input with what it is."""
    table = Table()
    table.add_column("input")
    table.add_column("what it is", overflow="fold")
    for name in inputs.NAMES:
        table.add_row(name, inputs.describe(name))
    return table


def _names(asked: tuple[str, ...]) -> tuple[str, ...]:
    known = {name.lower(): name for name in inputs.NAMES}
    for name in asked:
        if name.lower() not in known:
            raise UserError(f"no input '{name}'; there are {', '.join(inputs.NAMES)}")
    return tuple(known[name.lower()] for name in asked) or inputs.NAMES


def _teller(stages: Stages, name: str) -> Callable[[str], None]:
    return lambda case: stages.describe(f"{name}: {case}")


def check(settings: Settings) -> int:
    """Runs the inputs, prints a line each; returns the exit status.

    Known shortfalls of a backend are shown and counted apart; they do not fail the check.
    """
    check_parent(settings.json_file, "--json-file")
    names = _names(settings.names)
    device = backend.pick_device(settings.device)
    rows: dict[str, list[inputs.Row]] = {}
    seconds: dict[str, float] = {}
    with Stages(enabled=not settings.json) as stages:
        stages.begin("checking", len(names))
        for name in names:
            start = time.perf_counter()
            rows[name] = inputs.check(
                name,
                device,
                quick=settings.quick,
                say=_teller(stages, name),
            )
            seconds[name] = time.perf_counter() - start
            stages.advance()
    failed = [row for name in names for row in rows[name] if row.failed]
    known = [row for name in names for row in rows[name] if row.known]
    refused = [row for name in names for row in rows[name] if not row.served and row.ok]
    comparisons = sum(len(rows[name]) for name in names)
    if not settings.json:
        console = stdout()
        console.print(_table(rows, seconds, device, settings.verbose))
        console.print(
            "Errors: relative RMS of the sequence and head nearest the bound. units: worst element "
            "in bf16 units of its head's largest. held: properties such as bitwise equality.",
            style="dim",
        )
        for row in failed:
            figures = " ".join(_verbose_line(row)[1:4]).strip()
            console.print(f"FAILED {row.input}, {_where(row)} {figures}", style="red")
        for row in known:
            figures = " ".join(_verbose_line(row)[1:4]).strip()
            console.print(
                f"known shortfall {row.input}, {_where(row)} {figures}; {row.known}", style="yellow"
            )
        for row in refused:
            console.print(f"not served {row.input}, {_where(row)}", style="dim")
        parts = [f"{len(failed)} OUTSIDE their bounds or not run"] if failed else []
        if known:
            parts.append(f"{len(known)} outside their bounds, a known shortfall of this backend")
        if refused:
            parts.append(f"{len(refused)} not served by this backend")
        if not failed:
            parts.insert(0, "all others within bounds" if parts else "all within bounds")
        verdict = ", ".join(parts)
        console.print(
            f"{len(names)} inputs, {comparisons} comparisons, "
            f"{sum(seconds.values()):.0f} s: {verdict}"
        )
    record = {
        "device": device,
        "device_name": backend.device_name(device),
        "quick": settings.quick,
        "ok": not failed,
        "known_shortfalls": len(known),
        "not_served": len(refused),
        "inputs": [
            {
                "name": name,
                "what": inputs.describe(name),
                "seconds": seconds[name],
                "ok": not any(row.failed for row in rows[name]),
                "rows": [asdict(row) for row in rows[name]],
            }
            for name in names
        ],
    }
    write_json(record, settings.json_file, settings.json)
    return EXIT_BAD_RESULT if failed else 0


def _figure(error: float | None, bound: float | None) -> str:
    return "" if error is None or bound is None else f"{error:.2e} / {bound:g}"


def _line(rows: list[inputs.Row]) -> tuple[str, ...]:
    """The largest figures of one input, by their bounds, and how many properties held."""
    yes_no = [row for row in rows if row.out_error is None and row.served]
    held = f"{sum(row.ok for row in yes_no)} of {len(yes_no)}" if yes_no else ""
    units = [row.worst_units for row in rows if row.worst_units is not None]
    return (
        _largest([(row.out_error, row.out_bound) for row in rows]),
        _largest([(row.state_error, row.state_bound) for row in rows]),
        f"{max(units):.2f}" if units else "",
        held,
        _verdict(rows),
    )


def _verdict(rows: list[inputs.Row]) -> str:
    if any(row.failed for row in rows):
        return "FAILED"
    if any(row.known for row in rows):
        return "known shortfall"
    return "ok" if any(row.served for row in rows) else "not served"


def _largest(figures: list[tuple[float | None, float | None]]) -> str:
    """The figure that comes nearest its bound, with it."""
    given = [(error, bound) for error, bound in figures if error is not None and bound]
    return _figure(*max(given, key=lambda pair: pair[0] / pair[1])) if given else ""


def _table(
    rows: dict[str, list[inputs.Row]], seconds: dict[str, float], device: str, verbose: bool
) -> Table:
    table = Table(title=f"accuracy on {backend.device_name(device)}", box=box.SIMPLE)
    table.add_column("input", no_wrap=True)
    for column in ("out error / bound", "state / bound", "units", "held"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("s", justify="right", no_wrap=True)
    if verbose:
        table.add_column("case", overflow="fold")
    for name, of_input in rows.items():
        style = "bold red" if any(row.failed for row in of_input) else None
        table.add_row(name, *_line(of_input), f"{seconds[name]:.1f}", style=style)
        if verbose:
            for row in inputs.summarize(of_input):
                table.add_row(*_verbose_line(row), style="red" if row.failed else "dim")
    return table


def _where(row: inputs.Row) -> str:
    place = "" if row.sequence is None else f", sequence {row.sequence} head {row.head}"
    return f"{row.case}{place}{': ' if row.note else ''}{row.note}"


def _verbose_line(row: inputs.Row) -> tuple[str, ...]:
    return (
        "",
        _figure(row.out_error, row.out_bound),
        _figure(row.state_error, row.state_bound),
        "" if row.worst_units is None else f"{row.worst_units:.2f}",
        "" if row.out_error is not None or not row.served else ("yes" if row.ok else "NO"),
        _verdict([row]),
        "",
        _where(row),
    )
