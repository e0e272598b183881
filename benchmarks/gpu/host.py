"""Host time of a call: what the caller's thread spends, while the device has work ahead of it.

Calls are issued behind a kernel that waits, so that none of them waits for the device; the figure
is the median of rounds of many calls.
"""

from __future__ import annotations

import importlib
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.gpu.cases import Case
from benchmarks.gpu.data import Inputs, random_inputs
from benchmarks.gpu.providers import FlashKda

_BUSY_CYCLES = 60_000_000  # about 35 ms
_ROUNDS = 7
LENGTHS, _PACKED_LENGTHS = (256,), (100, 0, 156)

Call = Callable[[], object]


def microseconds(call: Call, count: int, busy: Callable[[], Call]) -> float:
    """Median over rounds of the mean time of `count` calls.

    `busy` gives the device work and returns what tells whether that is done.

    Raises:
        RuntimeError: The device was through with its work before the host was with the calls.
    """
    for _ in range(3):
        call()
    times = []
    for _ in range(_ROUNDS):
        done = busy()
        start = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - start) / count * 1e6)
        if done():
            raise RuntimeError("host: the device ran out of work; the times may hold waiting")
    return statistics.median(times)


def keep_device_busy() -> Call:
    """Puts a waiting kernel on the current stream; the returned call says whether it has ended."""
    torch.cuda.synchronize()
    torch.cuda._sleep(_BUSY_CYCLES)
    event = torch.cuda.Event()
    event.record()
    query: Call = event.query
    return query


def _chunk_kda(function: Callable[..., object], i: Inputs) -> Call:
    dt_bias = i.dt_bias.reshape(-1)
    return lambda: function(
        q=i.q, k=i.k, v=i.v, g=i.g, beta=i.beta, A_log=i.A_log, dt_bias=dt_bias,
        initial_state=i.initial_state, output_final_state=True, use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True,
        lower_bound=i.lower_bound, state_v_first=True, cu_seqlens=i.cu_seqlens,
    )  # fmt: skip


def own_calls(heads: int, device: str) -> dict[str, tuple[Call, int]]:
    """flash_kda's calls by name, and how many of them a round has."""
    import flash_kda

    fixed = random_inputs(Case("host", LENGTHS, heads), device)
    packed = random_inputs(Case("host packed", _PACKED_LENGTHS, heads), device)
    provider = FlashKda()
    return {
        "flash_kda.fwd": (provider.prepare(fixed), 200),
        "flash_kda.fwd, packed": (provider.prepare(packed), 200),
        "flash_kda.chunk_kda": (_chunk_kda(flash_kda.chunk_kda, fixed), 200),
    }


def fla_calls(heads: int, device: str) -> dict[str, tuple[Call, int]]:
    """flash-linear-attention's call, by its dispatch to this package and by its own kernels."""
    chunk_kda = importlib.import_module("fla.ops.kda").chunk_kda
    call = _chunk_kda(chunk_kda, random_inputs(Case("host", LENGTHS, heads), device))

    def with_switch(value: str) -> Call:
        def run() -> None:
            os.environ["FLA_FLASH_KDA"] = value
            call()

        return run

    return {
        "fla chunk_kda to flash_kda": (with_switch("1"), 100),
        "fla chunk_kda, Triton": (with_switch("0"), 10),
    }


def row(name: str, call: Call, count: int) -> dict[str, Any]:
    """A row for the result file."""
    return {"call": name, "us": round(microseconds(call, count, keep_device_busy), 2)}
