"""The `flash-kda` command (also `python -m flash_kda`).

The core package does not need what this needs (typer, rich, ml_dtypes; matplotlib for plots,
safetensors for such files): `pip install 'flash-kda[cli]'` brings them.
"""

from __future__ import annotations

import importlib
import sys

__all__ = ["main"]

_NEEDED = ("typer", "rich", "ml_dtypes")
INSTALL_HINT = "pip install 'flash-kda[cli]'"


def main() -> None:
    """Runs the command line with `sys.argv`; ends the process with its exit status."""
    for module in _NEEDED:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            print(
                f"flash-kda: error: the command line needs {module}, which is not installed: "
                f"{INSTALL_HINT}",
                file=sys.stderr,
            )
            raise SystemExit(2) from None
    from flash_kda.cli.app import app

    app(prog_name="flash-kda")
