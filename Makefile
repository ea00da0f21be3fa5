# README's two commands: `make tune` and `make test`. Both set up .venv first and skip that when nothing changed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.h)
ARGS   ?=

.PHONY: setup tune test lint types unit format sanitize check-macos bench-cpu clean

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

# The CPU kernel alone under ASan, UBSan and TSan; 2-4 minutes the first time.
sanitize:
	$(MAKE) -C tools/sanitize

# Cross-compiles csrc/ for macOS with zig; the first run downloads about 140 MB.
check-macos:
	$(PYTHON) -m tools.macos.check

# The figures of docs/performance-cpu.md; with torch too after `.venv/bin/pip install '.[peers]'`.
bench-cpu: setup
	$(BIN)/python -m tools.bench_cpu $(ARGS)

clean:
	rm -rf $(VENV) build dist
