# The two commands of the README. Each sets up what it needs in .venv, pinned by constraints.txt, then does its job.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# the page's tests drive Chromium: it is installed where that may be done, else they are skipped
CHROMIUM := command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
  apt-get -qq update >/dev/null 2>&1 && apt-get -qq install -y chromium >/dev/null 2>&1; } || \
  echo "no Chromium could be installed: the page's tests in a browser will be skipped"

.PHONY: plan test nightly check lint types layers fresh docs site screenshots clean

plan: $(VENV)/.core  ## answer the question for an embedded real model: no GPU, no weights, no network
	@$(BIN)/memfit plan meta-llama/Llama-2-7b-hf --gpu rtx-4090

test: $(VENV)/.dev check  ## lint, types, layers, docs freshness, then the tests
	$(BIN)/python -m pytest -n auto --dist worksteal

nightly: $(VENV)/.dev  ## the cases of the long grids that `make test` leaves out
	$(BIN)/python -m pytest -n auto --dist worksteal -m nightly

check: $(VENV)/.dev  ## two at a time: mypy takes longer than the others together
	@$(MAKE) --no-print-directory -j2 types lint layers fresh

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

layers:
	$(BIN)/lint-imports

fresh:
	$(BIN)/python docs/generate.py --check

docs: $(VENV)/.dev  ## write the generated parts of README and docs again
	$(BIN)/python docs/generate.py

site: $(VENV)/.dev  ## the documentation as a site, which works offline: site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

$(VENV)/.core: pyproject.toml constraints.txt hatch_build.py $(shell find src -name _native.cpp)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt -e .
	$(BIN)/python -m compileall -q src  # as pip does for an installation that is not editable
	@touch $@

# torch first and by its exact version: a looser request takes gigabytes of CUDA packages
$(VENV)/.dev: $(VENV)/.core
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[dev,train]'
	@$(CHROMIUM)
	@touch $@

screenshots: $(VENV)/.dev  ## every view of the page as pictures, in a folder that is not committed
	$(BIN)/python benchmarks/screenshots.py

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
