# The verbs of the project. `make` lists them.
#
#   make test                              everything from nothing, in .venv
#   make test PYTHON=path/to/python        with an environment you have: torch and the test extra in it
#   make test TORCH="torch --index-url https://download.pytorch.org/whl/cu130"    another torch

# Without an NVIDIA driver (of WSL2: dxg) PyTorch's own build for the CPU: a tenth of what PyPI's brings. Asked once
# whether it is there: pip would ask again and again, for every package.
CARD  := $(wildcard /dev/nvidiactl /dev/dxg)
INDEX := https://download.pytorch.org/whl/cpu
ASK    = from urllib.request import urlopen; urlopen("$(INDEX)/torch/", timeout=5)
TORCH ?= torch==2.13.0 $(if $(CARD),,$(shell python3 -c '$(ASK)' 2>/dev/null && echo --extra-index-url $(INDEX)))
JOBS  ?= $(shell nproc)
# Of the Python tests' time a third is spent waiting: for processes, timers, a disk.
WORKERS ?= $(shell expr $(JOBS) + 1)

# Many processes import the package: what one has compiled, the others need not.
unexport PYTHONDONTWRITEBYTECODE

ifdef PYTHON
PY    := $(PYTHON)
BUILT := inplace
else
PY    := .venv/bin/python
BUILT := .venv/.built
BASES := .venv/bases
endif

C_SOURCES := $(wildcard csrc/*/*.c csrc/*/*.h csrc/*/*.cu csrc/*/*.cuh csrc/bind/exports.map)
CHECK_FLAGS := -std=c11 -D_GNU_SOURCE -O3 -ffp-contract=off -Wall -Wextra -Wshadow -Wconversion \
               -Wstrict-prototypes -Wvla -Werror

# The CUDA part for the GPUs of this machine: four architectures take minutes. MEGATRAIN_CUDA=1: without one too.
MEGATRAIN_CUDA_ARCHES ?= native
export MEGATRAIN_CUDA_ARCHES

.DEFAULT_GOAL := help
.PHONY: help demo test ctest asan tsan pytest gpu bench performance-page what-fits models fmt lint sdist wheel api docs \
        check-aarch64 clean inplace

help:  ## list the verbs
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(BUILT)  ## train a small Llama on Shakespeare through the streaming engine
	$(PY) examples/train_shakespeare.py $(ARGS)

# C tests need no Python: they run while packages come, both kinds at once, and beside the first of pytest's: they sleep
# more than they compute. What they print is told at the end.
test:  ## everything: C tests under ASan and TSan, and pytest
	@mkdir -p build
	$(MAKE) --no-print-directory asan >build/asan.log 2>&1 & a=$$!; \
	$(MAKE) --no-print-directory tsan >build/tsan.log 2>&1 & t=$$!; \
	$(MAKE) --no-print-directory -j2 $(BUILT) $(BASES) && $(MAKE) --no-print-directory pytest; p=$$?; \
	wait $$a; a=$$?; wait $$t; t=$$?; cat build/asan.log build/tsan.log; [ $$a -eq 0 ] && [ $$t -eq 0 ] && exit $$p

ctest:  ## the C tests; a C compiler is enough
	$(MAKE) -C tests/c --no-print-directory -j$(JOBS) -s run

asan:  ## the C tests under AddressSanitizer and UBSan
	$(MAKE) -C tests/c --no-print-directory -j$(JOBS) -s run SAN=asan

tsan:  ## the C tests under ThreadSanitizer
	$(MAKE) -C tests/c --no-print-directory -j$(JOBS) -s run SAN=tsan

pytest: $(BUILT) $(BASES)  ## the Python tests; ARGS="-k name" for some
	$(PY) -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests $(ARGS)

gpu: $(BUILT)  ## the tests that need a GPU
	$(PY) -m pytest -q tests/gpu $(ARGS)

bench: $(BUILT)  ## benchmarks, each beside the machine's limit
	for bench in benchmarks/limits.py benchmarks/bench_*.py; do $(PY) $$bench $(ARGS) || exit 1; done

performance-page:  ## the figures of docs/performance.md: RESULTS=results.jsonl [PICTURE=step.png]
	$(if $(RESULTS),,$(error RESULTS=file.jsonl is needed: lines of benchmarks))
	python3 tools/performance_page.py $(RESULTS) $(if $(PICTURE),--picture $(PICTURE))

what-fits: $(BUILT)  ## docs/what-fits.md: the largest models for usual cards, by mt.plan
	nice -n 19 $(PY) tools/what_fits.py

models: $(BUILT)  ## docs/models.md: tiny models of every architecture; TRANSFORMERS= DIFFUSERS= checkouts
	nice -n 19 $(PY) tools/try_models.py $(if $(TRANSFORMERS),--transformers $(TRANSFORMERS)) \
	    $(if $(DIFFUSERS),--diffusers $(DIFFUSERS)) $(ARGS)

fmt:  ## format the lines you changed (C) and the imports (Python)
	git diff -U0 --no-color HEAD -- '*.c' '*.h' '*.cu' '*.cuh' | clang-format-diff -p1 -i
	$(PY) -m ruff check --select I --fix .

lint: $(BUILT)  ## the project's rules, the rooms of the package, ruff, and clang-tidy where there is one
	$(PY) tools/check_rules.py
	$(PY) tools/rooms.py
	$(PY) -m ruff check .
	@if command -v clang-tidy >/dev/null; then \
	    clang-tidy --quiet $(filter csrc/core/%.c csrc/ops/%.c,$(C_SOURCES)) -- -std=c11 -D_GNU_SOURCE; \
	else echo "clang-tidy: not installed, left out"; fi

# Isolated, from the source distribution; the Python is there for its torch, with which each is tried.
sdist: $(BUILT)  ## a source distribution in dist/, tried: built without CUDA, installed alone, trained
	$(PY) tools/wheels.py sdist

wheel: $(BUILT)  ## abi3 manylinux wheels in dist/, for CPU and CUDA, tried; WHEELS=cpu for one
	$(PY) tools/wheels.py $(or $(WHEELS),cpu cuda)

api: $(BUILT)  ## docs/api.md, from the docstrings
	$(PY) tools/api_page.py

docs:  ## the site in build/site, by mkdocs-material in an environment of its own
	test -x build/mkdocs/bin/mkdocs || { python3 -m venv build/mkdocs && \
	    build/mkdocs/bin/python -m pip install -q 'mkdocs>=1.6,<2' 'mkdocs-material>=9.5,<10'; }
	NO_MKDOCS_2_WARNING=1 build/mkdocs/bin/mkdocs build --strict -q
	@echo build/site/index.html

# Without csrc/bind, whose headers are this machine's Python.
check-aarch64:  ## do the C files compile for aarch64? needs aarch64-linux-gnu-gcc
	@for c in $(filter-out csrc/bind/% csrc/dev/dev_cuda.c %_avx2.c %_avx512.c,$(filter %.c,$(C_SOURCES))); do \
	    aarch64-linux-gnu-gcc $(CHECK_FLAGS) -c $$c -o /dev/null || exit 1; \
	done; echo "aarch64: ok"

clean:  ## remove what was built, .venv included
	rm -rf build dist .venv megatrain_torch/*.so *.egg-info

# ---- how the package gets built ----

# pip compiles no modules: Python compiles those that are imported, which are few. What the build needs is installed in
# .venv, not fetched once more for an environment of its own.
FETCH := .venv/bin/python -m pip install -q --no-compile
NEEDS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])

.venv/bin/python:
	python3 -m venv .venv
	$(FETCH) --upgrade pip $$($@ -c '$(NEEDS)')

.venv/.ready: pyproject.toml | .venv/bin/python
	.venv/bin/python -c 'import torch' 2>/dev/null || $(FETCH) $(TORCH)
	$(FETCH) --no-build-isolation -e '.[demo,test]'
	@touch $@

# Apart: whoever imports peft where they are imports them too, which takes each process seconds.
.venv/bases: | .venv/bin/python
	-$(FETCH) --no-deps --target $@ bitsandbytes==0.50.2 torchao==0.18.0
	@touch $@

# Compiles what changed since: objects are kept in build/core. The import leaves the large packages' modules compiled, or
# each of pytest's workers would compile them.
.venv/.built: .venv/.ready setup.py $(C_SOURCES)
	.venv/bin/python setup.py -q build_ext --inplace
	.venv/bin/python -c 'import torch._dynamo, transformers.trainer, peft, trl.trainer.dpo_trainer'
	@touch $@

inplace:
	@$(PY) setup.py -q build_ext --inplace
