# Two commands do everything: `make quickstart` trains on this machine, `make test` checks the checkout (`make more` and
# `make nightly` check what needs other software or more time). Both create .venv and install what they need if that has not happened yet.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := -m pip install --quiet --disable-pip-version-check
PIP_INSTALL := $(BIN)/python $(PIP) --constraint constraints.txt
# Into another environment for tests: few of its modules are ever imported, and Python compiles those then.
PIP_OTHER := $(PIP) --no-compile

# Environments of software that only some stages need, each with an interpreter that finds the packages of .venv after
# its own.
MORE := .venv-more
VERIFIERS := .venv-verifiers
VLLM := .venv-vllm
PEERS := .venv-peers
# The oldest openai package that we take, in a folder before the one of .venv: 2.x stands on httpx, 3.x on httpx2.
OPENAI_2 := .openai-2
OPENAI_TESTS := tests/unit/env/test_chat_model.py tests/unit/remote/serve/test_task_app_server.py \
	tests/unit/remote/gateway/test_app.py tests/unit/remote/gateway/test_model_app.py \
	tests/fault/test_gateway_retries.py tests/contract/test_openai_agent.py
# Which tests the stages beside unit and slow run: `make vllm MARK=nightly` runs what one landing can do without.
MARK ?= not nightly
BROWSERS := chromium $(if $(filter not,$(MARK)),,firefox)
# Two processes of one thread each: they share out the tests, and no test's deadline meets another's threads.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2
# Hundreds of processes import the package: its bytecode is kept, whatever the shell says.
export PYTHONDONTWRITEBYTECODE :=
SITE_PACKAGES := import sysconfig; print(sysconfig.get_path('purelib'))

.PHONY: quickstart test more nightly lint types unit slow foreign foreign-suites foreign-verifiers openai-2 vllm browser cluster docs environments benchmark bench peers clean

quickstart: $(VENV)/.run
	$(BIN)/python -m gspo_gym.train configs/quickstart.toml --set-aside

# What needs .venv alone. One stage that fails keeps no other from running.
test: $(VENV)/.dev
	$(MAKE) --keep-going --jobs 2 unit lint types

# What needs other software, or more minutes. Two stages at a time, the longest first; the two that use both cores apart.
more: $(VENV)/.dev
	$(MAKE) --keep-going --jobs 2 vllm slow foreign cluster browser openai-2 docs

# What one landing can do without: several run seeds, mutation lists, kills by the dozen, new seeds for what is drawn.
nightly: export GSPO_GYM_FIRST_SEED := $(shell date +%s)
nightly: $(VENV)/.dev
	@echo "first of the new seeds: GSPO_GYM_FIRST_SEED=$(GSPO_GYM_FIRST_SEED)"
	$(MAKE) --keep-going --jobs 2 MARK=nightly slow vllm foreign cluster browser
	$(BIN)/python -m benchmarks mutants --sample 20 --count 10
	for kind in crash chaos stops; do $(BIN)/python -m benchmarks $$kind --count 20 || exit 1; done

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

unit: $(VENV)/.dev
	$(PYTEST)

slow: $(VENV)/.dev
	$(PYTEST) -m "$(if $(filter not,$(MARK)),slow and not nightly,nightly)" tests

# Two, so that one that fails does not hide the other.
foreign: foreign-suites foreign-verifiers

foreign-suites: $(MORE)/.installed
	OMP_NUM_THREADS=1 $(MORE)/bin/python -m pytest -m "not verifiers and ($(MARK))" tests/foreign

foreign-verifiers: $(VERIFIERS)/.installed
	OMP_NUM_THREADS=1 $(VERIFIERS)/bin/python -m pytest -m "verifiers and ($(MARK))" tests/foreign

openai-2: $(VENV)/.dev $(OPENAI_2)/.installed
	PYTHONPATH=$(OPENAI_2) $(BIN)/python -c "import openai; assert openai.__version__ == '2.25.0', openai"
	PYTHONPATH=$(OPENAI_2) $(BIN)/python -m pytest -m "not slow and not nightly" $(OPENAI_TESTS)

vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest -m "$(MARK)" tests/vllm

browser: $(MORE)/.installed
	tests/browser/install_browsers $(BROWSERS)
	OMP_NUM_THREADS=1 $(MORE)/bin/python -m pytest -m "$(MARK)" tests/browser

cluster: $(MORE)/.installed
	OMP_NUM_THREADS=1 $(MORE)/bin/python -m pytest -m "$(MARK)" tests/cluster

# The site, into build/site; a broken link or an undocumented public name fails. Its pages are files: no server is needed.
docs: $(MORE)/.installed
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(MORE)/bin/python -m mkdocs build --quiet --strict

environments: $(MORE)/.installed $(VLLM)/.installed $(VERIFIERS)/.installed $(OPENAI_2)/.installed

benchmark: $(VENV)/.run
	$(BIN)/python -m benchmarks engines

# The quick ones, compared with the last time on this machine; with the peer beside them after `make peers`.
bench: $(VENV)/.run
	$(BIN)/python -m benchmarks quick --keep benchmarks/kept.jsonl

peers: $(PEERS)/.installed

clean:
	rm -rf $(VENV) $(MORE) $(VERIFIERS) $(VLLM) $(OPENAI_2) $(PEERS) build dist *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.run

# Each of these sees the packages of .venv, also while pip installs: only what is missing there, or wanted in another
# version, is installed.
$(MORE)/.installed: tests/requirements-more.txt tests/foreign/requirements-translators.txt constraints.txt | $(VENV)/.dev
	$(call make_venv,$(MORE))
	$(MORE)/bin/python $(PIP_OTHER) --constraint constraints.txt --requirement $<
	$(MORE)/bin/python $(PIP_OTHER) --no-deps --requirement tests/foreign/requirements-translators.txt
	@touch $@

$(VERIFIERS)/.installed: tests/foreign/requirements-verifiers.txt | $(VENV)/.dev
	$(call make_venv,$(VERIFIERS))
	$(VERIFIERS)/bin/python $(PIP_OTHER) --requirement $<
	@touch $@

$(VLLM)/.installed: tests/vllm/requirements.txt | $(VENV)/.dev
	$(call make_venv,$(VLLM))
	$(VLLM)/bin/python $(PIP_OTHER) --no-deps --requirement $<
	@touch $@

$(OPENAI_2)/.installed: | $(VENV)/bin/python
	$(BIN)/python $(PIP_OTHER) --no-deps --upgrade --target $(OPENAI_2) openai==2.25.0
	@touch $@

# The peer of `python -m benchmarks peers`: it sees none of our packages. The torch of constraints.txt, as of ours.
$(PEERS)/.installed: benchmarks/requirements-peers.txt constraints.txt
	$(PYTHON) -m venv --clear $(PEERS)
	$(PEERS)/bin/python $(PIP) --requirement $< --constraint constraints.txt
	@touch $@

# An environment whose interpreter finds the packages of .venv after its own. addsitedir and not a plain path, because our
# packages are installed as editable, which is a .pth file itself.
define make_venv
$(PYTHON) -m venv --clear $(1)
echo "import site; site.addsitedir('$$($(BIN)/python -c "$(SITE_PACKAGES)")')" \
	> "$$($(1)/bin/python -c "$(SITE_PACKAGES)")/zz-gspo-gym.pth"
endef
