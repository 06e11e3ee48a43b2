# Everything runs in .venv, which the first target makes. Needs Python 3.11+ and make.
PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
BIN    := $(VENV)/bin
# Compiled modules are kept: each process that a test starts would compile them again.
unexport PYTHONDONTWRITEBYTECODE
# One compute thread a process unless told otherwise: the fleet's processes share the cores.
export OMP_NUM_THREADS ?= 1

# pip tells what it downloads: its minutes are not silent.
PIP_FLAGS := --disable-pip-version-check --no-warn-script-location -c constraints.txt

# What needs no peer, no GPU, and not much time.
FAST   := not slow and not vllm and not dynamo and not gpu

.PHONY: serve gpu test test-all explore lint format bench check-results seams docs clean

serve: $(VENV)/.serve
	$(BIN)/pigou serve $(ARGS)

# Needs a CUDA device, and no tools: says what works on it and how fast; exit code 3 without CUDA.
gpu: $(VENV)/.lab
	$(BIN)/python -m pigou_lab.gpu_check $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "$(FAST)" $(ARGS)

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

explore: $(VENV)/.dev
	$(BIN)/python -m pytest -m "$(FAST)" --hypothesis-profile=explore $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=tools $(BIN)/mypy tools

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev
	for b in engine.core worker.kv_transfer gateway.overhead worker.throughput; do $(BIN)/python -m benchmarks.$$b $(ARGS) || exit 1; done

# Simulated figures of docs/results, a sample, against the pages: about five minutes.
check-results: $(VENV)/.dev
	$(BIN)/python -m tools.check_results $(ARGS)

# Interfaces of other engines that adapters rely on, against their newest releases (downloads wheels).
seams: $(VENV)/.dev
	$(BIN)/python -m tools.seams $(ARGS)

docs: $(VENV)/.dev
	$(BIN)/python -m tools.cli_reference > docs/reference/cli.md

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.serve: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing Pigou and PyTorch into $(VENV): a few minutes the first time."
	$(BIN)/python -m pip install $(PIP_FLAGS) -e '.[worker,report,traces]'
	touch $@

$(VENV)/.lab: $(VENV)/.serve lab/pyproject.toml
	$(BIN)/python -m pip install $(PIP_FLAGS) -e './lab[forecast]'
	touch $@

$(VENV)/.dev: $(VENV)/.lab
	$(BIN)/python -m pip install $(PIP_FLAGS) -e '.[dev]'
	touch $@
