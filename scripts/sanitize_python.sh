#!/usr/bin/env bash
# Python tests that reach the extension, with the extension and the library under AddressSanitizer and
# UndefinedBehaviorSanitizer. Needs the environment of `scripts/setup.sh test` on the PATH.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PY:-python}
target=$PWD/build/sanitize-python/package
shopt -s nullglob
tests=(tests/python/test_arrays*.py tests/python/test_api*.py tests/python/test_errors*.py)

rm -rf "$target"
# Clang's sanitizer run time is another one; the module and the preloaded library must be of one kind.
CXX=${CXX:-g++} CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-$(nproc)} "$python" -m pip install -qq \
  --disable-pip-version-check --no-build-isolation --no-deps --no-index --target "$target" . \
  --config-settings=build-dir=build/sanitize-python/build --config-settings=cmake.build-type=RelWithDebInfo \
  --config-settings=cmake.define.FLASH_KDA_SANITIZE=address --config-settings=cmake.define.FLASH_KDA_CUDA=OFF

runtime() { "${CXX:-g++}" -print-file-name="$1"; }
# Leaks are not looked for: the interpreter keeps memory to its end on purpose.
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export PYTHONPATH=$target PYTHONMALLOC=malloc
LD_PRELOAD="$(runtime libasan.so) $(runtime libubsan.so) $(runtime libstdc++.so)"
export LD_PRELOAD

where=$("$python" -c 'import flash_kda._C as c; print(c.__file__)')
case "$where" in
  "$target"/*) ;;
  *) echo "sanitize_python: the tests would use $where, not the instrumented build" >&2 && exit 1 ;;
esac
"$python" -m pytest -q -x -p no:cacheprovider --timeout=1200 "${tests[@]}"
