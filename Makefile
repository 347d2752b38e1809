# Two commands do everything: `make quickstart` trains on this machine, `make test` checks the checkout (`make more` and
# `make nightly` check what needs other software or more time). Both create .venv and install what they need if that has not happened yet.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := -m pip install --quiet --disable-pip-version-check
PIP_INSTALL := $(BIN)/python $(PIP) --constraint constraints.txt
# Into another environment for tests: few of its modules are ever imported, and Python compiles those then. Not the
# suites' ones: what it warns of then, in old code, a test would take for an error.
PIP_OTHER := $(PIP) --no-compile

# Other projects' environments, each set with an interpreter of its own, which finds our packages after its own.
SUITES := .venv-foreign
VERIFIERS := .venv-verifiers
VLLM := .venv-vllm
BROWSER := .venv-browser
CLUSTER := .venv-cluster
PEERS := .venv-peers
# The oldest openai package that we take, in a folder before the one of .venv: 2.x stands on httpx, 3.x on httpx2.
OPENAI_2 := .openai-2
OPENAI_TESTS := tests/unit/engine/endpoint/test_http_engine.py tests/fault/test_http_engine_faults.py \
	tests/unit/remote/gateway/test_app.py tests/unit/remote/gateway/test_model_app.py \
	tests/fault/test_gateway_retries.py tests/contract/test_openai_agent.py \
	tests/unit/remote/serve/test_task_app_server.py
# Two processes of one thread each: they share out the tests, and no test's deadline meets another's threads.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2
# Hundreds of processes import the package: its bytecode is kept, whatever the shell says.
export PYTHONDONTWRITEBYTECODE :=
SITE_PACKAGES := import sysconfig; print(sysconfig.get_path('purelib'))

.PHONY: quickstart test more nightly lint types unit slow foreign openai-2 vllm browser cluster environments benchmark bench peers clean

quickstart: $(VENV)/.run
	$(BIN)/python -m gspo_gym.train configs/quickstart.toml --set-aside

# What needs .venv alone. One stage that fails keeps no other from running.
test: $(VENV)/.dev
	$(MAKE) --keep-going --jobs 2 unit lint types

# What needs other software, or more minutes. Two stages at a time, the longest first; the two that use both cores apart.
more: $(VENV)/.dev
	$(MAKE) --keep-going --jobs 2 vllm slow foreign cluster browser openai-2

# What one landing can do without: several run seeds, mutation lists, kills by the dozen, new seeds for what is drawn.
nightly: $(VENV)/.dev
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

foreign: $(VENV)/.dev $(SUITES)/.installed $(VERIFIERS)/.installed
	$(SUITES)/bin/python -m pytest -m "not verifiers" tests/foreign
	$(VERIFIERS)/bin/python -m pytest -m verifiers tests/foreign

openai-2: $(VENV)/.dev $(OPENAI_2)/.installed
	PYTHONPATH=$(OPENAI_2) $(BIN)/python -c "import openai; assert openai.__version__ == '2.25.0', openai"
	PYTHONPATH=$(OPENAI_2) $(BIN)/python -m pytest -m "not slow" $(OPENAI_TESTS)

vllm: $(VENV)/.dev $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest tests/vllm

browser: $(VENV)/.dev $(BROWSER)/.installed
	OMP_NUM_THREADS=1 $(BROWSER)/bin/python -m pytest tests/browser

cluster: $(VENV)/.dev $(CLUSTER)/.installed
	OMP_NUM_THREADS=1 $(CLUSTER)/bin/python -m pytest --numprocesses 2 --dist loadfile tests/cluster

environments: $(CLUSTER)/.installed $(BROWSER)/.installed $(VLLM)/.installed $(SUITES)/.installed $(VERIFIERS)/.installed $(OPENAI_2)/.installed

benchmark: $(VENV)/.run
	$(BIN)/python -m benchmarks engines

# The quick ones, compared with the last time on this machine; with the peer beside them after `make peers`.
bench: $(VENV)/.run
	$(BIN)/python -m benchmarks quick --keep benchmarks/kept.jsonl

peers: $(PEERS)/.installed

clean:
	rm -rf $(VENV) $(SUITES) $(VERIFIERS) $(VLLM) $(BROWSER) $(CLUSTER) $(OPENAI_2) $(PEERS) build dist *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.run

$(SUITES)/.installed: tests/foreign/requirements-suites.txt tests/foreign/requirements-translators.txt constraints.txt \
		| $(VENV)/bin/python
	$(PYTHON) -m venv --clear $(SUITES)
	$(SUITES)/bin/python $(PIP) --requirement $< --constraint constraints.txt
	$(SUITES)/bin/python $(PIP) --no-deps --requirement tests/foreign/requirements-translators.txt
	$(call see_ours,$(SUITES))

$(VERIFIERS)/.installed: tests/foreign/requirements-verifiers.txt | $(VENV)/bin/python
	$(PYTHON) -m venv --clear $(VERIFIERS)
	$(VERIFIERS)/bin/python $(PIP_OTHER) --requirement $<
	$(call see_ours,$(VERIFIERS))

$(OPENAI_2)/.installed: | $(VENV)/bin/python
	$(BIN)/python $(PIP_OTHER) --no-deps --upgrade --target $(OPENAI_2) openai==2.25.0
	@touch $@

# The torch of constraints.txt comes first, or pip takes another build of it. vLLM's wheel asks for torchvision and its
# kin, whose builds for GPUs fail to load beside that torch; it runs without them.
$(VLLM)/.installed: tests/vllm/requirements.txt constraints.txt | $(VENV)/bin/python
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/python $(PIP_OTHER) --constraint constraints.txt torch
	$(VLLM)/bin/python $(PIP_OTHER) --requirement $<
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(call see_ours,$(VLLM))

# The peer of `python -m benchmarks peers`: it sees none of our packages. The torch of constraints.txt, as of ours.
$(PEERS)/.installed: benchmarks/requirements-peers.txt constraints.txt
	$(PYTHON) -m venv --clear $(PEERS)
	$(PEERS)/bin/python $(PIP) --requirement $< --constraint constraints.txt
	@touch $@

# The browsers are Debian's; on another system, whatever is called chromium and firefox.
$(BROWSER)/.installed: tests/browser/requirements.txt | $(VENV)/bin/python
	$(PYTHON) -m venv --clear $(BROWSER)
	$(BROWSER)/bin/python $(PIP_OTHER) --requirement $<
	tests/browser/install_browsers
	$(call see_ours,$(BROWSER))

$(CLUSTER)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PYTHON) -m venv --clear $(CLUSTER)
	$(CLUSTER)/bin/python $(PIP_OTHER) --constraint constraints.txt ray
	$(call see_ours,$(CLUSTER))

# addsitedir and not a plain path, because our packages are installed as editable, which is a .pth file itself.
define see_ours
echo "import site; site.addsitedir('$$($(BIN)/python -c "$(SITE_PACKAGES)")')" \
	> "$$($(1)/bin/python -c "$(SITE_PACKAGES)")/zz-gspo-gym.pth"
@touch $(1)/.installed
endef
