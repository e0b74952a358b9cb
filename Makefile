# Nothing is needed but Python 3.11 or newer, git and make: every target does its own set-up first.
# Settings, given as `make NAME=value`:
#   PYTHON        the interpreter that the environment is made from (python3)
#   ARGS          passed on to what the target runs: make train ARGS="--pipeline 2"
#   CONSTRAINTS   file of pinned versions; empty to take what pip finds (constraints.txt)
#   PIP_ARGS      passed on to pip install, such as --extra-index-url ...
#   VENV_ARGS     passed on to python -m venv, such as --system-site-packages

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed

.PHONY: help setup train check test coverage wheel bench clean distclean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: $(READY) ## make .venv and install into it; the other targets do this themselves

train: $(READY) ## train a small GPT on two worker processes
	$(BIN)/myelin train $(ARGS)

check: $(READY) ## lint, formatting, types, import directions
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest -qq tests/test_imports.py

test: $(READY) ## all tests that need no GPU
	$(BIN)/python -m pytest -m "not cuda" $(ARGS)

coverage: $(READY) ## the same tests, and which branches they reach
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -m "not cuda" $(ARGS)
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report

wheel: $(READY) ## build the wheel from the sdist, compare, install and train with it
	$(BIN)/python .ci/check_wheel.py

bench: $(READY) ## run every benchmark; the last line of each is a JSON object
	@set -e; for bench in benchmarks/bench_*.py; do echo "== $$bench"; $(BIN)/python "$$bench" $(ARGS); done

clean: ## remove caches and build outputs; runs/ and .venv stay
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.*
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## remove the environment as well; runs/ stays
	rm -rf $(VENV)

# The two files below are stamps: each is touched last, so that a step that broke off is done again.
$(VENV)/.created:
	@command -v $(firstword $(PYTHON)) >/dev/null || \
	  { echo "$(PYTHON) not found: install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("$(PYTHON) is Python %d.%d; Myelin needs 3.11 or newer: make PYTHON=/path/to/python3" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV_ARGS) $(VENV)
	@touch $@

$(READY): $(VENV)/.created pyproject.toml $(CONSTRAINTS)
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) \
	  $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) --editable '.[dev]'
	@touch $@
