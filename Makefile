# Everything lives in .venv; `make demo` and `make test` make what they need.
PYTHON ?= python3
PROCESSES ?= 3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CEPH_LACKS := CHECKSUMS,CONDITIONAL_DELETE,CONDITIONS,EXPIRY,LIFECYCLE,MULTIPART_DETAILS,PART_BOUNDARIES,REPEATED_COMPLETION
SEAWEEDFS_LACKS := $(CEPH_LACKS),KEYS,MISSING_BUCKETS,REPEATED_PARTS
CODE := bench descriptors fuzz gateway nixl_client objectcache storage_server tests

# each of the hundreds of processes that tests start would compile all modules again
unexport PYTHONDONTWRITEBYTECODE

# what an installation needs, told in one line before anything is downloaded
define NEEDED
command -v $(PYTHON) >/dev/null || { echo "needs Python 3.11 or later: make PYTHON=<interpreter>" >&2; exit 2; }; \
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "needs Python 3.11 or later, and $(PYTHON) is older: make PYTHON=<interpreter>" >&2; exit 2; }; \
$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	{ echo "needs venv: $(PYTHON) has none (Debian: apt install python3-venv)" >&2; exit 2; }; \
command -v $${CC:-gcc} >/dev/null || { echo "needs a C compiler: $${CC:-gcc} is missing (Debian: apt install gcc libc6-dev)" >&2; exit 2; }; \
$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || \
	{ echo "needs Python.h: $(PYTHON) has no headers (Debian: apt install python3-dev)" >&2; exit 2; }; \
echo '#include <linux/userfaultfd.h>' | $${CC:-gcc} -E - >/dev/null 2>&1 || \
	{ echo "needs the headers of libc and Linux (Debian: apt install libc6-dev)" >&2; exit 2; }
endef

.PHONY: reference demo demo-orchestrator test test-slow test-fast test-engines test-next flaky test-minio test-ceph test-seaweedfs test-cuda bounds check format lint types bench-smoke clients engines figures results image-check wheel compatibility crash docs cluster-faults fuzz peers install clean

demo: $(STAMP)
	$(BIN)/objectcache demo --plot out/demo-timeline.png

# an orchestrator in front of two vLLM engines: register, route, fail
demo-orchestrator: $(STAMP) engines
	$(BIN)/python -m bench.experiments.orchestrator_demo

# files of tests are shared out among processes in their order, so that all end at about the same time;
# `make test PROCESSES=1` runs one test after the other
PYTEST := $(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder

# every part of the product, by tests of two seconds at most (tests/README.md), with .venv alone: five minutes on two
# cores
test: $(STAMP)
	$(PYTEST) --hypothesis-profile fast -m "not slow and not environments and not bench_smoke and not engines_full"
	$(BIN)/objectcache demo --quick --plot out/demo-timeline.png

# what `test` leaves out, and all examples of properties
test-slow: $(STAMP) clients engines
	$(PYTEST) -m "(slow or environments or bench_smoke or hypothesis) and not engines_full"

# what needs no server, no network and no engine: about a minute. transformers alone takes each process seconds to import
test-fast: $(STAMP)
	$(BIN)/python -m pytest --numprocesses logical --dist worksteal --hypothesis-profile fast \
		-m "not needs_server and not slow" --ignore tests/unit/nixl_client/connectors/test_transformers.py \
		tests/unit tests/architecture tests/contract

# the tests with vLLM and LMCache that take minutes each
test-engines: $(STAMP) engines
	$(BIN)/python -m pytest -m engines_full tests/engines

# the vLLM tests of `test-slow` with the Python code of the next vLLM, over the CPU kernels of the present one
NEXT := tests/engines/test_vllm*.py
test-next: $(STAMP) engines
	$(BIN)/python -m bench.beds.kv_peers.install vllm-next
	OBJECTCACHE_ENGINES_PYTHON="$$($(BIN)/python -c 'from bench.beds.kv_peers.install import VLLM_NEXT; print(VLLM_NEXT.python)')" \
		$(PYTEST) -m "environments and not engines_full" $(NEXT)

# tests that fail by chance: those of `test` five times and all once, in random order, beside two busy processes. Hours
flaky: $(STAMP) clients engines
	$(BIN)/python -m tests.flaky

# the rules of stores, and prefixes from there, in front of an S3 service: OBJECTCACHE_TEST_S3_ENDPOINT names it (and
# ..._ACCESS_KEY_ID, ..._SECRET_ACCESS_KEY; MinIO's own account by default), OBJECTCACHE_TEST_S3_LACKS what it lacks
# (tests/contract/store/rules.py). Buckets whose names start with objectcache-test- are emptied.
test-minio: $(STAMP)
	@test -n "$$OBJECTCACHE_TEST_S3_ENDPOINT" || { echo "set OBJECTCACHE_TEST_S3_ENDPOINT, for example to http://127.0.0.1:9000"; exit 2; }
	$(BIN)/python -m pytest -k "TestService or named" tests/contract/store/test_object_stores.py tests/integration/test_foreign_upstream.py

# the same in front of Ceph's RGW, which Debian's packages bring: as root
test-ceph: $(STAMP)
	OBJECTCACHE_TEST_S3_LACKS=$(CEPH_LACKS) $(BIN)/python -m tests.support.foreign_services ceph -- $(MAKE) test-minio

# the same in front of SeaweedFS, which a package of PyPI brings
test-seaweedfs: $(STAMP)
	OBJECTCACHE_TEST_S3_LACKS=$(SEAWEEDFS_LACKS) $(BIN)/python -m tests.support.foreign_services seaweedfs -- $(MAKE) test-minio

# what only a GPU shows: layers written and decoded there
test-cuda: $(STAMP)
	$(BIN)/python -m pytest tests/integration/test_cuda.py

# ten minutes of writers in bounded caches, with kills in between
bounds: $(STAMP)
	$(BIN)/python -m tests.faults.bounds

# everything that CI runs
check: test
	$(MAKE) --jobs=2 --output-sync=target lint types clients engines
	$(MAKE) test-slow
	$(MAKE) test-next NEXT="$(addprefix tests/engines/test_vllm,.py _tier.py _native.py)"

format: $(STAMP)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

lint: $(STAMP)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)

types: $(STAMP)
	$(BIN)/mypy

# every bench at tiny sizes: does it work, not how fast
bench-smoke: $(STAMP) engines
	$(BIN)/python -m pytest --numprocesses 2 -m bench_smoke tests/bench

# the S3 clients the tests run, in environments of their own
clients: $(STAMP)
	$(BIN)/python -m tests.clients.install

# vLLM and LMCache in an environment of their own, what SGLang and LMCache's files need beside it, and llama.cpp
engines: $(STAMP)
	$(BIN)/python -m bench.beds.kv_peers.install engines sglang lmcache_l2 llama_cpp

# measure every result again, in two hours on a machine that does nothing else; NAMES: some of them
results: $(STAMP) clients engines peers
	$(BIN)/python -m bench.results $(NAMES)
	$(BIN)/python -m bench.results --publish $(NAMES)

# the documents as a site, in out/site, to be read without a network
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# the settings of docs/reference/configuration.md, from the models that check them
reference: $(STAMP)
	$(BIN)/python -m tests.docs.reference

# the tables of README.md and docs/design/figures.md, from docs/results
figures: $(STAMP)
	$(BIN)/python -m bench.figures

compatibility: clients
	$(BIN)/python -m tests.clients --write docs/reference/compatibility.md

# kill the server at random points of a mixed load, 200 times, and check everything it had answered
crash: $(STAMP)
	$(BIN)/python -m tests.faults.crash --rounds 200

# build the image without Docker and try it: root, Debian's buildah and debootstrap
image-check: $(STAMP)
	$(BIN)/python -m docker.check

# wheels for x86_64 and aarch64 in dist/, tried in new environments of each Python that is here
wheel:
	$(PYTHON) docker/wheels.py $(WHEEL_OPTIONS)

# other software `bench aggregate` is measured beside
peers: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev-bench]'
	$(BIN)/python -m bench.beds.kv_peers.install mooncake lmcache

# kill, stop and cut off every role of a cluster, at every moment: as root, with etcd and iproute2
cluster-faults: $(STAMP)
	$(BIN)/python -m tests.faults.cluster_faults

fuzz: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev-fuzz]'
	$(BIN)/python -m fuzz.atheris_targets all -runs=20000 -max_len=4000

install: $(STAMP)

# torch first and pinned. TORCH_INDEX names an index for it: PyTorch's own for CPUs has a small build, PyPI's brings CUDA
$(STAMP): pyproject.toml constraints.txt objectcache/adapters/native.c
	@$(NEEDED)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ucx,demo,dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .venv-clients .venv-peers build dist objectcache/adapters/*.so out .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
