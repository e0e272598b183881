"""Runs the worker and watches it: a step over its limit, or a crash, costs that step alone.

The worker is a process of its own, since a call that hangs in C, or a fault of a kernel, cannot be
undone within one. It is then ended, the step noted under "skipped", and a new worker goes on with
what is left, without the provider or method that failed there.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

OWN = "flash_kda"  # the provider that this project is

Event = dict[str, Any]
Task = dict[str, Any]  # {"kind", "name", "without": [names of providers and methods]}

_START_LIMIT = 120.0  # seconds until a worker has said where it runs
_END_GRACE = 2.0  # seconds for a worker whose events have ended to end itself
_MOST_FRUITLESS = 2  # workers in a row that end before a step
_MOST_TIMEOUTS = 2  # of a provider; then the cases that are left do without it


def say(start: float, text: str) -> None:
    """A line with the seconds since `start`."""
    print(f"[{time.monotonic() - start:7.1f} s] {text}", flush=True)


def label(task: Task) -> str:
    """The name under which a task's steps go."""
    return f"accuracy {task['name']}" if task["kind"] == "accuracy" else str(task["name"])


class Process:
    """A worker: its events, and its end."""

    def __init__(
        self, command: Sequence[str], job: dict[str, Any], environment: dict[str, str]
    ) -> None:
        """Starts `command FD` with the job on its standard input."""
        read, write = os.pipe()
        self._events = read
        self._process = subprocess.Popen(
            [*command, str(write)],
            stdin=subprocess.PIPE,
            pass_fds=(write,),
            env={**os.environ, **environment},
            text=True,
            start_new_session=True,  # its children (compilers) end with it
        )
        os.close(write)
        self._rest = b""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died already: its events end, too
            self._process.stdin.write(json.dumps(job))
            self._process.stdin.close()

    def events(self, deadline: Callable[[], float]) -> Iterator[Event | None]:
        """Events as they come; None, and nothing more, once the deadline has passed."""
        while True:
            ready, _, _ = select.select(
                [self._events], [], [], max(0.0, deadline() - time.monotonic())
            )
            if not ready:
                yield None
                return
            data = os.read(self._events, 1 << 16)
            if not data:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                yield json.loads(line)

    def end(self) -> int:
        """Its exit status; kills what is left of it."""
        try:
            status = self._process.wait(timeout=_END_GRACE)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        _kill(self._process)
        os.close(self._events)
        return status


class Watch:
    """Takes workers through the tasks; `take` gets every event that carries results."""

    def __init__(
        self,
        tasks: list[Task],
        options: dict[str, Any],
        take: Callable[[Event], None],
        start: float,
        budget: float,
    ) -> None:
        """`options` are the worker's; `start` and `budget` in seconds of time.monotonic."""
        self.tasks, self.options, self._take, self._start = tasks, options, take, start
        self._end = start + budget
        self._deadline = 0.0
        self._open: Event | None = None  # the step under way
        self._noted = False  # it has a row under "skipped" already
        self._timeouts: dict[str, int] = {}
        self.skipped = 0

    def run(self, command: Sequence[str], environment: dict[str, str]) -> None:
        """Until the tasks are done or the budget is spent."""
        fruitless = 0
        while self.tasks and not self._spent():
            before = len(self.tasks), self.skipped
            say(self._start, f"worker starts; {len(self.tasks)} tasks left")
            self._open, self._noted = None, False
            self._deadline = min(time.monotonic() + _START_LIMIT, self._end)
            job = {"tasks": self.tasks, "options": self.options}
            process = Process(command, job, environment)
            late, status = False, -signal.SIGKILL
            try:
                for event in process.events(lambda: self._deadline):
                    if event is None:
                        late = True
                    else:
                        self._handle(event)
            finally:
                status = process.end()
            if late:
                self._late()
            if not late and status != 0:
                self._crashed(status)
            fruitless = fruitless + 1 if before == (len(self.tasks), self.skipped) else 0
            if fruitless == _MOST_FRUITLESS:
                self._drop_all("the worker ends before any step")
        if self.tasks:
            self._drop_all("the budget of time is spent")

    def _spent(self) -> bool:
        return time.monotonic() >= self._end

    def _handle(self, event: Event) -> None:
        kind = event["event"]
        if kind == "begin":
            self._open, self._noted = event, False
            self._deadline = min(time.monotonic() + event["limit"], self._end)
            say(self._start, f"{_words(event)} ...")
        elif kind == "end":
            verdict = "FAILED" if event["failed"] else "done"
            say(self._start, f"    {verdict} in {event['seconds']:.2f} s")
            self._open = None
            # Between steps little is done; a stuck worker is found all the same.
            self._deadline = min(time.monotonic() + self.options["step_limit"], self._end)
        elif kind == "note":
            say(self._start, f"    {event['text']}")
        elif kind == "skip":
            self._skip(event["case"], event["provider"], event["step"], event["reason"])
            self._noted = True
        elif kind == "done":
            self.tasks.pop(0)
            self._take(event)
        else:
            self._take(event)

    def _skip(self, case: str, provider: str | None, step: str, reason: str) -> None:
        self.skipped += 1
        say(self._start, f"    SKIPPED {case}, {provider or '-'}, {step}: {reason}")
        row = {"case": case, "provider": provider, "step": step, "reason": reason}
        self._take({"event": "rows", "kind": "skipped", "rows": [row]})

    def _late(self) -> None:
        if self._spent():
            return
        step = self._open or {"case": "all", "provider": None, "step": "between steps"}
        limit = step.get("limit", _START_LIMIT)
        self._skip(step["case"], step["provider"], step["step"], f"took more than {limit:.0f} s")
        provider = step["provider"]
        if provider:
            self._timeouts[provider] = self._timeouts.get(provider, 0) + 1
        self._without(step)

    def _crashed(self, status: int) -> None:
        if self._open is None:
            say(self._start, f"the worker ended with status {status} outside a step")
            return
        step = self._open
        if not self._noted:
            self._skip(step["case"], step["provider"], step["step"], f"worker's status {status}")
        self._without(step)

    def _without(self, step: Event) -> None:
        """Takes what failed out of the task under way, or out of all."""
        provider, what = step["provider"], step["provider"] or step["step"]
        if provider is None and what in self.options["methods"]:
            self._without_peers(what)
            return
        if step["case"] == "all" or self._timeouts.get(provider or "", 0) >= _MOST_TIMEOUTS:
            affected = self.tasks
            say(self._start, f"    the tasks that are left do without {what}")
        else:
            affected = self.tasks[:1]
        for task in affected:
            task["without"].append(what)
        if provider and affected is self.tasks:
            self.options["providers"] = [p for p in self.options["providers"] if p != provider]
        if provider is None:
            self.tasks.pop(0)  # its inputs, say: nothing of the task can run

    def _without_peers(self, method: str) -> None:
        """Any provider may have spoilt a method in which they take turns: ours runs alone then."""
        task = self.tasks[0]
        peers = {p for p in self.options["providers"] if p != OWN} - set(task["without"])
        task["without"] += sorted(peers) if peers else [method]

    def _drop_all(self, reason: str) -> None:
        for task in self.tasks:
            self._skip(label(task), None, "all", reason)
        self.tasks.clear()


def _words(event: Event) -> str:
    words = [event["case"], event["provider"], event["step"]]
    return ", ".join(word for word in words if word)


def run_all(
    commands: Sequence[Sequence[str]], limit: float, environment: dict[str, str]
) -> tuple[int, str]:
    """Runs the commands at once for at most `limit` seconds.

    Returns how many ended well, and the last line that one which did not has written.
    """
    deadline = time.monotonic() + limit
    good, complaint = 0, ""
    with contextlib.ExitStack() as stack:
        running = []
        for command in commands:
            output = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
            process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                start_new_session=True,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            stack.callback(_kill, process)  # also if this process is told to end meanwhile
            running.append((process, output))
        for process, output in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.1, deadline - time.monotonic()))
            if process.returncode == 0:
                good += 1
            elif not complaint:
                output.seek(0)
                last = [line for line in output.read().splitlines() if line.strip()][-1:]
                status = "over its limit" if process.returncode is None else process.returncode
                complaint = f"{status}: {''.join(last)[:300]}"
    return good, complaint


def _kill(process: subprocess.Popen[Any]) -> None:
    """The process and what it has started, which shares its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def python_module(name: str) -> list[str]:
    """The command line of a module of this project."""
    return [sys.executable, "-u", "-m", name]


def project_environment(root: Path) -> dict[str, str]:
    """So that a worker finds `benchmarks` whatever the current folder is."""
    paths = [str(root), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"PYTHONPATH": os.pathsep.join(paths)}
