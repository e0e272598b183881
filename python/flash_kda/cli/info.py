"""`flash-kda info`: what is installed and what of it can run here."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import sys
from typing import Any

from rich.table import Table

import flash_kda
from flash_kda.cli import backend
from flash_kda.cli.console import stdout, write_json

_LIBRARIES = (
    "numpy",
    "ml_dtypes",
    "torch",
    "jax",
    "cupy",
    "typer",
    "rich",
    "matplotlib",
    "safetensors",
)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def collect() -> dict[str, Any]:
    """Everything that `info` prints."""
    extension = importlib.import_module("flash_kda._C")
    cuda_missing = backend.cuda_missing()
    return {
        "version": flash_kda.__version__,
        "backends": [
            {"name": b.name, "available": b.available, "detail": b.detail}
            for b in flash_kda.backends()
        ],
        "command_line_device": "cpu" if cuda_missing else "cuda",
        "command_line_without_cuda_because": cuda_missing,
        "processor": backend.device_name("cpu"),
        "usable_cores": backend.usable_cores(),
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "package": str(flash_kda.__path__[0]),
        "extension": str(extension.__file__),
        "cmake_dir": str(flash_kda.cmake_dir()),
    }


def info(as_json: bool) -> int:
    """Prints it; returns the exit status."""
    record = collect()
    if as_json:
        write_json(record, None, to_stdout=True)
        return 0
    table = Table(title=f"flash-kda {record['version']}", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for item in record["backends"]:
        state = "available" if item["available"] else "unavailable"
        table.add_row(f"backend {item['name']}", f"{state}: {item['detail']}")
    why = record["command_line_without_cuda_because"]
    device = record["command_line_device"]
    table.add_row("--device auto", device if why is None else f"{device} ({why})")
    table.add_row("processor", f"{record['processor']}, {record['usable_cores']} usable cores")
    table.add_row("platform", f"{record['platform']}, Python {record['python']}")
    for name, version in record["libraries"].items():
        table.add_row(name, version or "not installed")
    for name in ("package", "extension", "cmake_dir"):
        table.add_row(name, record[name])
    stdout().print(table)
    return 0
