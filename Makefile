# Every target sets up what it needs in .venv by itself, and only when something changed.
PYTHON ?= python3
TORCH  := torch==2.13.0
BIN    := .venv/bin
C_FILES := $(wildcard csrc/*.[ch] csrc/*/*.[ch] csrc/*/*.cpp)

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench format readme clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/built ## train one small Llama per position encoding on real text and compare them
	$(BIN)/wavepe compare --out runs/demo

test: .venv/built ## all tests
	$(BIN)/python -m pytest -q

lint: .venv/packages ## ruff and clang-format, without changing anything
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(C_FILES)

format: .venv/packages ## let ruff and clang-format rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_FILES)

bench: .venv/built ## time every operator against its rivals, in one process
	$(BIN)/python -m benchmarks.bench

readme: .venv/built ## README's tables, from benchmarks/results and docs/demo.json
	$(BIN)/python -m benchmarks.readme

clean: ## remove what was built, the environment too
	rm -rf .venv build dist python/*.egg-info python/wavepe/*.so

# torch comes first and pinned: a plain `torch` would bring gigabytes of CUDA, and the build of
# wavepe looks for its headers. The file at the end says that all of it went well.
.venv/packages: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@ .venv/built

.venv/built: .venv/packages setup.py $(C_FILES)
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@
