# Targets make the environment first: .venv, once, and again when the metadata or the constraints change.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BIN := .venv/bin
STAMP := .venv/.installed
DOCS := .venv/.docs

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

$(STAMP): settings.ini setup.py pyproject.toml constraints.txt
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  for python in python3.11 python3.12 python3.13 python3 none; do \
	    $$python -c 'import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && break; \
	  done; \
	  if [ $$python = none ]; then echo "make: Python 3.11, 3.12 or 3.13 with venv is needed; none was found" >&2; exit 1; fi; \
	  echo "making .venv with $$($$python --version)"; $$python -m venv --clear .venv; \
	fi
	@$(BIN)/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' \
	|| $(BIN)/python tools/install_note.py
	@start=$$SECONDS; $(BIN)/python -m pip install --quiet -c constraints.txt \
	  --config-settings editable_mode=compat -e '.[dev,lab]'; touch $@; \
	echo "installed in $$((SECONDS - start)) s"

install: $(STAMP) ## make .venv and install everything into it; prints the size of the download first

demo: $(STAMP) ## train Chunk-GRPO, then CRD, on the pocket model and compare them; minutes on two cores; resumes where it stopped
	@start=$$SECONDS; \
	for name in demo crd; do \
	  out=runs/demo; if [ $$name = crd ]; then out=runs/demo-crd; fi; \
	  resume=; if [ -e $$out/run.json ]; then resume=--resume; fi; \
	  $(BIN)/chunk-grpo train runs/pocket/$$name.yaml --out $$out $$resume; \
	done; \
	$(BIN)/chunk-grpo compare runs/demo runs/demo-crd --out runs/demo/compare.html; \
	echo "wall time $$((SECONDS - start)) s"

test: $(STAMP) ## ruff, the book and the tests, with the time of each stage
	@$(BIN)/python tools/check.py

quick: $(STAMP) ## ruff, the pages and tests of the theory: what a contributor runs while editing
	@$(BIN)/python tools/check.py quick

package: $(STAMP) ## the scorer of HPSv3 beside the package hpsv3; makes its environment once
	@$(BIN)/python tools/check.py package

slow: $(STAMP) ## tests that take minutes
	@$(BIN)/python tools/check.py slow

sweep: $(STAMP) ## every setting with every method: trains differently or is rejected; goes on where it was
	@$(BIN)/python tools/sweep.py

gpu: $(STAMP) ## run the ten checks of a GPU that have no result yet; CHECK=3 for one of them
	@$(BIN)/python tools/gpu.py $(CHECK)

gpu-bundle: $(STAMP) ## prepare build/gpu, which runs these checks on a host that has no package registry
	@$(BIN)/python tools/gpu_bundle.py build/gpu

$(DOCS): $(STAMP)
	@$(BIN)/python -m pip install --quiet -c constraints.txt \
	  --config-settings editable_mode=compat -e '.[docs]'; touch $@

docs: $(DOCS) ## the book as a web site in _docs, which needs no network
	@$(BIN)/python tools/docs.py; echo "open _docs/index.html"

lab: $(STAMP) ## open the book in JupyterLab
	@TRANSFORMERS_VERBOSITY=error $(BIN)/jupyter lab nbs

prepare: $(STAMP) ## after editing notebooks: export the package, run the pages that changed, write README.md
	@$(BIN)/ruff format --quiet .
	@$(BIN)/nbdev-export
	@$(BIN)/python tools/house.py
	@$(BIN)/python tools/outputs.py
	@$(BIN)/nbdev-clean
	@$(BIN)/python tools/readme.py

pocket: $(STAMP) ## train the shipped pocket weights again from scratch, hours on two cores
	@$(BIN)/python research/pocket/train_pocket.py

constraints: $(DOCS) ## write constraints.txt from what is installed
	@{ echo '# The exact versions everything was tested with, on Python 3.11. Made by `make constraints`.'; \
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//'; } > constraints.new && mv constraints.new constraints.txt

clean: ## remove what tools leave behind; runs and .venv stay
	rm -rf build dist _proc _docs .pytest_cache .ruff_cache .hypothesis
	find chunk_grpo nbs tests tools research -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf

.PHONY: help install demo test quick package slow sweep gpu gpu-bundle docs lab prepare pocket constraints clean
