# make demo: set up and fine-tune the embedded model.  make test: set up and pass the tests.
# TORCH=cuda|cpu chooses the build of torch; the default follows the machine (see README, "Choosing torch").

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-browser parity faults bench lint clean

setup: $(STAMP)

# The CPU build is a version of its own (+cpu) where the package index offers it; else the plain one is taken.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt pip setuptools
ifeq ($(TORCH),cpu)
	$(BIN)/python -m pip install --quiet "torch==$(TORCH_VERSION)+cpu" 2>/dev/null \
	  || $(BIN)/python -m pip install --quiet -c constraints.txt torch
else
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
endif
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable ".[test]"
	touch $(STAMP)

demo: setup
	$(BIN)/tunesmith demo

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: setup lint
	$(BIN)/python -m pytest

# Chromium from the system's packages where that can be had, else Playwright's own.
test-browser: setup
	command -v chromium >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1 \
	  || { test "$$(id -u)" = 0 && apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q chromium; } \
	  || { sudo -n apt-get update -q && sudo -n DEBIAN_FRONTEND=noninteractive apt-get install -y -q chromium; } \
	  || $(BIN)/playwright install chromium
	$(BIN)/python -m pytest tests/browser

faults: setup
	$(BIN)/python -m pytest tests/faults -m ""

parity: setup
	$(BIN)/python -m pytest tests/parity -m ""

bench: setup
	$(BIN)/tunesmith bench tiny-full

clean:
	rm -rf $(VENV) build dist *.egg-info
