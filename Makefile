# The one door for developers: `make help`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help run test check format bench docs clean

help:    ## show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## */  make \1\t/' | expand -t 18

run: $(VENV)/.run    ## compare FedAvg, v-Distillation and FedBE on embedded data, about a minute
	@$(BIN)/fedbe compare

test: $(VENV)/.dev    ## run every test
	@$(BIN)/python -m pytest -n 2 $(ARGS)

check: $(VENV)/.dev    ## lint, format and type checks; changes nothing
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(VENV)/.dev    ## format the code and fix what ruff can fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(VENV)/.dev    ## measure speed (takes a few minutes)
	@$(BIN)/python -m benchmarks $(ARGS)

docs: $(VENV)/.docs    ## build the documentation into site/
	@$(BIN)/mkdocs build --strict --quiet
	@echo "documentation: site/index.html"

clean:    ## remove the environment and everything that was built
	rm -rf $(VENV) site dist .mypy_cache .ruff_cache .pytest_cache

# One stamp for each level of installation: a second `make` finds it and starts at once.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing fedbe into $(VENV) (once)"
	@$(PIP) -e . && touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "installing the development tools into $(VENV) (once)"
	@$(PIP) -e '.[dev,flower]' && touch $@

$(VENV)/.docs: $(VENV)/.run
	@$(PIP) -e '.[docs]' && touch $@
