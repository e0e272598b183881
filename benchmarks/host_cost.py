"""Host cost of one call, by part, on inputs so small that computing is next to nothing.

    python benchmarks/host_cost.py [--device cpu|cuda] [--json FILE]

CPU: each figure is the least of many rounds, each shorter than a slice of the scheduler
(interference only ever adds). "fwd" is the whole call with T = 1, H = 1, K = V = 16, all optional
arrays given; "plan" is the same without running; the difference is the core's checks and the CPU
backend's own start. "fwd_empty" has T = 0. For comparison: what twelve `__dlpack__` conversions
cost.

CUDA: a kernel that only waits keeps the queue busy, so that the host never waits for the device and
the device never for the host; then calls are timed by the host's clock. Rows {"call", "us",
"least_us"}: median and least of the rounds' means. Beside `fwd` and `chunk_kda`, and what torch
takes for one kernel: flash-linear-attention's `chunk_kda` (where fla-core is installed), which
dispatches to `fwd`, and the same with FLA_FLASH_KDA=0, when its own kernels run. Outputs of
`fwd` are taken beforehand; the others take their own.

Rows {"layout", "ms"} beside them are the device's time for one sequence of 8192 tokens, 16 heads:
dense, as column blocks of one projection, and with rows that the copy engine cannot follow, which
are copied first. L2 holds what it holds; medians.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import platform
import statistics
import time
import timeit
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import flash_kda
from flash_kda import _C

try:
    import torch
except ImportError:  # the NumPy part still runs
    torch = None  # type: ignore[assignment]


def microseconds(call: Callable[[], object], number: int = 100, rounds: int = 300) -> float:
    """Least mean time of `number` calls over `rounds` rounds."""
    call()
    return min(timeit.repeat(call, number=number, repeat=rounds)) / number * 1e6


def numpy_arrays(tokens: int) -> dict[str, Any]:
    """Arguments of fwd for T = `tokens`, N = 1, H = HV = 1, K = V = 16."""
    rng = np.random.default_rng(0)
    row = (1, tokens, 1, 16)
    bf16 = ml_dtypes.bfloat16
    return {
        "q": rng.standard_normal(row).astype(bf16),
        "k": rng.standard_normal(row).astype(bf16),
        "v": rng.standard_normal(row).astype(bf16),
        "g": rng.standard_normal(row).astype(bf16),
        "beta": rng.standard_normal(row[:3]).astype(bf16),
        "scale": 0.25,
        "out": np.zeros(row, bf16),
        "A_log": np.zeros(1, np.float32),
        "dt_bias": np.zeros((1, 16), np.float32),
        "lower_bound": -5.0,
        "initial_state": np.zeros((1, 1, 16, 16), np.float32),
        "final_state": np.zeros((1, 1, 16, 16), np.float32),
        "cu_seqlens": np.array([0, tokens], np.int64),
    }


def torch_arrays(tokens: int) -> dict[str, Any]:
    """The same as torch tensors."""

    def convert(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        if x.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(x.astype(np.float32)).to(torch.bfloat16)
        return torch.from_numpy(x.copy())

    return {name: convert(x) for name, x in numpy_arrays(tokens).items()}


def measure(make: Callable[[int], dict[str, Any]]) -> dict[str, float]:
    """All figures for one array library."""
    one, none = tuple(make(1).values()), tuple(make(0).values())
    q, k, v, g, beta, scale, out, a_log, dt_bias, bound, initial, final, offsets = one
    arrays = (q, k, v, g, beta, out, a_log, dt_bias, initial, final, None, None, offsets)
    arrays += (None,) * 4
    options = (_C.GATE_LOWER_BOUND, _C.BETA_LOGIT, True, bound, scale, 1, True, False, 0)
    chunk_options = {
        "scale": scale, "initial_state": initial, "output_final_state": True,
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True, "lower_bound": bound, "state_v_first": True,
        "cu_seqlens": offsets, "A_log": a_log, "dt_bias": dt_bias, "threads": 1,
    }  # fmt: skip
    return {
        "plan": microseconds(lambda: _C.plan(arrays, options)),
        "forward": microseconds(lambda: _C.forward(arrays, options, False)),
        "fwd": microseconds(lambda: flash_kda.fwd(*one)),
        "fwd_empty": microseconds(lambda: flash_kda.fwd(*none)),
        "chunk_kda": microseconds(lambda: flash_kda.chunk_kda(q, k, v, g, beta, **chunk_options)),
    }


# --- CUDA -----------------------------------------------------------------------------------------

CUDA_HEADS, CUDA_DIM, CUDA_LENGTHS = 16, 128, (40, 24)
CUDA_CALLS, CUDA_ROUNDS = 40, 30  # calls in a round: below the queue's length for ten kernels each


def queued_microseconds(call: Callable[[], object]) -> dict[str, float]:
    """Median and least over the rounds of the mean time of a call that is only queued.

    Raises:
        RuntimeError: The device had finished before the host: it was not kept busy.
    """
    wait = 0.02  # seconds, more than a round takes
    for attempt in range(4):
        means, late = [], 0
        for _ in range(CUDA_ROUNDS):
            torch.cuda.synchronize()
            torch.cuda._sleep(int(wait * 2e9))  # clocks
            begin = time.perf_counter()
            for _ in range(CUDA_CALLS):
                call()
            means.append((time.perf_counter() - begin) / CUDA_CALLS * 1e6)
            late += torch.cuda.current_stream().query()
        torch.cuda.synchronize()
        if late == 0:
            return {"us": statistics.median(means), "least_us": min(means)}
        wait *= 4 if attempt else 2
    raise RuntimeError("the device was idle while calls were queued")


def cuda_keywords() -> dict[str, Any]:
    """Of fla's `chunk_kda` in its layer's way: packed, N = 2, H = HV = 16, K = V = 128, bf16."""
    torch.manual_seed(0)
    tokens, heads, dim = sum(CUDA_LENGTHS), CUDA_HEADS, CUDA_DIM

    def normal(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.randn(*shape, dtype=dtype, device="cuda")

    offsets = [0, CUDA_LENGTHS[0], tokens]
    return {
        **{name: normal(1, tokens, heads, dim) for name in ("q", "k", "v", "g")},
        "beta": normal(1, tokens, heads),
        "A_log": torch.zeros(heads, device="cuda"),
        "dt_bias": normal(heads * dim, dtype=torch.float32),
        "initial_state": normal(len(CUDA_LENGTHS), heads, dim, dim, dtype=torch.float32),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "safe_gate": True,
        "lower_bound": -5.0,
        "state_v_first": True,
        "cu_seqlens": torch.tensor(offsets, device="cuda"),
    }


def cuda_calls() -> dict[str, Callable[[], object]]:
    """Our calls, by name."""
    keywords = cuda_keywords()
    q, k, v, g, beta = (keywords[name] for name in ("q", "k", "v", "g", "beta"))
    out, final = torch.empty_like(v), torch.empty_like(keywords["initial_state"])
    dt_bias = keywords["dt_bias"].view(CUDA_HEADS, CUDA_DIM)
    arguments = (
        q, k, v, g, beta, None, out, keywords["A_log"], dt_bias, -5.0, keywords["initial_state"],
        final, keywords["cu_seqlens"],
    )  # fmt: skip
    return {
        "torch: x.zero_()": torch.empty(16, device="cuda").zero_,
        "flash_kda.fwd": lambda: flash_kda.fwd(*arguments),
        "flash_kda.chunk_kda": lambda: flash_kda.chunk_kda(**keywords),
    }


def measured(name: str, call: Callable[[], object]) -> dict[str, Any]:
    """A row; printed at once."""
    call()
    row = {"call": name, **queued_microseconds(call)}
    print(f"{name:36}{row['us']:10.2f} us{row['least_us']:10.2f} us at least", flush=True)
    return row


def cuda_rows() -> list[dict[str, Any]]:
    """All rows."""
    with torch.enable_grad():
        rows = [measured("flash_kda.fwd, grad mode on", cuda_calls()["flash_kda.fwd"])]
    with torch.inference_mode():
        rows += [measured(name, call) for name, call in cuda_calls().items()]
        if importlib.util.find_spec("fla") and importlib.util.find_spec("triton"):
            from fla.ops.kda import chunk_kda

            keywords = cuda_keywords()
            for value, name in (("1", "fla -> flash_kda"), ("0", "fla, FLA_FLASH_KDA=0")):
                os.environ["FLA_FLASH_KDA"] = value
                rows.append(measured(name, lambda: chunk_kda(**keywords)))
    return rows


def stride_rows() -> list[dict[str, Any]]:
    """What layouts cost."""
    tokens, heads, dim = 8192, CUDA_HEADS, CUDA_DIM

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")

    def off_boundary(x: Any) -> Any:
        buffer = torch.empty(x.numel() + 8, dtype=x.dtype, device="cuda")
        return buffer[1 : 1 + x.numel()].view(x.shape)

    dense = [normal(1, tokens, heads, dim) for _ in range(5)]  # q, k, v, g, out
    blocks = normal(1, tokens, 4 * heads * dim).chunk(4, dim=-1)
    columns = [*(block.unflatten(-1, (heads, dim)) for block in blocks), dense[4]]
    off = [off_boundary(x).copy_(x) for x in dense]
    layouts = {
        "dense": dense,
        "column blocks": columns,
        "q off its boundary": [off[0], *dense[1:]],
        "q, k, v, g, out off theirs": off,
    }
    beta = normal(1, tokens, heads)
    final = torch.empty(1, heads, dim, dim, device="cuda")
    rows = []
    for name, (q, k, v, g, out) in layouts.items():
        times = []
        for _ in range(23):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(1_000_000)  # the host gets ahead
            begin.record()
            flash_kda.fwd(q, k, v, g, beta, None, out, None, None, -5.0, None, final)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        rows.append({"layout": name, "ms": statistics.median(times[3:])})
        print(f"{name:36}{rows[-1]['ms']:10.3f} ms", flush=True)
    return rows


def cuda_record() -> dict[str, Any]:
    """Measures and prints the rows; what --json writes."""
    if torch is None or not torch.cuda.is_available():
        raise SystemExit("host_cost: --device cuda needs torch and a GPU")
    with torch.inference_mode():
        layouts = stride_rows()
    rows = cuda_rows()
    heads, dim = CUDA_HEADS, CUDA_DIM
    return {
        "unit": "us",
        "method": f"queue kept busy; {CUDA_ROUNDS} rounds of {CUDA_CALLS} calls; packed, lengths"
        f" {list(CUDA_LENGTHS)}, H {heads}, K V {dim}, fp32 states",
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "flash_kda": flash_kda.__version__,
        "host": rows,
        "strides": layouts,
    }


def cpu_record() -> dict[str, Any]:
    """Measures and prints; what --json writes."""
    results = {"numpy": measure(numpy_arrays)}
    if torch is not None:
        with torch.no_grad():
            results["torch, no_grad"] = measure(torch_arrays)
        results["torch, grad enabled"] = measure(torch_arrays)
        tensors = [x for x in torch_arrays(1).values() if isinstance(x, torch.Tensor)]
        twelve = (tensors * 2)[:12]
        results["torch, grad enabled"]["twelve_dlpack_capsules"] = microseconds(
            lambda: [x.__dlpack__() for x in twelve]
        )
    print(f"{'us a call':24}" + "".join(f"{name:>24}" for name in results))
    for row in results["torch, grad enabled" if torch is not None else "numpy"]:
        cells = (f"{r[row]:24.2f}" if row in r else f"{'-':>24}" for r in results.values())
        print(f"{row:24}" + "".join(cells))
    return {
        "unit": "us",
        "method": "least of 300 rounds of 100 calls, T 1 H 1 K V 16",
        "python": platform.python_version(),
        "torch": None if torch is None else torch.__version__,
        "flash_kda": flash_kda.__version__,
        "results": results,
    }


def main() -> None:
    """Measures, prints, and writes JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    record = cpu_record() if options.device == "cpu" else cuda_record()
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
