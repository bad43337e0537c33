# The two commands of the README: `make run` and `make test`. Each sets up what it needs, once.
PYTHON ?= python3
# Pinned: plain pip then takes one build everywhere (on a GPU host PyTorch's CUDA build), and Triton's interpreter differs
# between versions.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
CUTEDSL ?= nvidia-cutlass-dsl==4.8.1 apache-tvm-ffi
PIN_THREADS := OMP_PROC_BIND=true OMP_PLACES="{0},{1}"

VENV := .venv
BIN := $(VENV)/bin
LEAN := .venv-lean
LEAN_BIN := $(LEAN)/bin

.PHONY: run test lint unit numerics kernels cutedsl docs wheel regenerate clean

run: $(VENV)/ready
	$(BIN)/gdn-capabilities --config qwen3-next-80b-a3b
	$(PIN_THREADS) $(BIN)/python examples/generate.py

test: lint unit numerics kernels cutedsl docs wheel

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet -e ".[dev,docs]"
	touch $@

$(VENV)/triton: $(VENV)/ready
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/pip install --quiet "$(TRITON)"
	touch $@

$(VENV)/cutedsl: $(VENV)/ready
	$(BIN)/pip install --quiet $(CUTEDSL)
	touch $@

$(LEAN)/ready: pyproject.toml
	$(PYTHON) -m venv $(LEAN)
	$(LEAN_BIN)/pip install --quiet -e . "pytest>=8" "hypothesis>=6.100" "hatchling>=1.27" editables
	touch $@

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The framework without any framework: no torch in this environment.
unit: $(LEAN)/ready
	$(LEAN_BIN)/python -m pytest -q tests/unit tests/plugins tests/cli

numerics: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 tests -m "not interpret and not cross_compile and not gpu and not large"

kernels: $(VENV)/triton
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 tests/backends/triton -m interpret
	$(BIN)/python -m pytest -q -n 2 tests/backends/triton -m "cross_compile and not slow"

# Compiles for each architecture, and runs what was compiled in an interpreter of PTX.
cutedsl: $(VENV)/cutedsl
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 tests/backends/cutedsl -m "cross_compile and not slow"

docs: $(VENV)/ready
	$(BIN)/python tools/generate_docs.py --check
	$(BIN)/mkdocs build --strict --quiet

wheel: $(VENV)/ready
	$(BIN)/python tools/check_wheel.py

regenerate: $(VENV)/ready
	$(BIN)/python tools/generate_docs.py

clean:
	rm -rf $(VENV) $(LEAN) build dist site
