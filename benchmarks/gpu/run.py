"""Times the cases with each provider and measures accuracy; writes one JSON file.

    python -m benchmarks.gpu.run                          # the six headline cases, accuracy
    python -m benchmarks.gpu.run --cases more --no-accuracy --methods graph

Exit status 1: something did not run (what ran is in the file).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu import accuracy, cases, environment, providers, timing
from benchmarks.gpu.data import random_inputs

_WARM_CALLS = 3


@dataclass
class Run:
    """What was asked for, and what came of it."""

    chosen: list[cases.Case]
    runners: list[providers.Provider]
    methods: list[str]
    rounds: int
    device: str
    path: Path
    record: dict[str, Any]
    failures: list[str] = field(default_factory=list)

    def write(self) -> None:
        """Puts the record on disk: after each case, so that a run cut short leaves what it had."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.record, indent=1) + "\n")

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Says how long it took; a failure is kept and the run goes on."""
        start = time.perf_counter()
        try:
            yield
        except Exception as error:
            self.failures.append(f"{what}: {type(error).__name__}: {error}")
            traceback.print_exc()
        print(f"[{time.perf_counter() - start:6.1f} s] {what}", flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    listed: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument("--cases", default=["headline"], help="names, groups, all", **listed)
    parser.add_argument("--providers", default=[], help="default: all that can run", **listed)
    parser.add_argument("--methods", default=[], help="graph eager kernel (default: all)", **listed)
    parser.add_argument("--reps", type=int, default=40, help="rounds of each method (default 40)")
    parser.add_argument("--accuracy", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--accuracy-tokens", type=int, help="at most so many (to try the frame)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--commit", help="for the record, where there is no git")
    parser.add_argument("--out", type=Path, help="default benchmarks/results/<gpu>.json")
    parser.add_argument(
        "--warm-only", action="store_true", help="only compile and tune what providers compile"
    )
    args = parser.parse_args(arguments)
    if args.reps < 1:
        parser.error(f"--reps: expected at least 1, got {args.reps}")
    return args


def prepare(args: argparse.Namespace) -> Run:
    """Checks the names and fills in the environment."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device cuda: torch {torch.__version__} sees no CUDA device")
    chosen = cases.select(args.cases)
    runners, refused = providers.select(args.providers, args.device)
    for runner in runners:
        print(f"provider {runner.name} {runner.version()}")
    for name, reason in refused.items():
        print(f"provider {name} left out: {reason}")
    where = environment.describe(args.device)
    if not args.methods:
        args.methods = ["eager"] if args.device == "cpu" else list(timing.METHODS)
    default = environment.ROOT / f"benchmarks/results/{environment.file_stem(where['gpu'])}.json"
    record = {
        **where,
        "commit": environment.commit(args.commit),
        "kernel_digest": environment.kernel_digest(),
        "results": [],
        "accuracy": [],
    }
    run = Run(chosen, runners, args.methods, args.reps, args.device, args.out or default, record)
    run.failures += [f"provider {n}: {r}" for n, r in refused.items() if n in args.providers]
    return run


def warm(run: Run) -> None:
    """Calls every provider once for each head count and kind of batch: compiles, tunes."""
    seen: set[tuple[int, bool]] = set()
    for case in run.chosen:
        key = (case.heads, case.packed)
        if key in seen:
            continue
        seen.add(key)
        inputs = random_inputs(case, run.device)
        for runner in run.runners:
            with run.step(f"{runner.name}, first calls, {case.name}"):
                runner.prepare(inputs)()
                _synchronize(run.device)


def measure_case(run: Run, case: cases.Case) -> None:
    """All methods for one case; providers take turns within each method."""
    inputs = random_inputs(case, run.device)
    calls: dict[str, Callable[[], object]] = {}
    for runner in run.runners:
        with run.step(f"{case.name}: {runner.name}, first calls"):
            call = runner.prepare(inputs)
            for _ in range(_WARM_CALLS):
                call()
            _synchronize(run.device)
            calls[runner.name] = call
    for method in run.methods:
        with run.step(f"{case.name}: {method}"):
            times = timing.measure(calls, method, run.rounds, run.device)
            for name, of_name in times.items():
                q = timing.quantiles(of_name)
                run.record["results"].append(
                    {
                        "case": case.name,
                        "provider": name,
                        "method": method,
                        "state": "fp32",
                        "median_ms": round(q.median, 5),
                        "p20_ms": round(q.p20, 5),
                        "p80_ms": round(q.p80, 5),
                    }
                )
    run.write()


def table(record: dict[str, Any]) -> str:
    """The figures for people: a line for each case and method, then the accuracy."""
    names = list(dict.fromkeys(r["provider"] for r in record["results"]))
    found = {(r["case"], r["method"], r["provider"]): r["median_ms"] for r in record["results"]}
    keys = dict.fromkeys((r["case"], r["method"]) for r in record["results"])
    lines = [f"{'case':<24}{'method':<8}" + "".join(f"{n + ' ms':>16}" for n in names)]
    for case, method in keys:
        times = [found.get((case, method, name)) for name in names]
        line = f"{case:<24}{method:<8}"
        line += "".join(f"{'-' if t is None else format(t, '.4f'):>16}" for t in times)
        if times[0] is not None and method != "eager":
            line += f"{cases.CASES[case].least_bytes / times[0] * 1e-9:8.2f} TB/s"
        lines.append(line)
    if record["accuracy"]:
        lines += ["", f"{'input':<24}{'provider':<16}{'out':>10}{'state':>10}"]
    for row in record["accuracy"]:
        figures = f"{row['out']:>10.2e}{row['state']:>10.2e}"
        lines.append(f"{row['input']:<24}{row['provider']:<16}{figures}")
    return "\n".join(lines)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(arguments: list[str] | None = None) -> int:
    """Runs; returns the exit status."""
    start = time.perf_counter()
    args = parse(arguments)
    try:
        run = prepare(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with torch.no_grad():
        if args.warm_only:
            warm(run)
        else:
            for case in run.chosen:
                with run.step(case.name):
                    measure_case(run, case)
            if args.accuracy:
                with run.step("accuracy"):
                    heads = min(case.heads for case in run.chosen)
                    run.record["accuracy"] = accuracy.rows(
                        run.runners, heads, run.device, args.accuracy_tokens
                    )
                run.write()
            print(table(run.record))
            print(f"{run.path} written")
    print(f"{time.perf_counter() - start:.0f} s in all")
    for failure in run.failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
