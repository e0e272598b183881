"""What a worker tells the process that watches it: steps with limits, rows, notes."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Event = dict[str, Any]


class Steps:
    """Sends events about the steps of the tasks."""

    def __init__(self, send: Callable[[Event], None], still_works: Callable[[], None]) -> None:
        """`still_works` raises if the device can run nothing more (after a fault of a kernel)."""
        self._send, self._still_works = send, still_works

    @contextmanager
    def step(
        self, case: str, step: str, limit: float, provider: str | None = None
    ) -> Iterator[None]:
        """Begin and end of something that takes at most `limit` seconds.

        What it raises becomes a row in "skipped"; the body's results are then absent.
        """
        name = {"case": case, "provider": provider, "step": step}
        self._send({"event": "begin", **name, "limit": limit})
        start, reason = time.perf_counter(), ""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            reason = f"{type(error).__name__}: {error}"[:300]
            self._send({"event": "skip", **name, "reason": reason})
            self._still_works()
        self._send({"event": "end", "seconds": time.perf_counter() - start, "failed": bool(reason)})

    def rows(self, kind: str, rows: Sequence[dict[str, Any]]) -> None:
        """Rows for the result file."""
        self._send({"event": "rows", "kind": kind, "rows": list(rows)})

    def note(self, text: str) -> None:
        """A line for people."""
        self._send({"event": "note", "text": text})

    def send(self, event: str, **fields: Any) -> None:
        """Any other event."""
        self._send({"event": event, **fields})
