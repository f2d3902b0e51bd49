# Each command below first does its own set-up, once (tools/set_up.sh).
#
#   PYTHON  the interpreter. A named interpreter gets its own environment:
#           `make test` uses .venv, `make test PYTHON=python3.12` uses .venv-3.12
#   NPROC   the number of processes that `make pretrain` starts
#   ARGS    flags that are passed to the command, e.g. make pretrain ARGS="--train-iters 20"
#   RUNS    run folders and studies that `make report` reads
#   JOBS    the number of tests that run in parallel; more than the cores, because tests also wait
#   CLUSTERS
#           the number of Slurm clusters on which test-cluster runs tests in parallel
PYTHON ?= python3
NPROC ?= 2
ARGS ?=
JOBS ?= 3
CLUSTERS ?= 2
RUNS ?= $(patsubst %/metrics.jsonl,%,$(wildcard runs/*/metrics.jsonl))
CONFIG ?= examples/quickstart.yaml

ifeq ($(origin PYTHON),file)
VENV := .venv
else
VENV := .venv-$(patsubst python%,%,$(notdir $(PYTHON)))
endif

# One thread per process: tests start further processes, a benchmark compares single threads, and
# the ranks of a training run share the cores.
export OMP_NUM_THREADS ?= 1
pretrain: OMP_NUM_THREADS = $(shell expr $$(getconf _NPROCESSORS_ONLN) / $(NPROC) \| 1)

RUN := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"
PYTEST := $(RUN) python -m pytest -n $(JOBS)
PROSE := README.md CONTRIBUTING.md CHANGELOG.md docs csrc examples Makefile pyproject.toml
SOURCES := moe_parallel tools tests setup.py pretrain_gpt_moe.py
CSRC := $(shell find csrc tests/cuda_host tests/csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null)

# $(error) instead of a failing recipe: the user sees one line, what is missing and what to do.
stop-if = $(if $(1),$(error $(1)))
set-up-now = $(call stop-if,$(shell tools/set_up.sh "$(PYTHON)" "$(VENV)"))
dry-run = $(findstring n,$(filter-out --%,$(firstword -$(MAKEFLAGS))))

.DEFAULT_GOAL := help
.PHONY: help set-up pretrain report test test-full test-cluster bench check format clean

help: ## show this list
	@echo "usage: make COMMAND [PYTHON=python3.12] [NPROC=2] [ARGS=\"--flag value\"]"
	@echo
	@awk -F ':[^#]*## ' '/^[a-z-]+:.*## / { printf "  %-12s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

set-up: ## create the environment, install the packages, compile the extension (the others do it too)
	@$(if $(dry-run),,$(set-up-now)):

# The program does not overwrite a run. The earlier run gets a number, unless ARGS continues it.
keep-earlier-run = \
	if [ -e runs/quickstart ]; then \
	    n=1; while [ -e runs/quickstart.$$n ]; do n=$$((n + 1)); done; \
	    mv runs/quickstart runs/quickstart.$$n && \
	    echo "kept the earlier run as runs/quickstart.$$n"; \
	fi

pretrain: set-up ## train the quickstart model (about 7 minutes on 2 cores) and report its held-out loss
	@$(if $(findstring --load,$(ARGS))$(findstring --save,$(ARGS)),:,$(keep-earlier-run))
	@$(RUN) python pretrain_gpt_moe.py --nproc-per-node $(NPROC) --config $(CONFIG) $(ARGS)

report: set-up ## write report.html about RUNS="runs/a runs/b" (default: all of runs/), one page, no network
	@$(if $(strip $(RUNS)),,$(error RUNS is empty and runs/ holds no run: name run folders, RUNS="runs/a runs/b"))
	@$(RUN) python tools/report.py $(RUNS) $(ARGS)

# One worker runs a whole file, because its tests share fixtures that take seconds. In the full tier
# some files take minutes, so there a worker without work takes tests from another.
test: set-up ## run the quick tier of the tests (about 5 minutes on 2 cores)
	@$(PYTEST) --dist loadfile --no-loadscope-reorder $(ARGS)

test-full: set-up ## run every test with all its combinations, and the long runs
	@$(PYTEST) --dist worksteal --full $(ARGS)

test-cluster: set-up ## run the job scripts on a Slurm cluster of namespaces (root and Slurm's packages; 15 to 32 minutes)
	@$(RUN) python -m pytest -n $(CLUSTERS) --dist worksteal --cluster --full tests/cluster $(ARGS)

bench-program = $(if $(findstring --routing,$(ARGS)),routing,$(if $(findstring --models,$(ARGS)),models,run))

bench: set-up ## time every operator, or whole models (ARGS="--models"), against its peers, one thread
	@$(RUN) python tools/bench/$(bench-program).py $(ARGS:--models=)

check: set-up ## run ruff, mypy, codespell and clang-format without changing files
	@$(RUN) ruff check $(SOURCES)
	@$(RUN) ruff format --check $(SOURCES)
	@$(RUN) mypy
	@$(RUN) codespell --dictionary=- --dictionary=tools/american.txt $(SOURCES) $(PROSE)
	@$(RUN) clang-format --dry-run -Werror $(CSRC)

format: set-up ## fix what a tool can fix of the findings of make check
	@$(RUN) ruff check --fix $(SOURCES)
	@$(RUN) ruff format $(SOURCES)
	@$(RUN) clang-format -i $(CSRC)

clean: ## remove environments, builds and caches; keep runs/
	rm -rf .venv .venv-* build dist *.egg-info moe_parallel/*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache
	find moe_parallel tests tools -name __pycache__ -prune -exec rm -rf {} +
