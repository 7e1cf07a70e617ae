# `make run` and `make test` are all that a fresh machine needs.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install run test test-all lint

install: .venv/installed

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ".[dev,deepspeed,lora]"
	touch $@

run: install
	$(BIN)/flexrlhf run

test: install
	$(BIN)/python -m pytest

# the whole product of the equality suite, beside everything that `make test` runs
test-all: install
	$(BIN)/python -m pytest -m "not gpu"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
