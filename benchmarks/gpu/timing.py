"""The one way to time, with its cache policy.

Before each timed call a 256 MB buffer is inverted in place, so that L2 (50 MB on Hopper) holds
nothing of the call's. Providers take turns within each round, in an order that rotates. Methods:

- graph: the call captured in a CUDA graph; CUDA events around its launch. The host runs ahead of
  the device, so this is the device's time alone.
- eager: the device is idle when the host begins; CUDA events around the plain call. Host included.
- kernel: time during which at least one of the plain call's kernels, copies or fills runs, by the
  profiler (CUPTI). Gaps between kernels are left out.

On the CPU there is `eager` only, by the wall clock, without a flush: to try the frame itself.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

METHODS = ("graph", "eager", "kernel")
FLUSH_BYTES = 256 << 20
_WARM_ROUNDS = 3
# The flush's kernel, by which the profiler's record is cut into calls.
_FLUSH_KERNEL = "bitwise_not"
_DEVICE_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})

Calls = Mapping[str, Callable[[], object]]
Times = dict[str, list[float]]  # milliseconds of each round, by provider


@dataclass(frozen=True)
class Quantiles:
    """Of the rounds, in milliseconds."""

    median: float
    p20: float
    p80: float


def quantiles(times: Sequence[float]) -> Quantiles:
    """With linear interpolation between the rounds."""
    at = torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)
    values = torch.quantile(torch.tensor(times, dtype=torch.float64), at).tolist()
    return Quantiles(*values)


def methods(device: str) -> Mapping[str, Callable[[Calls, int], Times]]:
    """The methods of a device."""
    if device == "cpu":
        return {"eager": _wall_clock}
    return {"graph": _graph, "eager": _eager, "kernel": _kernel}


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph's replay, which the method "graph" times. It has run before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replay: Callable[[], object] = graph.replay
    return replay


def measure(calls: Calls, method: str, rounds: int, device: str) -> Times:
    """Times of each call, by `method`, in `rounds` rounds.

    The calls have run before; for "graph" they are `captured` ones.

    Raises:
        ValueError: No such method on this device.
        RuntimeError: The profiler's record does not hold what was run.
    """
    known = methods(device)
    if method not in known:
        raise ValueError(
            f"methods: expected some of {', '.join(known)} on {device}; got {method!r}"
        )
    gc.collect()
    gc.disable()
    try:
        return known[method](calls, rounds)
    finally:
        gc.enable()


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, name): every name in each round, the first one moving on from round to round."""
    for r in range(rounds):
        for i in range(len(names)):
            yield r, names[(i + r) % len(names)]


def _flush_buffer() -> torch.Tensor:
    return torch.zeros(FLUSH_BYTES, dtype=torch.uint8, device="cuda")


def _event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _graph(calls: Calls, rounds: int) -> Times:
    buffer = _flush_buffer()
    pairs: dict[str, list[Any]] = {name: [] for name in calls}
    for _, name in turns(list(calls), rounds + _WARM_ROUNDS):
        begin, end = _event_pair()
        buffer.bitwise_not_()
        begin.record()
        calls[name]()
        end.record()
        pairs[name].append((begin, end))
    torch.cuda.synchronize()
    return {
        name: [begin.elapsed_time(end) for begin, end in of_name[_WARM_ROUNDS:]]
        for name, of_name in pairs.items()
    }


def _eager(calls: Calls, rounds: int) -> Times:
    buffer = _flush_buffer()
    times: Times = {name: [] for name in calls}
    for _, name in turns(list(calls), rounds + _WARM_ROUNDS):
        begin, end = _event_pair()
        buffer.bitwise_not_()
        torch.cuda.synchronize()
        begin.record()
        calls[name]()
        end.record()
        end.synchronize()
        times[name].append(begin.elapsed_time(end))
    return {name: of_name[_WARM_ROUNDS:] for name, of_name in times.items()}


def _kernel(calls: Calls, rounds: int) -> Times:
    buffer = _flush_buffer()
    order = [name for _, name in turns(list(calls), rounds + _WARM_ROUNDS)]
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):  # a first session may miss its first work
        buffer.bitwise_not_()
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        for name in order:
            buffer.bitwise_not_()
            calls[name]()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    times: Times = {name: [] for name in calls}
    for name, ms in zip(order, busy_by_call(trace["traceEvents"], len(order)), strict=True):
        times[name].append(ms)
    return {name: of_name[_WARM_ROUNDS:] for name, of_name in times.items()}


def busy_by_call(events: Sequence[Mapping[str, Any]], calls: int) -> list[float]:
    """Milliseconds of device work after each flush, in the order of a chrome trace's time.

    Raises:
        RuntimeError: There are not `calls` flushes, or nothing ran after one.
    """
    work = [e for e in events if e.get("cat") in _DEVICE_WORK and "dur" in e]
    work.sort(key=lambda e: float(e["ts"]))
    spans: list[list[tuple[float, float]]] = []
    for event in work:
        begin = float(event["ts"])
        if _FLUSH_KERNEL in event["name"]:
            spans.append([])
        elif spans:
            spans[-1].append((begin, begin + float(event["dur"])))
    if len(spans) != calls or not all(spans):
        raise RuntimeError(
            f"profiler: expected {calls} flushes with kernels after each, got {len(spans)}, of"
            f" which {sum(not s for s in spans)} have none; {len(work)} pieces of work in all"
        )
    return [_union(of_call) * 1e-3 for of_call in spans]


def _union(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals sorted by their begins."""
    total, reached = 0.0, float("-inf")
    for begin, end in spans:
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _wall_clock(calls: Calls, rounds: int) -> Times:
    times: Times = {name: [] for name in calls}
    for _, name in turns(list(calls), rounds + 1):
        start = time.perf_counter()
        calls[name]()
        times[name].append((time.perf_counter() - start) * 1e3)
    return {name: of_name[1:] for name, of_name in times.items()}
