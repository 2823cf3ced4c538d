# `make demo` and `make test` each work alone on a fresh clone; `make help` lists the rest.
.DEFAULT_GOAL := help
.PHONY: help setup demo benchmark benchmark-quick test lint lock

# VENV=/path names an environment that you have: it is checked, and nothing is installed into it.
ifeq ($(strip $(VENV)),)
PY := .venv/bin/python
SETUP := tools/setup_env.sh
else
PY := $(VENV)/bin/python
SETUP := tools/setup_env.sh --check "$(VENV)"
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
endif

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo 'PYTHON=/path/to/python3.10 chooses the Python that .venv is made from.'
	@echo 'VENV=/path/to/env uses an environment of your own; nothing is installed into it.'

setup:  ## Install the pinned environment into .venv, if that is not done yet
	@$(SETUP)

demo: setup  ## Pretrain, export and fine-tune on the built-in data set, on CPU
	@"$(PY)" tools/demo.py

benchmark: setup  ## Repeat the recorded benchmark: methods and trends, 3 seeds; goes on where it was
	@"$(PY)" tools/recorded_benchmark.py

benchmark-quick: setup  ## The same with one seed and fewer cells
	@"$(PY)" tools/recorded_benchmark.py --quick

test: setup  ## Run the tests, as many at a time as there are cores
	@OMP_NUM_THREADS=1 "$(PY)" -m pytest -n auto --maxprocesses 4 --dist worksteal

lint: setup  ## Check the style with ruff and black
	@"$(PY)" -m ruff check .
	@"$(PY)" -m black --check .

lock:  ## Renew requirements.lock from requirements.in (needs uv and an index)
	UV_CUSTOM_COMPILE_COMMAND="make lock" uv pip compile --quiet --generate-hashes \
		--python-version 3.10 --python-platform linux --override overrides.txt requirements.in -o requirements.lock
