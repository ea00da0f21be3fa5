# README's two commands: `make tune` and `make test`. Both set up .venv first and skip that when nothing changed.
# `make help` shows each target with the line above it that begins with ##.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CPP     := csrc/*.cpp csrc/*.h tools/msl/cpp/*.cpp tools/msl/cpp/*.h
SOURCES := pyproject.toml CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.h)
ARGS   ?=
PIP     := $(BIN)/python -m pip install --disable-pip-version-check
INSTALL := $(PIP) -e '.[cpu]'
# Fails with the reason where the compiled kernel does not load.
KERNEL := $(BIN)/python -c 'import logging, sys; logging.disable(); from mla_tuner import backends; sys.exit(backends.get("cpu").available()[1] or None)'
COMPILER := $(shell command -v $${CXX:-c++} || command -v g++ || command -v clang++)

.PHONY: setup setup-tests tune test lint types unit test-serving test-share test-metal-full check format sanitize check-macos bench-cpu replay clean help

# A kernel that does not load (no compiler then, another MLX since) makes the last set-up out of date.
## Makes .venv, builds, installs: what `make` alone does.
setup:
	@$(KERNEL) 2>/dev/null || rm -f $(VENV)/installed
	@$(MAKE) --no-print-directory $(VENV)/installed

$(VENV)/installed: $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "mla-tuner needs Python 3.10 or newer: make PYTHON=python3.x")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --quiet
	@$(KERNEL) || echo "only MLX's own paths run; the build tells more: $(INSTALL) --verbose"
	@touch $@

## What lint, types and tests need besides; who only wants to tune does not wait for it. Builds nothing anew.
setup-tests: setup
	@test $(VENV)/tests-installed -nt $(VENV)/installed || $(PIP) --quiet 'mla-tuner[cpu,test]'
	@touch $(VENV)/tests-installed

## Tunes this device; options go through ARGS: make tune ARGS="--budget 20m".
tune: setup
	$(BIN)/mla-tune --device auto --budget 265s $(ARGS)

## What CI runs: lint, types and unit.
test: lint types unit

## ruff and clang-format; changes nothing.
lint: setup-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)

## mypy --strict.
types: setup-tests
	$(BIN)/mypy

# Without the kernel its tests are skipped; with a compiler here they fail instead.
## The tests that take seconds each; some of them: make unit ARGS="-k policy".
unit: setup-tests
	$(if $(COMPILER),MLA_TUNER_REQUIRE_NATIVE=1) $(BIN)/python -m pytest -m 'not slow' $(ARGS)

## All of serving: the server of mlx-lm with 8 clients and 200 requests, and every family of models.
test-serving: setup-tests
	$(if $(COMPILER),MLA_TUNER_REQUIRE_NATIVE=1) $(BIN)/python -m pytest tests/test_serving*.py tests/test_integrations*.py $(ARGS)

## The minutes of sharing: hostile tables, a server's 60 s under load, a fleet against one machine.
test-share: setup-tests
	$(BIN)/python -m pytest -m slow tests/test_share*.py tests/test_server*.py tests/test_fleet*.py tests/test_html_report*.py $(ARGS)

## The Metal texts under the emulator's checkers, with longer contexts and in two orders of threads.
test-metal-full: setup-tests
	$(BIN)/python -m pytest -m slow tests/conformance/test_metal.py tests/test_metal_kernels.py $(ARGS)

## The shared tables of tuning_db/: schema, legal plans, winners that follow from their evidence.
check: setup
	$(BIN)/mla-tune share check

## Lets ruff and clang-format rewrite what they can.
format: setup-tests
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

## The CPU kernel alone under ASan, UBSan and TSan; 2-4 minutes the first time.
sanitize:
	$(MAKE) -C tools/sanitize

## Cross-compiles csrc/ for macOS with zig; the first run downloads about 140 MB.
check-macos:
	$(PYTHON) -m tools.macos.check

## The figures of docs/performance-cpu.md; with torch too after `.venv/bin/pip install '.[peers]'`.
bench-cpu: setup
	$(BIN)/python -m tools.bench_cpu $(ARGS)

## The table of docs/tuning.md: the tuner's and the policy's scores on recordings and simulated devices.
replay: setup
	$(BIN)/python -m tools.replay $(ARGS)

## Removes .venv, build and dist.
clean:
	rm -rf $(VENV) build dist

## Shows these lines.
help:
	@awk '/^## / { said = substr($$0, 4); next } \
	  said && /^[a-z-]+:/ { sub(/:.*/, ""); printf "make %-16s %s\n", $$0, said } \
	  { said = "" }' $(firstword $(MAKEFILE_LIST))
