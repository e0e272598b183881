"""The user functions `fwd`, `chunk_kda` and `plan_forward`."""

from __future__ import annotations

import sys
import warnings
from typing import Any, NamedTuple, cast

from flash_kda import _C, _arrays
from flash_kda._C import (
    BETA_DOUBLED_LOGIT,
    BETA_LOGIT,
    BETA_PROBABILITY,
    GATE_LOG_DECAY,
    GATE_LOWER_BOUND,
    GATE_SOFTPLUS,
    Plan,
)


def _compiling() -> bool:
    """Whether torch.compile or torch.export is tracing us; they cannot see into the extension."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def _widened(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """See `flash_kda._torch.widened`; other libraries' arrays stay as they are."""
    if "torch" not in sys.modules:
        return arrays
    from flash_kda import _torch

    return _torch.widened(arrays)


def _run_with_copies(
    arrays: tuple[Any, ...], options: tuple[Any, ...], refusal: ValueError
) -> bool:
    """See `flash_kda._torch.run_with_copies`; False for other libraries' arrays."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(arrays[0], torch.Tensor):
        return False
    from flash_kda import _torch

    return _torch.run_with_copies(arrays, options, str(refusal))


def _dispatch(arrays: tuple[Any, ...], options: tuple[Any, ...]) -> None:
    from flash_kda import _torch

    _torch.dispatch(arrays, options)


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
    initial_state: Any = None,
    final_state: Any = None,
    cu_seqlens: Any = None,
) -> None:
    """Writes the outputs of KDA to `out`, and the last states to `final_state` if given.

    The call that flash-linear-attention's FlashKDA backend makes: q and k are normalised, `g` goes
    through the bounded gate `lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`, `beta` through a
    sigmoid. B batch, T tokens, N sequences (B without `cu_seqlens`), H key heads, HV value heads,
    K and V head sizes. The last dimension of every array is dense; all other strides are free.

    Args:
        q: Queries [B, T, H, K], bfloat16 (on the CPU also float16, float32).
        k: Keys [B, T, H, K], as `q`.
        v: Values [B, T, HV, V], as `q`; HV is a multiple of H.
        g: Raw gate [B, T, HV, K], bfloat16 or float32.
        beta: Logits of the writing strength [B, T, HV], bfloat16 or float32.
        scale: Factor of the output; None: `K ** -0.5`.
        out: Outputs [B, T, HV, V], as `q`; written, but for rows at or past `cu_seqlens[-1]`.
        A_log: HV elements, float32 (torch: 2-byte floats too, which are widened first); None: its
            exponential is 1.
        dt_bias: [HV, K] or [HV * K], likewise; None: zeros.
        lower_bound: The gate's bound, in [-5, 0]. None is an error: there is no silent default.
        initial_state: States before the first token [N, HV, V, K], bfloat16 or float32; None:
            zeros.
        final_state: States after the last token, likewise; written. None: they are not stored.
            May be the same memory as `initial_state`.
        cu_seqlens: Offsets of packed sequences [N + 1], int32 or int64, on q's device; then B is 1.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: A shape, dtype, stride, device or number does not fit.
        NotImplementedError: This build or device does not serve the call, or a gradient is asked
            for.
        RuntimeError: CUDA reported an error.
    """
    if not _compiling():
        try:
            if _C.fwd(
                q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound,
                initial_state, final_state, cu_seqlens,
            ):  # fmt: skip
                return
        except ValueError as error:  # the usual call pays nothing for this question
            arrays, options = _forward_arguments(
                q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound,
                initial_state, final_state, cu_seqlens,
            )  # fmt: skip
            if not _run_with_copies(arrays, options, error):
                raise
            return
    if lower_bound is None:
        raise ValueError("lower_bound: expected a number in [-5, 0], got None")
    arrays, options = _forward_arguments(
        q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound,
        initial_state, final_state, cu_seqlens,
    )  # fmt: skip
    _dispatch(arrays, options)


def _forward_arguments(
    q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any, out: Any, A_log: Any, dt_bias: Any,
    lower_bound: Any, initial_state: Any, final_state: Any, cu_seqlens: Any,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
    """The call of `fwd` as `_C.forward` takes it."""
    arrays = (
        q, k, v, g, beta, out, A_log, dt_bias, initial_state, final_state, None, None, cu_seqlens,
        None, None, None, None,
    )  # fmt: skip
    return arrays, (GATE_LOWER_BOUND, BETA_LOGIT, True, lower_bound, scale, 0, True, False, 0)


def chunk_kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Any = None,
    dt_bias: Any = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
    out: Any = None,
    final_state: Any = None,
    initial_state_indices: Any = None,
    final_state_indices: Any = None,
    checkpoint_states: Any = None,
    checkpoint_sequences: Any = None,
    checkpoint_positions: Any = None,
    checkpoint_slots: Any = None,
    threads: int = 0,
    sequence_split: bool = True,
    value_split: int = 0,
    check_cu_seqlens: bool = False,
    _plan_only: bool = False,
) -> tuple[Any, Any]:
    """KDA with flash-linear-attention's names and meaning, and every option of this library.

    B batch, T tokens, N sequences (B without `cu_seqlens`), H key heads, HV value heads (a multiple
    of H), K and V head sizes. The last dimension of every array is dense; all other strides are
    free.

    Args:
        q: Queries [B, T, H, K], bfloat16 (on the CPU also float16, float32).
        k: Keys [B, T, H, K], as `q`.
        v: Values [B, T, HV, V], as `q`.
        g: Log decay (at most 0) or raw gate [B, T, HV, K], bfloat16, float32 or as `q`.
        beta: Writing strength or its logits [B, T, HV], bfloat16, float32 or as `q`.
        scale: Factor of the output; None: `K ** -0.5`.
        initial_state: States before the first token, bfloat16 or float32; None: zeros. Its layout
            is `state_v_first`'s. With `initial_state_indices`, a pool [slots, ...].
        output_final_state: Return the states after the last token (float32 unless `final_state` is
            given).
        use_qk_l2norm_in_kernel: Divide rows of q and k by `sqrt(sum(x * x) + 1e-6)`.
        use_gate_in_kernel: `g` is raw: with `lower_bound`, the log decay is
            `lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`, without it
            `-exp(A_log) * softplus(g + dt_bias)`. Otherwise `g` is the log decay itself.
        use_beta_sigmoid_in_kernel: `beta` is a logit: the strength is `sigmoid(beta)`.
        allow_neg_eigval: The strength is `2 * sigmoid(beta)`; needs `use_beta_sigmoid_in_kernel`.
        safe_gate: With `use_gate_in_kernel`, `lower_bound` must be given. No other effect here.
        lower_bound: In [-5, 0]; see `use_gate_in_kernel`. Without that, a statement about `g` that
            is not used.
        disable_recompute: About training; no effect here.
        return_intermediate_states: Not served; see `checkpoint_states`.
        state_v_first: States are [N, HV, V, K], which is this library's own layout and costs
            nothing. False: [N, HV, K, V]; a state given so is copied unless it is a transposed view
            of the own layout, and the final state returned is such a view.
        cu_seqlens: Offsets of packed sequences [N + 1], int32 or int64, on q's device; then B is 1.
        cu_seqlens_cpu: No effect here: the offsets are never needed on the host.
        cp_context: Not served.
        use_graph: No effect here: a CUDA graph can capture any call.
        max_num_seqs: No effect here.
        A_log: HV elements, float32 (torch: 2-byte floats too, which are widened first); None: its
            exponential is 1 (bounded gate only).
        dt_bias: [HV, K] or [HV * K], likewise; None: zeros.
        chunk_size: 32 or 64. No effect here.
        transpose_state_layout: Deprecated name of `state_v_first`.
        out: Takes the outputs, [B, T, HV, V] as `q`; None: it is allocated. Rows at or past
            `cu_seqlens[-1]` are not written.
        final_state: Takes the final states, bfloat16 or float32, in `state_v_first`'s layout.
            With `final_state_indices`, a pool. May be the same memory as `initial_state`.
        initial_state_indices: Slots [N], int32 or int64; negative: that sequence starts from zeros.
        final_state_indices: Slots [N], int32 or int64; negative: that state is not stored.
        checkpoint_states: [slots, ...] like a pool; slot `checkpoint_slots[i]` takes the state
            after `checkpoint_positions[i]` tokens of sequence `checkpoint_sequences[i]`.
        checkpoint_sequences: [M], int32 or int64.
        checkpoint_positions: [M], int32 or int64, multiples of 64.
        checkpoint_slots: [M], int32 or int64; negative: not stored.
        threads: CPU threads; 0: all that the process may use. Never changes results.
        sequence_split: CUDA: one long sequence may be cut into segments (changes rounding only).
        value_split: CUDA: thread blocks a head; 0: chosen. Never changes results.
        check_cu_seqlens: CUDA: check the offsets on the host, which waits for the device.

    Returns:
        The outputs [B, T, HV, V], and the final states (None unless asked for).

    Raises:
        TypeError: An argument is of the wrong kind, or a keyword is unknown.
        ValueError: A shape, dtype, stride, device or number does not fit.
        NotImplementedError: This build or device does not serve the call, or a gradient is asked
            for.
        RuntimeError: CUDA reported an error.
    """
    _check_served(return_intermediate_states, cp_context, chunk_size)
    if transpose_state_layout is not None:
        state_v_first = _renamed_layout(transpose_state_layout, state_v_first)
    gate = _gate_kind(use_gate_in_kernel, safe_gate, lower_bound)
    beta_kind = _beta_kind(use_beta_sigmoid_in_kernel, allow_neg_eigval)

    compiling = _compiling()
    values = _arrays.shape_of("v", v, "[B, T, HV, V]")
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state, initial_state_indices, cu_seqlens)
    if not compiling and _arrays.needs_xla(inputs):
        written = {
            "out": out, "final_state": final_state, "final_state_indices": final_state_indices,
            "checkpoint_states": checkpoint_states,
        }  # fmt: skip
        options = (
            gate, beta_kind, use_qk_l2norm_in_kernel, lower_bound, scale, threads, sequence_split,
            check_cu_seqlens, value_split,
        )  # fmt: skip
        return _through_xla(
            inputs, written, options, _flag("output_final_state", output_final_state),
            _flag("state_v_first", state_v_first), _plan_only,
        )  # fmt: skip
    out_given = out is not None
    if not out_given:
        out = _library_of("v", v, compiling).empty(v, values)
    final_given = final_state is not None
    if not final_given and _flag("output_final_state", output_final_state):
        if final_state_indices is not None:
            raise ValueError(
                "final_state_indices: expected None without final_state (the pool), got indices"
            )
        shape = _state_shape(q, values, cu_seqlens)
        final_state = _library_of("v", v, compiling).empty_float32(v, shape)
    own = _States(initial_state, final_state, checkpoint_states, None)
    if not _flag("state_v_first", state_v_first):
        pools = (initial_state_indices is not None, final_state_indices is not None)
        own = _own_layout(own, final_given, pools, compiling)

    arrays = (
        q, k, v, g, beta, out, A_log, dt_bias, own.initial, own.final, initial_state_indices,
        final_state_indices, cu_seqlens, own.checkpoints, checkpoint_sequences,
        checkpoint_positions, checkpoint_slots,
    )  # fmt: skip
    options = (
        gate, beta_kind, use_qk_l2norm_in_kernel, lower_bound, scale, threads, sequence_split,
        check_cu_seqlens, value_split,
    )  # fmt: skip
    if _plan_only:
        return _C.plan(_widened(arrays), options), None
    try:
        done = not compiling and _C.forward(arrays, options, False)
    except ValueError as error:
        done = _run_with_copies(arrays, options, error)
        if not done:
            raise
    if not done:
        _dispatch(arrays, options)

    if own.final_target is not None:
        target = _library_of("final_state", own.final_target, compiling)
        target.assign(own.final_target, target.transposed(own.final))
    if not out_given:
        out = _library_of("v", v, compiling).finished(out, v)
    if final_state is not None and not final_given:
        library = _library_of("v", v, compiling)
        if not state_v_first:
            final_state = library.transposed(final_state)
        final_state = library.finished(final_state, v)
    return out, final_state


def plan_forward(*args: Any, **kwargs: Any) -> Plan:
    """What `chunk_kda` would run for the same arguments; nothing is computed.

    Takes the arguments of `chunk_kda` and raises what it raises. `describe()` prints the answer.
    """
    plan, _ = chunk_kda(*args, **kwargs, _plan_only=True)
    if plan is None:
        raise NotImplementedError(
            "plan_forward: expected plain arrays, got a torch.Tensor subclass or an active mode"
        )
    return cast(Plan, plan)


def _library_of(name: str, x: Any, compiling: bool) -> _arrays.Library:
    if compiling:
        from flash_kda import _torch

        return _torch.LIBRARY
    return _arrays.library_of(name, x)


def _through_xla(
    inputs: tuple[Any, ...], written: dict[str, Any], options: tuple[Any, ...], final: bool,
    state_v_first: bool, plan_only: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """`chunk_kda` of JAX arrays that XLA has to run: traced ones, and those on a GPU."""
    from flash_kda import _jax

    if plan_only:
        raise NotImplementedError(
            "plan_forward: expected arrays of torch, NumPy or CuPy, or JAX's on the CPU and outside"
            " jax.jit, got others of JAX, which XLA plans when it runs them"
        )
    for name, x in written.items():
        if x is not None:
            raise ValueError(
                f"{name}: expected None with JAX arrays on a GPU or inside jax.jit, whose results"
                f" are new arrays, got {type(x).__name__}"
            )
    q, k, v, g, beta, A_log, dt_bias, initial, slots, offsets = inputs
    values = _arrays.shape_of("v", v, "[B, T, HV, V]")
    shape = _state_shape(q, values, offsets) if final else None
    if initial is not None and not state_v_first:
        _arrays.shape_of("initial_state", initial, "[N, HV, K, V]")
        initial = initial.swapaxes(-1, -2)
    arrays = (
        q, k, v, g, beta, None, A_log, dt_bias, initial, None, slots, None, offsets, None, None,
        None, None,
    )  # fmt: skip
    out, states = _jax.forward(arrays, options, shape)
    if states is not None and not state_v_first:
        states = states.swapaxes(-1, -2)
    return out, states


def _flag(name: str, value: Any) -> bool:
    if value is True or value is False:
        return value
    if type(value).__name__ in ("bool", "bool_"):  # NumPy's
        return bool(value)
    raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")


def _check_served(return_intermediate_states: Any, cp_context: Any, chunk_size: Any) -> None:
    if _flag("return_intermediate_states", return_intermediate_states):
        raise NotImplementedError(
            "return_intermediate_states: expected False, got True; no backend returns the states of"
            " all chunks: pass checkpoint_states and the positions wanted"
        )
    if cp_context is not None:
        raise NotImplementedError(
            f"cp_context: expected None, got {type(cp_context).__name__}; no backend splits a"
            " sequence over several processes"
        )
    if chunk_size not in (32, 64):
        raise ValueError(f"chunk_size: expected 32 or 64, got {chunk_size!r}")


def _renamed_layout(transpose_state_layout: Any, state_v_first: Any) -> bool:
    if state_v_first:
        raise ValueError(
            "transpose_state_layout: expected only state_v_first, its new name, got both"
        )
    warnings.warn(
        "transpose_state_layout is deprecated and renamed to state_v_first",
        DeprecationWarning,
        stacklevel=3,
    )
    return _flag("transpose_state_layout", transpose_state_layout)


def _gate_kind(use_gate_in_kernel: Any, safe_gate: Any, lower_bound: float | None) -> int:
    safe = _flag("safe_gate", safe_gate)
    if not _flag("use_gate_in_kernel", use_gate_in_kernel):
        return GATE_LOG_DECAY
    if lower_bound is not None:
        return GATE_LOWER_BOUND
    if safe:
        raise ValueError(
            "lower_bound: expected a number in [-5, 0] with safe_gate=True and"
            " use_gate_in_kernel=True, got None"
        )
    return GATE_SOFTPLUS


def _beta_kind(use_beta_sigmoid_in_kernel: Any, allow_neg_eigval: Any) -> int:
    doubled = _flag("allow_neg_eigval", allow_neg_eigval)
    if _flag("use_beta_sigmoid_in_kernel", use_beta_sigmoid_in_kernel):
        return BETA_DOUBLED_LOGIT if doubled else BETA_LOGIT
    if doubled:
        raise ValueError(
            "allow_neg_eigval: expected False without use_beta_sigmoid_in_kernel=True, got True"
            " (a given strength may be up to 2 as it is)"
        )
    return BETA_PROBABILITY


def _state_shape(q: Any, values: _arrays.Shape, cu_seqlens: Any) -> _arrays.Shape:
    """[N, HV, V, K]."""
    batch, _, _, key_dim = _arrays.shape_of("q", q, "[B, T, H, K]")
    if cu_seqlens is not None:
        offsets = _arrays.shape_of("cu_seqlens", cu_seqlens, "[N + 1]")
        if offsets[0] < 1:
            raise ValueError("cu_seqlens: expected [N + 1] elements, got none")
        batch = offsets[0] - 1
    return (batch, values[2], values[3], key_dim)


class _States(NamedTuple):
    """State arrays of a call, and the caller's array that takes a transposed copy of `final`."""

    initial: Any
    final: Any
    checkpoints: Any
    final_target: Any


def _own_layout(
    given: _States, final_given: bool, pools: tuple[bool, bool], compiling: bool
) -> _States:
    """[N, HV, K, V] arrays as the own [N, HV, V, K]: a view where K is dense, else a copy."""
    initial, final, checkpoints, target = given
    if initial is not None:
        view = _own_view("initial_state", initial, pools[0], compiling)
        if view is None:
            library = _library_of("initial_state", initial, compiling)
            view = library.copy_dense(library.transposed(initial))
        initial = view
    if final is not None and final_given:
        view = _own_view("final_state", final, pools[1], compiling)
        if view is None:
            n, hv, k, v = final.shape
            library = _library_of("final_state", final, compiling)
            view, target = library.empty(final, (n, hv, v, k)), final
        final = view
    if checkpoints is not None:
        checkpoints = _own_view("checkpoint_states", checkpoints, True, compiling)
    return _States(initial, final, checkpoints, target)


def _own_view(name: str, x: Any, is_pool: bool, compiling: bool) -> Any:
    """`x`, [N, HV, K, V], as a view [N, HV, V, K] with dense rows; None where it takes a copy."""
    library = _library_of(name, x, compiling)
    _arrays.shape_of(name, x, "[N, HV, K, V]")
    view = library.transposed(x)
    if library.is_row_dense(view):
        return view
    if is_pool:
        raise ValueError(
            f"{name}: expected, with state_v_first=False, a transposed view of a [slots, HV, V, K]"
            " pool (a pool is not copied), got one whose dimension K is not dense; pass"
            " state_v_first=True for a pool [slots, HV, V, K]"
        )
    return None
