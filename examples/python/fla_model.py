"""flash-linear-attention's KDA model, unchanged, with its prefill on this package's kernels.

    python examples/python/fla_model.py [--quick] [--layers N] [--json FILE]

Needs a Hopper GPU, torch, triton and flash-linear-attention 0.6; a progress bar where tqdm is
installed. The model has random weights in bf16 and the bounded gate. Installing flash-kda is all
that it takes to use it; FLA_FLASH_KDA=0 puts flash-linear-attention back on its Triton kernels.

First, packed and padded prompts, decoding token by token (flash-linear-attention's own recurrent
kernel) from the states that the prefill left, and a conversation of three turns with a carried
cache. Logits may differ from those of the Triton path by no more than the Triton path differs from
a run in fp32 (relative RMS). Then the speed of prefill on both paths.

Triton compiles and tunes for minutes on the first run; `--warm` does that alone. Exit status 1:
logits differ by more, or this package did not run; 2: something that is needed is missing.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import flash_kda


@dataclass
class Sizes:
    """Of the model, the prompts and the table."""

    layers: int = 4
    heads: int = 16
    head_dim: int = 128  # K = V: what the GPU kernels serve
    vocabulary: int = 4096
    prompts: tuple[int, ...] = (700, 65, 300, 129)  # over 64 tokens: below, fla takes no chunks
    decoded: int = 16
    turn: int = 200  # tokens in each of three turns
    packed: tuple[int, ...] = (3000, 1200, 2500, 500, 992)  # for the table
    rounds: int = 20
    device: str = "cuda"


WARM_PARTS = ("packed", "padded", "turns", "fp32")
PATHS = {"flash_kda": "1", "triton": "0"}  # values of FLA_FLASH_KDA, which is read at each call


class Progress:
    """A bar on a terminal if tqdm is there, else a line for each step."""

    def __init__(self, steps: int) -> None:
        """`steps`: in all."""
        self._done, self._steps, self._bar = 0, steps, None
        self._begin = time.monotonic()
        if sys.stderr.isatty() and importlib.util.find_spec("tqdm"):
            from tqdm import tqdm

            self._bar = tqdm(total=steps, unit="step", dynamic_ncols=True)

    def step(self, what: str) -> None:
        """Says what comes next."""
        self._done += 1
        if self._bar is None:
            seconds = time.monotonic() - self._begin
            print(f"[{self._done}/{self._steps}, {seconds:.0f} s] {what}", flush=True)
        else:
            self._bar.set_description(what)
            self._bar.update()

    def close(self) -> None:
        """Ends the bar's line."""
        if self._bar is not None:
            self._bar.close()


# --- the model on both paths ----------------------------------------------------------------------


def build(sizes: Sizes) -> tuple[Any, Any]:
    """The model in bf16, and the same weights in fp32 token by token, the reference."""
    from fla.models.kda import KDAConfig, KDAForCausalLM

    torch.manual_seed(0)
    width = sizes.heads * sizes.head_dim
    config = KDAConfig(
        hidden_size=width,
        num_heads=sizes.heads,
        head_dim=sizes.head_dim,
        num_hidden_layers=sizes.layers,
        vocab_size=sizes.vocabulary,
        hidden_ratio=2,
        safe_gate=True,
        lower_bound=-5.0,
    )
    model = KDAForCausalLM(config).to(sizes.device, torch.bfloat16).eval()
    exact = copy.deepcopy(model).float()
    for layer in exact.model.layers:
        layer.attn.mode = "fused_recurrent"
    return model, exact


class Calls:
    """Counts the calls that reach this package."""

    def __init__(self) -> None:
        """Wraps `flash_kda.fwd`, which flash-linear-attention looks up at each call."""
        self.count = 0
        run = flash_kda.fwd

        def fwd(*args: Any, **kwargs: Any) -> None:
            self.count += 1
            run(*args, **kwargs)

        flash_kda.fwd = fwd


@contextmanager
def on(path: str) -> Iterator[None]:
    """flash-linear-attention takes this path inside."""
    before = os.environ.get("FLA_FLASH_KDA")
    os.environ["FLA_FLASH_KDA"] = PATHS[path]
    try:
        yield
    finally:
        if before is None:
            del os.environ["FLA_FLASH_KDA"]
        else:
            os.environ["FLA_FLASH_KDA"] = before


def decode(model: Any, cache: Any, tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Logits [N, steps, vocabulary] of tokens [N, steps] fed one by one; advances the cache."""
    logits = []
    for t in range(tokens.shape[1]):
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        result = model(
            tokens[:, t : t + 1], past_key_values=cache, use_cache=True, attention_mask=mask
        )
        cache = result.past_key_values
        logits.append(result.logits)
    return torch.cat(logits, dim=1)


@dataclass
class Prompts:
    """Sequences of different lengths and what is decoded after each, the same for every path."""

    sequences: list[torch.Tensor]  # [tokens] each
    following: torch.Tensor  # [N, decoded]

    @staticmethod
    def of(sizes: Sizes) -> Prompts:
        """Random tokens."""
        rng = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randint(sizes.vocabulary, shape, generator=rng).to(sizes.device)

        following = draw(len(sizes.prompts), sizes.decoded)
        return Prompts([draw(n) for n in sizes.prompts], following)

    def packed(self, model: Any) -> dict[str, torch.Tensor]:
        """One row with cu_seqlens, then decoding N rows from the N states."""
        lengths = torch.tensor([0, *(len(s) for s in self.sequences)])
        first = model(
            torch.cat(self.sequences)[None],
            cu_seqlens=lengths.cumsum(0).to(self.following.device),
            use_cache=True,
        )
        return {
            "packed prefill": first.logits[0],
            "decoding after it": decode(model, first.past_key_values, self.following, None),
        }

    def padded(self, model: Any) -> dict[str, torch.Tensor]:
        """Rows filled up on the left, with an attention mask; logits of real tokens."""
        longest = max(len(s) for s in self.sequences)
        pads = [longest - len(s) for s in self.sequences]
        ids, mask = (
            torch.stack(
                [torch.nn.functional.pad(x, (n, 0)) for x, n in zip(rows, pads, strict=True)]
            )
            for rows in (self.sequences, [torch.ones_like(s) for s in self.sequences])
        )
        first = model(ids, attention_mask=mask, use_cache=True)
        return {
            "padded prefill": first.logits[mask.bool()],
            "decoding after it, padded": decode(model, first.past_key_values, self.following, mask),
        }


def conversation(sizes: Sizes) -> torch.Tensor:
    """Tokens of three turns in two conversations, [2, 3 * turn]."""
    rng = torch.Generator().manual_seed(2)
    shape = (2, 3 * sizes.turn)
    return torch.randint(sizes.vocabulary, shape, generator=rng).to(sizes.device)


def in_turns(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits with the cache carried from turn to turn."""
    cache, logits = None, []
    for turn in ids.chunk(3, dim=1):
        result = model(turn, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        logits.append(result.logits)
    return torch.cat(logits, dim=1)


def at_once(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the whole conversation as one prompt."""
    return model(ids, use_cache=True).logits


# --- the comparison -------------------------------------------------------------------------------


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative RMS; infinite if a number is missing."""
    a, b = a.double(), b.double()
    ratio = ((a - b).square().mean() / b.square().mean()).sqrt().item()
    return ratio if ratio == ratio else float("inf")


@dataclass
class Report:
    """Rows that are printed and written as JSON, and whether all is well."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    speed: list[dict[str, Any]] = field(default_factory=list)
    good: bool = True

    def compare(self, what: str, ours: Any, triton: Any, exact: Any) -> None:
        """Ours may differ from the Triton path as much as that does from fp32."""
        row = {
            "logits": what,
            "ours_triton": difference(ours, triton),
            "triton_fp32": difference(triton, exact),
            "ours_fp32": difference(ours, exact),
        }
        self.add(row, row["ours_triton"] <= row["triton_fp32"])

    def add(self, row: dict[str, Any], good: bool) -> None:
        """A row and its verdict."""
        self.rows.append(row | {"good": good})
        self.good &= good

    def print_logits(self) -> None:
        """The table of differences."""
        columns = ("ours_triton", "triton_fp32", "ours_fp32")
        heads = ("ours-Triton", "Triton-fp32", "ours-fp32")
        print(f"\n{'logits, relative RMS':32}" + "".join(f"{h:>13}" for h in heads))
        for row in self.rows:
            cells = "".join(f"{row[c]:13.2e}" if c in row else f"{'':13}" for c in columns)
            print(f"{row['logits']:32}{cells}  {'ok' if row['good'] else 'TOO FAR'}", flush=True)

    def print_speed(self) -> None:
        """The table of prefill speed."""
        print(f"\n{'prefill':24}{'path':>10}{'ms':>9}{'tokens/s':>12}{'KDA ms':>9}")
        for row in self.speed:
            print(
                f"{row['prefill']:24}{row['path']:>10}{row['ms']:9.2f}{row['tokens_s']:12,.0f}"
                f"{row['kda_ms']:9.2f}"
            )
        for ours, triton in zip(self.speed[::2], self.speed[1::2], strict=True):
            print(
                f"{ours['prefill']:24}{triton['ms'] / ours['ms']:.2f} times the speed,"
                f" KDA alone {triton['kda_ms'] / ours['kda_ms']:.2f} times",
                flush=True,
            )


def check_logits(sizes: Sizes, model: Any, exact: Any, report: Report, bar: Progress) -> None:
    """Prompts, decoding and turns on both paths and in fp32."""
    calls = Calls()
    prompts = Prompts.of(sizes)
    for kind in (prompts.packed, prompts.padded):
        results, counts = {}, {}
        for path in PATHS:
            bar.step(f"{kind.__name__} prompts, {path}")
            calls.count = 0
            with on(path):
                results[path] = kind(model)
            counts[path] = calls.count
        bar.step(f"{kind.__name__} prompts, fp32")
        reference = kind(exact)
        for name, logits in reference.items():
            report.compare(name, results["flash_kda"][name], results["triton"][name], logits)
        what = f"{kind.__name__}: our kernel ran {counts['flash_kda']} times"
        report.add({"logits": what}, counts == {"flash_kda": sizes.layers, "triton": 0})

    ids = conversation(sizes)
    whole, turns = {}, {}
    for path in PATHS:
        bar.step(f"three turns, {path}")
        with on(path):
            whole[path], turns[path] = at_once(model, ids), in_turns(model, ids)
    bar.step("three turns, fp32")
    reference = at_once(exact, ids)
    report.compare("one long prompt", whole["flash_kda"], whole["triton"], reference)
    report.compare("three turns", turns["flash_kda"], turns["triton"], reference)
    noise = difference(whole["triton"], reference)
    for path in PATHS:
        row = {"logits": f"turns - long prompt, {path}"}
        row["ours_triton" if path == "flash_kda" else "triton_fp32"] = difference(
            turns[path], whole[path]
        )
        # Where lengths differ, matrix products round elsewhere: the same allowance.
        good = path == "triton" or difference(turns[path], whole[path]) <= noise
        report.add(row, good)
    forgetful = torch.cat([at_once(model, turn) for turn in ids.chunk(3, dim=1)], dim=1)
    forgotten = difference(forgetful[:, sizes.turn :], whole["flash_kda"][:, sizes.turn :])
    row = {"logits": "without the carried cache", "ours_triton": forgotten}
    report.add(row, forgotten > 5 * noise)  # the cache matters, so its agreement means something


# --- speed ----------------------------------------------------------------------------------------


class KdaClock:
    """GPU time of the layers' `chunk_kda` in a forward pass."""

    def __init__(self) -> None:
        """Wraps the name that the layer calls."""
        import fla.layers.kda as layer

        self._pairs: list[tuple[Any, Any]] = []
        chunk_kda = layer.chunk_kda

        def timed(**kwargs: Any) -> Any:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = chunk_kda(**kwargs)
            end.record()
            self._pairs.append((begin, end))
            return result

        layer.chunk_kda = timed

    def take(self) -> float:
        """Milliseconds since it was last taken; waits for the GPU."""
        torch.cuda.synchronize()
        total = sum(begin.elapsed_time(end) for begin, end in self._pairs)
        self._pairs.clear()
        return total


def table_inputs(sizes: Sizes) -> dict[str, tuple[int, Callable[[Any], Any]]]:
    """Name -> (tokens, forward pass)."""
    rng = torch.Generator().manual_seed(3)
    total = sum(sizes.packed)
    ids = torch.randint(sizes.vocabulary, (total,), generator=rng).to(sizes.device)
    offsets = torch.tensor([0, *sizes.packed]).cumsum(0).to(sizes.device)
    options = {"use_cache": True, "logits_to_keep": 1}
    return {
        f"packed, {len(sizes.packed)} prompts": (
            total,
            lambda model: model(ids[None], cu_seqlens=offsets, **options),
        ),
        f"one prompt of {total}": (total, lambda model: model(ids[None], **options)),
        f"4 prompts of {total // 4}": (
            total // 4 * 4,
            lambda model: model(ids[: total // 4 * 4].view(4, -1), **options),
        ),
    }


def measure_speed(sizes: Sizes, model: Any, report: Report, bar: Progress, cases: int) -> None:
    """Eager forward passes; both paths by turns in every round, medians."""
    clock = KdaClock()
    for name, (tokens, run) in list(table_inputs(sizes).items())[:cases]:
        bar.step(f"speed: {name}")
        times: dict[str, list[tuple[float, float]]] = {path: [] for path in PATHS}
        for r in range(sizes.rounds + 3):
            for path in sorted(PATHS, reverse=bool(r % 2)):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                with on(path):
                    clock.take()
                    begin.record()
                    run(model)
                    end.record()
                kda = clock.take()
                if r >= 3:
                    times[path].append((begin.elapsed_time(end), kda))
        for path, pairs in times.items():
            ms, kda = (statistics.median(column) for column in zip(*pairs, strict=True))
            report.speed.append(
                {
                    "prefill": name,
                    "path": path,
                    "ms": ms,
                    "tokens_s": tokens / ms * 1e3,
                    "kda_ms": kda,
                    "rounds": len(pairs),
                }
            )


def warm(sizes: Sizes, model: Any, exact: Any, bar: Progress, part: str) -> None:
    """Compiles what Triton compiles for everything else here, or a part of it."""
    prompts, ids = Prompts.of(sizes), conversation(sizes)
    runs: tuple[Callable[[], object], ...] = (
        lambda: prompts.packed(model),
        lambda: prompts.padded(model),
        lambda: in_turns(model, ids),
        lambda: (prompts.packed(exact), at_once(exact, ids)),
    )
    for name, run in zip(WARM_PARTS, runs, strict=True):
        bar.step(f"warming: {name}")
        if part in ("all", name):
            with on("triton"):
                run()


def main() -> int:
    """Runs it all; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="2 layers, one row in the table")
    parser.add_argument("--layers", type=int, default=0, help="4 if not given")
    parser.add_argument(
        "--warm",
        nargs="?",
        const="all",
        choices=("all", *WARM_PARTS),
        help="let Triton compile and tune, no more; or a part of it, beside others",
    )
    parser.add_argument("--json", type=Path, help="write figures there")
    options = parser.parse_args()
    sizes = Sizes(layers=options.layers or (2 if options.quick else 4))
    if options.quick:
        sizes.rounds = 10
    missing = [name for name in ("triton", "fla") if not importlib.util.find_spec(name)]
    if missing or not torch.cuda.is_available():
        what = ", ".join([*missing, *(["GPU"] if not torch.cuda.is_available() else [])])
        print(f"fla_model: flash-linear-attention's layers need: {what}", file=sys.stderr)
        return 2
    return run(sizes, 1 if options.quick else 3, options.warm, options.json)


def run(sizes: Sizes, cases: int, only_warm: str | None, path: Path | None) -> int:
    """What `main` does once it knows what is asked for."""
    report = Report()
    bar = Progress(1 + len(WARM_PARTS) if only_warm else 10 + cases)
    with torch.inference_mode():
        bar.step("building the model")
        model, exact = build(sizes)
        if only_warm:
            warm(sizes, model, exact, bar, only_warm)
        else:
            check_logits(sizes, model, exact, report, bar)
            measure_speed(sizes, model, report, bar, cases)
    bar.close()
    if only_warm:
        return 0
    print(*(b for b in flash_kda.backends() if b.available), sep="\n")
    report.print_logits()
    report.print_speed()
    if path is not None:
        record = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "flash_kda": flash_kda.__version__,
            "layers": sizes.layers,
            "heads": sizes.heads,
            "logits": report.rows,
            "prefill": report.speed,
        }
        path.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
