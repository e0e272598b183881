"""The result file: lists of rows by kind, each row known by a few of its fields.

    {"gpu", "driver", "cuda", "torch", "commit", "kernel_digest",
     "results":  [{"case", "provider", "method", "state", "median_ms", "p20_ms", "p80_ms"}],
     "accuracy": [{"input", "provider", "out", "state"}],
     "host":     [{"call", "us"}],
     "sweep":    [{"tokens", "heads", "sequences", "state", "choice", "median_ms", "chosen"}],
     "skipped":  [{"case", "provider", "step", "reason"}]}

Written whole and then renamed, so that a run cut short leaves the file of its last step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Row = dict[str, Any]

# The fields that name a row: a new row with the same ones replaces the old.
IDENTITY = {
    "results": ("case", "provider", "method"),
    "accuracy": ("input", "provider"),
    "host": ("call",),
    "sweep": ("tokens", "heads", "sequences", "choice"),
    "skipped": ("case", "provider", "step"),
}
_SAME = ("gpu", "kernel_digest")  # figures of one file must share these


def new(where: dict[str, str], commit: str, kernel_digest: str) -> Record:
    """A record without rows; `where` as environment.describe has it."""
    return {
        **where,
        "commit": commit,
        "kernel_digest": kernel_digest,
        **{kind: [] for kind in ("results", "accuracy")},
    }


def merged(path: Path, fresh: Record, again: Sequence[str] = ()) -> Record:
    """What is in the file already, under the fresh heading; `fresh` if there is no file.

    Rows under "skipped" go where their case is run `again`.

    Raises:
        ValueError: The file is of another GPU or of other kernels.
    """
    if not path.exists():
        return fresh
    old: Record = json.loads(path.read_text())
    for field in _SAME:
        if old.get(field) != fresh[field]:
            raise ValueError(
                f"--merge: {path} has {field} {old.get(field)!r}, this run {fresh[field]!r}"
            )
    old["skipped"] = [row for row in old.get("skipped", []) if row["case"] not in {"all", *again}]
    return {**old, **{k: v for k, v in fresh.items() if not isinstance(v, list)}}


def put(record: Record, kind: str, rows: Sequence[Row]) -> None:
    """Adds the rows; those of the same identity go."""
    fields = IDENTITY[kind]

    def identity(row: Row) -> tuple[Any, ...]:
        return tuple(row.get(field) for field in fields)

    fresh = {identity(row) for row in rows}
    kept = [row for row in record.get(kind, []) if identity(row) not in fresh]
    record[kind] = [*kept, *rows]


def write(path: Path, record: Record) -> None:
    """Replaces the file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(record, indent=1) + "\n")
    draft.replace(path)
