# Everything lives in .venv; `make demo` and `make test` make what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CODE := adapters bench demo descriptors fuzz gateway nixl_client objectcache storage_server tests

.PHONY: demo test test-engines check format lint types bench-smoke clients engines figures image-check compatibility crash fuzz peers install clean

demo: $(STAMP)
	$(BIN)/python -m demo

test: $(STAMP) clients engines
	$(BIN)/python -m pytest

# what `test` leaves out of the tests with vLLM and LMCache: minutes each
test-engines: $(STAMP) engines
	$(BIN)/python -m pytest -m engines_full tests/engines

check: lint types test bench-smoke

format: $(STAMP)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

lint: $(STAMP)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)

types: $(STAMP)
	$(BIN)/mypy

bench-smoke: $(STAMP) engines
	$(BIN)/objectcache bench aggregate --smoke
	$(BIN)/objectcache bench s3 --smoke
	$(BIN)/objectcache bench ladder --smoke
	$(BIN)/objectcache bench concurrency --smoke
	$(BIN)/objectcache bench scheduler --smoke
	$(BIN)/objectcache bench ttft --smoke
	$(BIN)/objectcache bench ttft --device cpu --smoke
	$(BIN)/objectcache bench engine --smoke
	$(BIN)/objectcache bench overlap --smoke
	$(BIN)/objectcache calibrate --smoke
	$(BIN)/objectcache calibrate --link --smoke
	$(BIN)/objectcache calibrate --model llama-3.1-8b --smoke

# the S3 clients the tests run, in environments of their own
clients: $(STAMP)
	$(BIN)/python -m tests.clients.install

# vLLM and LMCache, in an environment of their own
engines: $(STAMP)
	$(BIN)/python -m bench.kv_peers.install engines

# the tables of README.md and docs/figures.md, from docs/results
figures: $(STAMP)
	$(BIN)/python -m bench.figures

compatibility: clients
	$(BIN)/python -m tests.clients --write docs/compatibility.md

# kill the server at random points of a mixed load, 200 times, and check everything it had answered
crash: $(STAMP)
	$(BIN)/python -m tests.crash --rounds 200

# build the image without Docker and try it: root, Debian's buildah and debootstrap
image-check: $(STAMP)
	$(BIN)/python docker/check.py

# other software `bench aggregate` is measured beside
peers: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m bench.kv_peers.install mooncake lmcache

fuzz: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	$(BIN)/python -m fuzz.atheris_targets all -runs=20000 -max_len=4000

install: $(STAMP)

# torch first and pinned. TORCH_INDEX names an index for it: PyTorch's own for CPUs has a small build, PyPI's brings CUDA
$(STAMP): pyproject.toml constraints.txt adapters/native.c
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ucx,plot,torch,dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .venv-clients .venv-peers build adapters/*.so out .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
