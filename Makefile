# make demo: install and fine-tune the embedded model; make demo PRESET=tiny-dpo: with another of its presets.
# make test: set up and show each promise once (ten minutes).
# make check: what a change must pass.  make unit, e2e, parity, faults, browser: a suite whole.
# make gpu: proof on a GPU, with the packages of $(PYTHON).
# TORCH=cuda|cpu chooses the build of torch; the default follows the machine (see docs/getting-started.md).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
SWANLAB_VERSION := $(shell sed -n 's/^swanlab==//p' constraints.txt)
TORCH ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
# uv where it is installed, which is quicker; else pip.
INSTALL := $(if $(shell command -v uv 2>/dev/null),uv pip install --python $(BIN)/python,$(BIN)/python -m pip install)
APP := $(VENV)/.app
DEVELOPMENT := $(VENV)/.development
INTEGRATIONS := $(VENV)/.integrations

# Tests that compare numbers, and the kernels of other machines, which add up in other orders.
NUMERIC := tests/unit/model/test_attention.py tests/unit/model/test_load.py tests/unit/parallel/test_optimizer.py \
  tests/unit/parallel/test_pipeline.py tests/unit/model/test_qlora.py tests/unit/model/test_rotary.py \
  tests/unit/test_rounding.py tests/unit/parallel/test_sequence_parallel.py tests/unit/objectives/test_sft_loss.py \
  tests/unit/parallel/test_tensor_parallel.py tests/parity/test_parity.py
SSE := ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41
AVX2 := ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
AVX512 := ATEN_CPU_CAPABILITY=avx512 MKL_ENABLE_INSTRUCTIONS=AVX512

.PHONY: setup demo check gpu test test-all test-browser slurm test-slurm test-ray test-integrations integrations test-kernels unit e2e parity faults browser docs pictures bench lint clean

setup: $(DEVELOPMENT)

# The command and its pages: all that the demo needs.
# The CPU build of torch is a version of its own (+cpu) where the package index offers it; else the plain one is taken.
$(APP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --quiet -c constraints.txt pip setuptools
ifeq ($(TORCH),cpu)
	$(INSTALL) --quiet "torch==$(TORCH_VERSION)+cpu" 2>/dev/null || $(INSTALL) --quiet -c constraints.txt torch
else
	$(INSTALL) --quiet -c constraints.txt torch
endif
	$(INSTALL) --quiet -c constraints.txt --editable ".[ui,eval]"
	touch $(APP)

$(DEVELOPMENT): $(APP)
	$(INSTALL) --quiet -c constraints.txt --editable ".[test]"
	touch $(DEVELOPMENT)

demo: $(APP)
	$(BIN)/tunesmith demo $(PRESET)

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Without the tests marked slow; two at a time.
test: setup lint
	$(BIN)/python -m pytest -n 2 -m "not slow and not long"

test-all: setup lint
	$(BIN)/python -m pytest -n 2 tests/unit tests/parity tests/e2e
	$(BIN)/python -m pytest -n 2 tests/faults

# Chromium from the system's packages where that can be had, else Playwright's own.
test-browser: setup
	command -v chromium >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1 \
	  || { test "$$(id -u)" = 0 && apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q chromium; } \
	  || { sudo -n apt-get update -q && sudo -n DEBIAN_FRONTEND=noninteractive apt-get install -y -q chromium; } \
	  || $(BIN)/playwright install chromium
	$(BIN)/python -m pytest -n 2 tests/browser

# SLURM from the system's packages; the tests start a cluster of their own in network namespaces, which needs root.
slurm:
	PATH="$$PATH:/usr/sbin:/sbin"; command -v slurmctld >/dev/null && command -v munged >/dev/null && command -v ip >/dev/null \
	  || { test "$$(id -u)" = 0 && apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q slurm-wlm munge iproute2; }

# All of them, also the runs that time limits cut. `make check` runs those that are not long, where it can.
test-slurm: setup slurm
	$(BIN)/python -m pytest -n 2 tests/slurm -m ""

# A Ray cluster of several nodes on this machine; needs no root. Ray is 240 MB, so `make setup` does without.
test-ray: setup
	$(INSTALL) --quiet -c constraints.txt --editable ".[ray]"
	$(BIN)/python -m pytest tests/ray

# Against large or foreign packages (trackers; liger, whose chunked losses are plain torch and need none of the triton
# that it requires; llama.cpp, which is compiled from the source whose converter the tests use), in an environment of
# their own; not part of `make check`.
test-integrations:
	$(MAKE) VENV=.venv-integrations integrations

integrations: $(INTEGRATIONS)
	$(BIN)/python -m pytest -n 2 tests/integrations

# GGML_NATIVE=OFF: where a virtual machine lists AMX among its instructions but cannot run it, native code crashes.
$(INTEGRATIONS): $(DEVELOPMENT)
	$(BIN)/python -m pip download --quiet -c constraints.txt --no-deps --no-binary llama-cpp-python \
	  --dest $(VENV)/source llama-cpp-python
	mkdir -p $(VENV)/llama_cpp_python
	tar -xzf $(VENV)/source/llama_cpp_python-*.tar.gz --strip-components=1 -C $(VENV)/llama_cpp_python
	CMAKE_ARGS="-DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF" \
	  $(BIN)/python -m pip install --quiet -c constraints.txt ./$(VENV)/llama_cpp_python
	$(INSTALL) --quiet -c constraints.txt --editable ".[integrations]"
	$(INSTALL) --quiet -c constraints.txt --no-deps liger-kernel
	$(INSTALL) --quiet "swanlab==$(SWANLAB_VERSION)"  # without the other pins: it wants an older protobuf
	$(INSTALL) --quiet -c constraints.txt protobuf  # sentencepiece does not read files with the older one; swanlab runs
	touch $(INTEGRATIONS)

# What the processor has of them; 1, 2 and 4 threads.
test-kernels: setup
	env $(SSE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(NUMERIC)
	! grep -qw avx2 /proc/cpuinfo || env $(AVX2) OMP_NUM_THREADS=2 $(BIN)/python -m pytest -n 2 $(NUMERIC)
	! grep -qw avx512f /proc/cpuinfo || env $(AVX512) OMP_NUM_THREADS=4 $(BIN)/python -m pytest -n 2 $(NUMERIC)

check: test-all test-browser
	$(MAKE) test-kernels NUMERIC="tests/unit/model/test_attention.py tests/unit/objectives/test_sft_loss.py"
	@echo "NOT TESTED here: Ray (make test-ray)"
	@$(BIN)/python -m tests.slurm.check

# Nine minutes on one GPU. Without `setup`, which would put another torch in the place of the machine's own; in a clone
# that is set up: make gpu PYTHON=.venv/bin/python
gpu:
	@$(PYTHON) -m benchmarks.gpu_proof

unit: setup
	$(BIN)/python -m pytest -n 2 tests/unit -m ""

e2e: setup
	$(BIN)/python -m pytest -n 2 tests/e2e -m ""

faults: setup
	BY_HAND=1 $(BIN)/python -m pytest -n 2 tests/faults -m ""

parity: setup
	$(BIN)/python -m pytest -n 2 tests/parity -m ""

browser: setup
	$(BIN)/python -m pytest -n 2 tests/browser -m ""

# The site, from README.md and docs/; a link that leads nowhere is an error.
docs: setup
	$(BIN)/sphinx-build --fail-on-warning --quiet docs build/docs

# The pictures of the README and the docs, from real runs.
pictures: setup
	$(BIN)/python -m docs.pictures

bench: setup
	$(BIN)/tunesmith bench tiny-full

clean:
	rm -rf $(VENV) build dist *.egg-info
