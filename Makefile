# Everything lives in .venv; `make demo` and `make test` make what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CODE := adapters bench demo descriptors gateway nixl_client objectcache storage_server tests

.PHONY: demo test check format lint types bench-smoke install clean

demo: $(STAMP)
	$(BIN)/python -m demo

test: $(STAMP)
	$(BIN)/python -m pytest

check: lint types test bench-smoke

format: $(STAMP)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

lint: $(STAMP)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)

types: $(STAMP)
	$(BIN)/mypy

bench-smoke: $(STAMP)
	$(BIN)/objectcache bench aggregate --smoke

install: $(STAMP)

# torch first and pinned: left to choose, pip takes a build with gigabytes of CUDA
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ucx,plot,torch,dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
