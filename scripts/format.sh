#!/usr/bin/env bash
# Checks the format of all C++ and CUDA sources with clang-format (PyPI's), or rewrites them: format.sh [--fix]
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1-}" in
  "") mode=(--dry-run --Werror) ;;
  --fix) mode=(-i) ;;
  *) echo "usage: scripts/format.sh [--fix]" >&2; exit 2 ;;
esac
if ! command -v clang-format >/dev/null; then
  echo "clang-format is missing: pip install clang-format" >&2
  exit 1
fi

mapfile -d '' files < <(git ls-files -z -- '*.h' '*.cpp' '*.inl' '*.cu' '*.cuh')
clang-format "${mode[@]}" "${files[@]}"
echo "clang-format: ${#files[@]} files"
