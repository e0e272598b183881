"""Reads and writes tensors: NumPy .npz archives and .safetensors files, bfloat16 included.

An .npz archive has no bfloat16: `np.savez` stores an ml_dtypes array as two raw bytes an element
("|V2"), and such arrays, like those of type uint16, are read back as bfloat16 bits.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from flash_kda.cli.console import UserError, require
from flash_kda.cli.problem import Array

SUFFIXES = (".npz", ".safetensors")


def _check_suffix(path: Path, option: str) -> None:
    if path.suffix not in SUFFIXES:
        raise UserError(
            f"{option} {path}: expected a name that ends in {' or '.join(SUFFIXES)}, "
            f"got '{path.suffix or 'no suffix'}'"
        )


def check_tensor_path(path: Path, option: str) -> None:
    """Refuses a name that `save_tensors` cannot serve."""
    _check_suffix(path, option)
    if path.suffix == ".safetensors":
        require("safetensors.numpy", f"{option} {path.name}")


def _as_bfloat16(array: Array) -> Array:
    if array.dtype == np.uint16 or (array.dtype.kind == "V" and array.dtype.itemsize == 2):
        return array.view(ml_dtypes.bfloat16)
    return array


def _load_npz(path: Path) -> dict[str, Array]:
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise UserError(f"--input {path}: not an .npz archive but a single array")
        with archive:
            return {name: _as_bfloat16(archive[name]) for name in archive.files}
    except (ValueError, zipfile.BadZipFile, EOFError, KeyError) as error:
        raise UserError(f"--input {path}: not a readable .npz archive ({error})") from None


def _load_safetensors(path: Path) -> dict[str, Array]:
    safetensors = require("safetensors", f"--input {path.name}")
    numpy_io = require("safetensors.numpy", f"--input {path.name}")
    try:
        tensors: dict[str, Any] = numpy_io.load_file(path)
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"--input {path}: not a readable safetensors file ({error})") from None
    return {name: _as_bfloat16(np.asarray(tensor)) for name, tensor in tensors.items()}


def load_tensors(path: Path) -> dict[str, Array]:
    """The arrays of a file by name."""
    if path.is_dir():
        raise UserError(f"--input {path}: this is a folder; a file is expected")
    if not path.exists():
        raise UserError(f"--input {path}: no such file")
    _check_suffix(path, "--input")
    if path.stat().st_size == 0:
        raise UserError(f"--input {path}: the file is empty")
    return _load_npz(path) if path.suffix == ".npz" else _load_safetensors(path)


def save_tensors(path: Path, tensors: dict[str, Array]) -> None:
    """Writes arrays by name; `check_tensor_path` has passed."""
    if path.suffix == ".npz":
        arrays: dict[str, Any] = {n: np.ascontiguousarray(a) for n, a in tensors.items()}
        np.savez(path, **arrays)
        return
    numpy_io = require("safetensors.numpy", f"--output {path.name}")
    numpy_io.save_file(
        {name: np.ascontiguousarray(array) for name, array in tensors.items()}, str(path)
    )
