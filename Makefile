# Two commands do everything: `make quickstart` trains on this machine, `make test` checks the checkout.
# Both create .venv and install what they need if that has not happened yet.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: quickstart test lint types unit slow benchmark clean

quickstart: $(VENV)/.run
	$(BIN)/python -m gspo_gym.train configs/quickstart.toml --set-aside

test: lint types unit slow

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

unit: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow" tests gspo_gym envs

slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow tests

benchmark: $(VENV)/.run
	$(BIN)/python -m gspo_gym.benchmark engines

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.run
