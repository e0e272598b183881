"""What `chunk_kda` needs of each array library: memory from its allocator, and transposed views.

The extension itself reads arrays of any library (bindings/arrays.cpp); here is only allocation.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import numpy as np

from flash_kda import _C

Shape = tuple[int, ...]


class Library(Protocol):
    """One array library. `like` is an array that gives the device."""

    def empty(self, like: Any, shape: Shape) -> Any:
        """A dense array of `shape` with the dtype and device of `like`, to be written by a call."""

    def empty_float32(self, like: Any, shape: Shape) -> Any:
        """A dense fp32 array of `shape` on the device of `like`, to be written by a call."""

    def empty_bytes(self, like: Any, size: int) -> Any:
        """`size` bytes (uint8) on the device of `like`."""

    def transposed(self, x: Any) -> Any:
        """A view of `x` with its last two dimensions swapped."""

    def copy_dense(self, x: Any) -> Any:
        """A row-major copy of `x`."""

    def is_row_dense(self, x: Any) -> bool:
        """Whether the last dimension of `x` is dense."""

    def assign(self, target: Any, value: Any) -> None:
        """Writes `value` into `target`, of the same shape."""

    def finished(self, x: Any, like: Any) -> Any:
        """An array from `empty` or `empty_float32`, once written, as the library's own."""


def not_an_array(name: str, x: Any) -> TypeError:
    """The error for an argument that is no array."""
    came = "None" if x is None else type(x).__name__
    return TypeError(
        f"{name}: expected an array (torch.Tensor, numpy.ndarray, or any other that speaks DLPack),"
        f" got {came}"
    )


def shape_of(name: str, x: Any, dims: str) -> Shape:
    """The shape of `x`, whose dimensions are `dims`, such as "[B, T, H, K]".

    Raises:
        TypeError: `x` is no array.
        ValueError: `x` has another number of dimensions.
    """
    try:  # not getattr with a default, which older torch.compile cannot trace
        shape = x.shape
    except AttributeError:
        raise not_an_array(name, x) from None
    if isinstance(x, type):
        raise not_an_array(name, x)
    if len(shape) != dims.count(",") + 1:
        raise ValueError(f"{name}: expected shape {dims}, got {list(shape)}")
    return tuple(shape)


class _NumpyLike:
    """NumPy, and CuPy, which has the same functions."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def empty(self, like: Any, shape: Shape) -> Any:
        return self._module.empty(shape, like.dtype)

    def empty_float32(self, like: Any, shape: Shape) -> Any:
        return self._module.empty(shape, np.float32)

    def empty_bytes(self, like: Any, size: int) -> Any:
        return self._module.empty(size, np.uint8)

    def transposed(self, x: Any) -> Any:
        return x.swapaxes(-1, -2)

    def copy_dense(self, x: Any) -> Any:
        return x.copy(order="C")

    def is_row_dense(self, x: Any) -> bool:
        return bool(x.shape[-1] <= 1 or x.strides[-1] == x.dtype.itemsize)

    def assign(self, target: Any, value: Any) -> None:
        target[...] = value

    def finished(self, x: Any, like: Any) -> Any:
        return x


class _Cupy(_NumpyLike):
    """CuPy: memory comes from the current device, so `like`'s is made current."""

    def empty(self, like: Any, shape: Shape) -> Any:
        with like.device:
            return super().empty(like, shape)

    def empty_float32(self, like: Any, shape: Shape) -> Any:
        with like.device:
            return super().empty_float32(like, shape)

    def empty_bytes(self, like: Any, size: int) -> Any:
        with like.device:
            return super().empty_bytes(like, size)


class _Jax(_NumpyLike):
    """JAX on the CPU: a call writes NumPy memory, which JAX then takes; its own is not written."""

    def __init__(self, jax: Any) -> None:
        super().__init__(np)
        self._jax = jax

    def copy_dense(self, x: Any) -> Any:
        return np.array(x, order="C")

    def transposed(self, x: Any) -> Any:
        return np.asarray(x).swapaxes(-1, -2)

    def finished(self, x: Any, like: Any) -> Any:
        if isinstance(x, self._jax.Array):
            return x
        return self._jax.device_put(x, next(iter(like.devices())))


_NUMPY = _NumpyLike(np)
_libraries: dict[type, Library] = {np.ndarray: _NUMPY}
_is_jax: dict[type, bool] = {type(None): False, np.ndarray: False}


def library_of(name: str, x: Any) -> Library:
    """The library of `x`, an argument called `name`.

    Raises:
        TypeError: `x` is no array, or its library is not known here.
    """
    found = _libraries.get(type(x))
    if found is None:
        found = _find_library(name, x)
        if len(_libraries) < 256:
            _libraries[type(x)] = found
    return found


def needs_xla(arrays: tuple[Any, ...]) -> bool:
    """Whether only XLA can run a call of these arrays: traced ones of JAX, and JAX's on a GPU."""
    if "jax" not in sys.modules:
        return False
    for x in arrays:
        is_jax = _is_jax.get(type(x))
        if is_jax is None:
            is_jax = isinstance(x, sys.modules["jax"].Array)
            if len(_is_jax) < 256:
                _is_jax[type(x)] = is_jax
        if is_jax:
            from flash_kda import _jax

            return _jax.needs_xla(arrays)
    return False


def _find_library(name: str, x: Any) -> Library:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        from flash_kda import _torch

        return _torch.LIBRARY
    if isinstance(x, np.ndarray):
        return _NUMPY
    if not hasattr(type(x), "__dlpack__"):
        raise not_an_array(name, x)
    package = type(x).__module__.partition(".")[0]
    if package == "cupy":
        return _Cupy(sys.modules["cupy"])
    if package in ("jax", "jaxlib"):
        if isinstance(x, sys.modules["jax"].core.Tracer):  # inside jax.jit: has no data
            raise not_an_array(name, x)
        return _Jax(sys.modules["jax"])
    raise TypeError(
        f"{name}: expected an array of torch, NumPy, CuPy or JAX, whose allocators chunk_kda knows,"
        f" got {type(x).__module__}.{type(x).__name__}; pass out= (and final_state=), or call fwd"
    )


def _allocate_workspace(q: Any, size: int) -> Any:
    """Called by the extension where q's type has no exchange API that lends memory."""
    try:
        library = library_of("q", q)
    except TypeError:
        raise NotImplementedError(
            f"q: expected a torch or CuPy array, whose allocator lends the {size} bytes of"
            f" workspace that this call needs, got {type(q).__module__}.{type(q).__name__}"
        ) from None
    return library.empty_bytes(q, size)


_C.set_workspace_allocator(_allocate_workspace)
