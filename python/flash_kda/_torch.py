"""torch: the operator `torch.ops.flash_kda.forward`, and memory from torch's allocator.

Imported when it is first needed, never by `import flash_kda`. Eager calls on plain tensors bypass
the operator; torch.compile, torch.export, tensor subclasses and modes go through it.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from flash_kda import _C

# Mutated: out, final_state, checkpoint_states. The tensors come first, in the order of _C.forward.
_SCHEMA = (
    "forward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) out,"
    " Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, Tensor(b!)? final_state,"
    " Tensor? initial_state_indices, Tensor? final_state_indices, Tensor? cu_seqlens,"
    " Tensor(c!)? checkpoint_states, Tensor? checkpoint_sequences, Tensor? checkpoint_positions,"
    " Tensor? checkpoint_slots, int gate, int beta_kind, bool l2norm, float? lower_bound,"
    " float? scale, int threads, bool sequence_split, bool check_cu_seqlens, int value_split) -> ()"
)
_ARRAYS = 17
_ROWS, _OUT, _PARAMETERS = (0, 1, 2, 3), 5, (6, 7)  # q, k, v, g; A_log, dt_bias

_library = torch.library.Library("flash_kda", "DEF")
_library.define(_SCHEMA, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
_forward = torch.ops.flash_kda.forward.default
_NAMES = tuple(argument.name for argument in _forward._schema.arguments[:_ARRAYS])


def _run(*args: Any) -> None:
    arrays, options = args[:_ARRAYS], args[_ARRAYS:]
    try:
        _C.forward(arrays, options, True)
    except ValueError as error:
        if not run_with_copies(arrays, options, str(error)):
            raise


def _refuse_gradient(*args: Any) -> None:
    check_gradient(args[:_ARRAYS])
    with torch._C._AutoDispatchBelowAutograd():
        _forward(*args)


def _fake(*args: Any) -> None:
    """Everything is written in place: nothing to describe."""


_library.impl("forward", _run, "CPU")
_library.impl("forward", _run, "CUDA")
_library.impl("forward", _refuse_gradient, "Autograd")
torch.library.register_fake("flash_kda::forward", _fake, lib=_library)


def widened(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """With A_log and dt_bias in fp32 (exact) where they are torch tensors of 2-byte floats.

    `model.to(torch.bfloat16)` casts a layer's own parameters too.

    Args:
        arrays: Those of a call, in the order of `_C.forward`.
    """
    narrow = [
        i
        for i in _PARAMETERS
        if isinstance(arrays[i], torch.Tensor) and arrays[i].dtype in (torch.bfloat16, torch.half)
    ]
    if not narrow:
        return arrays
    return tuple(x.float() if i in narrow else x for i, x in enumerate(arrays))


def _is_misaligned(x: torch.Tensor) -> bool:
    """Whether a GPU's copy engine cannot follow the rows (src/cuda/sm90/tensor_map_layout.cpp)."""
    steps = [n for n, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    return bool(x.data_ptr() % 16) or any(n <= 0 or n * x.element_size() % 16 for n in steps)


def run_with_copies(arrays: tuple[Any, ...], options: tuple[Any, ...], refusal: str) -> bool:
    """Runs a call of plain tensors that was refused, with copies where a copy is what it takes.

    Those are `widened` parameters, and q, k, v, g and out that a GPU's copy engine cannot follow;
    out is copied back. They cost a pass over the tensor each, and memory from torch's allocator.

    Args:
        arrays: Those of the call, in the order of `_C.forward`.
        options: Likewise.
        refusal: The message.

    Returns:
        False where no copy helps, and nothing was done: the refusal stands.
    """
    wide = widened(arrays)
    if wide is not arrays:
        try:
            _C.forward(wide, options, True)
        except ValueError as error:
            if not run_with_copies(wide, options, str(error)):
                raise
        return True
    # The last thing that is asked about: all else about the call is right.
    if not re.search(r"(aligned to 16 bytes|strides) on CUDA", refusal):
        return False
    mended = [*arrays]
    for i in (*_ROWS, _OUT):
        if _is_misaligned(arrays[i]):
            # out too: rows past the last sequence keep what they hold.
            mended[i] = arrays[i].clone(memory_format=torch.contiguous_format)
    _C.forward(tuple(mended), options, True)
    if mended[_OUT] is not arrays[_OUT]:
        arrays[_OUT].copy_(mended[_OUT])
    return True


def check_gradient(arrays: tuple[torch.Tensor | None, ...]) -> None:
    """Raises NotImplementedError when autograd would record the call: it has no derivative.

    Args:
        arrays: The tensors of a call, in the order of `_C.forward`.
    """
    if not torch.is_grad_enabled():
        return
    for name, x in zip(_NAMES, arrays, strict=True):
        if x is not None and x.requires_grad:
            raise NotImplementedError(
                f"{name}: expected a tensor without requires_grad (flash_kda computes the forward"
                " pass only), got one with it; call under torch.no_grad() or pass"
                f" {name}.detach()"
            )


def dispatch(arrays: tuple[Any, ...], options: tuple[Any, ...]) -> None:
    """Runs a call through torch's dispatcher; the arguments are `_C.forward`'s."""
    check_gradient(arrays)
    _forward(*widened(arrays), *options)


class _Torch:
    """See `flash_kda._arrays.Library`."""

    def empty(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if shape == like.shape:  # the quickest of torch's ways
            return torch.empty_like(like, memory_format=torch.contiguous_format)
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def empty_float32(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=like.device)

    def empty_bytes(self, like: torch.Tensor, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=like.device)

    def transposed(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(-1, -2)

    def copy_dense(self, x: torch.Tensor) -> torch.Tensor:
        return x.contiguous()

    def is_row_dense(self, x: torch.Tensor) -> bool:
        return bool(x.shape[-1] <= 1 or x.stride(-1) == 1)

    def assign(self, target: torch.Tensor, value: torch.Tensor) -> None:
        target.copy_(value)

    def finished(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return x


LIBRARY = _Torch()
