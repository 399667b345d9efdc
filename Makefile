# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_ARGS ?=

# One thread a process: workers and test processes each own a core.
export OMP_NUM_THREADS ?= 1

.PHONY: setup check test quickstart quickstart-tiny clean help

help:
	@echo "make quickstart       the main job on SmolLM2-135M, about 7 minutes on two cores"
	@echo "make quickstart-tiny  the same on a tiny model trained in place, about 2 minutes"
	@echo "make test             all tests"
	@echo "make check            format, lint, types, import rules, spelling"
	@echo "make setup            only create $(VENV)"
	@echo "make clean            remove $(VENV) and caches (runs/ and models/ stay)"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Ratoon needs Python 3.11 or later, but $(PYTHON) is " + sys.version.split()[0] + ". Say: make PYTHON=python3.12 setup") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[tasks]' \
	  || echo "NOTE: reasoning-gym could not be installed (one of its dependencies needs a C compiler). Its tests are skipped; all else works."
	@touch $(STAMP)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 $(TEST_ARGS)

quickstart: $(STAMP)
	$(BIN)/ratoon quickstart

quickstart-tiny: $(STAMP)
	$(BIN)/ratoon quickstart --tiny

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
