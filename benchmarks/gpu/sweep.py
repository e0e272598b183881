"""Times every choice that the plan has, over a grid of shapes, beside the one it takes by itself.

    python -m benchmarks.gpu.sweep --merge      # into benchmarks/results/<gpu>.json, about 100 s

Shapes are T tokens in N packed sequences of equal length, H heads; a call moves at most
`MOST_TOKEN_HEADS` rows, which keeps it below some 5 ms. They are taken in a shuffled order, so that
what a short budget leaves is still a sample of all.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu import environment, record, timing
from benchmarks.gpu.cases import HEAD_DIM
from benchmarks.gpu.data import LOWER_BOUND, generator, normal

TOKENS = (128, 512, 2048, 8192, 32768, 131072, 262144)
HEADS = (1, 4, 8, 16, 32, 64, 96)
SEQUENCES = (1, 4, 16, 64, 512, 4096)
LEAST_LENGTH = 16
MOST_TOKEN_HEADS = 1 << 22
MOST_STATES = 1 << 14  # N * H; beyond it the calls are without states
ROUNDS = 5
GOOD_RATIO = 1.1
_WRITE_EVERY = 20  # shapes

Call = Callable[[], Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """T tokens in N sequences of T / N, H heads."""

    tokens: int
    heads: int
    sequences: int

    @property
    def states(self) -> bool:
        """Whether states go in and out, in fp32."""
        return self.sequences * self.heads <= MOST_STATES

    def __str__(self) -> str:
        """For people."""
        return f"T {self.tokens}, H {self.heads}, N {self.sequences}"


@dataclass(frozen=True)
class Choice:
    """A plan that may run, and whether it is the one without options."""

    call: Call
    chosen: bool


def shapes() -> list[Shape]:
    """The grid, shuffled, the same each time."""
    grid = [Shape(t, h, n) for t in TOKENS for h in HEADS for n in SEQUENCES]
    kept = [
        s
        for s in grid
        if s.tokens >= LEAST_LENGTH * s.sequences and s.tokens * s.heads <= MOST_TOKEN_HEADS
    ]
    random.Random(0).shuffle(kept)
    return kept


class Calls:
    """Makes calls of any shape from arrays that are filled once."""

    def __init__(self, most: Sequence[Shape], device: str) -> None:
        """Room for the largest of the shapes."""
        rows = max(s.tokens * s.heads for s in most)
        states = max((s.sequences * s.heads for s in most if s.states), default=0)
        rng = generator("sweep", device)
        self._rows = [normal(rng, (rows, HEAD_DIM)) for _ in range(4)]
        self._out = torch.empty_like(self._rows[0])
        self._beta = normal(rng, (rows,))
        shape = (states, HEAD_DIM, HEAD_DIM)
        self._initial = normal(rng, shape, dtype=torch.float32)
        self._final = torch.empty_like(self._initial)
        self._device = device

    def choices(self, s: Shape) -> dict[str, Choice]:
        """A call for each plan that the options lead to, by what tells them apart."""
        import flash_kda

        arguments = self._arguments(s)
        found: dict[str, Choice] = {}
        default = _label(flash_kda.plan_forward(**arguments))
        for value_split in (0, 1, 2):
            for sequence_split in (True, False):
                options = {"value_split": value_split, "sequence_split": sequence_split}
                try:
                    label = _label(flash_kda.plan_forward(**arguments, **options))
                except NotImplementedError:  # not offered for this shape
                    continue
                if label in found:
                    continue

                def call(options: dict[str, Any] = options) -> None:
                    flash_kda.chunk_kda(**arguments, **options)

                found[label] = Choice(call, label == default)
        return found

    def _arguments(self, s: Shape) -> dict[str, Any]:
        shape = (1, s.tokens, s.heads)
        rows = s.tokens * s.heads
        q, k, v, g, out = (x[:rows].view(*shape, HEAD_DIM) for x in (*self._rows, self._out))
        arguments: dict[str, Any] = {
            "q": q, "k": k, "v": v, "g": g, "beta": self._beta[:rows].view(shape), "out": out,
            "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True, "lower_bound": LOWER_BOUND, "state_v_first": True,
        }  # fmt: skip
        if s.sequences > 1:
            step = s.tokens // s.sequences
            arguments["cu_seqlens"] = torch.arange(0, s.tokens + 1, step, device=self._device)
        if s.states:
            n = s.sequences * s.heads
            state = (s.sequences, s.heads, HEAD_DIM, HEAD_DIM)
            arguments["initial_state"] = self._initial[:n].view(state)
            arguments["final_state"] = self._final[:n].view(state)
            arguments["output_final_state"] = True
        return arguments


def _label(plan: Any) -> str:
    return f"value split {plan.value_split}, segments {plan.sequence_segments}, grid {plan.grid}"


def rows_of(s: Shape, choices: Mapping[str, Choice], times: Mapping[str, list[float]]) -> list[Row]:
    """A row for each choice."""
    return [
        {
            "tokens": s.tokens,
            "heads": s.heads,
            "sequences": s.sequences,
            "state": "fp32" if s.states else "none",
            "choice": label,
            "median_ms": round(statistics.median(times[label]), 5),
            "chosen": choice.chosen,
        }
        for label, choice in choices.items()
    ]


def summary(rows: Iterable[Row]) -> dict[str, Any]:
    """How far the plan's own choice is from the best one, over the shapes.

    Raises:
        ValueError: A shape has no row that is marked as chosen.
    """
    by_shape: dict[tuple[int, int, int], list[Row]] = {}
    for row in rows:
        by_shape.setdefault((row["tokens"], row["heads"], row["sequences"]), []).append(row)
    ratios = []
    for shape, of_shape in by_shape.items():
        own = [row["median_ms"] for row in of_shape if row["chosen"]]
        if not own:
            raise ValueError(f"sweep: no choice of {shape} is marked as the plan's own")
        best = min(of_shape, key=lambda row: row["median_ms"])
        ratios.append((own[0] / best["median_ms"], shape, best["choice"]))
    ratios.sort(reverse=True)
    return {
        "shapes": len(ratios),
        "worst_ratio": round(ratios[0][0], 3) if ratios else None,
        "above_1.1": sum(ratio > GOOD_RATIO for ratio, _, _ in ratios),
        "worst": [
            {"tokens": t, "heads": h, "sequences": n, "ratio": round(ratio, 3), "best": best}
            for ratio, (t, h, n), best in ratios[:10]
        ],
    }


def measure(choices: Mapping[str, Choice], device: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each round; the choices take turns. On the CPU by the clock, to try this."""
    for choice in choices.values():
        choice.call()
    method = "eager" if device == "cpu" else "graph"
    calls: dict[str, Call] = {label: choice.call for label, choice in choices.items()}
    if method == "graph":
        calls = {label: timing.captured(call) for label, call in calls.items()}
    return timing.measure(calls, method, rounds, device)


def main(arguments: Sequence[str] | None = None, grid: Sequence[Shape] | None = None) -> int:
    """Sweeps; returns the exit status: 1 if the budget was too small or a shape failed."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--budget", type=float, default=110, help="seconds (default 110)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--merge", action="store_true", help="keep what the file has of this build")
    parser.add_argument("--commit", help="for the record, where there is no git")
    parser.add_argument("--out", type=Path, help="default benchmarks/results/<gpu>.json")
    args = parser.parse_args(arguments)
    try:
        environment.check_device(args.device)
        where = environment.describe(args.device)
        stem = environment.file_stem(where["gpu"])
        path = args.out or environment.ROOT / f"benchmarks/results/{stem}.json"
        digest = environment.kernel_digest()
        results = record.new(where, environment.commit(args.commit), digest)
        if path.exists() and not args.merge:
            raise ValueError(
                f"{path} is there: --merge keeps its other rows, --out writes elsewhere"
            )
        if args.merge:
            results = record.merged(path, results)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start:7.1f} s] {text}", flush=True)

    def write() -> None:
        results["sweep"] = rows
        results["sweep_summary"] = summary(rows)
        record.write(path, results)

    wanted = shapes() if grid is None else list(grid)
    rows: list[Row] = []
    failed = 0
    say(f"{len(wanted)} shapes; arrays ...")
    with torch.no_grad():
        calls = Calls(wanted, args.device)
        for done, shape in enumerate(wanted):
            if time.monotonic() - start > args.budget:
                say(f"the budget is spent; {len(wanted) - done} of {len(wanted)} shapes are left")
                failed += 1
                break
            say(f"{done + 1} of {len(wanted)}: {shape}")
            try:
                choices = calls.choices(shape)
                rows += rows_of(shape, choices, measure(choices, args.device, args.rounds))
            except (RuntimeError, ValueError) as error:
                say(f"    FAILED: {error}")
                failed += 1
            if done % _WRITE_EVERY == _WRITE_EVERY - 1:
                write()
    write()
    found = results["sweep_summary"]
    for row in found["worst"]:
        text = f"{row['ratio']:.3f} times the best: T {row['tokens']}, H {row['heads']}, N"
        print(f"{text} {row['sequences']}; best: {row['best']}")
    print(f"worst ratio default/best {found['worst_ratio']}; {found['above_1.1']} of", end=" ")
    print(f"{found['shapes']} shapes above {GOOD_RATIO}; {path} written", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
