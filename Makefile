# Everything here needs Python 3.11 or newer and make; `make setup` fetches the rest into .venv.
PYTHON ?= python3
QUICK ?=
CKPT ?= runs/quickstart/checkpoints/last.ckpt

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXPERIMENT := -c experiment/quickstart$(if $(filter-out 0,$(QUICK)), -c experiment/quick)

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test lint format typecheck bench clean

help: ## show this list
	@echo "adaflash: train adaptive diffusion drafters, and measure what they gain"
	@echo
	@sed -nE 's/^([a-z]+):[^#]*## (.*)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'
	@echo
	@echo "  PYTHON=python3.12  the Python that makes .venv (now: $(PYTHON))"

setup: $(READY) ## make .venv with what was tested (constraints.txt); does nothing if it is up to date

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "adaflash needs Python 3.11 or newer; $(PYTHON) says: $$($(PYTHON) --version 2>&1 | head -n 1)" >&2; \
	  echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$(PYTHON) could not make $(VENV); on Debian and Ubuntu the package python3-venv is needed." >&2; exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[quickstart,dev]'
	@touch $@

quickstart: setup ## fetch a small target, train a drafter, show tau and tokens/s by domain (QUICK=1: two minutes)
	$(BIN)/adaflash fetch smollm2-135m
	$(BIN)/adaflash fit $(EXPERIMENT)
	$(BIN)/adaflash validate $(EXPERIMENT) --ckpt_path $(CKPT)

test: setup ## run the tests (fetches the real target first, if it is not there)
	$(BIN)/adaflash fetch smollm2-135m
	$(BIN)/python -m pytest -n 2 --dist loadfile # one thread each: tests/conftest.py

lint: setup ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup ## mend what ruff can mend, and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: setup ## check the types
	$(BIN)/mypy -p adaflash

bench: setup ## measure the quickstart's drafter against plain decoding in one run (CKPT=another checkpoint)
	$(BIN)/adaflash validate $(EXPERIMENT) --ckpt_path $(CKPT)

clean: ## remove what tests and builds leave behind (keeps .venv, runs and the cache of targets)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find adaflash callbacks tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
