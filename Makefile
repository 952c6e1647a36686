# The two commands that matter: `make demo` runs the main job, `make test` runs the tests.
# Both create .venv when it is missing and install into it only when pyproject.toml or constraints.txt
# has changed. The install is editable, so an edit of the source needs no new one.
#
#   make demo PYTHON=python3.12        another interpreter (3.11 or newer)
#   make test PYTEST_ARGS="-k plan"    other arguments for pytest
#   make bench BENCH_ARGS=--quick      a look at every benchmark

PYTHON ?= python3
VENV ?= .venv
# Each worker imports torch: four of them keep a many-core machine from filling its memory. A file stays in one worker, which
# makes the runs and tables that its tests share once; tests/conftest.py has the order, the longest files first.
WORKERS := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --durations 20 --durations-min 2
PART ?= 0/1
PYTEST_ARGS ?= $(WORKERS) -m "not nightly and not weekly"

ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
PIP := $(BIN)/pip.exe
else
BIN := $(VENV)/bin
PIP := $(BIN)/pip
endif

INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
RUN_READY := $(VENV)/run-installed
DEV_READY := $(VENV)/dev-installed

# Tests start many processes, and each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help dev demo chat test nightly weekly bench docs lint format clean

help:
	@echo "make demo    fine-tune the built-in model on the built-in data, then print where the report is"
	@echo "make chat    fine-tune a small chat model on the conversations of eight made-up clinics, privately"
	@echo "make dev     create .venv with everything that tests need"
	@echo "make test    run the tests of every change"
	@echo "make nightly run more and larger cells of the same (PART=1/20: a twentieth of them, as CI does after make test)"
	@echo "make weekly  audits of a size that takes many minutes"
	@echo "make bench   measure speed and growth, against other frameworks too, into docs/performance.md"
	@echo "make docs    build the documentation as a site, in build/site"
	@echo "make lint    ruff, mypy, and how large and scattered the code is"
	@echo "make format  let ruff rewrite what it can"
	@echo "make clean   remove .venv, caches and build outputs (never runs/)"

dev: $(DEV_READY)

demo: $(RUN_READY)
	$(BIN)/secure-fed demo

# gguf reads the weights of the chat model that examples/chat/smollm2.py downloads.
chat: $(RUN_READY)
	$(INSTALL) --quiet gguf
	$(BIN)/python examples/replay.py docs/first_chat.md --in runs/chat

test: $(DEV_READY)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

nightly: $(DEV_READY)
	$(BIN)/python -m pytest $(WORKERS) -m nightly --part $(PART)

weekly: $(DEV_READY)
	$(BIN)/python -m pytest -m weekly -s

bench: $(DEV_READY)
	$(BIN)/python benchmarks/bench.py $(BENCH_ARGS)

docs: $(DEV_READY)
	$(INSTALL) --quiet --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir build/site
	@echo build/site/index.html

lint: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python benchmarks/size.py

format: $(DEV_READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written only after pip succeeded, so an interrupted install starts again.
$(RUN_READY): pyproject.toml constraints.txt | $(PIP)
	$(INSTALL) --editable .
	@touch $@

# The development install contains the plain one: it satisfies `make demo` too.
$(DEV_READY): pyproject.toml constraints.txt | $(PIP)
	$(INSTALL) --editable ".[dev]"
	@touch $(RUN_READY) $@

# pip is the last thing that venv puts there: with pip present, the environment is whole.
$(PIP):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("secure-fed needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": name another one, as in make $(firstword $(MAKECMDGOALS)) PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
