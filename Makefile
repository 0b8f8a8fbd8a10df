# Two commands do everything: `make demo` and `make test`. Both set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test test-oldest test-engines soak coverage lint proto proto-check clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/python -m benchmarks.disk_vs_prefill --demo --json out/demo.json --plot out/demo.png

# A worker for each core; who has finished takes tests from who has not.
test: $(READY)
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal

# The oldest transformers we support; its cache argument has another name.
OLDEST := .venv-oldest
$(OLDEST)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install --quiet --upgrade pip
	grep -vE '^(transformers|huggingface_hub|tokenizers|hf-xet)==' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/pip install --quiet --constraint $(OLDEST)/constraints.txt torch
	$(OLDEST)/bin/pip install --quiet --constraint $(OLDEST)/constraints.txt transformers==5.15.0 --editable '.[mla]' pytest pytest-timeout hypothesis
	touch $(OLDEST)/.ready

test-oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/python -m pytest tests/mla

# The engines that we stand beside, in an environment of their own: their own code, on CPU. They are
# installed without their dependencies, most of which drive GPUs; requirements.txt has what runs here.
ENGINES := .venv-engines
$(ENGINES)/.ready: pyproject.toml constraints.txt tests/engines/requirements.txt tests/engines/engines.txt
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/pip install --quiet --upgrade pip
	grep -E '^torch==' constraints.txt > $(ENGINES)/constraints.txt
	$(ENGINES)/bin/pip install --quiet --constraint $(ENGINES)/constraints.txt --requirement tests/engines/requirements.txt
	$(ENGINES)/bin/pip install --quiet --no-deps --requirement tests/engines/engines.txt
	$(ENGINES)/bin/pip install --quiet --no-deps --editable .
	touch $(ENGINES)/.ready

# A run that passes is noted in tests/engines/passed.txt, which is committed: see tests/engines/standing.py.
test-engines: $(ENGINES)/.ready
	$(ENGINES)/bin/python -m tests.engines.standing test

# Lines and branches of kvstore and server that the tests reach, in the processes that they start too.
# `mla` has no part in it but as their user.
COVERING := tests/kvstore tests/server tests/crash tests/mla/session tests/benchmarks/test_soak.py
coverage: $(READY)
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest --numprocesses auto --dist worksteal $(COVERING)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# Faults of every kind under load, and not a byte wrong, lost or leaked; a longer one: make soak MINUTES=20 SEED=1
MINUTES ?= 2
SEED ?= 0
soak: $(READY)
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES) --seed $(SEED) --json out/soak.json

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.house_rules

proto:
	sh proto/generate.sh

proto-check:
	sh proto/generate.sh --check

clean:
	rm -rf $(VENV) $(OLDEST) $(ENGINES) .venv-proto out build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage*
