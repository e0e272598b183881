"""One call of the operator as the command line sees it: NumPy arrays, options, sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from flash_kda.cli.cases import Case
from flash_kda.cli.console import Stages, UserError

Array = npt.NDArray[Any]

# Elements made at a time, so that the fp32 draft of a bf16 array stays small.
_DRAFT = 1 << 22


_NUMPY: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
}


class DType(str, Enum):
    """Element types by the names that the options use."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy type (bfloat16 from ml_dtypes)."""
        return _NUMPY[self.value]


class StateDType(str, Enum):
    """Element types of a stored state."""

    bf16 = "bf16"
    fp32 = "fp32"

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy type (bfloat16 from ml_dtypes)."""
        return _NUMPY[self.value]


class Gate(str, Enum):
    """How `g` becomes the log decay; docs/contract.md has the formulas."""

    lower_bound = "lower_bound"
    softplus = "softplus"
    log_decay = "log_decay"


class Beta(str, Enum):
    """How `beta` becomes the writing strength; docs/contract.md has the formulas."""

    logit = "logit"
    doubled_logit = "doubled_logit"
    probability = "probability"


@dataclass(frozen=True)
class Options:
    """The options of a call that are not arrays."""

    gate: Gate = Gate.lower_bound
    lower_bound: float = -5.0
    beta: Beta = Beta.logit
    l2norm: bool = True
    scale: float | None = None
    sequence_split: bool = True

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "gate": self.gate.value,
            "lower_bound": self.lower_bound if self.gate is Gate.lower_bound else None,
            "beta": self.beta.value,
            "l2norm": self.l2norm,
            "scale": self.scale,
            "sequence_split": self.sequence_split,
        }


REQUIRED = ("q", "k", "v", "g", "beta")
OPTIONAL = ("A_log", "dt_bias", "initial_state", "cu_seqlens")
_RANKS = {"q": 4, "k": 4, "v": 4, "g": 4, "beta": 3}
_LAYOUTS = {
    "q": "[B, T, H, K]",
    "k": "[B, T, H, K]",
    "v": "[B, T, HV, V]",
    "g": "[B, T, HV, K]",
    "beta": "[B, T, HV]",
}


@dataclass
class Problem:
    """A call: arrays by the names of the Python API, absent ones left out; options; a title."""

    title: str
    arrays: dict[str, Array]
    options: Options
    state_dtype: StateDType = StateDType.fp32
    source: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks what the sizes below are read from; the library checks all the rest."""
        for name in REQUIRED:
            if name not in self.arrays:
                raise UserError(
                    f"tensor '{name}' is missing; needed: {', '.join(REQUIRED)}; "
                    f"here: {', '.join(sorted(self.arrays)) or 'none'}"
                )
            shape = self.arrays[name].shape
            if len(shape) != _RANKS[name]:
                raise UserError(f"tensor '{name}': expected {_LAYOUTS[name]}, got {list(shape)}")
        for name in self.arrays:
            if name not in REQUIRED + OPTIONAL:
                raise UserError(
                    f"tensor '{name}' is not known; expected {', '.join(REQUIRED)} and "
                    f"optionally {', '.join(OPTIONAL)}"
                )
        cu = self.arrays.get("cu_seqlens")
        if cu is not None and (cu.ndim != 1 or cu.shape[0] < 1 or cu.dtype.kind != "i"):
            raise UserError(
                f"tensor 'cu_seqlens': expected [N + 1] int32 or int64, got "
                f"{list(cu.shape)} {cu.dtype}"
            )

    @property
    def generated(self) -> bool:
        """Whether `generate` made it, so that its inputs are ordinary ones."""
        return "case" in self.source

    @property
    def seq_lens(self) -> list[int]:
        """Tokens of each of the N sequences."""
        cu = self.arrays.get("cu_seqlens")
        if cu is None:
            batch, tokens = self.arrays["q"].shape[:2]
            return [tokens] * batch
        return [int(n) for n in np.diff(cu)]

    @property
    def key_heads(self) -> int:
        """H."""
        return int(self.arrays["q"].shape[2])

    @property
    def value_heads(self) -> int:
        """HV."""
        return int(self.arrays["v"].shape[2])

    @property
    def key_dim(self) -> int:
        """K."""
        return int(self.arrays["q"].shape[3])

    @property
    def value_dim(self) -> int:
        """V."""
        return int(self.arrays["v"].shape[3])

    @property
    def tokens(self) -> int:
        """Tokens that the call works on, over all sequences."""
        return sum(self.seq_lens)

    def state_shape(self) -> tuple[int, int, int, int]:
        """[N, HV, V, K]."""
        return (len(self.seq_lens), self.value_heads, self.value_dim, self.key_dim)

    def flop(self) -> int:
        """Operations of the recurrence: 7 * K * V a token and value head.

        Decay of the state K*V; its product with k, the outer product added to it, its product with
        q 2*K*V each. What an algorithm does on top (or saves) is not counted, so that figures
        compare across algorithms.
        """
        return 7 * self.key_dim * self.value_dim * self.tokens * self.value_heads

    def bytes_moved(self) -> int:
        """Bytes that any algorithm moves: inputs read once, `out` and final states written once."""
        inputs = sum(array.nbytes for array in self.arrays.values())
        states = int(np.prod(self.state_shape(), dtype=np.int64))
        return inputs + self.arrays["v"].nbytes + states * self.state_dtype.numpy.itemsize

    def select_heads(self, heads: list[int]) -> Problem:
        """The same call for some value heads only, as copies; their results keep their bits.

        The key heads are repeated, so that the result has as many key heads as value heads.
        """
        group = self.value_heads // self.key_heads
        keys = [head // group for head in heads]
        arrays: dict[str, Array] = {}
        for name, array in self.arrays.items():
            if name in ("q", "k"):
                arrays[name] = np.ascontiguousarray(array[:, :, keys])
            elif name in ("v", "g", "beta"):
                arrays[name] = np.ascontiguousarray(array[:, :, heads])
            elif name == "A_log":
                arrays[name] = array.reshape(self.value_heads)[heads]
            elif name == "dt_bias":
                arrays[name] = array.reshape(self.value_heads, self.key_dim)[heads]
            elif name == "initial_state":
                arrays[name] = np.ascontiguousarray(array[:, heads])
            else:
                arrays[name] = array
        return Problem(self.title, arrays, self.options, self.state_dtype, self.source)


def sequence_bounds(problem: Problem) -> list[tuple[int, int, int]]:
    """(batch row, first token, past the last token) of each sequence."""
    cu = problem.arrays.get("cu_seqlens")
    if cu is None:
        batch, tokens = problem.arrays["q"].shape[:2]
        return [(row, 0, tokens) for row in range(batch)]
    return [(0, int(a), int(b)) for a, b in pairwise(cu)]


def _normal(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any], stages: Stages
) -> Array:
    """Standard normal values, made in fp32 and rounded to `dtype`."""
    out = np.empty(shape, dtype)
    flat = out.reshape(-1)
    for start in range(0, flat.size, _DRAFT):
        part = flat[start : start + _DRAFT]
        part[...] = rng.standard_normal(part.size, dtype=np.float32)
        stages.advance()
    return out


@dataclass(frozen=True)
class Recipe:
    """What random inputs to make: element types, whether there is an initial state, the seed."""

    dtype: DType = DType.bf16
    gate_dtype: DType | None = None
    state_dtype: StateDType = StateDType.fp32
    initial_state: bool = False
    seed: int = 0


def generate(case: Case, options: Options, recipe: Recipe, stages: Stages) -> Problem:
    """Random inputs.

    q, k, v, raw g and the logits of beta ~ N(0, 1); A_log 0 .. 0.5; dt_bias ~ 0.1 N(0, 1). With the
    gate "log_decay", g = lower_bound * sigmoid(N(0, 1)); with beta "probability", sigmoid(N(0, 1)).
    """
    rng = np.random.Generator(np.random.SFC64(recipe.seed))
    tokens, hv = case.tokens, case.value_heads
    dtype, gate_dtype = recipe.dtype.numpy, (recipe.gate_dtype or recipe.dtype).numpy
    sizes = {
        "q": ((1, tokens, case.heads, case.key_dim), dtype),
        "k": ((1, tokens, case.heads, case.key_dim), dtype),
        "v": ((1, tokens, hv, case.value_dim), dtype),
        "g": ((1, tokens, hv, case.key_dim), gate_dtype),
        "beta": ((1, tokens, hv), gate_dtype),
    }
    if recipe.initial_state:
        state = (len(case.seq_lens), hv, case.value_dim, case.key_dim)
        sizes["initial_state"] = (state, recipe.state_dtype.numpy)
    stages.begin(
        "making inputs",
        sum(-(-int(np.prod(s, dtype=np.int64)) // _DRAFT) for s, _ in sizes.values()),
    )
    arrays = {name: _normal(rng, shape, kind, stages) for name, (shape, kind) in sizes.items()}
    if options.gate is Gate.log_decay:
        g = arrays["g"].astype(np.float32)
        arrays["g"] = (options.lower_bound / (1 + np.exp(-g))).astype(gate_dtype)
    else:
        arrays["A_log"] = np.linspace(0.0, 0.5, hv, dtype=np.float32)
        bias = 0.1 * rng.standard_normal((hv, case.key_dim), dtype=np.float32)
        arrays["dt_bias"] = bias.astype(np.float32)
    if options.beta is Beta.probability:
        beta = arrays["beta"].astype(np.float32)
        arrays["beta"] = (1 / (1 + np.exp(-beta))).astype(gate_dtype)
    if len(case.seq_lens) > 1:
        arrays["cu_seqlens"] = np.concatenate([[0], np.cumsum(case.seq_lens)]).astype(np.int64)
    source = {"case": case.name, "seed": recipe.seed, "initial_state": recipe.initial_state}
    return Problem(case.name, arrays, options, recipe.state_dtype, source)
