#!/usr/bin/env bash
# Prepares a Python environment that holds flash_kda, built from this checkout. Safe to run again.
#
#   scripts/setup.sh demo|test|dev
#
#   demo  the package and what the command line needs
#   test  also GoogleTest & Co., pytest, and torch (the tests compare with it)
#   dev   also the formatters, linters and type checker
#
# Environment:
#   VENV    folder of the virtual environment, made if absent (default .venv); "none": use PYTHON as it is
#   PYTHON  interpreter to start from (default python3), 3.10 or newer
#   JOBS    parallel compilations (default: number of cores)
#   OFFLINE 1: download nothing; what is missing is an error
#   FLASH_KDA_CUTLASS_DIR  folder of the CUTLASS headers, where the nvidia-cutlass package is not wanted
#   FLASH_KDA_CUDA  AUTO, ON or OFF: build the CUDA kernels (default AUTO where a GPU is seen, else OFF)
set -euo pipefail
cd "$(dirname "$0")/.."

kind=${1:?usage: scripts/setup.sh demo|test|dev}
venv=${VENV:-.venv}
python=${PYTHON:-python3}
jobs=${JOBS:-$(nproc)}
offline=${OFFLINE:-0}
torch_requirement="torch==2.13.0"

die() {
  echo "setup: $*" >&2
  exit 1
}

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; }

# Runs apt-get where that is allowed, or says what to install.
apt_install() {
  local -a as=()
  if [ "$offline" = 1 ] || ! command -v apt-get >/dev/null 2>&1; then
    die "please install: $*"
  fi
  if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || die "not root, and no sudo without a password; please run: apt-get install $*"
    as=(sudo -n)
  fi
  echo "setup: apt-get install $*"
  "${as[@]}" apt-get update -qq
  DEBIAN_FRONTEND=noninteractive "${as[@]}" apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

need_compiler() {
  local cxx=${CXX:-c++}
  if ! command -v "$cxx" >/dev/null 2>&1; then
    apt_install g++
  fi
  echo '#include <version>
#if __cplusplus < 202002L || !defined(__cpp_lib_span)
#error
#endif
int main() {}' | "$cxx" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null ||
    die "$cxx does not compile C++20; g++ 12 or newer is needed (CXX=... picks another compiler)"
}

need_headers() {
  local -a missing=()
  local header
  while read -r header package; do
    echo "#include <$header>" | "${CXX:-c++}" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null || missing+=("$package")
  done <<'LIST'
gtest/gtest.h libgtest-dev
benchmark/benchmark.h libbenchmark-dev
nlohmann/json.hpp nlohmann-json3-dev
LIST
  [ ${#missing[@]} = 0 ] || apt_install "${missing[@]}"
}

need_venv() {
  command -v "$python" >/dev/null 2>&1 || die "no $python on the PATH (PYTHON=... picks another)"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$python is $("$python" --version 2>&1); 3.10 or newer is needed (PYTHON=... picks another)"
  [ -x "$venv/bin/python" ] && return
  "$python" -c 'import ensurepip, venv' 2>/dev/null || apt_install python3-venv
  local -a options=()
  # A torch that sees a GPU is large and made for the machine: use it, do not download another.
  if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    options=(--system-site-packages)
  fi
  echo "setup: making the virtual environment $venv"
  "$python" -m venv "${options[@]}" "$venv"
}

need_python_headers() {
  "$py" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    apt_install python3-dev
}

pip_install() {
  if [ "$offline" = 1 ]; then
    "$py" -m pip install -qq --no-index "$@" || die "OFFLINE=1, and something of this is missing: $*"
  else
    "$py" -m pip install -qq --disable-pip-version-check "$@"
  fi
}

case "$kind" in demo | test | dev) ;; *) die "expected demo, test or dev, got '$kind'" ;; esac
need_compiler
if [ "$venv" = none ]; then
  py=$(command -v "$python") || die "no $python on the PATH"
else
  need_venv
  py=$venv/bin/python
fi
need_python_headers
[ "$kind" = demo ] || need_headers

echo "setup: Python packages for '$kind'"
# One list of requirements, in pyproject.toml; the build runs in this environment, so its own needs come first.
mapfile -t requirements < <("$py" scripts/requirements.py "$kind")
pip_install "${requirements[@]}"
if [ "$kind" != demo ] || has_gpu; then
  "$py" -c 'import torch' 2>/dev/null || pip_install "$torch_requirement"
fi

cuda=${FLASH_KDA_CUDA:-OFF}
if [ -z "${FLASH_KDA_CUDA:-}" ] && has_gpu; then
  cuda=AUTO
fi
settings=(--config-settings=build-dir=build/python "--config-settings=cmake.define.FLASH_KDA_CUDA=$cuda")
if [ -n "${FLASH_KDA_CUTLASS_DIR:-}" ]; then
  settings+=("--config-settings=cmake.define.FLASH_KDA_CUTLASS_DIR=$FLASH_KDA_CUTLASS_DIR")
elif [ "$cuda" != OFF ] && ! "$py" -c 'import cutlass_library' 2>/dev/null; then
  # Its headers are all that the build needs.
  pip_install --no-deps "$(cat cmake/cutlass_requirement.txt)"
fi
echo "setup: building flash_kda (CUDA kernels: $cuda)"
[ "$venv" = none ] || PATH=$(cd "$venv" && pwd)/bin:$PATH
CMAKE_BUILD_PARALLEL_LEVEL=$jobs "$py" -m pip install -qq --disable-pip-version-check --no-build-isolation \
  --no-deps --no-index --force-reinstall . "${settings[@]}"
