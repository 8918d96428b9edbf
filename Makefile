# All commands for developers: `make help`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help run test test-fast chaos check format bench gpu-check docs clean

help:    ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */  make \1\t/' | expand -t 18

run: $(VENV)/.run    ## compare FedAvg, v-Distillation and FedBE on embedded data, a minute or two
	@$(BIN)/fedbe compare

test: $(VENV)/.dev    ## run every test and measure branch coverage
	@$(BIN)/python -m pytest -n 3 --dist worksteal --cov=fedbe --cov-branch $(ARGS)

test-fast: $(VENV)/.dev    ## run the tests that are not slow, in less than two minutes
	@$(BIN)/python -m pytest -n 2 -m "not slow and not e2e and not real" $(ARGS)

chaos: $(VENV)/.dev    ## break runs, disks, files and replies on purpose, and count (takes half an hour)
	@$(BIN)/python -m benchmarks.chaos $(ARGS)

check: $(VENV)/.dev    ## check style, format, types, imports, dependencies and licences; changes nothing
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache --no-logo
	@$(BIN)/deptry src
	@$(BIN)/python -m benchmarks.licences

format: $(VENV)/.dev    ## format the code and fix what ruff can fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(VENV)/.dev    ## measure speed (takes a few minutes; long ones by name)
	@$(BIN)/python -m benchmarks $(ARGS)

gpu-check: $(VENV)/.dev    ## compare an accelerator with the CPU and measure it (CUDA, MPS; says if there is none)
	@$(BIN)/python -m benchmarks.gpu_check $(ARGS)

docs: $(VENV)/.docs    ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "documentation: site/index.html"

clean:    ## remove the environment and everything that was built
	rm -rf $(VENV) site dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage

# One stamp file for each level of installation, so that a second `make` starts at once.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing fedbe into $(VENV) (once)"
	@$(PIP) -e . && touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "installing the development tools into $(VENV) (once)"
	@$(PIP) -e '.[dev,flower,nvflare,ray]' && touch $@

$(VENV)/.docs: $(VENV)/.run
	@$(PIP) -e '.[docs]' && touch $@
