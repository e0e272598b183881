#!/usr/bin/env bash
# The C++ tests under AddressSanitizer + UndefinedBehaviorSanitizer, and the threaded path under ThreadSanitizer.
# sanitize.sh [address|thread] runs one of the two.
set -euo pipefail
cd "$(dirname "$0")/.."

jobs=${JOBS:-$(nproc)}
build=${BUILD_DIR:-build}
generator=()
if command -v ninja >/dev/null; then generator=(-G Ninja); fi

compile() {  # sanitizer, folder
  # Little optimisation and line numbers only: compiling takes longer than running.
  cmake -S . -B "$2" "${generator[@]}" -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1" -DFLASH_KDA_CUDA=OFF \
    -DFLASH_KDA_BUILD_TESTS=ON -DFLASH_KDA_SANITIZE="$1" >/dev/null
  cmake --build "$2" --parallel "$jobs" --target flash_kda_tests
}

# The whole program in one process for each shard, not one for each test: sanitizers start slowly.
run_shards() {  # program, arguments...
  local pids=() failed=0 i
  for ((i = 0; i < jobs; ++i)); do
    GTEST_TOTAL_SHARDS=$jobs GTEST_SHARD_INDEX=$i "$@" --gtest_brief=1 &
    pids+=($!)
  done
  for i in "${pids[@]}"; do wait "$i" || failed=1; done
  return $failed
}

run_address() {
  compile address "$build/asan"
  ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1 \
    run_shards "$build/asan/tests/cpp/flash_kda_tests"
}

# The tests that start threads: calls through the public API, and the CPU backend's.
run_thread() {
  compile thread "$build/tsan"
  TSAN_OPTIONS=halt_on_error=1 \
    run_shards "$build/tsan/tests/cpp/flash_kda_tests" --gtest_filter='Cpu*:*/Cpu*:Forward.*:*CaseTable.*'
}

case "${1-all}" in
  all) run_address; run_thread ;;
  address) run_address ;;
  thread) run_thread ;;
  *) echo "usage: scripts/sanitize.sh [address|thread]" >&2; exit 2 ;;
esac
echo "sanitizers: no findings"
