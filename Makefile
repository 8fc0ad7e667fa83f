# make demo | test | test-full | soak | check | docs | format | clean          everything happens inside $(VENV)
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
TESTS ?= tests
MINUTES ?= 30

.PHONY: demo test test-full soak check docs format clean install install-dev

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.installed

demo: install
	$(BIN)/agentkv demo

# The model that the tests use is fetched once, before they run, so that no test waits for a download. Two workers with
# one thread each: with a thread a core each they would wait for one another's.
test: install-dev
	$(BIN)/agentkv models pull smollm2-135m
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope -m "not full and not gpu" $(TESTS)

test-full: install-dev
	$(BIN)/agentkv models pull smollm2-135m
	$(BIN)/agentkv models pull gemma3-270m
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope -m "not gpu" $(TESTS)

# Random traffic with a fault every second: nothing may be wrong, lost, leaked or growing.
soak: install-dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak.py --minutes $(MINUTES)

check: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site, from docs/ and the code, in build/site. Needs no network.
docs: install-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: install-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
