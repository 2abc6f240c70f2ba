# make demo          a real model on real film reviews, in about ten minutes, no GPU needed; it fetches 95 MB
# make demo-offline  the same trainer on a made-up model and data set, which needs no network
# make test          the tests, in about ten minutes on two cores
# make test-long     the tests that take long: more steps, more combinations, every command by its launcher
# make test-all      both
# make test-cluster  batch scripts, on a Slurm cluster and hosts made of namespaces (Linux, as root)
# make soak          faults at length: some hours of kills, stops and full disks (Linux, as root)
# make check         lint, format and types
# make gpu           bits, speed, launches and memory on a GPU, in ten minutes (without one: the CPU, a tiny model)
# make docs          the pages of docs/ as a site, in site/
# make clean         remove the environment, caches and the demonstrations' runs
#
# Each target makes what it needs in .venv, from the exact versions in constraints.txt.

PYTHON ?= python3
PYTEST_WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable

# Without an NVIDIA device, DeepSpeed is told to use the CPU instead of guessing.
ifeq ($(wildcard /dev/nvidia[0-9]*),)
export DS_ACCELERATOR ?= cpu
endif

# The last bits of results depend on the number of threads, so it does not follow the number of cores.
export OMP_NUM_THREADS ?= 1

# A module's tests stay together, as they share its fixtures. The modules are in the order of their folders, which
# puts those that start processes first, so that the workers end at about the same time.
PYTEST := $(BIN)/python -m pytest --numprocesses $(PYTEST_WORKERS) --dist loadscope --no-loadscope-reorder

.PHONY: demo demo-offline test test-long test-all test-cluster soak gpu check docs clean

demo: $(VENV)/.installed-demo
	$(BIN)/python launch/demo.py

demo-offline: $(VENV)/.installed-demo
	$(BIN)/python launch/demo.py --offline

test: $(VENV)/.installed-dev
	$(PYTEST)

test-long: $(VENV)/.installed-dev
	$(PYTEST) -m long

test-all: test test-long

test-cluster: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m cluster tests/cluster

soak: $(VENV)/.installed-dev
	$(BIN)/python tests/soak.py

gpu: $(VENV)/.installed-demo
	$(BIN)/python launch/gpu.py

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict --package lezo_ds

docs: $(VENV)/.installed-dev
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf site $(VENV) runs/demo runs/demo-offline build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find lezo_ds launch tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-demo: setup.py constraints.txt | $(BIN)/python
	$(INSTALL) ".[demo]"
	touch $@

$(VENV)/.installed-dev: setup.py constraints.txt | $(BIN)/python
	$(INSTALL) ".[dev]"
	touch $@ $(VENV)/.installed-demo
