# `make demo` and `make test` install everything that they need into .venv, at the versions of constraints.txt.
# A stamp file in .venv marks each finished step: an interrupted install resumes, and a finished one is skipped.

VENV    ?= .venv
PYTHON  ?= python3
ARGS    ?=
EXECUTE ?= 1

# Commands and tests start many processes; without bytecode files each of them compiles the sources again.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
# Python compiles the modules that are imported; pip would compile all modules of all packages.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input --no-compile --no-warn-conflicts -c constraints.txt

# torch is installed first and with its exact pin; a looser requirement downloads the latest CUDA build.
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)
# The CPU build of torch does not depend on Triton; the tests run Triton's interpreter.
TRITON := triton==3.6.0
WINGS := latency,openvino,tuning,pruning,codesign,adaptive

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu check fmt fuzz kill soak install-check bench tables docs site site-audit notebooks dist clean

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 15

demo: $(VENV)/.run  ## Measure the shipped network on this machine and write a report
	$(BIN)/sparseflow demo $(ARGS)

test: $(VENV)/.dev  ## Run the tests
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --all-extras $(ARGS)

test-gpu:  ## Run the tests that need a GPU, with the packages of $(PYTHON), and write a record
	PYTHONPATH=src:. $(PYTHON) -m pytest -m gpu -n logical --maxprocesses 6 --record-dir=results/gpu_tests $(ARGS)

check: $(VENV)/.dev  ## Lint, check formatting, types, imports, identifiers and the public API; edits nothing
	@failed=; for tool in "ruff check ." "ruff format --check ." "pyright --pythonpath $(BIN)/python" \
	  "lint-imports --no-cache" \
	  "python .ci/check_identifiers.py src tests benchmarks docs" "python .ci/check_public_api.py"; do \
	  echo "$$tool"; $(BIN)/$$tool || failed="$$failed $${tool%% -*}"; \
	done; [ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

fmt: $(VENV)/.dev  ## Format the sources and apply the linter's fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

fuzz: $(VENV)/.dev  ## Fuzz every parser; ARGS="--inputs 2000 --time-s 60 --target tuning-matrix"
	$(BIN)/python -m tests.harness.fuzz $(ARGS)

kill: $(VENV)/.dev  ## Kill every long job at random moments and compare its results; ARGS="--kills 10 --job tune"
	$(BIN)/python -m tests.harness.kill $(ARGS)

soak: $(VENV)/.dev  ## Load the server beside hostile clients
	$(BIN)/python -m benchmarks.adaptive.soak $(ARGS)

install-check: $(VENV)/.run  ## Install the wheel with each extra and use it; ARGS="--python python3.12 --extra all"
	$(BIN)/python -m tests.harness.install $(ARGS)

bench: $(VENV)/.run  ## Run the spiking benchmark on this machine
	$(BIN)/sparseflow spiking bench --device auto $(ARGS)

tables: $(VENV)/.run  ## Generate the tables of README.md and docs/ and the figures from results/
	$(BIN)/python benchmarks/tables.py
	$(BIN)/python benchmarks/figures.py

docs: tables $(VENV)/.dev  ## Generate the tables, then check every link of README.md and docs/
	$(BIN)/python -m pytest -q tests/test_docs.py

site: $(VENV)/.site  ## Build the documentation site into build/site; EXECUTE=0 takes the outputs of the notebooks
	NO_MKDOCS_2_WARNING=1 EXECUTE=$(EXECUTE) $(BIN)/mkdocs build -q

site-audit: site  ## Check pages of the site in Chromium, in both themes, and save screenshots; ARGS="--site DIR"
	@$(PIP) playwright axe-playwright-python
	$(BIN)/python -m tests.harness.site $(ARGS)

notebooks: $(VENV)/.site  ## Run the examples and write examples/notebooks
	$(BIN)/python docs/hooks/tutorials.py

dist: $(VENV)/.run  ## Build the sdist and the wheel twice into dist/ and compare the bytes
	@$(PIP) hatchling
	rm -rf dist build/dist
	export SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct); \
	for directory in dist build/dist; do $(BIN)/python -m hatchling build -d $$directory || exit 1; done
	diff -r dist build/dist
	@wc -c dist/*

clean:  ## Delete the virtual environment and caches; keep runs/
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(not (3, 11) <= v <= (3, 13))' || \
	  { echo "SparseFlow needs Python 3.11 to 3.13; select one with: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { echo "on Debian: apt-get install python3-venv"; exit 2; }
	@touch $@

$(VENV)/.torch: constraints.txt | $(VENV)/.venv
	@echo "installing $(TORCH) into $(VENV) (about 200 MB) ..."
	@$(PIP) "$(TORCH)"
	@touch $@

$(VENV)/.run: pyproject.toml $(VENV)/.torch
	@echo "installing the runtime dependencies ..."
	@$(PIP) -e ".[spiking]"
	@$(PIP) --no-deps spikingjelly
	@touch $@

$(VENV)/.site: $(VENV)/.run
	@echo "installing the dependencies of the site and of all wings ..."
	@$(PIP) -e ".[docs,$(WINGS)]"
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) $(TRITON)  # without it spikingjelly prints a warning
	@touch $@

$(VENV)/.pytest: $(VENV)/.run
	@$(PIP) pytest hypothesis
	@touch $@

$(VENV)/.dev: $(VENV)/.run  # not after .site: each call of pip resolves all requirements again
	@echo "installing the dependencies of the tests, of the site and of all wings ..."
	@$(PIP) -e ".[docs,$(WINGS),dev]"
	@$(PIP) --no-deps snntorch sinabs nir nirtorch pbr  # their requirements are installed, except samna (hardware)
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) $(TRITON)
	@touch $(VENV)/.site $@
