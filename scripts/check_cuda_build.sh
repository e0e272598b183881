#!/usr/bin/env bash
# Compiles the CUDA backend for sm_90a and fails where a kernel spills registers or ptxas serialized its wgmma: needs
# nvcc 12.9 or newer, no GPU.
#
#   scripts/check_cuda_build.sh [VENV]   virtual environment (default .venv); gets nvidia-cutlass, cmake where missing
#
# Environment: BUILD_DIR (default build), JOBS, FLASH_KDA_CUTLASS_DIR (then nothing is installed for CUTLASS).
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv}
jobs=${JOBS:-$(nproc)}
build=${BUILD_DIR:-build}/cuda-check
cutlass_requirement=$(cat cmake/cutlass_requirement.txt) # cmake/FlashKdaCutlass.cmake finds it
python=$(cd "$venv" && pwd)/bin/python
PATH=$(dirname "$python"):$PATH:/usr/local/cuda/bin

command -v nvcc >/dev/null || { echo "check_cuda_build: no nvcc" >&2; exit 1; }
install() { "$python" -m pip install -q --disable-pip-version-check --no-deps "$@"; }
cmake_is_new() {
  cmake --version | "$python" -c 'import re, sys
major, minor = map(int, re.findall(r"(\d+)\.(\d+)", sys.stdin.read())[0])
sys.exit((major, minor) < (3, 26))'
}
command -v cmake >/dev/null && cmake_is_new || install "cmake>=3.26"
command -v ninja >/dev/null || install ninja
options=(-G Ninja -DCMAKE_BUILD_TYPE=Release -DFLASH_KDA_CUDA=ON "-DPython3_EXECUTABLE=$python")
if [ -n "${FLASH_KDA_CUTLASS_DIR:-}" ]; then
  options+=("-DFLASH_KDA_CUTLASS_DIR=$FLASH_KDA_CUTLASS_DIR")
else
  "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("cutlass_library") is None)' ||
    install "$cutlass_requirement"
fi

cmake -S . -B "$build" "${options[@]}" >/dev/null
log=$build/ptxas.log
# Everything anew: ptxas reports only what it compiles.
if ! cmake --build "$build" --target flash_kda_cuda --clean-first --parallel "$jobs" >"$log" 2>&1; then
  grep -vE '^ptxas info' "$log" | tail -n 40
  exit 1
fi
grep -iE 'warning' "$log" | sort -u | head -n 20 || true
"$python" scripts/ptxas_report.py "$log"
