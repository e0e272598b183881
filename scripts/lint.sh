#!/usr/bin/env bash
# clang-tidy (PyPI's) over host code: the library, the bindings where nanobind is installed, the example.
# lint.sh [file...] looks at these files alone.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v clang-tidy >/dev/null; then
  echo "clang-tidy is missing: pip install clang-tidy" >&2
  exit 1
fi
build=${BUILD_DIR:-build}/lint
python=OFF
if python3 -c 'import nanobind' 2>/dev/null; then python=ON; fi
generator=()
if command -v ninja >/dev/null; then generator=(-G Ninja); fi
cmake -S . -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release -DFLASH_KDA_CUDA=OFF \
  -DFLASH_KDA_BUILD_EXAMPLES=ON -DFLASH_KDA_BUILD_PYTHON=$python >/dev/null

if [ $# -gt 0 ]; then
  files=("$@")
else
  mapfile -t files < <(git ls-files -- 'src/*.cpp' 'examples/cpp/*.cpp')
  if [ $python = ON ]; then
    mapfile -t -O "${#files[@]}" files < <(git ls-files -- 'bindings/*.cpp')
  else
    echo "clang-tidy: bindings are left out, as nanobind is not installed"
  fi
fi
# Files of the CUDA backend are no part of a build without CUDA, but for its stand-in.
host=()
for file in "${files[@]}"; do
  case $file in
    src/cuda/unavailable.cpp) host+=("$file") ;;
    src/cuda/*) ;;
    *) host+=("$file") ;;
  esac
done
printf '%s\0' "${host[@]}" | xargs -0 -n 1 -P "$(nproc)" clang-tidy --quiet -p "$build"
echo "clang-tidy: ${#host[@]} files"
