# The targets create .venv and run in it; test-floor uses .venv-floor instead. A change of pyproject.toml or
# constraints.txt reinstalls .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
DEMO_INSTALLED := .venv/.installed-demo
# Worker processes. Each may compile a kernel, which takes a core and about 1 GB.
JOBS ?= 2

.PHONY: demo kernels test test-fast test-floor nightly mutants lint lock gpu-test sanitize bench plots docs docs-serve clean

# Installs the package without the development tools.
demo: $(DEMO_INSTALLED)
	$(BIN)/cute-flash demo

# One torch thread per worker, so that workers do not compete for cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# Lint, types, and all tests that need no GPU.
test: lint
	$(PYTEST) -m "not gpu"

# The tests that compile nothing, start no processes that import torch and do not compute for seconds. `make test` also
# imports tests/gpu.
test-fast: $(INSTALLED)
	$(PYTEST) --ignore=tests/gpu -m "not compiles and not processes and not slow and not gpu"

# The tests that depend on torch's behaviour (compile, functorch, autocast, arguments, torch.distributed), on the oldest
# torch that pyproject.toml allows: a step of releases, and of .ci/run where CUTE_FLASH_FLOOR=1. On x86_64, PyPI has the
# CUDA build, with gigabytes of CUDA packages; PIP_INDEX_URL can name an index of CPU builds.
FLOOR := .venv-floor
CONTRACTS := tests/score_mod/test_compile.py tests/score_mod/test_operations.py tests/test_ops.py tests/test_api.py \
  tests/test_bad_input.py tests/test_fuzz.py tests/decode/test_ops.py tests/decode/test_bad_input.py \
  tests/distributed/test_attn.py
# The cases of test_attn.py with 4 and 8 processes, which are left out here: two processes are enough.
MANY_PROCESSES := $(foreach n,4 8,--deselect 'tests/distributed/test_attn.py::test_results_are_those_of_one_process[$(n)-')

test-floor: $(FLOOR)/.installed
	OMP_NUM_THREADS=1 $(FLOOR)/bin/python -m pytest -q -n $(JOBS) --dist worksteal -m "not gpu" $(CONTRACTS) $(MANY_PROCESSES)

$(FLOOR)/.installed: Makefile
	test -x $(FLOOR)/bin/python || $(PYTHON) -m venv $(FLOOR)
	$(FLOOR)/bin/python -m pip install --quiet torch==2.9.1 numpy pytest pytest-xdist nvtx
	touch $@

# Random valid and invalid arguments, and random cases of context parallelism, for a minute each; random calls against
# the oracle; the compile gates of all kernels, also of those whose sources did not change.
nightly: $(INSTALLED)
	$(BIN)/python -m pytest -q -m "not gpu" tests/test_fuzz.py tests/distributed/test_random.py --fuzz-seconds=60
	$(BIN)/python -m pytest -q -m "not gpu" tests/test_random.py --random-calls=3000
	$(PYTEST) -m "compiles and not gpu" --all-kernels tests/lock tests/kernels tests/device tests/layouts

# Wrong versions of single lines: the tests must notice each of them.
mutants: $(INSTALLED)
	$(BIN)/python -m tests.mutants --jobs $(JOBS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Compares the machine code of all kernels of tests/lock with the recorded digests; `make test` checks a sample.
lock: $(INSTALLED)
	$(BIN)/python -m tests.lock check --jobs $(JOBS)

# Compiles the kernels in parallel, then runs the tests in parallel. A run that was stopped goes on; the log is the file.
gpu-test: $(INSTALLED)
	$(BIN)/python -m tests.gpu.suite build/gpu-tests.jsonl --kernels build/kernels

# The wheel of compiled kernels, in dist/; ARCHS=sm_80,sm_90 chooses architectures.
kernels: $(INSTALLED)
	$(BIN)/cute-flash pack --jobs $(JOBS) $(if $(ARCHS),--arch $(ARCHS))

# Small launches under compute-sanitizer; the log goes to profiling/results.
sanitize: $(INSTALLED)
	$(BIN)/python -m profiling sanitize

bench: $(INSTALLED)
	$(BIN)/python -m profiling bench --suite quick

# Figures and tables of the documents, from checked-in results; needs no GPU.
plots: $(INSTALLED)
	$(BIN)/python -m profiling plots

# Builds the site of docs/; a warning is an error.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir build/site
	@echo "the site is in build/site: open build/site/index.html, or run make docs-serve, which has a search too"

# Serves the site on http://127.0.0.1:8000 and rebuilds it after each change.
docs-serve: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean:
	rm -rf .venv .venv-floor build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Without --quiet, because downloading torch takes minutes.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,bench,docs]'
	touch $@ $(DEMO_INSTALLED)

$(DEMO_INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e .
	touch $@
