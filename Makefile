PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready
DEMO ?=
TESTS ?=
BENCH ?=
# without bytecode, each of a test's processes would compile all modules anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-all lint format bench docs wheel lowest clean help

help:            ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*##/\t/'

setup: $(STAMP)  ## virtual environment in .venv, editable install, pinned versions

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,frameworks]'
	touch $@

demo: setup      ## train with and without compression, draw a chart: make demo DEMO="--hosts 4"
	$(BIN)/hipress bench --quick $(DEMO)

test: setup      ## the fast tests, some minutes on 2 cores: make test TESTS="tests/demo -k data"
	$(BIN)/python -m pytest -n 3 --dist loadgroup -m "not slow" $(TESTS)

test-all: setup  ## all tests, those marked slow among them; -m slow for those alone
	$(BIN)/python -m pytest -n 3 --dist loadgroup $(TESTS)

lint: setup      ## ruff, openings of docstrings, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/docstrings.py
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup    ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup     ## the training matrix: make bench BENCH="--group hosts2"
	$(BIN)/python -m bench.training $(BENCH)

docs: setup      ## the documentation site, into build/docs; a warning or a table that is out of date is an error
	$(BIN)/python -m bench.pages --check
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs build/docs

wheel:           ## build dist/, install the wheel in an empty environment and use it in an empty folder
	PYTHON=$(PYTHON) .ci/wheel

lowest:          ## the same with the lowest NumPy, llvmlite and others that pyproject.toml allows
	PYTHON=$(PYTHON) DEPENDENCIES=lowest .ci/wheel

clean:           ## remove what the other targets made
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache
