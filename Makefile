# Every target works on a clean clone and sets up what it needs in .venv; `make test ARGS="-k retry -x"` passes options on.

# The first that is new enough.
PYTHON ?= $(shell for each in python3 python3.13 python3.12 python3.11; do \
	$$each -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$each && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
ARGS ?=

.PHONY: demo test test-slow fuzz check bench bench-quick bench-peers docs screens clean

demo: $(VENV)/demo.stamp
	@$(BIN)/python -m examples.flights $(ARGS)

# Most of what tests do is wait for servers, so more of them run at once than there are cores. In the order of their
# names: xdist's own, most tests of a file first, would leave the files of few and long ones to the end, one after another.
test: $(VENV)/dev.stamp
	@$(BIN)/python -m pytest -m "not slow" --numprocesses 4 --dist loadscope --no-loadscope-reorder $(ARGS)

test-slow: $(VENV)/dev.stamp
	@$(BIN)/python -m pytest -m slow $(ARGS)

fuzz: $(VENV)/fuzz.stamp
	@$(BIN)/python -m tests.fuzz.run $(ARGS)

# pyright would otherwise ask the registry at each run whether there is a newer one.
check: export PYRIGHT_PYTHON_IGNORE_WARNINGS = 1
# mkdocs-material would otherwise print a page about its future at each build.
check docs: export NO_MKDOCS_2_WARNING = 1
check: $(VENV)/dev.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/bench.stamp
	@$(BIN)/python -m benches $(ARGS)

bench-quick: $(VENV)/bench.stamp
	@$(BIN)/python -m benches --quick $(or $(ARGS),import memory rabbitmq ordered)

# The rest of the field, ten minutes; once for a release of one of them.
bench-peers: $(VENV)/peers.stamp
	@$(BIN)/python -m benches peers $(ARGS)

docs: $(VENV)/dev.stamp
	$(BIN)/mkdocs build --strict

# The screens of the command line, taken anew in a real terminal.
screens: $(VENV)/dev.stamp
	@$(BIN)/python -m tests.cli.screens docs/screens

clean:
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp says which of the extras are installed, for the pyproject.toml that it is newer than.

$(VENV)/demo.stamp: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[rabbitmq,sql]' 'rich>=13,<16'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/bench.stamp: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[bench]'
	@touch $@

$(VENV)/peers.stamp: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[bench-peers]'
	@touch $@

$(VENV)/fuzz.stamp: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[fuzz]'
	@touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "acemq needs Python 3.11 or newer: make PYTHON=/path/to/python3 …" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
