"""Runs tasks one after the other and tells the watching process (run.py) about each step.

Reads a list of tasks and its options as JSON from the standard input, writes events as lines of
JSON to the file descriptor given. A task names what it must leave out: a step that took the
device or this process down is not repeated.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from benchmarks.gpu import accuracy, cases, fla_tuning, host, oracle, providers, timing
from benchmarks.gpu.data import Inputs, random_inputs
from benchmarks.gpu.steps import Steps
from benchmarks.gpu.watch import OWN

_WARM_CALLS = 3
_DEVICE_LOST = 70  # exit status

Call = Callable[[], Any]


@dataclass(frozen=True)
class Options:
    """What holds for every task."""

    device: str
    rounds: int
    methods: list[str]
    providers: list[str]
    step_limit: float  # seconds
    peer_limit: float  # seconds, for another provider's first call
    heads: int  # of the accuracy inputs and of the calls for host time
    accuracy_tokens: int | None = None
    plugins: list[str] = field(default_factory=list)


class Worker:
    """Holds the providers that could be imported."""

    def __init__(self, options: Options, steps: Steps) -> None:
        """Imports nothing yet."""
        self.options, self.steps = options, steps
        self.runners: list[providers.Provider] = []

    def start(self) -> None:
        """Imports the providers."""
        o = self.options
        for module in o.plugins:
            importlib.import_module(module)
        chosen = providers.select(o.providers, o.device)[0] if o.providers else []
        for runner in chosen:
            with self.steps.step("all", "import", o.peer_limit, runner.name):
                self.steps.note(f"{runner.name} {runner.version()}")
                self.runners.append(runner)
        if o.device == "cuda" and any(r.name == providers.FlaTriton.name for r in self.runners):
            fla_tuning.quicken(self.steps.note)

    def run(self, task: dict[str, Any]) -> None:
        """One task, {"kind", "name", "without": [providers and methods]}."""
        run = {"case": self._case, "accuracy": self._accuracy, "host": self._host}[task["kind"]]
        run(task["name"], task["without"])

    def _first_call(self, case: str, runner: providers.Provider, inputs: Inputs) -> Call | None:
        """The call, having run some times; None if that failed."""
        o = self.options
        limit = o.step_limit if runner.name == OWN else o.peer_limit
        call = None
        with self.steps.step(case, "first call", limit, runner.name):
            prepared = runner.prepare(inputs)
            for _ in range(_WARM_CALLS):
                prepared()
            self.synchronize()
            call = prepared
        if runner.name == providers.FlaTriton.name and o.device == "cuda":
            self.steps.send("tuned", kernels=fla_tuning.chosen())
        return call

    def _case(self, name: str, without: list[str]) -> None:
        o, steps, case = self.options, self.steps, cases.CASES[name]
        inputs = None
        with steps.step(name, "inputs", o.step_limit):
            inputs = random_inputs(case, o.device)
            self.synchronize()
        if inputs is None:
            return
        runners = [runner for runner in self.runners if runner.name not in without]
        first = {runner.name: self._first_call(name, runner, inputs) for runner in runners}
        calls = {provider: call for provider, call in first.items() if call is not None}
        states = {runner.name: runner.states(case.states) for runner in runners}
        for method in (m for m in o.methods if m not in without):
            ready = self._captured(name, calls) if method == "graph" else calls
            rows = self._timed(name, method, ready)
            if not rows and OWN in ready and len(ready) > 1:  # a peer must not cost our figures
                rows = self._timed(name, method, {OWN: ready[OWN]})
            for row in rows:
                row["state"] = states[row["provider"]]
            steps.rows("results", rows)

    def _timed(self, case: str, method: str, ready: dict[str, Call]) -> list[dict[str, Any]]:
        """A row for each call; none if that failed."""
        rows: list[dict[str, Any]] = []
        if not ready:
            return rows
        with self.steps.step(case, method, self.options.step_limit):
            times = timing.measure(ready, method, self.options.rounds, self.options.device)
            rows += [self._row(case, provider, method, times[provider]) for provider in times]
        return rows

    def _captured(self, case: str, calls: dict[str, Call]) -> dict[str, Call]:
        ready = {}
        for provider, call in calls.items():
            with self.steps.step(case, "capture", self.options.step_limit, provider):
                ready[provider] = timing.captured(call)
        return ready

    @staticmethod
    def _row(case: str, provider: str, method: str, times: list[float]) -> dict[str, Any]:
        q = timing.quantiles(times)
        return {
            "case": case,
            "provider": provider,
            "method": method,
            "state": "",
            "median_ms": round(q.median, 5),
            "p20_ms": round(q.p20, 5),
            "p80_ms": round(q.p80, 5),
        }

    def _accuracy(self, name: str, without: list[str]) -> None:
        o, steps = self.options, self.steps
        make, tokens = accuracy.INPUTS[name]
        label = f"accuracy {name}"
        expected = None
        with steps.step(label, "recurrence in fp64", o.step_limit):
            inputs = make(o.heads, min(tokens, o.accuracy_tokens or tokens), o.device)
            expected = oracle.recurrence(inputs)
            self.synchronize()
        if expected is None:
            return
        for runner in self.runners:
            if runner.name in without:
                continue
            call = self._first_call(label, runner, inputs)
            if call is None:
                continue
            with steps.step(label, "comparison", o.step_limit, runner.name):
                steps.rows("accuracy", [accuracy.row(name, runner.name, call(), expected)])

    def _host(self, name: str, without: list[str]) -> None:
        o, steps = self.options, self.steps
        names = [runner.name for runner in self.runners]
        makers = {OWN: host.own_calls, providers.FlaTriton.name: host.fla_calls}
        for provider, make in makers.items():
            if provider not in names or provider in without:
                continue
            limit = o.step_limit if provider == OWN else o.peer_limit
            with steps.step(name, "calls", limit, provider), torch.inference_mode():
                for call_name, (call, count) in make(o.heads, o.device).items():
                    steps.rows("host", [host.row(call_name, call, count)])

    def synchronize(self) -> None:
        """Waits for the device; raises what a kernel did."""
        if self.options.device == "cuda":
            torch.cuda.synchronize()


def _end_with_parent() -> None:
    """Should the watching process be killed, a call that hangs here must not hold the device."""
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)


def main(arguments: list[str]) -> int:
    """FD: the descriptor for events."""
    _end_with_parent()
    events = os.fdopen(int(arguments[0]), "w", buffering=1)
    job = json.load(sys.stdin)
    options = Options(**job["options"])

    def send(event: dict[str, Any]) -> None:
        events.write(json.dumps(event) + "\n")

    def still_works() -> None:
        if options.device == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                # No further call of this process can succeed; another process can go on.
                events.flush()
                os._exit(_DEVICE_LOST)

    worker = Worker(options, Steps(send, still_works))
    with torch.no_grad():
        worker.start()
        for task in job["tasks"]:
            worker.run(task)
            if options.device == "cuda":
                torch.cuda.empty_cache()
            worker.steps.send("done", task=task)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
