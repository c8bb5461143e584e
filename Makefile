# Needs Python 3.11, make and a C++20 compiler; everything else is installed into .venv from constraints.txt.

PYTHON ?= $(shell command -v python3.11 || echo python3)
VENV   := .venv
BENCH  := .venv-bench
BIN    := $(VENV)/bin

BUILD_TOOLS := scikit-build-core nanobind cmake ninja numpy
CORE        := CMakeLists.txt $(wildcard src/recollect/_core/*.cpp src/recollect/_core/*.hpp)
PINS        := pyproject.toml constraints.txt
ARGS        ?=

# The build tools are in the environment (no isolation), so a rebuild compiles only what changed.
comma := ,
install_with = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
  --constraint constraints.txt --editable '.[$(subst +,$(comma),$(1))]'

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help install test demo lint docs bench soak sanitize wheel clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/core.stamp  ## build the core and install the package, editable, into .venv

test: $(VENV)/test.stamp $(VENV)/core.stamp  ## run the tests (ARGS="-k ring" to choose)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

demo: $(VENV)/demo.stamp $(VENV)/core.stamp  ## train SAC on Pendulum-v1 with collectors of its own, in a few minutes
	$(BIN)/python -m recollect demo $(ARGS)

lint: $(VENV)/lint.stamp $(VENV)/core.stamp  ## ruff, mypy --strict, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/docs.stamp $(VENV)/core.stamp  ## build the documentation into build/docs; warnings are errors
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -b html docs build/docs

soak: $(VENV)/test.stamp $(VENV)/core.stamp  ## long runs: many processes, many more property examples
	$(BIN)/python -m pytest -m "soak or hypothesis" --hypothesis-profile=soak --timeout=7200 \
	  -o faulthandler_timeout=7500 $(ARGS)

sanitize: $(VENV)/test.stamp $(VENV)/core.stamp  ## the core's tests under ThreadSanitizer and Address/UBSanitizer
	PYTHON=$(BIN)/python scripts/sanitize.sh $(ARGS)

bench: $(BENCH)/peers.stamp $(VENV)/core.stamp  ## time recollect beside other libraries, which get their own .venv-bench
	$(BIN)/python benchmarks/compare.py --env $(BENCH) $(ARGS)

wheel:  ## build the wheels into dist and try each without a compiler on every CPython from 3.11 on that is here
	$(PYTHON) scripts/wheel.py $(ARGS)

clean:  ## remove what the targets above made
	rm -rf $(VENV) $(BENCH) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f src/recollect/_core/*.so

$(VENV)/venv.stamp: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "recollect needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(BUILD_TOOLS)
	touch $@

$(VENV)/core.stamp: $(VENV)/venv.stamp $(PINS) $(CORE)
	$(call install_with,cli+web)
	touch $@

$(BENCH)/peers.stamp: benchmarks/setup.sh benchmarks/constraints.txt
	PYTHON=$(PYTHON) benchmarks/setup.sh $(BENCH)
	touch $@

# These depend on the core only by order: after a change of C++ it is built once, not once per set of extras.
$(VENV)/test.stamp: $(PINS) | $(VENV)/core.stamp
	$(call install_with,test+torch+jax+cli+progress+hdf5+parquet+video+images+mpi+http+ray+tensorboard+web+plot)
	touch $@

$(VENV)/demo.stamp: $(PINS) | $(VENV)/core.stamp
	$(call install_with,cli+torch+plot+web+tensorboard)
	touch $@

$(VENV)/lint.stamp: $(PINS) | $(VENV)/core.stamp
	$(call install_with,dev+test)
	touch $@

$(VENV)/docs.stamp: $(PINS) | $(VENV)/core.stamp
	$(call install_with,docs+test+ml-dtypes)
	touch $@
