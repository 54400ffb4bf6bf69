# make install   .venv with the library (editable) and all that the tests need
# make demo      the main job on real images; backend from KERAS_BACKEND, JAX if unset
# make test      lint and site, then the whole suite on each backend in its own process
# make docs      the site, into build/site; a warning is an error
# make bench     layers and models beside their rivals on each backend, and tables of it
# make torture   a hostile campaign on each backend, and a table of what it found
# make format    format the code and mend what the linter can mend
# make clean     remove what the other targets wrote, except .venv

PYTHON ?= python3
# The tested release. Where a CPU-only build of it is on offer pip takes that one, while
# an unpinned `torch` brings several GB of CUDA libraries that no test uses.
TORCH ?= torch==2.13.0
# Test suites that run at the same time, each on one thread: the threads of PyTorch and
# TensorFlow wait actively, and beside another suite that costs up to ten times as much.
JOBS ?= 2
# Tests run thousands of small programs once each. XLA compiles them nearly twice as
# fast without its optimizations. A release that does not know these flags gets none.
QUICK_XLA ?= --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false \
    --xla_cpu_parallel_codegen_split_count=1

VENV := .venv/bin
INSTALLED := .venv/.installed
BACKENDS := jax tensorflow torch
SUITES := $(BACKENDS:%=test-%)
LOGS := $(BACKENDS:%=build/%.log)
TORTURES := $(BACKENDS:%=torture-%)

export TF_CPP_MIN_LOG_LEVEL ?= 3
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
$(SUITES) $(TORTURES): export OMP_NUM_THREADS ?= 1
$(SUITES) $(TORTURES): export TF_NUM_INTRAOP_THREADS ?= 1
$(SUITES) $(TORTURES): export TF_NUM_INTEROP_THREADS ?= 1

.PHONY: install demo test lint docs $(SUITES) bench torture $(TORTURES) format clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	test -x $(VENV)/python || $(PYTHON) -m venv .venv
	$(VENV)/python -m pip install --quiet "$(TORCH)"
	$(VENV)/python -m pip install --quiet --editable ".[test,dev,docs]"
	touch $@

demo: install
	KERAS_BACKEND=$${KERAS_BACKEND:-jax} $(VENV)/python guides/demo.py

# Each suite prints its log when it ends; all closing lines come last, after a failure too.
test: lint docs
	@mkdir -p build && rm -f $(LOGS)
	@status=0; \
	$(MAKE) --no-print-directory --keep-going --jobs=$(JOBS) $(SUITES) || status=$$?; \
	for backend in $(BACKENDS); do \
	    echo "$$backend: $$(tail -n 1 build/$$backend.log)"; \
	done; \
	exit $$status

lint: install
	$(VENV)/ruff format --check .
	$(VENV)/ruff check .

# Pages, figures and search lie in one directory, which needs no server and no network.
docs: install
	NO_MKDOCS_2_WARNING=1 $(VENV)/mkdocs build --strict --quiet

test-jax torture-jax: export XLA_FLAGS ?= $(shell XLA_FLAGS="$(QUICK_XLA)" $(VENV)/python -c \
    "import jax; jax.numpy.ones(1) + 1" 2> /dev/null && echo "$(QUICK_XLA)")

# An own KERAS_HOME: the user's Keras settings and caches are neither read nor written.
$(SUITES): test-%: install
	@rm -rf build/keras-$* && mkdir -p build/keras-$*
	@echo "$*: running, see build/$*.log"
	@status=0; \
	KERAS_BACKEND=$* KERAS_HOME=$(CURDIR)/build/keras-$* MPLBACKEND=agg \
	    $(VENV)/python -m pytest -o cache_dir=build/pytest-$* \
	    > build/$*.log 2>&1 || status=$$?; \
	cat build/$*.log; \
	exit $$status

# One backend after the other, each on all cores. Without a network the rivals that are
# not there yet are left out.
bench: export BENCH ?= --shapes paper --seconds 2
bench: install
	-$(VENV)/python -m pip install --quiet --editable ".[bench]"
	for backend in $(BACKENDS); do \
	    KERAS_BACKEND=$$backend $(VENV)/python benchmarks/run.py $(BENCH) || exit; \
	done
	$(VENV)/python benchmarks/tables.py --output benchmarks/RESULTS.md \
	    --readme README.md

# Most of an hour. Each backend says what it found; the table comes last, and what failed
# is in build/torture/.
torture: install
	@status=0; \
	$(MAKE) --no-print-directory --keep-going $(TORTURES) || status=$$?; \
	KERAS_BACKEND=torch $(VENV)/python -m tests.torture --tables || status=$$?; \
	exit $$status

$(TORTURES): torture-%: install
	@rm -rf build/keras-torture-$* build/torture/$*.json
	@mkdir -p build/keras-torture-$*
	@KERAS_BACKEND=$* KERAS_HOME=$(CURDIR)/build/keras-torture-$* MPLBACKEND=agg \
	    $(VENV)/python -m tests.torture 2> build/torture-$*.log

format: install
	$(VENV)/ruff check --fix .
	$(VENV)/ruff format .

clean:
	rm -rf build dist .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path "./.venv/*" -prune -exec rm -rf {} +
