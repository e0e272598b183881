"""The C++ library inside the installed Python package."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import flash_kda


def test_cmake_finds_the_installed_package(tmp_path):
    """The C++ example builds against the library inside the Python package, and runs."""
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    cmake = shutil.which("cmake", path=path)
    example = pathlib.Path(__file__).parents[2] / "examples" / "cpp"
    if cmake is None or not example.is_dir():
        pytest.skip("needs cmake and the source tree's examples/cpp")
    options = [f"-Dflash_kda_DIR={flash_kda.cmake_dir()}", "-DCMAKE_BUILD_TYPE=Release"]
    for command in (
        [cmake, "-S", example, "-B", tmp_path, *options],
        [cmake, "--build", tmp_path],
        [tmp_path / "forward_example"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
