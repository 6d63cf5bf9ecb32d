# Every target that needs Python depends on `setup`, which makes .venv once and then skips.
# pip's own environment variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, ...) reach pip unchanged: on Linux,
# show it an index with CPU builds to save the 5 GB of CUDA libraries that torch otherwise brings.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
LAB_ARGS ?=
TEST_ARGS ?=
# Tests marked slow run where SLOW is set, as in `make test-all`.
SLOW ?=
CHAPTER ?=
PARITY ?=
# Python in the site's planner, from npm.
PYODIDE = 314.0.7
TPU_ARGS ?=
BENCHMARKS_ARGS ?=
# Scripts of `make test-all` beyond `make test`: tests/extra_<name>.sh
EXTRAS = gpu tpu huggingface types release slurm browser site

# `make PYTHON=python3.12` wants that version in .venv; plain `make` keeps the version that is there.
CHOSEN = $(if $(filter file,$(origin PYTHON)),,--chosen)
# Cells and tests that start `python` or `torchrun` find .venv's.
BIN = PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin
# JupyterLab refuses root unless told; a container's only user is often root.
ROOT = $(if $(filter 0,$(shell id -u)),--allow-root)
export CONSTRAINTS
# Set in many containers; each kernel, forkserver and script would compile the course's 150 files anew.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help setup lab test test-all test-oldest test-tpu parity benchmarks notebooks run site site-setup stamp lint format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

setup:  ## make or refresh .venv (PYTHON=python3.12; CONSTRAINTS= for the newest releases)
	@command -v "$(PYTHON)" >/dev/null || { echo "ignite-ddl needs Python 3.11 or newer; \
	there is no $(PYTHON) here. Install one, or name it: make lab PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" tools/setup_venv.py --name "$(PYTHON)" --constraints "$(CONSTRAINTS)" $(CHOSEN)

lab: setup  ## open your copy of the course, workbook/, in JupyterLab (LAB_ARGS=--no-browser)
	@$(BIN)/python tools/workbook.py
	@JUPYTER_CONFIG_PATH="$(CURDIR)/tools/jupyter$${JUPYTER_CONFIG_PATH:+:$$JUPYTER_CONFIG_PATH}" \
	$(BIN)/jupyter lab --LabApp.default_url=/lab/tree/workbook/00_start_here.ipynb \
	--LabApp.workspaces_dir="$(CURDIR)/workbook/.lab" $(ROOT) $(LAB_ARGS)

test: setup  ## unit tests, and every chapter executed and compared (TEST_ARGS=-x)
	$(BIN)/python -m pytest tests notebooks --nbval --nbval-current-env --nbval-cell-timeout=120 \
	-n 2 --dist loadfile $(if $(SLOW),,-m "not slow") $(TEST_ARGS)

test-all: SLOW = 1
test-all: test  ## test with the slow tests, then what needs more: TPU, Slurm, browser
	@ran="test"; skipped=; failed=; missing=; \
	for extra in $(EXTRAS); do \
	    script=tests/extra_$$extra.sh; \
	    if [ ! -e $$script ]; then missing="$$missing $$extra"; continue; fi; \
	    echo "test-all: $$extra ($$script)"; \
	    status=0; PATH="$(CURDIR)/.venv/bin:$$PATH" bash $$script || status=$$?; \
	    case $$status in 0) ran="$$ran $$extra";; 77) skipped="$$skipped $$extra";; *) failed="$$failed $$extra";; esac; \
	done; \
	echo "test-all: passed: $$ran; skipped:$${skipped:- none}; failed:$${failed:- none}; not written yet:$${missing:- none}"; \
	[ -z "$$failed" ]

test-oldest:  ## test with the oldest torch and Ignite that pyproject.toml allows, in .venv
	@mkdir -p build
	sed -e 's/^torch==.*/torch==2.11.0/' -e 's/^torchvision==.*/torchvision==0.26.0/' -e '/^setuptools==/d' \
	-e 's/^pytorch-ignite==.*/pytorch-ignite==0.5.4/' constraints.txt >build/oldest.txt
	$(MAKE) test SLOW=1 CONSTRAINTS=build/oldest.txt

test-tpu: setup  ## chapter 03 and its repair of Ignite on XLA's CPU device (7 GB in build/tpu-env), and their Jupyter kernel
	PATH="$(CURDIR)/.venv/bin:$$PATH" bash tests/extra_tpu.sh $(TPU_ARGS)

parity: setup  ## every form of parallelism against one process, the whole table (PARITY="tied zbv" for some)
	$(BIN)/python tests/parity.py $(PARITY)

benchmarks: setup build/benchmarks/.made  ## all ratios in one table, benchmarks/README.md (BENCHMARKS_ARGS=--quick)
	$(BIN)/python benchmarks/run.py $(BENCHMARKS_ARGS)

build/benchmarks/.made: benchmarks/requirements.txt | setup
	$(BIN)/pip install -q --no-deps --upgrade --target build/benchmarks -r benchmarks/requirements.txt
	touch $@

notebooks: setup  ## execute the chapters in place and normalise them (CHAPTER=04 for one)
	$(BIN)/python tools/notebooks.py execute $(CHAPTER)

run: setup  ## run one chapter without a browser, page under build/ (CHAPTER=04)
	@[ -n "$(CHAPTER)" ] || { echo "make run needs a chapter: make run CHAPTER=04" >&2; exit 1; }
	$(BIN)/python tools/notebooks.py run $(CHAPTER)

site-setup: setup  ## what `make site` needs beside .venv, from PyPI and npm, into build/
	$(BIN)/pip install -q --no-deps --upgrade --target build/site-tools -r docs/site/requirements.txt
	rm -rf build/site-static && mkdir -p build/site-static
	cd build/site-static && tar -xzf "$$(npm pack --silent pyodide@$(PYODIDE))" && rm pyodide-*.tgz && mv package pyodide
	cd build/site-static/pyodide && rm -f *.map *.d.ts *.html README.md pyodide.js

site: setup  ## the course as a searchable site, build/site/index.html, without the network (first: make site-setup)
	PYTHONPATH="$(CURDIR)/build/site-tools" $(BIN)/python tools/site.py

stamp: setup  ## write badges, set-up cells and the README's links from pyproject.toml
	$(BIN)/python tools/notebooks.py stamp

lint: setup  ## ruff on code and notebooks, and stamps that are up to date
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/notebooks.py stamp --check

format: setup  ## let ruff repair and format code and notebooks
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what runs leave behind, but for workbook/ (rm -rf .venv to start over)
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	find . \( -path ./.venv -o -path ./workbook \) -prune -o -type d \( -name __pycache__ -o -name .ipynb_checkpoints \) -print0 \
	| xargs -0 rm -rf
