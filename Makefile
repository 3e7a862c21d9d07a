# make train: set up, then train on the embedded default.  make test: what every change must pass.
# make presets: every file of conf/model and conf/experiment through all commands, made small; half an hour.
# make docs: the pages of docs/ as a site in site/.
PYTHON ?= python3
VENV := .venv
SOURCES := rtx tests $(wildcard benchmarks)

.PHONY: train test docs format presets
.DELETE_ON_ERROR:

train: $(VENV)/.installed
	@$(VENV)/bin/rtx train

# The variable keeps pyright from asking a server for its latest version.
test: $(VENV)/.installed-dev
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/lint-imports --no-cache --no-logo
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(VENV)/bin/pyright
	$(VENV)/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

presets: $(VENV)/.installed-dev
	$(VENV)/bin/python -m tests.campaigns.presets

docs: $(VENV)/.installed-docs
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict
	@echo "site/index.html"

format: $(VENV)/.installed-dev
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
