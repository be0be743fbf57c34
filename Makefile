# Each target sets up what it needs in a fresh .venv: only Python >= 3.10, git and a C++ compiler are asked of the machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test lint format clean
help:
	@echo "make demo    train, quantize and compare a GRU on real data (about a minute)"
	@echo "make test    run the tests"
	@echo "make lint    run ruff and mypy"
	@echo "make format  let ruff rewrite the sources"
	@echo "make clean   remove .venv and build products"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else f"quant-gru needs Python 3.10 or newer, got {sys.version.split()[0]}; try: make PYTHON=python3.12")'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/quant-gru demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
