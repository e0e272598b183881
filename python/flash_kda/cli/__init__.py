"""The `flash-kda` command (also `python -m flash_kda`).

The core package does not need what this needs (typer, rich, ml_dtypes; matplotlib for plots,
safetensors for such files): `pip install 'flash-kda[cli]'` brings them.
"""

from __future__ import annotations

import sys

__all__ = ["main"]

INSTALL_HINT = "pip install 'flash-kda[cli]'"


def main() -> None:
    """Runs the command line with `sys.argv`; ends the process with its exit status."""
    try:
        from flash_kda.cli.app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in {"typer", "rich", "ml_dtypes"}:
            raise
        print(
            f"flash-kda: the command line needs {error.name}, which is not installed: "
            f"{INSTALL_HINT}",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    app(prog_name="flash-kda")
