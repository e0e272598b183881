"""What every command shares: consoles, errors for people, exit statuses, progress bars."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from flash_kda.cli import INSTALL_HINT

# Exit statuses: "it ran, and the result is not good"; "it did not run, see the message".
EXIT_BAD_RESULT = 1
EXIT_USER_ERROR = 2

_PIPE_WIDTH = 120

P = ParamSpec("P")
R = TypeVar("R")


class UserError(Exception):
    """A mistake in what the user asked for. Its text is all that the user sees."""


def stdout() -> Console:
    """The console for results."""
    piped = not sys.stdout.isatty()
    # Nobody's screen limits a pipe's width; rich would take 80.
    width = _PIPE_WIDTH if piped and "COLUMNS" not in os.environ else None
    return Console(file=sys.stdout, highlight=False, soft_wrap=piped, width=width)


def stderr() -> Console:
    """The console for progress and messages."""
    return Console(file=sys.stderr, highlight=False)


def fail(message: str) -> typer.Exit:
    """Prints a one-line error; raise what it returns."""
    text = " ".join(message.split())
    print(f"flash-kda: error: {text}", file=sys.stderr)
    return typer.Exit(EXIT_USER_ERROR)


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """Turns the errors that a user can cause into one line and exit status 2.

    Faults of ours keep their traceback. `library_errors` marks what the library refuses.
    """

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except UserError as error:
            raise fail(str(error)) from None
        except MemoryError as error:
            raise fail(f"not enough memory: {error or 'ask for fewer tokens or heads'}") from None
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise fail(f"{where}{error.strerror or error}") from None
        except KeyboardInterrupt:
            raise fail("interrupted") from None

    return wrapper


@contextlib.contextmanager
def library_errors() -> Iterator[None]:
    """Around calls into the library: what it refuses becomes a UserError, in its own words."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        raise UserError(str(error)) from error
    except RuntimeError as error:
        # What CUDA reported, out of memory for one.
        raise UserError(str(error).splitlines()[0] if str(error) else repr(error)) from error


def require(module: str, what: str) -> ModuleType:
    """Imports an optional dependency or says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != module.split(".")[0]:
            raise
        package = module.split(".")[0]
        hint = "pip install torch" if package == "torch" else INSTALL_HINT
        raise UserError(f"{what} needs {package}, which is not installed: {hint}") from None


class Stages:
    """A progress bar on the error console that shows one stage of the work at a time."""

    def __init__(self, enabled: bool) -> None:
        """Shows nothing unless `enabled` and the error output is a terminal."""
        self._shown = enabled and sys.stderr.isatty()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=stderr(),
            transient=True,
            disable=not self._shown,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Stages:
        """Starts the display."""
        if self._shown:
            self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Removes the display."""
        if self._shown:
            self._progress.stop()

    def begin(self, description: str, total: int) -> None:
        """Replaces the stage shown."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(description, total=total)

    def describe(self, description: str) -> None:
        """Renames the stage shown."""
        if self._task is not None:
            self._progress.update(self._task, description=description)

    def advance(self, steps: int = 1) -> None:
        """`steps` more of the current stage are done."""
        if self._task is not None:
            self._progress.advance(self._task, steps)

    def update(self, done: int, total: int | None = None) -> None:
        """Sets how much of the current stage is done."""
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=total)


def check_parent(path: Path | None, option: str) -> None:
    """Refuses an output path in a folder that does not exist, before the work and not after it."""
    if path is not None and not path.resolve().parent.is_dir():
        raise UserError(f"{option} {path}: the folder {path.resolve().parent} does not exist")
    if path is not None and path.is_dir():
        raise UserError(f"{option} {path}: this is a folder; a file name is expected")


def _plain(value: Any) -> Any:
    """Values that JSON has: NaN and infinities, which it lacks, become strings."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def write_json(record: dict[str, Any], path: Path | None, to_stdout: bool) -> None:
    """Writes a result as JSON to a file, to standard output, or to both."""
    text = json.dumps(_plain(record), indent=2, allow_nan=False)
    if path is not None:
        path.write_text(text + "\n", encoding="utf-8")
    if to_stdout:
        print(text)
