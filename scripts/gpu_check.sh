#!/usr/bin/env bash
# Everything that needs a GPU, on a machine that has one: builds, compares, tests, sanitizes, measures.
#
#   scripts/gpu_check.sh [options]
#
#   --only PART       build, check, pytest, sanitize, bench or sweep; may be repeated (default: all, in this order)
#   --out DIR         logs and JSON files go there (default <build>/logs)
#   --build DIR       build folder, kept for the next call (default build-gpu)
#   --jobs N          parallel compilations (default: number of cores)
#   --prebuilt DIR    use a library and cuda_check built elsewhere; compiles the extension module alone
#   --make-prebuilt DIR  make that folder and stop; needs nvcc, no GPU
#   --wheels DIR      install these wheels first, without a registry (fla_core for the Triton baseline)
#   --quick           shorter accuracy inputs; memcheck and racecheck alone
#   --full            the tests' named inputs and exact cases at full size (minutes more)
#   --limit SECONDS   most time for each command of check and pytest
#   --sanitizer-tools "A B"     of memcheck racecheck synccheck initcheck (default: all of them)
#   --sanitizer-binary FILE     another cuda_check to put under them
#   --sanitizer-limit SECONDS   most time for each tool (default 150)
#   --commit HASH     for the record, where there is no git
#   --cases "A B"     cases of the benchmark (default headline)
#   --bench "ARGS"    more arguments of benchmarks.gpu.run
#   --budget SECONDS  most time for the benchmark (default 420)
#
# Environment: PYTHON (default python3; it needs torch, nanobind, scikit-build-core, cmake >= 3.26, ninja, pytest,
# hypothesis, ml_dtypes, typer, rich), FLASH_KDA_CUTLASS_DIR (where nvidia-cutlass is not installed), CUDACXX.
# The benchmark's file is benchmarks/results/<gpu>.json; sweep adds to it (so does a benchmark with --bench --merge).
# The sanitizers' own summary lines are in DIR/sanitizer.txt. Exit status 1: a part failed.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1

python=${PYTHON:-python3}
build=build-gpu
jobs=$(nproc)
out="" prebuilt="" make_prebuilt="" wheels="" quick=0 full=0 limit=0 commit="" cases="headline" bench_args=""
tools="" sanitizer_binary="" sanitizer_limit=150 budget=420
wanted=()

die() {
  echo "gpu_check: $*" >&2
  exit 2
}

while [ $# -gt 0 ]; do
  case "$1" in --quick | --full | --help) ;; *) [ $# -ge 2 ] || die "$1: expected a value" ;; esac
  case "$1" in
    --only) wanted+=("$2") ;;
    --out) out=$2 ;;
    --build) build=$2 ;;
    --jobs) jobs=$2 ;;
    --prebuilt) prebuilt=$2 ;;
    --make-prebuilt) make_prebuilt=$2 ;;
    --wheels) wheels=$2 ;;
    --limit) limit=$2 ;;
    --sanitizer-tools) tools=$2 ;;
    --sanitizer-binary) sanitizer_binary=$2 ;;
    --sanitizer-limit) sanitizer_limit=$2 ;;
    --budget) budget=$2 ;;
    --commit) commit=$2 ;;
    --cases) cases=$2 ;;
    --bench) bench_args=$2 ;;
    --quick) quick=1; shift; continue ;;
    --full) full=1; shift; continue ;;
    --help) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
    *) die "unknown option $1 (--help lists them)" ;;
  esac
  shift 2
done
[ ${#wanted[@]} -gt 0 ] || wanted=(build check pytest sanitize bench sweep)
for part in "${wanted[@]}"; do
  case "$part" in build | check | pytest | sanitize | bench | sweep) ;; *) die "--only: no part '$part'" ;; esac
done
command -v "$python" >/dev/null || die "no $python (PYTHON=... picks another)"
for tool in $tools; do
  case "$tool" in memcheck | racecheck | synccheck | initcheck) ;; *) die "--sanitizer-tools: no tool '$tool'" ;; esac
done
[ -z "$sanitizer_binary" ] || [ -x "$sanitizer_binary" ] || die "--sanitizer-binary: no $sanitizer_binary"
[ -z "$prebuilt" ] || [ -x "$prebuilt/bin/cuda_check" ] || die "--prebuilt: no $prebuilt/bin/cuda_check"

mkdir -p "$build"
build=$(cd "$build" && pwd)
site=$build/site
logs=${out:-$build/logs}
mkdir -p "$logs" "$site"
logs=$(cd "$logs" && pwd)
# cmake and ninja may come with the interpreter; what is built here comes before anything installed.
PATH=$(dirname "$(command -v "$python")"):$PATH:/usr/local/cuda/bin
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
cuda_check=$build/cmake/tests/cuda/cuda_check
if [ -n "$prebuilt" ]; then
  prebuilt=$(cd "$prebuilt" && pwd)
  cuda_check=$prebuilt/bin/cuda_check
fi

wants() {
  local part
  for part in "${wanted[@]}"; do [ "$part" != "$1" ] || return 0; done
  return 1
}

# Runs a command, at most --limit seconds.
limited() {
  if [ "$limit" = 0 ]; then "$@"; else timeout -k 5 "$limit" "$@"; fi
}

# Runs a command, says what it was and how long it took.
step() {
  local begin=$SECONDS status=0
  printf '\n---- %s\n' "$*"
  "$@" || status=$?
  printf -- '---- status %d, %d s\n' $status $((SECONDS - begin))
  return $status
}

cutlass_option() { [ -z "${FLASH_KDA_CUTLASS_DIR:-}" ] || echo "$1FLASH_KDA_CUTLASS_DIR=$FLASH_KDA_CUTLASS_DIR"; }

make_prebuilt() {
  local options=(-DCMAKE_BUILD_TYPE=Release -DFLASH_KDA_CUDA=ON -DFLASH_KDA_BUILD_CUDA_CHECK=ON
    "-DPython3_EXECUTABLE=$(command -v "$python")")
  mapfile -t -O ${#options[@]} options < <(cutlass_option -D)
  if command -v ninja >/dev/null; then options+=(-G Ninja); fi
  cmake -S . -B "$build/prebuilt" "${options[@]}" >/dev/null
  cmake --build "$build/prebuilt" --parallel "$jobs"
  cmake --install "$build/prebuilt" --component cpp --prefix "$1" >/dev/null
  mkdir -p "$1/bin"
  cp "$build/prebuilt/tests/cuda/cuda_check" "$1/bin/"
}

build_from_source() {
  local -a defines
  defines=(FLASH_KDA_CUDA=ON FLASH_KDA_BUILD_CUDA_CHECK=ON)
  mapfile -t -O ${#defines[@]} defines < <(cutlass_option "")
  local -a settings
  settings=("${defines[@]/#/--config-settings=cmake.define.}")
  CMAKE_BUILD_PARALLEL_LEVEL=$jobs "$python" -m pip install -v --disable-pip-version-check --no-build-isolation \
    --no-deps --no-index --upgrade --target "$site" . --config-settings=build-dir="$build/cmake" "${settings[@]}" ||
    return 1
  # The same build tree: the kernels are compiled once.
  cmake --build "$build/cmake" --target cuda_check --parallel "$jobs"
}

build_bindings() {
  cmake -S tests/cuda/bindings -B "$build/bindings" -Dflash_kda_DIR="$prebuilt/lib/cmake/flash_kda" \
    -DPython_EXECUTABLE="$(command -v "$python")" || return 1
  cmake --build "$build/bindings" --parallel "$jobs" || return 1
  rm -rf "$site/flash_kda"
  cp -r python/flash_kda "$site/"
  cmake --install "$build/bindings" --component python --prefix "$site"
}

part_build() {
  if [ -n "$wheels" ]; then
    step "$python" -m pip install -q --disable-pip-version-check --no-index --no-deps --no-compile --upgrade \
      --target "$site" "$wheels"/*.whl || return 1
  fi
  if [ -n "$prebuilt" ]; then step build_bindings; else step build_from_source; fi || return 1
  "$python" - "$site" <<'CODE'
import sys

import flash_kda

print(flash_kda.__file__, *flash_kda.backends(), sep="\n")
if not flash_kda.__file__.startswith(sys.argv[1]):
    sys.exit("another installed flash_kda comes before the one built here")
CODE
}

part_check() {
  local status=0
  local -a how=(--device cuda --json-file "$logs/check.json")
  [ $quick = 0 ] || how+=(--quick)
  step limited "$cuda_check" || status=1
  step limited "$python" -m flash_kda check "${how[@]}" || status=1
  return $status
}

part_pytest() {
  local -a how=(-v --tb=short --maxfail=40 --durations=10 -p no:cacheprovider --device cuda -k cuda)
  [ $full = 0 ] || how+=(--full)
  # JAX would take most of the GPU's memory, and no test here needs it there.
  step limited env JAX_PLATFORMS=cpu "$python" -m pytest tests/python "${how[@]}"
}

# One tool over the smallest cases of every path; its own verdict goes to sanitizer.txt beside its log.
sanitize() {
  local tool=$1 binary=$2 begin=$SECONDS status=0 verdict
  local log=$logs/sanitizer_$tool.log
  timeout -k 5 "$sanitizer_limit" compute-sanitizer --tool "$tool" --error-exitcode 86 "$binary" small >"$log" 2>&1 ||
    status=$?
  verdict=$(grep -E 'SUMMARY|Internal Sanitizer Error' "$log" | sed 's/^=* *//' | paste -sd ';') || true
  [ $status != 124 ] || verdict="over $sanitizer_limit s; $verdict"
  printf '%-10s status %-3d %4d s  %s, cases ok %d  %s\n' "$tool" $status $((SECONDS - begin)) \
    "$(basename "$binary")" "$(grep -c ' ok$' "$log" || true)" "${verdict:-no summary}" | tee -a "$logs/sanitizer.txt"
  [ $status = 0 ] || tail -n 12 "$log"
  return $status
}

part_sanitize() {
  local tool status=0
  command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer"; return 1; }
  if [ -z "$tools" ]; then
    tools="memcheck racecheck synccheck initcheck"
    [ $quick = 0 ] || tools="memcheck racecheck"
  fi
  for tool in $tools; do sanitize "$tool" "${sanitizer_binary:-$cuda_check}" || status=1; done
  return $status
}

# Runs a module of the benchmark and keeps what it wrote beside the logs.
benchmark() {
  local status=0 since=$build/bench.since
  touch "$since"
  local -a more=()
  [ -z "$commit" ] || more=(--commit "$commit")
  step timeout -k 10 "$1" "$python" -m "${@:2}" "${more[@]}" || status=$?
  find benchmarks/results -name '*.json' -newer "$since" -exec cp {} "$logs/" \;
  return $status
}

part_bench() {
  local -a more names
  read -ra more <<<"$bench_args"
  read -ra names <<<"$cases"
  # The benchmark ends by itself within the budget; the limit is for the case that it does not.
  benchmark $((budget + 45)) benchmarks.gpu.run --cases "${names[@]}" --budget "$budget" "${more[@]}"
}

part_sweep() { benchmark 170 benchmarks.gpu.sweep --merge; }

if [ -n "$make_prebuilt" ]; then
  make_prebuilt "$make_prebuilt"
  echo "gpu_check: $make_prebuilt is ready"
  exit 0
fi

failed=0
summary=$logs/summary.txt
: >"$summary"
{ nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || echo "no nvidia-smi"; } | tee -a "$summary"
for part in build check pytest sanitize bench sweep; do
  wants "$part" || continue
  printf '\n==== %s  [%d s since the start]\n' "$part" $SECONDS
  begin=$SECONDS verdict=ok
  status=0
  { "part_$part" || status=$?; } > >(tee "$logs/$part.log") 2>&1
  sync "$logs/$part.log" 2>/dev/null || true
  if [ $status != 0 ]; then
    verdict="FAILED ($status)"
    failed=1
  fi
  printf '%-10s %-14s %4d s\n' "$part" "$verdict" $((SECONDS - begin)) >>"$summary"
  if [ "$part" = build ] && [ $status != 0 ]; then break; fi
done
sleep 0.2 # the last tee
printf '\n==== summary\n'
cat "$summary"
printf 'logs in %s\n' "$logs"
exit $failed
