"""Kimi Delta Attention (KDA), the forward pass, on CPUs and Hopper GPUs.

The package itself needs NumPy at most: no GPU, no driver and no torch. Arrays may be of any library
that speaks DLPack (torch, NumPy with ml_dtypes' bfloat16, CuPy, JAX).

- `fwd`: the call that flash-linear-attention's FlashKDA backend makes; writes `out`.
- `chunk_kda`: flash-linear-attention's names and meaning, and every option of this library.
- `plan_forward`: what a `chunk_kda` call would run.
- `reference.recurrent_kda`: the recurrence, token by token, in NumPy.
"""

from __future__ import annotations

import importlib
import pathlib
from types import ModuleType

from flash_kda import _C
from flash_kda._C import BackendInfo, Plan
from flash_kda._call import chunk_kda, fwd, plan_forward

__all__ = [
    "BackendInfo",
    "Plan",
    "__version__",
    "backends",
    "chunk_kda",
    "cmake_dir",
    "fwd",
    "include_dir",
    "plan_forward",
]

__version__ = _C.version()

# Found on first use, so that `import flash_kda` stays quick.
_SUBMODULES = frozenset({"cli", "inputs", "metrics", "reference"})


def backends() -> list[BackendInfo]:
    """Every backend the library knows, available or not; works without a driver."""
    return _C.backends()


def cmake_dir() -> str:
    """The directory for CMake's `-Dflash_kda_DIR=`, which makes `find_package(flash_kda)` work."""
    return str(_installed() / "lib" / "cmake" / "flash_kda")


def include_dir() -> str:
    """The directory that holds `flash_kda/flash_kda.h`."""
    return str(_installed() / "include")


def _installed() -> pathlib.Path:
    # Beside the extension module: in an editable install the Python sources lie elsewhere.
    if _C.__file__ is None:  # pragma: no cover - a built extension always has a file
        raise RuntimeError("flash_kda._C has no file on disk")
    return pathlib.Path(_C.__file__).resolve().parent


def __getattr__(name: str) -> ModuleType:
    if name in _SUBMODULES:
        return importlib.import_module(f"flash_kda.{name}")
    raise AttributeError(f"module 'flash_kda' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES})
