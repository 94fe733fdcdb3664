# qflash: everything starts here. `make run` and `make test` need Python >= 3.11, a C++ compiler and make, nothing else.
# `make KERNEL=<name> NVCC_ARCH=<XX>` makes a binary to profile (standalone.mk).
#
#   VENV    where the environment lives (default .venv). Empty (`make test VENV=`): the current python3 with what it has
#           installed; nothing is downloaded, and checks whose tools are missing are named and skipped.
#   PYTHON  the interpreter that makes the environment (default python3)
#   EXTRAS  optional parts of pyproject.toml to install (default: all that the tests and benchmarks use)

VENV ?= .venv
PYTHON ?= python3
# CUDA kernels are compiled on first use; where there is a GPU but no nvcc, PyPI's compiler is installed too.
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
EXTRAS ?= torch,jax,transformers,triton,bench,docs,dev,build$(if $(GPU),$(if $(shell command -v nvcc),,$(comma)cuda))
# Pinned, so that every machine tests and benchmarks against the same peer.
TORCH ?= torch==2.13.0
comma := ,

ifeq ($(strip $(VENV)),)
  PY := $(PYTHON)
  ENVIRONMENT :=
  export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
  PY := $(VENV)/bin/python
  ENVIRONMENT := $(VENV)/.complete
endif

# A worker for each core, where pytest-xdist is installed (tests/conftest.py keeps JAX from taking all of a GPU's memory).
# Workers that are done take tests from the others: some take 20 s, most nothing.
PYTEST_ARGS ?= $(shell $(PY) -c "import xdist" 2>/dev/null && printf '%s' '-n auto --dist worksteal')
PYTEST = $(PY) -m pytest $(PYTEST_ARGS)
CPP_FILES = $(shell git ls-files '*.h' '*.cc' '*.cu' '*.cuh' 2>/dev/null)

.PHONY: help run check test docs bench gpu-test sanitize ncu build fmt lint clean
.DEFAULT_GOAL := help

include standalone.mk

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

run: build ## verify every kernel this machine can run, benchmark it, print one table, write rows and a plot
	$(PY) -m qflash.cli run

check: build lint ## lint, unit tests and a tile of every CUDA kernel on the CPU: half a minute, before every commit
	$(PYTEST) -q -m "not process and not drawing and not gpu" tests/unit tests/emulated/test_one_tile.py

test: build lint docs ## lint, the documentation's site with its links, then every test this machine can run
	$(PYTEST) tests

docs: $(ENVIRONMENT) ## README.md and docs/ as a site in build/site; a dead link or heading fails
	@$(PY) tools/site.py

bench: build ## the full benchmark grid of this machine, rows in bench/results/
	$(PY) -m qflash.cli bench

gpu-test: build ## what must pass on a machine with a GPU: numerics, front ends, compilation
	$(PYTEST) tests/compile tests/numerics tests/frontends

sanitize: build ## every CUDA kernel under compute-sanitizer: memcheck, racecheck, initcheck, synccheck
	@for tool in memcheck racecheck initcheck synccheck; do echo "compute-sanitizer --tool $$tool"; \
	  QFLASH_LINEINFO=1 compute-sanitizer --tool $$tool --error-exitcode 1 --kernel-name kns=qf_ \
	    $(PY) -m qflash.testing.sanitize || exit 1; \
	done

ncu: build ## profile every CUDA kernel (KERNEL=<name>: one) with ncu, into profiles/<gpu> (OUT=<folder>: there)
	$(PY) -m qflash.cli profile $(if $(KERNEL),--kernel $(KERNEL)) $(if $(OUT),--out $(OUT))

build: $(ENVIRONMENT) ## set up the environment and (re)build the native module if its sources changed
	@$(PY) tools/install.py

fmt: $(ENVIRONMENT) ## format Python and C++
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .
	$(dir $(shell $(PY) -c "import sys; print(sys.executable)"))clang-format -i $(CPP_FILES)

lint: $(ENVIRONMENT) ## check style of Python and C++, and types of Python
	@$(PY) tools/lint.py $(CPP_FILES)

clean: ## remove the environment and everything built
	rm -rf $(VENV) bin build dist .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis qflash/_native*.so

$(VENV)/.complete: pyproject.toml tools/environment.py
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and \
	  'qflash needs Python 3.11 or newer, $(PYTHON) is ' + sys.version.split()[0] + ': make PYTHON=/path/to/python3.12')"
	@$(PYTHON) tools/environment.py $(VENV) --torch "$(TORCH)" --extras "$(EXTRAS)" $(if $(GPU),--gpu)
	@touch $@
