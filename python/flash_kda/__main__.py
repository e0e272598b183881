"""`python -m flash_kda`: the command line.

With `--cmake-dir`: the folder where find_package(flash_kda) finds this package.
"""

from __future__ import annotations

import sys

import flash_kda
from flash_kda.cli import main

if __name__ == "__main__":
    if sys.argv[1:] == ["--cmake-dir"]:
        print(flash_kda.cmake_dir())
    else:
        main()
