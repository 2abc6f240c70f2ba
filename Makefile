# make demo          a real model on real film reviews, in about 5 minutes, no GPU needed; it fetches 95 MB
# make replay        the models of docs/journals from their journals, without training
# make test          the tests, in about nine minutes on two cores
# make test-cluster  batch scripts, on a Slurm cluster and hosts made of namespaces (Linux, as root)
# make test-thorough what make test leaves out: more settings, faults and ways to start, every command of the pages
# make test-families every family that transformers builds, in about 35 minutes on one core (docs/families.md)
# make test-oldest   the tests with the oldest versions that lezo_ds accepts (constraints-oldest.txt)
# make test-newest   the tests with the newest versions that the package index has
# make check         lint, format and types
# make gpu           the kernels' tests and the benchmark, on a GPU
# make clean         remove the environments, caches and the demonstration's runs
#
# Each target makes what it needs in .venv, from the exact versions in constraints.txt; test-oldest and test-newest in
# environments of their own.

PYTHON ?= python3
# Three workers on two cores: tests of several processes wait for each other.
PYTEST_WORKERS ?= 3

VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt

# uv takes a third of pip's time. It reads no settings of pip, and gets the folder of wheels from the environment. If uv
# cannot find what pip can, pip installs.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile --quiet
UV := UV_FIND_LINKS="$${UV_FIND_LINKS-$$PIP_FIND_LINKS}" $(BIN)/uv pip install --quiet --python $(BIN)/python
VERSIONS := --upgrade $(addprefix --constraint ,$(CONSTRAINTS))
define install
-$(PIP) --constraint constraints.txt uv
$(UV) $(VERSIONS) --editable "$(1)" || $(PIP) $(VERSIONS) --editable "$(1)"
endef

# Without an NVIDIA device, DeepSpeed is told to use the CPU instead of guessing.
ifeq ($(wildcard /dev/nvidia[0-9]*),)
export DS_ACCELERATOR ?= cpu
endif

# Python keeps what it compiles, whatever the machine's settings say: torch and transformers take 12 s without it.
export PYTHONDONTWRITEBYTECODE =

# The last bits of results depend on the number of threads, so it does not follow the number of cores.
export OMP_NUM_THREADS ?= 1

# A module's tests stay together, as they share its fixtures. The modules are in the order of their folders, which
# puts those that start processes first, so that the workers end at about the same time.
PYTEST := $(BIN)/python -m pytest --numprocesses $(PYTEST_WORKERS) --dist loadscope --no-loadscope-reorder

.PHONY: demo replay test test-thorough test-oldest test-newest test-cluster test-families gpu check clean

demo: $(VENV)/.installed-demo
	$(BIN)/python launch/demo.py

replay: $(VENV)/.installed-demo
	$(BIN)/python launch/replay.py

test: $(VENV)/.installed-dev
	$(PYTEST)

test-thorough: $(VENV)/.installed-dev
	$(PYTEST) -m thorough

test-oldest:
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

test-newest:
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=

test-cluster: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m cluster tests/cluster

test-families: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m families tests/families

gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python launch/benchmark.py --shape opt-1.3b model.dtype=bf16 --rounds 10 mezo_reference ours:0 ours:0.75

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict lezo_ds launch/benchmark.py launch/sweep.py

clean:
	rm -rf .venv .venv-oldest .venv-newest runs/demo build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find lezo_ds launch tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-demo: setup.py $(CONSTRAINTS) | $(BIN)/python
	$(call install,.[demo])
	touch $@

$(VENV)/.installed-dev: setup.py $(CONSTRAINTS) | $(BIN)/python
	$(call install,.[dev])
	touch $@ $(VENV)/.installed-demo
