"""One problem through the installed package, with poisoned outputs, on NumPy or torch arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from flash_kda._host import Array
from flash_kda.inputs.problem import BF16, Problem

# What outputs hold before a call: a NaN whose bits no computation produces.
_POISON = {2: 0x7FED, 4: 0x7FEDBEEF}


@dataclass(frozen=True)
class Result:
    """What a call left behind, on the host."""

    out: Array  # [B, T, HV, V]
    final: Array | None  # [N, HV, V, K], or the pool; None if not asked for
    checkpoints: Array | None = None  # [slots, HV, V, K]
    split: bool = False  # sequences were cut into segments, or may have been


Forward = Callable[[Problem], Result]


class InputChangedError(AssertionError):
    """A call wrote to one of its inputs."""


def bits(x: Array) -> Array:
    """The elements' bit patterns: compared so, NaN equals itself and -0 differs from 0."""
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize]
    return np.ascontiguousarray(x).view(unsigned)


def same_bits(a: Array, b: Array) -> bool:
    """Same shape, type and bit patterns."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(np.array_equal(bits(a), bits(b)))


def poison(x: Array) -> Array:
    """Fills `x` with the poison NaN; returns it."""
    value = np.array(_POISON[x.dtype.itemsize], f"u{x.dtype.itemsize}")
    if x.dtype == np.float16:
        value = np.array(0x7EED, "u2")
    x[...] = value.view(x.dtype)
    return x


def is_poison(x: Array) -> bool:
    """Whether every element still is as `poison` left it."""
    return bool((bits(x) == bits(poison(np.empty(1, x.dtype)))).all())


def arguments(problem: Problem) -> dict[str, Any]:
    """The problem's options under the names of `flash_kda.chunk_kda`."""
    return {
        "scale": problem.scale,
        "use_qk_l2norm_in_kernel": problem.l2norm,
        "use_gate_in_kernel": problem.gate != "log_decay",
        "lower_bound": problem.lower_bound if problem.gate == "lower_bound" else None,
        "safe_gate": problem.gate == "lower_bound",
        "use_beta_sigmoid_in_kernel": problem.beta_kind != "probability",
        "allow_neg_eigval": problem.beta_kind == "doubled_logit",
        "state_v_first": True,
    }


def _storage(x: Array) -> tuple[int, int]:
    """First byte and number of bytes that the view spans."""
    start = x.__array_interface__["data"][0]
    if x.size == 0:
        return start, 0
    spans = [(n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)]
    return start, sum(spans) + x.itemsize


def to_torch(x: Array, device: str) -> Any:
    """A torch tensor of the strides and the alignment (mod 16 bytes) of the NumPy view `x`."""
    import torch

    names = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    names |= {"int32": torch.int32, "int64": torch.int64}
    dtype = names[x.dtype.name]
    start, size = _storage(x)
    lead = start % 16 // x.itemsize
    buffer = torch.empty(lead + size // x.itemsize + 16, dtype=dtype, device=device)
    strides = [s // x.itemsize for s in x.strides]
    view = buffer.as_strided(x.shape, strides, lead)
    if x.size:
        flat = np.ndarray((size,), np.uint8, buffer=_window(start, size))
        source = torch.from_numpy(flat.copy()).view(dtype)
        buffer[lead : lead + source.numel()] = source.to(device)
    return view


def _window(start: int, size: int) -> Any:
    import ctypes

    return (ctypes.c_uint8 * size).from_address(start)


def from_torch(x: Any) -> Array:
    """The tensor's values as a dense NumPy array; bfloat16 stays bfloat16."""
    import torch

    x = x.detach().cpu().contiguous()
    if x.dtype == torch.bfloat16:
        return np.asarray(x.view(torch.int16).numpy().view(BF16))
    return np.asarray(x.numpy())


def _arrays(problem: Problem) -> dict[str, Array]:
    values = {f.name: getattr(problem, f.name) for f in fields(problem)}
    return {name: x for name, x in values.items() if isinstance(x, np.ndarray)}


def package(
    problem: Problem,
    device: str = "cpu",
    *,
    framework: str = "numpy",
    threads: int = 0,
    out: Array | None = None,
    in_place: bool = False,
    sequence_split: bool = True,
) -> Result:
    """`flash_kda.chunk_kda` on `problem`, into poisoned outputs.

    Args:
      problem: the call.
      device: "cpu", or "cuda" through torch.
      framework: "numpy" or "torch" on the CPU.
      threads: CPU threads, 0 = all.
      out: a NumPy array (any strides) whose layout the output takes; dense if None.
      in_place: the final state goes over the initial state.
      sequence_split: as in `flash_kda.chunk_kda`.

    Raises:
      InputChangedError: an input's bits differ after the call. Otherwise what the package raises.
    """
    import flash_kda

    given = _arrays(problem)
    before = {name: bits(x).copy() for name, x in given.items()}
    result = poison(np.empty(problem.v.shape, problem.v.dtype)) if out is None else poison(out)
    final = _final_like(problem, given) if not in_place else given["initial_state"].copy()
    convert: Callable[[Array], Any] = lambda x: x  # noqa: E731
    if framework == "torch" or device != "cpu":
        convert = lambda x: to_torch(x, device)  # noqa: E731
    kept = _checkpoints(problem)
    given |= {name: x for name, x in kept.items() if name != "checkpoint_states"}
    before |= {name: bits(x).copy() for name, x in given.items() if name in kept}
    sent = {name: convert(x) for name, x in given.items()}
    sent_states = convert(kept["checkpoint_states"]) if kept else None
    sent_out = convert(result)
    sent_final = None if final is None else convert(final)
    if in_place:
        sent["initial_state"] = sent_final
    call = sent | arguments(problem)
    call |= {"out": sent_out, "final_state": sent_final, "checkpoint_states": sent_states}
    call |= {"output_final_state": final is not None, "threads": threads}
    call["sequence_split"] = sequence_split
    plan = flash_kda.plan_forward(**call)  # a fallback to another backend must not pass
    if plan.backend.partition("-")[0] != device.partition(":")[0]:
        raise AssertionError(f"plan: expected a {device} backend, got {plan.backend}")
    back = flash_kda.chunk_kda(**call)
    if framework == "torch" or device != "cpu":
        result, final = from_torch(sent_out), None if final is None else from_torch(sent_final)
        given = {name: from_torch(x) for name, x in sent.items()}
        kept = {name: from_torch(sent_states) for name in kept if name == "checkpoint_states"}
    _expect_returned(back, sent_out, sent_final)
    for name, x in given.items():
        if not (in_place and name == "initial_state") and not np.array_equal(bits(x), before[name]):
            raise InputChangedError(f"{name}: the call changed it")
    return Result(result, final, kept.get("checkpoint_states"), plan.sequence_segments > 1)


def _checkpoints(problem: Problem) -> dict[str, Array]:
    """The four arrays of checkpoints, with poisoned states, or nothing."""
    if problem.checkpoints is None:
        return {}
    table = np.array(problem.checkpoints, np.int64).reshape(-1, 3)
    shape = (int(table[:, 2].max(initial=-1)) + 2, *problem.v.shape[2:], problem.q.shape[3])
    columns = [np.ascontiguousarray(table[:, i]) for i in range(3)]
    return {
        "checkpoint_sequences": columns[0],
        "checkpoint_positions": columns[1],
        "checkpoint_slots": columns[2],
        "checkpoint_states": poison(np.empty(shape, problem.checkpoint_dtype)),
    }


def _expect_returned(back: Any, out: Any, final: Any) -> None:
    if not (isinstance(back, tuple) and back[0] is out and back[1] is final):
        raise AssertionError("chunk_kda: expected the given out and final_state to be returned")


def _final_like(problem: Problem, given: dict[str, Array]) -> Array | None:
    if problem.final_dtype is None:
        return None
    _, _, value_heads, value_dim = problem.v.shape
    slots = problem.sequences
    if problem.final_state_indices is not None:
        slots = max(int(problem.final_state_indices.max(initial=-1)) + 2, slots)
    shape = (slots, value_heads, value_dim, problem.q.shape[3])
    return poison(np.empty(shape, problem.final_dtype))
