"""JAX: the pass as a foreign function of XLA, inside `jax.jit` and on GPUs.

XLA allocates the results, lends the workspace and names the stream, so that nothing is written that
JAX takes for constant and nothing waits. Imported when it is first needed.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from flash_kda import _C
from flash_kda._arrays import not_an_array

_TARGET = "flash_kda_forward"
_NAMES = (
    "q", "k", "v", "g", "beta", "out", "A_log", "dt_bias", "initial_state", "final_state",
    "initial_state_indices", "final_state_indices", "cu_seqlens",
)  # fmt: skip
_OUT, _FINAL_STATE = _NAMES.index("out"), _NAMES.index("final_state")


def needs_xla(arrays: tuple[Any, ...]) -> bool:
    """Whether a call's arrays are traced (no data yet), or one of them is JAX's on a GPU."""
    return any(
        isinstance(x, jax.core.Tracer)
        or (isinstance(x, jax.Array) and any(d.platform != "cpu" for d in x.devices()))
        for x in arrays
    )


@functools.cache
def _register() -> Any:
    """Registers the handlers once; returns `jax.ffi`."""
    ffi = getattr(jax, "ffi", None)
    if ffi is None:
        raise NotImplementedError(
            "jax: expected 0.5 or newer for arrays on a GPU and inside jax.jit, got"
            f" {jax.__version__}"
        )
    ffi.register_ffi_target(_TARGET, _C.xla_handler("cpu"), platform="cpu")
    ffi.register_ffi_target(_TARGET, _C.xla_handler("cuda"), platform="CUDA")
    return ffi


def forward(
    arrays: tuple[Any, ...], options: tuple[Any, ...], final_shape: tuple[int, ...] | None
) -> tuple[Any, Any]:
    """Runs or traces a call.

    Args:
        arrays: As `_C.forward`'s, with None for what is written.
        options: As `_C.forward`'s.
        final_shape: [N, HV, V, K], if final states are wanted.

    Returns:
        The outputs [B, T, HV, V], and the final states, float32, or None.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: A shape, dtype or number does not fit.
        NotImplementedError: This build or device does not serve the call.
    """
    ffi = _register()
    operands = [
        (i, _array(name, x))
        for i, (name, x) in enumerate(zip(_NAMES, arrays[: len(_NAMES)], strict=True))
        if x is not None or i < _OUT
    ]
    v = arrays[2]
    results = {_OUT: jax.ShapeDtypeStruct(v.shape, v.dtype)}
    if final_shape is not None:
        results[_FINAL_STATE] = jax.ShapeDtypeStruct(final_shape, np.float32)
    _check(dict(operands), results, options)
    call = ffi.ffi_call(_TARGET, list(results.values()), vmap_method="sequential")
    words = _words([i for i, _ in operands], list(results), options)
    try:
        out, *rest = call(*(x for _, x in operands), call=words)
    except jax.errors.JaxRuntimeError as error:
        raise _as_ours(error) from error
    return out, rest[0] if rest else None


def _array(name: str, x: Any) -> Any:
    if isinstance(x, jax.Array):
        return x
    if isinstance(x, np.ndarray):  # a constant of a traced function
        return jax.numpy.asarray(x)
    raise not_an_array(name, x)


def _check(operands: dict[int, Any], results: dict[int, Any], options: tuple[Any, ...]) -> None:
    """The rules about arguments on stand-ins of the same shapes: traced arrays have no data.

    Errors then name the argument, at the call and not when XLA runs it. The stand-ins' memory is
    reserved and never touched, but for integers, whose contents have rules of their own.
    """
    stand_ins: list[Any] = [None] * 17
    for i, x in (operands | results).items():
        make = np.zeros if np.issubdtype(x.dtype, np.integer) else np.empty
        stand_ins[i] = make(x.shape, x.dtype)
    gate, beta_kind, l2norm, bound, scale, threads, split, _, value_split = options
    # value_split is a GPU's affair; it still has to be an int.
    _C.plan(
        tuple(stand_ins),
        (gate, beta_kind, l2norm, bound, scale, threads, split, False, value_split),
    )


def _words(operands: list[int], results: list[int], options: tuple[Any, ...]) -> Any:
    """The call's attribute; bindings/xla_ffi.h lists its words."""
    gate, beta_kind, l2norm, bound, scale, threads, split, check_offsets, value_split = options
    numbers = np.array([0.0 if bound is None else bound, 0.0 if scale is None else scale])
    bound_words, scale_words = numbers.view(np.int32).reshape(2, 2).tolist()
    return np.array(
        [
            sum(1 << i for i in operands), sum(1 << i for i in results), gate, beta_kind, l2norm,
            threads, split, check_offsets, value_split, *bound_words, scale is not None,
            *scale_words,
        ],
        np.int32,
    )  # fmt: skip


def _as_ours(error: Exception) -> Exception:
    """The handler's error under its own type, where JAX tells it at the call."""
    kind, _, text = str(error).partition(": ")
    if kind == "UNIMPLEMENTED":
        return NotImplementedError(text)
    if kind == "INVALID_ARGUMENT":
        return ValueError(text)
    return error
