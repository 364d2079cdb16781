# Everything runs in a virtual environment of its own and needs only Python >= 3.11, make and the
# package registries. PYTHON and VENV choose the interpreter and the folder:
#   make test PYTHON=python3.12 VENV=.venv312

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=

BIN := $(VENV)/bin
# Tests compile much and run little.
QUICK := "$$XLA_FLAGS $$($(BIN)/python tests/quick.py)"
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# An environment that exists keeps its interpreter; asking for another must not pass unnoticed.
ifneq ($(origin PYTHON),file)
ifneq ($(wildcard $(BIN)/python),)
ifneq ($(shell $(PYTHON) --version 2>&1),$(shell $(BIN)/python --version 2>&1))
$(error $(VENV) holds $(shell $(BIN)/python --version), PYTHON=$(PYTHON) is another: name a new folder with VENV=, or run `make clean` first)
endif
endif
endif

.DEFAULT_GOAL := help
.PHONY: help train test test-slow test-all mutants zoo bench lint format types docs hooks ci clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(VENV)/.examples ## train a byte-level GPT through a pipeline of virtual devices; ARGS="--help"
	$(BIN)/python examples/train_gpt.py $(ARGS)

test: $(VENV)/.dev ## all tests but the slow ones, on JOBS processes (2); ARGS="-k name"
	XLA_FLAGS=$(QUICK) $(BIN)/python -m pytest -n $(JOBS) -m "not slow" $(ARGS)

test-slow: $(VENV)/.dev ## the slow tests: most of the parity grid, long runs; SLOW_PART=2/8 for an eighth
	XLA_FLAGS=$(QUICK) $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m "slow and not exhaustive" --ignore tests/examples/test_train_gpt.py $(ARGS)
	$(BIN)/python -m pytest -n $(JOBS) -m "slow and not exhaustive" tests/examples/test_train_gpt.py || [ $$? -eq 5 ]

test-all: test test-slow ## also the whole parity grid (half an hour): after a change of the kernel
	XLA_FLAGS=$(QUICK) $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m exhaustive --ignore tests/examples/test_train_gpt.py $(ARGS)
	$(BIN)/python -m pytest -m exhaustive tests/examples/test_train_gpt.py

mutants: $(VENV)/.dev ## mutation testing: 200 small changes of the engine, for hours; ARGS="--seed 13 --count 20"
	$(PIP) install "cosmic-ray ~= 8.7" "pytest-cov ~= 7.0"
	XLA_FLAGS=$(QUICK) $(BIN)/python -m tests.mutants --jobs $(JOBS) $(ARGS)

# An environment of its own: the packages pin many others. The second list installs without what it asks for.
zoo: ## models of other packages through `pipeline.split`, in .venv-zoo; wants PYTHON=python3.12
	@$(MAKE) --no-print-directory VENV=.venv-zoo .venv-zoo/.zoo
	XLA_FLAGS="$$XLA_FLAGS $$(.venv-zoo/bin/python tests/quick.py)" .venv-zoo/bin/python -m pytest -rs tests/zoo $(ARGS)

$(VENV)/.zoo: pyproject.toml tests/zoo/requirements.txt tests/zoo/alone.txt | $(BIN)/python
	@echo "installing shardpipe and the models of the zoo into $(VENV) (ten minutes the first time)"
	$(PIP) install --editable ".[test]" --requirement tests/zoo/requirements.txt
	$(PIP) install --no-deps --requirement tests/zoo/alone.txt
	@touch $@

bench: $(VENV)/.dev ## benchmarks; wants a quiet machine
	$(BIN)/python -m pytest bench $(ARGS)

lint: $(VENV)/.dev ## ruff, rules and formatting; and the length of sentences on pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.docs.prose

format: $(VENV)/.dev ## rewrite what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.dev ## mypy, strict, over the three packages
	$(BIN)/mypy

docs: $(VENV)/.docs ## the documentation site, into build/docs/index.html; warnings are errors
	$(BIN)/python -m sphinx -b html -W --keep-going --quiet -d build/doctrees docs build/docs $(ARGS)

hooks: $(VENV)/.dev ## run lint and types before every commit
	$(BIN)/pre-commit install

ci: ## what the CI machine runs, from a clean environment to the built wheel
	bash .ci/run

clean: ## remove the environment, caches and build results
	rm -rf $(VENV) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp per extra, so that the second run starts at once and a changed pyproject.toml reinstalls.
$(VENV)/.examples $(VENV)/.dev $(VENV)/.docs: $(VENV)/.%: pyproject.toml | $(BIN)/python
	@echo "installing shardpipe[$*] into $(VENV) (a few minutes the first time)"
	$(PIP) install --editable ".[$*]"
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) does not run or is older than Python 3.11: choose another with PYTHON=python3.12" >&2; \
	  exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$(PYTHON) cannot make a virtual environment: install its venv module (often the package python3-venv), or choose another with PYTHON=" >&2; \
	  exit 1; }
