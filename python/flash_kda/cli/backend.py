"""Runs a `Problem` on a device through the public Python API, and times it.

On the CPU the arrays stay NumPy arrays; on a GPU they go there as torch tensors.
"""

from __future__ import annotations

import os
import time
from enum import Enum
from typing import Any

import numpy as np

import flash_kda
from flash_kda.cli.console import Stages, UserError, library_errors, require
from flash_kda.cli.problem import Array, Beta, Gate, Options, Problem


class DeviceChoice(str, Enum):
    """What `--device` takes."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def cuda_missing() -> str | None:
    """Why the command line cannot use a GPU here; None if it can."""
    # torch first: it must load its CUDA libraries before anything here asks the driver.
    try:
        torch = require("torch", "--device cuda")
    except UserError as error:
        torch, no_torch = None, str(error)
    backend = {b.name: b for b in flash_kda.backends()}.get("cuda-sm90")
    if backend is None or not backend.available:
        return "no CUDA backend" if backend is None else backend.detail
    if torch is None:
        return no_torch
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    return None


def pick_device(choice: DeviceChoice) -> str:
    """The device to use: "cpu" or "cuda"."""
    if choice is DeviceChoice.cpu:
        return "cpu"
    missing = cuda_missing()
    if choice is DeviceChoice.cuda and missing is not None:
        raise UserError(f"--device cuda: {missing}")
    return "cpu" if missing is not None else "cuda"


def device_name(device: str) -> str:
    """The device in words."""
    if device == "cuda":
        torch = require("torch", "--device cuda")
        return str(torch.cuda.get_device_name())
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            names = [
                line.split(":", 1)[1].strip() for line in info if line.startswith("model name")
            ]
        return names[0] if names else "CPU"
    except OSError:
        return "CPU"


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def to_device(array: Array, device: str) -> Any:
    """A NumPy array as it is, or a torch tensor with its bits on the GPU."""
    if device == "cpu":
        return array
    torch = require("torch", "--device cuda")
    array = np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to("cuda")
    return torch.from_numpy(array).to("cuda")


def to_host(array: Any, like: np.dtype[Any]) -> Array:
    """The inverse of `to_device`."""
    if isinstance(array, np.ndarray):
        return array
    torch = require("torch", "--device cuda")
    tensor = array.cpu()
    if like.name == "bfloat16":
        host: Array = tensor.view(torch.int16).numpy().view(like)
        return host
    plain: Array = tensor.numpy()
    return plain


def call_options(options: Options) -> dict[str, Any]:
    """Our options as keywords of `flash_kda.chunk_kda`."""
    in_kernel = options.gate is not Gate.log_decay
    return {
        "scale": options.scale,
        "use_qk_l2norm_in_kernel": options.l2norm,
        "use_gate_in_kernel": in_kernel,
        "lower_bound": options.lower_bound if options.gate is Gate.lower_bound else None,
        "use_beta_sigmoid_in_kernel": options.beta is not Beta.probability,
        "allow_neg_eigval": options.beta is Beta.doubled_logit,
        "state_v_first": True,
        "sequence_split": options.sequence_split,
    }


class Runner:
    """A problem on a device, with outputs that hold NaN until a call writes them."""

    def __init__(self, problem: Problem, device: str, threads: int = 0) -> None:
        """Moves the arrays and makes the outputs. `threads`: of the CPU backend, 0 = all."""
        self.problem, self.device = problem, device
        self._out_dtype = problem.arrays["v"].dtype
        out = np.full(problem.arrays["v"].shape, np.nan, self._out_dtype)
        state = np.full(problem.state_shape(), np.nan, problem.state_dtype.numpy)
        with library_errors():
            self._arrays = {name: to_device(a, device) for name, a in problem.arrays.items()}
            self._out, self._state = to_device(out, device), to_device(state, device)
        self._options = call_options(problem.options)
        if device == "cpu" and threads:
            self._options["threads"] = threads

    def __call__(self, **more: Any) -> None:
        """One call; `more` goes to `flash_kda.chunk_kda`."""
        with library_errors():
            flash_kda.chunk_kda(
                **self._arrays, **self._options, out=self._out, final_state=self._state, **more
            )

    def explain(self) -> str:
        """What the plan says will run."""
        with library_errors():
            plan = flash_kda.plan_forward(
                **self._arrays, **self._options, out=self._out, final_state=self._state
            )
            return str(plan.describe())

    def time(self, repeats: int, warmup: int, stages: Stages) -> list[float]:
        """Seconds of each of `repeats` calls: wall clock on the CPU, CUDA events on a GPU."""
        stages.begin("running", warmup + repeats)
        for _ in range(warmup):
            self()
            stages.advance()
        seconds = []
        for _ in range(repeats):
            seconds.append(self._time_once())
            stages.advance()
        return seconds

    def _time_once(self) -> float:
        if self.device == "cpu":
            start = time.perf_counter()
            self()
            return time.perf_counter() - start
        torch = require("torch", "--device cuda")
        with library_errors():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) * 1e-3

    def checkpoints(self, states: Array, index: dict[str, Array]) -> Array:
        """Runs once more and returns the states [slots, HV, V, K] fp32 that `index` asks for."""
        with library_errors():
            stored = to_device(states, self.device)
            moved = {name: to_device(array, self.device) for name, array in index.items()}
            self(checkpoint_states=stored, **moved)
            return to_host(stored, states.dtype)

    def results(self) -> tuple[Array, Array]:
        """`out` [B, T, HV, V] and the final states [N, HV, V, K] on the host."""
        with library_errors():
            return (
                to_host(self._out, self._out_dtype),
                to_host(self._state, self.problem.state_dtype.numpy),
            )
