"""Wrong calls of `chunk_kda` as data: what to change in a right one, and the error to come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flash_kda.inputs.call import arguments, poison
from flash_kda.inputs.problem import BF16, FP16, FP32, Problem, Shape, ordinary

Call = dict[str, Any]
Change = Callable[[Call], Any]
nan, inf = float("nan"), float("inf")

LENGTHS = (70, 30)
INDICES = ("checkpoint_sequences", "checkpoint_positions", "checkpoint_slots")


def problem(dim: int = 128, dtype: Any = BF16) -> Problem:
    shape = Shape(2, lengths=LENGTHS, value_heads=4, key_dim=dim, value_dim=dim)
    return ordinary(np.random.default_rng(24), shape, dtype=dtype, state_in=FP32)


def good_call(p: Problem) -> Call:
    """Keywords of a right `chunk_kda` call with poisoned outputs."""
    call: Call = {n: getattr(p, n) for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")}
    call |= {"initial_state": p.initial_state.copy(), "cu_seqlens": p.cu_seqlens}
    call |= {
        "out": poison(np.empty_like(p.v)),
        "final_state": poison(np.empty_like(p.initial_state)),
    }
    return call | arguments(p) | {"output_final_state": True}


def set_(**values: Any) -> Change:
    return lambda call: call.update(values)


def with_(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda call: call.update({name: change(call[name])})


def all_(*changes: Change) -> Change:
    def apply(call: Call) -> None:
        for change in changes:
            change(call)

    return apply


def drop(*names: str) -> Change:
    return lambda call: [call.pop(name) for name in names]


def by_head(x: np.ndarray) -> np.ndarray:
    """[B, T, H, D] as [B, H, T, D]."""
    return np.ascontiguousarray(np.swapaxes(x, 1, 2))


def cu(*offsets: int, dtype: Any = np.int64) -> Change:
    return set_(cu_seqlens=np.array(offsets, dtype))


def batch_of(count: int) -> Change:
    """The first rows as a batch."""

    def apply(call: Call) -> None:
        for name in ("q", "k", "v", "g", "beta", "out"):
            x = call[name]
            call[name] = np.ascontiguousarray(x.reshape(count, x.shape[1] // count, *x.shape[2:]))

    return apply


def checkpoints(sequences: list[int], positions: list[int], slots: list[int]) -> Change:
    """Four slots that are written."""

    def apply(call: Call) -> None:
        call["checkpoint_states"] = poison(np.empty((4, 4, 128, 128), np.float32))
        for name, x in zip(INDICES, (sequences, positions, slots), strict=True):
            call[name] = np.array(x, np.int64)

    return apply


def indices(name: str, *values: int, slots: int = 5) -> Change:
    """`name`'s state becomes a pool."""

    def apply(call: Call) -> None:
        shape = (slots, 4, 128, 128)
        call[name] = np.zeros(shape, np.float32) if name == "initial_state" else poison(
            np.empty(shape, np.float32)
        )  # fmt: skip
        call[f"{name}_indices"] = np.array(values, np.int32)

    return apply


def overlap_states(call: Call) -> None:
    both = poison(np.empty((3, 4, 128, 128), np.float32))
    call["initial_state"], call["final_state"] = both[:2], both[1:]


def read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


def stepped(x: np.ndarray) -> np.ndarray:
    """Every second element of a twice as wide array."""
    return np.repeat(x, 2, axis=-1)[..., ::2]


_V, _T, _N = ValueError, TypeError, NotImplementedError
WRONG: dict[str, tuple[Change, type[Exception], str]] = {
    # kind of object
    "v None": (set_(v=None), _T, "^v: .*None"),
    "q list": (set_(q=[[1.0]]), _T, "^q: .*list"),
    "beta number": (set_(beta=1.0), _T, "^beta: .*float"),
    "cu_seqlens list": (set_(cu_seqlens=[0, 100]), _T, "^cu_seqlens: .*list"),
    "initial_state text": (set_(initial_state="zeros"), _T, "^initial_state: .*str"),
    "unknown keyword": (set_(head_first=True), _T, "head_first"),
    "scale text": (set_(scale="auto"), _T, "^scale: .*str"),
    "lower_bound text": (set_(lower_bound="-5"), _T, "^lower_bound: .*str"),
    "flag number": (set_(use_gate_in_kernel=1), _T, "^use_gate_in_kernel: .*bool.*int"),
    "threads text": (set_(threads="2"), _T, "^threads: .*str"),
    "threads float": (set_(threads=2.0), _T, "^threads: .*float"),
    # dtypes
    "q fp64": (with_("q", lambda x: x.astype(np.float64)), _V, "^q: .*float64"),
    "q alone fp16": (with_("q", lambda x: x.astype(FP16)), _V, "^k: .*float16 as q"),
    "v alone fp32": (with_("v", lambda x: x.astype(FP32)), _V, "^v: .*bfloat16 as q.*float32"),
    "out fp32": (
        with_("out", lambda x: poison(x.astype(FP32))),
        _V,
        "^out: .*bfloat16 as q.*float32",
    ),
    "g fp16": (with_("g", lambda x: x.astype(FP16)), _V, "^g: .*float16"),
    "g integers": (with_("g", lambda x: x.astype(np.int32)), _V, "^g: .*int32"),
    "beta fp64": (with_("beta", lambda x: x.astype(np.float64)), _V, "^beta: .*float64"),
    "A_log fp64": (
        with_("A_log", lambda x: x.astype(np.float64)),
        _V,
        "^A_log: .*float32.*float64",
    ),
    "dt_bias fp64": (with_("dt_bias", lambda x: x.astype(np.float64)), _V, "^dt_bias: .*float32"),
    "initial_state fp16": (
        with_("initial_state", lambda x: x.astype(FP16)),
        _V,
        "^initial_state: ",
    ),
    "final_state fp64": (
        with_("final_state", lambda x: x.astype("f8")),
        _V,
        "^final_state: .*float64",
    ),
    "cu_seqlens fp32": (cu(0, 70, 100, dtype=np.float32), _V, "^cu_seqlens: .*int32 or int64"),
    "cu_seqlens int16": (cu(0, 70, 100, dtype=np.int16), _V, "^cu_seqlens: "),
    # shapes
    "q [B, H, T, D]": (with_("q", by_head), _V, "^k: .*of q"),
    "all [B, H, T, D]": (
        all_(*(with_(n, by_head) for n in ("q", "k", "v", "g", "out"))),
        _V,
        r"^(v|g|beta): expected",
    ),
    "k other T": (with_("k", lambda x: x[:, :-1]), _V, "^k: expected shape"),
    "k other H": (with_("k", lambda x: x[:, :, :1]), _V, "^k: expected shape"),
    "v 3 heads": (
        all_(*(with_(n, lambda x: x[:, :, :3]) for n in ("v", "g", "beta", "out"))),
        _V,
        "^v: .*multiple of q's H = 2",
    ),
    "v other T": (with_("v", lambda x: x[:, :-1]), _V, "^v: expected shape"),
    "q rank 3": (with_("q", lambda x: x[0]), _V, "^q: .*shape"),
    "g as beta": (lambda call: call.update(g=call["beta"]), _V, "^g: "),
    "g [B, T, HV * K]": (with_("g", lambda x: x.reshape(1, 100, -1)), _V, "^g: "),
    "beta [B, H, T]": (with_("beta", by_head), _V, "^beta: "),
    "beta [B, T, HV, 1]": (with_("beta", lambda x: x[..., None]), _V, "^beta: "),
    "A_log [H]": (with_("A_log", lambda x: x[:2]), _V, "^A_log: .*HV = 4"),
    "dt_bias [HV]": (with_("dt_bias", lambda x: x[:, 0]), _V, r"^dt_bias: .*\[HV, K\]"),
    "dt_bias [K, HV]": (with_("dt_bias", lambda x: x.T.copy()), _V, "^dt_bias: "),
    "out other T": (with_("out", lambda x: x[:, :-1]), _V, "^out: expected shape"),
    "out HV / 2": (with_("out", lambda x: x[:, :, :2]), _V, "^out: expected shape"),
    "K 257": (
        all_(*(with_(n, lambda x: np.repeat(x, 3, -1)[..., :257].copy()) for n in ("q", "k"))),
        _V,
        "^q: .*256",
    ),
    "initial_state [N, HV, K]": (
        with_("initial_state", lambda x: x[..., 0]),
        _V,
        "^initial_state: ",
    ),
    "initial_state N + 1": (
        with_("initial_state", lambda x: np.concatenate([x, x[:1]])),
        _V,
        "^initial_state: expected shape",
    ),
    "final_state N - 1": (
        with_("final_state", lambda x: x[:1]),
        _V,
        "^final_state: expected shape",
    ),
    "initial_state of key heads": (
        with_("initial_state", lambda x: x[:, :2]),
        _V,
        "^initial_state: ",
    ),
    # numbers
    "lower_bound nan": (set_(lower_bound=nan), _V, r"^lower_bound: .*\[-5, 0\].*nan"),
    "lower_bound +1": (set_(lower_bound=1.0), _V, "^lower_bound: .*1"),
    "lower_bound -6": (set_(lower_bound=-6.0), _V, "^lower_bound: .*-6"),
    "lower_bound -5.0001": (set_(lower_bound=-5.0001), _V, "^lower_bound: "),
    "lower_bound -inf": (set_(lower_bound=-inf), _V, "^lower_bound: .*-inf"),
    "lower_bound None, safe": (set_(lower_bound=None, safe_gate=True), _V, "^lower_bound: .*None"),
    "scale nan": (set_(scale=nan), _V, "^scale: .*nan"),
    "scale inf": (set_(scale=inf), _V, "^scale: .*inf"),
    "scale 1e300": (set_(scale=1e300), _V, "^scale: "),
    "threads -1": (set_(threads=-1), _V, "^threads: .*-1"),
    "chunk_size 7": (set_(chunk_size=7), _V, "^chunk_size: .*7"),
    # options that exclude each other
    "A_log with log decay": (
        set_(use_gate_in_kernel=False, lower_bound=None, safe_gate=False),
        _V,
        "^A_log: ",
    ),
    "doubled probability": (
        set_(use_beta_sigmoid_in_kernel=False, allow_neg_eigval=True),
        _V,
        "^allow_neg_eigval: ",
    ),
    "intermediate states": (
        set_(return_intermediate_states=True),
        _N,
        "^return_intermediate_states: ",
    ),
    # offsets
    "cu_seqlens decreasing": (cu(0, 70, 30), _V, "^cu_seqlens: "),
    "cu_seqlens from 3": (cu(3, 70, 100), _V, "^cu_seqlens: .*3"),
    "cu_seqlens from -1": (cu(-1, 70, 100), _V, "^cu_seqlens: .*-1"),
    "cu_seqlens past T": (cu(0, 70, 101), _V, "^cu_seqlens: .*101"),
    "cu_seqlens far past T": (cu(0, 2**40, 2**41), _V, "^cu_seqlens: "),
    "cu_seqlens of rank 2": (
        set_(cu_seqlens=np.array([[0, 100]])),
        _V,
        r"^cu_seqlens: .*\[N \+ 1\]",
    ),
    "cu_seqlens without elements": (cu(), _V, "^cu_seqlens: "),
    "cu_seqlens with B 2": (batch_of(2), _V, "^cu_seqlens: .*B = 1"),
    # pools
    "slot past the pool": (indices("initial_state", 0, 5), _V, "^initial_state_indices: .*5"),
    "final slot twice": (indices("final_state", 3, 3), _V, "^final_state_indices: .*3"),
    "one slot of two": (indices("initial_state", 1), _V, "^initial_state_indices: "),
    "slots without a state": (
        all_(drop("initial_state"), set_(initial_state_indices=np.array([0, 1]))),
        _V,
        "^initial_state_indices: .*without initial_state",
    ),
    "fp32 slots": (
        all_(
            indices("initial_state", 0, 1), with_("initial_state_indices", lambda x: x.astype("f4"))
        ),
        _V,
        "^initial_state_indices: .*int32 or int64",
    ),
    # checkpoints
    "checkpoint at 65": (checkpoints([0], [65], [0]), _V, "^checkpoint_positions: .*65"),
    "checkpoint at -64": (checkpoints([0], [-64], [0]), _V, "^checkpoint_positions: .*-64"),
    "checkpoint past the end": (checkpoints([1], [64], [0]), _V, "^checkpoint_positions: .*64"),
    "checkpoint of sequence 2": (checkpoints([2], [0], [0]), _V, "^checkpoint_sequences: .*2"),
    "checkpoint slot twice": (checkpoints([0, 1], [0, 0], [1, 1]), _V, "^checkpoint_slots: .*1"),
    "checkpoint slot 4 of 4": (checkpoints([0], [64], [4]), _V, "^checkpoint_slots: .*4"),
    "checkpoint lists differ": (checkpoints([0, 0], [64], [1]), _V, "^checkpoint_positions: "),
    "no checkpoint_slots": (
        all_(checkpoints([0], [64], [0]), drop("checkpoint_slots")),
        _V,
        "^checkpoint_slots: ",
    ),
    "no checkpoint_states": (
        all_(checkpoints([0], [64], [0]), drop("checkpoint_states")),
        _V,
        "^checkpoint_",
    ),
    # memory
    "q with a step": (with_("q", stepped), _V, "^q: .*stride"),
    "beta with a step": (with_("beta", stepped), _V, "^beta: .*stride"),
    "out is v": (lambda call: call.update(out=call["v"]), _V, "^out: .*v"),
    "out overlaps g": (lambda call: call.update(out=call["g"][:, :, ::-1]), _V, "^out: "),
    "out repeats a row": (
        with_("out", lambda x: np.lib.stride_tricks.as_strided(x, x.shape, (0, 0, 256, 2))),
        _V,
        "^out: ",
    ),
    "states overlap in part": (overlap_states, _V, "^final_state: .*initial_state"),
    "final_state is q": (
        lambda call: call.update(final_state=call["initial_state"][:, ::-1]),
        _V,
        "^final_state: ",
    ),
}
# Wrong for one kind of array alone.
NUMPY_ONLY: dict[str, tuple[Change, type[Exception], str]] = {
    "out read-only": (with_("out", read_only), _V, "^out: .*read-only"),
    "final_state read-only": (with_("final_state", read_only), _V, "^final_state: .*read-only"),
}
