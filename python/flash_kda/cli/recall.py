"""`flash-kda recall`: the operator as a memory that reads text and is asked for each next byte."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from rich.table import Table
from rich.text import Text

from flash_kda.cli import backend, plots
from flash_kda.cli.console import (
    EXIT_BAD_RESULT,
    Stages,
    UserError,
    check_parent,
    stdout,
    write_json,
)
from flash_kda.cli.problem import Array, Options, Problem
from flash_kda.cli.text_memory import VALUE_DIM, Memory, count_predictions, decode, encode
from flash_kda.reference import recurrent_kda

# Tokens of one call at most; a longer text takes several, with the states carried.
_CALL_TOKENS = 1 << 15
# A cut here leaves every bit as it is; elsewhere a chunked backend may round otherwise.
_CUT_UNIT = 64
# Least share of equal predictions for a cut elsewhere.
_LEAST_EQUAL = 0.99
_SHOWN_CUTS = 8


@dataclass(frozen=True)
class Settings:
    """What `recall` was asked for."""

    orders: tuple[int, ...]
    memory: Memory
    device: backend.DeviceChoice
    threads: int = 0
    split: bool = True
    split_at: int | None = None
    check_heads: int = 0
    show: int = 0
    plot: Path | None = None
    json_file: Path | None = None
    json: bool = False


@dataclass
class Recall:
    """Answers for each file: [orders, bytes] booleans, True where the right byte was named."""

    names: list[str]
    orders: tuple[int, ...]
    hits: list[Array] = field(default_factory=list)
    count_hits: list[Array] = field(default_factory=list)
    common_hits: list[Array] = field(default_factory=list)  # [bytes]: the commonest byte so far

    def share(self, what: str, i: int | None = None) -> float:
        """Right answers over all files; `what`: a list of above, `i`: the order's place in it."""
        rows = [part if i is None else part[i] for part in getattr(self, what)]
        total = sum(row.size for row in rows)
        return float(sum(int(row.sum()) for row in rows)) / total if total else 0.0


@dataclass
class Reading:
    """One pass over the texts: predictions [orders, bytes] of each file, states, cost."""

    predictions: list[Array]
    digests: list[list[bytes]]  # of each file: the read-outs' bytes, call by call
    states: Array  # [N, HV, V, K]
    seconds: float = 0.0
    calls: int = 0
    out_error: float | None = None  # relative RMS error against the fp64 recurrence


def read_files(paths: Sequence[Path]) -> list[Array]:
    """The files' bytes; any bytes will do, UTF-8 or not."""
    texts = []
    for path in paths:
        if path.is_dir():
            raise UserError(f"{path}: this is a folder; files are expected")
        if not path.exists():
            raise UserError(f"{path}: no such file")
        data = path.read_bytes()
        if not data:
            raise UserError(f"{path}: the file is empty; there is nothing to recall")
        texts.append(np.frombuffer(data, np.uint8))
    return texts


def parse_orders(text: str) -> tuple[int, ...]:
    """Turns "1,2,4" into (1, 2, 4)."""
    try:
        orders = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--orders {text}: expected numbers such as 1,2,4") from None
    if any(not 1 <= order <= 64 for order in orders):
        raise UserError(f"--orders {text}: each must be from 1 to 64")
    return orders


def _rounds(lengths: Sequence[int], cuts: Sequence[int] | None) -> Iterator[list[tuple[int, int]]]:
    """Calls that read everything: for each, the span of each file, empty where a file has ended.

    With `cuts`, the first call ends there for each file.
    """
    step = max(_CUT_UNIT, _CALL_TOKENS // len(lengths) // _CUT_UNIT * _CUT_UNIT)
    done = [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        ends = [min(d + step, n) for d, n in zip(done, lengths, strict=True)]
        if cuts is not None:
            ends = [c if d < c <= e else e for d, e, c in zip(done, ends, cuts, strict=True)]
        yield list(zip(done, ends, strict=True))
        done = ends


def _problem(
    texts: list[Array], spans: list[tuple[int, int]], states: Array, how: Settings
) -> Problem:
    """The call that reads these spans of the files, each from its state."""
    bf16, options = np.dtype(ml_dtypes.bfloat16), Options()
    heads, tokens = len(how.orders), sum(b - a for a, b in spans)
    parts = [
        encode(text, a, b, how.orders, how.memory.key_dim)
        for text, (a, b) in zip(texts, spans, strict=True)
    ]
    q, k, v = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    v = np.repeat(v.astype(bf16)[:, None], heads, axis=1)
    gate = how.memory.raw_gate(options.lower_bound)
    cu = np.concatenate([[0], np.cumsum([b - a for a, b in spans])])
    arrays: dict[str, Array] = {
        "q": q.astype(bf16)[None],
        "k": k.astype(bf16)[None],
        "v": v[None],
        "g": np.full((1, tokens, heads, how.memory.key_dim), gate, bf16),
        "beta": np.full((1, tokens, heads), how.memory.beta_logit(), bf16),
        "initial_state": states,
        "cu_seqlens": cu.astype(np.int64),
    }
    return Problem("recall", arrays, options)


def read(
    texts: list[Array],
    how: Settings,
    device: str,
    stages: Stages,
    *,
    cuts: Sequence[int] | None = None,
    check_heads: int = 0,
) -> Reading:
    """Lets the memory read the texts, all in one packed batch, and collects its answers."""
    lengths = [text.size for text in texts]
    shape = (len(texts), len(how.orders), VALUE_DIM, how.memory.key_dim)
    reading = Reading(
        [np.empty((len(how.orders), n), np.int16) for n in lengths],
        [[] for _ in lengths],
        np.zeros(shape, np.float32),
    )
    heads = list(range(len(how.orders)))[-check_heads:] if check_heads else []
    ref_states = np.zeros((len(texts), len(heads), *shape[2:]))
    error = size = 0.0
    stages.begin("reading" if cuts is None else "reading again, cut in two", sum(lengths))
    for spans in _rounds(lengths, cuts):
        problem = _problem(texts, spans, reading.states, how)
        runner = backend.Runner(problem, device, how.threads)
        start = time.perf_counter()
        runner()
        out, reading.states = runner.results()
        reading.seconds += time.perf_counter() - start
        reading.calls += 1
        if heads:
            ref_out, ref_states = _reference(problem, heads, ref_states)
            error += float(np.sum((out[:, :, heads].astype(np.float64) - ref_out) ** 2))
            size += float(np.sum(ref_out**2))
        answers, row = decode(out[0]), 0
        for n, (a, b) in enumerate(spans):
            reading.predictions[n][:, a:b] = answers[row : row + b - a].T
            reading.digests[n].append(out[0, row : row + b - a].tobytes())
            row += b - a
        stages.advance(row)
    if heads:
        reading.out_error = float(np.sqrt(error / size)) if size else 0.0
    return reading


def _reference(problem: Problem, heads: list[int], states: Array) -> tuple[Array, Array]:
    full = np.zeros(problem.state_shape())
    full[:, heads] = states
    arrays: dict[str, Any] = {**problem.arrays, "initial_state": full}
    result = recurrent_kda(**arrays, heads=heads, dtype=np.float64)
    return result[0], result[1]


def _cuts(texts: list[Array], how: Settings) -> list[int]:
    """Where each file is cut for the second reading."""
    if how.split_at is not None:
        return [min(how.split_at, text.size) for text in texts]
    return [text.size // 2 // _CUT_UNIT * _CUT_UNIT for text in texts]


def _compare(one: Reading, two: Reading, cuts: list[int], texts: list[Array]) -> dict[str, Any]:
    """What the reading in two calls changed: should be nothing."""
    equal = sum(int((a == b).sum()) for a, b in zip(one.predictions, two.predictions, strict=True))
    total = sum(a.size for a in one.predictions)
    bitwise = all(b"".join(a) == b"".join(b) for a, b in zip(one.digests, two.digests, strict=True))
    states = one.states.tobytes() == two.states.tobytes()
    aligned = all(c % _CUT_UNIT == 0 or c == t.size for c, t in zip(cuts, texts, strict=True))
    need = 1.0 if aligned else _LEAST_EQUAL
    return {
        "cuts": cuts,
        "on_chunk_border": aligned,
        "predictions": total,
        "equal_predictions": equal,
        "read_outs_bitwise_equal": bitwise,
        "states_bitwise_equal": states,
        "ok": equal >= need * total,
    }


def recall(paths: Sequence[Path], how: Settings) -> int:
    """Reads, asks, compares, reports; returns the exit status."""
    check_parent(how.json_file, "--json-file")
    plots.check_plot_path(how.plot)
    device = backend.pick_device(how.device)
    texts = read_files(paths)
    result = Recall([str(path) for path in paths], how.orders)
    split: dict[str, Any] | None = None
    with Stages(enabled=not how.json) as stages:
        one = read(texts, how, device, stages, check_heads=how.check_heads)
        if how.split:
            cuts = _cuts(texts, how)
            split = _compare(one, read(texts, how, device, stages, cuts=cuts), cuts, texts)
        stages.begin("counting", len(texts) * (len(how.orders) + 1))
        for text, predictions in zip(texts, one.predictions, strict=True):
            result.hits.append(predictions == text)
            counted = []
            for order in (0, *how.orders):
                counted.append(count_predictions(text, order) == text)
                stages.advance()
            result.common_hits.append(counted[0])
            result.count_hits.append(np.array(counted[1:]))
    record = _record(result, texts, how, device, one, split)
    if not how.json:
        _print(record)
        _show(texts, result, how.show)
    if how.plot is not None:
        plots.plot_recall(how.plot, result)
        if not how.json:
            stdout().print(f"plot: {how.plot}")
    write_json(record, how.json_file, how.json)
    return 0 if split is None or split["ok"] else EXIT_BAD_RESULT


def _record(
    result: Recall,
    texts: list[Array],
    how: Settings,
    device: str,
    one: Reading,
    split: dict[str, Any] | None,
) -> dict[str, Any]:
    tokens = sum(text.size for text in texts)
    return {
        "files": [
            {
                "name": name,
                "bytes": int(text.size),
                "right": [float(row.mean()) for row in result.hits[n]],
                "right_by_counts": [float(row.mean()) for row in result.count_hits[n]],
            }
            for n, (name, text) in enumerate(zip(result.names, texts, strict=True))
        ],
        "bytes": tokens,
        "device": device,
        "device_name": backend.device_name(device),
        "memory": {
            "key_dim": how.memory.key_dim,
            "value_dim": VALUE_DIM,
            "write": how.memory.write,
            "half_life_tokens": how.memory.half_life,
            "state_bytes_per_head": 4 * how.memory.key_dim * VALUE_DIM,
        },
        "calls": one.calls,
        "seconds": one.seconds,
        "tokens_per_s": tokens / one.seconds if one.seconds > 0 else None,
        "relative_error_vs_fp64": one.out_error,
        "commonest_byte": result.share("common_hits"),
        "heads": [
            {
                "order": order,
                "right": result.share("hits", i),
                "right_by_counts": result.share("count_hits", i),
            }
            for i, order in enumerate(result.orders)
        ],
        "two_calls": split,
    }


def _print(record: dict[str, Any]) -> None:
    console = stdout()
    memory = record["memory"]
    table = Table(
        title=f"{record['bytes']:,} bytes of {len(record['files'])} file(s) on "
        f"{record['device_name']}"
    )
    for name in ("head", "context", "memory names the right byte", "counts name the right byte"):
        table.add_column(name, justify="right")
    for i, head in enumerate(record["heads"]):
        plural = "s" if head["order"] > 1 else ""
        table.add_row(
            str(i),
            f"{head['order']} byte{plural}",
            f"{head['right']:.2%}",
            f"{head['right_by_counts']:.2%}",
        )
    table.add_row("-", "none", "", f"{record['commonest_byte']:.2%}")
    console.print(table)
    console.print(
        f"Each head remembers in {memory['state_bytes_per_head'] // 1024} KiB whatever the text's "
        f"length; the counts keep every context they have seen.",
        style="dim",
    )
    rate = record["tokens_per_s"]
    calls = "call" if record["calls"] == 1 else "calls"
    speed = f", {rate:,.0f} bytes/s" if rate else ""
    console.print(f"read in {record['calls']} {calls}, {record['seconds']:.3f} s{speed}")
    if record["relative_error_vs_fp64"] is not None:
        console.print(
            f"relative RMS error of the read-outs against the fp64 recurrence: "
            f"{record['relative_error_vs_fp64']:.2e}"
        )
    split = record["two_calls"]
    if split is not None:
        shown = split["cuts"][:_SHOWN_CUTS]
        more = ", ..." if len(split["cuts"]) > len(shown) else ""
        cuts = ", ".join(str(cut) for cut in shown) + more
        bits = "yes" if split["read_outs_bitwise_equal"] else "no"
        states = "yes" if split["states_bitwise_equal"] else "no"
        console.print(
            f"read again, cut in two at byte {cuts}, the state carried: "
            f"{split['equal_predictions']:,} of {split['predictions']:,} answers equal; "
            f"read-outs bitwise equal: {bits}; states bitwise equal: {states}"
        )
        if not split["ok"]:
            console.print("the two readings differ: the carried state is wrong", style="bold red")


def _show(texts: list[Array], result: Recall, count: int) -> None:
    """The last `count` bytes of each file; those that the best head named stand out."""
    if count <= 0:
        return
    console = stdout()
    for n, text in enumerate(texts):
        shares = [result.share("hits", i) for i in range(len(result.orders))]
        best = int(np.argmax(shares))
        console.print(f"end of {result.names[n]}; green: named by head {best}", style="dim")
        line = Text()
        start = max(0, text.size - count)
        for byte, hit in zip(text[start:], result.hits[n][best, start:], strict=True):
            character = chr(byte) if 32 <= byte < 127 or byte == 10 else "."
            line.append(character, style="bold green" if hit else "")
        console.print(line)
