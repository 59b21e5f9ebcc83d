# `make demo` and `make test` work on a fresh clone; the first call makes .venv.

TORCH_SPEC ?= torch==2.13.0
PYTHON ?= python3
VENV ?= .venv

PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q
# Without a GPU the CPU build of torch is preferred: it is smaller by gigabytes.
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,--extra-index-url https://download.pytorch.org/whl/cpu)

.PHONY: demo test test-full bench lint clean

demo: $(INSTALLED)
	OMP_NUM_THREADS=1 $(PY) examples/demo.py

test: lint
	@# What needs no rank processes runs beside what does; its output comes after.
	@log=$$(mktemp); $(PYTEST) -m "not slow and not ranks" >$$log 2>&1 & others=$$!; \
	$(PYTEST) -m "not slow and ranks"; ranks=$$?; \
	wait $$others; alone=$$?; cat $$log; rm -f $$log; exit $$((ranks | alone))

test-full: lint
	$(PYTEST)

bench: $(INSTALLED)
	OMP_NUM_THREADS=1 $(PY) -m benchmarks

lint: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# A torch that is there already is left alone.
$(INSTALLED): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "autopar needs Python 3.11 or later; set PYTHON")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -c "import torch" 2>/dev/null || $(PY) -m pip install --quiet --retries 1 $(TORCH_INDEX) "$(TORCH_SPEC)"
	$(PY) -m pip install --quiet --editable ".[dev]"
	touch $@
