# Every target does its whole set-up in a fresh clone: an own .venv, torch, then this package.
# PYTHON=python3.12 make test   chooses the interpreter the .venv is made from.
# make test TORCH=torch==2.15.0 tests another torch, in a .venv of its own.
# make test WORKERS=0           runs the tests in one process instead of four (tests often wait, so
#                               this keeps two cores busy).

PYTHON ?= python3
TESTED_TORCH := torch==2.13.0
TORCH ?= $(TESTED_TORCH)
WORKERS ?= 4
VENV := .venv$(if $(filter-out $(TESTED_TORCH),$(TORCH)),-$(subst ==,-,$(TORCH)))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TESTABLE := $(VENV)/.testable
DOCUMENTABLE := $(VENV)/.documentable
SHOWN := examples,plot
TESTED := $(SHOWN),test,others,potentials,mpi,slurm,ray,docs
CORE := $(filter-out src/core/module.cpp,$(wildcard src/core/*.cpp))
SANITIZED ?= build/sanitize
SANITIZERS := thread address,undefined
STRESS ?= 2,600,1 3,600,2 5,400,3 8,100,4
OPTIMIZED ?= -O1

.DEFAULT_GOAL := help
.PHONY: help setup demo test sanitize lint format bench docs wheel clean

help: ## say what can be made
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10

setup: $(TESTABLE) ## make .venv and install everything the other targets need

# In one command, so that no other package brings another torch.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "unisono needs Python 3.11 or newer; found $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" -e ".[$(1)]"
endef

# What others have written is much to download, and a demo needs none of it.
$(READY): pyproject.toml setup.py $(wildcard src/core/*)
	$(call install,$(SHOWN))
	@touch $@

$(TESTABLE): pyproject.toml setup.py $(wildcard src/core/*)
	$(call install,$(TESTED))
	@touch $(READY) $(DOCUMENTABLE) $@

$(DOCUMENTABLE): pyproject.toml setup.py $(wildcard src/core/*)
	$(call install,docs)
	@touch $@

demo: $(READY) ## train on real digits, one rank against many, and write a report
	@$(BIN)/unisono demo

test: $(TESTABLE) ## all tests, with lint, types, layers and code blocks of the documentation
	$(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

# One program for each sanitizer; STRESS lists runs of ranks,steps,seed.
sanitize: $(SANITIZERS:%=$(SANITIZED)/%) ## the compiled core under thread, address and undefined-behaviour sanitizers
	@for program in $^; do for run in $(STRESS); do \
	  echo "$$program $$run" && $$program $$(echo $$run | tr , ' ') || exit 1; done; done

$(SANITIZED)/%: tests/core/stress.cpp $(wildcard src/core/*)
	@mkdir -p $(SANITIZED)
	$(CXX) -std=c++17 $(OPTIMIZED) -g1 -Wall -Wextra -Werror -Wno-psabi -DUNISONO_SANITIZE -fsanitize=$* \
	  -fno-sanitize-recover=all -Isrc/core tests/core/stress.cpp $(CORE) -pthread -o $@

lint: $(TESTABLE) ## ruff, pyright, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(TESTABLE) ## let ruff rewrite the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(TESTABLE) ## every benchmark, one table each
	$(BIN)/unisono bench

docs: $(DOCUMENTABLE) ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(TESTABLE) ## a source archive and a wheel for every Python from 3.11 on, into dist/
	$(BIN)/python -m build --outdir dist

clean: ## remove every .venv and everything that was built
	rm -rf .venv .venv-torch-* site build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
