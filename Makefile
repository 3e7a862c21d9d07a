# `make help` prints a line for each target: the text after `##`.
PYTHON ?= python3
VENV := .venv
SOURCES := rtx hydra_plugins tests $(wildcard benchmarks docs)
PYTEST := $(VENV)/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# Test files that are fast, and find most mistakes.
QUICK := tests/test_style.py tests/test_tables.py tests/test_config.py tests/settings tests/commandline \
  tests/evaluation tests/sweep/test_grids.py tests/report/test_formats.py \
  tests/data/test_sampler.py tests/data/test_recall.py tests/attention/test_bad_input.py
# Options of the campaigns.
PYTHONS ?= 3.11 3.12 3.13
MINUTES ?= 20
KILLS ?= 100
CASES ?= 100
ATTACKS ?= 1000
# `make lock UPGRADE=--upgrade` takes newer releases; else versions stay where they can.
UPGRADE ?=
# Versions and hashes of what is installed: "Locked versions" in .github/CONTRIBUTING.md.
# LOCKED=no takes the newest releases that pyproject.toml allows.
LOCKED ?= yes
REQUIREMENTS := .ci/requirements
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet
COMPILE := $(VENV)/bin/uv pip compile --quiet --config-file $(REQUIREMENTS)/uv.toml --universal \
  --python-version 3.11 --fork-strategy fewest --generate-hashes --no-annotate --no-emit-package rtx \
  --no-emit-package torch --constraint $(REQUIREMENTS)/torch.txt --no-emit-index-url \
  --custom-compile-command "make lock" $(UPGRADE)

.PHONY: help train test pytest exhaustive lint types quick package coverage presets fuzz attacks faults docs \
  format lock clean
.DELETE_ON_ERROR:

help: ## print this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1|\2/p' $(MAKEFILE_LIST) \
	  | while IFS='|' read -r target text; do printf '%-16s%s\n' "$$target" "$$text"; done

train: $(VENV)/.installed ## set up, then train on the embedded default (4 to 11 minutes)
	@$(VENV)/bin/rtx train

# Types and tests are checked in parallel: neither keeps all cores busy the whole time.
test: lint ## all checks and tests that a change must pass
	@$(MAKE) --no-print-directory --jobs=2 types pytest

pytest: $(VENV)/.installed-dev ## the tests of `make test`, without lint and types
	$(PYTEST) -m "not exhaustive"

exhaustive: $(VENV)/.installed-dev ## the tests that `make test` leaves out: tests/exhaustive.txt
	$(PYTEST) -m exhaustive

lint: $(VENV)/.installed-dev ## format, lint, and which room may import which
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/lint-imports --no-cache --no-logo

# The variable keeps pyright from asking a server for its latest version.
types: $(VENV)/.installed-dev ## check types
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(VENV)/bin/pyright

quick: lint ## lint and fast tests, in less than a minute
	$(PYTEST) -m "not slow" $(QUICK)

package: $(VENV)/.installed ## build dist/, install it in empty environments, run README's commands
	@$(INSTALL) 'uv>=0.9,<1'
	$(VENV)/bin/python -m tests.campaigns.install --python $(PYTHONS)

# OC_CAUSE: OmegaConf words its errors in another way while a tracer runs, unless this is 0.
coverage: $(VENV)/.installed-dev ## all tests, and which lines of rtx/ none of them runs
	OC_CAUSE=0 $(PYTEST) --cov --cov-report=term:skip-covered --cov-report=html

presets: $(VENV)/.installed-dev ## every preset with all commands, made small (about an hour)
	$(VENV)/bin/python -m tests.campaigns.presets

fuzz: $(VENV)/.installed-dev ## fuzz what rtx reads, MINUTES=20 for each reader
	$(VENV)/bin/python -m tests.campaigns.fuzz --minutes $(MINUTES)

attacks: $(VENV)/.installed-dev ## links, pipes and odd contents in place of files, ATTACKS=1000 cases
	$(VENV)/bin/python -m tests.campaigns.attacks --cases $(ATTACKS)

faults: $(VENV)/.installed-dev ## real runs: KILLS=100 kills, then CASES=100 system calls that fail
	$(VENV)/bin/python -m tests.campaigns.faults --kills $(KILLS)
	$(VENV)/bin/python -m tests.campaigns.injected --cases $(CASES)

docs: $(VENV)/.installed-docs ## build the pages of docs/ as a site in site/
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict
	@echo "site/index.html"

format: $(VENV)/.installed-dev ## format the code and mend what ruff can
	$(VENV)/bin/ruff format $(SOURCES)
	$(VENV)/bin/ruff check --fix $(SOURCES)

lock: | $(VENV)/bin/python ## write the lists of .ci/requirements again
	@$(INSTALL) 'uv>=0.9,<1'
	$(COMPILE) --output-file $(REQUIREMENTS)/dev.txt --extra dev pyproject.toml
	$(COMPILE) --output-file $(REQUIREMENTS)/train.txt --constraint $(REQUIREMENTS)/dev.txt pyproject.toml

clean: ## remove what was built; keeps .venv, data/ and outputs/
	rm -rf site dist build .coverage .coverage.* htmlcov .pytest_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +

# $(call install,LIST,EXTRA): the list with its hashes, then rtx with torch, which no list has.
define install
	@echo "installing rtx and what it needs into $(VENV) (once; a few minutes)"
	@if [ "$(LOCKED)" = yes ]; then \
	  $(INSTALL) --require-hashes --no-deps --requirement $(REQUIREMENTS)/$(1).txt && \
	  $(INSTALL) --constraint $(REQUIREMENTS)/torch.txt --editable '.$(2)'; \
	else $(INSTALL) --editable '.$(2)'; fi
endef

# The stamps make an installation happen once, and again when a list or pyproject.toml changes.
$(VENV)/.installed: pyproject.toml $(REQUIREMENTS)/train.txt | $(VENV)/bin/python
	$(call install,train)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(REQUIREMENTS)/dev.txt | $(VENV)/bin/python
	$(call install,dev,[dev])
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/.installed
	@echo "installing what the site is built with into $(VENV) (once; a minute)"
	@$(INSTALL) --editable '.[docs]'
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2> /dev/null || { \
	  echo "rtx needs Python 3.11, 3.12 or 3.13; $(PYTHON) is $$($(PYTHON) --version 2> /dev/null || echo missing)." \
	    "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
