"""torch: the operator `torch.ops.flash_kda.forward`, and memory from torch's allocator.

Imported when it is first needed, never by `import flash_kda`. Eager calls on plain tensors bypass
the operator; torch.compile, torch.export, tensor subclasses and modes go through it.
"""

from __future__ import annotations

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

_library = torch.library.Library("flash_kda", "DEF")
_library.define(_SCHEMA, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
_forward = torch.ops.flash_kda.forward.default
_NAMES = tuple(argument.name for argument in _forward._schema.arguments[:_ARRAYS])


def _run(*args: Any) -> None:
    _C.forward(args[:_ARRAYS], args[_ARRAYS:], True)


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
    _forward(*arrays, *options)


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
