# `make help` prints a line for each target: the text after `##`.
PYTHON ?= python3
VENV := .venv
SOURCES := rtx hydra_plugins tests $(wildcard benchmarks)
PYTEST := $(VENV)/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# Test files that are fast, and find most mistakes.
QUICK := tests/test_style.py tests/test_config.py tests/settings tests/commandline \
  tests/evaluation tests/sweep/test_grids.py tests/report/test_formats.py \
  tests/data/test_sampler.py tests/data/test_recall.py tests/attention/test_bad_input.py
# Options of the campaigns.
MINUTES ?= 20
KILLS ?= 100

.PHONY: help train test lint types quick presets fuzz faults docs format
.DELETE_ON_ERROR:

help: ## print this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1|\2/p' $(MAKEFILE_LIST) \
	  | while IFS='|' read -r target text; do printf '%-14s%s\n' "$$target" "$$text"; done

train: $(VENV)/.installed ## set up, then train on the embedded default (4 to 11 minutes)
	@$(VENV)/bin/rtx train

test: lint types ## all checks and tests that a change must pass
	$(PYTEST)

lint: $(VENV)/.installed-dev ## format, lint, and which room may import which
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/lint-imports --no-cache --no-logo

# The variable keeps pyright from asking a server for its latest version.
types: $(VENV)/.installed-dev ## check types
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(VENV)/bin/pyright

quick: lint ## lint and fast tests, in less than a minute
	$(PYTEST) -m "not slow" $(QUICK)

presets: $(VENV)/.installed-dev ## every preset with all commands, made small (about an hour)
	$(VENV)/bin/python -m tests.campaigns.presets

fuzz: $(VENV)/.installed-dev ## fuzz what rtx reads, MINUTES=20 for each reader
	$(VENV)/bin/python -m tests.campaigns.fuzz --minutes $(MINUTES)

faults: $(VENV)/.installed-dev ## kill real runs at random moments, KILLS=100 times
	$(VENV)/bin/python -m tests.campaigns.faults --kills $(KILLS)

docs: $(VENV)/.installed-docs ## build the pages of docs/ as a site in site/
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict
	@echo "site/index.html"

format: $(VENV)/.installed-dev ## format the code and mend what ruff can
	$(VENV)/bin/ruff format $(SOURCES)
	$(VENV)/bin/ruff check --fix $(SOURCES)

# The stamps make an installation happen once, and again when pyproject.toml changes.
$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "installing rtx and what it needs into $(VENV) (once; a few minutes)"
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	@echo "installing rtx, what it needs and its test tools into $(VENV) (once; a few minutes)"
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/bin/python
	@echo "installing rtx and what its site is built with into $(VENV) (once; a few minutes)"
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@ $(VENV)/.installed

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2> /dev/null || { \
	  echo "rtx needs Python 3.11, 3.12 or 3.13; $(PYTHON) is $$($(PYTHON) --version 2> /dev/null || echo missing)." \
	    "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
