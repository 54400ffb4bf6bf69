# make install   .venv with the library (editable) and all that the tests need
# make demo      the main job on real images; backend from KERAS_BACKEND, JAX if unset
# make test      lint, then the whole suite on each backend in its own process
# make bench     the MoE layers beside dense ones of equal cost
# make format    format the code and mend what the linter can mend
# make clean     remove what the other targets wrote, except .venv

PYTHON ?= python3
# The tested release. Where a CPU-only build of it is on offer pip takes that one, while
# an unpinned `torch` brings several GB of CUDA libraries that no test uses.
TORCH ?= torch==2.13.0
# Test suites that run at the same time.
JOBS ?= 2

VENV := .venv/bin
INSTALLED := .venv/.installed
BACKENDS := jax tensorflow torch
SUITES := $(BACKENDS:%=test-%)
LOGS := $(BACKENDS:%=build/%.log)

export TF_CPP_MIN_LOG_LEVEL ?= 3
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.PHONY: install demo test lint $(SUITES) bench format clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	test -x $(VENV)/python || $(PYTHON) -m venv .venv
	$(VENV)/python -m pip install --quiet "$(TORCH)"
	$(VENV)/python -m pip install --quiet --editable ".[test,dev]"
	touch $@

demo: install
	KERAS_BACKEND=$${KERAS_BACKEND:-jax} $(VENV)/python guides/demo.py

# Each suite prints its log when it ends; all closing lines come last, after a failure too.
test: lint
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

bench: install
	KERAS_BACKEND=$${KERAS_BACKEND:-jax} $(VENV)/python benchmarks/layers.py

format: install
	$(VENV)/ruff check --fix .
	$(VENV)/ruff format .

clean:
	rm -rf build dist .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path "./.venv/*" -prune -exec rm -rf {} +
