"""Host cost of one call, by part, on inputs so small that computing is next to nothing.

    python benchmarks/host_cost.py [--json FILE]

Each figure is the least of many rounds, each shorter than a slice of the scheduler (interference
only ever adds). "fwd" is the whole call with T = 1, H = 1, K = V = 16, all optional arrays given;
"plan" is the same without running; the difference is the core's checks and the CPU backend's own
start. "fwd_empty" has T = 0. For comparison: what twelve `__dlpack__` conversions cost.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
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


def main() -> None:
    """Measures, prints, and writes JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()

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
    if options.json:
        record = {
            "unit": "us",
            "method": "least of 300 rounds of 100 calls, T 1 H 1 K V 16",
            "python": platform.python_version(),
            "torch": None if torch is None else torch.__version__,
            "flash_kda": flash_kda.__version__,
            "results": results,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
