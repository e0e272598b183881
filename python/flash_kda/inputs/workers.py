"""The fp64 recurrence in other processes.

They are started as programs, never forked: the caller may hold a CUDA context, JAX's threads or a
progress display, and none of these survives a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

_SERVE = "from flash_kda.inputs.workers import serve; serve()"
_MOST = 8

_idle: list[_Worker] = []  # kept for the next call; each ends with its standard input


class _Worker:
    """One process that computes what it is sent, in turn."""

    def __init__(self) -> None:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        # One thread each, and no GPU: these only run NumPy.
        environment = os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        )

    def send(self, call: tuple[Callable[..., Any], tuple[Any, ...]]) -> None:
        assert self._process.stdin is not None
        pickle.dump(call, self._process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
        self._process.stdin.flush()

    def receive(self) -> tuple[Exception | None, Any]:
        """What the call raised, and what it returned."""
        assert self._process.stdout is not None
        error, result = pickle.load(self._process.stdout)
        return error, result

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def serve() -> None:
    """The other side: calls from standard input, answers to standard output, until its end."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    sys.stdout = sys.stderr  # what else is printed must not mix with the answers
    while True:
        try:
            function, arguments = pickle.load(sys.stdin.buffer)
        except (EOFError, KeyboardInterrupt):
            return
        try:
            answer: tuple[Exception | None, Any] = (None, function(*arguments))
        except Exception as error:  # told to the caller, who raises it
            answer = (error, None)
        pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def most_workers() -> int:
    """How many parts a call is best split into, the caller's own among them."""
    return min(_usable_cores(), _MOST)


def call_each(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """`function(*call)` for each call, the first one here, the others in processes of their own.

    `function` is one that a module names; arguments and results are pickled. Where no process can
    be started or one ends early, its calls are computed here.
    """
    taken: list[_Worker] = []
    try:
        for call in calls[1:]:
            worker = _idle.pop() if _idle else _Worker()
            worker.send((function, call))
            taken.append(worker)
    except OSError:  # none can be started, or one ended while it waited
        pass
    results = [function(*calls[0])]
    for worker, call in zip(taken, calls[1:], strict=False):
        results.append(_answer(worker, function, call))
    results += [function(*call) for call in calls[1 + len(taken) :]]
    return results


def _answer(worker: _Worker, function: Callable[..., Any], call: tuple[Any, ...]) -> Any:
    try:
        error, result = worker.receive()
    except (EOFError, pickle.UnpicklingError):  # it is gone
        worker.close()
        return function(*call)
    _idle.append(worker)
    if error is not None:
        raise error
    return result


@atexit.register
def _close_all() -> None:
    while _idle:
        _idle.pop().close()
