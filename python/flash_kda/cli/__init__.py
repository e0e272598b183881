"""The `flash-kda` command (also `python -m flash_kda`).

The core package does not need what this needs (typer, rich, ml_dtypes; matplotlib for plots,
safetensors for such files): `pip install 'flash-kda[cli]'` brings them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import sys

__all__ = ["main"]

_NEEDED = ("typer", "rich", "ml_dtypes")
INSTALL_HINT = "pip install 'flash-kda[cli]'"


def _missing(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return True
    return False


def main() -> None:
    """Runs the command line with `sys.argv`; ends the process with its exit status."""
    if not faulthandler.is_enabled() and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no real standard error
            faulthandler.enable()  # a crash below Python says where it came from
    missing = [module for module in _NEEDED if _missing(module)]
    if missing:
        print(
            f"flash-kda: error: the command line needs {', '.join(missing)}, which is not "
            f"installed: {INSTALL_HINT}",
            file=sys.stderr,
        )
        raise SystemExit(2)
    from flash_kda.cli.app import app

    app(prog_name="flash-kda")
