# `make demo` and `make test` set up all they need. Everything is installed into .venv, at the versions of
# constraints.txt; a stamp in .venv stands for each finished step, so that an interrupted install goes on
# where it stopped and a finished one costs nothing.

VENV   ?= .venv
PYTHON ?= python3
ARGS   ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input --no-compile -c constraints.txt
# What pip would do file by file, on all cores; a package may ship files that are not meant to compile.
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true

# Its exact pin, and before anything else: a looser wish would fetch the latest build for CUDA.
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)
# Only where torch brings no Triton, which is to say in its build for CPUs; the tests run Triton's interpreter.
TRITON := triton==3.6.0
# What spikingjelly imports. It also asks for torchvision and torchaudio, which have no build for CPUs on the
# package index, so it is installed without what it asks for.
SPIKINGJELLY_NEEDS := loguru tqdm h5py

.DEFAULT_GOAL := help
.PHONY: help demo test check fmt bench tables docs clean

help:  ## Show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

demo: $(VENV)/.run  ## Set up, then measure the shipped network on this machine and write a report
	$(BIN)/sparseflow demo $(ARGS)

test: $(VENV)/.dev  ## Set up, then run the tests
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile $(ARGS)

check: $(VENV)/.dev  ## Lint, check formatting, types and import directions; edits nothing
	@failed=; for tool in "ruff check ." "ruff format --check ." "pyright --pythonpath $(BIN)/python" \
	  "lint-imports --no-cache" \
	  "python .ci/check_identifiers.py src tests benchmarks"; do \
	  echo "$$tool"; $(BIN)/$$tool || failed="$$failed $${tool%% -*}"; \
	done; [ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

fmt: $(VENV)/.dev  ## Format the sources and mend what the linter can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.run  ## Run the spiking benchmark on this machine
	$(BIN)/sparseflow spiking bench $(ARGS)

tables: $(VENV)/.run  ## Write the tables of README.md and docs/ from results/
	$(BIN)/python benchmarks/tables.py

docs: tables $(VENV)/.dev  ## Write the tables, then check every link of README.md and docs/
	$(BIN)/python -m pytest -q tests/test_docs.py

clean:  ## Delete the virtual environment and what tools left behind; runs/ stays
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(not (3, 11) <= v <= (3, 13))' || \
	  { echo "SparseFlow needs Python 3.11 to 3.13; name one with: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { echo "on Debian: apt-get install python3-venv"; exit 2; }
	@touch $@

$(VENV)/.torch: constraints.txt | $(VENV)/.venv
	@echo "installing $(TORCH) into $(VENV) (about 200 MB) ..."
	@$(PIP) "$(TORCH)"
	@touch $@

$(VENV)/.run: pyproject.toml $(VENV)/.torch
	@echo "installing what running needs ..."
	@$(PIP) -e . numba $(SPIKINGJELLY_NEEDS)
	@$(PIP) --no-deps spikingjelly
	@$(COMPILE)
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "installing what the tests and checks need ..."
	@$(PIP) -e ".[dev,latency,tuning,pruning,codesign,adaptive]"
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) $(TRITON)
	@$(COMPILE)
	@touch $@
