from collections.abc import Callable
from typing import Any, Final, TypeAlias

GATE_LOWER_BOUND: Final[int]
GATE_SOFTPLUS: Final[int]
GATE_LOG_DECAY: Final[int]
BETA_LOGIT: Final[int]
BETA_DOUBLED_LOGIT: Final[int]
BETA_PROBABILITY: Final[int]

class Plan:
    """What runs for arguments of certain shapes and options."""

    @property
    def backend(self) -> str:
        """Either "cpu" or "cuda-sm90"."""
    @property
    def batch(self) -> int:
        """B."""
    @property
    def tokens(self) -> int:
        """T."""
    @property
    def sequences(self) -> int:
        """N."""
    @property
    def key_heads(self) -> int:
        """H."""
    @property
    def value_heads(self) -> int:
        """HV."""
    @property
    def key_dim(self) -> int:
        """K."""
    @property
    def value_dim(self) -> int:
        """V."""
    @property
    def varlen(self) -> bool:
        """Whether cu_seqlens is given."""
    @property
    def chunk(self) -> int:
        """Tokens a step of the algorithm."""
    @property
    def threads(self) -> int:
        """CPU: number of threads."""
    @property
    def value_split(self) -> int:
        """CUDA: thread blocks that share a head."""
    @property
    def sequence_segments(self) -> int:
        """CUDA: the most segments that a sequence is cut into."""
    @property
    def grid(self) -> int:
        """CUDA: number of thread blocks."""
    @property
    def multiprocessors(self) -> int:
        """CUDA: of the device that the plan is for; 0 on the CPU."""
    @property
    def workspace_bytes(self) -> int:
        """Scratch memory of a call, in bytes."""
    @property
    def reason(self) -> str:
        """Why this and not another choice, in one line."""
    def describe(self) -> str:
        """All of it, in several lines for people."""

class BackendInfo:
    """A backend and whether it can run here."""

    @property
    def name(self) -> str:
        """Either "cpu" or "cuda-sm90"."""
    @property
    def available(self) -> bool:
        """Whether it can run here and now."""
    @property
    def detail(self) -> str:
        """Instruction set and threads, devices, or why it is not available."""

def fwd(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: float | None,
    out: Any,
    A_log: Any,
    dt_bias: Any,
    lower_bound: float | None,
    initial_state: Any,
    final_state: Any,
    cu_seqlens: Any,
    /,
) -> bool: ...

# q, k, v, g, beta, out, A_log, dt_bias, initial_state, final_state, initial_state_indices,
# final_state_indices, cu_seqlens, checkpoint_states, checkpoint_sequences, checkpoint_positions,
# checkpoint_slots
_Arrays: TypeAlias = tuple[Any, ...]

# gate, beta_kind, l2norm, lower_bound, scale, threads, sequence_split, check_cu_seqlens,
# value_split
_Options: TypeAlias = tuple[Any, ...]

# False: nothing was done, the call must go through torch's dispatcher.
def forward(arrays: _Arrays, options: _Options, inside_dispatcher: bool, /) -> bool: ...
def plan(arrays: _Arrays, options: _Options, /) -> Plan | None: ...
def set_workspace_allocator(allocate: Callable[[Any, int], Any], /) -> None: ...

# "cpu" or "cuda": the pass as a foreign function of XLA (bindings/xla_ffi.h).
def xla_handler(platform: str, /) -> Any: ...
def backends() -> list[BackendInfo]: ...
def version() -> str: ...
