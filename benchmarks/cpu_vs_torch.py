"""The CPU backend against chunked PyTorch on the same call, and the backend's peak memory.

    python benchmarks/cpu_vs_torch.py --rounds 5 --json benchmarks/results/cpu.json

Both run in one process, by turns; the results are compared before anything is timed. torch runs on
one thread and on as many as flash_kda, and the better counts: its threads wait for one another
after every operation, and other work on the machine can make more of them slower than one. Memory
is measured in a process of its own, without torch. Exit status 1: a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import flash_kda

LENGTHS = [1300, 547, 2048, 963, 271, 3063]
HEADS = 96
HEAD_DIM = 128
LOWER_BOUND = -5.0
SCALE = HEAD_DIM**-0.5
LEAST_RATIO = 5.0
MOST_EXTRA_MIB = 64.0
ROOT = Path(__file__).resolve().parent.parent


def _bf16_normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """N(0, 1) in bf16, as its bits: rounded towards zero, which is as good for a benchmark."""
    values = rng.standard_normal(shape, dtype=np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def make_inputs(seed: int) -> dict[str, np.ndarray]:
    """Arrays of the mixed case: bf16 as uint16 bits, the rest fp32."""
    rng = np.random.default_rng(seed)
    tokens = sum(LENGTHS)
    state = (len(LENGTHS), HEADS, HEAD_DIM, HEAD_DIM)
    arrays = {n: _bf16_normal(rng, (1, tokens, HEADS, HEAD_DIM)) for n in ("q", "k", "v", "g")}
    arrays["beta"] = _bf16_normal(rng, (1, tokens, HEADS))
    arrays["out"] = np.zeros_like(arrays["v"])
    arrays["A_log"] = rng.uniform(0, 0.5, HEADS).astype(np.float32)
    arrays["dt_bias"] = 0.1 * rng.standard_normal((HEADS, HEAD_DIM), dtype=np.float32)
    arrays["initial_state"] = rng.standard_normal(state, dtype=np.float32)
    arrays["final_state"] = np.full(state, np.nan, np.float32)
    arrays["cu_seqlens"] = np.concatenate(([0], np.cumsum(LENGTHS))).astype(np.int64)
    return arrays


def run_flash_kda(arrays: dict[str, Any]) -> None:
    """One call on arrays of any library."""
    a = arrays
    flash_kda.fwd(
        a["q"],
        a["k"],
        a["v"],
        a["g"],
        a["beta"],
        SCALE,
        a["out"],
        a["A_log"],
        a["dt_bias"],
        LOWER_BOUND,
        initial_state=a["initial_state"],
        final_state=a["final_state"],
        cu_seqlens=a["cu_seqlens"],
    )


def _status_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure_memory() -> dict[str, float]:
    """Peak memory of one call, beside its inputs and outputs; for a process of its own."""
    import ml_dtypes

    arrays = make_inputs(0)
    for name in ("q", "k", "v", "g", "beta", "out"):
        arrays[name] = arrays[name].view(ml_dtypes.bfloat16)
    held = sum(a.nbytes for a in arrays.values()) / 2**20
    # Making the inputs may have left a higher peak behind: start it anew.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_mib("VmRSS")
    run_flash_kda(arrays)
    peak = _status_mib("VmHWM")
    return {"arrays_mib": held, "before_mib": before, "peak_mib": peak, "extra_mib": peak - before}


def _relative_rms(got: Any, want: Any) -> float:
    error = (got.double() - want.double()).square().sum()
    return float((error / want.double().square().sum()).sqrt())


def measure_times(rounds: int, threads: int) -> dict[str, Any]:
    """Seconds of each round for both, and by how much their results differ."""
    # Threads that spin while they wait would hold up those that they wait for when the machine has
    # other work; on a quiet one this costs torch a few microseconds an operation.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch
    import torch_chunked

    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    arrays = {name: torch.from_numpy(a) for name, a in make_inputs(0).items()}
    for name in ("q", "k", "v", "g", "beta", "out"):
        arrays[name] = arrays[name].view(torch.bfloat16)
    gate = torch_chunked.Gate(arrays["A_log"], arrays["dt_bias"], LOWER_BOUND)

    def run_torch(state: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            q, k, v, g, beta = (arrays[n][0] for n in ("q", "k", "v", "g", "beta"))
            return torch_chunked.chunked_kda(q, k, v, g, beta, gate, SCALE, state, LENGTHS)

    run_flash_kda(arrays)
    state = arrays["initial_state"].clone()
    out = run_torch(state)
    difference = {
        "out": _relative_rms(arrays["out"][0], out),
        "state": _relative_rms(arrays["final_state"], state),
    }
    seconds: dict[str, list[float]] = {}

    def timed(name: str, run: Callable[[], object]) -> None:
        start = time.perf_counter()
        run()
        seconds.setdefault(name, []).append(time.perf_counter() - start)

    for _ in range(rounds):
        timed("flash_kda", lambda: run_flash_kda(arrays))
        for n in sorted({1, threads}):
            torch.set_num_threads(n)
            state.copy_(arrays["initial_state"])
            timed(f"torch, threads={n}", lambda: run_torch(state))
    return {"seconds": seconds, "difference": difference, "torch_version": torch.__version__}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def measure(rounds: int, threads: int) -> dict[str, Any]:
    """The whole benchmark as one JSON-able record."""
    child = [sys.executable, __file__, "--memory-only"]
    memory = json.loads(subprocess.run(child, capture_output=True, text=True, check=True).stdout)
    times = measure_times(rounds, threads)
    best = {name: min(values) for name, values in times["seconds"].items()}
    ours = best["flash_kda"]
    rival = min(value for name, value in best.items() if name.startswith("torch"))
    flops = 6 * sum(LENGTHS) * HEADS * HEAD_DIM**2
    return {
        "case": {"lengths": LENGTHS, "heads": HEADS, "head_dim": HEAD_DIM, "dtype": "bfloat16"},
        "method": "by turns in one process; memory in a process of its own",
        "machine": {"cpu": _cpu_model(), "threads": threads, "load": os.getloadavg()[0]},
        "versions": {
            "flash_kda": flash_kda.__version__,
            "torch": times["torch_version"],
            "commit": _commit(),
        },
        "rounds": rounds,
        "seconds": times["seconds"],
        "best_seconds": best,
        "ratio": rival / ours,
        "gflops": flops * 1e-9 / ours,
        "relative_difference": times["difference"],
        "memory": memory,
    }


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--memory-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_only:
        print(json.dumps(measure_memory()))
        return 0
    record = measure(options.rounds, options.threads)
    memory = record["memory"]
    for name, seconds in record["best_seconds"].items():
        print(f"{name:18s} {seconds:.3f} s")
    print(f"ratio {record['ratio']:.2f}; {record['gflops']:.1f} GFLOP/s")
    extra, held = memory["extra_mib"], memory["arrays_mib"]
    print(f"memory {extra:.1f} MiB beyond {held:.0f} MiB of arrays")
    print(f"results differ by {record['relative_difference']}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    fast = record["ratio"] >= LEAST_RATIO
    small = memory["extra_mib"] <= MOST_EXTRA_MIB
    alike = record["relative_difference"]["out"] < 5e-3
    return 0 if fast and small and alike else 1


if __name__ == "__main__":
    sys.exit(main())
