#!/usr/bin/env bash
# The drop-in for flash-linear-attention and torch, on a machine with a GPU: tests, a real model, the cost of a call.
#
#   scripts/gpu_dropin.sh [options]
#
#   --only PART       torch, model, fla or host; may be repeated (default: all, in this order)
#   --site DIR        a folder with flash_kda installed, put first on PYTHONPATH (default build-gpu/site, which
#                     scripts/gpu_check.sh --only build makes; ignored where it does not exist)
#   --wheels DIR      install these wheels into that folder first, without a registry (fla_core, flash_linear_attention)
#   --out DIR         logs and JSON files go there (default build-gpu/dropin)
#   --quick           the model with 2 layers, one row of its table
#   --limit SECONDS   most time for each part (default 300)
#
# Environment: PYTHON (default python3; it needs torch, triton, pytest, numpy, ml_dtypes, einops, transformers).
# What Triton compiles for the model is compiled beside the torch tests; that tuning is thrown away, since other work
# disturbs it. Each line is stamped with the seconds since the start. Exit status 1: a part failed; the others still run.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1

python=${PYTHON:-python3}
site=build-gpu/site
out=build-gpu/dropin
wheels="" quick=0 limit=300
wanted=()

die() {
  echo "gpu_dropin: $*" >&2
  exit 2
}

while [ $# -gt 0 ]; do
  case "$1" in --quick | --help) ;; *) [ $# -ge 2 ] || die "$1: expected a value" ;; esac
  case "$1" in
    --only) wanted+=("$2") ;;
    --site) site=$2 ;;
    --wheels) wheels=$2 ;;
    --out) out=$2 ;;
    --limit) limit=$2 ;;
    --quick) quick=1; shift; continue ;;
    --help) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
    *) die "unknown option $1 (--help lists them)" ;;
  esac
  shift 2
done
[ ${#wanted[@]} -gt 0 ] || wanted=(torch model fla host)
for part in "${wanted[@]}"; do
  case "$part" in torch | model | fla | host) ;; *) die "--only: no part '$part'" ;; esac
done
command -v "$python" >/dev/null || die "no $python (PYTHON=... picks another)"

mkdir -p "$out"
out=$(cd "$out" && pwd)
summary=$out/summary.txt
: >"$summary"

stamp() {
  local line
  while IFS= read -r line || [ -n "$line" ]; do printf '%4d %s\n' "$SECONDS" "$line"; done
}

wants() {
  local part
  for part in "${wanted[@]}"; do [ "$part" != "$1" ] || return 0; done
  return 1
}

if [ -n "$wheels" ]; then
  mkdir -p "$site"
  "$python" -m pip install -q --disable-pip-version-check --no-index --no-deps --no-compile --upgrade \
    --target "$site" "$wheels"/*.whl 2>&1 | stamp || die "--wheels: pip failed"
fi
if [ -d "$site" ]; then
  PYTHONPATH=$(cd "$site" && pwd)${PYTHONPATH:+:$PYTHONPATH}
  export PYTHONPATH
fi

# Says what is there; without the package itself nothing else makes sense.
"$python" - 2>&1 <<'CODE' | tee -a "$summary" | stamp || die "flash_kda cannot be imported"
import importlib.metadata

import ml_dtypes  # noqa: F401
import torch

import flash_kda

print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU", "torch", torch.__version__)
print("flash_kda", flash_kda.__version__, flash_kda.__file__)
print(*flash_kda.backends(), sep="\n")
for name in ("triton", "fla-core", "flash-linear-attention", "transformers", "einops"):
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        print(name, "not installed")
CODE

part_torch() {
  "$python" -m pytest tests/python/test_torch_cuda.py -q --tb=short --maxfail=15 --durations=5 -p no:cacheprovider \
    --device cuda -k cuda
}

part_model() {
  local -a how=(--json "$out/model.json")
  [ $quick = 0 ] || how+=(--quick)
  "$python" examples/python/fla_model.py "${how[@]}"
}

# -s: the errors of both paths and the kernels' names are the evidence.
part_fla() {
  "$python" -m pytest tests/python/test_fla.py -q -s --tb=short --maxfail=15 --durations=5 -p no:cacheprovider \
    --device cuda
}

part_host() {
  "$python" benchmarks/host_cost.py --device cuda --json "$out/host_cost.json"
}

# Kills a part that takes too long, with everything that it started.
limited() {
  local begin=$SECONDS status=0
  set -m
  "part_$1" &
  local pid=$!
  set +m
  while kill -0 $pid 2>/dev/null; do
    if [ $((SECONDS - begin)) -ge "$limit" ]; then
      echo "over $limit s: stopped"
      kill -TERM -- -$pid 2>/dev/null || true
      sleep 2
      kill -KILL -- -$pid 2>/dev/null || true
      break
    fi
    sleep 0.2
  done
  wait $pid 2>/dev/null || status=$?
  return $status
}

# Triton compiles one kernel after another: a process for each kind of call.
warm_pids=()
if wants model && wants torch; then
  for part in packed turns fp32; do
    FLA_CACHE_RESULTS=0 timeout -k 5 "$limit" "$python" examples/python/fla_model.py --warm "$part" --layers 1 \
      >"$out/warm-$part.log" 2>&1 &
    warm_pids+=($!)
  done
fi
trap '[ ${#warm_pids[@]} = 0 ] || kill "${warm_pids[@]}" 2>/dev/null || true' EXIT

failed=0
for part in torch model fla host; do
  wants "$part" || continue
  printf '\n==== %s\n' "$part" | stamp
  begin=$SECONDS verdict=ok status=0
  if [ "$part" = model ] && [ ${#warm_pids[@]} -gt 0 ]; then
    echo "waiting for Triton's compilations" | stamp
    for pid in "${warm_pids[@]}"; do wait "$pid" || tail -n 2 "$out"/warm-*.log | stamp; done
    warm_pids=()
  fi
  limited "$part" > >(tee "$out/$part.log" | stamp) 2>&1 || status=$?
  sleep 0.3 # the last tee
  if [ $status != 0 ]; then
    verdict="FAILED ($status)"
    failed=1
  fi
  printf '%-8s %-14s %4d s  %s\n' "$part" "$verdict" $((SECONDS - begin)) \
    "$(grep -E '(passed|failed|skipped)' "$out/$part.log" | tail -n 1 || true)" >>"$summary"
done
printf '\n==== summary, %d s\n' $SECONDS
cat "$summary"
printf 'logs and JSON in %s\n' "$out"
exit $failed
