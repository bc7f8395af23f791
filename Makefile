# `make demo` runs the main job, `make test` the checks and the tests. Both build the environment in .venv first.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
ROOMS := kernels protocol node dashboard
# one thread a process: two OpenMP threads on a busy 2-core machine are ten times slower
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test test-fast test-churn check format types imports bench-codec bench-gpu bench-convergence-quick bench-convergence clean
.DELETE_ON_ERROR:

help:
	@echo "make demo         a seed and three nodes train together on this machine"
	@echo "make test         make check, then every test"
	@echo "make test-fast    the unit and simulation tests without the slow ones"
	@echo "make test-churn   the simulated swarm under churn with all of its seeds"
	@echo "make check        format, ruff, mypy and the import contracts"
	@echo "make bench-codec  speed and size of the delta codec"
	@echo "make bench-gpu    everything that needs a GPU to be known, in less than eight minutes"
	@echo "make bench-convergence-quick  a swarm's learning beside dense training: 8 runs, 5 minutes on two free cores"
	@echo "make bench-convergence        all questions of docs/results/convergence.md, at 0.9M and 0.2M parameters: many hours"
	@echo "make clean        remove .venv and build"

# torch first: the exact version that the tests use. The stamp makes a changed pyproject.toml install again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "make: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) --version 2>&1 || true)." \
	       "Name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { \
	  echo "make: $(PYTHON) -m venv failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "installing into .venv (about 3 GB, some minutes)"
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/tscale-node demo

# mypy and import-linter need the folders under their installed names
build/ns/tscale: Makefile
	@rm -rf $@ && mkdir -p $@
	@for room in $(ROOMS); do ln -s ../../../$$room $@/$$room; done

format: $(STAMP)
	$(BIN)/ruff check --quiet $(ROOMS) tests
	$(BIN)/ruff format --check --quiet $(ROOMS) tests

types: $(STAMP) build/ns/tscale
	MYPYPATH=build/ns $(BIN)/mypy -p tscale.protocol -p tscale.node -p tscale.dashboard -p tscale.kernels

imports: $(STAMP) build/ns/tscale
	PYTHONPATH=build/ns $(BIN)/lint-imports --no-cache --no-logo

check: format types imports

# the first run has its tests side by side; those with real processes or a browser come after, one by one
test: check
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not full" $(wildcard tests/unit tests/sim tests/golden)
	$(BIN)/python -m pytest $(wildcard tests/swarm tests/browser)

test-fast: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not full and not process and not browser" $(wildcard tests/unit tests/sim)

# 32 peers, 52 rounds, 20 seeds: about six minutes on two free cores
test-churn: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/sim/test_churn.py

bench-codec: $(STAMP)
	$(BIN)/tscale-node bench codec --json

# needs a CUDA build of torch in the environment, and replaces docs/results/gpu.md
bench-gpu: $(STAMP)
	$(BIN)/python -m tests.bench.gpu

bench-convergence-quick: $(STAMP)
	$(BIN)/python -m tests.bench.convergence quick --results tests/bench/out/convergence-quick

# stops and goes on where it was
bench-convergence: $(STAMP)
	$(BIN)/python -m tests.bench.convergence gates --page docs/results/convergence.md
	$(BIN)/python -m tests.bench.convergence small --page docs/results/convergence-0.2m.md

clean:
	rm -rf .venv build
