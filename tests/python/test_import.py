"""Importing the package beside others: what it exports, loads and leaves as it was."""

from __future__ import annotations

import importlib.util
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from flash_kda import _C

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files and /proc")
OTHERS = [n for n in ("numpy", "ml_dtypes", "torch", "jax") if importlib.util.find_spec(n)]


def run(code: str) -> str:
    """What `code` prints in a fresh interpreter, whose imports are its own."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def defined_dynamic_symbols(file: Path) -> set[str]:
    """Names that the dynamic linker may bind other objects to (64-bit little-endian ELF)."""
    data = file.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01"
    (sections_at,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", data, sections_at + size * i) for i in range(count)
    ]
    names = set()
    for _, kind, _, _, offset, length, link, *_ in sections:
        if kind != 11:  # SHT_DYNSYM
            continue
        strings = sections[link][4]
        for at in range(offset, offset + length, 24):
            name, info, _, section = struct.unpack_from("<IBBH", data, at)
            if section != 0 and info >> 4 != 0:  # defined here, and not local
                begin = strings + name
                names.add(data[begin : data.index(b"\0", begin)].decode())
    return names


@LINUX
def test_only_the_init_function_is_exported():
    """A type name or a unique symbol of ours could stand in for another module's."""
    assert defined_dynamic_symbols(Path(_C.__file__)) == {"PyInit__C"}


@LINUX
def test_the_reader_of_symbols_sees_more_where_there_is_more():
    import numpy as np

    file = Path(np._core._multiarray_umath.__file__)
    assert any(name.startswith("PyInit_") for name in defined_dynamic_symbols(file))


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("first", [True, False], ids=["flash_kda first", "flash_kda last"])
def test_any_order(other, first):
    order = ["flash_kda", other] if first else [other, "flash_kda"]
    use = {
        "ml_dtypes": "print(*(str(t(0.5)) for t in (ml_dtypes.bfloat16, ml_dtypes.float4_e2m1fn)))",
        "torch": "print(torch.ones(2).sum().item())",
        "jax": "print(float(jax.numpy.ones(2).sum()))",
        "numpy": "print(numpy.ones(2).sum())",
    }[other]
    assert (
        run(f"import {', '.join(order)}\n{use}\nprint(flash_kda.backends()[0].name)").split()[-1]
        == "cpu"
    )


def test_floating_point_arithmetic_is_left_alone():
    """No flush to zero, no other rounding: a start-up file of -ffast-math would bring both."""
    code = "{}\nx = 5e-324\nprint(x + x, x / 2, 1 + 2**-53, 0.1 + 0.2, 1 / 3)"
    assert run(code.format("import flash_kda")) == run(code.format(""))


@LINUX
def test_neither_driver_nor_runtime_nor_torch_is_loaded():
    maps = run("import flash_kda, sys\nprint(*sys.modules)\nprint(open('/proc/self/maps').read())")
    modules, _, files = maps.partition("\n")
    assert "flash_kda" in modules.split()
    assert not {"torch", "jax", "cupy", "ml_dtypes"} & set(modules.split())
    assert "_C." in files
    assert "libcuda" not in files
