# Everything from a fresh clone: `make demo`, `make test`. Both set up what they need (scripts/setup.sh) in .venv.
#
#   make demo VENV=none PYTHON=python3   use an interpreter as it is (a GPU machine with its own torch)
#   make test OFFLINE=1                  download nothing
PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(shell nproc)
OFFLINE ?= 0
DEVICE ?= auto
OUT ?= demo_out

export PYTHON VENV JOBS OFFLINE
BIN = $(if $(filter none,$(VENV)),,$(abspath $(VENV))/bin/)
PY = $(if $(filter none,$(VENV)),$(PYTHON),$(BIN)python)
CMAKE_ENV = $(if $(filter none,$(VENV)),,PATH="$(abspath $(VENV))/bin:$$PATH")
SETUP = ./scripts/setup.sh

# Real text for `recall`: this project's own.
TEXTS = README.md docs/contract.md include/flash_kda/forward.h python/flash_kda/reference.py

.PHONY: help demo test test-cpp test-python format lint sanitize bench bench-docs clean setup-demo setup-test setup-dev

help:
	@echo "make demo      run the operator on a published case and on real text; plots go to $(OUT)/"
	@echo "make test      C++ and Python tests"
	@echo "make format    rewrite sources in the project's format"
	@echo "make lint      clang-format, clang-tidy, ruff, mypy"
	@echo "make sanitize  tests under AddressSanitizer, UndefinedBehaviorSanitizer, ThreadSanitizer"
	@echo "make bench     benchmarks of the CPU backend"
	@echo "make bench-docs  tables and plots of the GPU from benchmarks/results/h200.json"
	@echo "make clean     remove build/, .venv/ and $(OUT)/"

setup-demo setup-test setup-dev: setup-%:
	@$(SETUP) $*

demo: setup-demo
	@mkdir -p $(OUT)
	$(PY) -m flash_kda info
	$(PY) -m flash_kda run mixed-8192-h96 --device $(DEVICE) --explain \
	  --plot $(OUT)/run_mixed-8192-h96.png --json-file $(OUT)/run_mixed-8192-h96.json
	$(PY) -m flash_kda recall $(TEXTS) --device $(DEVICE) --check-heads 1 --show 400 \
	  --plot $(OUT)/recall.png --json-file $(OUT)/recall.json
	@echo
	@echo "The plots and figures of these runs are in $(OUT)/:"
	@ls $(OUT)

test: setup-test test-cpp test-python

test-cpp:
	$(CMAKE_ENV) cmake --preset ci
	$(CMAKE_ENV) cmake --build --preset ci --parallel $(JOBS)
	$(CMAKE_ENV) ctest --preset ci --parallel $(JOBS)

test-python:
	$(PY) -m pytest

format: setup-dev
	$(CMAKE_ENV) ./scripts/format.sh --fix
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

lint: setup-dev
	$(CMAKE_ENV) ./scripts/format.sh
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(CMAKE_ENV) ./scripts/lint.sh

sanitize: setup-dev
	$(CMAKE_ENV) ./scripts/sanitize.sh

bench: setup-test
	$(CMAKE_ENV) cmake --preset release
	$(CMAKE_ENV) cmake --build --preset release --parallel $(JOBS)
	$(PY) benchmarks/cpu_vs_torch.py

bench-docs: setup-test
	$(PY) -m benchmarks.gpu.render

clean:
	rm -rf build .venv $(OUT)
