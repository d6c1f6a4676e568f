# Everything runs in .venv, which is made on the first call from nothing but python3, pip and make.
#   make quickstart   make demo [GCS=1] [ARGS=--full]
#   make test   make test-more   make test-core   make test-ray   make test-timed   make test-long   make test-all
#   make test-versions [FEW=1] [VERSIONS=3.13-newest] [ARGS=…]
#   make check  make house  make venv
#   make docs   make bench [ARGS=--quick]    make bench-gpu [ARGS=--quick]   make format   make clean

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# Named by what was installed: a change of either file sets up again, anything else does not. What a person looks at first needs less
# than the tests, which bring Sphinx, node, Keras and moto.
SUM := $(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
STAMP := $(VENV)/.installed-$(SUM)
SMALL_STAMP := $(VENV)/.small-$(SUM)
# No cluster, no program that trains, no server: processes that keep to a core each.
FIRST := $(addprefix tests/,actors arena arrays cli compat config gpu orbax package record testing)
TIMED := tests/timed
# Each of these starts processes of Ray, for 10 to 100 s of two cores: `make test` has the kill of a script, and
# what decides on a restart, `make test-ray` the others.
RAY := tests/cluster tests/programs tests/docs/test_examples_on_ray.py
KILL := $(addprefix tests/cluster/,test_sharing.py test_train_policy.py)
# Processes, servers and disks, but hardly a cluster.
REST := $(addprefix tests/,compilation damage docs gcs jobs power reshard sim storage) $(KILL) --ignore=tests/docs/test_examples_on_ray.py
LATER := $(addprefix --ignore=,tests/house tests/core $(FIRST) $(TIMED))  # have a target of their own
PYTEST := $(BIN)/python -m pytest --durations=10 --durations-min=1
# Whole files, in the order of tests/conftest.py: the longest first. By itself xdist begins with those that have the most tests, and
# one of a single test that takes minutes comes last, beside an idle core.
BY_FILE := -n 2 --dist loadfile --no-loadscope-reorder
# Without Ray: two processes that keep to a core each.
ONE_CORE := $(BY_FILE) -p tests.one_core

# Else, where it is set, each of the hundreds of processes that the tests start compiles raystate's modules anew: 0.3 s of a core.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart demo test test-more test-core test-ray test-long test-timed test-all test-versions check house docs bench bench-gpu format clean venv
.DEFAULT_GOAL := test

venv: $(STAMP)

$(SMALL_STAMP): EXTRAS := jobs,gcs-server
$(STAMP): EXTRAS := jobs,dev,gcs-server
$(SMALL_STAMP) $(STAMP): | pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "raystate needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Name another one: make PYTHON=python3.11"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV) >/dev/null 2>&1; } || { \
	  : "a Python without ensurepip: pip itself can fill the environment"; \
	  rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install -q pip; }
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@rm -f $(VENV)/.installed-* $(VENV)/.small-* && touch $@

quickstart: $(or $(wildcard $(STAMP)),$(SMALL_STAMP))
	$(BIN)/python -m jobs.quickstart

demo: $(or $(wildcard $(STAMP)),$(SMALL_STAMP))
	$(BIN)/python -m jobs.demo $(if $(GCS),--gcs) $(ARGS)

# Each room, and a kill on Ray: what is wrong shows here first, in five minutes. What has the mark `more` takes long, or shows little more.
test: $(STAMP)
	.ci/debian chromium
	$(PYTEST) $(ONE_CORE) -m 'not more' tests/core $(FIRST) tests/model $(ARGS)
	$(PYTEST) $(BY_FILE) -m 'not more' $(REST) $(ARGS)

# The rest that needs no cluster: thousands of schedules and sequences, bugs that are planted, crash points, jobs of several processes.
test-more: $(STAMP)
	$(PYTEST) $(ONE_CORE) -m more tests/core $(FIRST) tests/model $(ARGS)
	$(PYTEST) $(BY_FILE) -m more $(REST) $(ARGS)

# All that trains on Ray: real deaths, drills, other people's programs, the pages of the documents.
test-ray: $(STAMP)
	$(PYTEST) $(BY_FILE) -rP $(RAY) $(addprefix --ignore=,$(KILL)) $(ARGS)

# What these leave out: more deaths of real processes, more programs.
test-long: $(STAMP)
	$(PYTEST) $(BY_FILE) -m long tests --ignore=tests/cluster $(ARGS)
	$(PYTEST) $(BY_FILE) -rP -m long tests/cluster $(ARGS)

# What saving and recovery cost, beside Orbax and plain Ray Train: for a machine that does nothing else.
test-timed: $(STAMP)
	$(PYTEST) -rP $(TIMED) $(ARGS)

# All of it, and every kind of death in every phase of a save, the deaths that meet, every topology to every other, failing
# buckets and disks, every crash point, 30,000 sequences of calls, arrays under meshes that are set: hours.
test-all: $(STAMP)
	RAYSTATE_ALL=1 $(PYTEST) -rP tests/cluster $(ARGS)
	RAYSTATE_ALL=1 $(PYTEST) $(BY_FILE) -rP tests $(filter-out %=tests/compat,$(LATER)) $(addprefix --ignore=,tests/model tests/cluster) $(ARGS)
	$(PYTEST) -n 2 --dist loadfile tests/arrays tests/orbax --under-mesh auto $(ARGS)
	$(PYTEST) -n 2 --dist loadfile tests/arrays tests/orbax --under-mesh explicit $(ARGS)
	RAYSTATE_ALL=1 $(PYTEST) tests/cluster/test_isolation.py --under-mesh auto $(ARGS)
	RAYSTATE_ALL=1 $(PYTEST) tests/cluster/test_isolation.py --under-mesh explicit $(ARGS)
	RAYSTATE_ALL=1 $(PYTEST) $(ONE_CORE) tests/model $(ARGS)

# With other Pythons, and with the newest of all packages, those of constraints.txt, or the lowest that pyproject.toml allows:
# what is fast, the compiled programs, and a training.
# FEW=1: of it a few files, where other packages' internals and other Pythons' ways have made a difference.
VERSIONS ?= $(if $(FEW),3.13-newest,3.11-lowest 3.11-newest 3.12-newest 3.13-newest 3.13-pinned)
FEW_FILES := $(addprefix tests/,compilation arrays orbax/test_every_api.py orbax/test_retention.py cluster/test_train_fit.py)
test-versions: $(addprefix test-version-,$(VERSIONS))

# A Python that isn't there is told, and is no failure.
test-version-%:
	@version=$(firstword $(subst -, ,$*)); at=.venv-versions/$*; stamp=$$at/$(notdir $(STAMP)); \
	for python in "$$(command -v python$$version)" $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$$version.*/bin/python; do \
	  "$$python" -c 'import venv' 2>/dev/null && break; python=; done; \
	if [ -z "$$python" ]; then echo "not tested: $*: there is no python$$version in PATH or pyenv"; exit 0; fi; \
	if [ ! -e $$stamp ]; then rm -rf $$at && $$python -m venv $$at && \
	  grep -oE '"[a-z0-9-]+(\[[a-z,]+\])?>=[^"]+"' pyproject.toml | sed -E 's/\[.*\]|"//g; s/>=/==/' > $$at/lowest.txt && \
	  $$at/bin/python -m pip install -q --disable-pip-version-check \
	  $(if $(filter %-pinned,$*),-c constraints.txt) $(if $(filter %-lowest,$*),-c $$at/lowest.txt) -e '.[jobs,dev,gcs-server]' && touch $$stamp || exit 1; fi; \
	$$at/bin/python -c 'import sys, jax, ray; print("Python", sys.version.split()[0], "jax", jax.__version__, "Ray", ray.__version__)'; \
	$$at/bin/python -m pytest $(BY_FILE) $(if $(FEW),$(FEW_FILES),$(FIRST) tests/compilation tests/cluster/test_train_fit.py) $(ARGS)

# The decisions alone, all of them: it takes two minutes.
test-core: $(STAMP)
	$(PYTEST) $(ONE_CORE) tests/core $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache  # a stale cache knows nothing of new modules
	$(BIN)/pyright & types=$$!; $(BIN)/python -m pytest -q tests/house ; house=$$?; wait $$types && exit $$house  # a core each
	$(BIN)/python -m tests.house.figures

# How large the house is: the figures are to go down.
house: $(STAMP)
	$(BIN)/python -m tests.house.figures

# -n and -W: a link or a name that leads nowhere is an error.
docs: $(STAMP)
	$(BIN)/python -m sphinx -q -n -W --keep-going -b html docs build/docs $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

# For a machine with an accelerator that JAX in .venv sees. CONTRIBUTING.md says how to run it on one that is lent, where nothing can be installed.
bench-gpu: $(STAMP)
	$(BIN)/python -m benchmarks accelerator $(ARGS)

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .venv-versions build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
