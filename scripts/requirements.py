"""Prints the requirements of pyproject.toml for scripts/setup.sh, one a line: demo, test or dev.

Those of the build come with them, since the package is then built without isolation.
"""

from __future__ import annotations

import pathlib
import re
import sys

EXTRAS = {"demo": "cli", "test": "test", "dev": "dev"}
# The build front end brings these itself when it isolates the build.
BUILD_TOOLS = ("cmake>=3.26", "ninja>=1.10")


def _load(path: pathlib.Path) -> dict[str, object]:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10: pip carries a copy
        from pip._vendor import tomli as tomllib  # type: ignore[no-redef]
    with path.open("rb") as file:
        return tomllib.load(file)


def main() -> None:
    """Prints the list for the kind named on the command line."""
    if len(sys.argv) != 2 or sys.argv[1] not in EXTRAS:
        sys.exit(f"usage: requirements.py {'|'.join(EXTRAS)}")
    root = pathlib.Path(__file__).resolve().parent.parent
    config: dict[str, dict] = _load(root / "pyproject.toml")  # type: ignore[type-arg,assignment]
    wanted = [*config["build-system"]["requires"], *BUILD_TOOLS, *config["project"]["dependencies"]]
    pending = [EXTRAS[sys.argv[1]]]
    while pending:
        for requirement in config["project"]["optional-dependencies"][pending.pop()]:
            own = re.fullmatch(r"flash-kda\[(\w+)\]", requirement)
            if own:
                pending.append(own[1])
            else:
                wanted.append(requirement)
    print("\n".join(dict.fromkeys(wanted)))


if __name__ == "__main__":
    main()
