"""Arguments for the tests of the Python package, and what the fp64 recurrence makes of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

import flash_kda
from flash_kda.reference import recurrent_kda

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)

# fla's spelling of the fixed call that fwd makes.
BOUNDED = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "lower_bound": -5.0,
    "state_v_first": True,
}


@dataclasses.dataclass
class Problem:
    """NumPy arguments with data that differs between heads; outputs are poisoned."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    out: Any
    A_log: Any
    dt_bias: Any
    initial_state: Any
    final_state: Any
    cu_seqlens: Any = None

    def fwd_arguments(self) -> tuple[Any, ...]:
        return (
            self.q, self.k, self.v, self.g, self.beta, None, self.out, self.A_log, self.dt_bias,
            -5.0, self.initial_state, self.final_state, self.cu_seqlens,
        )  # fmt: skip

    def fwd(self) -> None:
        flash_kda.fwd(*self.fwd_arguments())

    def chunk_kda(self, **options: Any) -> tuple[Any, Any]:
        keywords = {
            **BOUNDED,
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "initial_state": self.initial_state,
            "output_final_state": True,
            "cu_seqlens": self.cu_seqlens,
            **options,
        }
        return flash_kda.chunk_kda(self.q, self.k, self.v, self.g, self.beta, **keywords)

    def mapped(self, convert: Any) -> Problem:
        """Every array through `convert`."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Problem(**{n: None if x is None else convert(x) for n, x in fields.items()})


def problem(
    dtype: Any = F32, *, B: int = 2, T: int = 37, H: int = 2, HV: int = 4, K: int = 24, V: int = 16,
    seed: int = 0, lengths: list[int] | None = None, gate_dtype: Any = F32, state_dtype: Any = F32,
) -> Problem:  # fmt: skip
    rng = np.random.default_rng(seed)
    if lengths is not None:
        B, T = 1, sum(lengths)
    N = B if lengths is None else len(lengths)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    def poison(*shape: int) -> Any:
        return np.full(shape, np.nan, np.float32)

    return Problem(
        q=normal(B, T, H, K).astype(dtype),
        k=normal(B, T, H, K).astype(dtype),
        v=normal(B, T, HV, V).astype(dtype),
        g=normal(B, T, HV, K).astype(gate_dtype),
        beta=normal(B, T, HV).astype(gate_dtype),
        out=poison(B, T, HV, V).astype(dtype),
        A_log=rng.uniform(0, 0.5, HV).astype(np.float32),
        dt_bias=0.1 * normal(HV, K),
        initial_state=normal(N, HV, V, K).astype(state_dtype),
        final_state=poison(N, HV, V, K).astype(state_dtype),
        cu_seqlens=None if lengths is None else np.cumsum([0, *lengths]).astype(np.int64),
    )


def expected(p: Problem, **options: Any) -> tuple[Any, Any]:
    """Outputs and final states of a problem of NumPy arrays, in fp64, by the recurrence."""
    keywords = {"A_log": p.A_log, "dt_bias": p.dt_bias, "initial_state": p.initial_state}
    keywords |= {"cu_seqlens": p.cu_seqlens, **options}
    o, final, *_ = recurrent_kda(p.q, p.k, p.v, p.g, p.beta, **keywords)
    return o, final


def assert_close(got: Any, want: Any, dtype: Any, device: str = "cpu") -> None:
    """Relative RMS error of each head, [.., heads, size]: that of rounding to the dtype at most.

    On a GPU, whose kernels multiply in bf16: the bound of ordinary bf16 inputs.
    """
    x = np.asarray(got).astype(np.float64)
    assert np.isfinite(x).all()
    bound = 5e-3 if device != "cpu" else {BF16: 3e-3, F16: 4e-4, F32: 3e-6}[np.dtype(dtype)]
    head_axis = x.ndim - 2 if x.ndim == 4 else 1
    axes = tuple(i for i in range(x.ndim) if i != head_axis)
    error = np.sqrt(((x - want) ** 2).sum(axes) / (want**2).sum(axes))
    assert (error <= bound).all(), f"relative RMS error {error} over {bound}"


def to_torch(x: Any) -> Any:
    """A torch tensor with a copy of the data."""
    import torch

    if x.dtype == BF16:
        return torch.from_numpy(x.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(np.array(x))


def to_numpy(x: Any) -> Any:
    """The data as float32 or float64 (exact)."""
    if type(x).__module__ == "torch":
        return x.detach().float().numpy()
    return np.asarray(x).astype(np.float32)
