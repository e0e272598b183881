"""Times the cases with each provider and measures accuracy and host time; writes one JSON file.

    python -m benchmarks.gpu.run                          # the six headline cases, accuracy, host
    python -m benchmarks.gpu.run --cases more --methods graph --no-accuracy --no-host --merge
    python -m benchmarks.gpu.run --list

The file is written after every case. A provider that takes too long or fails is left out of that
case, which the file says under "skipped". Exit status 1: something did not run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import (
    accuracy,
    cases,
    environment,
    fla_tuning,
    host,
    providers,
    record,
    timing,
    watch,
)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    listed: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument("--list", action="store_true", help="say what there is, and stop")
    parser.add_argument("--cases", default=["headline"], help="names, groups, all, none", **listed)
    parser.add_argument("--providers", default=[], help="default: all that can run", **listed)
    parser.add_argument("--methods", default=[], help="graph eager kernel (default: all)", **listed)
    parser.add_argument("--rounds", type=int, default=40, help="of each method (default 40)")
    parser.add_argument("--accuracy", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--accuracy-tokens", type=int, help="at most so many (to try the frame)")
    parser.add_argument("--host", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--merge", action="store_true", help="keep what the file has of this build")
    parser.add_argument("--budget", type=float, default=3600, help="seconds for all")
    parser.add_argument("--step-limit", type=float, default=60, help="seconds for a step")
    parser.add_argument("--peer-limit", type=float, default=120, help="... a peer's first call")
    parser.add_argument(
        "--compile-jobs", type=int, help="processes that compile fla's kernels ahead; 0: none"
    )
    parser.add_argument("--compile-limit", type=float, default=120, help="seconds for that")
    parser.add_argument(
        "--peer-configs",
        type=Path,
        help="fla's tuned choices, read and written (default: by --out)",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--commit", help="for the record, where there is no git")
    parser.add_argument("--out", type=Path, help="default benchmarks/results/<gpu>.json")
    parser.add_argument(
        "--plugin", default=[], help="modules that add to PROVIDERS or CASES", **listed
    )
    args = parser.parse_args(arguments)
    if args.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {args.rounds}")
    if args.host is None:
        args.host = args.device == "cuda"
    if args.compile_jobs is None:
        args.compile_jobs = max(1, (os.cpu_count() or 1) - 2)
    return args


class Output:
    """The result file, and fla's choices beside it."""

    def __init__(self, args: argparse.Namespace, tasks: Sequence[watch.Task]) -> None:
        """Reads what is there.

        Raises:
            ValueError: With --merge, the file on disk is of another GPU or of other kernels.
        """
        where = environment.describe(args.device)
        stem = environment.file_stem(where["gpu"])
        self.path: Path = args.out or environment.ROOT / f"benchmarks/results/{stem}.json"
        digest = environment.kernel_digest()
        self.record = record.new(where, environment.commit(args.commit), digest)
        if args.merge:
            again = [watch.label(task) for task in tasks]
            self.record = record.merged(self.path, self.record, again)
        self.configs_path: Path = args.peer_configs or self.path.with_name(
            f"{stem}_fla_configs.json"
        )
        self.configs = fla_tuning.load(self.configs_path, where["gpu"])

    def take(self, event: dict[str, Any]) -> None:
        """Keeps what a worker sent; after each task it goes to disk."""
        if event["event"] == "rows":
            record.put(self.record, event["kind"], event["rows"])
        elif event["event"] == "tuned":
            fla_tuning.merge(self.configs, event["kernels"])
        elif event["event"] == "done":
            self.write()

    def write(self) -> None:
        """Both files, each in one step."""
        record.write(self.path, self.record)
        if self.configs:
            content = {"gpu": self.record["gpu"], "kernels": self.configs}
            record.write(self.configs_path, content)


def make_tasks(args: argparse.Namespace, chosen: Sequence[cases.Case]) -> list[watch.Task]:
    """Cases first, then accuracy (the peer is tuned by then), then host time."""
    names = [("case", case.name) for case in chosen]
    if args.accuracy:
        names += [("accuracy", name) for name in accuracy.INPUTS]
    if args.host:
        names.append(("host", "host"))
    return [{"kind": kind, "name": name, "without": []} for kind, name in names]


def table(results: record.Record) -> str:
    """The figures for people: a line for each case and method, then the rest."""
    names = list(dict.fromkeys(r["provider"] for r in results["results"]))
    found = {(r["case"], r["method"], r["provider"]): r["median_ms"] for r in results["results"]}
    keys = dict.fromkeys((r["case"], r["method"]) for r in results["results"])
    lines = [f"{'case':<24}{'method':<8}" + "".join(f"{n + ' ms':>16}" for n in names)]
    for case, method in keys:
        times = {name: found.get((case, method, name)) for name in names}
        line = f"{case:<24}{method:<8}"
        line += "".join(f"{'-' if t is None else format(t, '.4f'):>16}" for t in times.values())
        own = times.get(watch.OWN)
        if own is not None and method != "eager" and case in cases.CASES:
            line += f"{cases.CASES[case].least_bytes / own * 1e-9:8.2f} TB/s"
        lines.append(line)
    if results["accuracy"]:
        lines += ["", f"{'input':<24}{'provider':<16}{'out':>10}{'state':>10}"]
    for row in results["accuracy"]:
        figures = f"{row['out']:>10.2e}{row['state']:>10.2e}"
        lines.append(f"{row['input']:<24}{row['provider']:<16}{figures}")
    for row in results.get("host", []):
        lines.append(f"host  {row['call']:<34}{row['us']:>10.1f} us")
    for row in results.get("skipped", []):
        lines.append(f"SKIPPED {row['case']}, {row['provider']}, {row['step']}: {row['reason']}")
    return "\n".join(lines)


def _listing() -> str:
    lines = []
    for group, of_group in cases.GROUPS.items():
        lines.append(f"{group}:")
        for case in of_group:
            sizes = f"{case.tokens} tokens, {len(case.lengths)} sequences, {case.heads} heads"
            lines.append(f"  {case.name:<24}{sizes}, states {case.states}")
    lines.append("providers: " + ", ".join(providers.PROVIDERS))
    lines.append("methods: " + ", ".join(timing.METHODS))
    lines.append("accuracy: " + ", ".join(accuracy.INPUTS))
    return "\n".join(lines)


def _compile_ahead(
    args: argparse.Namespace,
    chosen: list[cases.Case],
    heads: int,
    env: dict[str, str],
    start: float,
) -> None:
    jobs = args.compile_jobs
    lengths = [(tokens,) for _, tokens in accuracy.INPUTS.values()] if args.accuracy else []
    lengths += [host.LENGTHS] if args.host else []  # totals of rows of their own
    chosen = [*chosen, *(cases.Case("", of_one, heads) for of_one in lengths)]
    watch.say(start, f"{jobs} processes compile fla's kernels ...")
    commands = [fla_tuning.command(i, jobs, chosen) for i in range(jobs)]
    limit = min(args.compile_limit, args.budget / 3)
    good, complaint = watch.run_all(commands, limit, env)
    watch.say(start, f"    {good} of {jobs} done{'; ' if complaint else ''}{complaint}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs; returns the exit status."""
    start = time.monotonic()
    args = parse(arguments)
    try:
        for module in args.plugin:
            importlib.import_module(module)
        if args.list:
            print(_listing())
            return 0
        environment.check_device(args.device)
        chosen = [] if args.cases == ["none"] else cases.select(args.cases)
        runners, refused = providers.select(args.providers, args.device)
        known = timing.methods(args.device)
        for method in args.methods:
            if method not in known:
                raise ValueError(f"methods: expected some of {', '.join(known)}; got {method!r}")
        tasks = make_tasks(args, chosen)
        output = Output(args, tasks)
    except (ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, reason in refused.items():
        watch.say(start, f"provider {name} left out: {reason}")
    heads = max((case.heads for case in chosen), default=64)
    options = {
        "device": args.device,
        "rounds": args.rounds,
        "methods": args.methods or list(known),
        "providers": [runner.name for runner in runners],
        "step_limit": args.step_limit,
        "peer_limit": args.peer_limit,
        "heads": heads if args.accuracy_tokens is None else min(heads, 4),
        "accuracy_tokens": args.accuracy_tokens,
        "plugins": args.plugin,
    }
    env = watch.project_environment(environment.ROOT)
    run = watch.Watch(tasks, options, output.take, start, args.budget)
    with contextlib.ExitStack() as stack:
        if args.device == "cuda" and providers.FlaTriton.name in options["providers"]:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            env |= fla_tuning.unpack(output.configs, Path(folder))
            if args.compile_jobs:
                _compile_ahead(args, chosen, heads, env, start)
        run.run(watch.python_module("benchmarks.gpu.worker"), env)
    output.write()
    print(table(output.record))
    print(f"{output.path} written; {time.monotonic() - start:.0f} s in all", flush=True)
    return 1 if run.skipped or any(name in args.providers for name in refused) else 0


if __name__ == "__main__":
    # As an interrupt, so that the worker ends with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
