# make run    run the quick ablation, or whatever ARGS says: make run ARGS="generate --help"
# make test   lint, type check and tests
# Each builds what it needs in $(VENV) first. Variables: PYTHON, VENV, ARGS, PYTEST_ARGS, WORKERS (processes of pytest).

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= 2
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help run test lint typecheck pytest clean

help: ## show this list
	@grep -E '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/'

run: $(VENV)/.installed ## run the engine: make run ARGS="generate --help" (no ARGS: the quick ablation)
	@$(BIN)/python -m jaxinfer.run $(ARGS)

test: lint typecheck pytest ## lint, type check and tests

lint: $(VENV)/.installed-dev ## style, by ruff
	@echo "Checking style"
	@$(BIN)/ruff check .

typecheck: $(VENV)/.installed-dev ## types, by mypy
	@echo "Checking types"
	@$(BIN)/mypy

pytest: $(VENV)/.installed-dev ## tests only: make pytest PYTEST_ARGS="-k cache"
	@echo "Running the tests"
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

clean: ## remove $(VENV) and everything that was built or cached
	@echo "Removing $(VENV), builds and caches"
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are empty files that say when an installation was made, so that a second call is quick and a change
# of pyproject.toml installs again. Both installations are editable: one never hides the source from the other.
$(VENV)/.installed: pyproject.toml | $(VENV)/.created
	@echo "Installing jaxinfer into $(VENV) (a few minutes the first time)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.created
	@echo "Installing jaxinfer and its development tools into $(VENV) (a few minutes the first time)"
	@$(PIP) --editable '.[dev]'
	@touch $(VENV)/.installed $@

# Checked before venv runs, which would leave half an environment behind.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "jaxinfer needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1 | tail -n 1). Try: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) can't make virtual environments; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@
