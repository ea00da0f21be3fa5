# README's two commands: `make tune` and `make test`. Both set up .venv first and skip that when nothing changed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.h)
ARGS   ?=

.PHONY: setup tune test lint types unit format sanitize check-macos clean

setup: $(VENV)/installed

$(VENV)/installed: $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "mla-tuner needs Python 3.10 or newer: make PYTHON=python3.x")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cpu,test]'
	@touch $@

tune: setup
	$(BIN)/mla-tune --device auto $(ARGS)

test: lint types unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror csrc/*.cpp csrc/*.h

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/python -m pytest $(ARGS)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i csrc/*.cpp csrc/*.h

clean:
	rm -rf $(VENV) build dist
